import math

import pytest
import scipy.stats
import torch

from ood_toolkit.detectors import EntropyDetector
from ood_toolkit.outputs import Outputs


@pytest.mark.parametrize("peer", ["detectors", "fd-shifts", "oodeel", "pytorch-ood", "torch-uncertainty"])
def test_it_equals_the_other_tools(golden, peer):
    detector = EntropyDetector()
    golden.check(f"{peer}/Entropy", detector(golden.outputs("id")), detector(golden.outputs("ood")))


def test_it_equals_scipy_from_flat_to_certain():
    logits = torch.randn(50, 9, dtype=torch.float64) * torch.logspace(-3, 1.3, 50, dtype=torch.float64).unsqueeze(1)
    expected = scipy.stats.entropy(logits.softmax(dim=1).numpy(), axis=1)
    assert torch.allclose(EntropyDetector()(Outputs.from_logits(logits)), torch.from_numpy(expected), rtol=1e-9)


def test_probabilities_of_zero_add_nothing():
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -1e4, -1e4], [1e30, 0.0, 0.0]])
    assert EntropyDetector()(Outputs.from_logits(logits)).tolist() == pytest.approx([math.log(2), 0.0, 0.0])


def test_near_certainty_float32_keeps_its_relative_precision():
    logits = torch.stack([torch.linspace(15, 60, 40), torch.zeros(40)], dim=1)
    q = torch.special.expit(-logits[:, 0].double())
    expected = -torch.special.xlogy(q, q) - (1 - q) * torch.log1p(-q)
    got = EntropyDetector()(Outputs.from_logits(logits)).double()
    assert ((got - expected).abs() / expected).max() < 1e-5
