"""What the ImageNet suites share: validation images or their stand-in, and the parts that methods learn from."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from ood_toolkit.benchmarks.suite import ClassMask, Part, Views
from ood_toolkit.datasets import FolderImages, ImageSet, SubsetImages, TarImages
from ood_toolkit.datasets.archives import ClassTars, Member, holds_class_tars
from ood_toolkit.datasets.catalogue import entry
from ood_toolkit.datasets.classes import class_list, imagenet_names
from ood_toolkit.datasets.images import IMAGE_SUFFIXES
from ood_toolkit.datasets.locate import Found, find, open_set

Source = Literal["auto", "train", "v2", "validation", "none"]
CLASSES = 1000
VALIDATION_PER_CLASS = 50
"""Validation images of every class, as published."""
STAND_IN = "imagenet-v2-matched-frequency"
TRAIN = "imagenet-1k-train"


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What detectors and calibrators may learn from; it is never scored.

    Args:
        source: "train" is a class-balanced sample of ImageNet train for detectors; "v2" is ImageNetV2; "validation" a
            held-out part of the validation images, which makes the scored part smaller than the official one; "none"
            leaves out whatever learns. Calibrators never learn from train: the network has seen it. "auto" is train
            if it is there, else v2, else validation.
        per_class: images of each class from train.
        fit_share: share of each class's validation (or ImageNetV2) images for detectors, 0 to 1.
        calibration_share: likewise for calibrators.
        seed: of the choice.
    """

    source: Source = "auto"
    per_class: int = 50
    fit_share: float = 0.2
    calibration_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ValueError(f"learn from {', '.join(get_args(Source))}; got {self.source!r}")
        shares = (self.fit_share, self.calibration_share)
        if min(shares) < 0 or sum(shares) >= 1 or self.per_class < 1:
            raise ValueError(f"shares must lie in [0, 1) with a sum below 1, and per_class be positive; got {self}")


@dataclass(frozen=True, eq=False)
class Validation:
    """The in-distribution images, cut to the classes that matter.

    Args:
        images: ImageNet validation, or ImageNetV2 in its place.
        official: it is ImageNet validation.
    """

    images: ImageSet
    official: bool

    def rows_of(self, classes: Collection[int]) -> Tensor:
        """(K,) rows whose class is one of these."""
        return torch.isin(self.images.labels, torch.tensor(sorted(classes))).nonzero().flatten()


@dataclass(frozen=True, eq=False)
class Learned:
    """The parts to learn from, and the validation rows that are therefore not scored."""

    fit: Part | None
    calibration: Part | None
    withheld: Tensor


def imagenet_views(clean: str = "", mask: ClassMask | None = None) -> Views:
    """Robustness views of a suite whose models know the 1000 ImageNet classes."""
    return Views(clean, mask, imagenet_names(), tuple(class_list("imagenet1k")))


def validation(root: Path, classes: Collection[int]) -> Validation | None:
    """Validation images of these classes; ImageNetV2 where they are absent; None where both are."""
    for name, official in (("imagenet-1k", True), (STAND_IN, False)):
        known = entry(name)
        if find(known, root) is not None:
            images = open_set(known, root)
            whole = Validation(images, official)
            rows = whole.rows_of(classes).tolist()
            return whole if len(rows) == len(images) else Validation(SubsetImages(images, rows), official)
    return None


def learned(root: Path, known: Validation | None, classes: Collection[int], learning: Learning) -> Learned:
    """Chooses what to learn from, for a suite on these classes. Rows of the parts are those of `known.images`.

    Raises:
        ValueError: the source that the user named is not there.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    if learning.source == "none":
        return Learned(None, None, nothing)
    train = train_part(root, classes, learning) if learning.source in ("auto", "train") else None
    if learning.source == "train" and train is None:
        places = ", ".join(entry(TRAIN).places)
        raise ValueError(
            f"no ImageNet train below {str(root)!r} (looked for {places}, ILSVRC2012_img_train.tar); "
            "put it there, or choose another --learn"
        )
    second = _second(root, known, classes)
    if learning.source == "v2" and second is None:
        raise ValueError(f"ImageNetV2 cannot be learned from: it is not below {str(root)!r}, or it is what is scored")
    if second is not None and learning.source != "validation":
        fit, calibration = _split(second, classes, learning, train, second.name, everything=True)
        return Learned(train or fit, calibration, nothing)
    if known is None:
        return Learned(train, None, nothing)
    fit, calibration = _split(known.images, classes, learning, train, known.images.name, everything=False)
    parts = [part for part in (None if train else fit, calibration) if part is not None]
    return Learned(train or fit, calibration, torch.cat([part.indices for part in parts]) if parts else nothing)


def train_part(root: Path, classes: Collection[int], learning: Learning) -> Part | None:
    """A class-balanced sample of ImageNet train, or None where it is absent.

    The same images are chosen from class folders, from the official tar of class tars (of which only the classes that
    matter are listed) and from webdataset shards that keep the file names.

    Raises:
        ValueError: a class has no folder, or no image in it.
    """
    found = find(entry(TRAIN), root)
    if found is None:
        return None
    generator = torch.Generator().manual_seed(learning.seed)
    files = _train_files(found, root)
    chosen: dict[str, int] = {}
    for wnid, index in class_list("imagenet1k").items():
        if index in classes:
            names = files(wnid)
            if not names:
                raise ValueError(f"ImageNet train in {str(found.path)!r} has no image of class {wnid}")
            rows = torch.randperm(len(names), generator=generator)[: learning.per_class].sort().values
            chosen |= {names[int(row)]: index for row in rows}
    about = f"up to {learning.per_class} of each of {len(classes)} classes of ImageNet train, seed {learning.seed}"
    return Part("fit", files.images(chosen), None, about)


class _TrainFiles(Protocol):
    def __call__(self, wnid: str) -> list[str]:
        """Identifiers of a class's images, in order of their file names."""
        ...

    def images(self, chosen: Mapping[str, int]) -> ImageSet:
        """These images, with their labels."""
        ...


def _train_files(found: Found, root: Path) -> _TrainFiles:
    if found.layout == "folder":
        return _InFolders(found.path)
    if found.layout == "tar" and holds_class_tars(found.path):
        return _InClassTars(found.path)
    return _InOneSet(open_set(entry(TRAIN), root))


class _InFolders:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, wnid: str) -> list[str]:
        return [f"{wnid}/{name}" for name in _image_names(self._folder / wnid)]

    def images(self, chosen: Mapping[str, int]) -> ImageSet:
        return FolderImages(self._folder, name=TRAIN, labels=chosen, paths=list(chosen))


class _InClassTars:
    def __init__(self, path: Path) -> None:
        self._tars = ClassTars(path)
        self._members: dict[str, Member] = {}

    def __call__(self, wnid: str) -> list[str]:
        members = self._tars.members(wnid)
        self._members |= members
        return sorted(members)

    def images(self, chosen: Mapping[str, int]) -> ImageSet:
        members = {image: self._members[image] for image in chosen}
        return TarImages(self._tars.path, name=TRAIN, labels=chosen, paths=list(chosen), members=members)


class _InOneSet:
    """A set that must be listed as a whole."""

    def __init__(self, images: ImageSet) -> None:
        self._images = images
        self._rows = {image: row for row, image in enumerate(images.ids)}
        self._classes: dict[int, list[str]] = {}
        for image, label in zip(images.ids, images.labels.tolist(), strict=True):
            self._classes.setdefault(label, []).append(image)

    def __call__(self, wnid: str) -> list[str]:
        names = self._classes.get(class_list("imagenet1k")[wnid], [])
        return sorted(names, key=lambda image: image.rpartition("/")[2])

    def images(self, chosen: Mapping[str, int]) -> ImageSet:
        return SubsetImages(self._images, [self._rows[image] for image in chosen], name=TRAIN)


def held_out(images: ImageSet, classes: Collection[int], shares: Sequence[float], seed: int) -> list[Tensor]:
    """Disjoint rows, one tensor per share: that share of each class's images, rounded, in ascending order.

    The choice depends on file names and the seed alone, so it is the same from a folder, a flat folder and a tar.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen: list[list[int]] = [[] for _ in shares]
    by_class: dict[int, list[int]] = {label: [] for label in sorted(classes)}
    for row, label in enumerate(images.labels.tolist()):
        if label in by_class:
            by_class[label].append(row)
    for rows in by_class.values():
        rows.sort(key=lambda row: images.ids[row].rpartition("/")[2])
        order = torch.randperm(len(rows), generator=generator).tolist()
        start = 0
        for share, taken in zip(shares, chosen, strict=True):
            end = start + round(share * len(rows))
            taken.extend(rows[position] for position in order[start:end])
            start = end
    return [torch.tensor(sorted(rows), dtype=torch.int64) for rows in chosen]


def _split(
    images: ImageSet,
    classes: Collection[int],
    learning: Learning,
    train: Part | None,
    name: str,
    *,
    everything: bool,
) -> tuple[Part | None, Part | None]:
    """Parts for fitting and calibration; `everything` gives all images to them, in the ratio of the shares."""
    shares = [0.0 if train else learning.fit_share, learning.calibration_share]
    total = sum(shares)
    if everything and total:
        shares = [share / total for share in shares]
    rows = held_out(images, classes, shares, learning.seed)
    parts = [
        Part(what, images, chosen, f"{share:.0%} of each of {len(classes)} classes of {name}, never scored")
        if len(chosen)
        else None
        for what, chosen, share in zip(("fit", "calibration"), rows, shares, strict=True)
    ]
    return parts[0], parts[1]


def _second(root: Path, known: Validation | None, classes: Collection[int]) -> ImageSet | None:
    """ImageNetV2 of these classes, if it is there and not itself scored as a stand-in."""
    if (known is not None and not known.official) or find(entry(STAND_IN), root) is None:
        return None
    images = open_set(entry(STAND_IN), root)
    return SubsetImages(images, Validation(images, False).rows_of(classes).tolist())


def _image_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    names = (path.name for path in folder.iterdir())
    return sorted(name for name in names if Path(name).suffix.lower() in IMAGE_SUFFIXES and not name.startswith("."))
