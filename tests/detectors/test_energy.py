import pytest
import torch

from ood_toolkit.detectors import EnergyDetector
from ood_toolkit.detectors.energy import energy

PEERS = ["detectors", "fd-shifts", "ninco", "oodeel", "openood", "openood-vlm", "pytorch-ood", "torch-uncertainty"]


@pytest.mark.parametrize("peer", PEERS)
def test_it_equals_the_other_tools(golden, peer):
    detector = EnergyDetector()
    golden.check(f"{peer}/Energy/T=1", detector(golden.outputs("id")), detector(golden.outputs("ood")))


def test_the_sum_of_exponentials_written_out():
    logits = torch.randn(20, 7, dtype=torch.float64)
    for row, score in zip(logits.tolist(), energy(logits, temperature=2.5).tolist(), strict=True):
        assert score == pytest.approx(-2.5 * float(torch.tensor([z / 2.5 for z in row]).double().exp().sum().log()))


def test_a_common_offset_moves_the_score_by_that_offset():
    logits = torch.randn(20, 7, dtype=torch.float64)
    assert torch.allclose(energy(logits + 3), energy(logits) - 3)
