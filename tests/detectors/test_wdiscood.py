import numpy as np
import pytest
import scipy.linalg
import torch

from ood_toolkit.detectors import WDiscOODDetector
from ood_toolkit.outputs import Head, Outputs


def literal_score(train, labels, test, discriminants, weight):
    """As the authors: whiten by Σ_w^(−1/2), Fisher discriminants of the whitened rows, two distances per row."""
    classes = np.unique(labels)
    centred = np.concatenate([train[labels == c] - train[labels == c].mean(axis=0) for c in classes])
    whitener = np.real(scipy.linalg.sqrtm(np.linalg.inv(centred.T @ centred / len(train))))
    train, test = train @ whitener, test @ whitener
    means = np.stack([train[labels == c].mean(axis=0) for c in classes])
    centre = train.mean(axis=0)
    within = np.concatenate([train[labels == c] - m for c, m in zip(classes, means, strict=True)])
    within = within.T @ within / len(train)
    between = (means - centre).T @ (means - centre) / len(classes)
    ratios, directions = np.linalg.eig(np.linalg.inv(within + 1e-3 * np.eye(len(within))) @ between)
    kept = np.real(directions[:, np.argsort(-np.real(ratios))[:discriminants]]).T
    _, _, basis = np.linalg.svd(kept)
    basis = basis[:discriminants]
    scores = []
    for row in test:
        discriminative = min(np.linalg.norm(kept @ (row - m)) for m in means)
        rest = np.linalg.norm((np.eye(len(row)) - basis.T @ basis) @ (row - centre))
        scores.append(discriminative + weight * rest)
    return torch.tensor(scores, dtype=torch.float64)


@pytest.mark.parametrize(("discriminants", "weight"), [(1, 5.0), (2, 1.0), (3, 5.0)])
def test_wdiscood_is_the_two_distances_of_the_authors_code(outputs_like, discriminants, weight):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    arrays = train.features.numpy(), train.labels.numpy(), test.features.numpy()
    expected = literal_score(*arrays, discriminants, weight)
    scores = WDiscOODDetector(discriminants=discriminants, weight=weight).fit(train)(test)
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)


def test_normalised_wdiscood_sees_directions_only(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)

    def unit(rows):
        return (rows / rows.norm(dim=1, keepdim=True)).numpy()

    expected = literal_score(unit(train.features), train.labels.numpy(), unit(test.features), 3, 5.0)
    scores = WDiscOODDetector(normalise=True).fit(train)(test)
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)


def test_no_more_directions_are_taken_than_separate_the_classes(outputs_like):
    detector = WDiscOODDetector(discriminants=7).fit(outputs_like(240))
    assert detector.discriminative.shape == (8, 3)
    assert detector.residual.shape == (8, 5)


@pytest.mark.parametrize(("width", "classes", "expected"), [(12, 5, 4), (9, 8, 6)])
def test_by_default_there_is_a_direction_less_than_classes_but_at_most_two_thirds_of_the_width(
    width, classes, expected
):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40 * classes) % classes
    means = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    features = means[labels] + torch.randn(len(labels), width, generator=generator, dtype=torch.float64)
    head = Head(means, torch.zeros(classes, dtype=torch.float64))
    train = Outputs(logits=head(features), features=features, labels=labels, head=head)
    assert WDiscOODDetector().fit(train).discriminative.shape == (width, expected)
