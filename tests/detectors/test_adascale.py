import math
from dataclasses import replace

import pytest
import torch

from ood_toolkit.detectors.adascale import (
    AdaSCALEADetector,
    AdaSCALELDetector,
    nudged_features,
    row_concentration,
    trivial_change,
)
from ood_toolkit.detectors.lts import LTSDetector
from ood_toolkit.testing import SyntheticClassifier, synthetic_images, synthetic_outputs

KINDS = [AdaSCALEADetector, AdaSCALELDetector]


def seen(detector, classifier, images):
    """Outputs with the tap that the detector asks for."""
    nudged = nudged_features(classifier, images, detector.pixels, detector.epsilon)
    return replace(classifier(images), taps={detector.taps[0]: nudged})


def fitted(kind, classifier, **settings):
    images = synthetic_images("train", rows=60)[0].to(next(classifier.parameters()).dtype)
    detector = kind(**settings)
    return detector.fit(seen(detector, classifier, images)), images


def literal_strangeness(detector, classifier, image):
    """One image, one number at a time: the changed features among the largest, and how far they moved."""
    x = image.clone().requires_grad_()
    outputs = classifier.differentiate(x.unsqueeze(0))
    outputs.logits[0, int(outputs.logits.argmax())].backward(inputs=[x])
    gradient = x.grad.flatten()
    trivial = sorted(range(len(gradient)), key=lambda i: abs(float(gradient[i])))
    moved = image.flatten().clone()
    for i in trivial[: int(len(gradient) * detector.pixels)]:
        moved[i] += detector.epsilon * math.copysign(1.0, float(gradient[i])) if gradient[i] != 0 else 0.0
    features = outputs.features[0].detach()
    shifted = classifier(moved.view_as(image).unsqueeze(0)).features[0]
    order = sorted(range(len(features)), key=lambda d: -float(features[d]))
    stable = max(1, int(len(features) * detector.stable_percent / 100))
    shift = max(1, int(len(features) * detector.shift_percent / 100))
    c = sum(max(0.0, float(shifted[d])) for d in order[:stable])
    q = sum(abs(float(features[d] - shifted[d])) for d in order[:shift])
    return c + detector.shift_weight * q, outputs.logits[0].detach(), features


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_authors_recipe_image_by_image(kind):
    classifier = SyntheticClassifier().double()
    detector, images = fitted(kind, classifier, low_percentile=60.0, high_percentile=90.0, epsilon=0.05)
    reference = [literal_strangeness(detector, classifier, image)[0] for image in images]
    torch.testing.assert_close(detector.reference, torch.tensor(sorted(reference), dtype=torch.float64))
    queries = torch.cat([synthetic_images("id")[0][:4], synthetic_images("ood")[0][:4]]).double()
    for image, score in zip(queries, detector(seen(detector, classifier, queries)), strict=True):
        strangeness, logits, features = literal_strangeness(detector, classifier, image)
        share = sum(value <= strangeness for value in reference) / len(reference)
        percentile = 60.0 + (1 - share) * 30.0
        kept = max(1, len(features) - round(len(features) * percentile / 100))
        positive = sorted((max(0.0, float(f)) for f in features), reverse=True)
        ratio = sum(positive) / sum(positive[:kept])
        head = classifier.head
        scaled = (
            head.weight @ (features * math.exp(ratio)) + head.bias if kind is AdaSCALEADetector else logits * ratio**2
        )
        assert float(score) == pytest.approx(-float(scaled.logsumexp(0)), rel=1e-6)


def test_only_the_pixels_of_smallest_gradient_change():
    gradient = torch.tensor([[3.0, -0.1, 0.2, -4.0, 0.0, 5.0, -6.0, 7.0]]).view(1, 2, 2, 2)
    assert trivial_change(gradient, 0.375).flatten().tolist() == [0, -1, 1, 0, 0, 0, 0, 0]


def test_concentration_with_one_percentile_for_all_is_that_of_scale():
    from ood_toolkit.detectors.ash import concentration

    features = torch.rand(30, 64)
    torch.testing.assert_close(row_concentration(features, torch.full((30,), 85.0)), concentration(features, 85.0))


def test_the_tap_names_what_differs_from_the_defaults():
    assert AdaSCALEADetector().taps == ("nudged_features",)
    assert AdaSCALELDetector(pixels=0.1).taps == ("nudged_features(pixels=0.1)",)


def test_a_nudge_leaves_the_model_and_the_gradient_mode_alone():
    classifier, images = SyntheticClassifier(), synthetic_images("id")[0]
    before = {name: p.clone() for name, p in classifier.named_parameters()}
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert not nudged_features(classifier, images).requires_grad
            assert torch.is_grad_enabled() == enabled
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in classifier.named_parameters())
    assert images.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_no_class_score_higher(kind):
    classifier = SyntheticClassifier()
    detector, _ = fitted(kind, classifier)
    ours, theirs = (detector(seen(detector, classifier, synthetic_images(split)[0])) for split in ("id", "ood"))
    assert (theirs.unsqueeze(1) > ours).double().mean() > 0.75


def test_a_row_as_strange_as_the_strangest_training_row_has_the_lowest_percentile():
    rows = synthetic_outputs().id.rows([0]).to(torch.float64)
    detector = AdaSCALELDetector(low_percentile=50.0, high_percentile=90.0)
    rows = replace(rows, taps={detector.taps[0]: rows.features})
    torch.testing.assert_close(detector.fit(rows)(rows), LTSDetector(percentile=50.0)(rows))
