import numpy as np
import pytest
import torch

from ood_toolkit.detectors import GENDetector
from ood_toolkit.outputs import Outputs


@pytest.mark.parametrize(("gamma", "top"), [(0.1, 100), (0.1, 5), (0.5, 3), (1.0, 12)])
def test_the_paper_s_sum_written_out(gamma, top):
    logits = 3 * torch.randn(40, 12, dtype=torch.float64)
    got = GENDetector(gamma=gamma, top=top)(Outputs.from_logits(logits))
    for row, score in zip(logits.numpy(), got.tolist(), strict=True):
        p = np.exp(row - row.max())
        p = np.sort(p / p.sum())[::-1][:top]
        assert score == pytest.approx(float((p**gamma * (1 - p) ** gamma).sum()), rel=1e-10)


def test_float32_equals_float64_where_the_softmax_saturates():
    logits = torch.cat([torch.linspace(10, 90, 60).unsqueeze(1), torch.randn(60, 8)], dim=1)
    double = GENDetector()(Outputs.from_logits(logits.double()))
    single = GENDetector()(Outputs.from_logits(logits))
    assert torch.allclose(single.double(), double, rtol=1e-5)
    # p = 1 − 4e-8 has rounded to 1 by 17 logit units: the term of the largest class would be lost
    assert len(single.unique()) == 60


def test_an_impossible_class_adds_nothing():
    with_it = GENDetector()(Outputs.from_logits(torch.tensor([[1.0, 0.0, -torch.inf]])))
    without = GENDetector()(Outputs.from_logits(torch.tensor([[1.0, 0.0]])))
    assert torch.equal(with_it, without)
