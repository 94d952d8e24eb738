"""Laws of selective prediction, held against loops over every order of ties."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ood_toolkit import metrics as m

few_values = st.lists(st.integers(-3, 3), max_size=12)
answers = st.tuples(few_values, few_values).filter(lambda pair: pair[0] or pair[1])


def risks_of(errors):
    return np.cumsum(errors) / np.arange(1, len(errors) + 1)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
@settings(max_examples=60)
def test_expected_conventions_are_means_over_all_tie_orders(rows):
    orders = [order for order in permutations(rows) if all(a[0] <= b[0] for a, b in pairwise(order))]
    right, wrong = [s for s, error in rows if not error], [s for s, error in rows if error]
    curves = [risks_of([error for _, error in order]) for order in orders]
    mean = np.mean([curve.mean() for curve in curves])
    assert m.aurc(right, wrong, convention="expected") == pytest.approx(mean, abs=1e-12)
    assert m.aurra(right, wrong) == pytest.approx(1 - mean, abs=1e-12)
    shares = np.arange(1, len(rows) + 1) / len(rows)
    generalized = np.mean([(curve * shares).mean() for curve in curves])
    assert m.augrc(right, wrong, convention="expected") == pytest.approx(generalized, abs=1e-12)
    if len(rows) > 1:
        scaled = np.mean([np.trapezoid(curve, shares) for curve in curves]) / (1 - 1 / len(rows))
        assert m.aurc(right, wrong, convention="torch-uncertainty") == pytest.approx(scaled, abs=1e-12)


@given(answers)
def test_aurc_is_the_trapezoid_over_distinct_thresholds_flat_to_coverage_zero(pair):
    right, wrong = (np.array(part) for part in pair)
    thresholds = sorted({*right.tolist(), *wrong.tolist()})
    accepted = np.array([(right <= t).sum() + (wrong <= t).sum() for t in thresholds])
    errors = np.array([(wrong <= t).sum() for t in thresholds])
    total, risk = len(right) + len(wrong), errors / accepted
    area = np.trapezoid(np.r_[risk[0], risk], np.r_[0, accepted / total])
    assert m.aurc(right, wrong) == pytest.approx(area, abs=1e-12)
    generalized = np.trapezoid(np.r_[0, errors / total], np.r_[0, accepted / total])
    assert m.augrc(right, wrong) == pytest.approx(generalized, abs=1e-12)
    curve = m.risk_coverage_curve(right, wrong)
    np.testing.assert_allclose(curve.risk, risk)
    np.testing.assert_allclose(curve.generalized_risk, errors / total)
    np.testing.assert_array_equal(curve.thresholds, thresholds)


@given(answers)
def test_excess_is_zero_for_a_perfect_ranking_and_never_below(pair):
    right, wrong = pair
    assert m.e_aurc(right, wrong, convention="expected") >= -1e-12
    assert m.e_augrc(right, wrong) >= -1e-12
    perfect = np.zeros(len(right)) - np.arange(len(right)), np.ones(len(wrong)) + np.arange(len(wrong))
    assert m.e_aurc(*perfect, convention="expected") == pytest.approx(0, abs=1e-12)
    assert m.e_augrc(*perfect) == pytest.approx(0, abs=1e-12)


@given(answers.filter(lambda pair: pair[0] and pair[1]))
def test_augrc_is_a_function_of_error_rate_and_auroc(pair):
    error = len(pair[1]) / (len(pair[0]) + len(pair[1]))
    expected = error * (1 - error) * (1 - m.auroc(*pair)) + error**2 / 2
    assert m.augrc(*pair) == pytest.approx(expected, abs=1e-12)
    assert m.e_augrc(*pair) == pytest.approx(error * (1 - error) * (1 - m.auroc(*pair)), abs=1e-12)


@given(answers, st.floats(0, 1), st.floats(0.01, 1))
def test_working_points_are_the_best_thresholds_can_do(pair, risk, coverage):
    right, wrong = (np.array(part) for part in pair)
    points = []
    for threshold in sorted({*right.tolist(), *wrong.tolist()}):
        taken, errors = (right <= threshold).sum() + (wrong <= threshold).sum(), (wrong <= threshold).sum()
        points.append((taken / (len(right) + len(wrong)), errors / taken))
    allowed = [share for share, its_risk in points if its_risk <= risk + 1e-12]
    assert m.coverage_at_risk(right, wrong, risk) == pytest.approx(max(allowed, default=0.0), abs=1e-12)
    first = next(its_risk for share, its_risk in points if share >= coverage - 1e-12)
    assert m.risk_at_coverage(right, wrong, coverage) == pytest.approx(first, abs=1e-12)


@pytest.mark.parametrize("convention", ["fd-shifts", "expected", "torch-uncertainty"])
def test_one_kind_of_answer_has_a_value(convention):
    scores = [0.1, 0.2, 0.2]
    assert m.aurc(scores, [], convention=convention) == 0
    assert m.aurc([], scores, convention=convention) == pytest.approx(1)
    assert m.aurc([0.3], [], convention=convention) == 0
    assert m.aurc([], [0.3], convention=convention) == 1
    assert m.e_aurc(scores, [], convention=convention) == pytest.approx(0, abs=1e-15)
    assert m.e_aurc([], scores, convention=convention) == pytest.approx(0, abs=1e-15)


def test_no_answers_at_all_are_undefined():
    for metric in (m.aurc, m.e_aurc, m.augrc, m.e_augrc, m.aurra, m.risk_coverage_curve, m.coverage_at_risk):
        with pytest.raises(m.UndefinedMetricError, match="both samples are empty"):
            metric([], [])


def test_an_unknown_convention_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="fd-shifts, expected, torch-uncertainty"):
        m.aurc([0.0], [1.0], convention="geifman")  # pyright: ignore[reportArgumentType]


def test_soft_f1_of_certain_and_right_answers_is_zero():
    assert m.soft_f1([1.0, 1.0], [True, True]) == 0


def test_the_joint_view_fails_wrong_and_outlying_answers_alike():
    id_scores, correct, ood_scores = [0.1, 0.2, 0.6], [True, False, True], [0.3, 0.9]
    successes, failures = m.joint(id_scores, ood_scores, correct=correct)
    assert successes.tolist() == [0.1, 0.6]
    assert failures.tolist() == [0.2, 0.3, 0.9]
    assert m.joint_aurc(id_scores, ood_scores, correct=correct) == m.aurc([0.1, 0.6], [0.2, 0.3, 0.9])
    assert m.joint_augrc(id_scores, ood_scores, correct=correct) == m.augrc([0.1, 0.6], [0.2, 0.3, 0.9])


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_double_score_aurc_is_the_best_of_all_threshold_pairs(seed):
    rng = np.random.default_rng(seed)
    known, unknown = int(rng.integers(1, 12)), int(rng.integers(1, 12))
    outlier, error = rng.integers(0, 4, (2, known + unknown)).astype(float)
    right = np.r_[rng.random(known) < 0.7, np.zeros(unknown, dtype=bool)]
    best = np.ones(known + 1)
    for s in set(outlier):
        for t in set(error):
            taken = (outlier <= s) & (error <= t)
            if taken[:known].any():
                count = taken[:known].sum()
                best[count] = min(best[count], 1 - right[taken].mean())
    lower = [best[count:].min() for count in range(1, known + 1)]
    scores = (outlier[:known], error[:known]), (outlier[known:], error[known:])
    assert m.ds_aurc(*scores, correct=right[:known]) == pytest.approx(np.mean(lower), abs=1e-12)


def test_two_scores_do_no_worse_than_one():
    rng = np.random.default_rng(1)
    correct = rng.random(400) < 0.8
    error = np.r_[rng.normal(~correct, 1.0), rng.normal(0.5, 1.0, 100)]
    outlier = np.r_[rng.normal(0, 1, 400), rng.normal(2, 1, 100)]
    both = m.ds_aurc((outlier[:400], error[:400]), (outlier[400:], error[400:]), correct=correct)
    only_error = m.ds_aurc((error[:400], error[:400]), (error[400:], error[400:]), correct=correct)
    only_outlier = m.ds_aurc((outlier[:400], outlier[:400]), (outlier[400:], outlier[400:]), correct=correct)
    assert both < min(only_error, only_outlier)
