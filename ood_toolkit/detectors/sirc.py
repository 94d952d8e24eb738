"""SIRC: softmax confidence, kept where the features look familiar and revoked where they do not."""

from collections.abc import Callable
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.doctor import gini_odds
from ood_toolkit.detectors.entropy import softmax_entropy
from ood_toolkit.detectors.vim import origin, residual
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks, moments, one_group, principal_axes


def log_one_minus_msp(logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """`log(1 − max_c p_c)`, finite however confident the row is."""
    others = logits.scatter(-1, logits.argmax(dim=-1, keepdim=True), -torch.inf)
    return others.logsumexp(dim=-1) - logits.logsumexp(dim=-1)


def log_entropy(logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """`log H(p)`."""
    return softmax_entropy(logits).clamp_min(torch.finfo(logits.dtype).tiny).log()


def log_one_minus_doctor(logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """`log(1 − Σ_c p_c²)`: with the odds o = (1 − g) / g of DOCTOR, 1 − g is o / (1 + o)."""
    odds = gini_odds(logits).clamp_min(torch.finfo(logits.dtype).tiny)
    return odds.log() - odds.log1p()


PRIMARIES: dict[str, Callable[[Tensor], Tensor]] = {
    "msp": log_one_minus_msp,
    "entropy": log_entropy,
    "doctor": log_one_minus_doctor,
}
"""`log(S₁max − S₁)` of the softmax scores that SIRC augments."""
SECONDARIES = ("l1", "residual")


def default_dim(width: int) -> int:
    """Dimensions of the principal subspace in the authors' code: 1000 above 1500 features, else 512, or half."""
    return 1000 if width > 1500 else 512 if width > 512 else width // 2


class SIRCDetector(Detector):
    """Flags inputs that are unsure or look unfamiliar, without giving up misclassification detection.

    Choose it for selective classification under OOD inputs, where one score must reject both wrong answers and
    strangers. The confidence `C = −(S₁max − S₁)(1 + exp(−b (S₂ − a)))` follows the softmax score S₁ while the feature
    score S₂ is ordinary for training data, and falls as soon as S₂ is low. `a = μ − 3σ` and `b = 1/σ` of S₂ on the
    training data. Here `log(S₁max − S₁) + log(1 + exp(−b (S₂ − a)))`: the same ranking, no saturation.

    Args:
        primary: S₁: "msp", "entropy" (negative entropy) or "doctor" (Σ p²).
        secondary: S₂: "l1", the features' L1 norm, or "residual", minus the norm of the features (about
            `−W⁺ b`, as in ViM) outside their principal subspace.
        dim: dimensions of the principal subspace; None takes `default_dim`, the authors' rule.

    Differs from the authors' code in a factor of the residual that the standardisation by a and b cancels.
    """

    name = "sirc"
    paper = (
        "Xia and Bouganis, Augmenting Softmax Information for Selective Classification with Out-of-Distribution Data, "
        "ACCV 2022, arXiv:2207.07506"
    )
    cite = "xia2022sirc"
    equation = "log(S₁max − S₁) + log(1 + exp(−(S₂ − a) / σ)) with a = μ − 3σ of S₂ in training"
    needs = "train"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D), with the residual O(C + D²)"
    location: Float[Tensor, ""]
    slope: Float[Tensor, ""]
    centre: Float[Tensor, " D"]
    complement: Float[Tensor, "D R"]

    allowed = {"dim": "[1, inf)"}

    def __init__(self, primary: str = "msp", secondary: str = "l1", dim: int | None = None) -> None:
        super().__init__()
        if primary not in PRIMARIES or secondary not in SECONDARIES:
            raise ValueError(
                f"primary must be one of {', '.join(PRIMARIES)} and secondary one of {', '.join(SECONDARIES)}, "
                f"got {primary!r} and {secondary!r}"
            )
        self.primary = primary
        self.secondary = secondary
        self.dim = dim

    def fit(self, train: Outputs) -> Self:
        """Learns the principal subspace, where it is asked for, and where S₂ lies for training rows. Returns itself."""
        if not len(train):
            raise ValueError("fitting needs training rows, but there are none")
        if self.secondary == "residual":
            self._learn_complement(train)
        values = torch.cat([self._feature_score(batch.features) for batch in blocks(train)]).double()
        # where all rows are alike, what rounding leaves: 1 / σ must fit into the dtype of the head
        rounding = torch.finfo(train.head.weight.dtype)
        spread = torch.maximum(values.std(correction=0), values.mean().abs() * rounding.eps).clamp_min(rounding.tiny)
        self.location = (values.mean() - 3 * spread).to(train.head.weight.dtype)
        self.slope = (1 / spread).to(train.head.weight.dtype)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) log of the negative confidence; higher = more out-of-distribution, or more likely wrong."""
        unfamiliar = softplus(-self.slope * (self._feature_score(outputs.features) - self.location))
        return PRIMARIES[self.primary](outputs.logits) + unfamiliar

    def _feature_score(self, features: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        if self.secondary == "l1":
            return features.abs().sum(dim=1)
        return -residual(features, self.centre, self.complement)

    def _learn_complement(self, train: Outputs) -> None:
        dim = default_dim(train.width) if self.dim is None else self.dim
        if not 1 <= dim < train.width:
            raise ValueError(f"dim must lie between 1 and {train.width - 1} for {train.width} features, got {dim}")
        gathered = moments(train, groups=one_group)
        centre = origin(train.head)
        offset = gathered.mean - centre
        _, axes = principal_axes(gathered.total + torch.outer(offset, offset))
        self.centre = centre.to(train.head.weight.dtype)
        self.complement = axes[:, dim:].to(train.head.weight.dtype)
