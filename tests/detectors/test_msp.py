import pytest
import torch

from ood_toolkit.detectors import MSPDetector
from ood_toolkit.detectors.msp import one_minus_msp
from ood_toolkit.outputs import Outputs

PEERS = ["detectors", "fd-shifts", "ninco", "oodeel", "openood", "openood-vlm", "pytorch-ood", "torch-uncertainty"]


@pytest.mark.parametrize("peer", PEERS)
def test_it_is_one_minus_the_other_tools_msp(golden, peer):
    detector = MSPDetector()
    golden.check(f"{peer}/MSP", detector(golden.outputs("id")), detector(golden.outputs("ood")), offset=-1.0)


def test_rows_on_which_the_softmax_rounds_to_one_keep_their_order():
    margins = torch.linspace(17, 80, 64)
    scores = one_minus_msp(torch.stack([margins, torch.zeros(64)], dim=1))
    assert len(scores.unique()) == 64
    assert torch.equal(scores.argsort(descending=True), torch.arange(64))
    expected = torch.special.expit(-margins.double())
    assert ((scores.double() - expected).abs() / expected).max() < 1e-5


def test_tied_largest_logits_and_impossible_classes():
    logits = torch.tensor([[1.0, 1.0], [3.0, -torch.inf]])
    assert torch.equal(MSPDetector()(Outputs.from_logits(logits)), torch.tensor([0.5, 0.0]))
