"""NECO: how much of a feature lies in the subspace that neural collapse leaves to the classes."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import components_for, moments, one_group, principal_axes

_VARIANTS = {"resnet": (False, False), "vit": (True, False), "deit": (True, True), "swin": (True, True)}
"""Whether the ratio is multiplied by the largest logit, and whether its denominator is the raw feature's length."""


class NECODetector(Detector):
    """Flags features that lose much of their length in the principal subspace of the training features.

    `‖P z‖ / ‖z‖` (Ben Ammar et al.), z the feature standardised per dimension, P its leading principal
    components, times the largest logit where `arch` says so. Made for networks trained until neural collapse.

    Args:
        dim: components in P, 1 to D; by default the fewest that hold `variance` of the total.
        variance: the share of the variance to keep, in (0, 1], where `dim` is not given.
        arch: the authors' variants. "vit": times the largest logit. "resnet": the ratio alone. "deit"
            and "swin": times the largest logit, over the length of the feature that is not standardised.

    Differs from the authors' code in direction: there high means in-distribution. Eq. 6 is of the features as they
    are; standardising them is the code's.
    """

    name = "neco"
    paper = (
        "Ben Ammar et al., NECO: NEural Collapse Based Out-of-distribution detection, ICLR 2024, arXiv:2310.06823, "
        "Eq. 6"
    )
    cite = "benammar2024neco"
    equation = "−max_c z_c ‖P f̃‖₂ / ‖f̃‖₂ with f̃ the feature standardised per dimension"
    needs = "train"
    cost = "O(D·dim + C)"

    centre: Float[Tensor, " D"]
    scale: Float[Tensor, " D"]
    axes: Float[Tensor, "D q"]

    allowed = {"dim": "[1, inf)", "variance": "(0, 1]"}

    def __init__(self, dim: int | None = None, variance: float = 0.9, arch: str = "vit") -> None:
        super().__init__()
        self.dim = dim
        self.variance = variance
        self.arch = arch

    def fit(self, train: Outputs) -> Self:
        """One sweep over all rows, labelled or not."""
        if self.arch not in _VARIANTS:
            raise ValueError(f"arch must be one of {', '.join(_VARIANTS)}, got {self.arch!r}")
        if self.dim is not None and not 1 <= self.dim <= train.width:
            raise ValueError(f"dim must lie between 1 and {train.width}, got {self.dim}")
        gathered = moments(train, groups=one_group)
        variance = gathered.total.diagonal()
        # a dimension that never changes is left at its scale; its variance is rounding, of the order of the mean's
        rounding = torch.finfo(torch.float64).eps * len(train)
        constant = variance <= rounding * variance + (rounding * gathered.mean).square()
        self.centre = gathered.mean
        self.scale = torch.where(constant, 1.0, variance.clamp_min(0.0).sqrt())
        variances, axes = principal_axes(gathered.total / torch.outer(self.scale, self.scale))
        self.axes = axes[:, : self.dim or components_for(variances, self.variance)].contiguous()
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) minus the ratio, in [−1, 0], or minus the ratio times the largest logit; higher = more OOD."""
        features = outputs.features
        rows = (features - self.centre.to(features)) / self.scale.to(features)
        times_logit, raw = _VARIANTS[self.arch]
        whole = torch.linalg.vector_norm(features if raw else rows, dim=1).clamp_min(1e-12)
        ratio = torch.linalg.vector_norm(rows @ self.axes.to(rows), dim=1) / whole
        return -ratio * outputs.logits.amax(dim=1) if times_logit else -ratio
