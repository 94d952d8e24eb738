"""ImageNet classes under another distribution, one set at a time: ImageNetV2, -R, -Sketch, -C, -P, -Hard and others."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from ood_toolkit.benchmarks.imagenet import (
    CLASSES,
    STAND_IN,
    VALIDATION_PER_CLASS,
    Learning,
    Validation,
    imagenet_views,
    learned,
    validation,
)
from ood_toolkit.benchmarks.suite import ClassMask, Part, Suite, Task
from ood_toolkit.datasets import ImageSet, SubsetImages
from ood_toolkit.datasets.accepted import AcceptingImages
from ood_toolkit.datasets.catalogue import CatalogueEntry, catalogue, entry
from ood_toolkit.datasets.classes import class_indices, folder_map
from ood_toolkit.datasets.corrupted import CORRUPTIONS, SEVERITIES, CorruptedImages
from ood_toolkit.datasets.locate import how_to_get, open_set

ShiftProtocol = Literal["official", "masked", "full-1000way"]
"""official: as the set's authors evaluate. masked: the logits are cut to the set's classes, where it has fewer than
1000. full-1000way: all 1000 logits count."""

OWN = "imagenet-c-own"
"""ImageNet-C made here, from the validation images that are there."""
_MAPPED = ("mapped", "mapped-deep")
_READ = ("wnid", "wnid-deep", "index", "frames", "parquet", *_MAPPED)
_WITHIN = {"wnid-deep": "<corruption>/3", "frames": "<perturbation>", "mapped-deep": "<domain>"}
"""What must be named behind a set that is too large, or too mixed, to be scored as a whole."""
_UNCHECKED = " How many images it has is not known here, so nobody checked that none is missing."
_TASKS = ("misclassification", "calibration")


def shift_suites() -> tuple[str, ...]:
    """The names that `shift_suite` knows."""
    named = [
        name
        for name, known in catalogue().items()
        if known.use == "shift" and known.labels in _READ and known.class_list is not None and name != "imagenet-a"
    ]
    return tuple(sorted([*named, OWN]))


def shift_suite(
    name: str, root: Path, *, protocol: ShiftProtocol = "official", learning: Learning | None = None
) -> Suite:
    """Misclassification and calibration on one shifted set, beside the validation images of the same classes.

    Where several ImageNet classes stand for one of the set's (ObjectNet, DomainNet), or an image has several
    (ImageNet-Hard), a prediction is right if it is any of them.

    Args:
        name: of the set; with a part of it behind a slash where it has parts: corruption and severity of ImageNet-C
            ("imagenet-c-blur/defocus_blur/3") or of one's own ("imagenet-c-own/fog/3"), the perturbation of ImageNet-P
            ("imagenet-p/tilt"), the domain of DomainNet ("domainnet/sketch").
        root: the data root.
        protocol: which classes count. The authors of ObjectNet and of ImageNet-D's class map let all 1000 count,
            those of ImageNet-R cut to its 200.
        learning: what methods learn from; from ImageNetV2 only where that is not itself scored.

    Raises:
        ValueError: unknown name or protocol, or data that is absent.
    """
    if protocol not in get_args(ShiftProtocol):
        raise ValueError(f"no protocol is named {protocol!r}; known: {', '.join(get_args(ShiftProtocol))}")
    set_name, _, within = name.partition("/")
    if set_name.replace("_", "-") == OWN:
        return _own_corruption(within, root, learning or Learning())
    known = entry(set_name)
    if known.name not in shift_suites():
        raise ValueError(f"no suite is named {name!r}; known shifted sets: {', '.join(shift_suites())}")
    if known.labels in _WITHIN and not within:
        raise ValueError(f"say which part of {known.name}, e.g. {known.name}/{_WITHIN[known.labels]}")
    images = open_set(known, root, within=within)
    whole = f"{known.name}/{within.rstrip('/')}" if within else known.name
    subset = _subset(known)
    mask = subset if protocol == "masked" or (protocol == "official" and known.labels not in _MAPPED) else None
    beside = _beside(known, root, learning or Learning(), masked=mask is not None)
    parts = [Part(whole, images, None, ""), *([beside.clean] if beside.clean is not None else [])]
    sizes = " and ".join(f"{len(part):,} images of {part.name}" for part in parts)
    view = f"logits cut to its {len(mask.classes)} classes" if mask else "all 1000 logits count"
    several = " A prediction is right if it is any of an image's classes." if _several(images) else ""
    faults = "".join(f" {fault}" for fault in known.faults)
    published = _published(known, within)
    less = _less("set", len(images), published) + beside.less
    unknown = _UNCHECKED if published is None else ""
    return Suite(
        name=whole,
        caption=f"{known.title}: {known.about} {sizes}; {view}; a wrong prediction is positive."
        f"{less}{unknown}{several}{faults}",
        tasks=[Task(kind, part.name, part, None, mask) for kind in _TASKS for part in parts],
        fit=beside.fit,
        calibration=beside.calibration,
        protocol=("masked" if mask else "full-1000way") + ("-like" if less else ""),
        notes=known.faults,
        views=imagenet_views("imagenet-1k", subset),
    )


def _own_corruption(which: str, root: Path, learning: Learning) -> Suite:
    """Validation images under one corruption, beside the same images without it; what is learned from is clean."""
    corruption, _, text = which.partition("/")
    if not text.isdecimal():
        names = ", ".join(name for group in CORRUPTIONS.values() for name in group)
        raise ValueError(f"say which corruption and severity, e.g. {OWN}/fog/3; known: {names}; severities 1 to 5")
    known = validation(root, range(CLASSES))
    if known is None:
        raise ValueError(f"{OWN} corrupts ImageNet validation images. {how_to_get(entry('imagenet-1k'))}")
    chosen = learned(root, known, range(CLASSES), learning)
    rows = torch.arange(len(known.images))
    rows = rows[~torch.isin(rows, chosen.withheld)]
    source = "ImageNet validation" if known.official else "ImageNetV2 in place of validation"
    clean = Part("imagenet-1k", known.images, rows, source)
    scored = known.images if len(rows) == len(known.images) else SubsetImages(known.images, rows.tolist())
    less = _less(source, len(known.images), entry("imagenet-1k" if known.official else STAND_IN).images)
    name = f"{OWN}/{corruption}/{text}"
    corrupted = Part(name, CorruptedImages(scored, corruption, int(text), seed=learning.seed, name=name))
    return Suite(
        name=name,
        caption=f"{len(rows):,} images of {source} under {corruption} at severity {text}, made here, beside the same "
        "images without it; all 1000 logits count; a wrong prediction is positive. The recipe is ImageNet-C's, the "
        f"pixels are not those of its files, so numbers are not comparable with published ones.{less}",
        tasks=[Task(kind, part.name, part) for kind in _TASKS for part in (corrupted, clean)],
        fit=chosen.fit,
        calibration=chosen.calibration,
        protocol="full-1000way" + ("-like" if less else ""),
        views=imagenet_views("imagenet-1k", None),
    )


@dataclass(frozen=True, eq=False)
class _Beside:
    """What stands beside a shifted set; `less` says that validation images are missing."""

    clean: Part | None
    fit: Part | None
    calibration: Part | None
    less: str = ""


def _beside(known: CatalogueEntry, root: Path, learning: Learning, *, masked: bool) -> _Beside:
    """Validation images of the same classes, and what is learned from; ImageNetV2 is neither where it is scored."""
    own = set(class_indices(known.class_list or "imagenet1k"))
    classes: Collection[int] = own if masked else range(CLASSES)
    images = validation(root, classes)
    if images is not None and not images.official:
        images = None
    if known.name == STAND_IN and learning.source in ("auto", "v2"):
        learning = replace(learning, source="validation" if images else "none")
    chosen = learned(root, images, classes, learning)
    if images is None:
        return _Beside(None, chosen.fit, chosen.calibration)
    rows = images.rows_of(own)
    less = _less("validation images of these classes", len(rows), VALIDATION_PER_CLASS * len(own))
    rows = rows[~torch.isin(rows, chosen.withheld)]
    part = Part("imagenet-1k", _alike(known, images), rows, f"{len(own)} classes")
    return _Beside(part, chosen.fit, chosen.calibration, less)


def _published(known: CatalogueEntry, within: str) -> int | None:
    """How many images the set, or the part of it that is scored, has; None where nothing tells."""
    if known.labels != "wnid-deep":
        return known.images
    depth = len(within.strip("/").split("/"))  # all validation images, at each severity of each corruption
    return {1: len(SEVERITIES), 2: 1}.get(depth, 0) * VALIDATION_PER_CLASS * CLASSES or None


def _less(what: str, here: int, published: int | None) -> str:
    """A sentence with a space before it where a set is not whole, or not as it was published; else ""."""
    if published is None or here == published:
        return ""
    return f" Not the published {what}: {here:,} images are here, {published:,} were published."


def _alike(known: CatalogueEntry, clean: Validation) -> ImageSet:
    """The validation images, judged as the set's are: every class that is right there for their own is right here."""
    if known.labels not in _MAPPED:
        return clean.images
    groups = {index: group for group in folder_map(known.class_list or "").values() for index in group}
    return AcceptingImages(clean.images, [groups.get(label, (label,)) for label in clean.images.labels.tolist()])


def _several(images: ImageSet) -> bool:
    """Some image has several classes that are right."""
    accepted: torch.Tensor | None = getattr(images, "accepted", None)
    return accepted is not None and accepted.shape[1] > 1


def _subset(known: CatalogueEntry) -> ClassMask | None:
    """The set's classes, where it has fewer than ImageNet-1k."""
    classes = class_indices(known.class_list or "imagenet1k")
    return ClassMask(known.name, torch.tensor(classes)) if len(classes) < CLASSES else None
