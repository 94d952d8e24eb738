import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from ood_toolkit.calibrators import IRMCalibrator, IROvATSCalibrator, IsotonicCalibrator, TemperatureCalibrator
from ood_toolkit.calibrators.isotonic import interpolate, isotonic_knots
from tests.calibrators.data import drawn


def one_vs_rest(logits, labels, fresh):
    """Mix-n-Match's IROvA, class by class through scikit-learn, then normalised."""
    p, q = logits.softmax(1).numpy(), fresh.softmax(1).numpy()
    mapped = np.empty_like(q)
    for index in range(p.shape[1]):
        regression = IsotonicRegression(out_of_bounds="clip").fit(p[:, index], labels.numpy() == index)
        mapped[:, index] = regression.predict(q[:, index]) + 1e-9 * q[:, index]
    return mapped / mapped.sum(1, keepdims=True)


@pytest.mark.parametrize("classes", [2, 7, 40])
def test_one_vs_rest_is_scikit_learn_class_by_class(classes):
    logits, labels = drawn(1200, classes)
    fresh = drawn(400, classes, seed=1)[0]
    expected = one_vs_rest(logits, labels, fresh)
    np.testing.assert_allclose(IsotonicCalibrator().fit(logits, labels)(fresh).numpy(), expected, atol=1e-7)


def test_irova_ts_is_one_vs_rest_after_temperature():
    logits, labels = drawn(1200, 5)
    fresh = drawn(400, 5, seed=1)[0]
    scale = float(TemperatureCalibrator().fit(logits, labels).temperature)
    expected = one_vs_rest(logits / scale, labels, fresh / scale)
    np.testing.assert_allclose(IROvATSCalibrator().fit(logits, labels)(fresh).numpy(), expected, atol=1e-7)


def test_irm_is_one_regression_over_all_pairs():
    logits, labels = drawn(800, 6)
    fresh = drawn(300, 6, seed=1)[0]
    truth = torch.nn.functional.one_hot(labels, 6).flatten().numpy()
    regression = IsotonicRegression(out_of_bounds="clip").fit(logits.softmax(1).flatten().numpy(), truth)
    q = fresh.softmax(1).numpy()
    expected = regression.predict(q.flatten()).reshape(q.shape) + 1e-9 * q
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(IRMCalibrator().fit(logits, labels)(fresh).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("levels", [3, 20, 0])
def test_pools_give_the_regression_that_sorting_all_rows_gives(levels):
    generator = torch.Generator().manual_seed(levels)
    scores = torch.rand(500, generator=generator, dtype=torch.float64)
    targets = torch.rand(500, generator=generator) < scores * 0.3
    if levels:
        scores = (scores * levels).round() / levels
    places = torch.linspace(-0.1, 1.1, 1001, dtype=torch.float64)
    theirs = IsotonicRegression(out_of_bounds="clip").fit(scores.numpy(), targets.numpy())
    got = interpolate(places, *isotonic_knots(scores, targets))
    np.testing.assert_allclose(got.numpy(), theirs.predict(places.numpy()), atol=1e-12)


def test_a_class_never_seen_keeps_its_probability_before_normalising():
    logits, labels = drawn(600, 5)
    probabilities = IsotonicCalibrator().fit(logits, labels % 4)(logits)
    assert bool(probabilities.isfinite().all())
    fitted = IsotonicCalibrator().fit(logits, labels % 4)
    assert fitted.positions[4].unique().tolist() == fitted.values[4].unique().tolist() == [0.0, 1.0]  # the identity


def test_irm_keeps_the_order_of_classes_in_float64():
    logits, labels = drawn(600, 6)
    order = IRMCalibrator().fit(logits, labels)(logits).gather(1, logits.argsort(1))
    assert bool((order.diff(dim=1) > 0).all())
