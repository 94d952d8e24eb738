"""The field's table for ImageNet-1k: near and far OOD sets as in OpenOOD 1.5."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from ood_toolkit.benchmarks import openood_cifar
from ood_toolkit.benchmarks.imagenet import (
    CLASSES,
    Learning,
    Validation,
    held_out,
    imagenet_views,
    learned,
    validation,
)
from ood_toolkit.benchmarks.suite import Part, Suite, Task
from ood_toolkit.datasets import ImageSet, SubsetImages
from ood_toolkit.datasets.catalogue import entry
from ood_toolkit.datasets.locate import find, how_to_get, open_set
from ood_toolkit.records import Record

NEAR = ("ssb-hard", "ninco")
FAR = ("inaturalist", "textures", "openimage-o")
GROUPS = {"near-ood": NEAR, "far-ood": FAR}
"""Row of means → the sets it averages."""
SCORED = {"ssb-hard": 49_000, "ninco": 5_879, "inaturalist": 10_000, "textures": 5_160, "openimage-o": 15_869}
"""Images of each set that OpenOOD scores."""
_GROUPS_OF = {"openood-imagenet": GROUPS, openood_cifar.NAME: openood_cifar.GROUPS}
"""Suite → its groups."""
_LISTS = "benchmark_imglist/imagenet"
_LEADERBOARD = "openood-1.5"


def openood_suite(root: Path, *, learning: Learning | None = None) -> Suite:
    """Near (SSB-hard, NINCO) and far OOD (iNaturalist, Textures, OpenImage-O) against ImageNet validation.

    OpenOOD's own lists are used where `benchmark_imglist` lies below the root: 45,000 validation images are scored,
    5,000 are for learning, and 15,869 images of OpenImage-O are scored. Else a seeded part of validation is held out.
    Sets that are absent are left out and named in the caption.

    Args:
        root: the data root.
        learning: what methods learn from.

    Raises:
        ValueError: no validation images, or none of the five sets.
    """
    learning = learning or Learning()
    known = validation(root, range(CLASSES))
    if known is None:
        raise ValueError(f"openood-imagenet needs ImageNet validation images. {how_to_get(entry('imagenet-1k'))}")
    there = [name for name in (*NEAR, *FAR) if find(entry(name), root) is not None]
    absent = [name for name in (*NEAR, *FAR) if name not in there]
    if not there:
        raise ValueError(
            f"none of {', '.join(absent)} lies below {str(root)!r}. {how_to_get(entry(absent[0]))} "
            f"({len(absent)} sets; see: ood-bench data list)"
        )
    test, fit, calibration, lists = _known_parts(root, known, learning)
    deviations = [f"{', '.join(absent)} left out, because not found"] if absent else []
    deviations += [] if known.official else ["ImageNetV2 matched-frequency stands in for ImageNet validation"]
    deviations += [] if lists else ["OpenOOD's lists are absent, so the split of validation is this toolkit's"]
    outside = {name: _listed(root, open_set(entry(name), root)) for name in there}
    deviations += [
        f"{name} has {len(images):,} images here, OpenOOD scores {SCORED[name]:,}"
        for name, images in outside.items()
        if len(images) != SCORED[name]
    ]
    tasks = [Task("anomaly", name, test, Part(name, images)) for name, images in outside.items()]
    sizes = ", ".join(f"{name} {len(images):,}" for name, images in outside.items())
    caption = (
        f"ImageNet-1k against near OOD ({', '.join(NEAR)}) and far OOD ({', '.join(FAR)}) as in OpenOOD 1.5; OOD is "
        f"positive, means are over sets. {len(test):,} ID images; {sizes}. OpenOOD's AUPR is by trapezoid, this one "
        "is average precision; OpenOOD fits on all of ImageNet train and tunes hyper-parameters on OpenImage-O."
    )
    if deviations:
        caption += f" Not the published protocol: {'; '.join(deviations)}."
    return Suite(
        name="openood-imagenet",
        caption=caption,
        tasks=[*tasks, Task("misclassification", "imagenet-1k", test), Task("calibration", "imagenet-1k", test)],
        fit=fit,
        calibration=calibration,
        protocol=f"{_LEADERBOARD}-like" if deviations else _LEADERBOARD,
        notes=[f"{name}: {fault}" for name in there for fault in entry(name).faults],
        views=imagenet_views(),
    )


def near_far(records: Iterable[Record]) -> list[Record]:
    """Means over the near and the far sets, one record per method and metric, where every set of the group has one.

    Intervals are left out: the sets share their ID images, so their intervals cannot be averaged.
    """
    groups: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in records:
        if record.suite in _GROUPS_OF and record.task == "anomaly":
            key = (
                record.suite,
                record.model,
                record.method,
                record.calibrator,
                record.metric,
                record.transform,
                record.run,
            )
            groups.setdefault(key, {})[record.dataset] = record
    means = []
    for by_set in groups.values():
        for name, members in _GROUPS_OF[next(iter(by_set.values())).suite].items():
            rows = [by_set[member] for member in members if member in by_set]
            values = [row.value for row in rows if row.value is not None]
            if len(rows) == len(members):
                complete = len(values) == len(members)
                reason = "" if complete else next(row.reason for row in rows if row.value is None)
                value = fmean(values) if complete else None
                means.append(
                    replace(rows[0], dataset=name, value=value, reason=reason, low=None, high=None, level=None)
                )
    return means


def _known_parts(root: Path, known: Validation, learning: Learning) -> tuple[Part, Part | None, Part | None, bool]:
    """Scored, fit and calibration part, and whether OpenOOD's lists made them."""
    images, source = known.images, "ImageNet validation" if known.official else "ImageNetV2 in place of validation"
    test, val = _list(root, "test_imagenet"), _list(root, "val_imagenet")
    if test is None or val is None or not known.official:
        chosen = learned(root, known, range(CLASSES), learning)
        rows = torch.arange(len(images))
        rows = rows[~torch.isin(rows, chosen.withheld)]
        about = f"{source}, {len(chosen.withheld):,} held out"
        return Part("imagenet-1k", images, rows, about), chosen.fit, chosen.calibration, False
    by_name = {image.rpartition("/")[2]: row for row, image in enumerate(images.ids)}
    scored = Part("imagenet-1k", images, _rows(by_name, test, "test_imagenet"), f"{source}, OpenOOD's test list")
    if learning.source == "none":
        return scored, None, None, True
    kept = _rows(by_name, val, "val_imagenet")
    chosen = learned(root, None, range(CLASSES), learning) if learning.source != "validation" else None
    calibration = Part("calibration", images, kept, f"{source}, OpenOOD's validation list, never scored")
    if chosen is not None and chosen.fit is not None:
        return scored, chosen.fit, calibration, True
    subset = SubsetImages(images, kept.tolist())
    first, second = held_out(subset, range(CLASSES), [0.6, 0.4], learning.seed)
    fit = Part("fit", images, kept[first], f"60% of {source}, OpenOOD's validation list, never scored")
    return scored, fit, Part("calibration", images, kept[second], "the other 40%"), True


def _listed(root: Path, images: ImageSet) -> ImageSet:
    """OpenImage-O without the images that OpenOOD tunes on, where its lists are there."""
    names = _list(root, "test_openimage_o") if images.name == "openimage-o" else None
    if names is None:
        return images
    wanted = set(names)
    rows = [row for row, image in enumerate(images.ids) if image.rpartition("/")[2] in wanted]
    if len(rows) != len(wanted):
        raise ValueError(f"OpenOOD's list names {len(wanted):,} images of OpenImage-O, {len(rows):,} are there")
    return SubsetImages(images, rows)


def _list(root: Path, name: str) -> list[str] | None:
    """File names in one of OpenOOD's lists (lines of path and label), or None where it is absent."""
    file = root / _LISTS / f"{name}.txt"
    if not file.is_file():
        return None
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line.rpartition(" ")[0].rpartition("/")[2] for line in lines if line.strip()]


def _rows(by_name: dict[str, int], names: Sequence[str], what: str) -> torch.Tensor:
    absent = [name for name in names if name not in by_name]
    if absent:
        raise ValueError(f"{len(absent)} validation images of OpenOOD's list {what} are not there, first {absent[0]!r}")
    return torch.tensor(sorted(by_name[name] for name in names), dtype=torch.int64)
