from dataclasses import replace

import pytest
import torch

from ood_toolkit.detectors.she import SHEDetector
from ood_toolkit.outputs import UNKNOWN
from ood_toolkit.testing import check_detector, synthetic_outputs


@pytest.mark.parametrize(
    ("tool", "metric"),
    [
        ("openood", "inner_product"),
        ("openood", "euclidean"),
        ("openood", "cosine"),
        ("openood-vlm", "inner_product"),
        ("pytorch-ood", "inner_product"),
        ("pytorch-ood-0.2.0", "inner_product"),
    ],
)
def test_it_equals_the_other_tools(golden, tool, metric):
    detector = SHEDetector(metric=metric, absent="error").fit(golden.outputs("fit"))
    golden.check(f"{tool}/SHE/metric={metric}", detector(golden.outputs("id")), detector(golden.outputs("ood")))


def test_only_rows_that_the_model_gets_right_enter_a_pattern():
    train = synthetic_outputs().train
    detector = SHEDetector().fit(train)
    for c in range(train.classes):
        right = [f for f, y, z in zip(train.features, train.labels, train.logits, strict=True) if y == c == z.argmax()]
        torch.testing.assert_close(detector.patterns[c], torch.stack(right).mean(dim=0))
    assert int((~train.correct).sum()) > 0


def test_a_class_never_right_takes_the_mean_pattern_or_is_refused():
    train = synthetic_outputs().train
    unlearnt = replace(train, labels=torch.where(train.labels == 2, UNKNOWN, train.labels))
    right = unlearnt.features[unlearnt.correct].mean(dim=0)
    torch.testing.assert_close(SHEDetector().fit(unlearnt).patterns[2], right)
    with pytest.raises(ValueError, match=r"classes \[2\] have none"):
        SHEDetector(absent="error").fit(unlearnt)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_other_metrics_keep_the_laws(metric):
    check_detector(SHEDetector(metric=metric))
