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


AWKWARD = {
    "normal": lambda: random(501, 7),
    "rectified, so that half the values are tied at zero": lambda: random(501, 7).relu(),
    "few distinct values": lambda: random(501, 7).round(),
    "one row": lambda: random(1, 7),
    "two rows": lambda: random(2, 7),
    "spanning all exponents": lambda: random(501, 7) * 10 ** (30 * random(501, 7, seed=1).clamp(-1, 1)),
    "negative": lambda: -random(501, 7).abs() - 1,
    "signed zeros": lambda: torch.zeros(9, 7, dtype=torch.float64) * random(9, 7).sign(),
    "all equal": lambda: torch.full((10, 7), -3.25, dtype=torch.float64),
}
LEVELS = (0.0, 0.001, 0.1, 1 / 3, 0.5, 0.9, 0.95, 0.999, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", AWKWARD)
def test_a_streamed_quantile_is_numpys_over_all_numbers_and_per_column(case, dtype, monkeypatch):
    monkeypatch.setattr("ood_toolkit.outputs._BATCH_NUMBERS", 64 * 12)  # many batches
    values = AWKWARD[case]().to(dtype)
    data = outputs(values)
    exact, rounding = values.double().numpy(), 1e-7 if dtype == torch.float32 else 1e-15
    expected = torch.from_numpy(np.quantile(exact, LEVELS)).to(dtype)
    torch.testing.assert_close(stats.quantile(data, LEVELS), expected, rtol=rounding, atol=0)
    columns = torch.from_numpy(np.quantile(exact, LEVELS, axis=0)).to(dtype)
    torch.testing.assert_close(stats.quantile(data, LEVELS, per_column=True), columns, rtol=rounding, atol=0)


@pytest.mark.parametrize("bins", [1 << 7, 1 << 13])
def test_the_number_of_bins_does_not_move_a_quantile(bins, monkeypatch):
    monkeypatch.setattr(stats, "_HISTOGRAM_BINS", bins)
    values = random(303, 5, dtype=torch.float32)
    expected = torch.from_numpy(np.quantile(values.double().numpy(), 0.37, axis=0)).float()
    torch.testing.assert_close(stats.quantile(outputs(values), 0.37, per_column=True), expected, rtol=1e-7, atol=0)


def test_a_quantile_at_an_exact_rank_is_one_of_the_values():
    values = random(101, 1, dtype=torch.float32)
    assert stats.quantile(outputs(values), 0.25) == values.flatten().sort().values[25]


def test_a_quantile_reads_any_function_of_several_outputs():
    first, second = random(40, 3), random(23, 3, seed=1)
    expected = np.quantile(torch.cat([first, second]).norm(dim=1).numpy(), 0.9)
    got = stats.quantile([outputs(first), outputs(second)], 0.9, of=lambda batch: batch.features.norm(dim=1))
    assert got.shape == ()
    assert float(got) == pytest.approx(expected, rel=1e-14)


def test_a_quantile_of_nothing_or_beyond_one_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        stats.quantile(outputs(random(0, 3)), 0.5)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 90"):
        stats.quantile(outputs(random(3, 3)), 90)


def test_infinite_values_stay_in_order():
    values = torch.tensor([[-torch.inf, 1.0, torch.inf, 2.0, 3.0]]).T
    assert stats.quantile(Outputs.from_logits(values), 0.5) == 2.0
    assert stats.quantile(Outputs.from_logits(values), 1.0) == torch.inf


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
    monkeypatch.setattr("ood_toolkit.outputs._BATCH_NUMBERS", 1)  # 64 rows, the least
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


def test_components_hold_at_least_the_share_asked_for():
    variances = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    assert [stats.components_for(variances, share) for share in (0.1, 0.4, 0.41, 0.7, 0.9, 1.0)] == [1, 1, 2, 2, 3, 4]
