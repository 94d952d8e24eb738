"""Sets of images: where they lie, what they are called, which class they show."""

import csv
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ood_toolkit.datasets.classes import class_list
from ood_toolkit.datasets.fingerprints import Fingerprinted, stamp
from ood_toolkit.outputs import UNKNOWN

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


class ImageSet(Protocol):
    """N images in a fixed order, each with an identifier and a label."""

    name: str
    """How records call the set."""
    ids: Sequence[str]
    """One identifier per image, unique within the set."""
    labels: Tensor
    """(N,) int64 class indices, `UNKNOWN` where there is none."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the images or their order may have changed. Labels do not count."""
        ...

    def __len__(self) -> int: ...

    def open(self, row: int) -> "Image":
        """The decoded image. Raises `OSError` or `ValueError` where the file is broken."""
        ...


class FolderImages(Fingerprinted):
    """The images under a folder, in order of their relative path.

    Args:
        root: the folder.
        name: how records call the set; the folder's name by default.
        labels: class index by relative path; images that are not in it have an unknown label.
        paths: relative paths to read, in this order; all images by default. They are not looked for until opened.

    Raises:
        ValueError: the folder is missing, is not a folder, or holds no image.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        name: str = "",
        labels: Mapping[str, int] | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            kind = "is not a folder" if self.root.exists() else "does not exist"
            raise ValueError(f"image folder {str(root)!r} {kind}")
        self.name = name or self.root.resolve().name
        self.ids: Sequence[str] = image_paths(self.root) if paths is None else list(paths)
        if not self.ids:
            known = ", ".join(sorted(IMAGE_SUFFIXES))
            raise ValueError(f"image folder {str(root)!r} holds no image (looked for {known})")
        self.labels = torch.tensor([(labels or {}).get(i, UNKNOWN) for i in self.ids], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def _hash(self) -> str:
        """SHA-256 over the folder, relative paths, sizes and modification times."""
        # the folder too: archives unpack to equal names, sizes and times, and uncompressed images have equal sizes
        digest = hashlib.sha256(f"{self.root.resolve()}\n".encode("utf-8", "surrogateescape"))
        content = hashlib.sha256()
        for name in self.ids:
            status = (self.root / name).stat()
            digest.update(stamp(name, status))
            content.update(f"{name}\0{status.st_size}\n".encode("utf-8", "surrogateescape"))
        self._content = content.hexdigest()
        return digest.hexdigest()

    @property
    def content(self) -> str:
        """SHA-256 over relative paths and sizes: the same on every machine that holds the set."""
        return self._content if self.fingerprint else ""

    def open(self, row: int) -> "Image":
        """The image in RGB, whatever its file holds (grey, palette, CMYK, alpha)."""
        from PIL import Image

        with Image.open(self.root / self.ids[row]) as image:
            return as_rgb(image)


class ArrayImages:
    """Images that are in memory already.

    Args:
        pixels: (N, H, W) or (N, H, W, 3), uint8.
        name: how records call the set.
        labels: (N,) class indices, or None where all are unknown.
        ids: identifiers; by default the row numbers behind the set's name.
    """

    def __init__(
        self,
        pixels: "np.ndarray",
        *,
        name: str,
        labels: Sequence[int] | None = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        self.pixels = pixels
        self.name = name
        self.ids: Sequence[str] = list(ids) if ids is not None else [f"{name}/{row:05d}" for row in range(len(pixels))]
        self._fingerprint = self._hash()
        self.labels = torch.tensor([UNKNOWN] * len(pixels) if labels is None else list(labels), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over shape and pixels."""
        return self._fingerprint

    @property
    def content(self) -> str:
        """The same."""
        return self._fingerprint

    def _hash(self) -> str:
        return hashlib.sha256(repr(self.pixels.shape).encode() + self.pixels.tobytes()).hexdigest()

    def open(self, row: int) -> "Image":
        """The image, in grey or RGB as the array has it."""
        from PIL import Image

        return Image.fromarray(self.pixels[row])


def as_rgb(image: "Image") -> "Image":
    """The image in RGB with 8 bits per channel; 16-bit grey is scaled, where Pillow's own conversion would clip it.

    Raises:
        ValueError: floating-point pixels, whose range is unknown.
    """
    from PIL import Image

    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range; save the image with 8 or 16 bits")
    if image.mode.startswith("I"):
        import numpy as np

        grey = np.asarray(image).astype(np.int64)
        return Image.fromarray((grey >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def image_paths(root: Path) -> list[str]:
    """Relative POSIX paths of all image files under `root`, sorted; hidden files and other files are skipped."""
    return sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def labels_from_file(file: Path, images: ImageSet, class_index: Mapping[str, int]) -> dict[str, int]:
    """Reads class indices from a comma- or tab-separated file: image path, then class.

    A first line that names its columns is understood (`file` or `image` or `path`; `index`, `label` or `class`,
    `wnid`); otherwise the first two columns count. A class is an index, or a key of `class_index`.

    Raises:
        ValueError: unreadable lines, names that none of the images has, or images without a label.
    """
    try:
        lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"labels file {str(file)!r} cannot be read: {error}") from None
    if not lines:
        raise ValueError(f"labels file {str(file)!r} is empty")
    rows = list(csv.reader(lines, delimiter="\t" if "\t" in lines[0] else ","))
    header = [cell.strip().lstrip("#").strip().lower() for cell in rows[0]]
    image = next((header.index(n) for n in ("file", "image", "path", "filename") if n in header), None)
    column = next((header.index(n) for n in ("index", "label", "class", "wnid") if n in header), None)
    has_header = image is not None and column is not None
    labels = {}
    for number, row in enumerate(rows[1:] if has_header else rows, 2 if has_header else 1):
        try:
            name, label = (row[image], row[column]) if has_header else (row[0], row[1])  # pyright: ignore
            index = int(label) if label.strip().lstrip("-").isdecimal() else class_index[label.strip()]
            if labels.setdefault(name.strip(), index) != index:
                raise ValueError(
                    f"labels file {str(file)!r}, line {number}: {name.strip()!r} already has class "
                    f"{labels[name.strip()]}"
                )
        except (IndexError, KeyError):
            raise ValueError(f"labels file {str(file)!r}, line {number}: no class in {row!r}") from None
    _match(labels, images, file)
    return labels


def _match(labels: Mapping[str, int], images: ImageSet, file: Path) -> None:
    known = set(images.ids)
    strangers = [name for name in labels if name not in known]
    if strangers:
        raise ValueError(
            f"labels file {str(file)!r} names {len(strangers)} images that are not in {_place(images)!r}, "
            f"first {strangers[:3]}"
        )
    bare = [name for name in images.ids if name not in labels]
    if bare:
        raise ValueError(f"labels file {str(file)!r} gives no label for {len(bare)} images, first {bare[:3]}")


def _place(images: ImageSet) -> str:
    """Where the images lie, for messages."""
    return str(getattr(images, "root", "") or getattr(images, "path", "") or images.name)


def labels_from_folders(images: ImageSet, class_index: Mapping[str, int], classes: int) -> dict[str, int]:
    """Class indices from the top folder of each image: `class_index` knows its name, or folders stand for all classes.

    Raises:
        ValueError: images outside class folders, or folders that are no class of the model.
    """
    loose = [name for name in images.ids if "/" not in name]
    if loose:
        raise ValueError(
            f"{len(loose)} images lie in {_place(images)!r} itself, not in class folders (first {loose[0]!r}); "
            "sort them into one folder per class, or give a labels file"
        )
    folders = sorted({name.partition("/")[0] for name in images.ids})
    if all(folder in class_index for folder in folders):
        index = {folder: class_index[folder] for folder in folders}
    elif len(folders) == classes:
        index = {folder: position for position, folder in enumerate(folders)}
    else:
        strangers = [folder for folder in folders if folder not in class_index]
        raise ValueError(
            f"{len(strangers)} of {len(folders)} folders in {_place(images)!r} name no class of the model "
            f"(first {strangers[0]!r}), and {len(folders)} folders do not stand for its {classes} classes in order; "
            "name them by class or WordNet id, or give a labels file"
        )
    return {name: index[name.partition("/")[0]] for name in images.ids}


def imagenet_class_index() -> dict[str, int]:
    """WordNet id → index of the 1000 ImageNet-1k classes."""
    return dict(class_list("imagenet1k"))
