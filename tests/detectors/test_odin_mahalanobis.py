from dataclasses import replace

import torch

from ood_toolkit.detectors.mahalanobis import MahalanobisDetector
from ood_toolkit.detectors.odin_mahalanobis import ODINMahalanobisDetector
from ood_toolkit.testing import SyntheticClassifier, check_detector, synthetic_images


def test_it_equals_pytorch_ood_up_to_scale(golden, golden_classifier, golden_images):
    classifier = golden_classifier()
    detector = ODINMahalanobisDetector(eps=0.0014).fit(golden_images(classifier, "fit"))
    scores = [detector(classifier, golden.images[f"images_{split}"]) for split in ("id", "ood")]
    # it halves the distance and does not divide the covariance by the 200 rows
    golden.check("pytorch-ood/MahalanobisODIN/eps=0.0014", *scores, scale=1 / 400)


def test_without_a_step_it_is_mahalanobis():
    classifier = SyntheticClassifier()
    images, labels = synthetic_images("train", rows=200)
    train = replace(classifier(images), labels=labels)
    probes = synthetic_images("ood")[0]
    expected = MahalanobisDetector().fit(train)(classifier(probes))
    torch.testing.assert_close(ODINMahalanobisDetector(eps=0).fit(train)(classifier, probes), expected)


def test_the_step_is_along_the_numerical_gradient():
    classifier = SyntheticClassifier().double()
    images, labels = synthetic_images("train", rows=200)
    train = replace(classifier(images.double()), labels=labels)
    probe = synthetic_images("id")[0][:1].double()
    still, eps = MahalanobisDetector().fit(train), 1e-4
    slope = torch.zeros_like(probe)
    for position in range(probe.numel()):
        nudge = torch.zeros_like(probe).flatten()
        nudge[position] = 1e-6
        nudge = nudge.view_as(probe)
        slope.view(-1)[position] = (still(classifier(probe + nudge)) - still(classifier(probe - nudge))).item()
    slope[slope.abs() < 1e-9] = 0  # a dead ReLU leaves rounding
    expected = still(classifier(probe - eps * slope.sign()))
    moving = ODINMahalanobisDetector(eps=eps).fit(train)
    torch.testing.assert_close(moving(classifier, probe), expected, rtol=1e-9, atol=0)
    assert (moving(classifier, probe) < still(classifier(probe))).all()


def test_it_keeps_the_laws():
    check_detector(ODINMahalanobisDetector)
