import math

import numpy as np
import pytest
import torch

from ood_toolkit.detectors import IgeoodDetector
from ood_toolkit.detectors.igeood import roots
from ood_toolkit.testing import synthetic_outputs


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_sum_of_distances_to_the_softmax_of_mean_logits_written_out(temperature):
    data = synthetic_outputs().to(torch.float64)
    centroids = [data.train.logits[data.train.labels == c].mean(dim=0) for c in range(6)]
    got = IgeoodDetector(temperature, centroids="mean").fit(data.train)(data.id)
    for row, score in zip(data.id.logits, got.tolist(), strict=True):
        p = (row / temperature).softmax(dim=0).numpy()
        total = 0.0
        for centroid in centroids:
            q = (centroid / temperature).softmax(dim=0).numpy()
            total += 2 * math.acos(min(1.0, float(np.sqrt(p * q).sum())))
        assert score == pytest.approx(-total, rel=1e-7)


def test_the_median_minimises_the_mean_distance_of_its_class():
    data = synthetic_outputs().to(torch.float64)
    detector = IgeoodDetector(temperature=3.0).fit(data.train)
    for c in range(6):
        points = roots(data.train.logits[data.train.labels == c], 3.0)
        centre = detector.centres[c].clone().requires_grad_(True)
        on_sphere = centre / centre.norm()
        loss = (2 * (points @ on_sphere).clamp_max(1 - 1e-12).arccos()).mean()
        (gradient,) = torch.autograd.grad(loss, centre)
        assert float(gradient.norm()) < 1e-4
        mean = torch.nn.functional.normalize(points.mean(dim=0), dim=0)
        assert float(loss.detach()) < float((2 * (points @ mean).clamp_max(1.0).arccos()).mean())


def test_a_row_on_its_centroid_is_at_no_distance_from_it():
    data = synthetic_outputs()
    detector = IgeoodDetector(centroids="mean").fit(data.train)
    at_centre = data.train.rows(slice(0, 1))
    detector.centres = roots(at_centre.logits, 1.0)
    assert float(detector(at_centre)) == pytest.approx(0.0, abs=1e-6)


def test_a_missing_class_is_refused_or_skipped():
    train = synthetic_outputs().train
    train = train.rows(train.labels != 2)
    with pytest.raises(ValueError, match=r"classes \[2\]"):
        IgeoodDetector().fit(train)
    assert len(IgeoodDetector(absent="skip").fit(train).centres) == 5


def test_an_unknown_kind_of_centroid_is_refused():
    with pytest.raises(ValueError, match="'mode'"):
        IgeoodDetector(centroids="mode")
