"""AdaSCALE: SCALE and LTS with a percentile for every image, chosen by how much a faint change moves its features."""

from abc import abstractmethod
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.ash import largest_mask, sum_ratio
from ood_toolkit.detectors.base import Detector, Differentiable
from ood_toolkit.detectors.energy import energy
from ood_toolkit.detectors.layers import tap_spec
from ood_toolkit.detectors.rectifier import checked_percentile
from ood_toolkit.detectors.train_rows import subset
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import largest_values

TAP = "nudged_features"


def trivial_change(gradient: Float[Tensor, "N 3 H W"], share: float) -> Float[Tensor, "N 3 H W"]:
    """The sign of the gradient at the given share of the numbers, those where it is smallest; 0 elsewhere."""
    flat = gradient.flatten(1)
    trivial = flat.abs().topk(int(flat.shape[1] * share), dim=1, largest=False).indices
    return torch.zeros_like(flat).scatter(1, trivial, flat.gather(1, trivial).sign()).view_as(gradient)


def row_concentration(features: Float[Tensor, "N D"], percentiles: Float[Tensor, " N"]) -> Float[Tensor, "N 1"]:
    """`s₁ / s₂` of non-negative features: the sum of a row over that of its `D − round(D p / 100)` largest."""
    width = features.shape[1]
    kept = (width - (width * percentiles / 100).round().long()).clamp_min(1)
    ranked = largest_values(features, int(kept.max())).sort(dim=1, descending=True).values
    ranked.masked_fill_(torch.arange(ranked.shape[1], device=features.device) >= kept.unsqueeze(1), 0.0)
    return sum_ratio(features, ranked.sum(dim=1, keepdim=True))


def nudged_features(
    classifier: Differentiable, images: Float[Tensor, "N 3 H W"], pixels: float = 0.05, epsilon: float = 0.113
) -> Float[Tensor, "N D"]:
    """The features of images whose least important pixels have moved by ε along the predicted logit's gradient.

    What fills the tap of this name: one pass with a backward pass, and one more. The classifier and the gradient mode
    are left as they were.

    Args:
        classifier: the model.
        images: in pixel units, 0 to 1.
        pixels: share of an image's numbers that move, those with the smallest gradient, in [0, 1].
        epsilon: how far they move, in pixel units.
    """
    images = images.detach().clone().requires_grad_()
    with torch.enable_grad():
        logits = classifier.differentiate(images).logits
        (gradient,) = torch.autograd.grad(logits.amax(dim=1).sum(), images)
    with torch.no_grad():
        return classifier(images + epsilon * trivial_change(gradient, pixels)).features


class AdaptiveScaling(Detector):
    """Estimates how strange a row is from how far a nudge moved its features, and scales less the stranger it is."""

    paper = (
        "Regmi, AdaSCALE: Adaptive Scaling for OOD Detection, 2025, arXiv:2503.08023, Eq. 8 and 9 of the version "
        "under review"
    )
    cite = "regmi2025adascale"
    needs = "train"
    reads = frozenset({"logits", "features", "taps"})
    cost = "O(C + D log D), after a tap that costs two passes and a backward pass of the model"
    bias: Float[Tensor, " C"]
    reference: Float[Tensor, " M"]

    allowed = {
        "stable_percent": "[0, 100]",
        "shift_percent": "[0, 100]",
        "shift_weight": "[0, inf)",
        "pixels": "[0, 1]",
        "epsilon": "[0, 1]",
        "rows": "[1, inf)",
    }

    def __init__(
        self,
        low_percentile: float = 80.0,
        high_percentile: float = 85.0,
        stable_percent: float = 5.0,
        shift_percent: float = 1.0,
        shift_weight: float = 10.0,
        pixels: float = 0.05,
        epsilon: float = 0.113,
        rows: int | None = 5000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.low_percentile = checked_percentile(low_percentile, "low_percentile")
        self.high_percentile = checked_percentile(high_percentile, "high_percentile")
        self.stable_percent = stable_percent
        self.shift_percent = shift_percent
        self.shift_weight = shift_weight
        self.pixels = pixels
        self.epsilon = epsilon
        self.rows = rows
        self.seed = seed

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The nudged features, with the `pixels` and `epsilon` that are asked for."""
        return (tap_spec(TAP, self, "pixels", "epsilon"),)

    def fit(self, train: Outputs) -> Self:
        """Copies the head's bias and learns how Q′ is distributed over training rows. Returns itself."""
        if not len(train):
            raise ValueError("fitting needs training rows, but there are none")
        rows = len(train) if self.rows is None else self.rows
        self.bias = train.head.bias.clone()
        values = [self.strangeness(batch) for batch in subset(train, rows, self.seed)]
        self.reference = torch.cat(values).sort().values
        return self

    def strangeness(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """`Q′ = C_o + λ Q`: the nudged values of the k₁ % largest features, and the shifts of the k₂ % largest."""
        nudged = outputs.taps[self.taps[0]]
        stable, shifted = (
            largest_mask(outputs.features, max(1, int(outputs.width * percent / 100)))
            for percent in (self.stable_percent, self.shift_percent)
        )
        stable = (nudged.relu() * stable).sum(dim=1)
        return stable + self.shift_weight * ((outputs.features - nudged).abs() * shifted).sum(dim=1)

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) energies of the scaled logits; higher = more out-of-distribution."""
        below = torch.searchsorted(self.reference, self.strangeness(outputs), right=True)
        familiar = 1 - below.to(outputs.features.dtype) / len(self.reference)
        percentiles = self.low_percentile + familiar * (self.high_percentile - self.low_percentile)
        return energy(self.scaled_logits(outputs, row_concentration(outputs.features.relu(), percentiles)))

    @abstractmethod
    def scaled_logits(self, outputs: Outputs, ratio: Float[Tensor, "N 1"]) -> Float[Tensor, "N C"]:
        """The logits, scaled by a row's `s₁ / s₂`."""


class AdaSCALEADetector(AdaptiveScaling):
    """Flags images whose *features*, scaled by an image-specific `exp(s₁ / s₂)`, have a high energy.

    SCALE, with the percentile p of `s₁ / s₂` between two bounds: `p = p_min + (1 − F(Q′))(p_max − p_min)`. F is the
    distribution function of Q′ over training rows. Q′ is measured by moving the pixels that matter least for the
    predicted logit by ε along its gradient (see `nudged_features`): features of OOD images move more.

    Args:
        low_percentile: p_min, in percent. 80 for ResNet-50.
        high_percentile: p_max, in percent. 85 for ResNet-50.
        stable_percent: k₁: share of largest features whose changed values enter Q′, in percent.
        shift_percent: k₂: share of largest features whose shifts enter Q′, in percent.
        shift_weight: λ.
        pixels: o: share of the image's numbers that are changed, in [0, 1].
        epsilon: ε, in pixel units, 0 to 1. The authors' 0.5 in normalised units is 0.5 · 0.226 for ImageNet.
        rows: training rows that make F, drawn at random; the authors' code takes 5000 of its validation images.
        seed: of that draw.

    Differs from the authors' code in changing images in pixel units, and in keeping at least one feature in either sum.
    """

    name = "adascale_a"
    equation = (
        "−log Σ_c exp(z′_c) with z′ = exp(s₁/s₂) (z − b) + b, the percentile of s₂ being p_min + (1 − F(Q′)) (p_max "
        "− p_min)"
    )

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
        rows: training rows that make F, drawn at random; the authors' code takes 5000 of its validation images.
        seed: of that draw.

    Differs from the authors' code in changing images in pixel units, and in keeping at least one feature in either sum.
    """

    name = "adascale_l"
    equation = "−log Σ_c exp((s₁/s₂)² z_c), the percentile of s₂ being p_min + (1 − F(Q′)) (p_max − p_min)"

    def scaled_logits(self, outputs: Outputs, ratio: Float[Tensor, "N 1"]) -> Float[Tensor, "N C"]:
        """The logits times `(s₁ / s₂)²`."""
        return outputs.logits * ratio.square()
