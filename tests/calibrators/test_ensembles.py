import copy
import math

import pytest
import torch
from scipy.special import rel_entr

from ood_toolkit import registry
from ood_toolkit.calibrators import (
    CalibrateThenPoolEnsemble,
    GeometricMeanEnsemble,
    MajorityVoteEnsemble,
    MeanLogitEnsemble,
    MeanProbabilityEnsemble,
    PooledTemperatureEnsemble,
    PoolThenCalibrateEnsemble,
    StackedProbabilityEnsemble,
    TemperatureCalibrator,
)
from ood_toolkit.fitted import NotFitted
from tests.calibrators.data import drawn, nll


def members(count=3, rows=1200, classes=6, seed=0, noise=2.0):
    """Noisy copies of logits from whose softmax at temperature 2 the labels are drawn."""
    logits, labels = drawn(rows, classes, seed=seed)
    generator = torch.Generator().manual_seed(seed + 50)
    extra = torch.randn(count, rows, classes, generator=generator, dtype=torch.float64)
    return logits + noise * extra, labels


@pytest.mark.parametrize("kind", registry.ensemble_classes().values())
def test_every_pool_gives_finite_log_distributions_of_the_members_dtype(kind):
    for dtype in (torch.float32, torch.float64):
        logits, labels = members()
        pooled = kind().fit(logits.to(dtype), labels)(logits.to(dtype))
        assert pooled.dtype == dtype
        assert bool(pooled.isfinite().all())
        torch.testing.assert_close(pooled.double().exp().sum(1), torch.ones(1200).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", registry.ensemble_classes().values())
def test_members_in_any_order_and_rows_alone_give_the_same(kind):
    logits, labels = members()
    fitted = kind().fit(logits, labels)
    shuffled = kind().fit(logits.flip(0), labels)
    torch.testing.assert_close(fitted(logits), shuffled(logits.flip(0)), atol=1e-9, rtol=0)
    torch.testing.assert_close(fitted(logits[:, 5:6]), fitted(logits)[5:6], atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", registry.ensemble_classes().values())
def test_a_state_dict_and_a_copy_restore_a_pool(kind):
    logits, labels = members()
    fitted = kind().fit(logits, labels)
    restored = registry.build_ensemble(kind().spec)
    restored.load_state_dict(fitted.state_dict())
    assert torch.equal(restored(logits), fitted(logits))
    assert torch.equal(copy.deepcopy(fitted)(logits), fitted(logits))


def test_the_mean_probability_is_the_mean_of_the_softmaxes():
    logits, _ = members()
    expected = torch.stack([member.softmax(1) for member in logits]).mean(0)
    torch.testing.assert_close(MeanProbabilityEnsemble()(logits).exp(), expected)
    far = torch.tensor([[[0.0, -2000.0]], [[0.0, -1000.0]]])  # no underflow: log-probabilities stay apart
    assert float(MeanProbabilityEnsemble()(far)[0, 1]) == pytest.approx(-1000 - math.log(2))


def test_the_mean_logit_and_the_geometric_mean_are_one_distribution():
    logits, _ = members()
    offsets = torch.randn(3, 1200, 1, dtype=torch.float64) * 10
    torch.testing.assert_close(MeanLogitEnsemble()(logits), GeometricMeanEnsemble()(logits + offsets))
    product = torch.stack([member.softmax(1) for member in logits]).prod(0).pow(1 / 3)
    torch.testing.assert_close(GeometricMeanEnsemble()(logits).exp(), product / product.sum(1, keepdim=True))


def test_the_geometric_mean_is_nearest_to_the_members_in_divergence():
    logits, _ = members(rows=50)
    parts = logits.softmax(2).numpy()
    pool = GeometricMeanEnsemble()(logits).exp()

    def divergence(q):
        return rel_entr(q.numpy(), parts).sum(2).mean(0)

    for seed in range(5):
        noise = torch.randn(pool.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        near = (pool.log() + 0.05 * noise).softmax(1)
        assert (divergence(near) >= divergence(pool)).all()


def test_a_majority_wins_and_ties_go_to_the_larger_mean_probability():
    votes = torch.tensor([[5.0, 0, 0], [0, 0.2, 0], [0, 0.1, 0]])[:, None]
    pooled = MajorityVoteEnsemble()(votes).exp()[0]
    assert int(pooled.argmax()) == 1
    assert float(pooled[1]) == pytest.approx(2 / 3, abs=0.01)
    tied = torch.tensor([[0.2, 0, 0], [0, 3.0, 0]])[:, None]
    assert int(MajorityVoteEnsemble()(tied).argmax()) == 1
    plain = MajorityVoteEnsemble(soft_vote=0)(tied).exp()
    assert plain.tolist() == [[0.5, 0.5, 0.0]]
    for soft_vote in (0.01, 1.0):
        logits, _ = members(5)
        counts = torch.nn.functional.one_hot(logits.argmax(2), 6).sum(0)
        chosen = MajorityVoteEnsemble(soft_vote)(logits).argmax(1)
        assert torch.equal(counts.gather(1, chosen[:, None]).squeeze(1), counts.amax(1))


def test_compositions_are_their_parts_in_their_order():
    logits, labels = members()
    fresh, _ = members(seed=1)
    pool_first = PoolThenCalibrateEnsemble().fit(logits, labels)
    pooled = MeanProbabilityEnsemble()(logits)
    expected = TemperatureCalibrator().fit(pooled, labels).log_probabilities(MeanProbabilityEnsemble()(fresh))
    torch.testing.assert_close(pool_first(fresh), expected)
    pool_last = CalibrateThenPoolEnsemble(pool="mean_logit").fit(logits, labels)
    scaled = [
        member_fresh / TemperatureCalibrator().fit(member, labels).temperature
        for member, member_fresh in zip(logits, fresh, strict=True)
    ]
    torch.testing.assert_close(pool_last(fresh), torch.stack(scaled).mean(0).log_softmax(1))


def test_stacking_weights_are_the_best_on_a_fine_grid():
    logits, labels = members(3)
    logits[2] = logits[2].flip(0)  # a member that knows nothing
    fitted = StackedProbabilityEnsemble().fit(logits, labels)
    parts = logits.softmax(2)

    def cost(weights):
        return nll(torch.einsum("m,mnc->nc", weights, parts).log(), labels)

    steps = torch.linspace(0, 1, 21, dtype=torch.float64)
    grid = [torch.stack([a, b, 1 - a - b]) for a in steps for b in steps if a + b < 1 + 1e-9]
    assert cost(fitted.weights) <= min(cost(weights.clamp_min(1e-12)) for weights in grid) + 1e-9
    assert float(fitted.weights[2]) < 0.1
    torch.testing.assert_close(fitted(logits).exp(), torch.einsum("m,mnc->nc", fitted.weights, parts))


def test_one_member_is_temperature_scaling():
    logits, labels = drawn(900, 5)
    scaled = TemperatureCalibrator().fit(logits, labels).log_probabilities(logits)
    for kind in (PooledTemperatureEnsemble, PoolThenCalibrateEnsemble, CalibrateThenPoolEnsemble):
        torch.testing.assert_close(kind().fit(logits[None], labels)(logits[None]), scaled, atol=1e-8, rtol=0)


def test_calibrated_pools_beat_each_calibrated_member():
    logits, labels = members(5)
    fresh, truth = members(5, seed=1)
    pairs = zip(logits, fresh, strict=True)
    calibrated = [TemperatureCalibrator().fit(member, labels).log_probabilities(f) for member, f in pairs]
    best = min(nll(member, truth) for member in calibrated)
    for kind in (PooledTemperatureEnsemble, PoolThenCalibrateEnsemble, CalibrateThenPoolEnsemble):
        assert nll(kind().fit(logits, labels)(fresh), truth) < best - 0.05


def test_the_mean_of_calibrated_members_is_underconfident_and_a_shared_temperature_is_bolder():
    logits, labels = members(5)
    pooled = CalibrateThenPoolEnsemble().fit(logits, labels)(logits)
    assert float(TemperatureCalibrator().fit(pooled, labels).temperature) < 0.9
    alone = [float(TemperatureCalibrator().fit(member, labels).temperature) for member in logits]
    assert float(PooledTemperatureEnsemble().fit(logits, labels).temperature) < min(alone)


def test_a_member_count_that_changes_or_a_missing_fit_is_named():
    logits, labels = members()
    with pytest.raises(NotFitted, match="members' calibrators"):
        CalibrateThenPoolEnsemble()(logits)
    with pytest.raises(NotFitted, match="temperature"):
        PooledTemperatureEnsemble()(logits)
    with pytest.raises(ValueError, match="fitted on 3 members, but got logits of 2"):
        CalibrateThenPoolEnsemble().fit(logits, labels)(logits[:2])


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (0.0, 1.0), (1.0, float("inf"))])
def test_a_shared_temperature_needs_bounds_that_hold_one(bounds: tuple[float, float]):
    with pytest.raises(ValueError, match="bounds must be 0 < smallest T < largest T"):
        PooledTemperatureEnsemble(bounds=bounds)
