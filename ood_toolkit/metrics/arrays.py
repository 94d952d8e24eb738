"""The one door by which arrays and tensors enter the metrics: float64, checked, flat."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class UndefinedMetricError(ValueError):
    """The metric has no value for these rows, such as an AUROC without a single OOD score."""


def to_numpy(values: Any) -> NDArray[Any]:
    """The same numbers as a numpy array, from a numpy array, a nested list or a torch tensor on any device."""
    if hasattr(values, "detach"):  # a tensor, recognised without importing torch
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # numpy has no such type; float32 holds every bfloat16 exactly
            values = values.float()
        values = values.numpy()
    return np.asarray(values)


def as_scores(values: ArrayLike, name: str) -> Floats:
    """Scores as a flat float64 vector; ±inf is a score like any other, NaN is an error.

    Args:
        values: scores of shape (N,).
        name: what to call them in an error.

    Raises:
        ValueError: where the array is not one-dimensional or holds NaN.
    """
    scores = to_numpy(values)
    if scores.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, but came with shape {scores.shape}")
    scores = scores.astype(np.float64, copy=False)
    missing = np.isnan(scores)
    if missing.any():
        first = np.flatnonzero(missing)[:5].tolist()
        raise ValueError(f"{name} hold {int(missing.sum())} NaN among {scores.size}, the first at rows {first}")
    return scores


def as_confidence(values: ArrayLike) -> Floats:
    """Top-label confidences of shape (N,), each in [0, 1]."""
    confidence = as_scores(values, "confidences")
    if confidence.size and not (confidence.min() >= 0 and confidence.max() <= 1 + 1e-6):
        low, high = confidence.min(), confidence.max()
        raise ValueError(f"confidences must be in [0, 1], but range from {low:g} to {high:g}; are these logits?")
    return np.minimum(confidence, 1.0)


def as_correct(values: ArrayLike, size: int) -> Bools:
    """Whether each prediction is right, as booleans of shape (size,); accepts booleans or 0 and 1."""
    correct = to_numpy(values)
    if correct.shape != (size,):
        raise ValueError(f"correct must have shape {(size,)} as the confidences have, but came with {correct.shape}")
    if correct.dtype != np.bool_:
        if not np.isin(correct, (0, 1)).all():
            raise ValueError("correct must hold booleans, or 0 and 1 only")
        correct = correct == 1
    return correct


def as_top_label(confidence: ArrayLike, correct: ArrayLike) -> tuple[Floats, Bools]:
    """Confidences and correctness of the same rows; at least one row."""
    checked = as_confidence(confidence)
    if not checked.size:
        raise UndefinedMetricError("this metric needs at least one row, but got none")
    return checked, as_correct(correct, checked.size)


def as_labels(values: ArrayLike, rows: int, classes: int) -> Ints:
    """Class indices of shape (rows,), each in 0..classes−1; UNKNOWN (−1) has no place in these metrics."""
    labels = to_numpy(values)
    if labels.shape != (rows,):
        raise ValueError(
            f"labels must have shape {(rows,)}, one per row of probabilities, but came with {labels.shape}"
        )
    if labels.dtype.kind not in "iu":
        raise TypeError(f"labels must be integers, but came as {labels.dtype}")
    if labels.size and not (labels.min() >= 0 and labels.max() < classes):
        low, high = labels.min(), labels.max()
        raise ValueError(
            f"labels must be in 0..{classes - 1}, but range from {low} to {high}; drop rows without a label"
        )
    return labels.astype(np.int64, copy=False)


def as_probabilities(probabilities: ArrayLike, labels: ArrayLike) -> tuple[NDArray[Any], Ints]:
    """Probabilities (N, C) in their own float type, rows summing to one, and their labels (N,).

    A million-row float32 matrix is not copied to float64 here: callers cast the few columns or the chunk they use.
    """
    matrix = to_numpy(probabilities)
    if matrix.ndim != 2:
        raise ValueError(f"probabilities must have shape (N, C), but came with {matrix.shape}")
    if not matrix.shape[0]:
        raise UndefinedMetricError("this metric needs at least one row, but got none")
    if matrix.dtype.kind != "f":
        matrix = matrix.astype(np.float64)
    sums = matrix.sum(axis=1, dtype=np.float64)
    wrong = ~(np.abs(sums - 1.0) <= 1e-2) | ~(matrix.min(axis=1) >= -1e-6)  # NaN fails both comparisons
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"rows of probabilities must be non-negative and sum to one, but {int(wrong.sum())} of {len(sums)} do not; "
            f"row {row} sums to {sums[row]:g}. Are these logits, or log-probabilities?"
        )
    return matrix, as_labels(labels, *matrix.shape)
