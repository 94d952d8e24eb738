"""Tests of difference against their definitions, scipy, published tables and simulation under no difference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from ood_toolkit import metrics as m


def two_detectors(rng, rows=120, outliers=80, gain=0.0):
    known, unknown = rng.normal(0, 1, rows), rng.normal(1, 1, outliers)

    def detector(shift):
        return known + rng.normal(0, 0.7, rows), unknown + rng.normal(shift, 0.7, outliers)

    return detector(gain), detector(0.0)


def test_delong_is_the_variance_of_the_placement_values_spelled_out():
    rng = np.random.default_rng(0)
    first, second = two_detectors(rng, 30, 20, gain=0.5)
    first, second = ((np.round(low, 1), np.round(high, 1)) for low, high in (first, second))
    kernels = [
        np.array([[(p > n) + 0.5 * (p == n) for n in negatives] for p in positives])
        for negatives, positives in (first, second)
    ]
    gap = kernels[0] - kernels[1]
    variance = np.var(gap.mean(axis=1), ddof=1) / 20 + np.var(gap.mean(axis=0), ddof=1) / 30
    found = m.delong_test(first, second)
    assert found.standard_error == pytest.approx(np.sqrt(variance), abs=1e-12)
    assert (found.first, found.second) == pytest.approx((m.auroc(*first), m.auroc(*second)), abs=1e-12)
    assert found.z == pytest.approx(gap.mean() / np.sqrt(variance), abs=1e-9)


def test_delong_rejects_equal_detectors_as_often_as_it_says():
    rng = np.random.default_rng(1)
    p_values = np.array([m.delong_test(*two_detectors(rng)).p_value for _ in range(1000)])
    assert 0.035 < (p_values < 0.05).mean() < 0.068
    assert 0.45 < p_values.mean() < 0.55


def test_a_detector_does_not_differ_from_itself():
    pair, _ = two_detectors(np.random.default_rng(2))
    assert m.delong_test(pair, pair).p_value == 1
    assert m.paired_bootstrap("aupr", pair, pair, resamples=50) == (0, 0, 0, 1)


def test_the_paired_bootstrap_agrees_with_delong_on_auroc():
    first, second = two_detectors(np.random.default_rng(3), 400, 300, gain=0.1)
    delong, paired = m.delong_test(first, second), m.paired_bootstrap(m.auroc, first, second, resamples=2000)
    assert paired.value == pytest.approx(delong.first - delong.second, abs=1e-12)
    assert paired.high - paired.low == pytest.approx(2 * 1.96 * delong.standard_error, rel=0.07)
    assert paired.p_value == pytest.approx(delong.p_value, abs=0.03)


def test_pairing_narrows_the_interval_of_a_difference():
    first, second = two_detectors(np.random.default_rng(4), 400, 300)
    paired = m.paired_bootstrap("auroc", first, second)
    alone = [m.interval("auroc", *pair) for pair in (first, second)]
    independent = np.hypot(alone[0].high - alone[0].low, alone[1].high - alone[1].low)
    assert paired.high - paired.low < 0.85 * independent


def test_a_paired_resample_takes_the_same_rows_for_both_detectors():
    first, _ = two_detectors(np.random.default_rng(5), 5000, 900)
    bent = np.exp(first[0]), np.exp(first[1])  # a monotone map: equal on every resample
    for metric in ("auroc", "fpr_at_tpr", "aurc"):
        found = m.paired_bootstrap(metric, first, bent, resamples=100)
        assert found.low == pytest.approx(0, abs=1e-12)
        assert found.high == pytest.approx(0, abs=1e-12)


def test_detectors_of_different_inputs_are_not_paired():
    for test in (m.delong_test, lambda *pairs: m.paired_bootstrap("auroc", *pairs)):
        with pytest.raises(ValueError, match="same inputs"):
            test(([0.0, 0.1], [1.0, 1.1]), ([0.0, 0.1, 0.2], [1.0, 1.1]))
    with pytest.raises(m.UndefinedMetricError, match="two ID and two OOD"):
        m.delong_test(([0.0], [1.0, 2.0]), ([0.0], [1.0, 2.0]))


def test_friedman_is_the_textbook_sum_of_squared_ranks():
    values = np.random.default_rng(6).normal(size=(9, 4)) + np.array([0, 0.5, 1, 1.5])
    found = m.friedman_test(values)
    ranks = (-values).argsort(axis=1).argsort(axis=1) + 1
    statistic = 12 * 9 / (4 * 5) * ((ranks.mean(axis=0) - 2.5) ** 2).sum()
    assert found.statistic == pytest.approx(statistic)
    assert found.p_value == pytest.approx(chi2.sf(statistic, 3))
    np.testing.assert_allclose(found.mean_ranks, ranks.mean(axis=0))
    assert m.friedman_test(-values, higher_is_better=False).statistic == pytest.approx(statistic)


def test_nemenyi_gives_the_critical_differences_that_demsar_prints():
    # Demsar 2006, table 5(a): q at 0.05 is 2.343 for 3 and 2.850 for 6 classifiers
    for detectors, q in ((3, 2.343), (4, 2.569), (6, 2.850), (10, 3.164)):
        values = np.random.default_rng(7).normal(size=(14, detectors))
        found = m.nemenyi_test(values)
        unit = np.sqrt(detectors * (detectors + 1) / (6 * 14))
        assert found.critical_difference == pytest.approx(q * unit, abs=1e-3)
        gaps = np.abs(found.mean_ranks[:, None] - found.mean_ranks)
        np.testing.assert_array_equal(found.p_values < 0.05, gaps > found.critical_difference)


def test_detectors_that_tie_everywhere_do_not_differ():
    assert m.friedman_test(np.ones((5, 3))).p_value == 1
    assert (m.nemenyi_test(np.ones((5, 3))).p_values == 1).all()


def test_rank_tests_refuse_tables_they_cannot_rank():
    for test in (m.friedman_test, m.nemenyi_test):
        with pytest.raises(ValueError, match="data sets"):
            test(np.ones((5, 2)))
        with pytest.raises(ValueError, match="NaN"):
            test(np.full((5, 3), np.nan))


@given(st.lists(st.floats(0, 1), max_size=12))
def test_corrections_are_their_definitions(p_values):
    ordered = sorted(range(len(p_values)), key=lambda i: p_values[i])
    count = len(p_values)
    holm, step_up = np.zeros(count), np.zeros(count)
    for place, index in enumerate(ordered):
        holm[index] = min(1, max((count - k) * p_values[ordered[k]] for k in range(place + 1)))
        step_up[index] = min(1, min(count / (k + 1) * p_values[ordered[k]] for k in range(place, count)))
    np.testing.assert_allclose(m.holm(p_values), holm, atol=1e-12)
    np.testing.assert_allclose(m.benjamini_hochberg(p_values), step_up, atol=1e-12)
    assert (m.benjamini_hochberg(p_values) <= m.holm(p_values) + 1e-12).all()


def test_what_is_no_probability_is_not_corrected():
    for correct in (m.holm, m.benjamini_hochberg):
        with pytest.raises(ValueError, match=r"p-values must be in \[0, 1\]"):
            correct([0.5, 1.5])
