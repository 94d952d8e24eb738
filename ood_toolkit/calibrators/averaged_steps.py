"""What BBQ and ENIR share: an average of step maps of the confidence, weighted by an information criterion."""

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.netcal_adapter import apply_map, fit_map
from ood_toolkit.calibrators.top_label import TopLabelCalibrator


class AveragedStepsCalibrator(TopLabelCalibrator):
    """A weighted mean of step maps of the confidence, as netcal's class `method` finds it.

    Args:
        score: weights the maps, "BIC" or "AIC".
    """

    method: ClassVar[str]
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
        self.positions, self.values = fit_map(self.method, options, log_odds.sigmoid(), correct > 0)

    def confidence(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The averaged map at the confidence."""
        return apply_map("steps", self.positions.double(), self.values.double(), log_odds)
