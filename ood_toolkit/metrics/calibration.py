"""Calibration of top-label confidences: does being 80 % sure mean being right 80 % of the time?

Functions take `(confidence, correct)`: the probability of the predicted class, in [0, 1], and whether the prediction is
right, both of shape (N,); `top_label` makes them from probabilities and labels. Class-wise errors take `(probabilities,
labels)`. All sums are float64. Equal-width bins are closed on the right, `(a, b]`, with 0 in the first (Guo et al.,
ICML 2017); equal-mass bins never split confidences that tie. No number depends on the order of the rows.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ood_toolkit.metrics.arrays import (
    Bools,
    Floats,
    Ints,
    UndefinedMetricError,
    as_probabilities,
    as_top_label,
)

Scheme = Literal["equal-width", "equal-mass"]
Norm = Literal["l1", "l2", "max"]

_ROWS_AT_ONCE = 4096  # 4096 × 1000 float64 is 32 MiB


class Bins(NamedTuple):
    """What a binned calibration error is made of, one entry per non-empty bin, confidence rising."""

    counts: Ints
    confidence: Floats
    accuracy: Floats


class ReliabilityCurve(NamedTuple):
    """Bins of a reliability diagram with the band in which a calibrated model's accuracy would fall.

    `low` and `high` are binomial quantiles of the accuracy at the bin's mean confidence (consistency bars, Bröcker and
    Smith 2007). A bin outside its band is miscalibrated beyond chance.
    """

    counts: Ints
    confidence: Floats
    accuracy: Floats
    low: Floats
    high: Floats


def top_label(probabilities: ArrayLike, labels: ArrayLike) -> tuple[Floats, Bools]:
    """Confidence of the predicted class and whether it is right; the first class wins where several share the maximum.

    Args:
        probabilities: shape (N, C), rows summing to one.
        labels: shape (N,), in 0..C−1.

    >>> top_label([[0.7, 0.3], [0.4, 0.6]], [0, 0])
    (array([0.7, 0.6]), array([ True, False]))
    """
    matrix, classes = as_probabilities(probabilities, labels)
    predicted = matrix.argmax(axis=1)
    confidence = matrix[np.arange(len(matrix)), predicted].astype(np.float64)
    return np.minimum(confidence, 1.0), predicted == classes


def binned(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 15, scheme: Scheme = "equal-width") -> Bins:
    """Counts, mean confidence and accuracy of every non-empty bin.

    Args:
        confidence: shape (N,), in [0, 1].
        correct: shape (N,).
        bins: how many bins; fewer come back where some are empty or ties span several.
        scheme: `equal-width` cuts [0, 1] evenly, each bin closed on the right; `equal-mass` cuts the sorted rows into
            groups whose sizes differ by at most one, each cut then moved up to the end of the tie it falls in.
    """
    certain, right = as_top_label(confidence, correct)
    return _summarise(_bin_index(certain, bins, scheme), certain, right)


def ece(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    bins: int = 15,
    scheme: Scheme = "equal-width",
    norm: Norm = "l1",
) -> float:
    """Expected calibration error: `Σ_b n_b/N |confidence_b − accuracy_b|` over bins. Low is good.

    Eq. 3 of Guo et al., ICML 2017, arXiv:1706.04599. Biased upwards by about `√(bins / N)`; see `debiased_ece`, or
    `smooth_ece` for one without bins.

    Args:
        confidence: shape (N,), in [0, 1].
        correct: shape (N,).
        bins: number of bins; 15 in most papers.
        scheme: see `binned`.
        norm: `l1`; `l2` for the root of the weighted mean square; `max` for the largest gap of a bin.

    >>> round(ece([0.9, 0.9, 0.6], [True, False, True]), 6)
    0.4
    """
    return _norm_of(binned(confidence, correct, bins=bins, scheme=scheme), norm)


def mce(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 15, scheme: Scheme = "equal-width") -> float:
    """Maximum calibration error: the largest gap of a bin, however few rows it holds. `ece` with `norm="max"`.

    Eq. 5 of Guo et al., ICML 2017, arXiv:1706.04599.
    """
    return ece(confidence, correct, bins=bins, scheme=scheme, norm="max")


def ace(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    bins: int = 15,
    meaning: Literal["adaptive", "average"] = "adaptive",
) -> float:
    """One of the two top-label errors that tools call ACE; the name alone says nothing.

    Args:
        confidence: shape (N,), in [0, 1].
        correct: shape (N,).
        bins: number of bins.
        meaning: `adaptive` is `ece` over equal-mass bins (torch-uncertainty); `average` the unweighted mean of the gaps
            of non-empty equal-width bins (netcal). The third meaning, class-wise over equal-mass bins (Nixon et al.
            2019, who coined the name), is `classwise_ece(scheme="equal-mass")`.
    """
    if meaning == "adaptive":
        return ece(confidence, correct, bins=bins, scheme="equal-mass")
    if meaning != "average":
        raise ValueError(f"meaning must be 'adaptive' or 'average', but is {meaning!r}")
    groups = binned(confidence, correct, bins=bins)
    return float(np.abs(groups.confidence - groups.accuracy).mean())


def rms_calibration_error(
    confidence: ArrayLike, correct: ArrayLike, *, bin_size: int = 100, norm: Norm = "l2"
) -> float:
    """RMS calibration error over adaptive bins of 100 rows: `√(Σ_b n_b/N (confidence_b − accuracy_b)²)`. Low is good.

    The rows are sorted by confidence and cut into `N // bin_size` bins, the last taking the remainder; fewer than
    `bin_size` rows are one bin. Every bin counts, unlike in `rms_calibration_error_official`. Rows that tie count with
    their mean correctness, so it does not matter which of them a cut leaves on which side.

    Args:
        confidence: shape (N,), in [0, 1].
        correct: shape (N,).
        bin_size: rows per bin.
        norm: `l2`; `l1` for the mean absolute and `max` for the largest gap of the same bins.
    """
    return _norm_of(_adaptive(confidence, correct, bin_size), norm)


def rms_calibration_error_official(
    confidence: ArrayLike, correct: ArrayLike, *, bin_size: int = 100, norm: Norm = "l2"
) -> float:
    """The RMS calibration error as the ImageNet-A authors published it, which leaves out the most confident bin.

    Their loop ends one bin early while the weights still divide by all N rows, so the error of the `bin_size` to
    `2 bin_size − 1` most confident rows never counts: 0 for fewer than `2 bin_size` rows. Report it beside published
    numbers only. (Hendrycks et al., CVPR 2021, `calib_err` in their calibration tools.)

    Raises:
        UndefinedMetricError: for fewer than `bin_size` rows, where the published code fails too.
    """
    groups = _adaptive(confidence, correct, bin_size)
    total = int(groups.counts.sum())
    if total < bin_size:
        raise UndefinedMetricError(
            f"the published RMS calibration error needs at least {bin_size} rows, but got {total}; "
            "rms_calibration_error has no such limit"
        )
    counted = Bins(groups.counts[:-1], groups.confidence[:-1], groups.accuracy[:-1])
    return _norm_of(counted, norm, total=total) if len(counted.counts) else 0.0


def debiased_ece(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 15, scheme: Scheme = "equal-mass") -> float:
    """ECE (L1) less its sampling bias: `2 ECE − Σ_b n_b/N E|gap_b + noise_b|`, at least 0.

    Noise is Gaussian of variance `accuracy_b (1 − accuracy_b) / n_b` (Kumar et al., NeurIPS 2019, appendix), its
    expected absolute value taken in closed form, where their code draws a thousand samples. Removes most of the bias,
    not all; the L2 error of `debiased_rms` is exactly unbiased before its root.
    """
    from scipy.special import erf

    groups = binned(confidence, correct, bins=bins, scheme=scheme)
    gap = np.abs(groups.confidence - groups.accuracy)
    spread = np.sqrt(groups.accuracy * (1 - groups.accuracy) / groups.counts)
    standard = np.divide(gap, spread, out=np.full_like(gap, 40.0), where=spread > 0)
    folded = np.where(
        spread > 0, spread * np.sqrt(2 / np.pi) * np.exp(-(standard**2) / 2) + gap * erf(standard / np.sqrt(2)), gap
    )
    return float(max(0.0, np.average(2 * gap - folded, weights=groups.counts)))


def debiased_rms(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 15, scheme: Scheme = "equal-mass") -> float:
    """Root of `debiased_mean_square`, or 0 where that is negative (a calibrated model's is, every other time)."""
    return float(np.sqrt(max(0.0, debiased_mean_square(confidence, correct, bins=bins, scheme=scheme))))


def debiased_mean_square(
    confidence: ArrayLike, correct: ArrayLike, *, bins: int = 15, scheme: Scheme = "equal-mass"
) -> float:
    """Squared L2 calibration error less the variance of each bin's accuracy; unbiased, so it may be negative.

    `Σ_b n_b/N [(confidence_b − accuracy_b)² − accuracy_b (1 − accuracy_b) / (n_b − 1)]` (Kumar et al., NeurIPS 2019,
    Definition 5.2); a bin of a single row has no estimate of its variance and counts undebiased.
    """
    groups = binned(confidence, correct, bins=bins, scheme=scheme)
    noise = groups.accuracy * (1 - groups.accuracy) / np.maximum(groups.counts - 1, 1)
    return float(np.average((groups.confidence - groups.accuracy) ** 2 - noise, weights=groups.counts))


def overconfidence(
    confidence: ArrayLike, correct: ArrayLike, *, bins: int = 15, scheme: Scheme = "equal-width"
) -> float:
    """The part of `ece` from bins that are more confident than right; `ece = overconfidence + underconfidence`."""
    groups = binned(confidence, correct, bins=bins, scheme=scheme)
    return float(np.average(np.maximum(groups.confidence - groups.accuracy, 0), weights=groups.counts))


def underconfidence(
    confidence: ArrayLike, correct: ArrayLike, *, bins: int = 15, scheme: Scheme = "equal-width"
) -> float:
    """The part of `ece` from bins that are more often right than confident."""
    groups = binned(confidence, correct, bins=bins, scheme=scheme)
    return float(np.average(np.maximum(groups.accuracy - groups.confidence, 0), weights=groups.counts))


def reliability_curve(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    bins: int = 15,
    scheme: Scheme = "equal-width",
    level: float = 0.95,
) -> ReliabilityCurve:
    """What a reliability diagram draws: the non-empty bins and the band of a calibrated model around each.

    Args:
        confidence: shape (N,), in [0, 1].
        correct: shape (N,).
        bins: number of bins.
        scheme: see `binned`.
        level: share of calibrated models whose accuracy in one bin falls within its band, in (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level is a share in (0, 1), but is {level}")
    from scipy.stats import binom

    groups = binned(confidence, correct, bins=bins, scheme=scheme)
    low = binom.ppf((1 - level) / 2, groups.counts, groups.confidence) / groups.counts
    high = binom.ppf((1 + level) / 2, groups.counts, groups.confidence) / groups.counts
    return ReliabilityCurve(*groups, low, high)


def classwise_ece(
    probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15, scheme: Scheme = "equal-width"
) -> float:
    """Mean over classes of the ECE of "is it this class?", every row counting for every class.

    Args:
        probabilities: shape (N, C), rows summing to one.
        labels: shape (N,), in 0..C−1.
        bins: number of bins per class.
        scheme: `equal-width` (Kull et al., NeurIPS 2019) or `equal-mass` (the "ACE" of Nixon et al. 2019).
    """
    matrix, classes = as_probabilities(probabilities, labels)
    if scheme == "equal-width":
        return float(np.abs(_classwise_gaps(matrix, classes, bins)).sum() / matrix.size)
    errors = []
    for index in range(matrix.shape[1]):
        column = np.minimum(matrix[:, index].astype(np.float64), 1.0)
        errors.append(_norm_of(_summarise(_bin_index(column, bins, scheme), column, classes == index), "l1"))
    return float(np.mean(errors))


def debiased_classwise_rms(
    probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15, scheme: Scheme = "equal-mass"
) -> float:
    """Root of the mean over classes of `max(0, debiased_mean_square)` of "is it this class?".

    The default of the package uncertainty-calibration (Kumar et al., NeurIPS 2019, Eq. 3), there called marginal.
    """
    matrix, classes = as_probabilities(probabilities, labels)
    squares = [
        debiased_mean_square(
            np.clip(matrix[:, index].astype(np.float64), 0.0, 1.0), classes == index, bins=bins, scheme=scheme
        )
        for index in range(matrix.shape[1])
    ]
    return float(np.sqrt(np.maximum(squares, 0.0).mean()))


def _bin_index(confidence: Floats, bins: int, scheme: Scheme) -> Ints:
    """The bin of every row, 0..bins−1."""
    if bins < 1:
        raise ValueError(f"bins must be at least 1, but is {bins}")
    if scheme == "equal-width":
        return np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence, side="left")
    if scheme != "equal-mass":
        raise ValueError(f"scheme must be 'equal-width' or 'equal-mass', but is {scheme!r}")
    size, larger = divmod(confidence.size, bins)
    cuts = np.arange(1, bins) * size + np.minimum(np.arange(1, bins), larger)
    last_inside = np.sort(confidence)[cuts[cuts > 0] - 1]
    return np.searchsorted(np.unique(last_inside), confidence, side="left")


def _summarise(index: Ints, confidence: Floats, correct: NDArray[Any]) -> Bins:
    counts = np.bincount(index)
    filled = counts > 0
    counts = counts[filled]
    return Bins(
        counts,
        np.bincount(index, weights=confidence)[filled] / counts,
        np.bincount(index, weights=correct)[filled] / counts,
    )


def _adaptive(confidence: ArrayLike, correct: ArrayLike, bin_size: int) -> Bins:
    """Bins of `bin_size` consecutive rows by confidence, the last with the remainder."""
    if bin_size < 1:
        raise ValueError(f"bin_size must be at least 1, but is {bin_size}")
    certain, right = as_top_label(confidence, correct)
    _, tie, counts = np.unique(certain, return_inverse=True, return_counts=True)
    order = np.argsort(certain, kind="stable")
    shared = (np.bincount(tie, weights=right) / counts)[tie]  # a row that ties counts as the mean of its tie
    index = np.minimum(np.arange(certain.size) // bin_size, max(certain.size // bin_size - 1, 0))
    return _summarise(index, certain[order], shared[order])


def _norm_of(groups: Bins, norm: Norm, *, total: int | None = None) -> float:
    gap = np.abs(groups.confidence - groups.accuracy)
    weights = groups.counts / (groups.counts.sum() if total is None else total)
    if norm == "l1":
        return float((weights * gap).sum())
    if norm == "l2":
        return float(np.sqrt((weights * gap**2).sum()))
    if norm == "max":
        return float(gap.max())
    raise ValueError(f"norm must be 'l1', 'l2' or 'max', but is {norm!r}")


def _classwise_gaps(matrix: NDArray[Any], labels: Ints, bins: int) -> Floats:
    """`Σ (probability − is the class)` for every class and equal-width bin, shape (C, bins).

    A row has fewer than `bins` probabilities above `1 / bins`, so only those are binned one by one; what is left of a
    class's total lies in its first bin. This makes 50,000 × 1000 a matter of two passes over the matrix.
    """
    classes = matrix.shape[1]
    edges = np.linspace(0, 1, bins + 1)[1:-1]
    gaps = np.zeros((classes, bins))
    for start in range(0, len(matrix), _ROWS_AT_ONCE):
        chunk, target = matrix[start : start + _ROWS_AT_ONCE], labels[start : start + _ROWS_AT_ONCE]
        gaps[:, 0] += chunk.sum(axis=0, dtype=np.float64)
        if bins > 1:
            row, column = np.nonzero(chunk > edges[0])
            value = chunk[row, column].astype(np.float64)
            index = np.searchsorted(edges, value, side="left")
            moved = np.bincount(column * bins + index, weights=value, minlength=classes * bins).reshape(classes, bins)
            gaps += moved
            gaps[:, 0] -= moved.sum(axis=1)
        of_label = chunk[np.arange(len(target)), target].astype(np.float64)
        hit = target * bins + np.searchsorted(edges, of_label, side="left")
        gaps -= np.bincount(hit, minlength=classes * bins).reshape(classes, bins)
    return gaps
