import pytest
import torch

from ood_toolkit.detectors.nnguide import NNGuideDetector
from ood_toolkit.testing import check_detector, synthetic_outputs


@pytest.mark.parametrize("tool", ["official-nnguide", "openood", "openood-vlm", "pytorch-ood"])
@pytest.mark.parametrize("k", [10, 50])
def test_it_equals_the_authors_code_and_the_other_tools(golden, tool, k):
    detector = NNGuideDetector(k=k).fit(golden.outputs("fit"))
    golden.check(f"{tool}/NNGuide/k={k}/alpha=1", detector(golden.outputs("id")), detector(golden.outputs("ood")))


def test_a_share_of_the_rows_is_drawn_by_the_seed_and_each_row_once():
    data = synthetic_outputs()
    full = NNGuideDetector().fit(data.train).bank
    some, same, other = (NNGuideDetector(alpha=0.25, seed=s).fit(data.train).bank for s in (3, 3, 4))
    assert some.shape[0] == len(data.train) // 4
    assert torch.equal(some, same)
    assert not torch.equal(some, other)
    rows = [int((full == row).all(dim=1).nonzero()) for row in some]
    assert rows == sorted(set(rows))


def test_more_neighbours_than_rows_are_refused():
    with pytest.raises(ValueError, match="720 rows of the bank, got 721"):
        NNGuideDetector(k=721).fit(synthetic_outputs().train)


def test_a_subset_keeps_the_laws():
    check_detector(NNGuideDetector(k=5, alpha=0.5))
