"""Bootstrap intervals for every ranking metric, at the cost of one sorting and one pass over counts.

Within one sample all rows are alike to a resample, so how often it draws the r-th highest score does not depend on
which score that is. The cumulated draw counts are therefore drawn once per pair of sample sizes and shared by every
metric of every detector of a table; a detector only looks them up at its own ranks.

Where there are more than `CELLS` distinct scores, neighbours share a cell: counts at the cells' ends stay exact draws,
and what lies within a cell is carried by a factor that makes the value at the original sample exact. Cells are single
scores at both ends of the ranking and around the thresholds of FPR95, and elsewhere at most 1/512 of the rows. What a
resample would have moved inside a cell is left out: of a cumulative share of the rows, at most 1/512 of the variance
that it has in the middle of the ranking, so intervals come out short by about 0.1 %.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ood_toolkit.metrics import detection, selective
from ood_toolkit.metrics.arrays import Floats, Ints, UndefinedMetricError, as_scores
from ood_toolkit.metrics.counts import (
    Ranking,
    Steps,
    SumKernel,
    area_under_precision_recall,
    area_under_roc,
    average_precision,
    negatives_caught,
    rank,
    smallest_error,
)
from ood_toolkit.metrics.resamples import Drawn, Draws, Strata

Metric = str | Callable[[ArrayLike, ArrayLike], float]

CELLS = 2048
"""Up to this many distinct scores every one has its own cell and the bootstrap is exact."""


class Interval(NamedTuple):
    """A metric's value on the sample as it is, and the percentile bootstrap interval around it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Resampled:
    """How one named metric is computed on many resamples at once.

    Attributes:
        metric: the point metric.
        kernel: counts (..., K) to values (...).
        from_below: whether the kernel reads the ranking from the lowest score up.
        strata: `fixed` where the sizes of the two samples are part of the design, as with ID and OOD; `random` where
            they are part of the outcome, as the error rate is for the selective metrics.
        quantile: the share at which the kernel needs exact thresholds, if it has one.
    """

    metric: Callable[[ArrayLike, ArrayLike], float]
    kernel: SumKernel | Callable[[Steps], Floats]
    from_below: bool = False
    strata: Strata = "fixed"
    quantile: float | None = None


def _caught_at_95(steps: Steps) -> Floats:
    return negatives_caught(steps, 0.95)


def _passed_at_95(steps: Steps) -> Floats:
    return 1 - negatives_caught(steps, 0.95)


RESAMPLED: dict[str, Resampled] = {
    "auroc": Resampled(detection.auroc, area_under_roc),
    "aupr": Resampled(detection.aupr, average_precision),
    "aupr_id": Resampled(detection.aupr_id, average_precision, from_below=True),
    "aupr_trapezoid": Resampled(detection.aupr_trapezoid, area_under_precision_recall),
    "aupr_id_trapezoid": Resampled(detection.aupr_id_trapezoid, area_under_precision_recall, from_below=True),
    "fpr_at_tpr": Resampled(detection.fpr_at_tpr, _caught_at_95, quantile=0.95),
    "fpr_at_tpr_id_positive": Resampled(
        detection.fpr_at_tpr_id_positive, _caught_at_95, from_below=True, quantile=0.95
    ),
    "tnr_at_tpr": Resampled(detection.tnr_at_tpr, _passed_at_95, quantile=0.95),
    "detection_error": Resampled(detection.detection_error, smallest_error),
    "aurc": Resampled(selective.aurc, selective.trapezoid_risk_coverage, from_below=True, strata="random"),
    "e_aurc": Resampled(selective.e_aurc, selective.excess_risk_coverage, from_below=True, strata="random"),
    "augrc": Resampled(selective.augrc, selective.generalized_risk_coverage, from_below=True, strata="random"),
    "e_augrc": Resampled(selective.e_augrc, selective.excess_generalized_risk, from_below=True, strata="random"),
    "aurra": Resampled(selective.aurra, selective.response_rate_accuracy, from_below=True, strata="random"),
}
"""The metrics whose bootstrap is vectorised, by the names of their functions, at their default arguments."""


def interval(
    metric: Metric,
    negatives: ArrayLike,
    positives: ArrayLike,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    strata: Strata | None = None,
) -> Interval:
    """Percentile bootstrap interval of one metric of two samples.

    Args:
        metric: a metric of `RESAMPLED`, by name or as the function itself; or any function of (negatives, positives),
            which is then called on each resample, one after the other.
        negatives: shape (N,): ID or correct scores.
        positives: shape (P,): OOD or wrong scores.
        resamples: how many.
        level: of the interval, in (0, 1).
        seed: the same seed and sizes give the same resamples.
        strata: `fixed` resamples N negatives and P positives; `random` resamples N + P rows, so the error rate varies
            too. By default what the metric calls for: `random` for the AURC family, `fixed` for the rest. For
            precision-recall metrics of *misclassification*, where the rate is an outcome, ask for `random`.

    Raises:
        UndefinedMetricError: where the metric has no value on the sample itself.

    Resamples on which the metric is undefined (without a single error, say) are left out.
    """
    name = _name_of(metric)
    if name is not None:
        found = intervals([name], negatives, positives, resamples=resamples, level=level, seed=seed, strata=strata)
        return found[name]
    if isinstance(metric, str):
        raise ValueError(f"no resampled metric is named {metric!r}; known: {', '.join(RESAMPLED)}")
    low, high = as_scores(negatives, "negative scores"), as_scores(positives, "positive scores")
    values = np.empty(resamples)
    for index, (drawn_low, drawn_high) in enumerate(_row_resamples(low, high, resamples, seed, strata or "fixed")):
        try:
            values[index] = metric(drawn_low, drawn_high)
        except UndefinedMetricError:
            values[index] = np.nan
    return percentile_interval(metric(low, high), values, level)


def intervals(
    metrics: Sequence[Metric],
    negatives: ArrayLike,
    positives: ArrayLike,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    strata: Strata | None = None,
    draws: Draws | None = None,
) -> dict[str, Interval]:
    """Intervals of several metrics of `RESAMPLED` from one sorting and one set of resamples; see `table_intervals`."""
    samples = {"only": (negatives, positives)}
    return table_intervals(metrics, samples, resamples=resamples, level=level, seed=seed, strata=strata, draws=draws)[
        "only"
    ]


def table_intervals(
    metrics: Sequence[Metric],
    samples: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    strata: Strata | None = None,
    draws: Draws | None = None,
) -> dict[str, dict[str, Interval]]:
    """Intervals for a whole table: `samples` maps each row's name to its (negatives, positives).

    Rows of equal sizes share their resamples, which makes thirty detectors little dearer than three; so do calls that
    are given the same `draws`. Resamples are shared by rank, not by input: right for each interval, but differences of
    detectors need `paired_bootstrap`.

    Returns:
        For each row the interval of each metric, `{row: {metric: Interval}}`.
    """
    names = [known_name(metric) for metric in metrics]
    plans = [make_plan(row, rank(*pair), names, strata) for row, pair in samples.items()]
    found = {plan.row: {name: np.empty(resamples) for name in names} for plan in plans}
    draws = draws or Draws(most_bytes=0)
    for (sizes, mode), group in _by_draws(plans).items():
        for rows, drawn in draws.chunks(sizes, mode, resamples, seed):
            for plan, wanted in group:
                for name, values in plan.evaluate(wanted, drawn).items():
                    found[plan.row][name][rows] = values
    return {
        plan.row: {name: percentile_interval(plan.values[name], found[plan.row][name], level) for name in names}
        for plan in plans
    }


def replicates(
    metric: Metric,
    negatives: ArrayLike,
    positives: ArrayLike,
    *,
    resamples: int = 1000,
    seed: int = 0,
    strata: Strata | None = None,
) -> Floats:
    """The bootstrap values themselves, shape (resamples,), of a metric of `RESAMPLED`."""
    name = known_name(metric)
    plan = make_plan("only", rank(negatives, positives), [name], strata)
    values = np.empty(resamples)
    for (sizes, mode), group in _by_draws([plan]).items():
        for rows, drawn in Draws(most_bytes=0).chunks(sizes, mode, resamples, seed):
            values[rows] = group[0][0].evaluate([name], drawn)[name]
    return values


@dataclass(frozen=True, eq=False)
class Plan:
    """One ranking cut into cells, with the factor of every cell for every metric."""

    row: str
    sizes: tuple[int, int]
    at: tuple[Ints, Ints]  # cumulated counts of negatives and positives at the cells' ends: where draws are looked up
    weights: dict[str, Floats]
    offsets: dict[str, float]
    values: dict[str, float]
    modes: dict[str, Strata]

    def evaluate(self, names: Sequence[str], drawn: Drawn) -> dict[str, Floats]:
        """Values of the metrics on a chunk of resamples."""
        above = Steps(drawn.negatives.at(self.at[0]), drawn.positives.at(self.at[1]))
        values, sums = {}, {}
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample without errors: NaN, left out later
            for name in names:
                how = RESAMPLED[name]
                steps = above.reversed if how.from_below else above
                if isinstance(how.kernel, SumKernel):
                    # AURC and its excess are closings of one sum
                    of = how.kernel.terms, how.from_below
                    if of not in sums:
                        sums[of] = how.kernel.terms(steps) @ self.weights[name]
                    values[name] = how.kernel.close(sums[of], steps)
                else:
                    values[name] = how.kernel(steps) + self.offsets[name]
        return values


def make_plan(row: str, ranking: Ranking, names: Sequence[str], strata: Strata | None) -> Plan:
    """Cut a ranking into cells and work out each metric's factors on them; `row` names it in errors."""
    full, sizes = ranking.steps, (int(ranking.negatives[-1]), int(ranking.positives[-1]))
    needy = [name for name in names if RESAMPLED[name].strata == "fixed"]
    if needy and not all(sizes):
        raise UndefinedMetricError(
            f"{', '.join(needy)} of {row!r} need a negative (ID or correct) and a positive (OOD or wrong) score, "
            f"but there are {sizes[0]} and {sizes[1]}"
        )
    ends = _cell_ends(ranking, [RESAMPLED[name] for name in names])
    views = {False: (full, np.append(0, ends[:-1] + 1)), True: (full.reversed, full.negatives.size - 1 - ends[::-1])}
    cells = Steps(full.negatives[ends], full.positives[ends])
    weights, offsets, values = {}, {}, {}
    for name in names:
        how = RESAMPLED[name]
        exact, starts = views[how.from_below]
        rough = cells.reversed if how.from_below else cells
        values[name] = float(how.kernel(exact))
        if isinstance(how.kernel, SumKernel):
            inside, across = np.add.reduceat(how.kernel.terms(exact), starts), how.kernel.terms(rough)
            weights[name] = np.divide(inside, across, out=np.ones_like(inside), where=across != 0)
        else:
            offsets[name] = values[name] - float(how.kernel(rough))
    modes: dict[str, Strata] = {name: strata or RESAMPLED[name].strata for name in names}
    return Plan(row, sizes, (ranking.negatives[ends], ranking.positives[ends]), weights, offsets, values, modes)


def _cell_ends(ranking: Ranking, wanted: Sequence[Resampled]) -> Ints:
    """Index of the last distinct score of every cell, from the highest score down."""
    count = ranking.thresholds.size
    if count <= CELLS:
        return np.arange(count)
    depth = _depth(ranking.negatives + ranking.positives)
    cut = np.append(np.diff(np.floor(depth)) != 0, True)
    heavy = np.diff(depth, prepend=0.0) >= 1  # a tie as large as a cell stands alone, and is then exact
    cut |= heavy
    cut[:-1] |= heavy[1:]
    for how in wanted:
        if how.quantile is None:
            continue
        if how.from_below:  # a threshold read from below lies just above a negative
            near = _near_share(ranking.negatives[-1] - np.append(0, ranking.negatives), how.quantile)
            cut[near[near > 0] - 1] = True
        else:
            cut[_near_share(np.append(0, ranking.positives), how.quantile)] = True
    return np.flatnonzero(cut)


def _depth(rows_above: Ints) -> Floats:
    """Where ranks fall on a scale whose units are cells, shape (K,).

    Cells are one row each up to rank 32 from either end, then 1/32 of the distance to the nearer end, at most 1/512 of
    all rows: precision and selective risk change with the logarithm of the rank.
    """
    total = int(rows_above[-1])
    widest = max(total / 512, 1.0)

    def from_end(rank: Floats) -> Floats:
        growing = np.clip(rank, 32.0, 32.0 * widest)
        return np.minimum(rank, 32.0) + 32.0 * np.log(growing / 32.0) + np.maximum(rank - 32.0 * widest, 0) / widest

    near, far = from_end(rows_above.astype(np.float64)), from_end((total - rows_above).astype(np.float64))
    return np.where(rows_above <= total / 2, near, 2 * from_end(np.array([total / 2])) - far)


def _near_share(cumulative: Ints, share: float) -> Ints:
    """Scores where a count passes values that the share of a resample may fall on: five standard deviations around.

    Args:
        cumulative: shape (K + 1,): the count before and after each of K scores, rising or falling.
        share: of the total.
    """
    total = int(cumulative.max())
    reach = 5 * np.sqrt(total * share * (1 - share)) + 2
    counted = np.maximum(cumulative[1:], cumulative[:-1])
    near = np.flatnonzero((np.diff(cumulative) != 0) & (np.abs(counted - share * total) <= reach))
    return near[:: -(-near.size // 512) or 1]


def _by_draws(plans: Sequence[Plan]) -> dict[tuple[tuple[int, int], Strata], list[tuple[Plan, list[str]]]]:
    """Plans and their metrics grouped by the resamples that they can share."""
    groups: dict[tuple[tuple[int, int], Strata], list[tuple[Plan, list[str]]]] = {}
    for plan in plans:
        for mode in dict.fromkeys(plan.modes.values()):
            wanted = [name for name, its in plan.modes.items() if its == mode]
            groups.setdefault((plan.sizes, mode), []).append((plan, wanted))
    return groups


def _row_resamples(
    negatives: Floats, positives: Floats, resamples: int, seed: int, strata: Strata
) -> Iterator[tuple[Floats, Floats]]:
    """Resampled pairs of scores, for metrics that are not vectorised."""
    rng, total = np.random.default_rng(seed), negatives.size + positives.size
    for _ in range(resamples):
        drawn = positives.size if strata == "fixed" else rng.binomial(total, positives.size / total)
        low = rng.integers(0, max(negatives.size, 1), total - drawn if negatives.size else 0)
        yield negatives[low], positives[rng.integers(0, max(positives.size, 1), drawn if positives.size else 0)]


def percentile_interval(value: float, values: Floats, level: float) -> Interval:
    """The value, and the percentiles of its bootstrap values that enclose `level` of them; NaN ones are left out."""
    if not 0 < level < 1:
        raise ValueError(f"level is a share in (0, 1), but is {level}")
    defined = values[~np.isnan(values)]
    if not defined.size:
        raise UndefinedMetricError("the metric is undefined on every resample")
    # between a finite and an infinite value (a likelihood of 0) there is nothing to interpolate
    method = "linear" if np.isfinite(defined).all() else "nearest"
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2], method=method)
    return Interval(float(value), float(low), float(high))


def _name_of(metric: Metric) -> str | None:
    """The name in `RESAMPLED`, for a name or for the very function of that name."""
    if isinstance(metric, str):
        return metric if metric in RESAMPLED else None
    return next((name for name, how in RESAMPLED.items() if how.metric is metric), None)


def known_name(metric: Metric) -> str:
    """The name of a metric in `RESAMPLED`; a ValueError with the known ones where it is not there."""
    name = _name_of(metric)
    if name is None:
        raise ValueError(f"{metric!r} is not a resampled metric; known: {', '.join(RESAMPLED)}")
    return name
