"""Scaling-binning: a smooth fit first, then bins of its outputs, so that the error can be measured."""

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.histogram import bin_edges
from ood_toolkit.calibrators.logistic import fit_logistic, platt_targets
from ood_toolkit.calibrators.top_label import TopLabelCalibrator


class ScalingBinningCalibrator(TopLabelCalibrator):
    """Platt scaling of the confidence, rounded to the mean of its equal-mass bin (algorithm 1 of the paper).

    Its point is that it takes only `bins` values, so its calibration error can be estimated without bias, while the
    values average a smooth function and need far fewer rows than those of histogram binning. For accuracy of
    confidence alone, `top_label_platt` does as well.

    Args:
        bins: at most this many, ≥ 1; runs of equal confidence are never cut.
        prior_count: pseudo-rows in Platt's targets, see `TopLabelPlattCalibrator`.

    Differs from the paper, and agrees with its released code, in using all held-out rows for all three steps; the
    paper's proof wants them disjoint.
    """

    name = "scaling_binning"
    paper = "Kumar et al., Verified Uncertainty Calibration, NeurIPS 2019, arXiv:1909.10155, algorithm 1"
    cite = "kumar2019verified"
    equation = "g(p) = mean of σ(a log(p / (1 − p)) + b) over the held-out rows in its bin"
    family = "binning"
    weights: Float[Tensor, "2"]
    edges: Float[Tensor, " B-1"]
    values: Float[Tensor, " B"]

    allowed = {"bins": "[1, inf)", "prior_count": "[0, inf)"}

    def __init__(self, bins: int = 15, prior_count: float = 1.0) -> None:
        super().__init__()
        if prior_count < 0:
            raise ValueError(f"prior_count must be ≥ 0, got {prior_count}")
        self.bins = bins
        self.prior_count = prior_count

    def fit_confidence(self, log_odds: Float[Tensor, " N"], correct: Float[Tensor, " N"]) -> None:
        """Learns the scaling, the edges of the bins of its outputs, and the mean output in each."""
        features = torch.stack([log_odds, torch.ones_like(log_odds)], dim=1)
        self.weights = fit_logistic(features, platt_targets(correct, self.prior_count))
        scaled = self._scaled(log_odds)
        self.edges = bin_edges(scaled, self.bins, "mass")
        index = torch.bucketize(scaled, self.edges)
        counts = torch.bincount(index, minlength=len(self.edges) + 1)
        self.values = torch.bincount(index, weights=scaled, minlength=len(self.edges) + 1) / counts

    def confidence(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The mean scaled confidence of the bin."""
        return self.values.double()[torch.bucketize(self._scaled(log_odds), self.edges.double())]

    def _scaled(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return (self.weights[0] * log_odds + self.weights[1]).sigmoid()
