"""ETS, Mix-n-Match, temperatures of rows, and prior correction."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from ood_toolkit.calibrators import (
    EntropyTemperatureCalibrator,
    ETSCalibrator,
    HistogramCalibrator,
    MixNMatchCalibrator,
    PriorShiftCalibrator,
    PTSCalibrator,
    TemperatureCalibrator,
)
from ood_toolkit.calibrators.prior_shift import estimate_prior
from ood_toolkit.calibrators.row_temperature import loss_by_inverse
from tests.calibrators.data import drawn, nll


def half_random(rows, classes, seed=0):
    """A tenth of the labels is drawn at random, however confident the row."""
    logits, labels = drawn(rows, classes, seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    lost = torch.rand(rows, generator=generator) < 0.1
    return logits, torch.where(lost, torch.randint(0, classes, (rows,), generator=generator), labels)


@pytest.mark.parametrize("loss", ["nll", "mse"])
def test_ets_weights_are_the_best_on_a_fine_grid(loss):
    logits, labels = half_random(500, 5)
    fitted = ETSCalibrator(loss=loss).fit(logits, labels)
    scaled = (logits / fitted.temperature).softmax(1)
    parts = torch.stack([scaled, logits.softmax(1), torch.full_like(scaled, 0.2)])
    truth = torch.nn.functional.one_hot(labels, 5).double()

    def cost(weights):
        mixed = torch.einsum("k,knc->nc", weights, parts)
        return nll(mixed.log(), labels) if loss == "nll" else float((mixed - truth).square().mean())

    steps = torch.linspace(0, 1, 26, dtype=torch.float64)
    grid = [torch.stack([a, b, 1 - a - b]) for a in steps for b in steps if a > 1e-6 and a + b < 1 - 1e-9]
    assert cost(fitted.weights) <= min(cost(weights) for weights in grid) + 1e-6
    torch.testing.assert_close(fitted(logits), torch.einsum("k,knc->nc", fitted.weights, parts))


def test_ets_beats_temperature_where_some_rows_are_lost_causes():
    logits, labels = half_random(4000, 10)
    fresh, truth = half_random(4000, 10, seed=1)
    plain = nll(TemperatureCalibrator().fit(logits, labels).log_probabilities(fresh), truth)
    assert nll(ETSCalibrator().fit(logits, labels).log_probabilities(fresh), truth) < plain - 0.01


def test_mix_n_match_is_the_second_calibrator_on_the_firsts_output():
    logits, labels = drawn(900, 5)
    fresh = drawn(300, 5, seed=1)[0]
    composed = MixNMatchCalibrator(parametric="temperature", nonparametric="histogram(bins=7)").fit(logits, labels)
    first = TemperatureCalibrator().fit(logits, labels)
    second = HistogramCalibrator(bins=7).fit(first.log_probabilities(logits), labels)
    torch.testing.assert_close(composed(fresh), second(first.log_probabilities(fresh)))
    with pytest.raises(ValueError, match="no Calibrator is named 'temprature'"):
        MixNMatchCalibrator(parametric="temprature")


@pytest.mark.parametrize("loss", ["nll", "mse"])
def test_derivatives_by_each_rows_inverse_temperature_are_autograds(loss):
    logits, labels = drawn(60, 5)
    inverse = torch.rand(60, dtype=torch.float64).add(0.2).requires_grad_()
    p = (logits * inverse[:, None]).softmax(1)
    truth = torch.nn.functional.one_hot(labels, 5).double()
    by_row = -(p * truth).sum(1).log() if loss == "nll" else (p - truth).square().sum(1)
    by_row.sum().backward()
    value, slopes = loss_by_inverse(logits, labels, inverse.detach(), loss)
    assert value == pytest.approx(float(by_row.mean().detach()), abs=1e-12)
    torch.testing.assert_close(slopes, inverse.grad, rtol=0, atol=1e-12)


def test_entropy_temperature_is_a_literal_minimisation_in_two_numbers():
    logits, labels = drawn(1500, 5)
    # rows that look unsure are scaled differently
    logits[logits.softmax(1).amax(1) < 0.6] *= 0.4
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1) / math.log(5)

    def loss(point):
        t = torch.nn.functional.softplus(point[0] * entropy.log() + point[1])
        return nll((logits / t[:, None]).log_softmax(1), labels)

    best = minimize(loss, [0.0, 1.5], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12, "maxiter": 4000})
    fitted = EntropyTemperatureCalibrator().fit(logits, labels)
    assert nll(fitted.log_probabilities(logits), labels) == pytest.approx(best.fun, abs=1e-6)
    constant = nll(TemperatureCalibrator().fit(logits, labels).log_probabilities(logits), labels)
    assert best.fun < constant - 1e-4


def test_pts_reads_the_largest_logits_and_beats_one_temperature_where_rows_differ():
    def two_kinds(seed):
        logits, labels = drawn(2000, 6, temperature=1.0, seed=seed)
        wide = (logits.topk(2, dim=1).values.diff(dim=1).abs() > 2.5).squeeze(1)
        return torch.where(wide[:, None], 4 * logits, logits), labels

    (logits, labels), (fresh, truth) = two_kinds(0), two_kinds(1)
    plain = nll(TemperatureCalibrator().fit(logits, labels).log_probabilities(fresh), truth)
    fitted = PTSCalibrator(loss="nll").fit(logits, labels)
    assert nll(fitted.log_probabilities(fresh), truth) < plain - 0.01
    shuffled = fresh[:, torch.randperm(6)]
    torch.testing.assert_close(fitted.temperatures(shuffled), fitted.temperatures(fresh))


def test_a_network_held_to_its_start_is_temperature_scaling():
    logits, labels = drawn(800, 5)
    held = PTSCalibrator(decay=1e12).fit(logits, labels)
    torch.testing.assert_close(held(logits), TemperatureCalibrator().fit(logits, labels)(logits), atol=1e-6, rtol=0)


def shifted(rows, seed, prior):
    """Rows of a Gaussian mixture, with the exact log-posterior under a uniform prior as logits."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(prior).double().multinomial(rows, replacement=True, generator=generator)
    x = torch.eye(3, dtype=torch.float64)[labels] * 2 + torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return 2 * x, labels


def test_prior_correction_is_bayes_rule():
    logits, labels = shifted(20_000, 0, [1 / 3] * 3)
    target = (0.7, 0.2, 0.1)
    fitted = PriorShiftCalibrator(target=target).fit(logits, labels)
    base = TemperatureCalibrator().fit(logits, labels)(logits)
    expected = base * torch.tensor(target).double() / fitted.source_prior
    torch.testing.assert_close(fitted(logits), expected / expected.sum(1, keepdim=True))
    counts = np.bincount(labels.numpy(), minlength=3) + 1
    np.testing.assert_allclose(fitted.source_prior.numpy(), counts / counts.sum())
    untouched = PriorShiftCalibrator(target="same").fit(logits, labels)
    torch.testing.assert_close(untouched(logits), base)


def test_em_finds_the_new_frequencies_and_lowers_the_likelihood_loss():
    logits, labels = shifted(20_000, 0, [1 / 3] * 3)
    new, truth = shifted(20_000, 1, [0.7, 0.25, 0.05])
    fitted = PriorShiftCalibrator(target="same").fit(logits, labels)
    before = nll(fitted.log_probabilities(new), truth)
    fitted.adapt(new)
    np.testing.assert_allclose(fitted.target_prior.numpy(), [0.7, 0.25, 0.05], atol=0.015)
    assert nll(fitted.log_probabilities(new), truth) < before - 0.1


def test_em_ends_where_the_likelihood_of_the_mixture_is_largest():
    log_p = drawn(500, 3)[0].log_softmax(1)
    source = torch.tensor([0.5, 0.3, 0.2]).double()
    found = estimate_prior(log_p, source)

    def loss(free):
        q = np.exp(np.append(free, 0.0))
        return -np.log((log_p.exp().numpy() * (q / q.sum() / source.numpy())).sum(1)).sum()

    best = minimize(loss, np.zeros(2), tol=1e-12)
    q = np.exp(np.append(best.x, 0.0))
    np.testing.assert_allclose(found.numpy(), q / q.sum(), atol=1e-5)
