"""Robustness views of several models on one set: do they fail on the same images, how surely, and how far they fall.

ImageNet-A holds images that one ResNet-50 got wrong; whether other models get them wrong too is its claim.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from ood_toolkit.metrics.arrays import Bools, Floats, UndefinedMetricError, as_correct, as_top_label, to_numpy
from ood_toolkit.metrics.bootstrap import Interval


def transfer_matrix(correct: ArrayLike) -> Floats:
    """(M, M): of the images that model a (row) gets wrong, the share that model b (column) gets wrong, in [0, 1].

    The diagonal is 1. The row of a model without an error is NaN: there is nothing to transfer. The base rate to
    compare with is b's error rate over all images, see `error_rates`.

    Args:
        correct: (M, N), whether each of M models is right on each of the same N images.

    >>> transfer_matrix([[False, False, True], [False, True, True]])
    array([[1. , 0.5],
           [1. , 1. ]])
    """
    wrong = ~_as_correct_matrix(correct)
    both = wrong.astype(np.float64) @ wrong.T.astype(np.float64)
    errors = wrong.sum(axis=1, dtype=np.float64)[:, None]
    return np.divide(both, errors, out=np.full_like(both, np.nan), where=errors > 0)


def error_rates(correct: ArrayLike) -> Floats:
    """(M,): the share of all images that each model gets wrong, in [0, 1].

    Args:
        correct: (M, N), as for `transfer_matrix`.
    """
    return 1.0 - _as_correct_matrix(correct).mean(axis=1, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class WrongConfidence:
    """How sure a model is of its wrong answers.

    Args:
        wrong: how many answers are wrong.
        mean: of their confidence, in [0, 1].
        median: of the same.
        shares: (K,), of the wrong answers, the share with at least each threshold of confidence.
        thresholds: (K,).
    """

    wrong: int
    mean: float
    median: float
    shares: tuple[float, ...]
    thresholds: tuple[float, ...]


def wrong_confidence(
    confidence: ArrayLike, correct: ArrayLike, *, thresholds: tuple[float, ...] = (0.5, 0.9, 0.99)
) -> WrongConfidence:
    """The confidence of the wrong answers. Lower is better: a model should not be sure where it is wrong.

    Args:
        confidence: (N,), top-label probability, in [0, 1].
        correct: (N,), whether the answer is right.
        thresholds: in [0, 1].

    Raises:
        UndefinedMetricError: no answer is wrong.
    """
    checked, right = as_top_label(confidence, correct)
    of_wrong = checked[~right]
    if not of_wrong.size:
        raise UndefinedMetricError("the confidence of wrong answers needs a wrong answer, but all are right")
    return WrongConfidence(
        wrong=of_wrong.size,
        mean=float(of_wrong.mean()),
        median=float(np.median(of_wrong)),
        shares=tuple(float((of_wrong >= threshold).mean()) for threshold in thresholds),
        thresholds=thresholds,
    )


@dataclass(frozen=True, kw_only=True)
class AccuracyDrop:
    """What accuracy a model loses from clean to adversarial images of the same classes; all in [0, 1].

    Args:
        clean: accuracy on clean images.
        adversarial: accuracy on adversarial images.
        drop: clean − adversarial; smaller is better at the same clean accuracy.
        relative: drop / clean, the share of what was right that is lost; NaN where nothing was right.
        error: standard error of the drop, of two independent samples.
    """

    clean: float
    adversarial: float
    drop: float
    relative: float
    error: float


def accuracy_drop(clean_correct: ArrayLike, adversarial_correct: ArrayLike) -> AccuracyDrop:
    """Clean against adversarial accuracy, under the same class mask on both sides.

    Args:
        clean_correct: (N,), whether each clean image is classified right.
        adversarial_correct: (M,), the same of adversarial images.

    Raises:
        UndefinedMetricError: one of the two is empty.
    """
    sides = [as_correct(side, to_numpy(side).size) for side in (clean_correct, adversarial_correct)]
    if not all(side.size for side in sides):
        raise UndefinedMetricError(
            f"a drop needs clean and adversarial images, but got {sides[0].size} and {sides[1].size}"
        )
    clean, adversarial = (float(side.mean()) for side in sides)
    variance = sum(float(side.var()) / side.size for side in sides)
    return AccuracyDrop(
        clean=clean,
        adversarial=adversarial,
        drop=clean - adversarial,
        relative=(clean - adversarial) / clean if clean else float("nan"),
        error=variance**0.5,
    )


def share_interval(hits: int, total: int, *, level: float = 0.95) -> Interval:
    """The share hits / total with its Wilson score interval.

    Choose it over the bootstrap for small counts and shares near 0 or 1, where resampling gives an interval of width
    0: a model that gets none of 40 images right has [0, 0.088], not [0, 0].

    Args:
        hits: 0 to total.
        total: at least 1.
        level: coverage, in (0, 1).

    Wilson, Probable Inference, the Law of Succession, and Statistical Inference, JASA 1927.

    >>> tuple(round(end, 3) for end in share_interval(0, 40))
    (0.0, 0.0, 0.088)
    """
    if not 0 <= hits <= total or total < 1:
        raise UndefinedMetricError(f"a share needs 0 <= hits <= total and a total above 0, got {hits} of {total}")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share, spread = hits / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z * (share * (1 - share) / total + spread / (4 * total)) ** 0.5 / (1 + spread)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Interval(share, min(low, share), max(high, share))


def drop_interval(clean: Interval, adversarial: Interval) -> Interval:
    """The drop, clean − adversarial, of two independent shares with Newcombe's interval, made from theirs.

    Like `share_interval` it holds at 0 and 1, where a standard error is 0.

    Args:
        clean: share of clean images that are classified right, from `share_interval`.
        adversarial: the same of adversarial images, at the same level.

    Newcombe, Interval estimation for the difference between independent proportions, Statistics in Medicine 1998,
    method 10.
    """
    drop = clean.value - adversarial.value
    below = ((clean.value - clean.low) ** 2 + (adversarial.high - adversarial.value) ** 2) ** 0.5
    above = ((clean.high - clean.value) ** 2 + (adversarial.value - adversarial.low) ** 2) ** 0.5
    return Interval(drop, drop - below, drop + above)


def _as_correct_matrix(values: ArrayLike) -> Bools:
    matrix = to_numpy(values)
    if matrix.ndim != 2 or not matrix.size:
        raise ValueError(f"correct must have shape (models, images) and hold some, but came with {matrix.shape}")
    return as_correct(matrix.ravel(), matrix.size).reshape(matrix.shape)
