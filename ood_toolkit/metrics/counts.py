"""What every ranking metric is made of: cumulative counts at each distinct score.

A kernel here takes the two cumulative counts with the distinct scores on the last axis and any number of axes before
it, so the same line of code gives a point value (one row) and a thousand bootstrap values (a thousand rows).
Tied scores share one entry, which is why no order among them can ever matter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from ood_toolkit.metrics.arrays import Floats, Ints, UndefinedMetricError, as_scores


class Steps:
    """Cumulative counts from the highest score down: how many of each kind score at least the k-th threshold.

    Attributes:
        negatives: shape (..., K), float64; repeats a value where a resample left a score out.
        positives: the same for the other sample.
    """

    def __init__(self, negatives: Floats, positives: Floats) -> None:
        self.negatives = negatives
        self.positives = positives

    @cached_property
    def gained_negatives(self) -> Floats:
        """How many negatives have exactly the k-th score."""
        return self.negatives - before(self.negatives)

    @cached_property
    def gained_positives(self) -> Floats:
        """How many positives have exactly the k-th score."""
        return self.positives - before(self.positives)

    @cached_property
    def total(self) -> Floats:
        """Negatives and positives together."""
        return self.negatives + self.positives

    @cached_property
    def reversed(self) -> "Steps":
        """The same ranking seen from the lowest score up, with the roles of the two samples exchanged."""
        return Steps(_at_or_below(self.positives), _at_or_below(self.negatives))


@dataclass(frozen=True, eq=False)
class Ranking:
    """Two samples merged into one ranking, highest score first.

    Attributes:
        thresholds: the K distinct scores, falling.
        negatives: (K,) how many negatives score at least that much.
        positives: (K,) how many positives score at least that much.
    """

    thresholds: Floats
    negatives: Ints
    positives: Ints

    @cached_property
    def steps(self) -> Steps:
        """The counts as float64, ready for the kernels."""
        return Steps(self.negatives.astype(np.float64), self.positives.astype(np.float64))


def rank(negatives: ArrayLike, positives: ArrayLike) -> Ranking:
    """Merge two samples of scores into cumulative counts; either may be empty, not both.

    Raises:
        ValueError: for NaN, or arrays that are not one-dimensional.
        UndefinedMetricError: where there is no score at all.
    """
    low, high = as_scores(negatives, "negative scores"), as_scores(positives, "positive scores")
    if not low.size + high.size:
        raise UndefinedMetricError("this metric needs at least one score, but both samples are empty")
    scores = np.concatenate([low, high])
    order = np.argsort(-scores)  # any order within a tie will do: the counts are read at its end
    ordered = scores[order]
    last_of_tie = np.append(ordered[1:] != ordered[:-1], True)
    caught = np.cumsum(order >= low.size, dtype=np.int64)[last_of_tie]
    return Ranking(ordered[last_of_tie], np.flatnonzero(last_of_tie) + 1 - caught, caught)


def rank_both(negatives: ArrayLike, positives: ArrayLike) -> Ranking:
    """As `rank`, for the metrics that need at least one score of each kind."""
    ranking = rank(negatives, positives)
    if not ranking.negatives[-1] or not ranking.positives[-1]:
        raise UndefinedMetricError(
            "this metric needs at least one negative (ID or correct) and one positive (OOD or wrong) score, "
            f"but got {ranking.negatives[-1]} and {ranking.positives[-1]}"
        )
    return ranking


def before(cumulative: Floats) -> Floats:
    """The count just before each step: the array shifted by one, with 0 in front. Keeps the memory order."""
    shifted = np.empty_like(cumulative)
    shifted[..., 0] = 0
    shifted[..., 1:] = cumulative[..., :-1]
    return shifted


def ratio(part: Floats, whole: Floats) -> Floats:
    """`part / whole` of counts with `part <= whole`, and 0 where the whole is empty."""
    return part / np.maximum(whole, 1)


def _at_or_below(cumulative: Floats) -> Floats:
    return cumulative[..., -1:] - before(cumulative)[..., ::-1]


def _roc_terms(steps: Steps) -> Floats:
    return steps.gained_negatives * (2 * steps.positives - steps.gained_positives)


def _roc_area(total: Floats, steps: Steps) -> Floats:
    return total / (2 * steps.negatives[..., -1] * steps.positives[..., -1])


def _precision_terms(steps: Steps) -> Floats:
    return steps.gained_positives * ratio(steps.positives, steps.total)


def _precision_trapezoid_terms(steps: Steps) -> Floats:
    precision = np.where(steps.total > 0, ratio(steps.positives, steps.total), 1.0)
    previous = before(precision)
    previous[..., 0] = 1.0
    return steps.gained_positives * (precision + previous) / 2


def _per_positive(total: Floats, steps: Steps) -> Floats:
    return total / steps.positives[..., -1]


@dataclass(frozen=True)
class SumKernel:
    """A metric that is a sum over the distinct scores, then a closing step.

    Attributes:
        terms: counts of shape (..., K) to the K terms of the sum; the bootstrap weighs them.
        close: the sum, of shape (...), and the counts to the value.
    """

    terms: Callable[[Steps], Floats]
    close: Callable[[Floats, Steps], Floats]

    def __call__(self, steps: Steps) -> Floats:
        """The value at exact counts."""
        return self.close(self.terms(steps).sum(-1), steps)


area_under_roc = SumKernel(_roc_terms, _roc_area)
"""Share of (negative, positive) pairs in the right order, a tie counting one half: Mann-Whitney's U over N P."""

average_precision = SumKernel(_precision_terms, _per_positive)
"""`Σ_k (R_k − R_{k−1}) P_k` over the distinct thresholds: precision at each, weighted by the recall it adds."""

area_under_precision_recall = SumKernel(_precision_trapezoid_terms, _per_positive)
"""Trapezoid under the precision-recall points joined by straight lines, starting at recall 0, precision 1."""


def negatives_caught(steps: Steps, share: float) -> Floats:
    """Share of negatives at the first threshold that reaches the given share of positives; ties are kept whole."""
    positives = steps.positives
    if share == 0:  # reached before anything is flagged
        return np.zeros(positives.shape[:-1])
    index = first_reaching(positives, share)
    return np.take_along_axis(steps.negatives, index[..., None], -1)[..., 0] / steps.negatives[..., -1]


def first_reaching(cumulative: Floats, share: float) -> Ints:
    """Index of the first step at which the count is at least `share` of its total."""
    # 1e-9 of the total: 0.95 * 20 must be 19 and not the next float above it
    return np.argmax(cumulative >= (share - 1e-9) * cumulative[..., -1:], axis=-1)


def smallest_error(steps: Steps, prior: float = 0.5) -> Floats:
    """`min_t (1 − π) FPR(t) + π (1 − TPR(t))` over all thresholds, flagging nothing among them; π of the positives."""
    negatives, positives = steps.negatives, steps.positives
    gain = prior * positives / positives[..., -1:] - (1 - prior) * negatives / negatives[..., -1:]
    return prior - np.maximum(gain.max(-1), 0.0)
