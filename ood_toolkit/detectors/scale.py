"""SCALE: ASH-S without the pruning."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.ash import concentration
from ood_toolkit.detectors.rectifier import Rectifier, checked_percentile
from ood_toolkit.outputs import Outputs


class SCALEDetector(Rectifier):
    """Flags inputs whose features are spread thin: little mass beyond the largest ones means little scaling.

    Prefer it to `ASHSDetector`: the paper shows that scaling helps and pruning hurts, and the classes predicted stay
    nearly the same. Needs no training data. Features times `exp(s₁ / s₂)`, s₁ the sum of the row's features, s₂ that
    of its largest ones.

    Args:
        percentile: share of the features outside s₂, in percent. The paper uses 85 on ImageNet.
        score: the equation that reads the new logits.

    The factor is one number per row, so the new logits are `exp(s₁ / s₂) (z − b) + b`: no second pass of the head.
    Meant for non-negative features. Where features have both signs, `s₁ / s₂` is limited to ±80.
    """

    name = "scale"
    paper = (
        "Xu et al., Scaling for Training Time and Post-hoc Out-of-distribution Detection Enhancement, ICLR 2024, "
        "arXiv:2310.00227"
    )
    cite = "xu2024scale"
    equation = "S(exp(s₁/s₂) (z − b) + b)"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D)"

    sweep = {"percentile": (65.0, 70.0, 75.0, 80.0, 85.0, 90.0, 95.0)}

    def __init__(self, percentile: float = 85.0, score: str = "energy") -> None:
        super().__init__(score)
        self.percentile = checked_percentile(percentile)

    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The features times `exp(s₁ / s₂)`."""
        return features * concentration(features, self.percentile).exp()

    def rectified_logits(self, outputs: Outputs) -> Float[Tensor, "N C"]:
        """The head's logits for the scaled features, without the head's matrix product."""
        factor = concentration(outputs.features, self.percentile).exp()
        return factor * (outputs.logits - self.bias) + self.bias
