from dataclasses import replace

import pytest
import torch

from ood_toolkit.detectors.fdbd import FDBDDetector, boundary_widths
from ood_toolkit.testing import check_detector, synthetic_outputs


def exact(outputs):
    """The logits in float64 too, which `.to` alone leaves rounded to float32."""
    return replace(outputs, logits=outputs.head(outputs.features))


@pytest.mark.parametrize("normaliser", ["centre", "origin", "none"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_the_distance_to_each_boundary_summed_in_a_loop(golden, reduction, normaliser):
    fit, rows = golden.outputs("fit", torch.float64), exact(golden.outputs("ood", torch.float64).rows(range(10)))
    detector = FDBDDetector(reduction=reduction, normaliser=normaliser).fit(fit)
    weight, mean = fit.head.weight, fit.features.mean(dim=0)
    for row, score in zip(rows.features, detector(rows), strict=True):
        logits = fit.head(row.unsqueeze(0)).squeeze(0)
        y = int(logits.argmax())
        total = sum(
            float((logits[y] - logits[c]) / (weight[y] - weight[c]).norm()) for c in range(len(weight)) if c != y
        )
        total /= len(weight) - 1 if reduction == "mean" else 1
        total /= {"centre": float((row - mean).norm()), "origin": float(row.norm()), "none": 1.0}[normaliser]
        assert float(score) == pytest.approx(-total, rel=1e-9)


def test_a_point_moved_by_the_distance_lies_on_the_boundary():
    outputs = exact(synthetic_outputs().id.to(torch.float64))
    head, row, logits = outputs.head, outputs.features[0], outputs.logits[0]
    y = int(logits.argmax())
    for c in range(len(logits)):
        if c == y:
            continue
        normal = head.weight[y] - head.weight[c]
        distance = (logits[y] - logits[c]) / boundary_widths(head.weight, torch.tensor([y]))[0, c]
        moved = head((row - distance * normal / normal.norm()).unsqueeze(0))[0]
        assert float(moved[y]) == pytest.approx(float(moved[c]), abs=1e-9)


def test_widths_are_those_of_cdist_and_1_between_equal_weights():
    weight = torch.randn(30, 50)
    weight[7] = weight[3]
    expected = torch.cdist(weight.double(), weight.double())
    expected[expected < 1e-6] = 1.0
    torch.testing.assert_close(boundary_widths(weight, torch.arange(30)), expected.float(), rtol=1e-5, atol=1e-6)


def test_the_sum_is_c_minus_1_times_the_mean():
    data = synthetic_outputs()
    mean, total = (FDBDDetector(reduction=r).fit(data.train)(data.id) for r in ("mean", "sum"))
    torch.testing.assert_close(total, mean * (data.id.classes - 1))


@pytest.mark.parametrize("normaliser", ["none"])
def test_other_normalisers_keep_the_laws(normaliser):
    check_detector(FDBDDetector(normaliser=normaliser))
