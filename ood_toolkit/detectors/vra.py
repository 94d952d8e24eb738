"""VRA: small features are noise, large ones are overconfidence."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.rectifier import Rectifier, checked_percentile
from ood_toolkit.outputs import Outputs
from ood_toolkit.quantiles import quantile

VARIANTS = ("paper", "openood", "pytorch_ood")


class VRADetector(Rectifier):
    """Flags inputs that lose their confidence when small features are silenced and large ones cut off.

    A two-sided ReAct. The paper's VRA-P: 0 below α, `z` between, β above β. VRA+ adds γ between.
    α and β are quantiles of the training features, one pair for each dimension.

    Args:
        low_percentile: 100 η_α, in percent.
        high_percentile: 100 η_β, in percent.
        amplify: γ of VRA+, in feature units; 0 is VRA-P.
        variant: "paper"; "openood" (one global pair of thresholds, small values raised to α instead of silenced);
            "pytorch_ood" (a pair for each dimension, small values raised to α).
        score: the equation that reads the new logits.

    The defaults are the authors' CIFAR-100 setting (η_α = 0.6, η_β = 0.95); the paper picks both on Gaussian noise
    from {0.5, 0.6, 0.65, 0.7} and {0.8, …, 0.99}. Differs from the authors' ImageNet commands, which give absolute
    thresholds for each architecture (0.5 and 1 for ResNet-50) instead of quantiles.
    """

    name = "vra"
    paper = (
        "Xu et al., VRA: Variational Rectified Activation for Out-of-distribution Detection, NeurIPS 2023, "
        "arXiv:2302.11716"
    )
    cite = "xu2023vra"
    equation = "S(W g + b) with g_d = 0 where f_d < α_d, β_d where f_d > β_d, f_d + γ between"
    needs = "train"
    low: Float[Tensor, "..."]
    high: Float[Tensor, "..."]

    sweep = {"low_percentile": (1.0, 5.0, 10.0, 15.0, 60.0), "high_percentile": (85.0, 90.0, 95.0, 99.0)}

    allowed = {"amplify": "[0, inf)"}

    def __init__(
        self,
        low_percentile: float = 60.0,
        high_percentile: float = 95.0,
        amplify: float = 0.0,
        variant: str = "paper",
        score: str = "energy",
    ) -> None:
        super().__init__(score)
        if variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
        self.low_percentile = checked_percentile(low_percentile, "low_percentile")
        self.high_percentile = checked_percentile(high_percentile, "high_percentile")
        self.amplify = amplify
        self.variant = variant

    def fit(self, train: Outputs) -> Self:
        """Learns both thresholds, exactly, in sweeps over the rows. Returns itself."""
        levels = [self.low_percentile / 100, self.high_percentile / 100]
        self.low, self.high = quantile(train, levels, per_column=self.variant != "openood").unbind()
        return super().fit(train)

    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The features within the thresholds."""
        # comparisons as numbers: torch.where takes ten times as long
        kept = torch.ge(features, self.low, out=torch.empty_like(features))
        bounded = torch.minimum(features, self.high)
        if self.amplify:
            under = torch.le(features, self.high, out=torch.empty_like(features))
            bounded = bounded.add_(under.mul_(kept), alpha=self.amplify)
        return bounded.mul_(kept) if self.variant == "paper" else torch.maximum(bounded, self.low)
