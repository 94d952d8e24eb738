"""A classifier that knows only some of its classes."""

from torch import Tensor

from ood_toolkit.detectors.base import Differentiable
from ood_toolkit.outputs import Outputs


class MaskedClassifier:
    """A classifier under a class mask: logits and head are cut before anything else.

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
