"""ImageNet-A (is the prediction wrong?) and ImageNet-O (is it none of the classes?) by the rules of their authors.

Hendrycks, Zhao, Basart, Steinhardt, Song, Natural Adversarial Examples, CVPR 2021: the 1000 logits are cut to the 200
classes of the set before anything else. In-distribution for ImageNet-O are the validation images of its 200 classes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from ood_toolkit.benchmarks.imagenet import (
    CLASSES,
    STAND_IN,
    VALIDATION_PER_CLASS,
    Learned,
    Learning,
    Validation,
    imagenet_views,
    learned,
    validation,
)
from ood_toolkit.benchmarks.suite import ClassMask, Part, Suite, Task
from ood_toolkit.datasets import ImageSet, JoinedImages
from ood_toolkit.datasets.catalogue import entry
from ood_toolkit.datasets.classes import class_list
from ood_toolkit.datasets.locate import find, how_to_get, open_set
from ood_toolkit.records import ALL_CLASSES

Protocol = Literal["official", "full-1000way", "official+1000way", "vim-1000way"]
"""official: 200 masked logits. full-1000way: the same images under all 1000 classes. official+1000way: both, side by
side. vim-1000way: ImageNet-O against all 50,000 validation images, 1000 classes, as in the ViM and GEN papers."""

NATURAL_ADVERSARIAL_SUITES = {
    "imagenet-a": ("imagenet-a",),
    "imagenet-a+clean": ("imagenet-a+clean",),
    "imagenet-o": ("imagenet-o",),
    "natural-adversarial": ("imagenet-a", "imagenet-a+clean", "imagenet-o"),
}
"""Suite name → what it scores."""


def available(root: Path) -> bool:
    """All that the suite `natural-adversarial` needs lies below `root`: both sets, and validation or its stand-in."""
    validation_there = any(find(entry(name), root) for name in ("imagenet-1k", STAND_IN))
    return validation_there and all(find(entry(name), root) for name in ("imagenet-a", "imagenet-o"))


def natural_adversarial_suite(
    name: str, root: Path, *, protocol: Protocol = "official", learning: Learning | None = None
) -> Suite:
    """A suite of `NATURAL_ADVERSARIAL_SUITES` for models that know the 1000 ImageNet classes in their usual order.

    Args:
        name: of the suite; underscores stand for hyphens, `imagenet_a_clean` for `imagenet-a+clean`.
        root: the data root.
        protocol: the rules.
        learning: what methods learn from.

    Raises:
        ValueError: unknown name or protocol, or data that is absent, with what to do about it.
    """
    name = suite_name(name)
    if protocol not in get_args(Protocol):
        raise ValueError(f"no protocol is named {protocol!r}; known: {', '.join(get_args(Protocol))}")
    if protocol == "vim-1000way" and name != "imagenet-o":
        raise ValueError("the protocol vim-1000way is about imagenet-o alone; use --suite imagenet-o")
    learning = learning or Learning()
    scored = NATURAL_ADVERSARIAL_SUITES[name]
    wide = protocol != "official"
    classes = set(range(CLASSES)) if wide else _classes(scored)
    sets = [open_set(entry(s), root) for s in ("imagenet-a", "imagenet-o") if any(t.startswith(s) for t in scored)]
    known = validation(root, classes)
    if known is None and scored != ("imagenet-a",):
        raise ValueError(
            f"suite {name!r} needs ImageNet validation images (or ImageNetV2 as a stand-in) below {str(root)!r}. "
            + how_to_get(entry("imagenet-1k"))
        )
    chosen = learned(root, known, classes, learning)
    if scored == ("imagenet-a",) and not len(chosen.withheld):
        known = None  # neither scored nor learned from, so it need not pass through the models
    parts = _Parts(sets, known, chosen)
    tasks = _tasks(scored, parts, protocol)
    whole = protocol == "vim-1000way"
    deviations = _deviations(scored, parts, whole=whole)
    return Suite(
        name=name,
        caption=_caption(scored, protocol, parts, deviations, whole=whole),
        tasks=tasks,
        fit=parts.fit,
        calibration=parts.calibration,
        protocol=f"{protocol}{_suffix(known, deviations)}",
        notes=[fault for images in sets for fault in entry(images.name).faults],
        views=None if scored == ("imagenet-o",) else imagenet_views("imagenet-a-clean", class_mask("imagenet-a")),
    )


def suite_name(text: str) -> str:
    """The suite's name as records have it.

    >>> suite_name("imagenet_a_clean")
    'imagenet-a+clean'
    """
    name = text.replace("_", "-").replace("imagenet-a-clean", "imagenet-a+clean")
    if name not in NATURAL_ADVERSARIAL_SUITES:
        raise ValueError(f"no suite is named {text!r}; known: {', '.join(NATURAL_ADVERSARIAL_SUITES)}")
    return name


def class_mask(name: Literal["imagenet-a", "imagenet-o"]) -> ClassMask:
    """The 200 classes of the set, in the order of their WordNet ids."""
    return ClassMask(name, torch.tensor(list(class_list(name.replace("-", "_")).values())))


class _Parts:
    """Rows of one joined image set, so that each model passes over every image once."""

    def __init__(self, sets: Sequence[ImageSet], known: Validation | None, chosen: Learned) -> None:
        self.known = known
        self.withheld = chosen.withheld
        members = [*sets, known.images] if known else [*sets]
        self.images = JoinedImages(members, name="+".join(member.name for member in members))
        self.fit = self._own(chosen.fit)
        self.calibration = self._own(chosen.calibration)

    def of_set(self, name: str) -> Part:
        return Part(name, self.images, self.images.rows(name))

    def clean(self, name: str, classes: set[int]) -> Part:
        """Scored validation images of these classes."""
        return Part(name, self.images, self.clean_rows(classes), f"{self.source}, {len(classes)} classes")

    def mixed(self, name: str, adversarial: str, classes: set[int]) -> Part:
        rows = torch.cat([self.images.rows(adversarial), self.clean_rows(classes)])
        return Part(name, self.images, rows, f"{adversarial} and {self.source}, {len(classes)} classes")

    def clean_rows(self, classes: set[int]) -> Tensor:
        assert self.known is not None  # asked before
        rows = self.known.rows_of(classes)
        return self._start + rows[~torch.isin(rows, self.withheld)]

    @property
    def source(self) -> str:
        return "ImageNet validation" if self.known and self.known.official else "ImageNetV2 in place of validation"

    @property
    def _start(self) -> int:
        """Where the validation images begin."""
        return len(self.images) - len(self.images.members[-1])

    def _own(self, part: Part | None) -> Part | None:
        """The part, its rows counted in the joined set where they are validation rows."""
        if part is None or self.known is None or part.images is not self.known.images:
            return part
        return Part(part.name, self.images, self._start + part.indices, part.about)


def _classes(scored: Sequence[str]) -> set[int]:
    names = {"imagenet_o" if name == "imagenet-o" else "imagenet_a" for name in scored}
    return {index for name in names for index in class_list(name).values()}


def _tasks(scored: Sequence[str], parts: _Parts, protocol: Protocol) -> list[Task]:
    views = [("", True)] if protocol == "official" else [("", False)]
    if protocol == "official+1000way":
        views = [("", True), (ALL_CLASSES, False)]
    tasks = []
    for suffix, masked in views:
        mask_a = class_mask("imagenet-a") if masked else None
        mask_o = class_mask("imagenet-o") if masked else None
        a_classes, o_classes = _classes(["imagenet-a"]), _classes(["imagenet-o"])
        if "imagenet-a" in scored:
            alone = parts.of_set("imagenet-a")
            tasks += [Task(kind, f"imagenet-a{suffix}", alone, None, mask_a) for kind in _ON_KNOWN]
        if "imagenet-a+clean" in scored:
            mixed = parts.mixed("imagenet-a+clean", "imagenet-a", a_classes)
            clean = parts.clean("imagenet-a-clean", a_classes)
            tasks += [Task(kind, f"imagenet-a+clean{suffix}", mixed, None, mask_a) for kind in _ON_KNOWN]
            tasks.append(Task("calibration", f"imagenet-a-clean{suffix}", clean, None, mask_a))
        if "imagenet-o" in scored:
            inside = set(range(CLASSES)) if protocol == "vim-1000way" else o_classes
            known = parts.clean("imagenet-o-id", inside)
            tasks.append(Task("anomaly", f"imagenet-o{suffix}", known, parts.of_set("imagenet-o"), mask_o))
    return tasks


_ON_KNOWN = ("misclassification", "calibration")


def _deviations(scored: Sequence[str], parts: _Parts, *, whole: bool) -> list[str]:
    """In what the run is not the published protocol."""
    found = []
    for name in ("imagenet-a", "imagenet-o"):
        expected = entry(name).images
        if any(s.startswith(name) for s in scored) and len(parts.images.rows(name)) != expected:
            found.append(f"{name} has {len(parts.images.rows(name)):,} images here, {expected:,} were published")
    if scored == ("imagenet-a",):
        return found
    assert parts.known is not None  # only imagenet-a alone does without
    if not parts.known.official:
        return [*found, "ImageNetV2 matched-frequency stands in for ImageNet validation"]
    if len(parts.withheld):
        found.append(
            f"{len(parts.withheld):,} validation images are held out for learning (to score all, learn from none, or "
            "put ImageNet train and ImageNetV2 there too)"
        )
    classes = set(range(CLASSES)) if whole else _classes(scored)
    there = len(parts.known.rows_of(classes))
    if there != VALIDATION_PER_CLASS * len(classes):
        found.append(f"{there:,} validation images are here, {VALIDATION_PER_CLASS * len(classes):,} were published")
    return found


def _suffix(known: Validation | None, deviations: Sequence[str]) -> str:
    """What records add to the protocol's name where the run is not it."""
    if known is not None and not known.official:
        return "-standin"
    return "-like" if deviations else ""


def _caption(
    scored: Sequence[str], protocol: Protocol, parts: _Parts, deviations: Sequence[str], *, whole: bool
) -> str:
    logits = {
        "official": "The logits are cut to the set's 200 classes before the softmax.",
        "full-1000way": "All 1000 logits count, not the 200 of the published protocol.",
        "official+1000way": "The logits are cut to the set's 200 classes, and once more all 1000 count (1000-way).",
        "vim-1000way": "All 1000 logits and all validation images count, as in the ViM paper, which squashes images to "
        "the model's size (--transform squash); FPR95-ID is FPR at 95% of ID accepted.",
    }
    sentences = [f"Protocol {protocol}: {logits[protocol]}"]
    if "imagenet-a" in scored or "imagenet-a+clean" in scored:
        count = len(parts.images.rows("imagenet-a"))
        sentences.append(
            f"ImageNet-A: {count:,} images, a wrong prediction is positive; published metrics are accuracy, RMS-pub "
            "and AURRA, the others are this toolkit's."
        )
    if "imagenet-a+clean" in scored:
        sentences.append(f"Clean: {len(parts.clean_rows(_classes(['imagenet-a']))):,} images, {parts.source}.")
    if "imagenet-o" in scored:
        inside = len(parts.clean_rows(set(range(CLASSES)) if whole else _classes(["imagenet-o"])))
        outside = len(parts.images.rows("imagenet-o"))
        metric = "AUROC and FPR95-ID are the paper's metrics, AUPR is" if whole else "the published metric is AUPR"
        sentences.append(
            f"ImageNet-O: {outside:,} OOD images (positive) against {inside:,} of {parts.source}; {metric} by average "
            f"precision (chance {outside / (outside + inside):.1%}). About one in five of its images shows an ImageNet "
            "object after all."
        )
    if deviations:
        sentences.append(f"Not the published protocol: {'; '.join(deviations)}.")
    return " ".join(sentences)
