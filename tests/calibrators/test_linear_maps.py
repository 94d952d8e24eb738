"""Vector, matrix, Dirichlet and Platt scaling: linear maps of logits."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax
from sklearn.calibration import _SigmoidCalibration

from ood_toolkit.calibrators import (
    DirichletCalibrator,
    MatrixCalibrator,
    PlattCalibrator,
    TemperatureCalibrator,
    VectorCalibrator,
    vector,
)
from ood_toolkit.calibrators.matrix import _first_step, _variance
from ood_toolkit.calibrators.matrix import _loss as matrix_loss
from ood_toolkit.calibrators.minimise import minimise
from ood_toolkit.calibrators.vector import _loss as vector_loss
from tests.calibrators.data import drawn, nll


def uneven(rows, classes, spread, seed=0):
    """Logits whose scale and offset were changed class by class after the labels were drawn."""
    logits, labels = drawn(rows, classes, seed=seed)
    generator = torch.Generator().manual_seed(9)
    scale = (spread * torch.randn(classes, generator=generator, dtype=torch.float64)).exp()
    offset = 3 * spread * torch.randn(classes, generator=generator, dtype=torch.float64)
    return logits * scale + offset, labels


def literal(inputs, labels, table, penalty=0.0):
    """Mean NLL of softmax(W x + b) with W, b = table[:, :-1], table[:, -1], in numpy."""
    scores = inputs.numpy() @ table[:, :-1].T + table[:, -1]
    return -log_softmax(scores, axis=1)[np.arange(len(labels)), labels.numpy()].mean() + penalty


def test_unpenalised_vector_scaling_is_the_maximum_of_the_likelihood():
    logits, labels = uneven(1500, 4, 0.3)
    fitted = VectorCalibrator(prior="none").fit(logits, labels)

    def loss(point):
        return literal(logits, labels, np.column_stack([np.diag(point[:4]), point[4:]]))

    best = minimize(loss, np.concatenate([np.full(4, 0.5), np.zeros(4)]), tol=1e-10)
    ours = nll(fitted.log_probabilities(logits), labels)
    assert ours <= best.fun + 1e-8
    np.testing.assert_allclose(fitted.slopes.numpy(), best.x[:4], atol=2e-3)


@pytest.mark.parametrize("loss", ["vector", "matrix"])
def test_closed_form_gradients_are_autograds(loss):
    logits, labels = drawn(50, 4)
    if loss == "vector":
        point = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        value, gradient = vector_loss(logits, labels, *point.detach())
        torch.nn.functional.cross_entropy(logits * point[0] + point[1], labels).backward()
    else:
        point = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        value, gradient = matrix_loss(logits, labels, point.detach())
        expected = torch.nn.functional.cross_entropy(logits @ point[:, :-1].T + point[:, -1], labels)
        assert value == pytest.approx(float(expected.detach()), abs=1e-12)
        expected.backward()
    torch.testing.assert_close(gradient, point.grad, rtol=0, atol=1e-12)


def test_the_datas_prior_makes_vector_scaling_temperature_scaling_where_classes_are_alike():
    logits, labels = drawn(1500, 50)
    fresh, truth = drawn(4000, 50, seed=1)
    temperature = nll(TemperatureCalibrator().fit(logits, labels).log_probabilities(fresh), truth)
    with_prior = nll(VectorCalibrator().fit(logits, labels).log_probabilities(fresh), truth)
    without = nll(VectorCalibrator(prior="none").fit(logits, labels).log_probabilities(fresh), truth)
    assert with_prior < temperature + 0.005
    assert without > temperature + 0.02


def test_vector_scaling_repairs_uneven_classes_that_one_temperature_cannot():
    logits, labels = uneven(4000, 20, 0.4)
    fresh, truth = uneven(4000, 20, 0.4, seed=1)
    temperature = nll(TemperatureCalibrator().fit(logits, labels).log_probabilities(fresh), truth)
    for prior in ("data", "none"):
        repaired = nll(VectorCalibrator(prior=prior).fit(logits, labels).log_probabilities(fresh), truth)
        assert repaired < temperature - 0.1
    perfect = nll(drawn(4000, 20, seed=1)[0].div(2).log_softmax(1), truth)
    assert repaired < perfect + 0.03


@pytest.mark.parametrize(
    ("kind", "prepare"), [(MatrixCalibrator, lambda z: z), (DirichletCalibrator, lambda z: z.log_softmax(1))]
)
@pytest.mark.parametrize("penalty", [0.5, 20.0])
def test_matrix_and_dirichlet_minimise_likelihood_plus_odir(kind, prepare, penalty):
    logits, labels = uneven(600, 3, 0.3)
    inputs = prepare(logits)
    fitted = kind(off_diagonal=penalty, intercept=penalty / 2).fit(logits, labels)

    def loss(flat):
        table = flat.reshape(3, 4)
        off = [table[i, j] ** 2 for i in range(3) for j in range(3) if i != j]
        return literal(inputs, labels, table, penalty * np.mean(off) + penalty / 2 * np.mean(table[:, 3] ** 2))

    best = minimize(loss, np.column_stack([np.eye(3) * 0.5, np.zeros(3)]).flatten(), tol=1e-10)
    ours = np.column_stack([fitted.weight.numpy(), fitted.bias.numpy()])
    assert loss(ours.flatten()) <= best.fun + 1e-7
    np.testing.assert_allclose(ours, best.x.reshape(3, 4), atol=2e-3)


@pytest.mark.parametrize("kind", [MatrixCalibrator, DirichletCalibrator])
def test_off_diagonals_without_evidence_stay_small(kind):
    logits, labels = drawn(600, 8)
    fresh, truth = drawn(3000, 8, seed=1)
    temperature = nll(TemperatureCalibrator().fit(logits, labels).log_probabilities(fresh), truth)
    chosen = nll(kind().fit(logits, labels).log_probabilities(fresh), truth)
    free = nll(kind(off_diagonal=0.0, intercept=0.0).fit(logits, labels).log_probabilities(fresh), truth)
    assert chosen < temperature + 0.02
    assert free > chosen + 0.02


@pytest.mark.parametrize("kind", [MatrixCalibrator, DirichletCalibrator, VectorCalibrator])
@pytest.mark.parametrize(("rows", "classes", "seed"), [(100, 200, 0), (100, 200, 2), (100, 200, 4), (500, 1000, 0)])
def test_few_rows_over_many_classes_leave_temperature_scaling(kind, rows, classes, seed):
    logits, labels = drawn(rows, classes, seed=seed)
    fresh, truth = drawn(3000, classes, seed=seed + 1)
    temperature = TemperatureCalibrator().fit(logits, labels).log_probabilities(fresh)
    chosen = kind().fit(logits, labels).log_probabilities(fresh)
    assert nll(chosen, truth) <= nll(temperature, truth) + 0.001
    accuracy, plain = ((p.argmax(1) == truth).double().mean() for p in (chosen, temperature))
    assert abs(accuracy - plain) <= 0.02
    if classes < 1000:  # the paper's free diagonal, or free everything, is what this law is about
        paper = kind(prior="none") if kind is VectorCalibrator else kind(off_diagonal=1.0)
        freed = paper.fit(logits, labels).log_probabilities(fresh)
        assert nll(freed, truth) > nll(temperature, truth) + 0.1


def test_few_rows_still_show_offsets_that_are_large():
    logits, labels = uneven(400, 100, 0.4)
    fresh, truth = uneven(3000, 100, 0.4, seed=1)
    temperature = nll(TemperatureCalibrator().fit(logits, labels).log_probabilities(fresh), truth)
    for kind in (MatrixCalibrator, DirichletCalibrator, VectorCalibrator):
        assert nll(kind().fit(logits, labels).log_probabilities(fresh), truth) < temperature - 0.1


def test_variances_compare_pairs_of_rows_with_what_effects_would_make_of_them():
    inputs, labels = drawn(7, 4)
    rows, classes = inputs.shape
    start = torch.cat([0.4 * torch.eye(4, dtype=torch.float64), torch.tensor([[0.1], [0.0], [-0.2], [0.3]])], dim=1)
    p = (inputs * 0.4 + start[:, -1]).softmax(1).numpy()
    x = inputs.numpy()
    wrong = p - np.eye(classes)[labels.numpy()]
    excess, size, square = np.zeros(3), np.zeros(3), np.zeros(3)
    for n in range(rows):
        for m in set(range(rows)) - {n}:
            curvatures = [np.diag(p[k]) - np.outer(p[k], p[k]) for k in (n, m)]
            others = [sum(x[n, j] * x[m, j] for j in range(classes) if j != i) for i in range(classes)]
            for part, shared in enumerate((np.diag(others), np.diag(x[n] * x[m]), np.eye(classes))):
                agreement = wrong[n] @ shared @ wrong[m]
                excess[part] += agreement
                square[part] += agreement**2
                size[part] += np.trace(curvatures[0] @ shared @ curvatures[1] @ shared)
    found, _ = _first_step(inputs, labels, start)
    np.testing.assert_allclose(found.numpy(), excess, rtol=1e-10)
    variance = _variance(inputs, labels, start, found + 1e4)
    np.testing.assert_allclose(variance.numpy(), (excess + 1e4 - 3 * np.sqrt(2 * square)) / size, rtol=1e-10)


def test_vector_scalings_variances_come_from_pairs_of_rows_too():
    logits, labels = drawn(7, 4)
    logits += torch.tensor([300.0, -200.0, 0.0, 50.0])  # what all rows share goes into the offsets
    first = vector._first_step(logits, labels, 0.01)
    p = (logits * 0.01).softmax(1).numpy()
    wrong = p - np.eye(4)[labels.numpy()]
    weight = p * (1 - p)
    centre = (weight * logits.numpy()).sum(0) / weight.sum(0)
    np.testing.assert_allclose(first.centre.numpy(), centre, rtol=1e-10)
    x = logits.numpy() - centre
    np.testing.assert_allclose(first.curvature.numpy(), [(weight * x**2).sum(0), weight.sum(0)], rtol=1e-10)
    excess, size, square = np.zeros(2), np.zeros(2), np.zeros(2)
    for n in range(7):
        for m in set(range(7)) - {n}:
            curvatures = [np.diag(p[k]) - np.outer(p[k], p[k]) for k in (n, m)]
            for part, shared in enumerate((np.diag(x[n] * x[m]), np.eye(4))):
                agreement = wrong[n] @ shared @ wrong[m]
                excess[part] += agreement
                square[part] += agreement**2
                size[part] += np.trace(curvatures[0] @ shared @ curvatures[1] @ shared)
    np.testing.assert_allclose((first.gradient.square() - first.noise).sum(1).numpy(), excess, rtol=1e-8)
    strong = dataclasses.replace(first, noise=first.noise - 1e8)
    variance = vector._variance(logits, labels, 0.01, strong)
    np.testing.assert_allclose(variance.numpy(), (excess + 4e8 - 3 * np.sqrt(2 * square)) / size, rtol=1e-8)
    assert (vector._variance(logits, labels, 0.01, dataclasses.replace(first, noise=first.noise + 1e8)) == 0).all()


def test_matrix_scaling_undoes_a_mixture_of_logits():
    logits, labels = drawn(5000, 5)
    fresh, truth = drawn(5000, 5, seed=1)
    mixture = torch.eye(5, dtype=torch.float64) + 0.15 * torch.randn(5, 5, dtype=torch.float64)
    fitted = MatrixCalibrator().fit(logits @ mixture.T, labels)
    perfect = nll((fresh / 2).log_softmax(1), truth)
    assert nll(fitted.log_probabilities(fresh @ mixture.T), truth) < perfect + 0.02


def test_impossible_classes_stay_impossible():
    logits, labels = drawn(400, 4)
    masked = logits.clone()
    masked[:, 3] = -torch.inf
    for kind in (MatrixCalibrator, DirichletCalibrator):
        probabilities = kind().fit(logits, labels)(masked)
        assert float(probabilities[:, 3].max()) == 0.0
        with pytest.raises(ValueError, match="none may be -inf"):
            kind().fit(masked, labels % 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vector_scaling_of_masked_logits_is_that_of_the_classes_left(dtype):
    logits, labels = uneven(900, 5, 0.4)
    logits, labels = logits.to(dtype), labels % 4
    cut = VectorCalibrator().fit(logits[:, :4], labels)
    masked = logits.clone()
    masked[:, 4] = -torch.inf
    fitted = VectorCalibrator().fit(masked, labels)
    torch.testing.assert_close(fitted.slopes[:4], cut.slopes, atol=1e-3, rtol=0)
    assert float(cut.slopes.std()) > 0.02
    probabilities = fitted(masked)
    assert float(probabilities[:, 4].max()) == 0.0
    torch.testing.assert_close(probabilities[:, :4], cut(logits[:, :4]), atol=1e-3, rtol=0)


def test_platt_is_scikit_learns_sigmoid_of_every_class():
    logits, labels = drawn(2500, 4)
    p = logits.softmax(1).numpy()
    odds = np.log(p) - np.log1p(-p)
    columns = [
        _SigmoidCalibration().fit(odds[:, c], (labels == c).numpy().astype(int)).predict(odds[:, c]) for c in range(4)
    ]
    expected = np.stack(columns, axis=1)
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(PlattCalibrator(prior_count=1).fit(logits, labels)(logits).numpy(), expected, atol=1e-5)


def test_platt_leaves_classes_alone_that_it_has_not_seen():
    logits, labels = drawn(600, 40)
    seen = labels < 30
    fitted = PlattCalibrator().fit(logits[seen], labels[seen])
    assert fitted.slopes[30:].tolist() == [1.0] * 10
    fresh, truth = drawn(600, 40, seed=1)
    unseen = truth >= 30
    plain = nll(fresh[unseen].log_softmax(1), truth[unseen])
    assert nll(fitted.log_probabilities(fresh[unseen]), truth[unseen]) < plain + 0.5


def test_minimise_finds_the_bottom_of_a_badly_scaled_bowl():
    curvature = torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64)
    bottom = torch.tensor([3.0, -2.0, 1.0], dtype=torch.float64)

    def bowl(x):
        return 0.5 * float(curvature @ (x - bottom).square()), curvature * (x - bottom)

    found = minimise(bowl, torch.zeros(3, dtype=torch.float64), scale=curvature.rsqrt())
    torch.testing.assert_close(found, bottom, rtol=0, atol=1e-2)
