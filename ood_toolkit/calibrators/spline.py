"""Spline calibration: the slope of a smooth curve through the accumulated calibration error."""

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.isotonic import interpolate
from ood_toolkit.calibrators.top_label import TopLabelCalibrator


class SplineCalibrator(TopLabelCalibrator):
    """Adds to the confidence the derivative of a spline through the accumulated excess of accuracy over confidence.

    Rows sorted by confidence, t in [0, 1] their rank: a natural cubic spline with evenly spaced knots is fitted by
    least squares to `(1/N) Σ_{i ≤ tN} (right_i - confidence_i)`, whose largest value is the KS calibration error. Its
    slope at t is what the confidence of that rank is wrong by (section 4). No bins and no assumed shape; not
    necessarily monotone, so it can reorder rows.

    Args:
        knots: of the spline, ends included, ≥ 3. The authors' experiments use 6.

    Differs from the authors' code where confidences tie: equal confidences get the mean of their corrections.
    """

    name = "spline"
    paper = (
        "Gupta et al., Calibration of Neural Networks using Splines, ICLR 2021, arXiv:2006.12800, Eq. 14 and "
        "Proposition 4.1"
    )
    cite = "gupta2021splines"
    equation = "g(p) = p + s′(t), t the rank of p, s the spline through the accumulated right − p"
    family = "scaling"
    positions: Float[Tensor, " K"]
    values: Float[Tensor, " K"]

    allowed = {"knots": "[3, inf)"}

    def __init__(self, knots: int = 6) -> None:
        super().__init__()
        if knots < 3:
            raise ValueError(f"a spline needs at least 3 knots, got {knots}")
        self.knots = knots

    def fit_confidence(self, log_odds: Float[Tensor, " N"], correct: Float[Tensor, " N"]) -> None:
        """Learns the calibrated confidence at every held-out confidence; between them it is linear."""
        confidence, order = log_odds.sigmoid().sort()
        if len(order) < 2:
            raise ValueError("a spline needs at least 2 held-out rows")
        excess = (correct[order] - confidence).cumsum(0) / len(order)
        rank = torch.linspace(0, 1, len(order), dtype=torch.float64, device=order.device)
        corrected = confidence + natural_spline_slope(rank, excess, self.knots)
        self.positions, group = confidence.unique(return_inverse=True)
        sums = torch.zeros_like(self.positions).index_add_(0, group, corrected)
        self.values = sums / torch.bincount(group)

    def confidence(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The corrected confidence, within [0, 1]."""
        return interpolate(log_odds.sigmoid(), self.positions.double(), self.values.double()).clamp(0, 1)


def natural_spline_slope(x: Float[Tensor, " N"], y: Float[Tensor, " N"], knots: int) -> Float[Tensor, " N"]:
    """The derivative at x of the natural cubic spline with evenly spaced knots on [0, 1] closest to y at x."""
    import numpy as np
    from scipy.interpolate import CubicSpline

    # linear in the values at the knots: one column per unit vector
    basis = CubicSpline(np.linspace(0, 1, knots), np.eye(knots), bc_type="natural")
    at = x.cpu().numpy()
    heights = np.linalg.lstsq(basis(at), y.cpu().numpy(), rcond=None)[0]
    return torch.as_tensor(basis(at, 1) @ heights, dtype=torch.float64, device=x.device)
