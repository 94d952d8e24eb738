"""ImageNet classes under another distribution, one set at a time: ImageNetV2, -R, -Sketch, -C, -P, -Hard and others."""

from collections.abc import Collection, Mapping, Sequence
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
from ood_toolkit.corruptions import AVERAGED, CORRUPTIONS, PERTURBATIONS, SEVERITIES
from ood_toolkit.datasets import ImageSet, SubsetImages
from ood_toolkit.datasets.accepted import AcceptingImages
from ood_toolkit.datasets.catalogue import CatalogueEntry, catalogue, entry
from ood_toolkit.datasets.classes import class_indices, folder_map
from ood_toolkit.datasets.corrupted import CorruptedImages
from ood_toolkit.datasets.locate import find, how_to_get, open_set

ShiftProtocol = Literal["official", "masked", "full-1000way"]
"""official: as the set's authors evaluate. masked: the logits are cut to the set's classes, where it has fewer than
1000. full-1000way: all 1000 logits count."""

OWN = "imagenet-c-own"
"""ImageNet-C made here, from the validation images that are there."""
WHOLE = "imagenet-c"
"""The fifteen corruptions of ImageNet-C whose errors are averaged."""
_MAPPED = ("mapped", "mapped-deep")
_READ = ("wnid", "wnid-deep", "index", "frames", "parquet", *_MAPPED)
_WITHIN = {"mapped-deep": "<domain>"}
"""What must be named behind a set that is too mixed to be scored as a whole."""
_LISTED = 3
"""More parts than this are not listed one by one in a caption."""
_PUBLISHED = VALIDATION_PER_CLASS * CLASSES
"""Images at one severity of one corruption."""
_UNCHECKED = "How many images it has is not known here, so nobody checked that none is missing."
_TASKS = ("misclassification", "calibration")


def shift_suites() -> tuple[str, ...]:
    """The names that `shift_suite` knows."""
    named = [
        name
        for name, known in catalogue().items()
        if known.use == "shift" and known.labels in _READ and known.class_list is not None and name != "imagenet-a"
    ]
    return tuple(sorted([*named, OWN, WHOLE]))


def shift_suite(
    name: str, root: Path, *, protocol: ShiftProtocol = "official", learning: Learning | None = None
) -> Suite:
    """Misclassification and calibration on one shifted set, beside the validation images of the same classes.

    Where several ImageNet classes stand for one of the set's (ObjectNet, DomainNet), or an image has several
    (ImageNet-Hard), a prediction is right if it is any of them.

    Args:
        name: of the set; with a part of it behind a slash where it has parts: corruption and severity of ImageNet-C
            ("imagenet-c-blur/defocus_blur/3"), the perturbation of ImageNet-P ("imagenet-p/tilt"), the domain of
            DomainNet ("domainnet/sketch"). "imagenet-c" is all fifteen corruptions, "imagenet-c-blur" one group,
            "imagenet-c-blur/defocus_blur" all its severities, "imagenet-p" all perturbations, each a part of its own.
            "imagenet-c-own" has corruptions made here, with the same parts: "imagenet-c-own/blur", "…/fog/3".
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
    set_name, within = set_name.replace("_", "-"), within.strip("/")
    if set_name == OWN:
        return _own_corruptions(within, root, learning or Learning())
    if set_name == WHOLE:
        if within:
            raise ValueError(f"a part of {WHOLE} is named by its group, e.g. {WHOLE}-weather/fog/3")
        groups = [entry(f"{WHOLE}-{group}") for group in CORRUPTIONS if group != "extra"]
        about = f"ImageNet-C: the validation images under {len(AVERAGED)} corruptions at five severities."
        return _suite(groups[0], _opened(groups, root, ""), root, WHOLE, about, protocol, learning)
    known = entry(set_name)
    if known.name not in shift_suites():
        raise ValueError(f"no suite is named {name!r}; known shifted sets: {', '.join(shift_suites())}")
    if known.labels in _WITHIN and not within:
        raise ValueError(f"say which part of {known.name}, e.g. {known.name}/{_WITHIN[known.labels]}")
    whole = f"{known.name}/{within}" if within else known.name
    about = f"{known.title}: {known.about}"
    return _suite(known, _opened([known], root, within), root, whole, about, protocol, learning)


@dataclass(frozen=True, eq=False)
class _Opened:
    """The parts of a set that are scored.

    Args:
        parts: with their images.
        absent: names of those that should be there too.
        published: images of each as published, or None where nothing tells.
    """

    parts: Sequence[Part]
    absent: Sequence[str] = ()
    published: int | None = None


def _suite(
    known: CatalogueEntry,
    opened: _Opened,
    root: Path,
    name: str,
    about: str,
    protocol: ShiftProtocol,
    learning: Learning | None,
) -> Suite:
    subset = _subset(known)
    mask = subset if protocol == "masked" or (protocol == "official" and known.labels not in _MAPPED) else None
    beside = _beside(known, root, learning or Learning(), masked=mask is not None)
    parts = [*opened.parts, *([beside.clean] if beside.clean is not None else [])]
    view = f"logits cut to its {len(mask.classes)} classes" if mask else "all 1000 logits count"
    several = any(_several(part.images) for part in opened.parts)
    less = _lacking(opened) + beside.less
    sentences = [
        f"{about} {_sizes(parts)}; {view}; a wrong prediction is positive.{less}",
        _UNCHECKED if opened.published is None else "",
        "A prediction is right if it is any of an image's classes." if several else "",
        *known.faults,
    ]
    frames = [part.name for part in opened.parts] if known.labels == "frames" else []
    return Suite(
        name=name,
        caption=" ".join(sentence for sentence in sentences if sentence),
        tasks=[Task(kind, part.name, part, None, mask) for kind in _TASKS for part in parts],
        fit=beside.fit,
        calibration=beside.calibration,
        protocol=("masked" if mask else "full-1000way") + ("-like" if less else ""),
        notes=known.faults,
        views=replace(imagenet_views("imagenet-1k", subset), sequences=frozenset(frames)),
    )


def _opened(members: Sequence[CatalogueEntry], root: Path, within: str) -> _Opened:
    """What is scored of one set, or of the groups of ImageNet-C, of which any may be absent.

    Raises:
        ValueError: nothing is there.
    """
    first = members[0]
    _check_part(first, within)
    if first.labels == "frames" and not within:
        return _perturbations(first, root)
    if first.labels != "wnid-deep" or "/" in within:
        images = open_set(first, root, within=within)
        published = first.images
        if first.labels == "wnid-deep":  # all validation images at one severity of one corruption; or some classes
            published = _PUBLISHED if within.count("/") == 1 else None
        return _Opened([Part(f"{first.name}/{within}" if within else first.name, images)], (), published)
    parts, absent = [], []
    for known in members:
        group = known.name.removeprefix(f"{WHOLE}-")
        wanted = [f"{name}/{n}" for name in ((within,) if within else CORRUPTIONS[group]) for n in SEVERITIES]
        if find(known, root) is None and len(members) > 1:
            absent += wanted
            continue
        images = open_set(known, root)
        rows: dict[str, list[int]] = {}
        for row, image in enumerate(images.ids):
            rows.setdefault("/".join(image.split("/")[:2]), []).append(row)
        there = [place for place in wanted if place in rows]
        parts += [
            Part(f"{known.name}/{place}", SubsetImages(images, rows[place], name=f"{known.name}/{place}"))
            for place in there
        ]
        absent += [place for place in wanted if place not in rows]
    if not parts:
        looked = f"{first.name} has no folder {within!r}" if within else f"nothing of {first.title} is there"
        raise ValueError(f"{looked} below {str(root)!r}. {how_to_get(first)}")
    return _Opened(parts, absent, _PUBLISHED)


def _check_part(known: CatalogueEntry, within: str) -> None:
    """Refuse a corruption or a severity that no group of ImageNet-C has, before anybody is sent to fetch it."""
    group = known.name.removeprefix(f"{WHOLE}-")
    if not within or group not in CORRUPTIONS:
        return
    corruption, _, severity = within.partition("/")
    if corruption not in CORRUPTIONS[group]:
        raise ValueError(f"{known.name} has no corruption {corruption!r}; known: {', '.join(CORRUPTIONS[group])}")
    if severity and severity not in map(str, SEVERITIES):
        raise ValueError(f"a severity is one of {SEVERITIES}, e.g. {known.name}/{corruption}/3; got {severity!r}")


def _perturbations(known: CatalogueEntry, root: Path) -> _Opened:
    found = find(known, root)
    if found is None:
        return _Opened([Part(known.name, open_set(known, root))])  # which says where it was looked for
    there = [name for name in PERTURBATIONS if (found.path / name).is_dir()]
    if not there:
        raise ValueError(f"{str(found.path)!r} has none of the folders {', '.join(PERTURBATIONS)}")
    parts = [Part(f"{known.name}/{name}", open_set(known, root, within=name)) for name in there]
    return _Opened(parts, [name for name in PERTURBATIONS if name not in there])


def _own_corruptions(which: str, root: Path, learning: Learning) -> Suite:
    """Validation images under corruptions, beside the same images without; what is learned from is clean."""
    asked = _asked(which)
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
    names = [f"{OWN}/{corruption}/{severity}" for corruption, severity in asked]
    parts = [
        Part(name, CorruptedImages(scored, corruption, severity, seed=learning.seed, name=name))
        for name, (corruption, severity) in zip(names, asked, strict=True)
    ]
    one = f"{asked[0][0]} at severity {asked[0][1]}"
    under = one if len(asked) == 1 else f"{len({c for c, _ in asked})} corruptions, {len(asked)} sets with severities"
    return Suite(
        name=f"{OWN}/{which}" if which else OWN,
        caption=f"{len(rows):,} images of {source} under {under}, made here, beside the same "
        "images without it; all 1000 logits count; a wrong prediction is positive. The recipe is ImageNet-C's, the "
        f"pixels are not those of its files, so numbers are not comparable with published ones.{less}",
        tasks=[Task(kind, part.name, part) for kind in _TASKS for part in (*parts, clean)],
        fit=chosen.fit,
        calibration=chosen.calibration,
        protocol="full-1000way" + ("-like" if less else ""),
        views=imagenet_views("imagenet-1k", None),
    )


def _asked(which: str) -> list[tuple[str, int]]:
    """Corruptions and severities: of "" all fifteen at all five, of a group or a corruption all its severities."""
    name, _, text = which.partition("/")
    names = AVERAGED if not name else CORRUPTIONS.get(name, (name,))
    known = [corruption for group in CORRUPTIONS.values() for corruption in group]
    if not set(names) <= set(known):
        raise ValueError(f"no corruption is named {name!r}; known: {', '.join([*CORRUPTIONS, *known])}")
    if text and not (text.isdecimal() and int(text) in SEVERITIES):
        raise ValueError(f"a severity is one of {SEVERITIES}, e.g. {OWN}/fog/3; got {text!r}")
    return [(corruption, severity) for corruption in names for severity in ([int(text)] if text else SEVERITIES)]


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


def _sizes(parts: Sequence[Part]) -> str:
    if len(parts) <= _LISTED:
        return " and ".join(f"{len(part):,} images of {part.name}" for part in parts)
    return f"{sum(map(len, parts)):,} images in {len(parts)} parts, from {parts[0].name} to {parts[-1].name}"


def _lacking(opened: _Opened) -> str:
    """Sentences, each with a space before it, where a set is not whole; else ""."""
    sizes = {part.name: len(part) for part in opened.parts}
    other = {name: size for name, size in sizes.items() if opened.published not in (None, size)}
    if len(sizes) == 1:
        less = _less("set", next(iter(sizes.values())), opened.published)
    else:
        less = f" Not the published sets of {opened.published:,} images each: {_sized(other)}." if other else ""
    return less + (f" Left out, because not found: {', '.join(opened.absent)}." if opened.absent else "")


def _sized(sizes: Mapping[str, int]) -> str:
    """How many images sets have; of many sets, those that have as many together."""
    alike: dict[int, list[str]] = {}
    for name, size in sizes.items():
        alike.setdefault(size, []).append(name)
    return ", ".join(
        f"{len(names)} from {names[0]} to {names[-1]} have {size:,} each"
        if len(names) > _LISTED
        else ", ".join(f"{name} has {size:,}" for name in names)
        for size, names in alike.items()
    )


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
