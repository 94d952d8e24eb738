"""Bayesian binning into quantiles: many histograms, averaged by how likely each makes the labels."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.netcal_adapter import apply_map, fit_map
from ood_toolkit.calibrators.top_label import TopLabelCalibrator


class BBQCalibrator(TopLabelCalibrator):
    """A weighted mean of histograms of the confidence with different bin counts, fitted by netcal.

    Spares the choice that `histogram` leaves to you, and has many more distinct values, so fewer ties. About two
    seconds at 25,000 rows, whatever the number of classes.

    Args:
        score: weights the histograms, "BIC" or "AIC".

    Differs from the paper in that netcal bins have equal width, not equal mass, and scores are BIC or AIC in place of
    the paper's Bayesian score; and in working on the predicted class's confidence.
    """

    name = "bbq"
    paper = "Naeini et al., Obtaining Well Calibrated Probabilities Using Bayesian Binning, AAAI 2015"
    cite = "naeini2015obtaining"
    equation = "g(p) = Σ_B w_B (share of right rows in the bin of p among B bins)"
    family = "binning"
    positions: Float[Tensor, " K"]
    values: Float[Tensor, " K"]

    def __init__(self, score: Literal["BIC", "AIC"] = "BIC") -> None:
        super().__init__()
        if score not in ("BIC", "AIC"):
            raise ValueError(f"score must be 'BIC' or 'AIC', got {score!r}")
        self.score = score

    def fit_confidence(self, log_odds: Float[Tensor, " N"], correct: Float[Tensor, " N"]) -> None:
        """Learns the steps of the averaged histogram."""
        options = (("score_function", self.score),)
        self.positions, self.values = fit_map("BBQ", options, log_odds.sigmoid(), correct > 0)

    def confidence(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The averaged histogram at the confidence."""
        return apply_map("steps", self.positions.double(), self.values.double(), log_odds)
