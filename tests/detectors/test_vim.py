from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from sklearn.covariance import EmpiricalCovariance

from ood_toolkit.detectors import ResidualDetector, ViMDetector
from ood_toolkit.detectors.vim import origin, principal_dimension
from ood_toolkit.outputs import Head


def literal_residual(train, test, dim):
    """Length of each row outside the principal subspace about −W⁺b, row by row."""
    weight, bias = train.head.weight.numpy(), train.head.bias.numpy()
    u = -np.linalg.pinv(weight) @ bias
    covariance = EmpiricalCovariance(assume_centered=True).fit(train.features.numpy() - u).covariance_
    values, vectors = np.linalg.eig(covariance)
    null = vectors[:, np.argsort(-values)[dim:]]
    return np.array([np.linalg.norm(null.T @ (row - u)) for row in test.features.numpy()])


@pytest.mark.parametrize("peer", ["openood", "openood-vlm"])
def test_residual_agrees_with_the_other_tools(golden, peer):
    detector = ResidualDetector(dim=32).fit(golden.outputs("fit"))
    golden.check(f"{peer}/Residual/dim=32", detector(golden.outputs("id")), detector(golden.outputs("ood")))


@pytest.mark.parametrize("dim", [1, 4, 7])
def test_residual_is_the_length_outside_the_principal_subspace(outputs_like, dim):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    expected = torch.from_numpy(literal_residual(train, test, dim))
    torch.testing.assert_close(ResidualDetector(dim).fit(train)(test), expected, rtol=1e-8, atol=1e-8)


def test_vim_is_the_scaled_residual_minus_the_log_sum_of_the_logits(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    alpha = train.logits.amax(dim=1).mean().item() / literal_residual(train, train, 4).mean()
    expected = alpha * literal_residual(train, test, 4) - logsumexp(test.logits.numpy(), axis=1)
    detector = ViMDetector().fit(train)  # D = 8: the rule gives 4
    torch.testing.assert_close(detector(test), torch.from_numpy(expected), rtol=1e-8, atol=1e-8)


def test_vim_ranks_as_the_softmax_probability_of_the_virtual_logit(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    detector = ViMDetector().fit(train)
    virtual = detector.alpha * torch.from_numpy(literal_residual(train, test, 4))
    probability = torch.cat([test.logits, virtual.unsqueeze(1)], dim=1).softmax(dim=1)[:, -1]
    torch.testing.assert_close(detector(test), torch.logit(probability), rtol=1e-5, atol=1e-5)  # p rounds near 1


def test_the_virtual_logit_has_the_mean_size_of_the_largest_logit_in_training(outputs_like):
    train = outputs_like(240)
    detector = ViMDetector().fit(train)
    lengths = ResidualDetector().fit(train)(train)
    torch.testing.assert_close(detector.alpha * lengths.mean(), train.logits.amax(dim=1).mean())


@pytest.mark.parametrize(("width", "dim"), [(2048, 1000), (1280, 512), (768, 512), (767, 383), (64, 32), (3, 1)])
def test_the_default_dimension_follows_the_authors_benchmarks(width, dim):
    assert principal_dimension(None, width, 10_000) == dim


def test_a_dimension_that_leaves_no_residual_is_refused(outputs_like):
    with pytest.raises(ValueError, match="between 1 and 7 for 8 features, got 8"):
        ViMDetector(dim=8).fit(outputs_like(20))


def test_the_origin_of_a_centred_head_ignores_the_singular_value_that_is_rounding():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 64, generator=generator)
    bias = torch.randn(20, generator=generator)
    centred = Head(weight - weight.mean(dim=0), bias)
    # the exact pseudo-inverse of a matrix whose columns sum to 0: the shortest solution of the centred equations
    exact = weight.double() - weight.double().mean(dim=0)
    expected = -torch.linalg.pinv(exact, rtol=1e-9) @ bias.double()
    torch.testing.assert_close(origin(centred), expected, rtol=1e-4, atol=1e-4)
    assert origin(centred, cutoff=1e-15).norm() > 1000 * expected.norm()


def test_residual_reads_all_rows_labelled_or_not(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    unlabelled = replace(train, labels=torch.full_like(train.labels, -1))
    assert torch.equal(ViMDetector().fit(unlabelled)(test), ViMDetector().fit(train)(test))


def test_too_few_training_rows_for_the_principal_subspace_are_refused_or_halved():
    assert principal_dimension(None, 1280, 50_000) == 512
    assert principal_dimension(None, 1280, 400) == 200  # with 512 every training row would have residual 0
    with pytest.raises(ValueError, match="dim must be below the 100 training rows"):
        principal_dimension(100, 1280, 100)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (7, 7)])
def test_the_origin_is_the_shortest_feature_with_logits_nearest_to_zero(shape):
    generator = torch.Generator().manual_seed(3)
    head = Head(*(torch.randn(*size, generator=generator, dtype=torch.float64) for size in (shape, shape[:1])))
    expected = torch.linalg.lstsq(head.weight, -head.bias.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    torch.testing.assert_close(origin(head), expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(origin(head, cutoff=1e-15), expected, rtol=1e-8, atol=1e-10)
