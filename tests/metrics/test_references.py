"""Values that other tools print on fixed inputs, to 1e-6: the cases of the study of calibration tools (A, B and C)."""

import numpy as np
import pytest
from metric_cases import case_a, case_b, case_c, reference_arrays, softmax, two_samples

from ood_toolkit import metrics as m

NEAR = 1e-6
CASES = {"A": case_a, "B": case_b, "C": case_c}

TOP_LABEL = [
    ("netcal ECE(15)", m.ece, {}, {"A": 0.01840213, "B": 0.01710000, "C": 0.14806770}),
    ("uncertainty-calibration get_ece_em", m.ece, {"scheme": "equal-mass"}, {"A": 0.02602061, "B": 0.01710000}),
    ("torch-uncertainty ACE", m.ace, {}, {"A": 0.02602060}),
    ("netcal ACE(15)", m.ace, {"meaning": "average"}, {"A": 0.02769992, "B": 0.01521258}),
    ("netcal MCE(15)", m.mce, {}, {"A": 0.13115366, "B": 0.04444444}),
    ("torchmetrics l2", m.ece, {"norm": "l2"}, {"A": 0.03009576, "B": 0.02215127}),
    (
        "uncertainty-calibration L2, equal mass",
        m.ece,
        {"norm": "l2", "scheme": "equal-mass"},
        {"A": 0.04090995, "B": 0.02210999, "C": 0.17849241},
    ),
    ("uncertainty-calibration L2, debiased", m.debiased_rms, {}, {"A": 0.0, "B": 0.0, "C": 0.17215742}),
    ("pytorch-ood RMS, all bins", m.rms_calibration_error, {}, {"A": 0.02556900, "C": 0.17352693}),
    ("pytorch-ood mean absolute, all bins", m.rms_calibration_error, {"norm": "l1"}, {"A": 0.01957450}),
    ("Hendrycks RMS as shipped", m.rms_calibration_error_official, {}, {"A": 0.02550876, "C": 0.17352693}),
    ("Hendrycks L1 as shipped", m.rms_calibration_error_official, {"norm": "l1"}, {"A": 0.01901981}),
    ("Hendrycks max as shipped", m.rms_calibration_error_official, {"norm": "max"}, {"A": 0.05860346}),
    ("over-confidence part", m.overconfidence, {}, {"A": 0.01406197, "B": 0.01480000}),
    ("under-confidence part", m.underconfidence, {}, {"A": 0.00434016, "B": 0.00230000}),
    ("KS by its formula", m.ks_error, {}, {"A": 0.01306166, "B": 0.01250000}),
    ("Hendrycks soft F1", m.soft_f1, {}, {"A": 0.54110236, "B": 0.54513274}),
    ("torch-uncertainty top-class Brier", m.brier_top_label, {}, {"A": 0.14672481, "B": 0.14609000}),
]

TWO_SAMPLE = [
    ("fd-shifts aurc", m.aurc, {}, {"A": 0.11039087, "B": 0.11119480}),
    ("mean of cumulative error", m.aurc, {"convention": "expected"}, {"A": 0.11054937}),
    ("torch-uncertainty AURC", m.aurc, {"convention": "torch-uncertainty"}, {"A": 0.11050137}),
    ("fd-shifts eaurc", m.e_aurc, {}, {"A": 0.05379174, "B": 0.05459567}),
    ("fd-shifts augrc", m.augrc, {}, {"A": 0.08323050, "B": 0.08361050}),
    ("torch-uncertainty AUGRC", m.augrc, {"convention": "torch-uncertainty"}, {"A": 0.08331381}),
    ("fd-shifts eaugrc", m.e_augrc, {}, {"A": 0.03298600, "B": 0.03336600}),
    ("Hendrycks aurra", m.aurra, {}, {"A": 0.88945063}),
    ("fd-shifts coverage at 5% risk", m.coverage_at_risk, {"risk": 0.05}, {"A": 0.38300000, "B": 0.24700000}),
    ("fd-shifts risk at 80% coverage", m.risk_at_coverage, {"coverage": 0.8}, {"A": 0.21625000, "B": 0.23345367}),
    ("scikit-learn AUROC", m.auroc, {}, {"A": 0.84764746, "B": 0.84589236}),
    ("fd-shifts failap_suc", m.aupr_id, {}, {"A": 0.92818357, "B": 0.91260026}),
    ("fd-shifts failap_err", m.aupr, {}, {"A": 0.68213484, "B": 0.65731998}),
    ("pytorch-ood aupr", m.aupr_trapezoid, {}, {"A": 0.68098460, "B": 0.69542269}),
    ("fd-shifts fpr@95tpr", m.fpr_at_tpr_id_positive, {}, {"A": 0.70662461, "B": 0.86119874}),
    ("Hendrycks fpr_and_fdr_at_recall", m.fpr_at_tpr_official, {}, {"A": 0.52269400, "B": 0.41581259}),
    ("pytorch-ood fpr_at_tpr", m.fpr_at_tpr, {}, {"A": 0.52269400, "B": 0.64128843}),
]

WHOLE = [
    ("torch-uncertainty class-wise ECE", m.classwise_ece, {}, {"A": 0.01629097}),
    ("uncertainty-calibration class-wise ECE", m.classwise_ece, {}, {"A": 0.01629097, "B": 0.01411111}),
    ("uncertainty-calibration default", m.debiased_classwise_rms, {}, {"A": 0.01386485, "C": 0.04705405}),
    ("scikit-learn Brier, not halved", m.brier, {}, {"A": 0.43036700, "B": 0.44410000}),
    ("scikit-learn log_loss", m.nll, {"floor": np.finfo(np.float64).eps}, {"A": 1.02964991, "B": 1.19188771}),
    ("torch-uncertainty NLL", m.nll, {}, {"A": 1.02964991, "B": np.inf}),
    ("accuracy", m.accuracy, {}, {"A": 0.683, "B": 0.683}),
]


def _rows(table):
    return [
        pytest.param(metric, options, case, value, id=f"{tool}, case {case}")
        for tool, metric, options, values in table
        for case, value in values.items()
    ]


@pytest.mark.parametrize(("metric", "options", "case", "value"), _rows(TOP_LABEL))
def test_a_top_label_metric_equals_the_tool_of_its_convention(metric, options, case, value):
    assert metric(*m.top_label(*CASES[case]()), **options) == pytest.approx(value, abs=NEAR)


@pytest.mark.parametrize(("metric", "options", "case", "value"), _rows(TWO_SAMPLE))
def test_a_two_sample_metric_equals_the_tool_of_its_convention(metric, options, case, value):
    assert metric(*two_samples(*CASES[case]()), **options) == pytest.approx(value, abs=NEAR)


@pytest.mark.parametrize(("metric", "options", "case", "value"), _rows(WHOLE))
def test_a_metric_of_probabilities_equals_the_tool_of_its_convention(metric, options, case, value):
    assert metric(*CASES[case](), **options) == pytest.approx(value, abs=NEAR)


def test_the_cases_are_the_ones_whose_values_are_quoted():
    probabilities, labels = case_a()
    assert probabilities[:, 0].sum() == pytest.approx(97.124653538333, abs=1e-9)
    assert labels.sum() == 4518
    assert (case_b()[0].max(axis=1) == 1.0).sum() == 247
    assert case_c()[0].max(axis=1).mean() == pytest.approx(0.829328974143, abs=1e-11)


def test_smooth_ece_is_within_4e_6_of_relplot_without_saturated_confidences():
    # relplot sums where this integrates and loses half of any mass at confidence exactly 1, so on case B (247 of
    # 1000 there) it gives 0.01824610, more than the 0.0171 of absolute residual that there is to smooth
    assert m.smooth_ece(*m.top_label(*case_a())) == pytest.approx(0.02319480, abs=4e-6)
    assert m.smooth_ece(*m.top_label(*case_b())) < 0.0171


def test_kernel_ece_is_within_1e_5_of_mix_n_match():
    # the published code sets its densities to 0 at the points 0 and 1 themselves
    assert m.kernel_ece(*m.top_label(*case_a())) == pytest.approx(0.01310431, abs=1e-5)
    assert m.kernel_ece(*m.top_label(*case_b())) == pytest.approx(0.01145432, abs=1e-5)


def test_aurra_of_ties_lies_between_the_orders_that_sorting_may_leave():
    correct, wrong = two_samples(*case_b())
    best = m.aurra(correct, wrong + 1e-9)
    worst = m.aurra(correct + 1e-9, wrong)
    assert worst < 0.88621481 < m.aurra(correct, wrong) < 0.88807555 < best


def test_the_softmax_of_the_golden_logits_gives_the_quoted_confidence():
    arrays = reference_arrays("golden/metric_cases_open.npz")
    confidence = softmax(arrays["cls_a/logits"].astype(np.float64)).max(axis=1)
    assert np.abs(confidence - arrays["cls_a/confidence"]).max() < 1e-12
