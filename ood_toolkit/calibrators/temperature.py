"""Temperature scaling: one number that makes every logit shyer or bolder."""

import math
from dataclasses import dataclass
from typing import Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked
from ood_toolkit.stats import row_chunks

_CLOSE = 1e-6
"""Last Newton step in log(1/T). Steps square, so what is left is about the rounding of float64."""
_MOST_EVALUATIONS = 100
_PATIENCE = 12
"""Sweeps after which the search asks the bound ahead of it."""
_SAMPLE = 2000
"""Rows that a first, rough search uses where there are many more."""
_CACHED_NUMBERS = 1 << 16
"""Numbers in one block: half a megabyte of float64, which stays in a core's cache through all passes over it."""


@dataclass(frozen=True)
class TemperatureFit:
    """What the search for T found.

    Args:
        temperature: T > 0.
        at_bound: whether T is a bound beyond which the likelihood still rises. If not, T is the maximum.
        nll_before: mean negative log-likelihood at T = 1, in nats.
        nll_after: the same at T.
        evaluations: sweeps over the data.
    """

    temperature: float
    at_bound: bool
    nll_before: float
    nll_after: float
    evaluations: int


def fit_temperature(
    logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"], bounds: tuple[float, float] = (1e-3, 1e3)
) -> TemperatureFit:
    """The T within `bounds` that minimises the mean of `-log softmax(z / T)_y`, to about 1e-10.

    The loss is convex in β = 1/T: its derivative is the mean of E_p[z] - z_y, its second derivative that of Var_p[z].
    """
    return fit_shared_temperature(logits.unsqueeze(0), labels, bounds)


def fit_shared_temperature(
    member_logits: Float[Tensor, "M N C"], labels: Int[Tensor, " N"], bounds: tuple[float, float] = (1e-3, 1e3)
) -> TemperatureFit:
    """The one T that minimises the mean of `-log (1/M) Σ_m softmax(z_m / T)_y`.

    Newton's method on the derivative, as a function of u = log(1/T) and inside a bracket. Every sweep is in float64
    on rows centred at their largest logit. Logits that are equal within each row leave T = 1: any T fits alike.
    """
    low, high = -math.log(bounds[1]), -math.log(bounds[0])
    bracket = [low, high]
    loss, slope, curvature = _likelihood(member_logits, labels, 0.0)
    u, before, evaluations = 0.0, loss, 1
    if slope == 0 and float((member_logits.amax(-1) - member_logits.amin(-1)).max()) == 0:
        return TemperatureFit(1.0, False, before, before, 1)
    if not low <= u <= high:  # bounds on one side of T = 1
        u = min(max(u, low), high)
        loss, slope, curvature = _likelihood(member_logits, labels, u)
        evaluations += 1
    stride = len(labels) // _SAMPLE
    if stride >= 4:  # a sample brings u within a few hundredths; one or two steps on all rows do the rest
        bracket[int(slope > 0)] = u
        sample = fit_shared_temperature(member_logits[:, ::stride], labels[::stride], bounds)
        u = _inside(-math.log(sample.temperature), bracket, (low, high))
        loss, slope, curvature = _likelihood(member_logits, labels, u)
        evaluations += 1
    while evaluations < _MOST_EVALUATIONS:
        bracket[int(slope > 0)] = u  # the derivative grows with β, so its sign says on which side the root lies
        if bracket[0] >= bracket[1]:
            return TemperatureFit(math.exp(-u), True, before, loss, evaluations)
        # without curvature every row is saturated: go where the slope points; a slope of 0 is certainty, and right
        step = -slope / curvature if curvature > 0 else (-math.inf if slope > 0 else math.inf)
        if abs(step) < _CLOSE and low <= u + step <= high:
            return TemperatureFit(math.exp(-u - step), False, before, loss, evaluations)
        outer = (low, high)[int(slope <= 0)]
        if evaluations == _PATIENCE and outer in bracket:
            u = outer  # where every row is right, the slope fades without ever being 0, and steps creep: ask the bound
        else:
            u = _inside(u + min(max(step, -2.0), 2.0), bracket, (low, high))
        loss, slope, curvature = _likelihood(member_logits, labels, u)
        evaluations += 1
    raise ValueError(f"the search for T has not converged after {evaluations} sweeps: T = {math.exp(-u)}, NLL = {loss}")


def _inside(target: float, bracket: list[float], bounds: tuple[float, float]) -> float:
    """`target` if it is inside the bracket; else the outer bound it passed, if not yet tried; else the middle."""
    if bracket[0] < target < bracket[1]:
        return target
    side = int(target >= bracket[1])
    return bounds[side] if bracket[side] == bounds[side] else (bracket[0] + bracket[1]) / 2


def _likelihood(
    member_logits: Float[Tensor, "M N C"], labels: Int[Tensor, " N"], u: float
) -> tuple[float, float, float]:
    """Mean NLL at β = exp(u), its derivative by β, and β times its second derivative (the derivative's own by u)."""
    beta = math.exp(u)
    rows, classes = member_logits.shape[1:]
    totals = torch.zeros(3, dtype=torch.float64, device=labels.device)
    on_cpu = member_logits.device.type == "cpu"
    step = max(1, _CACHED_NUMBERS // classes) if on_cpu else row_chunks(rows, classes).step
    for start in range(0, rows, step):
        block = slice(start, start + step)
        members = [_log_likelihood(logits[block].double(), labels[block], beta) for logits in member_logits]
        value, first, second = (torch.stack(part) for part in zip(*members, strict=True))
        # log Σ_m p_m by β: its weights are each member's share of the true class's probability
        share = value.softmax(dim=0)
        slope = (share * first).sum(dim=0)
        totals[0] -= (value.logsumexp(dim=0) - math.log(len(members))).sum()
        totals[1] -= slope.sum()
        totals[2] -= ((share * (second + (first - slope).square())).sum(dim=0)).sum()
    loss, slope, curvature = (totals / rows).tolist()
    return loss, slope, beta * curvature


def _log_likelihood(
    rows: Float[Tensor, "N C"], labels: Int[Tensor, " N"], beta: float
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """`log softmax(β z)_y` of every row, with its first and second derivative by β."""
    rows = rows - rows.amax(dim=1, keepdim=True)
    rows.clamp_(min=-1e150)  # -inf without the 0 · inf: its exponential is 0 either way
    true = rows.gather(1, labels[:, None]).squeeze(1)
    weights = (rows * beta).exp_()
    mass = weights.sum(dim=1)
    weights.mul_(rows)
    mean = weights.sum(dim=1) / mass
    square = torch.linalg.vecdot(weights, rows) / mass
    return beta * true - mass.log(), true - mean, -(square - mean.square()).clamp_min(0)


class TemperatureCalibrator(Calibrator):
    """Divides the logits by the one T that maximises the likelihood of held-out labels.

    The first calibrator to try: one number, never overfits, keeps the ranking of classes in every row, and takes a
    handful of sweeps at any size. What it cannot do is treat classes or inputs differently.

    There is no best T when every row is right (T → 0) or when the true class is no likelier than chance (T → ∞).
    `fit` then raises, or takes the bound if `at_bound="accept"`; logits equal within each row give T = 1.

    After `fit`: `temperature` (T, 0 < T), `nll_before` and `nll_after` (mean NLL at T = 1 and at T, in nats),
    `clipped` (whether T is a bound), `evaluations` (sweeps over the data).

    Args:
        bounds: smallest and largest T, 0 < smallest < largest.
        at_bound: "error" refuses a T on a bound, "accept" takes it.

    Differs from the paper's released code, which stops L-BFGS before it has converged (T = 0.3948 where the minimum
    is at 0.3852 on the golden data): here the minimum of the same loss is found to about 1e-10.
    """

    name = "temperature"
    paper = "Guo et al., On Calibration of Modern Neural Networks, ICML 2017, arXiv:1706.04599, Eq. 9"
    cite = "guo2017calibration"
    equation = "softmax(z / T)"
    preserves_argmax = True
    temperature: Float[Tensor, ""]
    nll_before: Float[Tensor, ""]
    nll_after: Float[Tensor, ""]
    clipped: Bool[Tensor, ""]
    evaluations: Int[Tensor, ""]

    def __init__(
        self, bounds: tuple[float, float] = (1e-3, 1e3), at_bound: Literal["error", "accept"] = "error"
    ) -> None:
        super().__init__()
        if at_bound not in ("error", "accept"):
            raise ValueError(f"at_bound must be 'error' or 'accept', got {at_bound!r}")
        self.bounds = checked_bounds(bounds)
        self.at_bound = at_bound

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Finds T on held-out logits. Returns itself."""
        logits, labels = checked(logits, labels)
        found = fit_temperature(logits, labels, self.bounds)
        if found.at_bound and self.at_bound == "error":
            raise ValueError(refusal(found, self.bounds))
        self.temperature = logits.new_tensor(found.temperature, dtype=torch.float64)
        self.nll_before = logits.new_tensor(found.nll_before, dtype=torch.float64)
        self.nll_after = logits.new_tensor(found.nll_after, dtype=torch.float64)
        self.clipped = torch.tensor(found.at_bound, device=logits.device)
        self.evaluations = torch.tensor(found.evaluations, device=logits.device)
        return self

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) softmax of z / T."""
        return self._scaled(logits).softmax(dim=-1)

    def log_probabilities(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-softmax of z / T."""
        return self._scaled(logits).log_softmax(dim=-1)

    def _scaled(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        # centred first: a common offset of 1e4 would cost float32 the digits that T = 0.01 magnifies
        return (logits - logits.amax(dim=-1, keepdim=True)).div_(self.temperature.to(logits.dtype))


def checked_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    """The bounds, if a temperature can lie between them."""
    if not 0 < bounds[0] < bounds[1] < math.inf:
        raise ValueError(f"bounds must be 0 < smallest T < largest T, got {bounds}")
    return bounds


def refusal(found: TemperatureFit, bounds: tuple[float, float]) -> str:
    """Why a T on a bound is no answer, in words for the user."""
    lower = abs(found.temperature - bounds[0]) < abs(found.temperature - bounds[1])
    if lower == (found.temperature >= 1):
        return (
            f"the best temperature is {'below' if lower else 'above'} the bounds {bounds}: widen them, or set "
            "at_bound='accept'"
        )
    limit = (
        "0: (almost) every row is classified correctly, so bolder is always better; give more held-out rows"
        if found.temperature < 1
        else "infinity: the labels are no likelier than chance, so shyer is always better, or the logits are larger "
        "than the bounds allow for; check that the rows and classes of logits and labels match, or widen the bounds"
    )
    return (
        f"no temperature within the bounds is best: the NLL ({found.nll_before:.4g} at T = 1) still falls at "
        f"T = {found.temperature:.3g}, towards {limit}; or set at_bound='accept'"
    )
