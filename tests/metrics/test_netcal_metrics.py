import numpy as np
import pytest

from ood_toolkit.metrics import ece, mce, netcal_metric


def rows(count: int = 500):
    rng = np.random.default_rng(0)
    confidence = rng.beta(5, 2, count)
    return confidence, rng.random(count) < confidence**1.5


def test_netcal_and_we_agree_on_equal_width_bins_without_ties():
    confidence, correct = rows()
    assert netcal_metric("ECE", confidence, correct) == pytest.approx(ece(confidence, correct), abs=1e-9)
    assert netcal_metric("MCE", confidence, correct) == pytest.approx(mce(confidence, correct), abs=1e-9)


def test_float32_gives_the_number_of_its_float64_copy():
    confidence, correct = rows()
    low = confidence.astype(np.float32)
    assert netcal_metric("ACE", low, correct) == netcal_metric("ACE", low.astype(np.float64), correct)


def test_ties_that_netcal_cannot_cut_are_named():
    with pytest.raises(ValueError, match="cannot cut equal-mass bins where confidences tie"):
        netcal_metric("ECE", np.ones(100), np.ones(100, dtype=bool), equal_intervals=False)


def test_unknown_and_unaffordable_metrics_are_refused():
    with pytest.raises(ValueError, match="netcal has no calibration metric 'KS'"):
        netcal_metric("KS", *rows())
    with pytest.raises(ValueError, match="N x N matrix"):
        netcal_metric("MMCE", *rows(10_001))
