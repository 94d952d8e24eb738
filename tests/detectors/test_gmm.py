import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.decomposition import PCA

from ood_toolkit.detectors import GMMDetector
from ood_toolkit.stats import moments


def literal_density(train: np.ndarray, labels: np.ndarray, test: np.ndarray, ridge: float, tied: bool = False):
    terms = []
    eye = ridge * np.eye(train.shape[1])
    classes = np.unique(labels)
    means = np.stack([train[labels == c].mean(axis=0) for c in classes])
    within = train - means[np.searchsorted(classes, labels)]
    for c, mean in zip(classes, means, strict=True):
        rows = train[labels == c]
        covariance = within.T @ within / len(within) if tied else np.cov(rows.T, bias=True)
        weight = np.log(len(rows) / len(train))
        terms.append(weight + multivariate_normal(mean, covariance + eye).logpdf(test))  # pyright: ignore
    return -torch.from_numpy(np.stack(terms)).logsumexp(dim=0)


def test_gmm_agrees_with_pytorch_ood(golden):
    detector = GMMDetector().fit(golden.outputs("fit"))
    golden.check("pytorch-ood/GMM", detector(golden.outputs("id")), detector(golden.outputs("ood")))


@pytest.mark.parametrize("covariance", ["full", "tied"])
@pytest.mark.parametrize("ridge", [1e-6, 0.5])
def test_gmm_is_scipys_mixture_density(outputs_like, covariance, ridge):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    arrays = train.features.numpy(), train.labels.numpy(), test.features.numpy()
    expected = literal_density(*arrays, ridge, tied=covariance == "tied")
    scores = GMMDetector(covariance=covariance, ridge=ridge).fit(train)(test)
    torch.testing.assert_close(scores, expected, rtol=1e-8, atol=1e-8)


def test_fewer_dimensions_are_principal_components(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    pca = PCA(3).fit(train.features.numpy())
    reduced = [np.asarray(pca.transform(x)) for x in (train.features.numpy(), test.features.numpy())]
    scores = GMMDetector(dim=3).fit(train)(test)
    torch.testing.assert_close(
        scores, literal_density(reduced[0], train.labels.numpy(), reduced[1], 1e-6), rtol=1e-7, atol=1e-7
    )


def test_by_default_the_covariances_fit_into_their_bound(outputs_like, monkeypatch):
    monkeypatch.setattr("ood_toolkit.detectors.gmm._COVARIANCE_NUMBERS", 4 * 5**2)
    train, test = outputs_like(240), outputs_like(30, seed=1)
    assert torch.equal(GMMDetector().fit(train)(test), GMMDetector(dim=5).fit(train)(test))


def test_a_class_with_fewer_rows_than_features_needs_a_ridge(outputs_like):
    train = outputs_like(240)
    few = train.rows(torch.cat([(train.labels == c).nonzero().flatten()[:5] for c in range(4)]))
    with pytest.raises(ValueError, match="singular with ridge=0: give more rows, a larger ridge"):
        GMMDetector(ridge=0.0).fit(few)
    arrays = few.features.numpy(), few.labels.numpy(), train.features.numpy()
    scores = GMMDetector(ridge=1e-3).fit(few)(train)
    torch.testing.assert_close(scores, literal_density(*arrays, 1e-3), rtol=1e-8, atol=1e-8)


def test_classes_without_rows_are_left_out_on_request(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    without = train.rows(train.labels != 1)
    arrays = without.features.numpy(), without.labels.numpy(), test.features.numpy()
    scores = GMMDetector(absent="skip").fit(without)(test)
    torch.testing.assert_close(scores, literal_density(*arrays, 1e-6), rtol=1e-8, atol=1e-8)
    assert int((moments(without).counts == 0).sum()) == 1
