"""The base of sets that show another set's images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ood_toolkit.datasets.fingerprints import Fingerprinted
from ood_toolkit.datasets.images import ImageSet

if TYPE_CHECKING:
    from PIL.Image import Image


class WrappedImages(Fingerprinted):
    """Another set, row by row; a subclass changes what it must.

    Args:
        images: the set.
    """

    def __init__(self, images: ImageSet) -> None:
        self.images = images
        self.name = images.name
        self.ids: Sequence[str] = images.ids
        self.labels: Tensor = images.labels

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def root(self) -> str:
        """The folder that `ids` are relative to, or "" where there is none."""
        return str(getattr(self.images, "root", ""))

    def _hash(self) -> str:
        return self.images.fingerprint

    def open(self, row: int) -> "Image":
        """The image, as the set opens it."""
        return self.images.open(row)
