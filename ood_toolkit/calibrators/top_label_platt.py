"""Platt scaling of the confidence: a straight line through the log-odds of being right."""

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.logistic import fit_logistic, platt_targets
from ood_toolkit.calibrators.top_label import TopLabelCalibrator


class TopLabelPlattCalibrator(TopLabelCalibrator):
    """`P(right) = σ(a · log-odds + b)` of the predicted class (Platt's sigmoid on the log-odds of the confidence).

    Two numbers, so it fits on few rows; like temperature it bends all confidences one way, and b adds what
    temperature cannot, a prediction that is wrong more often than even its lowest confidence says. A fitted a < 0
    means that confident rows are wrong more often, and is kept as found.

    Args:
        prior_count: a in Platt's targets: pseudo-rows of each kind, ≥ 0. At 0 this is plain
            maximum likelihood, which does not exist where confidence separates right from wrong.

    Differs from netcal's `LogisticCalibration`, which is plain maximum likelihood (`prior_count=0`).
    """

    name = "top_label_platt"
    paper = (
        "Platt, Probabilistic Outputs for Support Vector Machines, Advances in Large Margin Classifiers 1999; "
        "top label: Kumar et al., Verified Uncertainty Calibration, NeurIPS 2019, arXiv:1909.10155"
    )
    cite = "platt1999probabilistic"
    equation = "g(p) = σ(a log(p / (1 − p)) + b)"
    weights: Float[Tensor, "2"]

    allowed = {"prior_count": "[0, inf)"}

    def __init__(self, prior_count: float = 1.0) -> None:
        super().__init__()
        if prior_count < 0:
            raise ValueError(f"prior_count must be ≥ 0, got {prior_count}")
        self.prior_count = prior_count

    def fit_confidence(self, log_odds: Float[Tensor, " N"], correct: Float[Tensor, " N"]) -> None:
        """Learns a and b."""
        features = torch.stack([log_odds, torch.ones_like(log_odds)], dim=1)
        self.weights = fit_logistic(features, platt_targets(correct, self.prior_count))

    def confidence(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """`σ(a · log-odds + b)`."""
        return (self.weights[0] * log_odds + self.weights[1]).sigmoid()
