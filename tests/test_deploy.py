import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ood_toolkit.calibrators import TemperatureCalibrator
from ood_toolkit.deploy import GuardedClassifier
from ood_toolkit.detectors import Detector, EnergyDetector, LiveDetector, MahalanobisDetector, MSPDetector
from ood_toolkit.fitted import NotFitted
from ood_toolkit.models import Classifier


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(27, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def images(count: int, seed: int = 1) -> Tensor:
    return torch.rand(count, 3, 3, 3, generator=torch.Generator().manual_seed(seed))


def test_the_verdict_is_probabilities_score_and_whether_the_score_is_low_enough():
    model = network()
    guarded = MSPDetector().wrap(model).fit_threshold(images(200), 0.1)
    probabilities, score, accept = guarded(images(50, seed=2))
    expected = model(images(50, seed=2)).softmax(dim=1)
    assert torch.allclose(probabilities, expected, atol=1e-6)
    assert torch.allclose(score, 1 - expected.amax(dim=1), atol=1e-6)
    assert torch.equal(accept, score <= guarded.threshold)


def test_a_threshold_keeps_its_false_alarm_rate_within_binomial_error():
    rate, fresh = 0.05, 20_000
    rejected = []
    for seed in range(20):
        guarded = EnergyDetector().wrap(network()).fit_threshold(images(499, seed=100 + seed), rate)
        rejected.append(1 - float(guarded(images(fresh // 20, seed=200 + seed)).accept.float().mean()))
    mean = sum(rejected) / len(rejected)
    # the threshold itself varies like a beta quantile of 499 draws; both sources together, three sigma
    sigma = (rate * (1 - rate) * (1 / fresh + 1 / (20 * 499))) ** 0.5
    assert abs(mean - rate) < 3 * sigma


def test_the_threshold_is_the_conformal_order_statistic():
    scores = torch.arange(1.0, 20.0)  # 19 scores: ceil(20 * 0.9) = 18th smallest
    guarded = EnergyDetector().wrap(network()).fit_threshold(scores.flip(0), 0.1)
    assert float(guarded.threshold) == 18.0


def test_too_few_held_out_rows_for_the_rate_say_how_many_are_needed():
    with pytest.raises(ValueError, match=r"rate of 0\.01 needs 99 held-out rows, got 98"):
        EnergyDetector().wrap(network()).fit_threshold(torch.zeros(98), 0.01)
    EnergyDetector().wrap(network()).fit_threshold(torch.zeros(99), 0.01)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1])
def test_a_rate_lies_strictly_between_0_and_1(rate: float):
    with pytest.raises(ValueError, match="false_alarm_rate"):
        EnergyDetector().wrap(network()).fit_threshold(torch.zeros(99), rate)


def test_nan_scores_are_refused():
    with pytest.raises(ValueError, match="1 of 99 held-out scores are NaN"):
        EnergyDetector().wrap(network()).fit_threshold(torch.tensor([torch.nan] + [0.0] * 98))


def test_without_a_threshold_there_is_no_verdict():
    with pytest.raises(NotFitted, match="no threshold yet; call fit_threshold"):
        EnergyDetector().wrap(network())(images(2))


def test_the_state_dict_carries_detector_calibrator_and_threshold():
    model = network()
    classifier = Classifier(model)
    train = classifier(images(400, seed=3)).with_labels(torch.arange(400) % 4)
    calibrator = TemperatureCalibrator().fit(train.logits, train.labels)
    guarded = MahalanobisDetector().fit(train).wrap(classifier, calibrator=calibrator).fit_threshold(images(99))
    other = MahalanobisDetector().wrap(copy.deepcopy(model), calibrator=TemperatureCalibrator())
    other.load_state_dict(guarded.state_dict())
    for one, two in zip(guarded(images(9, seed=5)), other(images(9, seed=5)), strict=True):
        assert torch.equal(one, two)


class Darkness(LiveDetector):
    name = "darkness"

    def score(self, classifier: Any, images: Tensor) -> Tensor:
        return -images.mean(dim=(1, 2, 3))


def test_a_live_detector_guards_too_but_needs_images_for_its_threshold():
    guarded = Darkness().wrap(network())
    with pytest.raises(ValueError, match="give fit_threshold images or scores"):
        guarded.fit_threshold(guarded.classifier(images(99)))
    verdict = guarded.fit_threshold(images(99))(images(5, seed=2))
    assert torch.equal(verdict.score, -images(5, seed=2).mean(dim=(1, 2, 3)))


def test_a_detector_with_taps_refuses_a_classifier_without_them():
    class Tapped(EnergyDetector):
        name = "tapped"
        taps = ("stage:1",)

    with pytest.raises(ValueError, match=r"tapped needs the taps \['stage:1'\]"):
        GuardedClassifier(Classifier(network()), Tapped())


@pytest.mark.parametrize("detector", [EnergyDetector(), MahalanobisDetector()], ids=lambda detector: detector.name)
def test_an_exported_guard_gives_the_same_verdicts_on_batches_of_its_size(detector: Detector):
    classifier, pixels = Classifier(network()), images(300)
    detector.fit(classifier(pixels).with_labels(torch.arange(300) % 4))
    guarded = detector.wrap(classifier).eval().fit_threshold(pixels)
    with torch.no_grad():
        exported = torch.export.export(guarded, (pixels[:8],), strict=False).module()
        for batch in (pixels[:8], pixels[100:108]):
            for given, expected in zip(exported(batch), guarded(batch), strict=True):
                torch.testing.assert_close(given, expected)
