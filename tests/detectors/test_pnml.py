import numpy as np
import pytest
import torch

from ood_toolkit.detectors import PNMLDetector
from ood_toolkit.detectors.pnml import regret
from ood_toolkit.testing import synthetic_outputs


def test_the_regret_written_out():
    data = synthetic_outputs().to(torch.float64)
    x = data.train.features.numpy()
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    inverse = np.linalg.inv(x.T @ x)
    weight, bias = data.train.head.weight.numpy(), data.train.head.bias.numpy()
    got = PNMLDetector().fit(data.train)(data.ood)
    for row, score in zip(data.ood.features.numpy(), got.tolist(), strict=True):
        f = row / np.linalg.norm(row)
        p = np.exp(weight @ f + bias)
        p /= p.sum()
        h = f @ inverse @ f
        power = h / (1 + h)
        normaliser = sum(q / (q + q**power * (1 - q)) for q in p)
        assert score == pytest.approx(np.log(normaliser) / np.log(6), rel=1e-9)


def test_no_leverage_costs_nothing_and_full_leverage_makes_every_class_possible():
    logits = torch.randn(10, 4, dtype=torch.float64)
    nothing, full = torch.zeros(10, dtype=torch.float64), torch.full((10,), 1e12, dtype=torch.float64)
    # at κ = 0 each term is p; at κ = 1 each is 1 / (2 − p)
    assert torch.allclose(regret(logits, nothing), torch.zeros(10, dtype=torch.float64), atol=1e-12)
    p = logits.softmax(dim=1)
    assert torch.allclose(regret(logits, full), (1 / (2 - p)).sum(dim=1).log(), atol=1e-9)


def test_float32_keeps_its_precision_where_the_softmax_is_sure():
    logits = torch.stack([torch.linspace(10, 60, 50), torch.zeros(50), torch.linspace(-1, 1, 50)], dim=1)
    leverage = torch.linspace(0.01, 0.5, 50)
    exact = regret(logits.double(), leverage.double())
    assert torch.allclose(regret(logits, leverage).double(), exact, rtol=1e-4, atol=0)


def test_features_without_full_rank_use_the_pseudo_inverse():
    data = synthetic_outputs().to(torch.float64)
    few = data.train.rows(slice(0, 10))
    x = torch.nn.functional.normalize(few.features, dim=1).numpy()
    detector = PNMLDetector().fit(few)
    inverse = (detector.projection @ detector.projection.T).numpy()
    assert np.allclose(inverse, np.linalg.pinv(x.T @ x, rcond=1e-13), rtol=1e-6, atol=1e-8)
