"""Metrics of telling two samples of scores apart: ID from OOD, or correct from wrong predictions.

Every function takes `(id_scores, ood_scores)`, in that order and of any sizes, where a **higher score means more OOD**.
For misclassification detection pass `(correct_scores, wrong_scores)`. OOD (or wrong) is the positive class unless the
name says `id`. All numbers are float64 on exact ranks; scores that tie are never ordered, and NaN is a ValueError.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ood_toolkit.metrics.arrays import Floats, UndefinedMetricError, as_correct, as_scores, to_numpy
from ood_toolkit.metrics.counts import (
    area_under_precision_recall,
    area_under_roc,
    average_precision,
    negatives_caught,
    rank,
    rank_both,
    smallest_error,
)


class RocCurve(NamedTuple):
    """One point per distinct score, from (0, 0) where nothing is flagged to (1, 1); the first threshold is +inf."""

    fpr: Floats
    tpr: Floats
    thresholds: Floats


class PrecisionRecallCurve(NamedTuple):
    """One point per distinct score, recall rising; flag an input when its score reaches the threshold."""

    precision: Floats
    recall: Floats
    thresholds: Floats


def auroc(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """Probability that a random OOD input scores above a random ID input, ties counting one half.

    Chance is 0.5; the number does not depend on the sizes of the two samples.

    Args:
        id_scores: shape (N,), higher = more OOD.
        ood_scores: shape (P,).

    Raises:
        UndefinedMetricError: where one of the samples is empty.

    >>> auroc([0.1, 0.2, 0.4], [0.3, 0.9])
    0.8333333333333334
    """
    return float(area_under_roc(rank_both(id_scores, ood_scores).steps))


def aupr(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """Average precision with OOD positive: `Σ_k (R_k − R_{k−1}) P_k` over distinct thresholds, no interpolation.

    The number that the ImageNet-O paper and scikit-learn's `average_precision_score` give. Chance is
    `aupr_base_rate`, so AUPRs of different ID:OOD ratios cannot be compared.

    Raises:
        UndefinedMetricError: where one of the samples is empty.

    >>> aupr([0.1, 0.2, 0.4], [0.3, 0.9])
    0.8333333333333333
    """
    return float(average_precision(rank_both(id_scores, ood_scores).steps))


def aupr_id(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """Average precision with ID (or correct) positive: how pure the inputs of low score are ("AUPR-in", "-success")."""
    return float(average_precision(rank_both(id_scores, ood_scores).steps.reversed))


def aupr_trapezoid(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """Trapezoid under the OOD-positive precision-recall points, for comparison with OpenOOD and pytorch-ood only.

    Straight lines between precision-recall points are not achievable by any threshold (Davis and Goadrich, ICML 2006),
    and with tied scores they flatter. Prefer `aupr`.
    """
    return float(area_under_precision_recall(rank_both(id_scores, ood_scores).steps))


def aupr_id_trapezoid(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """Trapezoid under the ID-positive precision-recall points ("AUPR-in" of OpenOOD, pytorch-ood and detectors)."""
    return float(area_under_precision_recall(rank_both(id_scores, ood_scores).steps.reversed))


def aupr_base_rate(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """The `aupr` of chance: the share of OOD among all inputs. 2,000 / 12,000 on ImageNet-O."""
    ranking = rank(id_scores, ood_scores)
    return float(ranking.positives[-1] / (ranking.positives[-1] + ranking.negatives[-1]))


def fpr_at_tpr(id_scores: ArrayLike, ood_scores: ArrayLike, tpr: float = 0.95) -> float:
    """Share of **ID inputs flagged** when at least `tpr` of the OOD inputs are caught. OOD is positive; low is good.

    The rule: lower the threshold through the distinct scores and stop at the first one where the share of OOD inputs
    with `score >= threshold` is at least `tpr`. Tied inputs are flagged together.

    Args:
        id_scores: shape (N,), higher = more OOD.
        ood_scores: shape (P,).
        tpr: share of OOD to catch, in [0, 1].
    """
    return float(negatives_caught(rank_both(id_scores, ood_scores).steps, _share(tpr)))


def fpr_at_tpr_id_positive(id_scores: ArrayLike, ood_scores: ArrayLike, tpr: float = 0.95) -> float:
    """Share of **OOD inputs accepted** when at least `tpr` of the ID inputs are. ID is positive; low is good.

    What many papers print as FPR95 (energy, ViM, MCM, NINCO). A different number from `fpr_at_tpr`; the rule is the
    same with the scores read from the lowest up.
    """
    return float(negatives_caught(rank_both(id_scores, ood_scores).steps.reversed, _share(tpr)))


def fpr_at_tpr_official(id_scores: ArrayLike, ood_scores: ArrayLike, tpr: float = 0.95) -> float:
    """FPR as the authors of ImageNet-O compute it: at the recall **nearest** to `tpr`, above or below. OOD positive.

    Of two recalls equally near the higher counts, and of all thresholds with that recall the lowest, hence the largest
    FPR. Up to the gap between two OOD scores it is `fpr_at_tpr`; with ties or few OOD inputs the recall may be far
    below `tpr` and the number flatters. Report it beside published numbers only. With ID positive, as MCM and its kin
    print it: `fpr_at_tpr_official(-ood_scores, -id_scores)`.
    """
    ranking = rank_both(id_scores, ood_scores)
    recall = ranking.positives / ranking.positives[-1]
    complete = int(np.argmax(recall == 1.0))  # lower thresholds cannot add recall, and the published code drops them
    nearest = complete - int(np.argmin(np.abs(recall[complete::-1] - _share(tpr))))
    return float(ranking.negatives[nearest] / ranking.negatives[-1])


def tnr_at_tpr(id_scores: ArrayLike, ood_scores: ArrayLike, tpr: float = 0.95) -> float:
    """Share of ID inputs let through when at least `tpr` of the OOD inputs are caught: `1 − fpr_at_tpr`."""
    return 1.0 - fpr_at_tpr(id_scores, ood_scores, tpr)


def detection_error(id_scores: ArrayLike, ood_scores: ArrayLike, *, ood_prior: float = 0.5) -> float:
    """Smallest `(1 − π) FPR + π FNR` over all thresholds: the error rate of the best threshold. Low is good.

    In [0, ½] for the default π = ½ (Liang et al., ICLR 2018, ODIN, section 4.3, who write it for the threshold that
    accepts 95 % of the ID inputs). The tool `detectors` weighs by the sizes of the samples instead: pass
    `ood_prior=aupr_base_rate(id_scores, ood_scores)` for its number.

    Args:
        id_scores: shape (N,), higher = more OOD.
        ood_scores: shape (P,).
        ood_prior: π, the assumed share of OOD among the inputs, in [0, 1].
    """
    if not 0 <= ood_prior <= 1:
        raise ValueError(f"ood_prior is a share in [0, 1], but is {ood_prior}")
    return float(smallest_error(rank_both(id_scores, ood_scores).steps, ood_prior))


def autc(id_scores: ArrayLike, ood_scores: ArrayLike) -> float:
    """Area under the threshold curve: mean of FPR and FNR over all thresholds, on scores stretched to [0, 1].

    Low where the two samples stand far apart, not only in order. The integrals of the step curves are exact:
    `½ (mean s_id + mean (1 − s_ood))`. Moves with a non-linear transform of the score, unlike every other metric here.
    Humblot-Renaux et al., CVPR Workshops 2023, arXiv:2306.14658.

    Raises:
        UndefinedMetricError: where a sample is empty or all scores are equal.
        ValueError: for infinite scores.
    """
    negatives, positives = as_scores(id_scores, "ID scores"), as_scores(ood_scores, "OOD scores")
    rank_both(negatives, positives)
    low = min(negatives.min(), positives.min())
    span = max(negatives.max(), positives.max()) - low
    if not np.isfinite(span):
        raise ValueError("autc stretches scores to [0, 1] and so needs finite ones, but some are infinite")
    if span == 0:
        raise UndefinedMetricError(f"autc has no value where all scores are equal (here {low:g})")
    return float(((negatives - low).mean() / span + 1 - (positives - low).mean() / span) / 2)


def partial_auroc(id_scores: ArrayLike, ood_scores: ArrayLike, *, max_fpr: float = 0.1) -> float:
    """AUROC over false positive rates up to `max_fpr`, standardised so that chance is 0.5 and perfection 1.

    `½ (1 + (A − a) / (m − a))` with A the area up to FPR m and `a = m²/2` (McClish 1989), as in scikit-learn's
    `roc_auc_score(max_fpr=...)`. Can fall below 0.5 where the head of the ranking is worse than chance.
    """
    if not 0 < max_fpr <= 1:
        raise ValueError(f"max_fpr must be in (0, 1], but is {max_fpr}")
    curve = roc_curve(id_scores, ood_scores)
    inside = curve.fpr < max_fpr
    fpr = np.append(curve.fpr[inside], max_fpr)
    tpr = np.append(curve.tpr[inside], _interpolate_last(curve, max_fpr))
    area, chance = np.trapezoid(tpr, fpr), max_fpr**2 / 2
    return float((1 + (area - chance) / (max_fpr - chance)) / 2)


def oscr(id_scores: ArrayLike, ood_scores: ArrayLike, *, correct: ArrayLike) -> float:
    """Area under correct-classification rate against the share of OOD accepted, over all thresholds.

    Counts an ID input only if it is accepted *and* classified rightly, so it is at most the accuracy; equal to
    accuracy × AUROC(correct ID against OOD). Dhamija et al., NeurIPS 2018, arXiv:1811.04110.
    Differs from the paper where an ID and an OOD score tie: half, not nothing, so that equal scores give accuracy / 2.

    Args:
        id_scores: shape (N,), higher = more OOD.
        ood_scores: shape (P,).
        correct: shape (N,), whether each ID input is classified rightly.
    """
    negatives = as_scores(id_scores, "ID scores")
    right = as_correct(correct, negatives.size)
    rank_both(negatives, ood_scores)
    return float(right.mean() * auroc(negatives[right], ood_scores)) if right.any() else 0.0


def roc_curve(id_scores: ArrayLike, ood_scores: ArrayLike) -> RocCurve:
    """False and true positive rate at every distinct score, OOD positive, none of the points dropped."""
    ranking = rank_both(id_scores, ood_scores)
    fpr = np.append(0.0, ranking.negatives / ranking.negatives[-1])
    tpr = np.append(0.0, ranking.positives / ranking.positives[-1])
    return RocCurve(fpr, tpr, np.append(np.inf, ranking.thresholds))


def precision_recall_curve(id_scores: ArrayLike, ood_scores: ArrayLike) -> PrecisionRecallCurve:
    """Precision and recall at every distinct score, OOD positive. Holds no artificial point at recall 0."""
    ranking = rank_both(id_scores, ood_scores)
    precision = ranking.positives / (ranking.positives + ranking.negatives)
    return PrecisionRecallCurve(precision, ranking.positives / ranking.positives[-1], ranking.thresholds)


def per_class(
    metric: Callable[[ArrayLike, ArrayLike], float],
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    ood_classes: ArrayLike,
) -> dict[int | str, float]:
    """The metric of all ID scores against the OOD scores of each class by itself, classes in sorted order.

    Args:
        metric: any two-sample metric of this module, such as `auroc`.
        id_scores: shape (N,), higher = more OOD.
        ood_scores: shape (P,).
        ood_classes: shape (P,), the class (or the data set) of each OOD input: integers or strings.
    """
    scores, classes = as_scores(ood_scores, "OOD scores"), to_numpy(ood_classes)
    if classes.shape != scores.shape:
        raise ValueError(f"ood_classes must have shape {scores.shape} as the OOD scores, but came with {classes.shape}")
    negatives = as_scores(id_scores, "ID scores")
    return {name.item(): metric(negatives, scores[classes == name]) for name in np.unique(classes)}


def _share(tpr: float) -> float:
    if not 0 <= tpr <= 1:
        raise ValueError(f"tpr is a share in [0, 1], but is {tpr}")
    return tpr


def _interpolate_last(curve: RocCurve, fpr: float) -> float:
    """TPR on the straight line between the last point left of `fpr` and the first at or right of it."""
    right = int(np.argmax(curve.fpr >= fpr))
    if curve.fpr[right] == fpr:
        right = int(np.flatnonzero(curve.fpr == fpr)[0])
    left = right - 1
    weight = (fpr - curve.fpr[left]) / (curve.fpr[right] - curve.fpr[left])
    return float(curve.tpr[left] + weight * (curve.tpr[right] - curve.tpr[left]))
