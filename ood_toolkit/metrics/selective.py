"""Metrics of selective prediction: how few errors remain when the least certain answers are withheld.

Every function takes `(correct_scores, wrong_scores)`, where a **higher score means more likely wrong**; answers are
accepted from the lowest score up. Risk is the share of wrong answers among the accepted ones, coverage the share of
answers accepted. Answers of equal score are accepted together, so no number depends on the order of the rows.

For the joint view of errors and OOD inputs, where any answer to an OOD input is a failure, pass the scores through
`joint` first: `aurc(*joint(id_scores, ood_scores, correct=correct))`.
"""

from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from ood_toolkit.metrics.arrays import Floats, as_correct, as_scores, as_top_label, to_numpy
from ood_toolkit.metrics.counts import Steps, SumKernel, before, rank, ratio

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
    below = ranking.steps.reversed
    size, errors = below.total[-1], below.negatives
    return RiskCoverageCurve(below.total / size, errors / below.total, errors / size, ranking.thresholds[::-1])


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
    _known(convention)
    below = rank(correct_scores, wrong_scores).steps.reversed
    if convention == "fd-shifts":
        return float(trapezoid_risk_coverage(below))
    mean = float(expected_risk_coverage(below))
    if convention == "expected":
        return mean
    first, size = (
        below.negatives[0] / (below.negatives[0] + below.positives[0]),
        below.negatives[-1] + below.positives[-1],
    )
    return _inner_trapezoid(mean, float(first), float(_error_rate(below)), float(size))


def e_aurc(correct_scores: ArrayLike, wrong_scores: ArrayLike, *, convention: Convention = "fd-shifts") -> float:
    """AURC in excess of the best possible ranking of the same answers (Geifman et al., ICLR 2019).

    The best AURC is `err + (1 − err) log(1 − err)` under `fd-shifts`: the limit of many answers, so the excess can
    fall slightly below 0 for few answers or with ties. Under the other conventions it is the AURC of these very
    answers in a perfect order, and the excess is never negative.
    """
    if convention == "fd-shifts":
        return float(excess_risk_coverage(rank(correct_scores, wrong_scores).steps.reversed))
    right, wrong = np.zeros(len(to_numpy(correct_scores))), np.ones(len(to_numpy(wrong_scores)))
    achieved = aurc(correct_scores, wrong_scores, convention=convention)
    return achieved - aurc(right, wrong, convention=convention)


def augrc(correct_scores: ArrayLike, wrong_scores: ArrayLike, *, convention: Convention = "fd-shifts") -> float:
    """Area under the generalised risk: the mean share of undetected failures over all coverages, in [0, 0.5].

    Traub et al., NeurIPS 2024, arXiv:2407.01032. Equal to `err (1 − err) (1 − AUROC) + err² / 2` (`fd-shifts`,
    trapezoid from (0, 0)). `expected` is the mean over k = 1..n, `torch-uncertainty` the trapezoid over 1/n..1
    divided by `1 − 1/n`.
    """
    _known(convention)
    below = rank(correct_scores, wrong_scores).steps.reversed
    area = float(generalized_risk_coverage(below))
    if convention == "fd-shifts":
        return area
    size, errors = float(below.total[-1]), float(below.negatives[-1])
    mean = area + errors / (2 * size**2)  # the mean over k = 1..n is the trapezoid from 0 plus half the last value
    if convention == "expected":
        return mean
    first = below.negatives[0] / below.total[0] / size
    return _inner_trapezoid(mean, float(first), errors / size, size)


def e_augrc(correct_scores: ArrayLike, wrong_scores: ArrayLike) -> float:
    """AUGRC in excess of the best possible ranking: `augrc − err² / 2`, that is `err (1 − err) (1 − AUROC)`."""
    return float(excess_generalized_risk(rank(correct_scores, wrong_scores).steps.reversed))


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


def _trapezoid_terms(below: Steps) -> Floats:
    """Of counts from the lowest score up: the area of each step between coverages, times n."""
    risk = ratio(below.negatives, below.total)
    previous = before(risk)
    previous += risk * (below.total == below.gained_negatives + below.gained_positives)  # flat to coverage 0
    return (below.gained_negatives + below.gained_positives) * (risk + previous) / 2


def _expected_terms(below: Steps) -> Floats:
    """`Σ_k E[risk of the first k]` over the ks of each tie, expectation over tie orders.

    Within a tie the expected count of errors is a straight line `e0 + slope (k − k0)`, so the sum over the tie of
    `errors / k` is `slope · size + (e0 − slope · k0) (H_k1 − H_k0)` with harmonic numbers H.
    """
    harmonic = np.append(0.0, np.cumsum(1.0 / np.arange(1, int(below.total[..., -1].max()) + 1)))
    size = below.gained_negatives + below.gained_positives
    start, slope = below.total - size, ratio(below.gained_negatives, size)
    step = harmonic[below.total.astype(np.int64)] - harmonic[start.astype(np.int64)]
    return slope * size + (below.negatives - below.gained_negatives - slope * start) * step


def _per_answer(total: Floats, below: Steps) -> Floats:
    return total / below.total[..., -1]


def _less_asymptotic_best(total: Floats, below: Steps) -> Floats:
    error = _error_rate(below)
    kept = np.maximum(1 - error, np.finfo(np.float64).tiny)  # t log t is 0 at t = 0
    return _per_answer(total, below) - (error + kept * np.log(kept))


def _generalized(total: Floats, below: Steps) -> Floats:
    """AUGRC from the sum of discordant pairs: `err (1 − err) (1 − AUROC) + err² / 2`."""
    return total / (2 * below.total[..., -1] ** 2) + _error_rate(below) ** 2 / 2


def _discordant_terms(below: Steps) -> Floats:
    """Twice the pairs (right, wrong) in the wrong order, ties half: as the ROC area, wrong answers accepted first."""
    return below.gained_positives * (2 * below.negatives - below.gained_negatives)


def _error_rate(below: Steps) -> Floats:
    return below.negatives[..., -1] / below.total[..., -1]


trapezoid_risk_coverage = SumKernel(_trapezoid_terms, _per_answer)
"""The kernel of `aurc(convention="fd-shifts")`. Like all kernels of this file it takes `steps.reversed`."""

expected_risk_coverage = SumKernel(_expected_terms, _per_answer)
"""The kernel of `aurc(convention="expected")`."""

excess_risk_coverage = SumKernel(_trapezoid_terms, _less_asymptotic_best)
"""The kernel of `e_aurc(convention="fd-shifts")`."""

response_rate_accuracy = SumKernel(_expected_terms, lambda total, below: 1 - _per_answer(total, below))
"""The kernel of `aurra`."""

generalized_risk_coverage = SumKernel(_discordant_terms, _generalized)
"""The kernel of `augrc(convention="fd-shifts")`."""

excess_generalized_risk = SumKernel(
    _discordant_terms, lambda total, below: _generalized(total, below) - _error_rate(below) ** 2 / 2
)
"""The kernel of `e_augrc`."""


def _known(convention: str) -> None:
    if convention not in get_args(Convention):
        raise ValueError(f"no convention is named {convention!r}; known: {', '.join(get_args(Convention))}")


def _inner_trapezoid(mean: float, first: float, last: float, size: float) -> float:
    """Trapezoid over k = 1..n, divided by n − 1, of n values with this mean: torch-uncertainty's scaling."""
    return (mean * size - (first + last) / 2) / (size - 1) if size > 1 else last
