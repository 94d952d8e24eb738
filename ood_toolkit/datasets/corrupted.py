"""The user's own images under the corruptions of ImageNet-C, made on the fly."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ood_toolkit.corruptions import CORRUPTIONS, SEVERITIES
from ood_toolkit.datasets.fingerprints import Fingerprinted
from ood_toolkit.datasets.images import ImageSet

if TYPE_CHECKING:
    from PIL.Image import Image


class CorruptedImages(Fingerprinted):
    """A set under one corruption at one severity. Needs `pip install corrupt-tta`.

    Images are resized to 256 on the short side and cropped to 224 × 224 first, as the authors of ImageNet-C did. The
    same image, corruption, severity and seed give the same pixels, from any process. Use it for images of your own,
    or to see a trend: the package follows the published recipe, but its pixels are not those of the published files,
    so numbers are not comparable with those on ImageNet-C itself.

    Args:
        images: the clean set.
        corruption: one of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: of noise, flakes and angles.
        name: how records call it; the clean set's name, corruption and severity by default.

    Raises:
        ValueError: unknown corruption or severity, or the package is missing.
    """

    def __init__(self, images: ImageSet, corruption: str, severity: int, *, seed: int = 0, name: str = "") -> None:
        known = [name for group in CORRUPTIONS.values() for name in group]
        if corruption not in known:
            raise ValueError(f"no corruption is named {corruption!r}; known: {', '.join(known)}")
        if severity not in SEVERITIES:
            raise ValueError(f"severity must be one of {SEVERITIES}, got {severity}")
        self._version = _package()[1]
        self.images = images
        self.corruption = corruption
        self.severity = severity
        self.seed = seed
        self.name = name or f"{images.name}/{corruption}/{severity}"
        self.ids: Sequence[str] = images.ids
        self.labels: Tensor = images.labels
        self.accepted: Tensor | None = getattr(images, "accepted", None)

    def __len__(self) -> int:
        return len(self.images)

    def _hash(self) -> str:
        """Hash of the clean set's fingerprint, the corruption, its severity and seed, and the package's version."""
        facts = (self.images.fingerprint, self.corruption, self.severity, self.seed, self._version)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def open(self, row: int) -> "Image":
        """The corrupted image, 224 × 224."""
        from PIL import Image

        key = f"{self.seed}\0{self.corruption}\0{self.severity}\0{self.ids[row]}"
        number = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:4])
        clean = np.array(_cropped(self.images.open(row)))
        with _seeded(number):
            pixels = _package()[0](clean, severity=self.severity, corruption_name=self.corruption)
        return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _cropped(image: "Image") -> "Image":
    from PIL import Image

    short = min(image.size)
    width, height = (int(256 * side / short) for side in image.size)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    whole = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    return whole.crop((left, top, left + 224, top + 224))


@contextmanager
def _seeded(number: int) -> Iterator[None]:
    """The package draws from NumPy's global generator, which is put back afterwards."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(number)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


def _package() -> tuple[Callable[..., Any], str]:
    try:
        from corrupt_tta import __version__, corrupt  # pyright: ignore
    except ImportError:
        raise ValueError("corrupting images needs the optional package: pip install corrupt-tta") from None
    return corrupt, __version__
