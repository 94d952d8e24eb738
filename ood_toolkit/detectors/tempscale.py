"""Temperature-scaled MSP: the baseline at the temperature that calibrates it."""

import math
from collections.abc import Callable, Iterable
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import bold_odds_of_others
from ood_toolkit.detectors.train_rows import subset
from ood_toolkit.outputs import Outputs

_BOUNDS = (1e-3, 1e3)
_CLOSE = 1e-6
"""Last Newton step, relative to β. Steps square, so what is left is about the rounding of float64."""
_SAMPLE = 2000
"""Rows that a first search uses where there are many more."""
_CACHED_NUMBERS = 1 << 16
"""Numbers in one block: half a megabyte of float64, which stays in a core's cache through all passes over it."""


def likelihood_slopes(batches: Iterable[Outputs], inverse_temperature: float) -> tuple[float, float]:
    """First and second derivative of the NLL of the labelled rows in β = 1/T: sums of E_p[z] − z_y and of Var_p[z]."""
    slope = curvature = 0.0
    for batch in batches:
        known = batch.labels >= 0
        logits, labels = (batch.logits, batch.labels) if known.all() else (batch.logits[known], batch.labels[known])
        step = max(1, _CACHED_NUMBERS // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
        for rows, right in zip(logits.split(step), labels.split(step), strict=True):
            below = rows.double()
            below = (below - below.amax(dim=1, keepdim=True)).clamp_min_(-1e30)  # −inf × 0 would be NaN
            # what is cut off is 1e-304 of the largest; where exp underflows it takes a hundred times as long
            p = (inverse_temperature * below).clamp_min_(-700.0).exp_()
            total = p.sum(dim=1)
            mean = torch.linalg.vecdot(p, below) / total
            slope += float((mean - below.gather(1, right.unsqueeze(1)).squeeze(1)).sum())
            about = below.sub_(mean.unsqueeze(1))
            curvature += float((torch.linalg.vecdot(p.mul_(about), about) / total).sum())
    return slope, curvature


def best_temperature(train: Outputs) -> float:
    """The T in [0.001, 1000] that minimises the NLL of the labelled rows, by Newton's method inside a bracket.

    Where rows of other classes no longer matter to the last digit, as for rows that are all right, it stops there.
    """
    if not bool((train.labels >= 0).any()):
        raise ValueError("fitting a temperature needs labelled rows, but there are none; give a temperature instead")
    start = 1.0
    if len(train) >= 4 * _SAMPLE:  # a sample brings β within a few hundredths; two or three sweeps do the rest
        sample = list(subset(train, _SAMPLE, 0))
        if any(bool((batch.labels >= 0).any()) for batch in sample):
            start = _best_beta(lambda beta: likelihood_slopes(sample, beta), 1.0)
    return 1 / _best_beta(lambda beta: likelihood_slopes(train.batches(), beta), start)


def _best_beta(slopes: Callable[[float], tuple[float, float]], start: float) -> float:
    """The β at which the first of the two `slopes` is 0."""
    low, high = 1 / _BOUNDS[1], 1 / _BOUNDS[0]
    beta, before = start, math.inf
    for _ in range(100):
        slope, curvature = slopes(beta)
        if slope == 0:
            break
        # the NLL is convex in β, so the sign of the slope says on which side the minimum lies
        low, high = (low, beta) if slope > 0 else (beta, high)
        step = -slope / curvature if curvature > 0 else math.inf
        # far out on an exponential tail Newton's steps are all alike: halve the bracket where one did not help much
        helps = low < beta + step < high and abs(slope) <= 0.25 * before
        proposed, before = beta + step if helps else math.sqrt(low * high), abs(slope)
        if not helps and low < 1 < high and start != 1:
            proposed = 1.0  # the sample misled
        moved, beta = abs(proposed - beta), proposed
        if moved <= (_CLOSE if helps else 1e-10) * beta:
            break
    return beta


class TempScaleDetector(Detector):
    """Flags inputs with a low maximum softmax probability at a temperature fitted on labelled in-distribution rows.

    The temperature moves the ranking only through how the rest of the softmax counts; T > 1, which overconfident
    networks need, usually ranks out-of-distribution inputs better than T = 1.

    Args:
        temperature: T > 0; None fits it by maximum likelihood. With a given T no fit is needed.

    Differs from OpenOOD and pytorch-ood, whose single L-BFGS call with step 0.01 stops short of the minimum (T = 0.433
    and 0.658 where it is 0.385); this finds it to ten digits.
    """

    name = "tempscale"
    paper = "Guo et al., On Calibration of Modern Neural Networks, ICML 2017, arXiv:1706.04599, Eq. 9"
    cite = "guo2017calibration"
    equation = "1 − max_c softmax_c(z / T)"
    family = "logits"
    needs = "train"
    held_out = True
    reads = frozenset({"logits"})
    cost = "O(C)"
    fitted_temperature: Float[Tensor, ""]

    allowed = {"temperature": "(0, inf)"}

    def __init__(self, temperature: float | None = None) -> None:
        super().__init__()
        self.temperature = temperature

    def fit(self, train: Outputs) -> Self:
        """Learns T from the labelled rows. Returns itself."""
        if self.temperature is None:
            best = best_temperature(train)
            self.fitted_temperature = torch.tensor(best, dtype=train.head.weight.dtype, device=train.device)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) `1 − max softmax(z / T)`, in [0, 1 − 1/C]; higher = more out-of-distribution, or likely wrong."""
        temperature = self.fitted_temperature if self.temperature is None else self.temperature
        others = bold_odds_of_others(outputs.logits, temperature).squeeze(-1)
        return others / (1 + others)
