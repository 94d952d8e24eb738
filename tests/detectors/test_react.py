import numpy as np
import pytest
import torch

from ood_toolkit.detectors.react import ReActDetector
from ood_toolkit.testing import synthetic_outputs


@pytest.mark.parametrize(
    ("key", "percentile"),
    [
        ("openood/ReAct/p=90", 90),
        ("openood-vlm/ReAct/p=90", 90),
        ("pytorch-ood/ReAct/p=90", 90),
        ("pytorch-ood-0.2.0/ReAct/p=90", 90),
        ("oodeel/ReAct/p=90", 90),
        ("detectors/ReAct/p=90", 90),
        ("ninco/ReAct/p=90", 90),
        ("ninco/ReAct/p=99", 99),
    ],
)
def test_it_equals_the_other_tools(golden, key, percentile):
    detector = ReActDetector(percentile=percentile).fit(golden.outputs("fit"))
    golden.check(key, detector(golden.outputs("id")), detector(golden.outputs("ood")))


def test_the_threshold_is_numpy_s_percentile_over_all_numbers():
    train = synthetic_outputs().train
    detector = ReActDetector(percentile=97.3).fit(train)
    assert float(detector.threshold) == pytest.approx(np.percentile(train.features.numpy(), 97.3), rel=1e-6)


def test_a_threshold_above_every_feature_leaves_the_energy():
    data = synthetic_outputs()
    detector = ReActDetector(percentile=90).fit(data.train)
    detector.threshold = torch.tensor(1e9)
    expected = -data.id.head(data.id.features).logsumexp(dim=1)
    torch.testing.assert_close(detector(data.id), expected)
