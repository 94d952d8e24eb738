import math

import numpy as np
import pytest
import torch

from ood_toolkit.detectors.weiper import WeiPerDetector, perturbed_weights, row_histograms, smoothed
from ood_toolkit.testing import check_detector, synthetic_outputs


def literal_divergence(p, q, floor):
    p, q = [x + floor for x in p], [x + floor for x in q]
    p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    return sum(a * math.log(a / b) + b * math.log(b / a) for a, b in zip(p, q, strict=True))


def literal_smoothing(density, size):
    left = (size - 1) // 2
    window = range(-left, size - left)
    last = len(density) - 1
    return [sum(density[min(max(i + o, 0), last)] for o in window) / size for i in range(len(density))]


def test_it_is_the_authors_recipe_row_by_row():
    data = synthetic_outputs(fit_rows=50).to(torch.float64)
    settings = {"repeats": 4, "distance": 1.5, "bins": 20, "smoothing": 4, "smoothing_perturbed": 5}
    detector = WeiPerDetector(**settings, lambda_1=2.0, lambda_2=0.5, rows=None).fit(data.train)
    heads = list(perturbed_weights(data.train.head.weight, 1.5, 4, 0))

    def describe(features):
        logits = torch.cat([features @ w.T + data.train.head.bias for w in heads], dim=1)
        return features.numpy(), logits.numpy()

    ranges = [(part.min(), part.max()) for part in describe(data.train.features)]

    def densities(features):
        parts = zip(describe(features), ranges, strict=True)
        return [[np.histogram(r, bins=20, range=span)[0] / len(r) for r in part] for part, span in parts]

    means = [np.mean(part, axis=0) for part in densities(data.train.features)]
    for row in range(6):
        features = data.ood.features[row : row + 1]
        plain, perturbed = (part[0] for part in densities(features))
        first = literal_divergence(means[0], literal_smoothing(plain, 4), 0.01)
        second = literal_divergence(means[1], literal_smoothing(perturbed, 5), 0.025)
        logits = describe(features)[1].reshape(4, -1)
        msp = np.mean([torch.as_tensor(z).softmax(0).max() for z in logits])
        expected = first + 2.0 * second - 0.5 * msp
        assert float(detector(data.ood.rows([row]))) == pytest.approx(expected, rel=1e-9)


def test_noise_has_the_asked_relative_length():
    weight = torch.randn(5, 40)
    for perturbed in perturbed_weights(weight, 2.1, 3, seed=1):
        torch.testing.assert_close((perturbed - weight).norm(dim=1), 2.1 * weight.norm(dim=1))


def test_histograms_are_numpy_s():
    values = torch.rand(6, 200, dtype=torch.float64) * 3 - 1
    expected = np.stack([np.histogram(row, bins=13, range=(-0.5, 1.5))[0] for row in values.numpy()])
    ours = row_histograms(values, torch.tensor(-0.5), torch.tensor(1.5), 13)
    assert np.array_equal(ours.numpy(), expected)


@pytest.mark.parametrize("size", [1, 4, 5, 20])
def test_smoothing_is_the_authors_convolution(size):
    density = torch.rand(3, 30)
    layer = torch.nn.Conv1d(1, 1, size, padding="same", padding_mode="replicate", bias=False)
    layer.weight.data.fill_(1 / size)
    expected = layer(density.unsqueeze(1)).squeeze(1).detach()
    torch.testing.assert_close(smoothed(density, size), expected)


def test_other_hyperparameters_keep_the_laws():
    check_detector(WeiPerDetector(repeats=3, bins=50, smoothing=4, smoothing_perturbed=40, rows=None))
