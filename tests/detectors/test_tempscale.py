from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch

from ood_toolkit.detectors import TempScaleDetector
from ood_toolkit.detectors.tempscale import best_temperature
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing import synthetic_outputs
from ood_toolkit.testing.calibrators import overconfident_logits

KEYS = [
    "official-tempscale/TempScale/solver=bisect",
    "official-tempscale/TempScale",
    "openood/TempScale",
    "pytorch-ood/TempScale",
    "torch-uncertainty/TempScale",
]


@pytest.mark.parametrize("key", KEYS)
def test_at_the_other_tool_s_temperature_it_equals_it(golden, key):
    detector = TempScaleDetector(temperature=golden.entries[key]["hyperparameters"]["fitted_T"])
    golden.check(key, detector(golden.outputs("id")), detector(golden.outputs("ood")), offset=-1.0)


def test_the_fitted_temperature_is_where_the_converged_tools_stop(golden):
    fitted = float(TempScaleDetector().fit(golden.outputs("fit")).fitted_temperature)
    assert fitted == pytest.approx(0.385178, abs=5e-7)
    bisected = golden.entries["official-tempscale/TempScale/solver=bisect"]["hyperparameters"]["fitted_T"]
    assert fitted == pytest.approx(bisected, abs=1e-4)  # its own stopping rule


@pytest.mark.parametrize("factor", [0.05, 1.0, 40.0])
def test_scipy_finds_the_same_minimum(factor):
    logits, labels = overconfident_logits(500, factor=factor)

    def nll(log_temperature: float) -> float:
        z = logits.double().numpy() / np.exp(log_temperature)
        top = z.max(axis=1)
        return float((top + np.log(np.exp(z - top[:, None]).sum(axis=1)) - z[np.arange(500), labels.numpy()]).mean())

    found: Any = scipy.optimize.minimize_scalar(nll, bounds=(-6, 6), method="bounded", options={"xatol": 1e-9})
    assert best_temperature(Outputs.from_logits(logits, labels)) == pytest.approx(float(np.exp(found.x)), rel=1e-5)


def test_rows_that_are_all_right_end_where_the_softmax_is_certain():
    logits = 5 * torch.eye(4, dtype=torch.float64)
    temperature = best_temperature(Outputs.from_logits(logits, torch.arange(4)))
    assert 1e-3 <= temperature < 0.1
    assert (logits / temperature).log_softmax(dim=1).diagonal().abs().max() < 1e-40


def test_rows_that_are_all_wrong_end_at_the_upper_bound():
    logits = 5 * torch.eye(4)
    assert best_temperature(Outputs.from_logits(logits, torch.arange(4).roll(1))) == pytest.approx(1e3, rel=1e-6)


def test_equal_logits_leave_the_temperature_at_one():
    assert best_temperature(Outputs.from_logits(torch.ones(4, 4), torch.arange(4))) == 1


def test_it_needs_a_label():
    with pytest.raises(ValueError, match="labelled"):
        TempScaleDetector().fit(synthetic_outputs().ood)
