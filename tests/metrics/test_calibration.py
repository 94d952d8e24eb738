"""Laws of the calibration metrics, and the same numbers from netcal, torchmetrics, scikit-learn and plain loops."""

import warnings
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_cases import case_a
from sklearn.metrics import brier_score_loss, log_loss, top_k_accuracy_score

from ood_toolkit import metrics as m

rows = st.lists(st.tuples(st.integers(0, 20).map(lambda n: n / 20), st.booleans()), min_size=1, max_size=60)
TOP_LABEL = [
    m.ece,
    m.mce,
    m.ace,
    m.rms_calibration_error,
    m.debiased_ece,
    m.debiased_rms,
    m.debiased_mean_square,
    m.ks_error,
    m.smooth_ece,
    m.overconfidence,
    m.underconfidence,
    m.soft_f1,
    m.brier_top_label,
]


def unzip(pairs):
    return np.array([c for c, _ in pairs]), np.array([right for _, right in pairs])


@given(rows, st.integers(1, 20))
def test_ece_is_the_weighted_gap_of_bins_closed_on_the_right(pairs, bins):
    confidence, correct = unzip(pairs)
    edges = np.linspace(0, 1, bins + 1)
    gaps, weights = [], []
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high) | ((confidence == 0) & (low == 0))
        if inside.any():
            gaps.append(abs(confidence[inside].mean() - correct[inside].mean()))
            weights.append(inside.mean())
    assert m.ece(confidence, correct, bins=bins) == pytest.approx(np.dot(weights, gaps), abs=1e-12)
    assert m.mce(confidence, correct, bins=bins) == pytest.approx(max(gaps), abs=1e-12)
    assert m.ace(confidence, correct, bins=bins, meaning="average") == pytest.approx(np.mean(gaps), abs=1e-12)
    rms = np.sqrt(np.dot(weights, np.square(gaps)))
    assert m.ece(confidence, correct, bins=bins, norm="l2") == pytest.approx(rms, abs=1e-12)
    both = m.overconfidence(confidence, correct, bins=bins) + m.underconfidence(confidence, correct, bins=bins)
    assert both == pytest.approx(np.dot(weights, gaps), abs=1e-12)


@given(rows, st.integers(1, 12))
def test_equal_mass_bins_hold_whole_ties_and_every_row_once(pairs, bins):
    confidence, correct = unzip(pairs)
    found = m.binned(confidence, correct, bins=bins, scheme="equal-mass")
    assert found.counts.sum() == len(pairs)
    assert len(found.counts) <= bins
    start = 0
    ordered = np.sort(confidence)
    for count in np.cumsum(found.counts)[:-1]:
        assert ordered[count - 1] < ordered[count]
        start = count
    assert start < len(pairs)


def test_equal_mass_bins_without_ties_differ_by_one_row_at_most():
    found = m.binned(np.linspace(0.2, 0.9, 103), np.ones(103), bins=15, scheme="equal-mass")
    assert sorted(set(found.counts.tolist())) == [6, 7]


@pytest.mark.parametrize("metric", TOP_LABEL)
@given(pairs=rows, seed=st.integers(0, 99))
@settings(max_examples=25)
def test_the_order_of_the_rows_changes_no_calibration_metric(metric, pairs, seed):
    confidence, correct = unzip(pairs)
    order = np.random.default_rng(seed).permutation(len(pairs))
    assert metric(confidence[order], correct[order]) == pytest.approx(metric(confidence, correct), abs=1e-12)


@given(rows, st.integers(1, 30))
def test_adaptive_bins_give_ties_their_mean_correctness(pairs, size):
    confidence, correct = unzip(pairs)
    shared = np.array([correct[confidence == c].mean() for c in confidence])
    order = np.argsort(confidence)
    bins = max(len(pairs) // size, 1)
    squares = 0.0
    for index in range(bins):
        inside = order[index * size : (index + 1) * size if index < bins - 1 else None]
        squares += len(inside) * (confidence[inside].mean() - shared[inside].mean()) ** 2
    expected = np.sqrt(squares / len(pairs))
    assert m.rms_calibration_error(confidence, correct, bin_size=size) == pytest.approx(expected, abs=1e-9)


def test_the_published_rms_error_has_no_value_below_one_bin_and_is_zero_below_two():
    rng = np.random.default_rng(0)
    with pytest.raises(m.UndefinedMetricError, match="at least 100 rows, but got 99"):
        m.rms_calibration_error_official(rng.random(99), rng.random(99) < 0.5)
    assert m.rms_calibration_error_official(rng.random(199), rng.random(199) < 0.5) == 0
    assert m.rms_calibration_error([0.9], [False]) == pytest.approx(0.9)


@given(rows)
def test_ks_error_is_the_largest_cumulated_gap_at_the_end_of_a_tie(pairs):
    confidence, correct = unzip(pairs)
    gaps = [abs(((confidence - correct) * (confidence <= c)).sum()) / len(pairs) for c in confidence]
    assert m.ks_error(confidence, correct) == pytest.approx(max(gaps), abs=1e-12)


@given(rows.map(lambda pairs: pairs[:20]))
@settings(max_examples=20)
def test_smooth_ece_is_the_integral_of_its_definition(pairs):
    confidence, correct = unzip(pairs)
    grid = np.linspace(0, 1, 2001)
    images = np.r_[[2 * k + sign * confidence for k in range(-3, 4) for sign in (1, -1)]]

    def smoothed(width):
        kernel = np.exp(-0.5 * ((grid - images[..., None]) / width) ** 2) / (width * np.sqrt(2 * np.pi))
        total = np.einsum("n,knt->t", confidence - correct, kernel)
        return np.trapezoid(np.abs(total), grid) / len(pairs)

    value = m.smooth_ece(confidence, correct, resolution=2**-5)
    wide = next(width for width in np.arange(1, 33) / 32 if smoothed(width) <= width or width == 1)
    assert value == pytest.approx(smoothed(wide), abs=2e-4)
    assert value <= np.abs(confidence - correct).mean() + 1e-9


@pytest.mark.parametrize("end", [0.0, 1.0])
def test_smooth_ece_does_not_jump_at_the_ends_of_the_scale(end):
    rng = np.random.default_rng(0)
    confidence, correct = np.r_[np.full(400, end), rng.uniform(0.2, 0.9, 600)], rng.random(1000) < 0.6
    inward = np.where(confidence == end, abs(end - 1e-7), confidence)
    at_end, just_inside = m.smooth_ece(confidence, correct), m.smooth_ece(inward, correct)
    assert at_end == pytest.approx(just_inside, abs=1e-6)


@pytest.mark.parametrize("metric", [*TOP_LABEL, m.kernel_ece])
def test_top_label_metrics_refuse_what_is_no_confidence(metric):
    with pytest.raises(ValueError, match="are these logits"):
        metric([0.5, 3.0], [True, False])
    with pytest.raises(ValueError, match=r"must have shape \(2,\)"):
        metric([0.5, 0.6], [True])
    with pytest.raises(ValueError, match="1 NaN"):
        metric([0.5, np.nan], [True, True])
    with pytest.raises(ValueError, match="booleans, or 0 and 1"):
        metric([0.5, 0.5], [2, 1])
    with pytest.raises(m.UndefinedMetricError, match="at least one row"):
        metric([], [])


def test_kernel_ece_has_no_value_without_spread():
    with pytest.raises(m.UndefinedMetricError, match="bandwidth"):
        m.kernel_ece([0.5, 0.5, 0.9], [True, True, False])


def test_a_perfect_and_certain_model_has_no_error():
    for metric in TOP_LABEL:
        assert metric([1.0] * 150, [True] * 150) == 0


def test_a_certain_and_always_wrong_model_has_the_largest_error():
    for metric in (m.ece, m.mce, m.ace, m.rms_calibration_error, m.ks_error, m.debiased_ece, m.debiased_rms):
        assert metric([1.0] * 150, [False] * 150) == pytest.approx(1)
    assert m.smooth_ece([1.0] * 150, [False] * 150) == pytest.approx(1, abs=1e-6)


def test_debiasing_takes_the_error_of_a_calibrated_model_to_zero_and_leaves_a_real_one():
    rng = np.random.default_rng(7)
    squares, plain, debiased = [], [], []
    for _ in range(400):
        confidence = rng.uniform(0.3, 1.0, 500)
        correct = rng.random(500) < confidence
        squares.append(m.debiased_mean_square(confidence, correct))
        plain.append(m.ece(confidence, correct, scheme="equal-mass"))
        debiased.append(m.debiased_ece(confidence, correct))
    assert abs(np.mean(squares)) < 3 * np.std(squares) / np.sqrt(400)
    assert np.mean(debiased) < 0.7 * np.mean(plain)
    confidence = rng.uniform(0.5, 1.0, 200_000)
    correct = rng.random(200_000) < confidence - 0.1
    assert m.debiased_rms(confidence, correct) == pytest.approx(0.1, abs=0.005)
    assert m.debiased_ece(confidence, correct) == pytest.approx(0.1, abs=0.005)


def test_a_calibrated_model_stays_within_its_consistency_band_as_often_as_the_level_says():
    rng = np.random.default_rng(5)
    inside = []
    for _ in range(300):
        confidence = rng.uniform(0.2, 1.0, 2000)
        curve = m.reliability_curve(confidence, rng.random(2000) < confidence, level=0.9)
        inside.append((curve.accuracy >= curve.low) & (curve.accuracy <= curve.high))
    assert 0.89 < np.mean(np.concatenate(inside)) < 0.95  # binomial quantiles are discrete, so a little wide


@given(st.integers(0, 10**6), st.sampled_from(["equal-width", "equal-mass"]), st.integers(1, 20))
@settings(max_examples=40)
def test_classwise_ece_is_the_mean_ece_of_each_class_against_the_rest(seed, scheme, bins):
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(2, 6))
    probabilities = rng.dirichlet(np.full(classes, 0.5), 40)
    labels = rng.integers(0, classes, 40)
    each = [m.ece(np.minimum(probabilities[:, k], 1), labels == k, bins=bins, scheme=scheme) for k in range(classes)]
    assert m.classwise_ece(probabilities, labels, bins=bins, scheme=scheme) == pytest.approx(np.mean(each), abs=1e-12)


def test_the_brier_decomposition_adds_up_and_loses_nothing_where_bins_are_pure():
    probabilities, labels = case_a()
    parts = m.brier_decomposition(probabilities, labels)
    total = parts.reliability - parts.resolution + parts.uncertainty + parts.within_bin
    assert total == pytest.approx(m.brier(probabilities, labels), abs=1e-12)
    frequencies = np.bincount(labels, minlength=10) / len(labels)
    assert parts.uncertainty == pytest.approx(1 - (frequencies**2).sum(), abs=1e-12)
    pure = m.brier_decomposition(np.round(np.c_[probabilities[:, 0], 1 - probabilities[:, 0]], 1), labels % 2, bins=20)
    assert pure.within_bin == pytest.approx(0, abs=1e-12)


def test_accuracy_brier_and_nll_equal_scikit_learn():
    probabilities, labels = case_a()
    for k in (1, 3, 5):
        theirs = top_k_accuracy_score(labels, probabilities, k=k, labels=np.arange(10))
        assert m.top_k_accuracy(probabilities, labels, k=k) == pytest.approx(theirs, abs=1e-12)
    assert m.nll(probabilities, labels) == pytest.approx(log_loss(labels, probabilities), abs=1e-12)
    halved = brier_score_loss(labels, probabilities, scale_by_half=cast(Any, True))  # its stubs say str
    assert m.brier(probabilities, labels) / 2 == pytest.approx(halved, abs=1e-12)
    logs = torch.from_numpy(probabilities).log()
    assert m.nll_from_log(logs, labels) == pytest.approx(m.nll(probabilities, labels), abs=1e-12)
    assert m.entropy(probabilities) == pytest.approx(-(probabilities * logs.numpy()).sum(axis=1).mean(), abs=1e-12)


def test_top_k_breaks_ties_by_class_order_as_argmax_does():
    probabilities = np.array([[0.25, 0.25, 0.25, 0.25]] * 4)
    assert m.top_k_correct(probabilities, np.arange(4), k=2).tolist() == [True, True, False, False]
    confidence, correct = m.top_label(probabilities, np.arange(4))
    assert (confidence.tolist(), correct.tolist()) == ([0.25] * 4, [True, False, False, False])
    assert m.accuracy(probabilities, np.arange(4)) == correct.mean()


def test_log_probabilities_keep_a_likelihood_that_probabilities_round_to_zero():
    logs = torch.log_softmax(torch.tensor([[0.0, 800.0]], dtype=torch.float64), dim=-1)
    assert m.nll(logs.exp(), [0]) == np.inf
    assert m.nll_from_log(logs, [0]) == 800
    with pytest.raises(ValueError, match="log-softmax first"):
        m.nll_from_log(np.array([[1.0, 2.0]]), [0])


@pytest.mark.parametrize("metric", [m.accuracy, m.nll, m.brier, m.classwise_ece, m.top_label, m.brier_decomposition])
def test_metrics_of_probabilities_refuse_labels_they_cannot_score(metric):
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.1, but range from -1"):
        metric(np.array([[0.5, 0.5], [0.1, 0.9]]), [0, -1])
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\)"):
        metric(np.array([[0.5, 0.5], [0.1, 0.9]]), [0])
    with pytest.raises(TypeError, match="labels must be integers"):
        metric(np.array([[0.5, 0.5]]), [0.0])


@pytest.mark.parametrize("metric", [m.nll, m.brier, m.classwise_ece, m.top_label])
def test_logits_are_not_taken_for_probabilities(metric):
    with pytest.raises(ValueError, match="Are these logits"):
        metric(np.array([[2.0, -1.0], [0.1, 0.9]]), [0, 1])


def test_float32_and_bfloat16_tensors_are_read_as_they_are():
    probabilities = torch.softmax(torch.randn(64, 5), dim=-1)
    labels = torch.arange(64) % 5
    for given_as in (probabilities, probabilities.bfloat16()):
        array = given_as.float().numpy()
        for metric in (m.nll, m.brier, m.classwise_ece, m.accuracy):
            assert metric(given_as, labels) == pytest.approx(metric(array, labels.numpy()), abs=1e-12)


def test_ece_and_mce_equal_netcal_and_torchmetrics_on_random_rows():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        netcal = pytest.importorskip("netcal.metrics", reason="an oracle for tests only")
        torchmetrics = pytest.importorskip("torchmetrics", reason="an oracle for tests only")
    rng = np.random.default_rng(11)
    confidence = rng.uniform(0.1, 1.0, 2000)
    correct = rng.random(2000) < confidence**2
    assert m.ece(confidence, correct) == pytest.approx(
        netcal.ECE(15).measure(confidence, correct.astype(int)), abs=1e-9
    )
    assert m.mce(confidence, correct) == pytest.approx(
        netcal.MCE(15).measure(confidence, correct.astype(int)), abs=1e-9
    )
    average = netcal.ACE(15).measure(confidence, correct.astype(int))
    assert m.ace(confidence, correct, meaning="average") == pytest.approx(average, abs=1e-9)
    error = torchmetrics.functional.classification.binary_calibration_error
    for norm in ("l1", "l2", "max"):
        theirs = error(torch.from_numpy(confidence), torch.from_numpy(correct).long(), n_bins=15, norm=norm).item()
        assert m.ece(confidence, correct, norm=norm) == pytest.approx(theirs, abs=1e-6)
