import json
import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from ood_toolkit.calibrators import TemperatureCalibrator
from ood_toolkit.calibrators.temperature import fit_shared_temperature, fit_temperature
from tests.calibrators.data import SHARED, drawn, nll, reference_case

golden = pytest.mark.skipif(not (SHARED / "golden").exists(), reason="the golden values are not at hand")


@pytest.mark.parametrize(("factor", "temperature"), [(1.1, 1.044593144), (2.0, 1.899260262)])
def test_the_reference_cases_have_their_known_temperatures(factor, temperature):
    assert fit_temperature(*reference_case(factor)).temperature == pytest.approx(temperature, abs=1e-9)


@golden
def test_golden_fit_logits_give_the_golden_temperature():
    inputs = np.load(SHARED / "golden" / "inputs.npz")
    fitted = TemperatureCalibrator().fit(torch.tensor(inputs["fit_logits"]), torch.tensor(inputs["fit_labels"]))
    assert float(fitted.temperature) == pytest.approx(0.385177536259950611, abs=1e-12)


@golden
def test_the_golden_temperature_is_the_root_of_the_derivative_in_25_digits():
    inputs = np.load(SHARED / "golden" / "inputs.npz")
    rows, labels = inputs["fit_logits"].astype(np.float64), inputs["fit_labels"]

    def derivative(temperature: str) -> Any:
        """Mean of E_p[z] - z_y at 1/T, term by term."""
        beta, total = 1 / mpmath.mpf(temperature), mpmath.mpf(0)
        for row, label in zip(rows, labels, strict=True):
            weights = [mpmath.exp(beta * mpmath.mpf(z)) for z in row]
            total += mpmath.fdot(weights, map(mpmath.mpf, row)) / mpmath.fsum(weights) - mpmath.mpf(row[label])
        return total / len(rows)

    with mpmath.workdps(25):
        below, above = derivative("0.385177536259950611"), derivative("0.385177536259950612")
        bisected = derivative("0.38515625")  # where another tool's bisection stops
    assert above < 0 < below  # the derivative grows with 1/T
    assert abs(above) < 1e-18
    assert bisected == pytest.approx(5.559e-6, rel=1e-3)


@golden
def test_peers_that_converged_agree_and_have_no_higher_likelihood():
    inputs = np.load(SHARED / "golden" / "inputs.npz")
    scores = np.load(SHARED / "golden" / "scores_open.npz")
    entries = json.loads((SHARED / "golden" / "manifest_open.json").read_text())["entries"]
    logits, labels = torch.tensor(inputs["fit_logits"]).double(), torch.tensor(inputs["fit_labels"])
    fitted = TemperatureCalibrator().fit(logits, labels)
    checked = 0
    for key, entry in entries.items():
        if "TempScale" not in key:
            continue
        theirs = entry["hyperparameters"]["fitted_T"]
        assert float(fitted.nll_after) <= nll((logits / theirs).log_softmax(1), labels)
        same = TemperatureCalibrator()
        same.load_state_dict(fitted.state_dict())
        same.temperature = torch.tensor(theirs, dtype=torch.float64)
        for part in ("id", "ood"):
            ours = same(torch.tensor(inputs[f"{part}_logits"])).amax(1).double().numpy()
            sign = -1 if entry["convention"] == "higher=OOD" else 1
            np.testing.assert_allclose(sign * ours, scores[f"{key}/{part}"], atol=entry["tol_abs"], rtol=0)
        if entry["status"] == "canonical":
            assert theirs == pytest.approx(float(fitted.temperature), rel=1e-3)
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize(
    ("temperature", "dtype"),
    [(0.01, torch.float64), (0.3, torch.float16), (2.0, torch.float32), (100.0, torch.float32)],
)
def test_a_literal_minimisation_of_the_likelihood_finds_the_same_temperature(temperature, dtype):
    logits, labels = drawn(800, 10, temperature=temperature)
    logits = logits.to(dtype)
    found = TemperatureCalibrator().fit(logits, labels)
    rows = logits.double().numpy()

    def loss(u):
        return -log_softmax(rows * math.exp(u), axis=1)[np.arange(len(rows)), labels.numpy()].mean()

    best = minimize_scalar(loss, bounds=(-7, 7), method="bounded", options={"xatol": 1e-10})
    assert float(found.nll_after) <= best.fun + 1e-12
    assert math.log(float(found.temperature)) == pytest.approx(-best.x, abs=1e-5)
    assert float(found.nll_after) == pytest.approx(loss(-math.log(float(found.temperature))), abs=1e-9)
    assert float(found.nll_before) == pytest.approx(loss(0.0), abs=1e-9)


def test_the_derivative_of_the_likelihood_vanishes_at_the_temperature():
    logits, labels = drawn(30_000, 5)
    inverse = torch.tensor(1 / fit_temperature(logits, labels).temperature, requires_grad=True, dtype=torch.float64)
    torch.nn.functional.cross_entropy(logits * inverse, labels).backward()
    assert inverse.grad is not None
    assert abs(float(inverse.grad)) < 1e-9


def test_few_sweeps_over_the_data_suffice():
    for classes, temperature in ((10, 0.5), (100, 2.0), (10, 30.0)):
        assert fit_temperature(*drawn(20_000, classes, temperature=temperature)).evaluations <= 10


@settings(max_examples=30)
@given(st.floats(0.05, 20.0), st.integers(0, 1000), st.floats(-1e4, 1e4))
def test_scaling_the_logits_scales_the_temperature_and_offsets_do_nothing(factor, seed, offset):
    logits, labels = drawn(200, 4, seed=seed)
    plain = fit_temperature(logits, labels, (1e-6, 1e6))
    scaled = fit_temperature(factor * logits + offset, labels, (1e-6, 1e6))
    if not plain.at_bound:
        assert scaled.temperature == pytest.approx(factor * plain.temperature, rel=1e-6)


def test_all_right_is_an_error_or_the_lower_bound():
    logits, _ = drawn(500, 10)
    for rows in (logits, logits * 1e6):
        with pytest.raises(ValueError, match=r"towards 0: .*classified correctly"):
            TemperatureCalibrator().fit(rows, rows.argmax(1))
    accepted = TemperatureCalibrator(at_bound="accept").fit(logits, logits.argmax(1))
    assert float(accepted.temperature) == pytest.approx(1e-3)
    assert bool(accepted.clipped)


def test_all_wrong_is_an_error_or_the_upper_bound():
    logits, _ = drawn(500, 10)
    with pytest.raises(ValueError, match=r"towards infinity: .*no likelier than chance"):
        TemperatureCalibrator().fit(logits, logits.argmin(1))
    accepted = TemperatureCalibrator(at_bound="accept").fit(logits, logits.argmin(1))
    assert float(accepted.temperature) == pytest.approx(1e3)


def test_logits_too_large_for_the_bounds_are_named_as_a_reason():
    logits, labels = drawn(500, 5)
    with pytest.raises(ValueError, match=r"the logits are larger than the bounds allow for.* widen the bounds"):
        TemperatureCalibrator().fit(logits * 1e5, labels)
    wide = TemperatureCalibrator(bounds=(1e-3, 1e9)).fit(logits * 1e5, labels)
    plain = TemperatureCalibrator().fit(logits, labels)
    assert float(wide.temperature) == pytest.approx(1e5 * float(plain.temperature), rel=1e-6)


def test_constant_logits_and_single_classes_keep_temperature_1():
    labels = torch.tensor([0, 1, 2, 0])
    assert fit_temperature(torch.full((4, 3), 7.0), labels).temperature == 1.0
    assert fit_temperature(torch.randn(4, 1), labels * 0).temperature == 1.0


def test_labels_of_one_class_only_have_a_temperature_like_any_others():
    logits, _ = drawn(500, 3)
    labels = torch.zeros(500, dtype=torch.int64)
    logits[:, 0] += 3.0
    found = fit_temperature(logits, labels)
    assert not found.at_bound
    assert found.nll_after < found.nll_before


def test_a_masked_class_counts_as_left_out():
    logits, labels = drawn(800, 6)
    labels %= 5
    cut = fit_temperature(logits[:, :5], labels)
    logits[:, 5] = -torch.inf
    assert fit_temperature(logits, labels).temperature == pytest.approx(cut.temperature, abs=1e-12)
    fitted = TemperatureCalibrator().fit(logits, labels)
    assert float(fitted(logits)[:, 5].abs().max()) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z, y: (z.masked_fill(z == z[0, 0], torch.nan), y), "NaN"),
        (lambda z, y: (z.masked_fill(z == z[0, 0], torch.inf), y), "NaN, \\+inf"),
        (lambda z, y: (z.scatter(1, y[:, None], -torch.inf), y), "impossible class"),
        (lambda z, y: (z, y - 1), "labels must lie"),
        (lambda z, y: (z[:0], y[:0]), "needs labelled rows"),
        (lambda z, y: (z, y.double()), "integers"),
        (lambda z, y: (z[0], y), "floating-point"),
    ],
)
def test_bad_data_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        TemperatureCalibrator().fit(*change(*drawn(50, 4)))


def test_a_shared_temperature_minimises_the_pools_likelihood():
    logits, labels = drawn(1500, 6)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(3, *logits.shape, generator=generator, dtype=torch.float64)
    members = logits + noise * torch.tensor([0.5, 1, 3]).double()[:, None, None]

    def loss(u):
        pool = (members * math.exp(u)).softmax(dim=2).mean(dim=0)
        return nll(pool.log(), labels)

    found = fit_shared_temperature(members, labels)
    best: Any = minimize_scalar(loss, bounds=(-5, 5), method="bounded", options={"xatol": 1e-10})
    assert math.log(found.temperature) == pytest.approx(-best.x, abs=1e-5)
    assert found.nll_after == pytest.approx(loss(-math.log(found.temperature)), abs=1e-12)
    assert found.nll_before == pytest.approx(loss(0.0), abs=1e-12)


@pytest.mark.parametrize(("rows", "classes", "margin"), [(10, 4, 8.0), (200, 10, 3.0), (50, 100, 20.0)])
def test_rows_that_are_all_right_with_margin_reach_the_bound(rows: int, classes: int, margin: float):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(rows) % classes
    logits = torch.rand(rows, classes, generator=generator).scatter_(1, labels[:, None], margin)
    fit = fit_temperature(logits, labels)
    assert fit.at_bound
    assert fit.temperature == pytest.approx(1e-3)
    assert fit.evaluations <= 20


@pytest.mark.parametrize("bounds", [(1.5, 10.0), (0.01, 0.99), (1e-3, 1e3)])
def test_bounds_on_one_side_of_1_find_the_same_temperature(bounds):
    logits, labels = drawn(500, 5, temperature=2.0 if bounds[0] > 1 else 0.5)
    free = fit_temperature(logits, labels).temperature
    assert bounds[0] < free < bounds[1]
    assert fit_temperature(logits, labels, bounds).temperature == pytest.approx(free, abs=1e-9)


@pytest.mark.parametrize(("bounds", "side"), [((50.0, 60.0), "below"), ((0.01, 0.1), "above")])
def test_bounds_beside_the_best_temperature_are_named(bounds, side):
    with pytest.raises(
        ValueError, match=rf"the best temperature is {side} the bounds \({bounds[0]}, {bounds[1]}\): widen"
    ):
        TemperatureCalibrator(bounds=bounds).fit(*drawn(500, 5, temperature=2.0))
