"""Metrics of selective prediction: how few errors remain when the least certain answers are withheld.

Every function takes `(correct_scores, wrong_scores)`, where a **higher score means more likely wrong**; answers are
accepted from the lowest score up. Risk is the share of wrong answers among the accepted ones, coverage the share of
answers accepted. Answers of equal score are accepted together, so no number depends on the order of the rows.

For the joint view of errors and OOD inputs, where any answer to an OOD input is a failure, pass the scores through
`joint` first: `aurc(*joint(id_scores, ood_scores, correct=correct))`.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ood_toolkit.metrics.arrays import Floats, as_correct, as_scores, as_top_label
from ood_toolkit.metrics.counts import Steps, before, rank, ratio

Convention = Literal["fd-shifts", "expected", "torch-uncertainty"]


class RiskCoverageCurve(NamedTuple):
    """One point per distinct score, coverage rising to 1: accept an answer when its score is at most the threshold.

    `risk` is the share of wrong answers among the accepted, `generalized_risk` their share among all answers.
    """

    coverage: Floats
    risk: Floats
    generalized_risk: Floats
    thresholds: Floats


def risk_coverage_curve(correct_scores: ArrayLike, wrong_scores: ArrayLike) -> RiskCoverageCurve:
    """Risk at every coverage that a threshold can reach.

    Raises:
        UndefinedMetricError: where both samples are empty.
    """
    ranking = rank(correct_scores, wrong_scores)
    accepted, errors = accepted_and_errors(ranking.steps)
    total = accepted[-1]
    return RiskCoverageCurve(accepted / total, errors / accepted, errors / total, ranking.thresholds[::-1])


def aurc(correct_scores: ArrayLike, wrong_scores: ArrayLike, *, convention: Convention = "fd-shifts") -> float:
    """Area under the risk-coverage curve; low is good, 0 without errors, 1 where every answer is wrong.

    Args:
        correct_scores: shape (N,), higher = more likely wrong.
        wrong_scores: shape (P,).
        convention: `fd-shifts`, the default because published AURCs since Jaeger et al. (ICLR 2023) use it: trapezoid
            over the points of `risk_coverage_curve`, flat from the first point down to coverage 0 (their tables show
            1000 times this number). `expected`: mean of the risks of the k most certain answers, k = 1..n, in
            expectation over the orders of ties; exactly `1 − aurra`. `torch-uncertainty`: trapezoid over coverages
            1/n..1 divided by `1 − 1/n`, ties here in expectation and there in whatever order the sort leaves them.
    """
    return float(area_under_risk_coverage(rank(correct_scores, wrong_scores).steps, convention))


def e_aurc(correct_scores: ArrayLike, wrong_scores: ArrayLike, *, convention: Convention = "fd-shifts") -> float:
    """AURC in excess of the best possible ranking of the same answers (Geifman et al., ICLR 2019).

    The best AURC is `err + (1 − err) log(1 − err)` under `fd-shifts`: the limit of many answers, so the excess can
    fall slightly below 0 for few answers or with ties. Under the other conventions it is the AURC of these very
    answers in a perfect order, and the excess is never negative.
    """
    return float(excess_area_under_risk_coverage(rank(correct_scores, wrong_scores).steps, convention))


def augrc(correct_scores: ArrayLike, wrong_scores: ArrayLike, *, convention: Convention = "fd-shifts") -> float:
    """Area under the generalised risk: the mean share of undetected failures over all coverages, in [0, 0.5].

    Traub et al., NeurIPS 2024, arXiv:2407.01032. Equal to `err (1 − err) (1 − AUROC) + err² / 2` (`fd-shifts`,
    trapezoid from (0, 0)). `expected` is the mean over k = 1..n, `torch-uncertainty` the trapezoid over 1/n..1
    divided by `1 − 1/n`.
    """
    return float(area_under_generalized_risk(rank(correct_scores, wrong_scores).steps, convention))


def e_augrc(correct_scores: ArrayLike, wrong_scores: ArrayLike) -> float:
    """AUGRC in excess of the best possible ranking: `augrc − err² / 2`, that is `err (1 − err) (1 − AUROC)`."""
    return float(excess_area_under_generalized_risk(rank(correct_scores, wrong_scores).steps))


def aurra(correct_scores: ArrayLike, wrong_scores: ArrayLike) -> float:
    """Area under the response-rate-accuracy curve: mean accuracy of the k most certain answers, k = 1..n.

    High is good. The metric of the ImageNet-A authors (Hendrycks et al., CVPR 2021), whose code leaves ties in
    arbitrary order; here it is the expected value over all orders of ties.
    """
    return 1.0 - aurc(correct_scores, wrong_scores, convention="expected")


def soft_f1(confidence: ArrayLike, correct: ArrayLike) -> float:
    """`2 Σ (1 − conf) wrong / Σ (1 − conf + wrong)`: a soft F1 of finding the errors. High is good.

    Takes confidences in [0, 1] and correctness, not two samples (Hendrycks et al., natural adversarial examples).
    0 where every answer is right and of confidence 1, by convention.
    """
    certain, right = as_top_label(confidence, correct)
    doubt, wrong = 1.0 - certain, ~right
    total = float((doubt + wrong).sum())
    return float(2 * doubt[wrong].sum() / total) if total else 0.0


def coverage_at_risk(correct_scores: ArrayLike, wrong_scores: ArrayLike, risk: float = 0.05) -> float:
    """Largest coverage of any threshold at which the risk is at most `risk`; 0 where there is none.

    As fd-shifts. torch-uncertainty may cut through a tie, which no threshold can do, and reports more.
    """
    if not 0 <= risk <= 1:
        raise ValueError(f"risk is a share in [0, 1], but is {risk}")
    curve = risk_coverage_curve(correct_scores, wrong_scores)
    allowed = curve.coverage[curve.risk <= risk + 1e-12]
    return float(allowed.max(initial=0.0))


def risk_at_coverage(correct_scores: ArrayLike, wrong_scores: ArrayLike, coverage: float = 0.8) -> float:
    """Risk at the smallest coverage of any threshold that is at least `coverage`, ties accepted together."""
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage is a share in (0, 1], but is {coverage}")
    curve = risk_coverage_curve(correct_scores, wrong_scores)
    return float(curve.risk[np.argmax(curve.coverage >= coverage - 1e-12)])


def joint(id_scores: ArrayLike, ood_scores: ArrayLike, *, correct: ArrayLike) -> tuple[Floats, Floats]:
    """Successes and failures over ID ∪ OOD: (scores of right ID answers, scores of wrong ID and all OOD answers).

    Feed the pair to any metric of two samples. With `aurc` and `augrc` it is the failure detection under shift of
    Jaeger et al., ICLR 2023; the ratio of ID to OOD inputs moves the numbers and belongs in the caption.

    Args:
        id_scores: shape (N,), higher = less to be trusted.
        ood_scores: shape (P,), on the same scale.
        correct: shape (N,), whether each ID input is classified rightly.
    """
    familiar = as_scores(id_scores, "ID scores")
    right = as_correct(correct, familiar.size)
    return familiar[right], np.concatenate([familiar[~right], as_scores(ood_scores, "OOD scores")])


def joint_aurc(
    id_scores: ArrayLike, ood_scores: ArrayLike, *, correct: ArrayLike, convention: Convention = "fd-shifts"
) -> float:
    """`aurc` over ID ∪ OOD, every wrong or OOD answer a failure; see `joint`."""
    return aurc(*joint(id_scores, ood_scores, correct=correct), convention=convention)


def joint_augrc(id_scores: ArrayLike, ood_scores: ArrayLike, *, correct: ArrayLike) -> float:
    """`augrc` over ID ∪ OOD, every wrong or OOD answer a failure; see `joint`."""
    return augrc(*joint(id_scores, ood_scores, correct=correct))


def ds_aurc(
    id_scores: tuple[ArrayLike, ArrayLike],
    ood_scores: tuple[ArrayLike, ArrayLike],
    *,
    correct: ArrayLike,
    thresholds: int = 200,
) -> float:
    """Double-score AURC: an answer is accepted where an OOD score *and* an error score are both low enough.

    `∫_0^1 min { risk(s, t) : coverage(s, t) ≥ c } dc`, with coverage the accepted share of ID inputs and risk the share
    of wrong or OOD answers among all accepted. Never above the single-score value of either score on the same grid.
    After Li et al. 2026, arXiv:2603.03903. Differs from the authors' code, which puts both scores on a uniform grid
    after min-max scaling and takes the smallest risk within each coverage bin: here the OOD threshold runs over
    quantiles, so no monotone transform matters, the error threshold over every distinct score, and a smaller coverage
    may always borrow the risk of a larger one.

    Args:
        id_scores: (OOD score, error score) of the ID inputs, each of shape (N,), higher = less to be trusted.
        ood_scores: (OOD score, error score) of the OOD inputs, each of shape (P,).
        correct: shape (N,), whether each ID input is classified rightly.
        thresholds: how many quantiles of the OOD score to try; the result can only fall as it grows to a multiple.
    """
    outlier = np.concatenate([as_scores(id_scores[0], "ID scores"), as_scores(ood_scores[0], "OOD scores")])
    error = np.concatenate([as_scores(id_scores[1], "ID scores"), as_scores(ood_scores[1], "OOD scores")])
    if outlier.shape != error.shape:
        raise ValueError(f"both scores must cover the same inputs, but there are {outlier.size} and {error.size}")
    familiar = len(np.asarray(id_scores[0]))
    right = np.zeros(outlier.size, dtype=bool)
    right[:familiar] = as_correct(correct, familiar)
    known = np.arange(outlier.size) < familiar
    order = np.argsort(error, kind="stable")
    last_of_tie = np.append(np.diff(error[order]) != 0, True)
    best = np.ones(familiar + 1)  # best[m]: the smallest risk of any rule that accepts exactly m ID inputs
    for threshold in np.unique(np.quantile(outlier, np.linspace(0, 1, thresholds + 1), method="higher")):
        inside = (outlier <= threshold)[order]
        accepted = np.cumsum(inside)[last_of_tie]
        risk = 1.0 - ratio(np.cumsum(inside & right[order])[last_of_tie], accepted)
        np.minimum.at(best, np.cumsum(inside & known[order])[last_of_tie], risk)
    return float(np.minimum.accumulate(best[:0:-1]).mean())


def accepted_and_errors(steps: Steps) -> tuple[Floats, Floats]:
    """How many answers are accepted, and how many of them are wrong, at each step from the lowest score up."""
    wrong, right = steps.reversed()
    return wrong + right, wrong


def area_under_risk_coverage(steps: Steps, convention: Convention = "fd-shifts") -> Floats:
    """The kernel of `aurc`: counts of shape (..., K) to areas of shape (...)."""
    accepted, errors = accepted_and_errors(steps)
    total = accepted[..., -1]
    if convention == "fd-shifts":
        risk = ratio(errors, accepted)
        previous = np.where(before(accepted) > 0, before(risk), risk)
        return ((accepted - before(accepted)) * (risk + previous)).sum(-1) / (2 * total)
    summed = _summed_risk(accepted, errors)
    return summed / total if convention == "expected" else _inner_trapezoid(summed, accepted, errors, convention)


def excess_area_under_risk_coverage(steps: Steps, convention: Convention = "fd-shifts") -> Floats:
    """The kernel of `e_aurc`."""
    right, wrong = steps.negatives[..., -1:], steps.positives[..., -1:]
    if convention == "fd-shifts":
        error = (wrong / (wrong + right))[..., 0]
        best = error + np.where(error < 1, (1 - error) * np.log1p(-np.minimum(error, 1 - 1e-16)), 0.0)
    else:
        none = np.zeros_like(wrong)
        best = area_under_risk_coverage(
            Steps(np.concatenate([none, right], -1), np.concatenate([wrong, wrong], -1)), convention
        )
    return area_under_risk_coverage(steps, convention) - best


def area_under_generalized_risk(steps: Steps, convention: Convention = "fd-shifts") -> Floats:
    """The kernel of `augrc`."""
    accepted, errors = accepted_and_errors(steps)
    total = accepted[..., -1]
    area = ((accepted - before(accepted)) * (errors + before(errors))).sum(-1) / (2 * total**2)
    if convention == "fd-shifts":
        return area
    summed = area * total + errors[..., -1] / (2 * total)  # Σ_k E_k / n from the trapezoid from 0, exact with ties too
    if convention == "expected":
        return summed / total
    return _inner_trapezoid(summed, accepted, errors, convention, generalized=True)


def excess_area_under_generalized_risk(steps: Steps) -> Floats:
    """The kernel of `e_augrc`."""
    right, wrong = steps.negatives[..., -1], steps.positives[..., -1]
    return area_under_generalized_risk(steps) - (wrong / (wrong + right)) ** 2 / 2


def _summed_risk(accepted: Floats, errors: Floats) -> Floats:
    """`Σ_{k=1..n} E[risk of the first k]`, expectation over tie orders.

    Within a tie the expected count of errors is a straight line `e0 + slope (k − k0)`, so the sum over the tie of
    `errors / k` is `slope · size + (e0 − slope · k0) (H_k1 − H_k0)` with harmonic numbers H.
    """
    harmonic = np.append(0.0, np.cumsum(1.0 / np.arange(1, int(accepted[..., -1].max()) + 1)))
    start, first = before(accepted), before(errors)
    slope = ratio(errors - first, accepted - start)
    step = harmonic[accepted.astype(np.int64)] - harmonic[start.astype(np.int64)]
    return (slope * (accepted - start) + (first - slope * start) * step).sum(-1)


def _inner_trapezoid(
    summed: Floats, accepted: Floats, errors: Floats, convention: str, *, generalized: bool = False
) -> Floats:
    """Trapezoid over k = 1..n of the summed values, divided by n − 1: torch-uncertainty's scaling."""
    if convention != "torch-uncertainty":
        raise ValueError(f"no convention is named {convention!r}; known: fd-shifts, expected, torch-uncertainty")
    total = accepted[..., -1]
    at = np.argmax(accepted > 0, axis=-1)[..., None]
    first = (np.take_along_axis(errors, at, -1) / np.take_along_axis(accepted, at, -1))[..., 0]
    first = first / total if generalized else first
    last = errors[..., -1] / total
    return np.where(total > 1, (summed - (first + last) / 2) / np.maximum(total - 1, 1), last)
