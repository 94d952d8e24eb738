import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from ood_toolkit.detectors import SSDDetector
from ood_toolkit.outputs import Outputs


def literal_distance(train, test):
    """As the authors: standardise every dimension, then the Mahalanobis distance with np.cov and pinv."""
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    train, test = (train - mean) / deviation, (test - mean) / deviation
    precision = np.linalg.pinv(np.cov(train.T, bias=True))
    return np.array([(row - train.mean(axis=0)) @ precision @ (row - train.mean(axis=0)) for row in test])


def test_one_cluster_is_the_distance_of_the_authors_code(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    expected = literal_distance(normalize(train.features).numpy(), normalize(test.features).numpy())
    torch.testing.assert_close(SSDDetector().fit(train)(test), torch.from_numpy(expected), rtol=1e-8, atol=1e-8)


def test_several_clusters_give_the_least_of_their_distances():
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(300) % 3
    rows = 10 * torch.eye(3, 5, dtype=torch.float64)[group]
    rows = rows + torch.randn(300, 5, generator=generator, dtype=torch.float64)
    directions = normalize(rows).numpy()
    by_cluster = []
    for cluster in range(3):
        members = directions[group.numpy() == cluster]
        by_cluster.append(literal_distance(members, directions))
    train = Outputs.from_logits(rows)
    scores = SSDDetector(clusters=3, seed=1).fit(train)(train)
    torch.testing.assert_close(scores, torch.from_numpy(np.min(by_cluster, axis=0)), rtol=1e-7, atol=1e-7)


def test_labels_are_not_used(outputs_like):
    train, test = outputs_like(240), outputs_like(30, seed=1)
    unlabelled = Outputs.from_logits(train.features)
    assert torch.equal(SSDDetector().fit(unlabelled)(test), SSDDetector().fit(train)(test))


def test_more_clusters_than_rows_are_refused(outputs_like):
    with pytest.raises(ValueError, match="between 1 and the 20 training rows, got 21"):
        SSDDetector(clusters=21).fit(outputs_like(20))
