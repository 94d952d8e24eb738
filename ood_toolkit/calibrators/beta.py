"""Beta calibration of the confidence: the map that two beta distributions would need."""

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.logistic import fit_logistic, platt_targets
from ood_toolkit.calibrators.top_label import TopLabelCalibrator


class BetaCalibrator(TopLabelCalibrator):
    """`P(right) = σ(a ln p - b ln(1 - p) + c)` with a, b ≥ 0, of the predicted class's confidence p (abm).

    More flexible than Platt: a = b is Platt on log-odds, a ≠ b bends the two ends differently, and the identity
    (a = b = 1, c = 0) is in the family. A weight that comes out negative is set to 0 and the rest fitted again, as in
    the paper, so the map never decreases.

    Args:
        prior_count: pseudo-rows of each kind, as in Platt's targets. The paper has 0, where perfectly separated or
            all-right data have no answer.
    """

    name = "beta"
    paper = "Kull et al., Beta calibration, AISTATS 2017 (parametrisation abm)"
    cite = "kull2017beta"
    equation = "g(p) = σ(a log p − b log(1 − p) + c)"
    weights: Float[Tensor, "3"]

    allowed = {"prior_count": "[0, inf)"}

    def __init__(self, prior_count: float = 0.0) -> None:
        super().__init__()
        if prior_count < 0:
            raise ValueError(f"prior_count must be ≥ 0, got {prior_count}")
        self.prior_count = prior_count

    def fit_confidence(self, log_odds: Float[Tensor, " N"], correct: Float[Tensor, " N"]) -> None:
        """Learns a, b and c."""
        targets = platt_targets(correct, self.prior_count)
        free = [0, 1, 2]
        weights = log_odds.new_zeros(3)
        while True:
            weights.zero_()
            weights[free] = fit_logistic(_features(log_odds)[:, free], targets)
            worst = int(weights[:2].argmin())
            if weights[worst] >= 0:
                break
            free.remove(worst)
        self.weights = weights

    def confidence(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """`σ(a ln p - b ln(1 - p) + c)`."""
        return (_features(log_odds) @ self.weights.double()).sigmoid()


def _features(log_odds: Float[Tensor, " N"]) -> Float[Tensor, "N 3"]:
    """`ln p`, `-ln(1 - p)` and 1, exact at both ends."""
    logsigmoid = torch.nn.functional.logsigmoid
    return torch.stack([logsigmoid(log_odds), -logsigmoid(-log_odds), torch.ones_like(log_odds)], dim=1)
