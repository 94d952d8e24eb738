import pytest

from ood_toolkit.detectors import MaxLogitDetector

PEERS = ["detectors", "fd-shifts", "ninco", "oodeel", "openood", "openood-vlm", "pytorch-ood", "torch-uncertainty"]


@pytest.mark.parametrize("peer", PEERS)
def test_it_equals_the_other_tools(golden, peer):
    detector = MaxLogitDetector()
    golden.check(f"{peer}/MaxLogit", detector(golden.outputs("id")), detector(golden.outputs("ood")))
