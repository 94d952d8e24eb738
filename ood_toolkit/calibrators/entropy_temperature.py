"""Entropy-based temperature scaling: unsure rows get a temperature of their own."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.row_temperature import Loss, RowTemperatureCalibrator

_CERTAIN = 1e-12
_SMALLEST = 1e-3


class EntropyTemperatureCalibrator(RowTemperatureCalibrator):
    """`softmax(z / T)` with `T = softplus(w log H̄ + b)`, H̄ the entropy of the row's softmax over log C (HTS).

    Two numbers, so it is as hard to overfit as temperature scaling, which is the case w = 0. Choose it where over-
    confidence depends on how sure the row is.

    Args:
        loss: minimised on held-out rows, "nll" (the paper's) or "mse".
        decay: weight of the squared distance from the constant temperature's w and b, ≥ 0, added to the summed loss.
    """

    name = "entropy_temperature"
    paper = (
        "Balanya et al., Adaptive Temperature Scaling for Robust Calibration of Deep Neural Networks, Neural Computing "
        "and Applications 2024, arXiv:2208.00461 (HTS)"
    )
    cite = "balanya2024adaptive"
    equation = "softmax(z / T) with T = softplus(w log(H(p) / log C) + b)"

    allowed = {"decay": "[0, inf)"}

    def __init__(self, loss: Loss = "nll", decay: float = 0.0) -> None:
        super().__init__()
        if loss not in ("nll", "mse"):
            raise ValueError(f"loss must be 'nll' or 'mse', got {loss!r}")
        self.loss: Loss = loss
        self.decay = decay

    def features(self, rows: Float[Tensor, "N C"]) -> Float[Tensor, "N 1"]:
        """The feature log H̄, at least log 1e-12."""
        log_p = rows.log_softmax(dim=-1)
        terms = torch.where(log_p > -700, log_p.exp() * log_p, 0.0)
        largest = math.log(max(2, rows.shape[-1]))
        return (-terms.sum(dim=-1, keepdim=True) / largest).clamp_min(_CERTAIN).log()

    def start(self, features: Float[Tensor, "N 1"], temperature: float) -> Float[Tensor, "2"]:
        """Weight w = 0 and the b that gives this temperature."""
        return features.new_tensor([0.0, temperature + math.log(-math.expm1(-temperature))])

    def temperature_of(self, features: Float[Tensor, "N 1"], parameters: Float[Tensor, "2"]) -> Float[Tensor, " N"]:
        """`softplus(w log H̄ + b)`, at least 0.001."""
        return torch.nn.functional.softplus(features[:, 0] * parameters[0] + parameters[1]).clamp_min(_SMALLEST)
