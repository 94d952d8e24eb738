import pytest
import torch

from ood_toolkit.detectors.scale import SCALEDetector
from ood_toolkit.testing import check_detector, synthetic_outputs


@pytest.mark.parametrize("percentile", [65, 85, 95])
def test_it_is_the_head_on_features_scaled_one_by_one(percentile):
    data = synthetic_outputs()
    detector = SCALEDetector(percentile=percentile).fit(data.train)
    for row in range(12):
        features = data.id.features[row].double()
        kept = len(features) - round(len(features) * percentile / 100)
        ratio = features.sum() / features.sort(descending=True).values[:kept].sum()
        logits = data.id.head.weight.double() @ (features * ratio.exp()) + data.id.head.bias
        assert float(detector(data.id.rows([row]))) == pytest.approx(-float(logits.logsumexp(0)), rel=1e-5)


def test_scaling_the_logits_is_scaling_the_features(golden):
    detector = SCALEDetector(percentile=65).fit(golden.outputs("fit"))
    outputs = golden.outputs("id")
    through_the_head = torch.nn.functional.linear(detector.rectify(outputs.features), detector.weight, detector.bias)
    torch.testing.assert_close(detector.rectified_logits(outputs), through_the_head, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("percentile", [0, 65])
def test_other_percentiles_keep_the_laws(percentile):
    check_detector(SCALEDetector(percentile=percentile))
