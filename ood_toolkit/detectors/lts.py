"""LTS: a temperature for every row, read off its features."""

from typing import Self

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.ash import concentration
from ood_toolkit.detectors.rectifier import Rectifier, checked_percentile
from ood_toolkit.outputs import Outputs


class LTSDetector(Rectifier):
    """Flags inputs whose logits stay small after scaling by how widely their features spread.

    SCALE's idea on the logits: the features and the predicted class stay untouched. Needs no training data. The score
    is `−log Σ_c exp(S z_c)` with `S = (s₁ / s₂)²`, the row's sum of features over that of its largest.

    Args:
        percentile: share of the features outside s₂, in percent. The paper takes the top 5 %.
        power: the exponent of `s₁ / s₂`. The paper's is 2; −2 divides the logits by S, as pytorch-ood 0.4 does.
        score: the equation that reads the new logits.

    As in the authors' code, negative features count as 0 in both sums.
    """

    name = "lts"
    paper = (
        "Djurisic et al., Logit Scaling for Out-of-Distribution Detection, Machine Vision and Applications 2025, "
        "arXiv:2409.01175"
    )
    cite = "djurisic2025lts"
    equation = "S(z (s₁/s₂)^power)"
    needs = "nothing"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D)"

    allowed = {"power": "(-inf, inf)"}

    def __init__(self, percentile: float = 95.0, power: float = 2.0, score: str = "energy") -> None:
        super().__init__(score)
        self.percentile = checked_percentile(percentile)
        self.power = power

    def fit(self, train: Outputs) -> Self:
        """Learns nothing: the head has been applied already. Returns itself."""
        return self

    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The features as they are: this method works on the logits."""
        return features

    def rectified_logits(self, outputs: Outputs) -> Float[Tensor, "N C"]:
        """The logits times S."""
        return outputs.logits * concentration(outputs.features.relu(), self.percentile) ** self.power
