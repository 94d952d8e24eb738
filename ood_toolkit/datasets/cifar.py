"""CIFAR-10 and what OpenOOD holds against it: arrays in files, read without pickle."""

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from ood_toolkit.datasets.images import ArrayImages

if TYPE_CHECKING:
    from ood_toolkit.datasets.catalogue import LabelRule

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""In the order of the labels."""
FILES: "Mapping[LabelRule, tuple[str, ...]]" = MappingProxyType(
    {
        "cifar-binary": ("test_batch.bin",),
        "cifar-train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "cifar-npy": ("cifar10.1_v6_data.npy", "cifar10.1_v6_labels.npy"),
        "cifar-npz": ("cifar102_test.npz",),
        "cifar-100": ("test.bin",),
        "svhn-mat": ("test_32x32.mat",),
        "mnist-idx": ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"),
    }
)
"""What lies in the folder of a set, by its rule."""
_FOLDERS = ("", "cifar-10-batches-bin", "cifar-100-binary")
_PLANES = 3 * 32 * 32
_IDX_IMAGES = 0x00000803

_Arrays = tuple[np.ndarray, np.ndarray | None]


def array_images(rule: "LabelRule", folder: Path, *, name: str) -> ArrayImages:
    """The images: 32×32 RGB with labels 0 to 9 for CIFAR-10's, without labels for the others, which are other classes.

    Args:
        rule: which files, see `FILES`.
        folder: where they lie.
        name: how records call the set.

    Raises:
        ValueError: a file is missing or has another shape than it should.
    """
    try:
        pixels, labels = _READERS[rule]([_file(folder, file) for file in FILES[rule]])
    except (OSError, KeyError, ValueError, EOFError) as error:
        raise ValueError(f"{name} cannot be read from {str(folder)!r}: {error}") from None
    shape = (28, 28) if rule == "mnist-idx" else (32, 32, 3)
    count = len(pixels) if labels is None else len(labels)
    if pixels.shape[1:] != shape or pixels.dtype != np.uint8 or count != len(pixels):
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name}: expected (N, {expected}) uint8 and N labels, got {pixels.shape} and {count} labels")
    return ArrayImages(pixels, name=name, labels=None if labels is None else [int(label) for label in labels])


def has_arrays(rule: "LabelRule", folder: Path) -> bool:
    """Whether some file of the set lies there."""
    return any(path.is_file() for file in FILES[rule] for path in _candidates(folder, file))


def _binary(files: list[Path], label_bytes: int = 1) -> _Arrays:
    """One record per image: its label bytes, the last of which counts, then the red, green and blue planes."""
    size = label_bytes + _PLANES
    records = []
    for file in files:
        content = np.fromfile(file, dtype=np.uint8)
        if len(content) % size:
            raise ValueError(f"{file.name} has {len(content)} bytes, which is no whole number of {size}-byte records")
        records.append(content.reshape(-1, size))
    whole = np.concatenate(records)
    planes = whole[:, label_bytes:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), whole[:, label_bytes - 1]


def _npz(files: list[Path]) -> _Arrays:
    with np.load(files[0], allow_pickle=False) as arrays:
        return arrays["images"], arrays["labels"]


def _mat(files: list[Path]) -> _Arrays:
    """MATLAB has the images along the last axis."""
    from scipy.io import loadmat

    return np.ascontiguousarray(loadmat(files[0], variable_names=["X"])["X"].transpose(3, 0, 1, 2)), None


def _idx(files: list[Path]) -> _Arrays:
    """A header of four big-endian integers (kind, images, rows, columns), then the pixels."""
    parts = []
    for file in files:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        kind, *shape = np.frombuffer(content[:16], dtype=">u4").tolist()
        if kind != _IDX_IMAGES or len(content) != 16 + int(np.prod(shape)):
            raise ValueError(f"{file.name} is no whole file of images in the IDX format")
        parts.append(np.frombuffer(content, dtype=np.uint8, offset=16).reshape(shape))
    return np.concatenate(parts), None


_READERS: "Mapping[LabelRule, Callable[[list[Path]], _Arrays]]" = MappingProxyType(
    {
        "cifar-binary": _binary,
        "cifar-train": _binary,
        "cifar-npy": lambda files: (np.load(files[0], allow_pickle=False), np.load(files[1], allow_pickle=False)),
        "cifar-npz": _npz,
        "cifar-100": lambda files: (_binary(files, label_bytes=2)[0], None),
        "svhn-mat": _mat,
        "mnist-idx": _idx,
    }
)


def _candidates(folder: Path, name: str) -> list[Path]:
    return [folder / sub / file for sub in _FOLDERS for file in (name, f"{name}.gz")]


def _file(folder: Path, name: str) -> Path:
    found = next((path for path in _candidates(folder, name) if path.is_file()), None)
    if found is None:
        raise ValueError(f"{name} is not there")
    return found
