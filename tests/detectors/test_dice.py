import numpy as np
import pytest
import torch

from ood_toolkit.detectors.dice import DICEDetector, salient_weights
from ood_toolkit.testing import synthetic_outputs


@pytest.mark.parametrize("tool", ["openood", "openood-vlm", "pytorch-ood", "pytorch-ood-0.2.0"])
def test_it_equals_the_other_tools(golden, tool):
    detector = DICEDetector(percentile=70).fit(golden.outputs("fit"))
    golden.check(f"{tool}/DICE/p=70", detector(golden.outputs("id")), detector(golden.outputs("ood")))


@pytest.mark.parametrize("percentile", [0, 12.5, 70, 90, 99.9])
def test_the_mask_is_numpy_s_percentile_of_the_contributions(percentile):
    weight, mean = torch.randn(7, 11), torch.rand(11)
    contributions = (weight * mean).double().numpy()
    expected = contributions > np.percentile(contributions, percentile)
    assert np.array_equal(salient_weights(weight, mean, percentile).numpy(), expected)


def test_it_is_the_literal_sum_over_kept_weights():
    data = synthetic_outputs()
    detector = DICEDetector(percentile=80).fit(data.train)
    head, mean = data.train.head, data.train.features.mean(dim=0)
    kept = (head.weight * mean).flatten().sort().values
    threshold = np.percentile(kept.numpy(), 80)
    for row in range(5):
        logits = torch.stack(
            [
                sum(
                    w * f
                    for w, f, m in zip(head.weight[c], data.id.features[row], mean, strict=True)
                    if float(w * m) > threshold
                )
                + head.bias[c]
                for c in range(6)
            ]
        )
        assert float(detector(data.id.rows([row]))) == pytest.approx(-float(logits.logsumexp(0)), rel=1e-4)


def test_dropping_no_weight_but_the_smallest_is_nearly_the_energy():
    data = synthetic_outputs()
    detector = DICEDetector(percentile=0).fit(data.train)
    assert int((detector.weight == 0).sum()) == 1
