"""What a detector lacks to be fitted, as far as labels say it: known before the first image goes through a model."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ood_toolkit.benchmarks.methods import Method
from ood_toolkit.benchmarks.suite import ClassMask, Part, Suite
from ood_toolkit.calibrators import Calibrator, EnsemblePool
from ood_toolkit.outputs import UNKNOWN
from ood_toolkit.registry import AnyDetector

_SHOWN = 5
"""Class names in one message."""
_BY_PREDICTION = frozenset({"caref", "cadref"})
"""Detectors whose classes are those the model predicts, which labels do not tell."""
_NEIGHBOURS: Mapping[str, Callable[[AnyDetector, int], tuple[str, int]]] = {
    "knn": lambda detector, rows: ("k", rows),
    "nnguide": lambda detector, rows: ("k", max(1, int(rows * detector.hyperparameters["alpha"]))),
    "ssd": lambda detector, rows: ("clusters", rows),
}
"""Detector → the hyper-parameter that must not exceed a number of rows, and that number."""


def require_fit_data(
    methods: Sequence[Method], suite: Suite, masks: Sequence[ClassMask | None], classes: int
) -> dict[tuple[str, str], str]:
    """Why detectors cannot be fitted, by (detector spec, mask); those that came with "all" are left out for it.

    Args:
        methods: what is to run.
        suite: with what methods learn from.
        masks: the class masks under which they run; None is no mask.
        classes: of the models.

    Raises:
        ValueError: a detector that the user named cannot be fitted; says what it lacks, and what to do.
    """
    reasons = {}
    for method in methods:
        for mask in masks:
            reason = lacking(method, suite, mask, classes)
            if reason and method.chosen:
                raise ValueError(f"{method.spec}: {reason}")
            if reason:
                reasons[method.detector.spec, mask.description if mask else ""] = reason
    return reasons


def lacking(method: Method, suite: Suite, mask: ClassMask | None, classes: int) -> str:
    """Why one detector cannot be fitted under one mask, or "" where labels tell no reason."""
    detector = method.detector
    if detector.needs != "train":
        return ""
    part = suite.calibration if detector.held_out else suite.fit
    if part is None:
        return no_part("calibration" if detector.held_out else "fit")
    labels = _labels(part, mask, classes)
    rows = int((labels != UNKNOWN).sum())
    what = f"{part.name!r} ({len(part):,} images)"
    if not rows:
        return f"needs labelled training images, but none of {what} has a label; give class folders, or --labels FILE"
    absent = [] if _may_lack_classes(detector) else _absent(labels, classes if mask is None else len(mask.classes))
    if absent:
        named = ", ".join(_named(label, suite, mask) for label in absent[:_SHOWN])
        more = f", … ({len(absent):,} in all)" if len(absent) > _SHOWN else ""
        return (
            f"every class needs a training image, but {what} has none of {named}{more}; "
            f"give more images to learn from, or let such classes lack with {_remedy(detector)}"
        )
    if detector.name in _NEIGHBOURS and not method.tuned:
        parameter, most = _NEIGHBOURS[detector.name](detector, rows)
        value = detector.hyperparameters[parameter]
        if value > most:
            return (
                f"{parameter}={value} is more than the {most:,} training rows that {what} gives it; "
                f"give more images to learn from, or write {detector.name}({parameter}=…) with at most {most}"
            )
    return ""


def require_calibration_data(
    learners: Iterable[Calibrator | EnsemblePool], named: Collection[str], suite: Suite
) -> None:
    """Raises ValueError where a calibrator or pool that the user named has no labelled row to learn from.

    Args:
        learners: what is to run.
        named: the specs that the user named; those that came with "all" are left out later.
        suite: with what methods learn from.
    """
    for learner in learners:
        learns = type(learner).fit not in (Calibrator.fit, EnsemblePool.fit) and learner.name != "none"
        if not learns or learner.spec not in named:
            continue
        if suite.calibration is None:
            raise ValueError(f"{learner.spec}: {no_part('calibration')}")
        if not (suite.calibration.labels != UNKNOWN).any():
            what = f"{suite.calibration.name!r} ({len(suite.calibration):,} images)"
            raise ValueError(f"{learner.spec}: needs labelled calibration images, but none of {what} has a label")


class LeftOut:
    """Says why a method has no numbers, once for all models and class masks.

    Args:
        say: told so, in one line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self.failed: dict[str, str] = {}
        """Why methods that the user named have no numbers, by spec."""

    def __call__(self, spec: str, reason: str, *, named: bool = False) -> str:
        """The reason again."""
        if named:
            self.failed.setdefault(spec, reason)
        line = f"{spec} left out: {reason}"
        if line not in self._said:
            self._say(line)
        self._said.add(line)
        return reason


def no_part(kind: Literal["calibration", "fit"]) -> str:
    """That a run has no rows to learn from, with the options that give it some."""
    option, share = ("--calibrate", "--calibrate-fraction") if kind == "calibration" else ("--fit", "--fit-fraction")
    return (
        f"needs {kind} data, but this run has none; give {option} DIR or a {share} above 0 (folders), "
        "or another --learn, or more images of each class to hold out (ImageNet suites)"
    )


def _labels(part: Part, mask: ClassMask | None, classes: int) -> Tensor:
    """(K,) the part's labels as they are under the mask."""
    if mask is None:
        return part.labels
    place = torch.full((classes + 1,), UNKNOWN, dtype=torch.int64)
    place[torch.as_tensor(mask.classes)] = torch.arange(len(mask.classes))
    return place[part.labels]  # UNKNOWN (-1) reads the last entry, which stays UNKNOWN


def _may_lack_classes(detector: AnyDetector) -> bool:
    """Whether a class without a labelled row is no reason to refuse: no rule about it, or classes are predictions."""
    settings = detector.hyperparameters
    return settings.get("absent") != "error" or settings.get("group") == "prediction" or detector.name in _BY_PREDICTION


def _absent(labels: Tensor, classes: int) -> list[int]:
    counts = torch.bincount(labels[labels != UNKNOWN], minlength=classes)
    return (counts == 0).nonzero().flatten().tolist()


def _named(label: int, suite: Suite, mask: ClassMask | None) -> str:
    index = int(mask.classes[label]) if mask else label
    names = suite.views.names if suite.views else ()
    name = names[index] if index < len(names) else ""
    return f"{name!r} (class {index})" if name else f"class {index}"


def _remedy(detector: AnyDetector) -> str:
    """How to ask for the rule for absent classes that the detector knows beside "error"."""
    return "she(absent='mean')" if detector.name == "she" else "--absent-classes skip"
