import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch.nn.functional import normalize

from ood_toolkit.detectors import CoPDetector, CoRPDetector, PCADetector
from ood_toolkit.detectors.pca import draw_frequencies, fourier_features


def literal_errors(train, test, components):
    pca = PCA(components, svd_solver="full").fit(train)
    return np.linalg.norm(test - pca.inverse_transform(pca.transform(test)), axis=1)


@pytest.mark.parametrize("dim", [1, 3, 7])
def test_pca_gives_scikit_learns_reconstruction_error(outputs_like, dim):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    errors = literal_errors(train.features.numpy(), test.features.numpy(), dim)
    plain = PCADetector(dim=dim, relative=False).fit(train)(test)
    torch.testing.assert_close(plain, torch.from_numpy(errors), rtol=1e-8, atol=1e-9)
    relative = errors / np.linalg.norm(test.features.numpy(), axis=1)
    torch.testing.assert_close(PCADetector(dim=dim).fit(train)(test), torch.from_numpy(relative), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_share_of_variance_keeps_scikit_learns_number_of_components(outputs_like, share):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    errors = literal_errors(train.features.numpy(), test.features.numpy(), share)
    scores = PCADetector(variance=share, relative=False).fit(train)(test)
    torch.testing.assert_close(scores, torch.from_numpy(errors), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("share", [0.5, 0.85])
def test_cop_is_pca_of_the_directions(outputs_like, share):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    errors = literal_errors(normalize(train.features).numpy(), normalize(test.features).numpy(), share)
    torch.testing.assert_close(CoPDetector(share).fit(train)(test), torch.from_numpy(errors), rtol=1e-8, atol=1e-9)


def test_corp_is_pca_of_the_random_fourier_features(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    detector = CoRPDetector(variance=0.8, gamma=2.0, width=40, seed=3).fit(train)
    draws = torch.Generator().manual_seed(3)
    frequencies = 2.0 * torch.randn(8, 40, generator=draws, dtype=torch.float64)  # √(2γ)
    phases = 2 * np.pi * torch.rand(40, generator=draws, dtype=torch.float64)

    def mapped(rows):
        return np.sqrt(2 / 40) * np.cos(normalize(rows).numpy() @ frequencies.numpy() + phases.numpy())

    errors = literal_errors(mapped(train.features), mapped(test.features), 0.8)
    torch.testing.assert_close(detector(test), torch.from_numpy(errors), rtol=1e-8, atol=1e-9)


def test_the_random_features_reproduce_the_gaussian_kernel(outputs_like):
    rows = outputs_like(20).features
    rows = normalize(rows)
    mapped = fourier_features(rows, *draw_frequencies(8, 200_000, gamma=3.0, seed=0))
    kernel = (-3.0 * torch.cdist(rows, rows).square()).exp()
    torch.testing.assert_close(mapped @ mapped.T, kernel, rtol=0, atol=0.015)


def test_another_seed_draws_other_features(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    first, second = (CoRPDetector(seed=seed).fit(train)(test) for seed in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, CoRPDetector(seed=0).fit(train)(test))


def test_impossible_shares_and_dimensions_are_refused(outputs_like):
    with pytest.raises(ValueError, match=r"variance must lie in \(0, 1\], got 90"):
        CoPDetector(variance=90).fit(outputs_like(20))
    with pytest.raises(ValueError, match="dim must lie between 1 and 8, got 9"):
        PCADetector(dim=9).fit(outputs_like(20))
