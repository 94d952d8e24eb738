"""Image sets made of others: some rows of one, or several behind each other."""

import bisect
import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ood_toolkit.datasets.fingerprints import Fingerprinted
from ood_toolkit.datasets.images import ImageSet
from ood_toolkit.datasets.wrapped import WrappedImages

if TYPE_CHECKING:
    from PIL.Image import Image


class SubsetImages(WrappedImages):
    """Some rows of a set, in the given order.

    Choose it over a `Part` where the other rows need not go through the model at all.

    Args:
        images: the set.
        rows: row numbers, each at most once.
        name: how records call the subset; the set's own name by default.
    """

    def __init__(self, images: ImageSet, rows: Sequence[int], *, name: str = "") -> None:
        super().__init__(images)
        self.rows = list(rows)
        self.name = name or images.name
        self.ids: Sequence[str] = [images.ids[row] for row in self.rows]
        chosen = torch.tensor(self.rows, dtype=torch.int64)
        self.labels = images.labels[chosen]
        accepted: Tensor | None = getattr(images, "accepted", None)
        self.accepted = None if accepted is None else accepted[chosen]
        """(K, A) the classes that are right for each image, padded with `UNKNOWN`; None where there is one label."""

    def _hash(self) -> str:
        """Hash of the whole set's fingerprint and the rows."""
        return hashlib.sha256(f"{self.images.fingerprint}\0{self.rows}".encode()).hexdigest()

    def open(self, row: int) -> "Image":
        """The image, as the set opens it."""
        return self.images.open(self.rows[row])


class JoinedImages(Fingerprinted):
    """Several sets as one, in order, so that one pass and one store serve them all.

    Args:
        members: the sets, with different names; a name and a slash come before the member's identifiers.
        name: how records call the whole.
    """

    def __init__(self, members: Sequence[ImageSet], *, name: str) -> None:
        names = [member.name for member in members]
        if not members or len(set(names)) < len(names):
            raise ValueError(f"joined sets need different names, got {names}")
        self.members = list(members)
        self.name = name
        self.ids: Sequence[str] = [f"{member.name}/{image}" for member in members for image in member.ids]
        self.labels: Tensor = torch.cat([member.labels for member in members])
        self._ends = list(accumulate(len(member) for member in members))

    def __len__(self) -> int:
        return self._ends[-1]

    def _hash(self) -> str:
        """Hash of the members' fingerprints."""
        return hashlib.sha256("\0".join(member.fingerprint for member in self.members).encode()).hexdigest()

    def rows(self, name: str) -> Tensor:
        """(K,) the rows of the member of that name."""
        position = [member.name for member in self.members].index(name)
        end = self._ends[position]
        return torch.arange(end - len(self.members[position]), end)

    def open(self, row: int) -> "Image":
        """The image, as its member opens it."""
        if row < 0:
            row += len(self)
        position = bisect.bisect_right(self._ends, row)
        start = self._ends[position - 1] if position else 0
        return self.members[position].open(row - start)


def below(images: ImageSet, folder: str) -> SubsetImages:
    """The images whose identifier starts with a folder, e.g. one corruption and severity: "defocus_blur/3".

    Raises:
        ValueError: there is none.
    """
    prefix = folder.rstrip("/") + "/"
    rows = [row for row, image in enumerate(images.ids) if image.startswith(prefix)]
    if not rows:
        raise ValueError(f"{images.name!r} has no folder {folder!r}")
    return SubsetImages(images, rows, name=f"{images.name}/{folder.rstrip('/')}")
