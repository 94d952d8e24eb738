import contextlib
import io
import warnings

import numpy as np
import pytest
import torch

from ood_toolkit import registry
from ood_toolkit.calibrators import BBQCalibrator, ENIRCalibrator, NetcalCalibrator
from ood_toolkit.calibrators.netcal_adapter import SHAPES, apply_map, fit_map
from ood_toolkit.calibrators.top_label import top_label_log_odds
from tests.calibrators.data import drawn


def theirs(method, confidence, correct, fresh, **options):
    """netcal itself, on float64 numpy."""
    import netcal.binning
    import netcal.scaling

    room = netcal.scaling if SHAPES[method] == "logistic" else netcal.binning
    quiet = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        warnings.simplefilter("ignore")
        fitted = getattr(room, method)(**options)
        fitted.fit(confidence, correct)
        return fitted.transform(fresh)


@pytest.mark.parametrize("method", SHAPES)
@pytest.mark.parametrize("ties", [False, True])
def test_the_map_kept_as_tensors_is_netcals_map(method, ties):
    if ties and method == "NearIsotonicRegression":
        pytest.skip("its transform leaves confidences on a repeated edge without a group")
    logits, labels = drawn(600, 4)
    if ties:
        logits = logits.round()
    odds = top_label_log_odds(logits)
    correct = logits.argmax(1) == labels
    fresh = torch.cat([top_label_log_odds(drawn(400, 4, seed=1)[0]), odds])
    expected = theirs(method, odds.sigmoid().numpy(), correct.numpy().astype(int), fresh.sigmoid().numpy())
    got = apply_map(SHAPES[method], *fit_map(method, (), odds.sigmoid(), correct), fresh).numpy()
    np.testing.assert_allclose(got, np.asarray(expected).reshape(-1), atol=1e-9)


def test_temperature_by_netcal_moves_although_logits_are_float32():
    logits, labels = drawn(2000, 4, temperature=3.0)
    calibrator = registry.build_calibrator("netcal:TemperatureScaling").fit(logits.float(), labels)
    assert float(calibrator.values[0]) < 0.7  # 1/T, which netcal leaves at exactly 1 in float32


@pytest.mark.parametrize("method", ["HistogramBinning", "IsotonicRegression"])
def test_multiclass_is_netcals_own_one_vs_rest(method):
    logits, labels = drawn(900, 4)
    fresh = drawn(300, 4, seed=1)[0]
    expected = theirs(method, logits.softmax(1).numpy(), labels.numpy(), fresh.softmax(1).numpy())
    got = NetcalCalibrator(method, task="multiclass").fit(logits, labels)(fresh).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_a_class_without_rows_keeps_its_probability_where_netcal_gives_nan():
    logits, labels = drawn(400, 5)
    fitted = NetcalCalibrator("IsotonicRegression", task="multiclass").fit(logits, labels % 4)
    probabilities = fitted(logits)
    assert bool(probabilities.isfinite().all())
    assert bool((probabilities[:, 4] > 0).all())


def test_specs_name_netcals_class_and_pass_its_options():
    built = registry.build_calibrator("netcal:HistogramBinning(bins=20, task='multiclass')")
    assert repr(built) == "NetcalCalibrator(method='HistogramBinning', task='multiclass', options=(('bins', 20),))"
    assert built.spec == "netcal:HistogramBinning(task='multiclass', bins=20)"
    assert repr(registry.build_calibrator(built.spec)) == repr(built)
    for spec, shown in (
        ("netcal", "netcal:HistogramBinning"),
        ("netcal(method='BBQ')", "netcal:BBQ"),
        ("netcal:HistogramBinning(bins=5)", "netcal:HistogramBinning(bins=5)"),
    ):
        assert registry.build_calibrator(spec).spec == shown
    composed = registry.build_calibrator("mix_n_match(nonparametric='netcal:BBQ')")
    assert "BBQ" in repr(composed)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "netcal:HistogramBinning(bims=10)",
            "HistogramBinning with bims=10 failed: .*unexpected keyword argument 'bims'",
        ),
        ("netcal:TemperatureScaling(method='gradient')", "TemperatureScaling with method='gradient' failed"),
    ],
)
def test_an_option_that_netcal_does_not_take_is_named(spec, message):
    logits, labels = drawn(200, 4)
    with pytest.raises(ValueError, match=message):
        registry.build_calibrator(spec).fit(logits, labels)


def test_what_netcal_cannot_do_is_refused():
    with pytest.raises(ValueError, match="cannot apply"):
        NetcalCalibrator("HistogramBinning", options=(("equal_intervals", False),))
    with pytest.raises(ValueError, match="use temperature, vector or dirichlet"):
        NetcalCalibrator("BetaCalibration", task="multiclass")
    with pytest.raises(ValueError, match="known: HistogramBinning"):
        NetcalCalibrator("Histogram")
    logits, _ = drawn(100, 4)
    with pytest.raises(ValueError, match="needs right and wrong rows, but 100 of 100 are right"):
        NetcalCalibrator("BBQ").fit(logits, logits.argmax(1))


@pytest.mark.parametrize(("kind", "method"), [(BBQCalibrator, "BBQ"), (ENIRCalibrator, "ENIR")])
@pytest.mark.parametrize("score", ["BIC", "AIC"])
def test_bbq_and_enir_are_netcals(kind, method, score):
    logits, labels = drawn(500, 4)
    odds = top_label_log_odds(logits)
    correct = (logits.argmax(1) == labels).numpy().astype(int)
    expected = theirs(method, odds.sigmoid().numpy(), correct, odds.sigmoid().numpy(), score_function=score)
    got = kind(score=score).fit(logits, labels).confidence(odds).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-9)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "netcal:LogisticCalibration(method='mcmc')",
            "gives a sample of maps, and here one map is kept; leave `method`",
        ),
        ("netcal:TemperatureScaling(method='variational')", "gives a sample of maps"),
        ("netcal:histogram_binning", "did you mean 'HistogramBinning'"),
    ],
)
def test_what_the_adapter_cannot_keep_is_refused_at_construction(spec, message):
    with pytest.raises(ValueError, match=message):
        registry.build_calibrator(spec)


def test_a_package_that_netcal_lacks_is_named(monkeypatch):
    import importlib

    logits, labels = drawn(300, 5)
    calibrator = registry.build_calibrator("netcal:LogisticCalibration")

    def missing(name):
        raise ModuleNotFoundError("No module named 'pyro'", name="pyro")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match="netcal's LogisticCalibration needs pyro, which is not installed"):
        calibrator.fit(logits, labels)


@pytest.mark.parametrize("classes", [3, 7])
def test_one_map_per_class_is_not_applied_to_other_classes(classes):
    logits, labels = drawn(600, 5)
    fitted = registry.build_calibrator("netcal:IsotonicRegression(task='multiclass')").fit(logits, labels)
    with pytest.raises(ValueError, match=f"fitted on logits of 5 classes, but these have {classes}"):
        fitted(drawn(4, classes)[0])
