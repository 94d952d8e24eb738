import pytest

from ood_toolkit.benchmarks.methods import parse_calibrators, parse_detectors
from ood_toolkit.registry import calibrator_classes, detector_classes


def test_all_is_every_registered_detector_and_none_of_them_was_chosen():
    methods = parse_detectors("all")
    assert [method.spec for method in methods] == list(detector_classes())
    assert not any(method.chosen for method in methods)


def test_one_pass_leaves_out_whatever_runs_the_model_again_or_reads_inner_layers():
    names = {method.spec for method in parse_detectors("one-pass")}
    assert {"msp", "knn", "vim", "react", "mutual_information"} <= names
    assert not names & {"odin", "adascale_a", "gram", "rankfeat", "mahalanobis_layers", "tta", "mc_dropout"}


def test_a_minus_takes_a_detector_out():
    specs = [method.spec for method in parse_detectors("all,-tta,-knn")]
    assert len(specs) == len(detector_classes()) - 2
    assert not {"tta", "knn"} & set(specs)
    with pytest.raises(ValueError, match="not asked for before it"):
        parse_detectors("msp,-knn")


def test_a_detector_named_beside_all_counts_as_chosen():
    chosen = [m.spec for m in parse_detectors("all,msp,energy(temperature=2)") if m.chosen]
    assert chosen == ["msp", "energy(temperature=2)"]
    assert len(parse_detectors("all,msp")) == len(detector_classes())


def test_a_calibrator_before_a_detector_scores_calibrated_logits():
    (method,) = parse_detectors("temperature+msp")
    assert method.calibrator is not None
    assert (method.calibrator.spec, method.detector.spec, method.spec) == ("temperature", "msp", "temperature+msp")


@pytest.mark.parametrize("spec", ["temperature+knn", "temperature+odin", "temperature+gradnorm"])
def test_calibration_before_a_detector_that_would_not_see_it_is_refused(spec: str):
    with pytest.raises(ValueError, match="which calibration does not change"):
        parse_detectors(spec)


def test_energy_on_calibrated_logits_is_refused_because_their_energy_is_constant():
    with pytest.raises(ValueError, match="reads the common offset of the logits"):
        parse_detectors("temperature+energy")


def test_a_rectifier_takes_another_head_score():
    (method,) = parse_detectors("react(percentile=95)+gen")
    assert method.detector.hyperparameters["percentile"] == 95
    assert method.detector.hyperparameters["score"] == "gen"
    assert parse_detectors("react+energy")[0].spec == "react"


@pytest.mark.parametrize("spec", ["knn+msp", "react+energy+msp", "temperature+temperature+msp"])
def test_compositions_that_mean_nothing_are_refused(spec: str):
    with pytest.raises(ValueError, match=r"neither a calibrator nor a rectifier|two calibrators"):
        parse_detectors(spec)


def test_the_plain_softmax_is_always_there_and_first():
    assert [c.spec for c in parse_calibrators("temperature")] == ["none", "temperature"]
    assert [c.name for c in parse_calibrators("all")] == list(calibrator_classes())
    assert [c.spec for c in parse_calibrators("")] == ["none"]


def test_a_minus_takes_a_calibrator_out():
    specs = [calibrator.spec for calibrator in parse_calibrators("all,-bbq")]
    assert specs[0] == "none"
    assert set(specs) == {calibrator.spec for calibrator in parse_calibrators("all")} - {"bbq"}
    for wrong in ("temperature,-bbq", "all,-none"):
        with pytest.raises(ValueError, match="takes out a calibrator that was not asked for"):
            parse_calibrators(wrong)
