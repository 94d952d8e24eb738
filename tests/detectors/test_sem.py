from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture

from ood_toolkit.detectors.layers import join_layers
from ood_toolkit.detectors.mixture import _first_centres, fit_tied_mixture, log_joint
from ood_toolkit.detectors.sem import SEMDetector
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing import check_detector

SURE = {"tolerance": 1e-12, "iterations": 3000}


def in_groups(rows: int, width: int, groups: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Rows round a few centres, correlated alike round each."""
    fixed = torch.Generator().manual_seed(width)
    centres = spread * torch.randn(groups, width, generator=fixed, dtype=torch.float64)
    mix = torch.eye(width, dtype=torch.float64) + 0.3 * torch.randn(width, width, generator=fixed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    number = torch.randint(groups, (rows,), generator=generator)
    return centres[number] + torch.randn(rows, width, generator=generator, dtype=torch.float64) @ mix


def styled(rows: int, seed: int) -> tuple[Outputs, torch.Tensor]:
    """Outputs with statistics of two shallow layers, and the statistics in one array."""
    outputs = Outputs.from_logits(in_groups(rows, 6, 4, seed))
    layers = [
        in_groups(rows, 8, 3, seed + 1).abs().view(rows, 2, 4),
        in_groups(rows, 4, 2, seed + 2).abs().view(rows, 2, 2),
    ]
    whole = torch.cat([part for layer in layers for part in layer.unbind(dim=1)], dim=1)
    return replace(outputs, taps={"shallow_statistics": join_layers(layers)}), whole


def reference(train: torch.Tensor, test: torch.Tensor, components: int, dim: int) -> np.ndarray:
    """Log-densities by scikit-learn, the best of several starts."""
    pca = PCA(dim, svd_solver="full").fit(train.numpy())
    mixture = GaussianMixture(components, covariance_type="tied", tol=1e-12, max_iter=3000, n_init=8, random_state=0)
    mixture.fit(pca.transform(train.numpy()))
    return mixture.score_samples(pca.transform(test.numpy()))


@pytest.mark.parametrize("components", [1, 2, 5])
def test_the_mixture_is_scikit_learns(components):
    train, test = (in_groups(rows, 5, components, seed, spread=8.0) for rows, seed in ((600, 0), (40, 1)))
    train, test = train - train.mean(dim=0), test - train.mean(dim=0)
    found = fit_tied_mixture(train, components, **SURE)
    density = log_joint(test @ found.whitener, found.means, found.log_factors).logsumexp(dim=1)
    expected = GaussianMixture(components, covariance_type="tied", tol=1e-12, max_iter=3000, n_init=8, random_state=0)
    np.testing.assert_allclose(density.numpy(), expected.fit(train.numpy()).score_samples(test.numpy()), rtol=1e-6)


def test_overlapping_groups_end_where_scikit_learn_ends_from_the_same_start():
    train = in_groups(300, 4, 3, 0, spread=1.0)
    train = train - train.mean(dim=0)
    found = fit_tied_mixture(train, 3, tolerance=0.0, iterations=4000)
    start = _first_centres(train, 3, 0).numpy()
    expected = GaussianMixture(3, covariance_type="tied", tol=1e-13, max_iter=4000, means_init=start, random_state=0)
    expected.fit(train.numpy())
    density = log_joint(train @ found.whitener, found.means, found.log_factors).logsumexp(dim=1)
    np.testing.assert_allclose(density.numpy(), expected.score_samples(train.numpy()), rtol=1e-4)


@pytest.mark.parametrize("weight", [1.0, 0.0, 1e-4])
def test_it_is_the_ratio_of_scikit_learns_mixtures(weight):
    train, train_style = styled(900, 0)
    test, test_style = styled(50, 10)
    detector = SEMDetector(weight=weight, components=4, style_components=1, dim=3, style_dim=5, **SURE).fit(train)
    content = reference(train.features, test.features, 4, 3)
    style = reference(train_style, test_style, 1, 5)
    np.testing.assert_allclose(detector(test).numpy(), weight * style - content, rtol=1e-5, atol=1e-6)


def test_it_is_the_authors_score_where_theirs_does_not_underflow():
    train, _ = styled(900, 0)
    test, _ = styled(50, 10)
    detector = SEMDetector(weight=0.3, components=4, style_components=2).fit(train)

    def theirs(rows: torch.Tensor, which: str) -> torch.Tensor:
        """Their probability: weighted exponentials with the precision of the reduced rows, without constants."""
        parts = [getattr(detector, which + name) for name in ("centre", "whitener", "means", "log_factors")]
        centre, whitener, means, factors = parts
        precision = whitener @ whitener.T
        raw_means = means @ torch.linalg.pinv(whitener)
        total = torch.zeros(len(rows), dtype=torch.float64)
        for mean, weight in zip(raw_means, factors.softmax(dim=0), strict=True):
            zero = rows - centre - mean
            total += weight * torch.exp(-0.5 * ((zero @ precision) * zero).sum(dim=1))
        return torch.log(total)

    expected = 0.3 * theirs(detector._style(test), "style_") - theirs(test.features, "")
    difference = detector(test) - expected
    torch.testing.assert_close(difference, difference[:1].expand(50), rtol=1e-7, atol=1e-7)


def test_the_spread_can_be_the_standard_deviation():
    train, _ = styled(300, 0)
    squared = replace(train, taps={"shallow_statistics": train.taps["shallow_statistics"].clone()})
    squared.taps["shallow_statistics"][:, 1].square_()
    detector = SEMDetector(spread="std", components=3).fit(squared)
    torch.testing.assert_close(detector(squared), SEMDetector(components=3).fit(train)(train))


def test_a_style_of_its_own_does_not_make_an_image_ood():
    """The same content in an unlikely style: flagged by the features, which hold both, and not by the ratio."""
    generator = torch.Generator().manual_seed(0)

    def images(rows: int, shift: float) -> Outputs:
        content = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        style = torch.randn(rows, 2, generator=generator, dtype=torch.float64) + shift
        features = torch.cat([content, style], dim=1)
        statistics = torch.stack([style, torch.ones_like(style)], dim=1)
        return replace(Outputs.from_logits(features), taps={"shallow_statistics": statistics})

    train, plain, foggy = images(2000, 0.0), images(200, 0.0), images(200, 3.0)
    features_alone, ratio = (
        SEMDetector(weight, components=1, style_components=1, style_dim=2).fit(train) for weight in (0.0, 1.0)
    )
    assert (features_alone(foggy).unsqueeze(1) > features_alone(plain)).double().mean() > 0.95
    assert (ratio(foggy).unsqueeze(1) > ratio(plain)).double().mean() < 0.6


def test_more_gaussians_than_rows_are_refused():
    train, _ = styled(8, 0)
    with pytest.raises(ValueError, match="a mixture of 10 Gaussians needs as many rows, but there are 8"):
        SEMDetector().fit(train)
    with pytest.raises(ValueError, match="spread must be 'variance' or 'std', got 'range'"):
        SEMDetector(spread="range")


def test_equal_rows_are_no_trouble():
    train, _ = styled(40, 0)
    few = train.rows([0] * 20 + [1] * 20)
    assert SEMDetector().fit(few)(train).isfinite().all()


def test_few_rows_leave_out_the_axes_that_only_rounding_would_choose():
    train, test = styled(5, 0)[0], styled(30, 9)[0]  # 4 directions of 6 features, and of 12 statistics
    few = SEMDetector(components=1, style_components=1)
    scores = few.fit(train)(test)
    assert (few.whitener.shape, few.style_whitener.shape) == ((6, 4), (12, 4))
    torch.testing.assert_close(few.clone().fit(train.rows([3, 1, 4, 0, 2]))(test), scores)


def test_it_keeps_the_laws():
    check_detector(SEMDetector)
    check_detector(SEMDetector(weight=1e-4, spread="std", dim=5))
