import numpy as np
import pytest
import torch

from ood_toolkit.detectors.vra import VRADetector
from ood_toolkit.testing import check_detector, synthetic_outputs


@pytest.mark.parametrize("tool", ["openood", "pytorch-ood"])
def test_each_variant_equals_its_tool(golden, tool):
    detector = VRADetector(low_percentile=10, high_percentile=90, variant=tool.replace("-", "_"))
    detector.fit(golden.outputs("fit"))
    golden.check(f"{tool}/VRA/low=10/high=90", detector(golden.outputs("id")), detector(golden.outputs("ood")))


@pytest.mark.parametrize("amplify", [0.0, 0.4])
def test_the_paper_s_rectification_number_by_number(amplify):
    data = synthetic_outputs()
    low, high = np.quantile(data.train.features.numpy(), [0.6, 0.95], axis=0)
    features = data.id.features[:20]
    expected = torch.empty_like(features)
    for i in range(features.shape[0]):
        for d in range(features.shape[1]):
            z = float(features[i, d])
            expected[i, d] = 0.0 if z < low[d] else high[d] if z > high[d] else z + amplify
    detector = VRADetector(amplify=amplify).fit(data.train)
    torch.testing.assert_close(detector.rectify(features), expected)


@pytest.mark.parametrize("variant", ["openood", "pytorch_ood"])
def test_variants_keep_the_laws(variant):
    check_detector(VRADetector(low_percentile=5.0, high_percentile=90.0, variant=variant))


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="openod"):
        VRADetector(variant="openod")
