"""Sets in which several classes are right for one image, and borders that must go."""

import hashlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from ood_toolkit.datasets.images import ImageSet
from ood_toolkit.datasets.wrapped import WrappedImages
from ood_toolkit.outputs import UNKNOWN, Outputs

if TYPE_CHECKING:
    from PIL.Image import Image


class AcceptingImages(WrappedImages):
    """A set in which a prediction is right if it is any of an image's classes.

    `labels` holds the first of them; `labels_for` chooses by what a model sees.

    Args:
        images: the set.
        accepted: the classes of every image; none for an unknown label.
    """

    def __init__(self, images: ImageSet, accepted: Sequence[Collection[int]]) -> None:
        if len(accepted) != len(images):
            raise ValueError(
                f"{len(images)} images of {images.name!r} need as many sets of classes, not {len(accepted)}"
            )
        super().__init__(images)
        width = max([1, *map(len, accepted)])
        padded = [[*sorted(classes), *[UNKNOWN] * (width - len(classes))] for classes in accepted]
        self.accepted = torch.tensor(padded, dtype=torch.int64).reshape(-1, width)
        self.labels = self.accepted[:, 0].clone()


class TrimmedImages(WrappedImages):
    """A set without the outermost pixels of its images.

    Args:
        images: the set.
        border: pixels to cut off on each side.
    """

    def __init__(self, images: ImageSet, border: int) -> None:
        super().__init__(images)
        self.border = border

    def _hash(self) -> str:
        """Hash of the set's fingerprint and the border."""
        return hashlib.sha256(f"{self.images.fingerprint}\0border {self.border}".encode()).hexdigest()

    def open(self, row: int) -> "Image":
        """The image without its border."""
        image = self.images.open(row)
        width, height = image.size
        return image.crop((self.border, self.border, width - self.border, height - self.border))


def labels_for(
    images: ImageSet, rows: Int[Tensor, " N"], outputs: Outputs, classes: Int[Tensor, " K"] | None = None
) -> Int[Tensor, " N"]:
    """The labels of these rows; where several classes are right, the one of them that the model finds most likely.

    So a prediction is right exactly if it is any of the image's classes, top-5 likewise.

    Args:
        images: any set.
        rows: of the set.
        outputs: of those rows; the logits are read only where several classes are right.
        classes: those that the outputs know, in their order, where a mask has cut them; labels are then positions among
            them, and accepted classes outside the mask do not count.
    """
    accepted: Tensor | None = getattr(images, "accepted", None)
    candidates = images.labels[rows][:, None] if accepted is None else accepted[rows]
    if classes is not None:
        positions = torch.full((max(int(classes.max()), int(candidates.max())) + 2,), UNKNOWN, dtype=torch.int64)
        positions[classes.cpu()] = torch.arange(len(classes))
        candidates = positions[candidates]  # UNKNOWN (-1) reads the last entry, which stays UNKNOWN
    if accepted is None:
        return candidates[:, 0]
    logits = outputs.logits
    values = logits.gather(1, candidates.clamp(min=0).to(logits.device)).float().cpu()
    best = values.masked_fill(candidates == UNKNOWN, -torch.inf).argmax(dim=1, keepdim=True)
    return candidates.gather(1, best).squeeze(1)
