"""CIFAR-10 and its re-collected test sets: arrays in files, read without pickle."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ood_toolkit.datasets.images import ArrayImages

if TYPE_CHECKING:
    from ood_toolkit.datasets.catalogue import LabelRule

_RECORD = 1 + 3 * 32 * 32


def cifar_images(rule: "LabelRule", folder: Path, *, name: str) -> ArrayImages:
    """The test images, 32×32 RGB, with labels 0 to 9.

    Args:
        rule: which files: "cifar-binary", "cifar-npy" or "cifar-npz".
        folder: where they lie.
        name: how records call the set.

    Raises:
        ValueError: a file is missing or has another shape than it should.
    """
    try:
        if rule == "cifar-binary":
            pixels, labels = _binary(_file(folder, "test_batch.bin"))
        elif rule == "cifar-npy":
            pixels = np.load(_file(folder, "cifar10.1_v6_data.npy"), allow_pickle=False)
            labels = np.load(_file(folder, "cifar10.1_v6_labels.npy"), allow_pickle=False)
        else:
            with np.load(_file(folder, "cifar102_test.npz"), allow_pickle=False) as arrays:
                pixels, labels = arrays["images"], arrays["labels"]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{name} cannot be read from {str(folder)!r}: {error}") from None
    if pixels.ndim != 4 or pixels.shape[1:] != (32, 32, 3) or pixels.dtype != np.uint8 or len(labels) != len(pixels):
        raise ValueError(f"{name}: expected (N, 32, 32, 3) uint8 and N labels, got {pixels.shape} and {labels.shape}")
    return ArrayImages(pixels, name=name, labels=[int(label) for label in labels])


def _binary(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """One record per image: a label byte, then the red, green and blue planes."""
    content = np.fromfile(file, dtype=np.uint8)
    if len(content) % _RECORD:
        raise ValueError(f"{file.name} has {len(content)} bytes, which is no whole number of {_RECORD}-byte records")
    records = content.reshape(-1, _RECORD)
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0]


def _file(folder: Path, name: str) -> Path:
    found = next((path for path in (folder / name, folder / "cifar-10-batches-bin" / name) if path.is_file()), None)
    if found is None:
        raise ValueError(f"{name} is not there")
    return found
