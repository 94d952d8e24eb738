"""The field's table for CIFAR-10: near and far OOD sets as in OpenOOD 1.5, and the re-collected test sets beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ood_toolkit.benchmarks.imagenet import Learning, held_out
from ood_toolkit.benchmarks.suite import Part, Suite, Task, Views
from ood_toolkit.datasets import FolderImages, ImageSet
from ood_toolkit.datasets.catalogue import entry
from ood_toolkit.datasets.cifar import CIFAR10_CLASSES
from ood_toolkit.datasets.locate import find, how_to_get, open_set
from ood_toolkit.outputs import UNKNOWN

NEAR = ("cifar-100", "tiny-imagenet")
FAR = ("mnist", "svhn", "textures", "places365")
GROUPS = {"near-ood": NEAR, "far-ood": FAR}
"""Row of means → the sets it averages."""
SHIFTED = ("cifar-10.1", "cifar-10.2")
SCORED = {
    "cifar-10": 9_000,
    "cifar-100": 9_000,
    "tiny-imagenet": 7_793,
    "mnist": 70_000,
    "svhn": 26_032,
    "textures": 5_640,
    "places365": 35_195,
}
"""Images of each set that OpenOOD scores."""
NAME = "openood-cifar10"
CLASSES = len(CIFAR10_CLASSES)
_TITLES = {"cifar-10": "cifar10", "cifar-100": "cifar100", "tiny-imagenet": "tin", "textures": "texture"}
"""How OpenOOD's lists call the sets, where otherwise."""
_LISTS = "benchmark_imglist/cifar10"
_IMAGES = "images_classic"
_LEADERBOARD = "openood-1.5"


def openood_cifar_suite(root: Path, *, learning: Learning | None = None) -> Suite:
    """CIFAR-10 against near (CIFAR-100, TinyImageNet) and far OOD (MNIST, SVHN, Textures, Places365).

    OpenOOD's own images and lists are used where `images_classic` and `benchmark_imglist` lie below the root: 9,000
    test images are scored and 1,000 are for learning. Else every set is read from its authors' files, as a whole.
    CIFAR-10.1 and 10.2 are scored beside CIFAR-10 where they are there. Absent sets are left out, and named in the
    caption.

    Args:
        root: the data root.
        learning: what methods learn from; "v2" is about ImageNet.

    Raises:
        ValueError: no CIFAR-10 test images, or none of the six sets.
    """
    learning = learning or Learning()
    if learning.source == "v2":
        raise ValueError(f"ImageNetV2 has none of the classes of {NAME}; choose another --learn")
    test = _opened("cifar-10", root)
    if test is None:
        raise ValueError(f"{NAME} needs the test images of CIFAR-10. {how_to_get(entry('cifar-10'))}")
    outside = {name: images for name in (*NEAR, *FAR) if (images := _opened(name, root)) is not None}
    absent = [name for name in (*NEAR, *FAR) if name not in outside]
    if not outside:
        raise ValueError(
            f"none of {', '.join(absent)} lies below {str(root)!r}. {how_to_get(entry(absent[0]))} "
            f"({len(absent)} sets; see: ood-bench data list)"
        )
    chosen = _learned(root, test, learning)
    deviations = [f"{', '.join(absent)} left out, because not found"] if absent else []
    deviations += [
        f"{name} has {count:,} images here, OpenOOD scores {SCORED[name]:,}"
        for name, count in [("cifar-10", len(chosen.test)), *((n, len(images)) for n, images in outside.items())]
        if count != SCORED[name]
    ]
    shifted = [Part(name, open_set(entry(name), root)) for name in SHIFTED if find(entry(name), root) is not None]
    known = [chosen.test, *shifted]
    return Suite(
        name=NAME,
        caption=_caption(chosen.test, outside, shifted, deviations),
        tasks=[
            *(Task("anomaly", name, chosen.test, Part(name, images)) for name, images in outside.items()),
            *(Task(kind, part.name, part) for kind in ("misclassification", "calibration") for part in known),
        ],
        fit=chosen.fit,
        calibration=chosen.calibration,
        protocol=f"{_LEADERBOARD}-like" if deviations else _LEADERBOARD,
        notes=[f"{name}: {fault}" for name in outside if name != "textures" for fault in entry(name).faults],
        views=Views("cifar-10", None, CIFAR10_CLASSES),
    )


@dataclass(frozen=True, eq=False)
class _Chosen:
    """What is scored in-distribution, and what is learned from."""

    test: Part
    fit: Part | None
    calibration: Part | None


def _learned(root: Path, images: ImageSet, learning: Learning) -> _Chosen:
    """Train and OpenOOD's validation images where they are there; else a seeded part of the test images."""
    whole = Part("cifar-10", images, None, "test images")
    if learning.source == "none":
        return _Chosen(whole, None, None)
    train = _train(root, learning) if learning.source in ("auto", "train") else None
    if learning.source == "train" and train is None:
        raise ValueError(f"no training images of CIFAR-10 lie below {str(root)!r}; choose another --learn")
    held = _listed("cifar-10", root, "val")
    source, shares = held or images, [0.6, 0.4] if held else [learning.fit_share, learning.calibration_share]
    if train is not None:
        shares = [0.0, 1.0 if held else learning.calibration_share]
    rows = held_out(source, range(CLASSES), shares, learning.seed)
    about = "of each class of OpenOOD's validation list" if held else "of each class of the test images"
    fit, calibration = (
        Part(name, source, chosen, f"{share:.0%} {about}, never scored") if len(chosen) else None
        for name, share, chosen in zip(("fit", "calibration"), shares, rows, strict=True)
    )
    if held is None:
        left = torch.arange(len(images))
        left = left[~torch.isin(left, torch.cat(rows))]
        whole = replace(whole, rows=left, about=f"test images, {len(images) - len(left):,} held out")
    return _Chosen(whole, train or fit, calibration)


def _train(root: Path, learning: Learning) -> Part | None:
    """A class-balanced sample of the training images, or None where they are absent."""
    images = _listed("cifar-10", root, "train")
    if images is None and find(entry("cifar-10-train"), root) is not None:
        images = open_set(entry("cifar-10-train"), root)
    if images is None:
        return None
    generator = torch.Generator().manual_seed(learning.seed)
    rows = []
    for label in range(CLASSES):
        own = (images.labels == label).nonzero().flatten()
        rows.append(own[torch.randperm(len(own), generator=generator)[: learning.per_class]])
    about = f"up to {learning.per_class} of each class of CIFAR-10 train, seed {learning.seed}"
    return Part("fit", images, torch.cat(rows).sort().values, about)


def _opened(name: str, root: Path) -> ImageSet | None:
    """OpenOOD's images of a set, else those of its authors, or None where both are absent."""
    listed = _listed(name, root, "test")
    if listed is not None:
        return listed
    known = entry(name)
    return open_set(known, root, every_folder=True) if find(known, root) is not None else None


def _listed(name: str, root: Path, split: str) -> ImageSet | None:
    """What a list of OpenOOD names, with labels where it is CIFAR-10; None where list or images are absent."""
    file = root / _LISTS / f"{split}_{_TITLES.get(name, name)}.txt"
    if not file.is_file() or not (root / _IMAGES).is_dir():
        return None
    lines = [line.rpartition(" ") for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    paths = [path for path, _, _ in lines]
    missing = [path for path in paths if not (root / _IMAGES / path).is_file()]
    if len(missing) == len(paths):
        return None
    if missing:
        raise ValueError(f"{len(missing)} images of OpenOOD's list {file.name} are not there, first {missing[0]!r}")
    labels = {path: int(label) if name == "cifar-10" else UNKNOWN for path, _, label in lines}
    return FolderImages(root / _IMAGES, name=name, labels=labels, paths=paths)


def _caption(test: Part, outside: dict[str, ImageSet], shifted: Sequence[Part], deviations: Sequence[str]) -> str:
    sizes = ", ".join(f"{name} {len(images):,}" for name, images in outside.items())
    caption = (
        f"CIFAR-10 against near OOD ({', '.join(NEAR)}) and far OOD ({', '.join(FAR)}) as in OpenOOD 1.5; OOD is "
        f"positive, means are over sets. {len(test):,} ID images; {sizes}. OpenOOD's AUPR is by trapezoid, this one "
        "is average precision; OpenOOD fits on all of CIFAR-10 train and tunes hyper-parameters on TinyImageNet."
    )
    if shifted:
        more = " and ".join(f"{part.name} ({len(part):,} images)" for part in shifted)
        caption += f" Beside them, no part of OpenOOD's table: the same classes re-collected, {more}."
    return caption + (f" Not the published protocol: {'; '.join(deviations)}." if deviations else "")
