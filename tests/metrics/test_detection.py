"""Laws of the two-sample metrics, and the same numbers from scikit-learn, torchmetrics and plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from ood_toolkit import metrics as m

few_values = st.lists(st.integers(-4, 4), min_size=1, max_size=25)  # many ties
TWO_SAMPLE = [
    m.auroc,
    m.aupr,
    m.aupr_id,
    m.aupr_trapezoid,
    m.aupr_id_trapezoid,
    m.fpr_at_tpr,
    m.fpr_at_tpr_id_positive,
    m.fpr_at_tpr_official,
    m.tnr_at_tpr,
    m.detection_error,
    m.partial_auroc,
    m.aupr_base_rate,
    m.aurc,
    m.e_aurc,
    m.augrc,
    m.e_augrc,
    m.aurra,
]


def labelled(negatives, positives):
    return np.r_[np.zeros(len(negatives)), np.ones(len(positives))], np.r_[negatives, positives].astype(float)


@given(few_values, few_values)
def test_auroc_is_the_share_of_pairs_in_order_with_ties_half(negatives, positives):
    pairs = [(p > n) + 0.5 * (p == n) for n in negatives for p in positives]
    assert m.auroc(negatives, positives) == pytest.approx(np.mean(pairs), abs=1e-12)


@given(few_values, few_values)
def test_auroc_becomes_its_complement_under_negation(negatives, positives):
    mirrored = m.auroc(-np.array(negatives), -np.array(positives))
    assert mirrored == pytest.approx(1 - m.auroc(negatives, positives), abs=1e-12)


@pytest.mark.parametrize("metric", TWO_SAMPLE)
@given(negatives=few_values, positives=few_values)
@settings(max_examples=25)
def test_monotone_maps_change_no_ranking_metric(metric, negatives, positives):
    before = metric(np.array(negatives, dtype=float), np.array(positives, dtype=float))
    after = metric(np.exp(np.array(negatives)) - 3, np.exp(np.array(positives)) - 3)
    assert after == pytest.approx(before, abs=1e-12)


@pytest.mark.parametrize("metric", TWO_SAMPLE)
@given(negatives=few_values, positives=few_values, seed=st.integers(0, 99))
@settings(max_examples=25)
def test_the_order_of_the_rows_changes_no_metric(metric, negatives, positives, seed):
    rng = np.random.default_rng(seed)
    assert metric(rng.permutation(negatives), rng.permutation(positives)) == pytest.approx(
        metric(negatives, positives), abs=1e-12
    )


@given(few_values, few_values)
def test_curves_and_areas_equal_scikit_learn(negatives, positives):
    labels, scores = labelled(negatives, positives)
    assert m.auroc(negatives, positives) == pytest.approx(sk.roc_auc_score(labels, scores), abs=1e-12)
    assert m.aupr(negatives, positives) == pytest.approx(sk.average_precision_score(labels, scores), abs=1e-12)
    assert m.aupr_id(negatives, positives) == pytest.approx(sk.average_precision_score(1 - labels, -scores), abs=1e-12)
    precision, recall, _ = sk.precision_recall_curve(labels, scores)
    assert m.aupr_trapezoid(negatives, positives) == pytest.approx(sk.auc(recall, precision), abs=1e-12)
    ours = m.precision_recall_curve(negatives, positives)
    assert ours.precision[::-1] == pytest.approx(precision[:-1], abs=1e-12)
    assert ours.recall[::-1] == pytest.approx(recall[:-1], abs=1e-12)
    fpr, tpr, thresholds = sk.roc_curve(labels, scores, drop_intermediate=False)
    for part, theirs in zip(m.roc_curve(negatives, positives), (fpr, tpr, thresholds), strict=True):
        np.testing.assert_allclose(part, theirs, atol=1e-12)


@given(few_values, few_values, st.floats(0.01, 1.0))
def test_partial_auroc_equals_scikit_learn(negatives, positives, max_fpr):
    theirs = sk.roc_auc_score(*labelled(negatives, positives), max_fpr=max_fpr)
    assert m.partial_auroc(negatives, positives, max_fpr=max_fpr) == pytest.approx(theirs, abs=1e-9)


@given(few_values, few_values, st.integers(0, 20))
def test_fpr_at_tpr_is_the_first_threshold_that_reaches_the_rate(negatives, positives, twentieths):
    expected = 0.0
    for threshold in sorted({*negatives, *positives}, reverse=True):
        if twentieths == 0:
            break
        if 20 * sum(p >= threshold for p in positives) >= twentieths * len(positives):
            expected = sum(n >= threshold for n in negatives) / len(negatives)
            break
    assert m.fpr_at_tpr(negatives, positives, twentieths / 20) == pytest.approx(expected, abs=1e-12)
    assert m.tnr_at_tpr(negatives, positives, twentieths / 20) == pytest.approx(1 - expected, abs=1e-12)


@given(few_values, few_values)
def test_fpr_with_id_positive_is_the_same_rule_with_the_roles_exchanged(negatives, positives):
    swapped = m.fpr_at_tpr(-np.array(positives), -np.array(negatives))
    assert m.fpr_at_tpr_id_positive(negatives, positives) == swapped


@given(few_values, few_values, st.floats(0, 1))
def test_detection_error_is_the_least_error_of_any_threshold(negatives, positives, prior):
    negative, positive = np.array(negatives), np.array(positives)
    errors = [
        (1 - prior) * (negative >= t).mean() + prior * (positive < t).mean() for t in [np.inf, *negatives, *positives]
    ]
    assert m.detection_error(negatives, positives, ood_prior=prior) == pytest.approx(min(errors), abs=1e-12)


@given(few_values.filter(lambda values: len(set(values)) > 1), few_values)
def test_autc_is_the_mean_area_under_both_error_rates(negatives, positives):
    low, high = min(negatives + positives), max(negatives + positives)
    stretched = [(np.array(part) - low) / (high - low) for part in (negatives, positives)]
    thresholds = (np.arange(20000) + 0.5) / 20000
    fpr = (stretched[0][None, :] >= thresholds[:, None]).mean()
    fnr = (stretched[1][None, :] < thresholds[:, None]).mean()
    assert m.autc(negatives, positives) == pytest.approx((fpr + fnr) / 2, abs=1e-4)


@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=25), few_values)
def test_oscr_is_the_area_under_correct_classification_rate(rows, positives):
    scores, correct = np.array([score for score, _ in rows]), np.array([right for _, right in rows])
    thresholds = [-np.inf, *sorted({*scores.tolist(), *positives})]
    rate = [(correct & (scores <= t)).mean() for t in thresholds]
    accepted = [(np.array(positives) <= t).mean() for t in thresholds]
    area = np.trapezoid(rate, accepted)
    assert m.oscr(scores, positives, correct=correct) == pytest.approx(area, abs=1e-12)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        (m.auroc, 0.5),
        (m.aupr, 0.25),
        (m.aupr_id, 0.75),
        (m.fpr_at_tpr, 1.0),
        (m.fpr_at_tpr_id_positive, 1.0),
        (m.detection_error, 0.5),
        (m.partial_auroc, 0.5),
        (m.aurc, 0.25),
        (m.augrc, 0.125),
        (m.aurra, 0.75),
    ],
)
def test_equal_scores_give_the_value_of_chance(metric, value):
    assert metric([1.0] * 6, [1.0] * 2) == pytest.approx(value, abs=1e-12)


def test_separated_samples_are_perfect_even_with_infinite_scores():
    id_scores, ood_scores = [-np.inf, 0.0, 1.0], [2.0, np.inf]
    assert m.auroc(id_scores, ood_scores) == m.aupr(id_scores, ood_scores) == m.aupr_id(id_scores, ood_scores) == 1
    assert m.fpr_at_tpr(id_scores, ood_scores) == m.fpr_at_tpr_id_positive(id_scores, ood_scores) == 0


@pytest.mark.parametrize("metric", TWO_SAMPLE[:11])
@pytest.mark.parametrize("samples", [([], [1.0]), ([1.0], []), ([], [])])
def test_a_detection_metric_of_an_empty_sample_is_undefined_and_says_so(metric, samples):
    with pytest.raises(m.UndefinedMetricError, match="at least one"):
        metric(*samples)


@pytest.mark.parametrize("metric", [*TWO_SAMPLE, m.autc])
def test_nan_scores_are_refused_with_their_number_and_rows(metric):
    with pytest.raises(ValueError, match=r"2 NaN among 4, the first at rows \[1, 3\]"):
        metric([0.0, np.nan, 1.0, np.nan], [1.0])


def test_autc_has_no_value_for_equal_or_infinite_scores():
    with pytest.raises(m.UndefinedMetricError, match="all scores are equal"):
        m.autc([1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="finite"):
        m.autc([1.0, np.inf], [2.0])


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_shares_outside_zero_to_one_are_refused(share):
    for call in (
        lambda: m.fpr_at_tpr([0.0], [1.0], share),
        lambda: m.detection_error([0.0], [1.0], ood_prior=share),
        lambda: m.partial_auroc([0.0], [1.0], max_fpr=share),
        lambda: m.coverage_at_risk([0.0], [1.0], share),
        lambda: m.risk_at_coverage([0.0], [1.0], share),
    ):
        with pytest.raises(ValueError, match=r"\[0, 1\]|\(0, 1\]"):
            call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_of_any_float_type_give_what_arrays_give(dtype):
    negatives, positives = torch.randn(200).to(dtype), (torch.randn(50) + 1).to(dtype).requires_grad_()
    arrays = negatives.double().numpy(), positives.detach().double().numpy()
    for metric in TWO_SAMPLE:
        assert metric(negatives, positives) == metric(*arrays)


def test_per_class_is_the_metric_against_each_class_alone():
    id_scores, ood_scores = [0.0, 1.0, 2.0], [0.5, 3.0, 1.5, 4.0]
    found = m.per_class(m.auroc, id_scores, ood_scores, ood_classes=["cat", "dog", "cat", "dog"])
    assert found == {"cat": m.auroc(id_scores, [0.5, 1.5]), "dog": 1.0}


def test_auroc_and_average_precision_equal_torchmetrics():
    torchmetrics = pytest.importorskip("torchmetrics", reason="an oracle for tests only")
    generator = torch.Generator().manual_seed(3)
    negatives, positives = torch.rand(300, generator=generator), torch.rand(80, generator=generator) ** 0.5
    scores, target = torch.cat([negatives, positives]), torch.cat([torch.zeros(300), torch.ones(80)]).long()
    functional = torchmetrics.functional.classification
    assert m.auroc(negatives, positives) == pytest.approx(functional.binary_auroc(scores, target).item(), abs=1e-6)
    theirs = functional.binary_average_precision(scores, target).item()
    assert m.aupr(negatives, positives) == pytest.approx(theirs, abs=1e-6)
