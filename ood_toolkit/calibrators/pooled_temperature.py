"""One temperature shared by all members, chosen so that their pool is likely: calibrating inside the mean."""

from typing import Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import EnsemblePool, checked
from ood_toolkit.calibrators.ensemble import mean_log_probability
from ood_toolkit.calibrators.temperature import checked_bounds, fit_shared_temperature, refusal


class PooledTemperatureEnsemble(EnsemblePool):
    """`(1/M) Σ_m softmax(z_m / T)` with the T that maximises the likelihood of the *pool*.

    Calibrating each member first leaves their mean under-confident, because a mean of calibrated members that
    disagree is too shy; one shared T is bold enough to undo that. It needs one number from the held-out data, and
    every logit is kept, where `pool_then_calibrate` sees the pool alone.

    After `fit`: `temperature`, `nll_before`, `nll_after` (of the pool, at T = 1 and at T) and `clipped`, as in
    `TemperatureCalibrator`.

    Args:
        bounds: smallest and largest T.
        at_bound: "error" refuses a T on a bound, "accept" takes it.
    """

    name = "pooled_temperature"
    paper = "Rahaman and Thiery, Uncertainty Quantification and Deep Ensembles, NeurIPS 2021, arXiv:2007.08792"
    cite = "rahaman2021uncertainty"
    equation = "(1/M) Σ_m softmax(z_m / T)"
    temperature: Float[Tensor, ""]
    nll_before: Float[Tensor, ""]
    nll_after: Float[Tensor, ""]
    clipped: Bool[Tensor, ""]

    def __init__(
        self, bounds: tuple[float, float] = (1e-3, 1e3), at_bound: Literal["error", "accept"] = "error"
    ) -> None:
        super().__init__()
        self.bounds = checked_bounds(bounds)
        self.at_bound = at_bound

    def fit(self, member_logits: Float[Tensor, "M N C"], labels: Int[Tensor, " N"]) -> Self:
        """Finds the shared T on held-out logits of all members. Returns itself."""
        for logits in member_logits:
            _, labels = checked(logits, labels)
        found = fit_shared_temperature(member_logits, labels, self.bounds)
        if found.at_bound and self.at_bound == "error":
            raise ValueError(refusal(found, self.bounds))
        self.temperature = member_logits.new_tensor(found.temperature, dtype=torch.float64)
        self.nll_before = member_logits.new_tensor(found.nll_before, dtype=torch.float64)
        self.nll_after = member_logits.new_tensor(found.nll_after, dtype=torch.float64)
        self.clipped = torch.tensor(found.at_bound, device=member_logits.device)
        return self

    def forward(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
        """(N, C) logarithm of the mean of the members' scaled probabilities."""
        return mean_log_probability(member_logits / self.temperature.to(member_logits.dtype))
