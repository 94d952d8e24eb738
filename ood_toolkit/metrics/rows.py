"""Bootstrap intervals for the metrics of probability vectors, resampling rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ood_toolkit.metrics.arrays import Bools, Floats, Ints
from ood_toolkit.metrics.bootstrap import Interval, percentile_interval, replicates
from ood_toolkit.metrics.calibration import ece, rms_calibration_error, rms_calibration_error_official, top_label
from ood_toolkit.metrics.resamples import CHUNK, draw_counts
from ood_toolkit.metrics.scoring import brier_rows, nll_rows, top_k_correct
from ood_toolkit.metrics.selective import aurra

_BINS = 15
_BIN_SIZE = 100
_BIASED = {"ece", "rms_calibration_error", "rms_calibration_error_official"}


class _Ties(NamedTuple):
    """Rows sorted by confidence: the gap (confidence − correct) of each, and the last row of each confidence."""

    order: Ints
    gap: Floats
    last: Ints


class CalibrationRows(NamedTuple):
    """Each row's confidence and correctness, and the columns whose means are metrics."""

    confidence: Floats
    correct: Bools
    means: dict[str, Floats]

    @staticmethod
    def cat(blocks: Sequence["CalibrationRows"]) -> "CalibrationRows":
        """Rows of all blocks, one after another: a matrix larger than the cache is best reduced in blocks."""
        return CalibrationRows(
            np.concatenate([block.confidence for block in blocks]),
            np.concatenate([block.correct for block in blocks]),
            {name: np.concatenate([block.means[name] for block in blocks]) for name in blocks[0].means},
        )


def calibration_intervals(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Percentile bootstrap intervals, over rows, of every metric of a calibration table at its default arguments.

    Keys: `accuracy`, `top_5_accuracy`, `nll`, `brier`, `ece`, `rms_calibration_error`, `aurra`, and
    `rms_calibration_error_official` where there are the 100 rows that it needs. Bins that follow the data are formed
    anew on each resample. An infinite NLL has the interval (inf, inf) where nearly all resamples are infinite.

    A binned calibration error is biased upwards, and on a resample twice over, so its bootstrap values lie above the
    value itself. Their spread is right, and the intervals of the three errors are moved back to the value: they hold
    the average of this number over data of this size, bias and all, not the error free of bias. For that see
    `debiased_rms`.

    Args:
        probabilities: shape (N, C), rows summing to one.
        labels: shape (N,), in 0..C−1.
        resamples: how many.
        level: of the intervals, in (0, 1).
        seed: the same seed and N give the same resamples.
    """
    rows = calibration_rows(probabilities, labels)
    return row_intervals(rows, resamples=resamples, level=level, seed=seed)


def calibration_rows(probabilities: ArrayLike, labels: ArrayLike) -> CalibrationRows:
    """What every row contributes to the metrics of a calibration table."""
    confidence, correct = top_label(probabilities, labels)
    means = {
        "accuracy": correct.astype(np.float64),
        "top_5_accuracy": top_k_correct(probabilities, labels, k=5).astype(np.float64),
        "nll": nll_rows(probabilities, labels),
        "brier": brier_rows(probabilities, labels),
    }
    return CalibrationRows(confidence, correct, means)


def row_intervals(
    rows: CalibrationRows, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> dict[str, Interval]:
    """As `calibration_intervals`, of rows that were reduced before; see there."""
    confidence, correct, means = rows
    values = {name: float(column.mean()) for name, column in means.items()}
    values["ece"] = ece(confidence, correct, bins=_BINS)
    values["rms_calibration_error"] = rms_calibration_error(confidence, correct)
    if confidence.size >= _BIN_SIZE:
        values["rms_calibration_error_official"] = rms_calibration_error_official(confidence, correct)
    found = _resampled(confidence, correct, means, list(values), resamples, seed)
    sure_right, sure_wrong = -confidence[correct], -confidence[~correct]
    values["aurra"] = aurra(sure_right, sure_wrong)
    found["aurra"] = replicates("aurra", sure_right, sure_wrong, resamples=resamples, seed=seed)
    for name in _BIASED & found.keys():
        found[name] = np.maximum(found[name] - found[name].mean() + values[name], 0.0)
    return {name: percentile_interval(value, found[name], level) for name, value in values.items()}


def _resampled(
    confidence: Floats, correct: Bools, means: dict[str, Floats], names: list[str], resamples: int, seed: int
) -> dict[str, Floats]:
    """Bootstrap values of the means and of the binned errors, `{name: (resamples,)}`."""
    rows, columns = confidence.size, np.column_stack(list(means.values()))
    in_bin = np.zeros((rows, _BINS))
    edges = np.linspace(0, 1, _BINS + 1)[1:-1]
    in_bin[np.arange(rows), np.searchsorted(edges, confidence, side="left")] = confidence - correct
    order = np.argsort(confidence, kind="stable")
    last = np.flatnonzero(np.append(np.diff(confidence[order]) > 0, True))
    ties = _Ties(order, (confidence - correct)[order], last)
    found = {name: np.empty(resamples) for name in names}
    for start in range(0, resamples, CHUNK):
        count = min(CHUNK, resamples - start)
        rng = np.random.default_rng((seed, start))
        drawn = np.stack([draw_counts(rng, rows, rows) for _ in range(count)]).astype(np.float64)
        chunk = slice(start, start + count)
        for name, averages in zip(means, _weighted_means(drawn, columns).T, strict=True):
            found[name][chunk] = averages
        found["ece"][chunk] = np.abs(drawn @ in_bin).sum(axis=1) / rows
        for index, counts in enumerate(drawn, start):
            every, official = _adaptive_rms(counts[ties.order], ties)
            found["rms_calibration_error"][index] = every
            if "rms_calibration_error_official" in found:
                found["rms_calibration_error_official"][index] = official
    return found


def _weighted_means(drawn: Floats, columns: Floats) -> Floats:
    """Means of the columns over each resample; infinite rows count only where they are drawn."""
    infinite = np.isinf(columns)
    sums = drawn @ np.where(infinite, 0.0, columns) / drawn.shape[1]
    return np.where(drawn @ infinite > 0, np.inf, sums) if infinite.any() else sums


def _adaptive_rms(counts: Floats, ties: _Ties) -> tuple[float, float]:
    """RMS calibration error of a resample, with all bins and without the most confident one.

    The cumulated gap runs straight through a tie, whose rows count as their mean; cuts every 100 rows read it off.
    """
    size = counts.sum()
    reached = np.append(0.0, np.cumsum(counts)[ties.last])
    gap = np.append(0.0, np.cumsum(counts * ties.gap)[ties.last])
    bins = max(int(size) // _BIN_SIZE, 1)
    cuts = np.append(np.arange(bins) * float(_BIN_SIZE), size)
    squares = np.diff(np.interp(cuts, reached, gap)) ** 2 / np.diff(cuts)
    return float(np.sqrt(squares.sum() / size)), float(np.sqrt(squares[:-1].sum() / size))
