import pytest
import scipy.stats
import torch

from ood_toolkit.detectors import KLMatchingDetector
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing import synthetic_outputs


@pytest.mark.parametrize("peer", ["ninco", "openood", "openood-vlm", "pytorch-ood"])
def test_it_equals_the_other_tools(golden, peer):
    detector = KLMatchingDetector().fit(golden.outputs("fit"))
    golden.check(f"{peer}/KLM", detector(golden.outputs("id")), detector(golden.outputs("ood")))


def test_the_minimum_over_classes_written_out_with_scipy():
    data = synthetic_outputs().to(torch.float64)
    p, predicted = data.train.logits.softmax(dim=1), data.train.logits.argmax(dim=1)
    templates = [p[predicted == k].mean(dim=0).numpy() for k in range(6)]
    got = KLMatchingDetector().fit(data.train)(data.ood)
    for row, score in zip(data.ood.logits.softmax(dim=1).numpy(), got.tolist(), strict=True):
        assert score == pytest.approx(min(scipy.stats.entropy(row, d) for d in templates), rel=1e-9)


def test_a_class_that_is_never_predicted_is_left_out():
    logits = torch.tensor([[4.0, 0.0, 1.0], [3.0, 1.0, 0.0], [0.0, 5.0, 1.0]])
    detector = KLMatchingDetector().fit(Outputs.from_logits(logits))
    assert len(detector.log_templates) == 2
    assert float(detector(Outputs.from_logits(logits[2:]))) == pytest.approx(0, abs=1e-6)


def test_labels_are_not_used():
    data = synthetic_outputs()
    wrong = data.train.with_labels(data.train.labels.roll(1))
    assert torch.equal(KLMatchingDetector().fit(wrong)(data.id), KLMatchingDetector().fit(data.train)(data.id))
