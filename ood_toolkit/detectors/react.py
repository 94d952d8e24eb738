"""ReAct: no feature may be larger than almost all training features are."""

from typing import Self

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.rectifier import Rectifier, checked_percentile
from ood_toolkit.outputs import Outputs
from ood_toolkit.quantiles import quantile


class ReActDetector(Rectifier):
    """Flags inputs that lose their confidence when unusually large features are cut off.

    Choose it for networks with ReLU features, where out-of-distribution inputs excite a few units far beyond the
    training range. The paper's `ReAct(x; c) = min(x, c)`, then the head and the energy.

    Args:
        percentile: c is this percentile of all numbers in the training features. The paper uses 90.
        score: the equation that reads the new logits, e.g. "energy" (the paper's), "msp", "maxlogit".

    Differs from the paper in direction only.
    """

    name = "react"
    paper = (
        "Sun et al., ReAct: Out-of-distribution Detection With Rectified Activations, NeurIPS 2021, arXiv:2111.12797"
    )
    cite = "sun2021react"
    equation = "S(W min(f, c) + b)"
    needs = "train"
    threshold: Float[Tensor, ""]

    sweep = {"percentile": (85.0, 90.0, 95.0, 99.0)}

    def __init__(self, percentile: float = 90.0, score: str = "energy") -> None:
        super().__init__(score)
        self.percentile = checked_percentile(percentile)

    def fit(self, train: Outputs) -> Self:
        """Learns the threshold, exactly, in sweeps over the rows. Returns itself."""
        self.threshold = quantile(train, self.percentile / 100)
        return super().fit(train)

    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The features, at most the threshold."""
        return features.clamp(max=self.threshold)
