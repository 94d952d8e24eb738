import numpy as np
import torch

from ood_toolkit.detectors import LogitMarginDetector, MarginDetector
from ood_toolkit.detectors.margin import softmax_margin
from ood_toolkit.outputs import Outputs


def test_both_margins_written_out():
    logits = torch.randn(40, 6, dtype=torch.float64)
    outputs = Outputs.from_logits(logits)
    for i, row in enumerate(logits.numpy()):
        p = np.sort(np.exp(row) / np.exp(row).sum())
        z = np.sort(row)
        assert np.isclose(float(MarginDetector()(outputs)[i]), 1 - (p[-1] - p[-2]), rtol=1e-12)
        assert np.isclose(float(LogitMarginDetector()(outputs)[i]), -(z[-1] - z[-2]), rtol=1e-12)


def test_sure_rows_do_not_round_to_zero():
    margins = torch.linspace(17, 80, 50)
    scores = softmax_margin(torch.stack([margins, torch.zeros(50)], dim=1))
    assert torch.allclose(scores, 2 * torch.special.expit(-margins), rtol=1e-5, atol=0)
