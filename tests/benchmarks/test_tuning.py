import pytest
import torch
from sklearn.metrics import roc_auc_score

from ood_toolkit.benchmarks.methods import parse_detectors
from ood_toolkit.benchmarks.tuning import candidates, tune
from ood_toolkit.detectors import Detector, GENDetector, KNNDetector, MSPDetector
from ood_toolkit.outputs import Outputs
from ood_toolkit.registry import detector_classes
from ood_toolkit.testing import synthetic_outputs


def test_every_value_of_a_sweep_is_accepted_and_belongs_to_a_parameter():
    swept = [kind for kind in detector_classes().values() if issubclass(kind, Detector) and kind.sweep]
    assert len(swept) >= 12
    for kind in swept:
        assert set(kind.sweep) <= set(kind().hyperparameters)
        for name, values in kind.sweep.items():
            for value in values:
                assert kind(**{name: value}).hyperparameters[name] == value


def test_the_defaults_come_first_and_no_setting_twice():
    specs = [candidate.spec for candidate in candidates(GENDetector())]
    assert specs[0] == "gen"
    assert len(specs) == len(set(specs)) == 42


def test_what_the_user_set_is_left_alone():
    assert {candidate.hyperparameters["gamma"] for candidate in candidates(GENDetector(gamma=0.7))} == {0.7}


def test_the_chosen_setting_has_the_highest_auroc_of_a_plain_loop():
    splits = synthetic_outputs()
    train, known, unknown = splits.train, splits.id, splits.ood
    best, trials = tune(KNNDetector(), train, known, unknown)
    truth = [0] * len(known) + [1] * len(unknown)
    expected = {}
    for k in (50, 100, 200, 500, 1000):
        if k > len(train):
            continue
        fitted = KNNDetector(k=k).fit(train)
        expected[fitted.spec] = roc_auc_score(truth, torch.cat([fitted(known), fitted(unknown)]).numpy())
    assert {t.spec: t.auroc for t in trials if t.auroc is not None} == pytest.approx(expected)
    assert expected[best.spec] == max(expected.values())
    torch.testing.assert_close(best(unknown), KNNDetector(**best.hyperparameters).fit(train)(unknown))


def test_a_setting_that_cannot_be_fitted_is_named_with_its_reason_and_passed_over():
    splits = synthetic_outputs()
    few = splits.train.rows(slice(0, 120))
    _, trials = tune(KNNDetector(), few, splits.id, splits.ood)
    failed = [trial for trial in trials if trial.auroc is None]
    assert {trial.spec for trial in failed} == {"knn(k=200)", "knn(k=500)", "knn(k=1000)"}
    assert all(trial.reason for trial in failed)


def test_equally_good_settings_leave_the_default():
    logits = torch.tensor([[9.0, 0.0], [8.0, 0.0], [0.0, 0.1], [0.2, 0.0]], dtype=torch.float64)
    known, unknown = Outputs.from_logits(logits[:2]), Outputs.from_logits(logits[2:])
    best, trials = tune(GENDetector(), known, known, unknown)
    assert {trial.auroc for trial in trials} == {1.0}
    assert best.spec == "gen"


def test_no_usable_setting_is_an_error():
    splits = synthetic_outputs()
    with pytest.raises(ValueError, match="none of 5 settings of knn"):
        tune(KNNDetector(), splits.train.rows(slice(0, 3)), splits.id, splits.ood)


def test_tuned_all_stands_for_the_detectors_with_a_sweep():
    methods = parse_detectors("tuned+all")
    assert {"tuned+knn", "tuned+gen", "tuned+react"} <= {method.spec for method in methods}
    assert all(method.tuned and not method.chosen and method.detector.sweep for method in methods)  # pyright: ignore


def test_a_rectifier_with_another_head_score_can_be_tuned():
    (method,) = parse_detectors("tuned+react+gen")
    assert method.tuned
    assert method.detector.hyperparameters["score"] == "gen"


@pytest.mark.parametrize("spec", ["tuned+msp", "tuned+odin"])
def test_what_has_no_sweep_cannot_be_tuned(spec: str):
    assert not MSPDetector.sweep
    with pytest.raises(ValueError, match=r"has no sweep to choose from; these have: .*knn"):
        parse_detectors(spec)
