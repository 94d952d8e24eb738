import numpy as np
import pytest
import torch

from ood_toolkit.detectors import MaxLogitPNormDetector, MSPDetector
from ood_toolkit.detectors.maxlogit_pnorm import area_under_risk_coverage, maxlogit_pnorm
from ood_toolkit.outputs import Head, Outputs
from ood_toolkit.testing import synthetic_outputs


@pytest.mark.parametrize("p", [0, 1, 2, 4.5, 9])
def test_the_norm_written_out(p):
    logits = torch.randn(30, 8, dtype=torch.float64)
    for row, score in zip(logits.numpy(), maxlogit_pnorm(logits, p).tolist(), strict=True):
        centred = row - row.mean()
        norm = np.count_nonzero(centred) if p == 0 else (np.abs(centred) ** p).sum() ** (1 / p)
        assert score == pytest.approx(-centred.max() / norm, rel=1e-12)


def test_neither_offset_nor_scale_of_the_logits_matters():
    logits = torch.randn(30, 8, dtype=torch.float64)
    assert torch.allclose(maxlogit_pnorm(7 * logits + 3, 3), maxlogit_pnorm(logits, 3))


def test_risk_coverage_counts_the_errors_kept_at_every_coverage():
    scores, wrong = torch.tensor([0.3, 0.1, 0.2, 0.9]), torch.tensor([True, False, True, False])
    assert area_under_risk_coverage(scores, wrong) == pytest.approx((0 / 1 + 1 / 2 + 2 / 3 + 2 / 4) / 4)


def test_the_chosen_p_is_the_best_of_the_grid_on_the_fit_rows():
    train = rescaled_rows()
    detector = MaxLogitPNormDetector().fit(train)
    wrong = ~train.correct
    risks = {p: area_under_risk_coverage(maxlogit_pnorm(train.logits, p), wrong) for p in range(10)}
    assert float(detector.chosen) == min(risks, key=lambda p: risks[p])
    assert risks[int(detector.chosen)] < area_under_risk_coverage(MSPDetector()(train), wrong)


def rescaled_rows() -> Outputs:
    """Rows whose logits have an arbitrary scale each, which ruins MSP and leaves the p-norm alone."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(800, 6, generator=generator)
    labels = (4 * logits).softmax(dim=1).multinomial(1, generator=generator).flatten()
    return Outputs.from_logits(logits * torch.rand(800, 1, generator=generator) ** 3 * 20, labels)


def test_it_falls_back_to_msp_where_msp_is_best():
    features = torch.randn(400, 6, generator=torch.Generator().manual_seed(1))
    labels = features.softmax(dim=1).multinomial(1, generator=torch.Generator().manual_seed(2)).flatten()
    # an offset that centring removes makes the softmax, not the norm, the truth
    train = Outputs(logits=features, features=features, labels=labels, head=Head.identity(6, features))
    risks = [area_under_risk_coverage(maxlogit_pnorm(features, p), ~train.correct) for p in range(10)]
    msp = area_under_risk_coverage(MSPDetector()(train), ~train.correct)
    detector = MaxLogitPNormDetector().fit(train)
    assert (float(detector.chosen) == -1) == (msp <= min(risks))
    everything_right = synthetic_outputs().train.with_labels(synthetic_outputs().train.predictions)
    fallen = MaxLogitPNormDetector().fit(everything_right)
    assert torch.equal(fallen(train), MSPDetector()(train))


def test_a_given_p_needs_no_fit():
    outputs = synthetic_outputs().id
    assert torch.equal(MaxLogitPNormDetector(p=3)(outputs), maxlogit_pnorm(outputs.logits, 3))


def test_choosing_needs_labels():
    with pytest.raises(ValueError, match="labelled rows"):
        MaxLogitPNormDetector().fit(synthetic_outputs().ood)
