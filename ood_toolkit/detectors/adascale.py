"""AdaSCALE: SCALE and LTS with a percentile for every image, chosen by how much a faint change moves its features."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Differentiable, LiveDetector
from ood_toolkit.detectors.energy import energy
from ood_toolkit.detectors.rectifier import checked_percentile
from ood_toolkit.outputs import Outputs


def trivial_change(gradient: Float[Tensor, "N 3 H W"], share: float) -> Float[Tensor, "N 3 H W"]:
    """The sign of the gradient at the given share of the numbers, those where it is smallest; 0 elsewhere."""
    flat = gradient.flatten(1)
    trivial = flat.abs().topk(int(flat.shape[1] * share), dim=1, largest=False).indices
    return torch.zeros_like(flat).scatter(1, trivial, flat.gather(1, trivial).sign()).view_as(gradient)


def row_concentration(features: Float[Tensor, "N D"], percentiles: Float[Tensor, " N"]) -> Float[Tensor, "N 1"]:
    """`s₁ / s₂` of non-negative features: the sum of a row over that of its `D − round(D p / 100)` largest."""
    width = features.shape[1]
    kept = (width - (width * percentiles / 100).round().long()).clamp_min(1)
    sums = features.sort(dim=1, descending=True).values.cumsum(dim=1)
    top = sums.gather(1, kept.unsqueeze(1) - 1)
    return torch.where(top == 0, 1.0, sums[:, -1:] / torch.where(top == 0, 1.0, top))


class AdaptiveScaling(LiveDetector):
    """Estimates how strange an image is, scales less the stranger it is, and scores with the energy.

    Must learn from in-distribution *images*, not outputs: `fit(train)` copies the head's bias, and
    `fit_images(classifier, batches)` then learns the distribution of Q′ from a few thousand training images.
    """

    paper = "Regmi, AdaSCALE: Adaptive Scaling for OOD Detection, 2025, arXiv:2503.08023"
    cite = "regmi2025adascale"
    needs = "train"
    cost = "two passes and one backward pass of the model"
    bias: Float[Tensor, " C"]
    reference: Float[Tensor, " M"]

    def __init__(
        self,
        low_percentile: float,
        high_percentile: float,
        stable_percent: float,
        shift_percent: float,
        shift_weight: float,
        pixels: float,
        epsilon: float,
    ) -> None:
        super().__init__()
        self.low_percentile = checked_percentile(low_percentile, "low_percentile")
        self.high_percentile = checked_percentile(high_percentile, "high_percentile")
        self.stable_percent = stable_percent
        self.shift_percent = shift_percent
        self.shift_weight = shift_weight
        self.pixels = pixels
        self.epsilon = epsilon

    def fit(self, train: Outputs) -> Self:
        """Copies the head's bias. Returns itself; `fit_images` must follow."""
        self.bias = train.head.bias.clone()
        return self

    def fit_images(self, classifier: Differentiable, batches: Iterable[Float[Tensor, "N 3 H W"]]) -> Self:
        """Learns how Q′ is distributed over in-distribution images, in pixel units. Returns itself."""
        values = [self._strangeness(*self._views(classifier, images)) for images in batches]
        if not values:
            raise ValueError("fit_images needs at least one batch of in-distribution images, got none")
        self.reference = torch.cat(values).sort().values
        return self

    @abstractmethod
    def scaled_logits(self, outputs: Outputs, ratio: Float[Tensor, "N 1"]) -> Float[Tensor, "N C"]:
        """The logits, scaled by a row's `s₁ / s₂`."""

    def score(self, classifier: Differentiable, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
        """(N,) energies of the scaled logits; higher = more out-of-distribution."""
        outputs, shifted = self._views(classifier, images)
        below = torch.searchsorted(self.reference, self._strangeness(outputs, shifted), right=True)
        familiar = 1 - below.to(shifted.dtype) / len(self.reference)
        percentiles = self.low_percentile + familiar * (self.high_percentile - self.low_percentile)
        ratio = row_concentration(outputs.features.relu(), percentiles)
        return energy(self.scaled_logits(outputs, ratio))

    def _views(
        self, classifier: Differentiable, images: Float[Tensor, "N 3 H W"]
    ) -> tuple[Outputs, Float[Tensor, "N D"]]:
        """The outputs of the images, and the features of the images after a change along the trivial pixels."""
        images = images.detach().clone().requires_grad_()
        with torch.enable_grad():
            live = classifier.differentiate(images)
            (gradient,) = torch.autograd.grad(live.logits.amax(dim=1).sum(), images)
        with torch.no_grad():
            outputs = Outputs(
                logits=live.logits.detach(), features=live.features.detach(), labels=live.labels, head=live.head
            )
            changed = images.detach() + self.epsilon * trivial_change(gradient, self.pixels)
            return outputs, classifier(changed).features

    def _strangeness(self, outputs: Outputs, shifted: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """`Q′ = C_o + λ Q`: the changed features among the k₁ % largest, and the shifts of the k₂ % largest."""
        width = outputs.width
        order = outputs.features.argsort(dim=1, descending=True, stable=True)
        stable = shifted.relu().gather(1, order[:, : max(1, int(width * self.stable_percent / 100))])
        shift = (outputs.features - shifted).abs().gather(1, order[:, : max(1, int(width * self.shift_percent / 100))])
        return stable.sum(dim=1) + self.shift_weight * shift.sum(dim=1)


class AdaSCALEADetector(AdaptiveScaling):
    """Flags images whose *features*, scaled by an image-specific `exp(s₁ / s₂)`, have a high energy.

    SCALE, with the percentile p of `s₁ / s₂` between two bounds: `p = p_min + (1 − F(Q′))(p_max − p_min)`. F is the
    distribution function of Q′ over in-distribution images. Q′ is measured by moving the pixels that matter least for
    the predicted logit by ε along its gradient: features of OOD images move more.

    Args:
        low_percentile: p_min, in percent. 80 for ResNet-50.
        high_percentile: p_max, in percent. 85 for ResNet-50.
        stable_percent: k₁: share of largest features whose changed values enter Q′, in percent.
        shift_percent: k₂: share of largest features whose shifts enter Q′, in percent.
        shift_weight: λ.
        pixels: o: share of the image's numbers that are changed, in [0, 1].
        epsilon: ε, in pixel units, 0 to 1. The authors' 0.5 in normalised units is 0.5 · 0.226 for ImageNet.

    Differs from the authors' code in changing images in pixel units, and in keeping at least one feature in either sum.
    """

    name = "adascale_a"

    def __init__(
        self,
        low_percentile: float = 80.0,
        high_percentile: float = 85.0,
        stable_percent: float = 5.0,
        shift_percent: float = 1.0,
        shift_weight: float = 10.0,
        pixels: float = 0.05,
        epsilon: float = 0.113,
    ) -> None:
        super().__init__(low_percentile, high_percentile, stable_percent, shift_percent, shift_weight, pixels, epsilon)

    def scaled_logits(self, outputs: Outputs, ratio: Float[Tensor, "N 1"]) -> Float[Tensor, "N C"]:
        """The head's logits for the features times `exp(s₁ / s₂)`."""
        return ratio.clamp_max(80.0).exp() * (outputs.logits - self.bias) + self.bias


class AdaSCALELDetector(AdaptiveScaling):
    """Flags images whose *logits*, scaled by an image-specific `(s₁ / s₂)²`, have a high energy.

    LTS with the percentile of `AdaSCALEADetector`; the features and predictions stay untouched.

    Args:
        low_percentile: p_min, in percent. 80 for ResNet-50.
        high_percentile: p_max, in percent. 85 for ResNet-50.
        stable_percent: k₁: share of largest features whose changed values enter Q′, in percent.
        shift_percent: k₂: share of largest features whose shifts enter Q′, in percent.
        shift_weight: λ.
        pixels: o: share of the image's numbers that are changed, in [0, 1].
        epsilon: ε, in pixel units, 0 to 1. The authors' 0.5 in normalised units is 0.5 · 0.226 for ImageNet.

    Differs from the authors' code in changing images in pixel units, and in keeping at least one feature in either sum.
    """

    name = "adascale_l"

    def __init__(
        self,
        low_percentile: float = 80.0,
        high_percentile: float = 85.0,
        stable_percent: float = 5.0,
        shift_percent: float = 1.0,
        shift_weight: float = 10.0,
        pixels: float = 0.05,
        epsilon: float = 0.113,
    ) -> None:
        super().__init__(low_percentile, high_percentile, stable_percent, shift_percent, shift_weight, pixels, epsilon)

    def scaled_logits(self, outputs: Outputs, ratio: Float[Tensor, "N 1"]) -> Float[Tensor, "N C"]:
        """The logits times `(s₁ / s₂)²`."""
        return outputs.logits * ratio.square()
