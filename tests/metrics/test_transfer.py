import math

import numpy as np
import pytest
import torch

from ood_toolkit.metrics import (
    UndefinedMetricError,
    accuracy_drop,
    drop_interval,
    error_rates,
    share_interval,
    transfer_matrix,
    wrong_confidence,
)


def _answers(models: int = 4, images: int = 60) -> np.ndarray:
    return np.random.default_rng(0).random((models, images)) < 0.6


def test_transfer_is_counted_image_by_image():
    correct = _answers()
    found = transfer_matrix(correct)
    for a in range(4):
        missed = [image for image in range(60) if not correct[a, image]]
        for b in range(4):
            also = [image for image in missed if not correct[b, image]]
            assert found[a, b] == pytest.approx(len(also) / len(missed))
    assert np.array_equal(transfer_matrix(torch.from_numpy(correct)), found)


def test_every_error_transfers_to_its_own_model_and_to_one_that_is_always_wrong():
    correct = _answers()
    correct[2] = False
    found = transfer_matrix(correct)
    assert np.array_equal(np.diag(found), np.ones(4))
    assert np.array_equal(found[:, 2], np.ones(4))
    np.testing.assert_allclose(found[2], error_rates(correct))


def test_joint_errors_are_symmetric():
    correct = _answers()
    joint = transfer_matrix(correct) * error_rates(correct)[:, None]
    np.testing.assert_allclose(joint, joint.T)


def test_independent_errors_transfer_at_the_base_rate():
    correct = np.random.default_rng(1).random((2, 40_000)) < np.array([[0.5], [0.8]])
    assert transfer_matrix(correct)[0, 1] == pytest.approx(error_rates(correct)[1], abs=0.01)


def test_a_model_without_errors_has_nothing_to_transfer():
    found = transfer_matrix([[True, True], [True, False]])
    assert np.isnan(found[0]).all()
    assert found[1].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("shape", [(3,), (0, 4), (2, 0)])
def test_transfer_refuses_anything_but_models_by_images(shape):
    with pytest.raises(ValueError, match=r"shape \(models, images\)"):
        transfer_matrix(np.zeros(shape, dtype=bool))


def test_confidence_of_wrong_answers_looks_at_wrong_answers_only():
    confidence, correct = [0.2, 0.5, 0.95, 1.0, 0.6], [False, False, False, True, True]
    found = wrong_confidence(confidence, correct)
    assert found.wrong == 3
    assert found.mean == pytest.approx(0.55)
    assert found.median == pytest.approx(0.5)
    assert found.thresholds == (0.5, 0.9, 0.99)
    assert found.shares == pytest.approx((2 / 3, 1 / 3, 0.0))
    with pytest.raises(UndefinedMetricError, match="all are right"):
        wrong_confidence([0.3], [True])


def test_the_drop_and_its_error_are_those_of_two_proportions():
    clean, adversarial = [True] * 90 + [False] * 10, [True] * 9 + [False] * 291
    found = accuracy_drop(clean, adversarial)
    assert (found.clean, found.adversarial) == (pytest.approx(0.9), pytest.approx(0.03))
    assert found.drop == pytest.approx(0.87)
    assert found.relative == pytest.approx(0.87 / 0.9)
    assert found.error == pytest.approx(math.sqrt(0.9 * 0.1 / 100 + 0.03 * 0.97 / 300))


def test_the_error_of_the_drop_is_its_spread_over_samples():
    random = np.random.default_rng(2)
    drops = [accuracy_drop(random.random(200) < 0.8, random.random(300) < 0.3) for _ in range(2000)]
    spread = np.std([each.drop for each in drops])
    assert np.mean([each.error for each in drops]) == pytest.approx(spread, rel=0.05)


def test_a_drop_of_nothing_is_undefined():
    assert math.isnan(accuracy_drop([False], [False]).relative)
    with pytest.raises(UndefinedMetricError, match="got 1 and 0"):
        accuracy_drop([True], np.zeros(0, dtype=bool))


@pytest.mark.parametrize(("hits", "total", "level"), [(0, 40, 0.95), (7, 50, 0.95), (50, 50, 0.9), (299, 1000, 0.99)])
def test_the_interval_of_a_share_is_wilsons(hits: int, total: int, level: float):
    from scipy.stats import binomtest

    found = share_interval(hits, total, level=level)
    expected = binomtest(hits, total).proportion_ci(level, method="wilson")
    assert found == pytest.approx((hits / total, expected.low, expected.high), abs=1e-12)


def test_the_interval_of_a_drop_is_newcombes_published_example():
    # Newcombe 1998, table II: 56/70 against 48/80 gives 0.2000 with 0.0524 to 0.3339; 10/10 against 0/10: 0.6075 to 1
    found = drop_interval(share_interval(56, 70), share_interval(48, 80))
    assert found == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    assert drop_interval(share_interval(10, 10), share_interval(0, 10)) == pytest.approx((1, 0.6075, 1), abs=5e-5)


def test_a_share_of_nothing_is_refused():
    with pytest.raises(UndefinedMetricError, match="got 0 of 0"):
        share_interval(0, 0)
