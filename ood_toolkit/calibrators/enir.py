"""ENIR: an ensemble of nearly isotonic maps."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.netcal_adapter import apply_map, fit_map
from ood_toolkit.calibrators.top_label import TopLabelCalibrator


class ENIRCalibrator(TopLabelCalibrator):
    """A weighted mean of maps of the confidence that may decrease a little, fitted by netcal.

    Between `histogram` and `top_label_isotonic`: monotone where the data insist, free where they do not. Slow for
    what it gives: half a minute at 25,000 rows.

    Args:
        score: weights the maps, "BIC" or "AIC".

    Differs from the paper in working on the predicted class's confidence.
    """

    name = "enir"
    paper = (
        "Naeini and Cooper, Binary Classifier Calibration Using an Ensemble of Near Isotonic Regression Models, "
        "ICDM 2016, arXiv:1511.05191"
    )
    cite = "naeini2016enir"
    equation = "g(p) = Σ_λ w_λ g_λ(p), g_λ the near-isotonic regression with penalty λ"
    family = "isotonic"
    positions: Float[Tensor, " K"]
    values: Float[Tensor, " K"]

    def __init__(self, score: Literal["BIC", "AIC"] = "BIC") -> None:
        super().__init__()
        if score not in ("BIC", "AIC"):
            raise ValueError(f"score must be 'BIC' or 'AIC', got {score!r}")
        self.score = score

    def fit_confidence(self, log_odds: Float[Tensor, " N"], correct: Float[Tensor, " N"]) -> None:
        """Learns the steps of the averaged map."""
        options = (("score_function", self.score),)
        self.positions, self.values = fit_map("ENIR", options, log_odds.sigmoid(), correct > 0)

    def confidence(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The averaged map at the confidence."""
        return apply_map("steps", self.positions.double(), self.values.double(), log_odds)
