"""GAIA: abnormal gradients on inner maps, of the kind that explanations of a prediction are made from."""

from typing import Self

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.layers import tap_spec
from ood_toolkit.outputs import Outputs

_PAPER = (
    "Chen et al., GAIA: Delving into Gradient-based Attribution Abnormality for Out-of-distribution Detection, "
    "NeurIPS 2023, arXiv:2311.09620"
)


class GAIAZDetector(Detector):
    """Flags images for which much of the gradient on inner maps is not 0 (zero-deflation).

    ρ_k is the share of positions of channel k where the gradient of the largest logit is not 0, on the output of a
    normalisation layer: where a later ReLU is off, it is 0. The score is the mean of ρ² over all channels, which is
    the square of the paper's Frobenius norm over their number. Needs no training data, but a network with ReLU or
    another activation with a flat part; the authors prefer it for CIFAR, and `gaia_a` for ImageNet.

    Args:
        layers: names of modules whose normalisation layers count, ("",) being the whole network; by default the last
            two stages. The authors take those for ResNets in most runs, the last stage for BiT (GroupNorm), and
            the whole network for GAIA-Z on CIFAR.

    Differs from the authors' code, from which it is written, in direction, and in leaving out the map or feature
    that they add after the last stage: hardly any of its gradients are 0, for any image.
    """

    name = "gaia_z"
    paper = _PAPER
    cite = "chen2023gaia"
    family = "layers"
    equation = "mean_k ρ_k² with ρ_k the share of positions with ∂ max_c z_c / ∂A_k ≠ 0"
    reads = frozenset({"taps"})
    cost = "O(L) over layers, after a tap that costs a pass and part of a backward pass"

    def __init__(self, layers: tuple[str, ...] | None = None) -> None:
        super().__init__()
        self.layers = layers

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How much of every layer's gradient is not 0."""
        return (tap_spec("gradient_density", self, "layers"),)

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 1]; higher = more out-of-distribution."""
        return outputs.taps[self.taps[0]].square().sum(dim=1)


class GAIAADetector(Detector):
    """Flags images whose features hang strongly on inner channels while the prediction hangs little on the features.

    s_k is the mean gradient of `Σ_d f_d` over the positions of channel k, on the output of a normalisation layer; g is
    the gradient of `Σ_c log softmax(z)_c` with respect to the feature, which is `Wᵀ (1 − C p)` and needs no backward
    pass. The score is the mean of s² over all channels, over the mean of |g| (channel-wise average abnormality).
    Needs no training data; works with any activation, but only where the layers normalise maps: batch, group or
    instance norms.

    Args:
        layers: names of modules whose normalisation layers count, ("",) being the whole network; by default the last
            two stages, the authors' choice for ResNets.

    Differs from the authors' code, from which it is written, in direction, and for most of their networks by a
    factor that is the same for all images: g there is that of a position of the last map, here and for their BiT that
    of the pooled feature.
    """

    name = "gaia_a"
    paper = _PAPER
    cite = "chen2023gaia"
    family = "layers"
    equation = "mean_k s_k² / mean_d |Wᵀ (1 − C p)|_d with s_k the mean of ∂ Σ_d f_d / ∂A_k over positions"
    needs = "head"
    reads = frozenset({"logits", "taps"})
    cost = "O(CD), after a tap that costs a pass and part of a backward pass"

    weight: Float[Tensor, "C D"]

    def __init__(self, layers: tuple[str, ...] | None = None) -> None:
        super().__init__()
        self.layers = layers

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Every layer's mean gradients."""
        return (tap_spec("gradient_means", self, "layers"),)

    def fit(self, train: Outputs) -> Self:
        """Copies the head's weight. Returns itself."""
        self.weight = train.head.weight.clone()
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) ≥ 0; higher = more out-of-distribution."""
        inner = outputs.taps[self.taps[0]].square().sum(dim=1)
        pull = 1 - outputs.classes * outputs.logits.softmax(dim=1)
        return inner / (pull @ self.weight).abs().mean(dim=1).clamp_min(1e-12)
