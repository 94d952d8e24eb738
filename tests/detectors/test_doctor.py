import numpy as np
import pytest
import torch

from ood_toolkit.detectors import DoctorAlphaDetector, DoctorBetaDetector, MSPDetector
from ood_toolkit.outputs import Outputs


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_both_odds_written_out(temperature):
    logits = 2 * torch.randn(40, 7, dtype=torch.float64)
    outputs = Outputs.from_logits(logits)
    alpha, beta = DoctorAlphaDetector(temperature)(outputs), DoctorBetaDetector(temperature)(outputs)
    for i, row in enumerate(logits.numpy() / temperature):
        p = np.exp(row) / np.exp(row).sum()
        assert float(alpha[i]) == pytest.approx((1 - (p**2).sum()) / (p**2).sum(), rel=1e-10)
        assert float(beta[i]) == pytest.approx((1 - p.max()) / p.max(), rel=1e-10)


def test_the_limits_are_zero_and_classes_minus_one():
    outputs = Outputs.from_logits(torch.tensor([[0.0, 0.0, 0.0, 0.0], [200.0, 0.0, 0.0, 0.0]]))
    for detector in (DoctorAlphaDetector(), DoctorBetaDetector()):
        assert detector(outputs).tolist() == pytest.approx([3.0, 0.0])


def test_near_certainty_alpha_is_twice_the_error():
    margins = torch.linspace(17, 80, 50)
    outputs = Outputs.from_logits(torch.stack([margins, torch.zeros(50)], dim=1))
    error = torch.special.expit(-margins)
    assert torch.allclose(DoctorAlphaDetector()(outputs), 2 * error, rtol=1e-5, atol=0)
    assert torch.allclose(DoctorBetaDetector()(outputs), error, rtol=1e-5, atol=0)


def test_beta_ranks_as_msp():
    outputs = Outputs.from_logits(torch.randn(200, 7))
    assert torch.equal(DoctorBetaDetector()(outputs).argsort(), MSPDetector()(outputs).argsort())
