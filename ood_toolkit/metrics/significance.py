"""Is one detector better than another, or is it chance? Tests for pairs, many data sets and many comparisons."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ood_toolkit.metrics.arrays import Floats, UndefinedMetricError, as_scores, to_numpy
from ood_toolkit.metrics.bootstrap import Metric, known_name, make_plan, percentile_interval
from ood_toolkit.metrics.counts import rank
from ood_toolkit.metrics.resamples import CHUNK, Cumulated, Drawn, Strata, draw_counts

Pair = tuple[ArrayLike, ArrayLike]
"""The (negatives, positives) scores of one detector. Of two detectors, row i must be the same input in both."""


class Difference(NamedTuple):
    """`metric(first) − metric(second)`, its bootstrap interval and the two-sided p-value of no difference."""

    value: float
    low: float
    high: float
    p_value: float


class DeLong(NamedTuple):
    """Two AUROCs on the same inputs, `z = (first − second) / standard_error`, and the two-sided normal p-value."""

    first: float
    second: float
    standard_error: float
    z: float
    p_value: float


class Friedman(NamedTuple):
    """Friedman's chi-square over data sets, its p-value, and the mean rank of each detector (1 = best)."""

    statistic: float
    p_value: float
    mean_ranks: Floats


class Nemenyi(NamedTuple):
    """Pairwise p-values (K, K) of detectors having equal ranks, the mean ranks and the critical difference of ranks."""

    p_values: Floats
    mean_ranks: Floats
    critical_difference: float


def paired_bootstrap(
    metric: Metric,
    first: Pair,
    second: Pair,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    strata: Strata | None = None,
) -> Difference:
    """Difference of two detectors over resamples of the inputs, the same inputs for both.

    Args:
        metric: one of `bootstrap.RESAMPLED`, by name or as the function.
        first: (negatives, positives) of shapes (N,) and (P,).
        second: the same inputs in the same order, scored by the other detector.
        resamples: how many; the smallest p-value is `2 / (resamples + 1)`.
        level: of the interval, in (0, 1).
        seed: the same seed and sizes give the same resamples.
        strata: see `bootstrap.interval`.
    """
    name = known_name(metric)
    plans = [make_plan(label, rank(*pair), [name], strata) for label, pair in (("first", first), ("second", second))]
    if plans[0].sizes != plans[1].sizes:
        raise ValueError(f"paired detectors must score the same inputs, but have {plans[0].sizes} and {plans[1].sizes}")
    orders = [
        tuple(np.argsort(-as_scores(scores, "scores"), kind="stable") for scores in pair) for pair in (first, second)
    ]
    sizes, total, found = plans[0].sizes, sum(plans[0].sizes), np.empty((2, resamples))
    for start in range(0, resamples, CHUNK):
        count = min(CHUNK, resamples - start)
        rng = np.random.default_rng((seed, start))
        fixed = plans[0].modes[name] == "fixed"
        positives = np.full(count, sizes[1]) if fixed else rng.binomial(total, sizes[1] / total, count)
        low = np.stack([draw_counts(rng, sizes[0], int(total - drawn)) for drawn in positives])
        high = np.stack([draw_counts(rng, sizes[1], int(drawn)) for drawn in positives])
        for index, (plan, (of_low, of_high)) in enumerate(zip(plans, orders, strict=True)):
            drawn = Drawn(Cumulated(low[:, of_low]), Cumulated(high[:, of_high]))
            found[index, start : start + count] = plan.evaluate([name], drawn)[name]
    gaps = found[0] - found[1]
    value, low_end, high_end = percentile_interval(plans[0].values[name] - plans[1].values[name], gaps, level)
    gaps = gaps[~np.isnan(gaps)]
    smaller = min(int((gaps <= 0).sum()), int((gaps >= 0).sum()))
    return Difference(value, low_end, high_end, min(1.0, 2 * (smaller + 1) / (gaps.size + 1)))


def delong_test(first: Pair, second: Pair) -> DeLong:
    """DeLong's test for the difference of two AUROCs on the same inputs (DeLong et al., Biometrics 1988).

    By midranks in O(n log n) (Sun and Xu 2014), ties counting half. Where both detectors rank alike the p-value is 1.

    Args:
        first: (ID scores, OOD scores), higher = more OOD.
        second: the same inputs in the same order, scored by the other detector.

    Raises:
        UndefinedMetricError: for fewer than two ID or two OOD inputs, which leave no variance to estimate.
    """
    from scipy.stats import norm

    placements = [_placements(*pair) for pair in (first, second)]
    shapes = [(below.size, above.size) for below, above in placements]
    if shapes[0] != shapes[1]:
        raise ValueError(f"paired detectors must score the same inputs, but have {shapes[0]} and {shapes[1]}")
    if min(shapes[0]) < 2:
        raise UndefinedMetricError(f"delong_test needs two ID and two OOD inputs at least, but got {shapes[0]}")
    areas = [float(above.mean()) for _, above in placements]
    spread = [np.var(one - other, ddof=1) / one.size for one, other in zip(*placements, strict=True)]
    error = float(np.sqrt(sum(spread)))
    gap = areas[0] - areas[1]
    z = gap / error if error > 0 else float(np.sign(gap) * np.inf) if abs(gap) > 1e-12 else 0.0
    return DeLong(areas[0], areas[1], error, z, float(2 * norm.sf(abs(z))))


def friedman_test(values: ArrayLike, *, higher_is_better: bool = True) -> Friedman:
    """Do K detectors differ over D data sets? Friedman's test on their ranks within each data set, ties corrected.

    Args:
        values: shape (D, K), one row per data set, at least 2 × 3.
        higher_is_better: whether rank 1 goes to the largest value, as for AUROC; pass False for FPR95 or AURC.
    """
    from scipy.stats import friedmanchisquare

    ranks = _ranks(values, higher_is_better)
    if (ranks == ranks[:, :1]).all():  # every detector ties everywhere: no evidence of anything
        return Friedman(0.0, 1.0, ranks.mean(axis=0))
    statistic, p_value = friedmanchisquare(*ranks.T)
    return Friedman(float(statistic), float(p_value), ranks.mean(axis=0))


def nemenyi_test(values: ArrayLike, *, higher_is_better: bool = True, level: float = 0.95) -> Nemenyi:
    """Which pairs of detectors differ over D data sets? Nemenyi's test, to follow a significant `friedman_test`.

    Two detectors differ where their mean ranks are further apart than the critical difference
    `q √(K (K + 1) / (6 D))` (Demšar, JMLR 2006). Family-wise error is held over all pairs.

    Args:
        values: shape (D, K), one row per data set, at least 2 × 3.
        higher_is_better: see `friedman_test`.
        level: of the critical difference, in (0, 1).
    """
    from scipy.stats import studentized_range

    if not 0 < level < 1:
        raise ValueError(f"level is a share in (0, 1), but is {level}")
    ranks = _ranks(values, higher_is_better)
    sets, detectors = ranks.shape
    unit = np.sqrt(detectors * (detectors + 1) / (6 * sets))
    mean_ranks = ranks.mean(axis=0)
    gaps = np.abs(mean_ranks[:, None] - mean_ranks[None, :]) / unit
    p_values = np.clip(studentized_range.sf(gaps * np.sqrt(2), detectors, np.inf), 0.0, 1.0)
    np.fill_diagonal(p_values, 1.0)
    critical = float(studentized_range.ppf(level, detectors, np.inf) / np.sqrt(2) * unit)
    return Nemenyi(p_values, mean_ranks, critical)


def holm(p_values: ArrayLike) -> Floats:
    """Holm's step-down p-values, in the order given: below α where the *chance of any* false claim is held to α.

    >>> holm([0.01, 0.04, 0.03])
    array([0.03, 0.06, 0.06])
    """
    given = _p_values(p_values)
    order = np.argsort(given, kind="stable")
    steps = given[order] * np.arange(given.size, 0, -1)
    adjusted = np.empty_like(given)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def benjamini_hochberg(p_values: ArrayLike) -> Floats:
    """Benjamini-Hochberg p-values, in the order given: below q where the *share* of false claims is held to q.

    For independent or positively dependent tests, as comparisons on one set of inputs are.
    """
    from scipy.stats import false_discovery_control

    given = _p_values(p_values)
    return np.asarray(false_discovery_control(given, method="bh")) if given.size else given


def _placements(negatives: ArrayLike, positives: ArrayLike) -> tuple[Floats, Floats]:
    """Of each input, the share of the other sample that it is on the right side of, ties half: (N,) and (P,)."""
    low, high = as_scores(negatives, "ID scores"), as_scores(positives, "OOD scores")

    def share_below(ordered: Floats, scores: Floats) -> Floats:
        both = np.searchsorted(ordered, scores, side="left") + np.searchsorted(ordered, scores, side="right")
        return both / (2 * max(ordered.size, 1))

    return 1 - share_below(np.sort(high), low), share_below(np.sort(low), high)


def _ranks(values: ArrayLike, higher_is_better: bool) -> Floats:
    from scipy.stats import rankdata

    table = to_numpy(values).astype(np.float64)
    if table.ndim != 2 or table.shape[0] < 2 or table.shape[1] < 3:
        raise ValueError(f"values must have shape (data sets ≥ 2, detectors ≥ 3), but came with {table.shape}")
    if np.isnan(table).any():
        raise ValueError("values hold NaN; drop the data sets or the detectors that were not measured")
    return np.asarray(rankdata(-table if higher_is_better else table, axis=1))


def _p_values(values: ArrayLike) -> Floats:
    given = as_scores(values, "p-values")
    if given.size and not (given.min() >= 0 and given.max() <= 1):
        raise ValueError(f"p-values must be in [0, 1], but range from {given.min():g} to {given.max():g}")
    return given
