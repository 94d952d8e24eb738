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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bold_temperature_scores_as_the_division_does_where_most_terms_underflow(dtype):
    logits = (30 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[:, 3] = -torch.inf
    temperature = 0.2 if dtype == torch.float32 else 0.02
    got = TempScaleDetector(temperature=temperature)(Outputs.from_logits(logits))
    shifted = (logits.double() - logits.double().amax(dim=1, keepdim=True)) / temperature
    shifted.scatter_(1, logits.argmax(dim=1, keepdim=True), -torch.inf)
    others = shifted.exp().sum(dim=1)
    seen = others > (1e-30 if dtype == torch.float32 else 1e-290)  # well above what has no full precision anyhow
    assert 10 < int(seen.sum()) < 50
    relative = 2e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(got.double()[seen], (others / (1 + others))[seen], rtol=relative, atol=0)
    assert (got[~seen] <= (1e-29 if dtype == torch.float32 else 1e-289)).all()


def nll_minimum(logits: torch.Tensor, labels: torch.Tensor) -> float:
    def slope(beta: float) -> float:
        p = (beta * logits.double()).softmax(dim=1)
        return float(((p * logits).sum(dim=1) - logits.double().gather(1, labels.unsqueeze(1)).squeeze(1)).mean())

    found: Any = scipy.optimize.brentq(slope, 1e-3, 1e3, xtol=1e-14)
    return 1 / found


@pytest.mark.parametrize("wrong", [2, 3000])
def test_many_rows_give_the_minimum_of_all_of_them_whatever_the_sample_says(wrong):
    logits, labels = overconfident_logits(10_000, factor=3.0)
    labels = logits.argmax(dim=1)  # a sample of one in five may see no error at all
    labels[:wrong] = (labels[:wrong] + 1) % logits.shape[1]
    found = best_temperature(Outputs.from_logits(logits, labels))
    assert found == pytest.approx(nll_minimum(logits, labels), rel=1e-9)
