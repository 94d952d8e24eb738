"""Finds published sets below a data root, in whatever layout they lie there, and opens them with their labels."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ood_toolkit.datasets.accepted import AcceptingImages, TrimmedImages
from ood_toolkit.datasets.archives import ClassTars, TarImages, holds_class_tars
from ood_toolkit.datasets.catalogue import CatalogueEntry
from ood_toolkit.datasets.cifar import FILES, array_images, has_arrays
from ood_toolkit.datasets.classes import class_list, folder_map, validation_labels
from ood_toolkit.datasets.combined import SubsetImages, below
from ood_toolkit.datasets.images import IMAGE_SUFFIXES, FolderImages, ImageSet
from ood_toolkit.datasets.parquet import ParquetImages, parquet_files
from ood_toolkit.datasets.shards import ShardImages, is_shard, shard_paths
from ood_toolkit.datasets.videos import VIDEO_SUFFIX, VideoFrames
from ood_toolkit.outputs import UNKNOWN

ROOT_VARIABLE = "OOD_DATA_ROOT"
_VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+")
_MAPPED = ("mapped", "mapped-deep")


@dataclass(frozen=True)
class Found:
    """Where a set lies.

    Args:
        path: folder or tar.
        layout: how it lies there.
    """

    path: Path
    layout: Literal["folder", "tar", "shards", "arrays", "parquet"]


def data_root(option: Path | None) -> Path | None:
    """The folder below which published sets are looked for: the option, else $OOD_DATA_ROOT, else None."""
    text = os.environ.get(ROOT_VARIABLE, "")
    return option if option is not None else Path(text) if text else None


def find(entry: CatalogueEntry, root: Path) -> Found | None:
    """Where the set lies below `root`, or None. Folders win over tars, tars over shards, earlier places over later."""
    for place in entry.places:
        path = root / place
        if path.is_dir() and entry.labels in FILES:
            if has_arrays(entry.labels, path):
                return Found(path, "arrays")
            continue
        if path.is_dir() and entry.labels == "parquet":
            if parquet_files(path):
                return Found(path, "parquet")
            continue
        if path.is_dir() and _fits(entry, path):
            return Found(path, "folder")
    for path in _tars(entry, root):
        if path.is_file():
            return Found(path, "tar")
    if entry.labels in (*_MAPPED, "frames"):
        return None  # folder names are needed
    for path in (root / place / split for place in entry.places for split in ("", "test", "validation")):
        tars = sorted(path.glob("*.tar")) if path.is_dir() else []
        if tars and is_shard(tars[0]):
            return Found(path, "shards")
    return None


def open_set(entry: CatalogueEntry, root: Path, *, within: str = "", every_folder: bool = False) -> ImageSet:
    """The set with ImageNet-1k labels (or its own, where it is no ImageNet set), from folder, tar or shards.

    The same images get the same identifiers, labels and rows from a folder and from a tar; from shards too, if their
    json states the paths.

    Args:
        entry: what to open.
        root: the data root.
        within: only what lies in this folder of the set, e.g. one corruption and severity: "defocus_blur/3".
        every_folder: also the class folders that overlap ImageNet and are left out otherwise.

    Raises:
        ValueError: it is not there, cannot be read, or holds folders that are none of its classes.
    """
    if entry.labels == "unread":
        raise ValueError(f"{entry.title} is described but not read: {entry.login}")
    found = find(entry, root)
    if found is None:
        raise ValueError(f"{entry.title} is not below {str(root)!r} ({sought(entry, root)}). {how_to_get(entry)}")
    images = _open(entry, found, within)
    if within and entry.labels != "frames":
        images = below(images, within)
    if entry.labels in _MAPPED:
        return _mapped(entry, images, every_folder=every_folder)
    if every_folder or not entry.drop_folders:
        return images
    kept = [row for row, image in enumerate(images.ids) if image.partition("/")[0] not in entry.drop_folders]
    return images if len(kept) == len(images) else SubsetImages(images, kept)


def sought(entry: CatalogueEntry, root: Path) -> str:
    """Where it was looked for, or which folder is there and is not laid out as the set is."""
    there = [root / place for place in entry.places if (root / place).is_dir()]
    if there and entry.layout:
        return f"the folder {str(there[0])!r} is there, but not laid out as {entry.layout}"
    return f"looked for {', '.join(entry.places)}"


def how_to_get(entry: CatalogueEntry) -> str:
    """One or two sentences: the command that downloads it, or what to do by hand."""
    if entry.fetchable:
        return f"Get it with: ood-bench data get {entry.name}"
    return entry.login or "Nothing is known about where to get it."


def labels_for(entry: CatalogueEntry, ids: Sequence[str]) -> dict[str, int]:
    """Class index by identifier, by the set's rule; empty where labels are unknown.

    Raises:
        ValueError: a folder is none of the set's classes.
    """
    unlabelled = entry.labels in ("none", "unread", *_MAPPED)
    return {} if unlabelled else {image: _label(entry, image) for image in ids}


def _open(entry: CatalogueEntry, found: Found, within: str) -> ImageSet:
    if found.layout == "arrays":
        return array_images(entry.labels, found.path, name=entry.name)
    if found.layout == "parquet":
        return ParquetImages(parquet_files(found.path), name=entry.name)
    if found.layout == "shards":
        indices = None
        if entry.class_list is not None and entry.labels != "none":
            indices = list(class_list(entry.class_list).values())
        shards = shard_paths(found.path)
        return ShardImages(shards, name=entry.name, classes=indices, labels={} if entry.labels == "none" else None)
    images = _images_of(entry, found, within)
    labels = labels_for(entry, images.ids)
    images.labels = torch.tensor([labels.get(image, UNKNOWN) for image in images.ids], dtype=torch.int64)
    return images


def _images_of(entry: CatalogueEntry, found: Found, within: str) -> ImageSet:
    if found.layout == "tar":
        if holds_class_tars(found.path):
            return ClassTars(found.path).images(entry.name)
        return TarImages(found.path, name=entry.name)
    if entry.labels != "frames":
        return FolderImages(found.path, name=entry.name)
    name = f"{entry.name}/{within}" if within else entry.name
    if any((found.path / within).rglob(f"*{VIDEO_SUFFIX}")):
        return VideoFrames(found.path, within=within, name=name)
    return FolderImages(found.path / within, name=name)  # frames that were extracted before


def _mapped(entry: CatalogueEntry, images: ImageSet, *, every_folder: bool) -> ImageSet:
    """The images whose class folder the set's map knows, with every class that is right for them, without borders."""
    known = folder_map(entry.class_list or "")
    accepted = [known.get(_folder(image), ()) for image in images.ids]
    rows = [row for row, classes in enumerate(accepted) if classes or every_folder]
    if not rows:
        raise ValueError(f"{entry.title}: none of its folders is an ImageNet class, e.g. {images.ids[0]!r}")
    kept = images if len(rows) == len(images) else SubsetImages(images, rows)
    trimmed = TrimmedImages(kept, entry.border) if entry.border else kept
    return AcceptingImages(trimmed, [accepted[row] for row in rows])


def _folder(image: str) -> str:
    """The folder right above the image."""
    return image.rpartition("/")[0].rpartition("/")[2]


def _label(entry: CatalogueEntry, image: str) -> int:
    folders = image.split("/")[:-1]
    if entry.labels == "validation" and not folders:
        number = _VALIDATION.fullmatch(image)
        if number is None or not 1 <= int(number[1]) <= len(validation_labels()):
            raise ValueError(
                f"{entry.title}: {image!r} is in no class folder, and not one of ILSVRC2012_val_00000001 to 00050000"
            )
        return validation_labels()[int(number[1]) - 1]
    folder = (folders or [""])[-1 if entry.labels in ("wnid-deep", "frames") else 0]
    classes = class_list(entry.class_list or "imagenet1k")
    if entry.labels == "index" and folder.isdecimal() and int(folder) < len(classes):
        return int(folder)
    if entry.labels != "index" and folder in classes:
        return classes[folder]
    raise ValueError(f"{entry.title}: folder {folder!r} of {image!r} is none of its {len(classes)} classes")


def _fits(entry: CatalogueEntry, folder: Path) -> bool:
    """The folder looks like the set: class folders that it has, or images at all where it has no known classes."""
    if entry.labels == "index":
        return any(path.is_dir() and path.name.isdecimal() for path in folder.iterdir())
    if entry.labels in _MAPPED:
        pattern = "*" if entry.labels == "mapped" else "*/*"
        return any(path.name in folder_map(entry.class_list or "") for path in folder.glob(pattern))
    if entry.class_list is None or entry.labels in ("wnid-deep", "frames"):
        return any(True for _ in _images(folder))
    classes = class_list(entry.class_list)
    with os.scandir(folder) as listing:
        return any(
            item.name in classes or (entry.labels == "validation" and _VALIDATION.fullmatch(item.name) is not None)
            for item in listing
        )


def _images(folder: Path) -> Iterator[str]:
    for _, _, files in os.walk(folder):
        yield from (file for file in files if Path(file).suffix.lower() in {*IMAGE_SUFFIXES, VIDEO_SUFFIX})


def _tars(entry: CatalogueEntry, root: Path) -> Iterator[Path]:
    if entry.labels == "frames":
        return  # videos are read from folders only
    names = [archive.file for archive in entry.archives if archive.file.endswith(".tar")]
    # an archive named only by its group ("blur.tar") is looked for inside the set's folders alone
    if not entry.name.startswith("imagenet-1k") and entry.labels != "wnid-deep":
        names.append(f"{entry.name}.tar")
    for name in dict.fromkeys(names):
        if entry.labels != "wnid-deep":
            yield root / name
        for place in entry.places:
            yield root / place / name
            if place.endswith(("/train", "/val")):
                yield (root / place).parent / name
