"""Live detectors under a class mask: they run the model themselves, so the mask goes around the model."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.benchmarks.suite import ClassMask
from ood_toolkit.detectors import LiveDetector
from ood_toolkit.detectors.base import Differentiable
from ood_toolkit.outputs import Outputs


class MaskedClassifier:
    """A classifier that knows only some of its classes.

    Args:
        classifier: of all classes.
        classes: (K,) those that count, in their new order.
    """

    def __init__(self, classifier: Differentiable, classes: Tensor) -> None:
        self._classifier = classifier
        self._classes = classes

    def __call__(self, images: Tensor) -> Outputs:
        """Masked outputs without gradients."""
        return self._classifier(images).select_classes(self._classes)

    def differentiate(self, images: Tensor) -> Outputs:
        """Masked outputs with gradients."""
        return self._classifier.differentiate(images).select_classes(self._classes)


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
    """The outputs themselves where there is no mask."""
    return outputs if mask is None else outputs.select_classes(torch.as_tensor(mask.classes))
