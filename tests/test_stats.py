import math

import numpy as np
import pytest
import torch

from ood_toolkit import stats
from ood_toolkit.outputs import Head, Outputs


def outputs(features, labels=None, classes=5):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(classes, features.shape[1], generator=generator, dtype=features.dtype)
    head = Head(weight, torch.zeros(classes, dtype=features.dtype))
    labels = torch.arange(len(features)) % classes if labels is None else labels
    return Outputs(logits=head(features), features=features, labels=labels, head=head)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("deviation", [1e-2, 1e-4])
def test_second_moments_of_float32_rows_keep_float64_digits_where_the_mean_dwarfs_the_deviation(deviation, drift):
    rows, width = 3000, 200  # more columns than a triangle
    spread = torch.logspace(0, math.log10(deviation), width, dtype=torch.float64)
    rows = 1000 + random(rows, width) * spread
    rows = (rows + drift * torch.linspace(-1, 1, len(rows), dtype=torch.float64).unsqueeze(1)).float()
    exact = np.cov(rows.double().numpy().T, bias=True)
    found = stats.moments(outputs(rows)).total.numpy()
    # measured: 4e-16 of the largest variance, where products in float32 gave up to 9e-7
    assert np.abs(found - exact).max() <= 1e-14 * exact.diagonal().max()
    axes = stats.principal_axes(torch.from_numpy(found))[1][:, : width // 2].numpy()
    expected = np.linalg.eigh(exact)[1][:, width // 2 :]
    # the subspace that `vim` and `pca` cut off: sines of the angles between the two
    assert np.linalg.norm(axes - expected @ (expected.T @ axes), 2) <= 1e-10


def test_blocks_are_all_rows_in_order_and_none_is_above_the_bound(monkeypatch):
    monkeypatch.setattr(stats, "_BLOCK_NUMBERS", 1000)
    data = outputs(random(300, 4)).with_taps({"wide": random(300, 2, 3)})
    parts = list(stats.blocks(data))
    assert [len(part) for part in parts] == [66, 66, 66, 66, 36]  # 5 logits, 4 features and 6 numbers of the tap
    assert torch.equal(torch.cat([part.features for part in parts]), data.features)
    assert [len(part) for part in stats.blocks(data, 128)] == [128, 128, 44]
    assert list(stats.blocks(data.rows(slice(0, 0)))) == []


@pytest.mark.parametrize("k", [1, 3, 40, 200])
@pytest.mark.parametrize("columns", [200, 517, 1029])
def test_the_largest_entries_are_those_of_topk(k, columns):
    values = random(9, columns)
    best, where = stats.largest_entries(values, k)
    expected = values.topk(k, dim=1)
    assert torch.equal(best, expected.values)
    assert torch.equal(where, expected.indices)
    assert torch.equal(stats.largest_values(values, k).sort(dim=1, descending=True).values, expected.values)


def test_the_largest_of_tied_entries_stand_where_they_were_found():
    values = random(9, 300).relu().round()
    best, where = stats.largest_entries(values, 5)
    assert torch.equal(best, values.topk(5, dim=1).values)
    assert torch.equal(values.gather(1, where), best)
    assert all(len(row.unique()) == 5 for row in where)


@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("bank_rows", [7, 8192])
def test_the_nearest_rows_are_those_of_a_full_sort(k, bank_rows, monkeypatch):
    monkeypatch.setattr(stats, "_BANK_ROWS", bank_rows)
    monkeypatch.setattr(stats, "_CHUNK_NUMBERS", 70)
    queries, bank = random(23, 6), random(60, 6, seed=1)
    everything = torch.stack([(bank - query).square().sum(dim=1) for query in queries])
    expected, order = everything.sort(dim=1)
    squared, rows = stats.nearest(queries, bank, k)
    torch.testing.assert_close(squared, expected[:, :k])
    assert torch.equal(rows, order[:, :k])
    products, rows = stats.nearest(queries, bank, k, largest_product=True)
    expected, order = (queries @ bank.T).sort(dim=1, descending=True)
    torch.testing.assert_close(products, expected[:, :k])
    assert torch.equal(rows, order[:, :k])


def test_small_distances_far_from_the_origin_keep_their_digits_in_float32():
    bank = 100 + random(40, 6, dtype=torch.float32)
    queries = bank + 1e-3 * random(40, 6, seed=1, dtype=torch.float32)
    exact = torch.cdist(queries.double(), bank.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    squared, rows = stats.nearest(queries, bank, 3)
    torch.testing.assert_close(squared.double(), exact.gather(1, rows), rtol=1e-5, atol=0)
    assert torch.equal(rows[:, 0], torch.arange(40))
    squared = stats.nearest_point(queries.double(), bank.double())[0]
    torch.testing.assert_close(squared, exact.diagonal(), rtol=1e-9, atol=0)


def test_no_queries_have_no_neighbours():
    squared, rows = stats.nearest(random(0, 6), random(5, 6), 2)
    assert squared.shape == rows.shape == (0, 2)
    assert stats.nearest_point(random(0, 6), random(5, 6))[0].shape == (0,)


def test_moments_are_numpys_even_far_from_the_origin(monkeypatch):
    monkeypatch.setattr(stats, "_BLOCK_NUMBERS", 1)  # 64 rows, the least
    features, labels = 1e4 + random(300, 4), torch.arange(300) % 5
    labels[::7] = -1
    known = labels >= 0
    gathered = stats.moments(outputs(features, labels))
    rows, groups = features[known].numpy(), labels[known].numpy()
    means = np.stack([rows[groups == c].mean(axis=0) for c in range(5)])
    within = rows - means[groups]
    torch.testing.assert_close(gathered.class_means, torch.from_numpy(means))
    torch.testing.assert_close(gathered.total, torch.from_numpy(np.cov(rows.T, bias=True)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gathered.within, torch.from_numpy(within.T @ within / len(rows)), rtol=1e-9, atol=1e-9)
    assert gathered.counts.tolist() == np.bincount(groups).tolist()


def test_whitening_is_a_root_of_the_pseudo_inverse():
    factor = random(6, 4)
    covariance = factor @ factor.T  # rank 4
    root = stats.whitening(covariance)
    assert root.shape == (6, 4)
    torch.testing.assert_close(root @ root.T, torch.linalg.pinv(covariance, hermitian=True))
    root = stats.whitening(covariance, ridge=0.1)
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(covariance + 0.1 * torch.eye(6, dtype=torch.float64)))


@pytest.mark.parametrize("smallest", [1.0, 1e-6, 1e-9, 1e-11, 1e-12])
def test_whitening_keeps_every_direction_that_has_variance_however_it_finds_it(smallest):
    axes = torch.linalg.qr(random(40, 40)).Q
    variances = torch.logspace(0, math.log10(smallest), 40, dtype=torch.float64)
    root = stats.whitening((axes * variances) @ axes.T)
    assert root.shape == (40, 40)
    # in units of each direction's deviation; what is off is the rounding of the covariance itself
    unit = (axes * variances.sqrt()).T @ root
    assert (unit @ unit.T - torch.eye(40, dtype=torch.float64)).abs().max() < 1e-13 / smallest


def test_components_hold_at_least_the_share_asked_for():
    variances = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    assert [stats.components_for(variances, share) for share in (0.1, 0.4, 0.41, 0.7, 0.9, 1.0)] == [1, 1, 2, 2, 3, 4]
