"""Taps that are computed after the pass, from its outputs or by further passes of the model."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ood_toolkit.detectors.adascale import nudged_features
from ood_toolkit.detectors.base import Differentiable
from ood_toolkit.models.dropout import check_dropout, thinned
from ood_toolkit.models.gradients import GradientWatch, frozen, mean_gradient, nonzero_share, normalisation_layers
from ood_toolkit.models.masked import MaskedClassifier
from ood_toolkit.models.reductions import Tap
from ood_toolkit.models.stages import find_stages
from ood_toolkit.models.views import image_views
from ood_toolkit.outputs import Outputs

if TYPE_CHECKING:
    from ood_toolkit.models.classifier import Classifier


class Afterwards(Tap):
    """Computed after the pass, from its outputs or by further passes of the model."""

    differentiates: ClassVar[bool] = False
    """Whether it takes gradients of the images themselves, so that a pass with gradients saves one."""

    def check(self, model: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> None:
        """Raises ValueError, with the reason, if the model cannot give this tap.

        Args:
            model: in eval mode.
            run: a pass over images in pixel units; gives what enters the head.
            images: one or two of them.
        """

    @abstractmethod
    def compute(self, classifier: "Classifier", images: Float[Tensor, "N C H W"], outputs: Outputs) -> Tensor:
        """(N, …) what is kept.

        Args:
            classifier: the model without any tap.
            images: in pixel units, float in [0, 1], on the model's device.
            outputs: of these images.
        """


class NudgedFeatures(Afterwards):
    """(N, D): the features of images whose least important pixels have moved, see `adascale.nudged_features`.

    Args:
        pixels: see there.
        epsilon: see there.
        classes: indices of the classes among which the predicted one is sought, under a class mask.
    """

    name = "nudged_features"
    differentiates = True

    def __init__(self, pixels: float = 0.05, epsilon: float = 0.113, classes: tuple[int, ...] | None = None) -> None:
        self.pixels = pixels
        self.epsilon = epsilon
        self.classes = classes

    def compute(self, classifier: Differentiable, images: Float[Tensor, "N C H W"], outputs: Outputs) -> Tensor:
        """Two passes and one backward pass more."""
        seen = classifier if self.classes is None else MaskedClassifier(classifier, torch.tensor(self.classes))
        return nudged_features(seen, images, self.pixels, self.epsilon)


class DropoutLogits(Afterwards):
    """(N, samples, C): logits of passes with the model's dropout layers switched on, everything else in eval mode.

    A sample is one thinned network, the same for every image (see `thinned`): a row does not depend on its batch, and
    the first samples of many are those of few.

    Args:
        samples: passes, at least 1.
        seed: of the masks.
    """

    name = "dropout_logits"

    def __init__(self, samples: int = 10, seed: int = 0) -> None:
        if samples < 1:
            raise ValueError(f"dropout_logits needs at least one sample, got samples={samples}")
        self.samples = samples
        self.seed = seed

    def check(self, model: nn.Module, run: Callable[[Tensor], object], images: Tensor) -> None:
        """See `check_dropout`."""
        check_dropout(model, run, images)

    def compute(
        self, classifier: "Classifier", images: Float[Tensor, "N C H W"], outputs: Outputs
    ) -> Float[Tensor, "N samples C"]:
        """As many passes more as there are samples."""
        generator = torch.Generator().manual_seed(self.seed)
        with thinned(classifier.model, generator):
            return torch.stack([classifier(images).logits for _ in range(self.samples)], dim=1)


class AugmentedLogits(Afterwards):
    """(N, views, C): logits of the images and of fixed views of them, in the order of `image_views`; 7 by default.

    Args:
        flip: whether one view is the mirror image.
        shift: share of the side that four views are shifted by, in [0, 0.5]; 0 for none of these.
        crop: share of the side that an enlarged central crop keeps, in (0, 1]; 1 for no crop.
    """

    name = "augmented_logits"

    def __init__(self, flip: bool = True, shift: float = 0.04, crop: float = 0.9) -> None:
        if not (0 <= shift <= 0.5 and 0 < crop <= 1):
            raise ValueError(f"shift lies in [0, 0.5] and crop in (0, 1], got shift={shift} and crop={crop}")
        if not flip and shift == 0 and crop == 1:
            raise ValueError("augmented_logits needs one view beside the image itself: flip, shift or crop")
        self.flip = flip
        self.shift = shift
        self.crop = crop

    def compute(
        self, classifier: "Classifier", images: Float[Tensor, "N C H W"], outputs: Outputs
    ) -> Float[Tensor, "N views C"]:
        """One pass more per view but the first, whose logits are there."""
        _, *others = image_views(images, self.flip, self.shift, self.crop)
        return torch.stack([outputs.logits, *(classifier(view).logits for view in others)], dim=1)


class InnerGradients(Afterwards):
    """Gradients on the maps of normalisation layers, one number per layer, see `GradientWatch.norms`.

    Args:
        layers: see `normalisation_layers`.
    """

    def __init__(self, layers: Sequence[str] | None = None) -> None:
        self.layers = None if layers is None else tuple(layers)
        self._names: tuple[str, ...] = ()

    @staticmethod
    @abstractmethod
    def reduce(gradient: Float[Tensor, "N K H W"]) -> Float[Tensor, "N K"]:
        """What is kept of a gradient."""

    @abstractmethod
    def objective(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """What the gradients are of."""

    def check(self, model: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> None:
        """Finds the layers, and takes the gradients of the features."""
        self._names = normalisation_layers(model, find_stages(model, lambda: run(images)), self.layers)
        watch = GradientWatch(self._names, self.reduce)
        with torch.enable_grad(), frozen(model), watch.watching(model):
            objective = run(images).sum(dim=1)
        self.check_norms(watch.norms(objective), type(model).__name__)

    def check_norms(self, norms: Float[Tensor, "N L"], model: str) -> None:
        """Raises ValueError, with the reason, if these numbers of the named model can say nothing."""

    def compute(
        self, classifier: "Classifier", images: Float[Tensor, "N C H W"], outputs: Outputs
    ) -> Float[Tensor, "N L"]:
        """One pass more, and a backward pass as far as the first of the layers."""
        watch = GradientWatch(self._names, self.reduce)
        seen = classifier.differentiate(images.detach(), watch.watching(classifier.model))
        with torch.enable_grad():
            objective = self.objective(seen)
        return watch.norms(objective)


class GradientDensity(InnerGradients):
    """(N, L): per layer, how much of the gradient of the largest logit is not 0.

    Args:
        layers: see `normalisation_layers`.
        classes: indices of the classes among which the largest logit is sought, under a class mask.
    """

    name = "gradient_density"
    reduce = staticmethod(nonzero_share)

    def __init__(self, layers: Sequence[str] | None = None, classes: tuple[int, ...] | None = None) -> None:
        super().__init__(layers)
        self.classes = classes

    def check_norms(self, norms: Float[Tensor, "N L"], model: str) -> None:
        """Without a zero anywhere every image would score the same."""
        if bool((norms.square().sum(dim=1) > 1 - 1e-6).all()):
            raise ValueError(
                f"no inner gradient of {model} is 0: its activations seem to have no flat part, as ReLU has"
            )

    def objective(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """The largest logit."""
        logits = outputs.logits if self.classes is None else outputs.logits[:, list(self.classes)]
        return logits.max(dim=1).values


class GradientMeans(InnerGradients):
    """(N, L): per layer, the channels' mean gradients of the sum of the features.

    Args:
        layers: see `normalisation_layers`.
    """

    name = "gradient_means"
    reduce = staticmethod(mean_gradient)

    def objective(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """The sum of the features."""
        return outputs.features.sum(dim=1)
