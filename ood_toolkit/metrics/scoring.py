"""Accuracy and proper scores of whole probability vectors.

Functions take `(probabilities, labels)` of shapes (N, C) and (N,). Where probabilities may round to 0, keep precision
by handing log-probabilities to `nll_from_log`.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ood_toolkit.metrics.arrays import (
    Floats,
    Ints,
    UndefinedMetricError,
    as_labels,
    as_probabilities,
    as_top_label,
    to_numpy,
)

_ROWS_AT_ONCE = 512  # of 1000 classes: 4 MiB of float64, which stay in a core's cache


class BrierDecomposition(NamedTuple):
    """`brier = reliability − resolution + uncertainty + within_bin`, exactly.

    `reliability` is the binned calibration error (low is good), `resolution` how far the bins' frequencies stand apart
    (high is good), `uncertainty` the score of always predicting the class frequencies, and `within_bin` what binning
    loses: the spread of the probabilities within a bin less twice their covariance with the outcome (Stephenson,
    Coelho and Jolliffe 2008); 0 where every bin holds one distinct probability.
    """

    reliability: float
    resolution: float
    uncertainty: float
    within_bin: float


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Share of rows whose most probable class is the label; the first class wins a tie. Also takes logits."""
    return top_k_accuracy(probabilities, labels, k=1)


def top_k_accuracy(probabilities: ArrayLike, labels: ArrayLike, *, k: int = 5) -> float:
    """Share of rows whose label is among the k most probable classes; of equal probabilities the first class wins.

    Any monotone score per class will do, logits too. With at most k classes every row counts as right.
    """
    return float(top_k_correct(probabilities, labels, k=k).mean())


def top_k_correct(probabilities: ArrayLike, labels: ArrayLike, *, k: int = 5) -> NDArray[np.bool_]:
    """Whether each label is among the k most probable classes, shape (N,)."""
    if k < 1:
        raise ValueError(f"k must be at least 1, but is {k}")
    matrix, classes = _scores_per_class(probabilities, labels)
    correct = np.empty(len(matrix), dtype=bool)
    columns = np.arange(matrix.shape[1])
    for start in range(0, len(matrix), _ROWS_AT_ONCE):
        chunk, target = matrix[start : start + _ROWS_AT_ONCE], classes[start : start + _ROWS_AT_ONCE, None]
        own = np.take_along_axis(chunk, target, axis=1)
        ahead = _count(chunk > own)
        undecided = np.flatnonzero((ahead < k) & (_count(chunk == own) > 1))
        tied = (chunk[undecided] == own[undecided]) & (columns < target[undecided])
        ahead[undecided] += tied.sum(axis=1)
        correct[start : start + _ROWS_AT_ONCE] = ahead < k
    return correct


def _count(true: NDArray[np.bool_]) -> Ints:
    """How many entries of each row are true; three times as fast as their sum."""
    return true.view(np.uint8).sum(axis=1, dtype=np.uint32).astype(np.int64)


def nll(probabilities: ArrayLike, labels: ArrayLike, *, floor: float = 0.0) -> float:
    """Mean negative log-likelihood of the labels, in nats; +inf where a label has probability 0.

    Args:
        probabilities: shape (N, C), rows summing to one.
        labels: shape (N,), in 0..C−1.
        floor: probabilities below it count as it. 0 hides nothing; `np.finfo(np.float64).eps` is what scikit-learn's
            `log_loss` does to float64 input.
    """
    return float(nll_rows(probabilities, labels, floor=floor).mean())


def nll_rows(probabilities: ArrayLike, labels: ArrayLike, *, floor: float = 0.0) -> Floats:
    """Negative log-likelihood of each label, shape (N,), in nats; see `nll`."""
    own = _own_probability(*as_probabilities(probabilities, labels))
    with np.errstate(divide="ignore"):
        return -np.log(np.maximum(own, floor))


def nll_from_log(log_probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Mean negative log-likelihood from log-probabilities (N, C), which keep the precision that a softmax loses.

    Raises:
        ValueError: where a row's exponentials do not sum to one, as those of raw logits do not.
    """
    matrix, classes = _scores_per_class(log_probabilities, labels)
    with np.errstate(over="ignore"):
        sums = np.concatenate(
            [
                np.exp(matrix[start : start + _ROWS_AT_ONCE].astype(np.float64)).sum(axis=1)
                for start in range(0, len(matrix), _ROWS_AT_ONCE)
            ]
        )
    wrong = np.abs(sums - 1) > 1e-2
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"rows of log-probabilities must have exponentials that sum to one, but {int(wrong.sum())} of {len(sums)} "
            f"do not; row {row} gives {sums[row]:g}. Pass logits through a log-softmax first."
        )
    return float(-_own_probability(matrix, classes).mean())


def brier(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Brier score: mean over rows of the squared error **summed over classes**, in [0, 2]. Low is good.

    Divide by C for the mean over classes (pycalib), by 2 for scikit-learn's `scale_by_half`.
    """
    return float(brier_rows(probabilities, labels).mean())


def brier_rows(probabilities: ArrayLike, labels: ArrayLike) -> Floats:
    """Squared error of each row summed over classes, shape (N,); see `brier`."""
    matrix, classes = as_probabilities(probabilities, labels)
    squares = np.empty(len(matrix))
    for start in range(0, len(matrix), _ROWS_AT_ONCE):
        chunk = matrix[start : start + _ROWS_AT_ONCE].astype(np.float64)
        squares[start : start + _ROWS_AT_ONCE] = np.einsum("nc,nc->n", chunk, chunk)
    return squares - 2 * _own_probability(matrix, classes) + 1


def brier_decomposition(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15) -> BrierDecomposition:
    """Murphy's decomposition over equal-width bins of each class's probability, summed over classes.

    Args:
        probabilities: shape (N, C), rows summing to one.
        labels: shape (N,), in 0..C−1.
        bins: number of equal-width bins per class, closed on the right.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, but is {bins}")
    matrix, classes = as_probabilities(probabilities, labels)
    rows, edges = len(matrix), np.linspace(0, 1, bins + 1)[1:-1]
    reliability = resolution = uncertainty = 0.0
    for index in range(matrix.shape[1]):
        column = matrix[:, index].astype(np.float64)
        hit = (classes == index).astype(np.float64)
        bin_of = np.searchsorted(edges, column, side="left")
        counts = np.bincount(bin_of, minlength=bins)
        weight, filled = counts / rows, np.maximum(counts, 1)
        predicted = np.bincount(bin_of, weights=column, minlength=bins) / filled
        observed = np.bincount(bin_of, weights=hit, minlength=bins) / filled
        base = hit.mean()
        reliability += float((weight * (predicted - observed) ** 2).sum())
        resolution += float((weight * (observed - base) ** 2).sum())
        uncertainty += float(base * (1 - base))
    within = brier(matrix, classes) - (reliability - resolution + uncertainty)
    return BrierDecomposition(reliability, resolution, uncertainty, within)


def brier_top_label(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Mean of `(confidence − correct)²` over rows, in [0, 1]: the Brier score of the predicted class alone."""
    certain, right = as_top_label(confidence, correct)
    return float(((certain - right) ** 2).mean())


def entropy(probabilities: ArrayLike) -> float:
    """Mean predictive entropy `−Σ_c p_c log p_c`, in nats, in [0, log C]."""
    matrix, _ = as_probabilities(probabilities, np.zeros(len(to_numpy(probabilities)), dtype=np.int64))
    total = 0.0
    for start in range(0, len(matrix), _ROWS_AT_ONCE):
        chunk = matrix[start : start + _ROWS_AT_ONCE].astype(np.float64)
        total -= float((chunk * np.log(np.where(chunk > 0, chunk, 1.0))).sum())
    return total / len(matrix)


def _own_probability(matrix: NDArray[Any], labels: Ints) -> Floats:
    return matrix[np.arange(len(labels)), labels].astype(np.float64)


def _scores_per_class(scores: ArrayLike, labels: ArrayLike) -> tuple[NDArray[Any], Ints]:
    matrix = to_numpy(scores)
    if matrix.ndim != 2:
        raise ValueError(f"scores per class must have shape (N, C), but came with {matrix.shape}")
    if not len(matrix):
        raise UndefinedMetricError("this metric needs at least one row, but got none")
    if np.isnan(matrix).any():
        raise ValueError(f"scores per class hold NaN, the first in row {int(np.argmax(np.isnan(matrix).any(axis=1)))}")
    return matrix, as_labels(labels, *matrix.shape)
