from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance

from ood_toolkit.detectors import MahalanobisDetector, MahalanobisPPDetector, RMDSDetector, RMDSPPDetector
from ood_toolkit.outputs import Head, Outputs


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def literal_distances(train, labels, test):
    """Squared Mahalanobis distances to every class and to the whole, one row and one class at a time."""
    classes = np.unique(labels)
    means = np.stack([train[labels == c].mean(axis=0) for c in classes])
    precision = np.linalg.pinv(EmpiricalCovariance().fit(train - means[np.searchsorted(classes, labels)]).covariance_)
    whole = np.linalg.pinv(np.cov(train.T, bias=True))
    centre = train.mean(axis=0)
    to_class = np.array([[(f - m) @ precision @ (f - m) for m in means] for f in test])
    to_whole = np.array([(f - centre) @ whole @ (f - centre) for f in test])
    return to_class.min(axis=1), to_whole


@pytest.mark.parametrize(
    ("key", "scale"),
    [
        ("openood/Mahalanobis", 1.0),
        ("openood-vlm/Mahalanobis", 1.0),
        ("ninco/Mahalanobis", 1.0),
        ("oodeel/Mahalanobis", 1 / 2),  # keeps the Gaussian's ½
        ("pytorch-ood/Mahalanobis", 1 / 4000),  # ½, and a covariance that is not divided by N = 2000
        ("pytorch-ood-0.2.0/Mahalanobis", 1999 / 4000),  # ½, and a covariance divided by N − 1
    ],
)
def test_mahalanobis_agrees_with_the_other_tools(golden, key, scale):
    detector = MahalanobisDetector().fit(golden.outputs("fit"))
    golden.check(key, detector(golden.outputs("id")), detector(golden.outputs("ood")), scale=scale)


@pytest.mark.parametrize(
    ("kind", "prepared", "relative"),
    [
        (MahalanobisDetector, lambda rows: rows, False),
        (RMDSDetector, lambda rows: rows, True),
        (MahalanobisPPDetector, unit, False),
        (RMDSPPDetector, unit, True),
    ],
)
def test_each_distance_is_the_quadratic_form_of_its_equation(outputs_like, kind, prepared, relative):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    nearest, background = literal_distances(
        prepared(train.features.numpy()), train.labels.numpy(), prepared(test.features.numpy())
    )
    expected = torch.from_numpy(nearest - background if relative else nearest)
    torch.testing.assert_close(kind().fit(train)(test), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [MahalanobisDetector, RMDSDetector])
def test_directions_without_variance_are_left_out_as_the_pseudo_inverse_does(outputs_like, kind):
    def degenerate(outputs):
        features = outputs.features.clone()
        features[:, 0] = 3.0  # never changes
        features[:, 1] = features[:, 2] + features[:, 3]  # depends on others
        return replace(outputs, features=features, logits=outputs.head(features))

    train, test = degenerate(outputs_like(240)), degenerate(outputs_like(30, seed=1))
    nearest, background = literal_distances(train.features.numpy(), train.labels.numpy(), test.features.numpy())
    expected = torch.from_numpy(nearest - background if kind is RMDSDetector else nearest)
    torch.testing.assert_close(kind().fit(train)(test), expected, rtol=1e-6, atol=1e-6)


def test_a_ridge_adds_to_the_diagonal_of_the_covariance(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    features, labels = train.features.numpy(), train.labels.numpy()
    means = np.stack([features[labels == c].mean(axis=0) for c in range(train.classes)])
    covariance = (features - means[labels]).T @ (features - means[labels]) / len(features)
    precision = np.linalg.inv(covariance + 0.3 * np.eye(len(covariance)))
    expected = [min((f - m) @ precision @ (f - m) for m in means) for f in test.features.numpy()]
    scores = MahalanobisDetector(ridge=0.3).fit(train)(test)
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0)


def test_badly_conditioned_float32_features_score_as_in_float64(outputs_like):
    spread = torch.logspace(0, -5, 8, dtype=torch.float64)  # variances from 1 to 1e-10

    def stretched(outputs):
        features = (outputs.features * spread).float()
        return Outputs(
            logits=outputs.logits.float(), features=features, labels=outputs.labels, head=outputs.head.to(torch.float32)
        )

    train, test = stretched(outputs_like(240)), stretched(outputs_like(30, seed=1))
    single = RMDSDetector().fit(train)(test)
    double = RMDSDetector().fit(train.to(torch.float64))(test.to(torch.float64))
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)


def test_classes_without_rows_are_refused_or_left_out(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    without = train.rows(train.labels != 2)
    with pytest.raises(ValueError, match=r"classes \[2\] have none"):
        MahalanobisDetector().fit(without)
    nearest, _ = literal_distances(without.features.numpy(), without.labels.numpy(), test.features.numpy())
    scores = MahalanobisDetector(absent="skip").fit(without)(test)
    torch.testing.assert_close(scores, torch.from_numpy(nearest), rtol=1e-9, atol=1e-9)


def test_normalised_distances_do_not_see_the_length_of_a_feature(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    longer = replace(test, features=7 * test.features, logits=test.head(7 * test.features))
    for kind in (MahalanobisPPDetector, RMDSPPDetector):
        detector = kind().fit(train)
        torch.testing.assert_close(detector(longer), detector(test), rtol=1e-9, atol=1e-9)


def test_fitting_in_many_batches_is_fitting_at_once(outputs_like, monkeypatch):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    whole = RMDSDetector().fit(train)(test)
    monkeypatch.setattr("ood_toolkit.stats._BLOCK_NUMBERS", 1)  # 64 rows, the least
    torch.testing.assert_close(RMDSDetector().fit(train)(test), whole, rtol=1e-9, atol=1e-9)


def test_a_head_of_other_classes_than_the_labels_is_no_obstacle(outputs_like):
    train = outputs_like(240)
    head = Head(torch.randn(train.classes, train.width, dtype=torch.float64), torch.zeros(train.classes).double())
    other = replace(train, head=head, logits=head(train.features))
    assert torch.equal(MahalanobisDetector().fit(other)(train), MahalanobisDetector().fit(train)(train))
