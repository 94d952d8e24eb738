"""What a class mask does to outputs, to taps, and to live detectors, which run the model themselves."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.benchmarks.suite import ClassMask, Suite
from ood_toolkit.detectors import LiveDetector
from ood_toolkit.detectors.base import Differentiable
from ood_toolkit.fitted import parse
from ood_toolkit.models.masked import MaskedClassifier
from ood_toolkit.outputs import Outputs

_AMONG_CLASSES = ("gradient_density", "local_mcm", "negative_cosines", "nudged_features")
"""Taps that look at all classes in the pass itself: under a mask they are another tap, with `classes`."""

_BY_CLASS = ("dropout_logits", "augmented_logits")
"""Taps with one column per class along their last axis: a mask cuts them like logits."""


def masks_of(suite: Suite) -> list[ClassMask | None]:
    """The class masks of a suite's tasks, each once; None is no mask."""
    return list({task.mask.name if task.mask else "": task.mask for task in suite.tasks}.values())


def taps_under(taps: Sequence[str], masks: Iterable[ClassMask | None]) -> tuple[str, ...]:
    """What a model must give so that detectors find these taps under each of the masks; None is no mask.

    >>> taps_under(["local_mcm", "stage_means"], [ClassMask("two", torch.tensor([3, 1]))])
    ('local_mcm(classes=(3, 1))', 'stage_means')
    """
    return tuple(dict.fromkeys(tap_under(tap, mask) for tap in taps for mask in masks))


def tap_under(tap: str, mask: ClassMask | None) -> str:
    """The tap that a detector finds as `tap` under the mask."""
    name, arguments = parse(tap)
    if mask is None or name not in _AMONG_CLASSES:
        return tap
    return _spec(name, {**arguments, "classes": tuple(mask.classes.tolist())})


class MaskedLive(LiveDetector):
    """A live detector that sees the model through a class mask.

    Args:
        detector: fitted on outputs under the same mask, if it needs fitting.
        mask: the classes that count.
    """

    name = "masked"

    def __init__(self, detector: LiveDetector, mask: ClassMask) -> None:
        super().__init__()
        self.detector = detector
        self.mask = mask

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The detector and the mask's classes, which the store's key must know."""
        return {"detector": self.detector, "classes": tuple(self.mask.classes.tolist())}

    @property
    def spec(self) -> str:
        """The detector's spec, and the mask's name."""
        return f"{self.detector.spec}@{self.mask.description}"

    def score(self, classifier: Differentiable, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
        """The detector's scores under the mask; higher = more out-of-distribution."""
        return self.detector(MaskedClassifier(classifier, self.mask.classes), images)


def seen_through(detector: LiveDetector, mask: ClassMask | None) -> LiveDetector:
    """The detector itself where there is no mask."""
    return detector if mask is None else MaskedLive(detector, mask)


def masked(outputs: Outputs, mask: ClassMask | None) -> Outputs:
    """The outputs under the mask, their taps too; the outputs themselves where there is none.

    A tap that looks at all classes is left out, unless the model has given it for those of the mask (`taps_under`).
    """
    if mask is None:
        return outputs
    classes, chosen = torch.as_tensor(mask.classes), {}
    for spec in outputs.taps:
        name, arguments = parse(spec)
        if name in _AMONG_CLASSES:
            if arguments.pop("classes", None) == tuple(classes.tolist()):
                chosen[_spec(name, arguments)] = (spec, ())
        else:
            chosen[spec] = (spec, [lambda tap: tap[..., classes.to(tap.device)]] if name in _BY_CLASS else ())
    return outputs.select_classes(classes).choose_taps(chosen)


def _spec(name: str, arguments: Mapping[str, Any]) -> str:
    return name + (f"({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" if arguments else "")
