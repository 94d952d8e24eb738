import numpy as np
import pytest
import torch

from ood_toolkit import quantiles
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


SORTED_AT_ONCE = {"all": 1 << 24, "groups of columns; of all numbers, a sample's span": 2048, "none": 0}
"""How many numbers may be sorted at once decides how a quantile is found."""


@pytest.mark.parametrize("sorted_at_once", SORTED_AT_ONCE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", AWKWARD)
def test_a_streamed_quantile_is_numpys_over_all_numbers_and_per_column(case, dtype, sorted_at_once, monkeypatch):
    monkeypatch.setattr("ood_toolkit.outputs._BATCH_NUMBERS", 64 * 12)  # many batches
    monkeypatch.setattr(quantiles, "_SORTED_NUMBERS", SORTED_AT_ONCE[sorted_at_once])
    values = AWKWARD[case]().to(dtype)
    data = outputs(values)
    exact, rounding = values.double().numpy(), 1e-7 if dtype == torch.float32 else 1e-15
    expected = torch.from_numpy(np.quantile(exact, LEVELS)).to(dtype)
    torch.testing.assert_close(quantiles.quantile(data, LEVELS), expected, rtol=rounding, atol=0)
    columns = torch.from_numpy(np.quantile(exact, LEVELS, axis=0)).to(dtype)
    torch.testing.assert_close(quantiles.quantile(data, LEVELS, per_column=True), columns, rtol=rounding, atol=0)


@pytest.mark.parametrize("bins", [1 << 7, 1 << 13])
def test_the_number_of_bins_does_not_move_a_quantile(bins, monkeypatch):
    monkeypatch.setattr(quantiles, "_HISTOGRAM_BINS", bins)
    monkeypatch.setattr(quantiles, "_SORTED_NUMBERS", 0)
    values = random(303, 5, dtype=torch.float32)
    expected = torch.from_numpy(np.quantile(values.double().numpy(), 0.37, axis=0)).float()
    torch.testing.assert_close(quantiles.quantile(outputs(values), 0.37, per_column=True), expected, rtol=1e-7, atol=0)


def test_a_quantile_at_an_exact_rank_is_one_of_the_values():
    values = random(101, 1, dtype=torch.float32)
    assert quantiles.quantile(outputs(values), 0.25) == values.flatten().sort().values[25]


def test_a_quantile_reads_any_function_of_several_outputs():
    first, second = random(40, 3), random(23, 3, seed=1)
    expected = np.quantile(torch.cat([first, second]).norm(dim=1).numpy(), 0.9)
    got = quantiles.quantile([outputs(first), outputs(second)], 0.9, of=lambda batch: batch.features.norm(dim=1))
    assert got.shape == ()
    assert float(got) == pytest.approx(expected, rel=1e-14)


def test_a_quantile_of_nothing_or_beyond_one_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        quantiles.quantile(outputs(random(0, 3)), 0.5)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 90"):
        quantiles.quantile(outputs(random(3, 3)), 90)


def test_infinite_values_stay_in_order():
    values = torch.tensor([[-torch.inf, 1.0, torch.inf, 2.0, 3.0]]).T
    assert quantiles.quantile(Outputs.from_logits(values), 0.5) == 2.0
    assert quantiles.quantile(Outputs.from_logits(values), 1.0) == torch.inf


def test_a_sample_that_misleads_is_found_out_and_the_quantile_is_right_all_the_same(monkeypatch):
    monkeypatch.setattr(quantiles, "_SORTED_NUMBERS", 4096)
    answers, honest = [], quantiles._by_sample

    def misled(sweep, levels, numbers):
        def first_table_twice():
            table = next(sweep())
            yield from (table, table)

        sweeps = iter([first_table_twice, sweep])  # the sample is drawn from elsewhere than from what is counted
        answers.append(honest(lambda: next(sweeps)(), levels, numbers))
        return answers[-1]

    monkeypatch.setattr(quantiles, "_by_sample", misled)
    monkeypatch.setattr("ood_toolkit.outputs._BATCH_NUMBERS", 64 * 12)
    values = torch.arange(7000, dtype=torch.float64).view(1000, 7)
    assert float(quantiles.quantile(outputs(values), 0.75)) == np.quantile(values.numpy(), 0.75)
    assert answers == [None]


def test_a_sample_leaves_few_numbers_to_sort(monkeypatch):
    monkeypatch.setattr(quantiles, "_SORTED_NUMBERS", 1 << 18)
    monkeypatch.setattr(quantiles, "_SAMPLED_NUMBERS", 1 << 12)
    monkeypatch.setattr(quantiles, "_by_digits", None)
    values = random(100_000, 3, dtype=torch.float32)
    expected = np.quantile(values.double().numpy(), [0.2, 0.95])
    got = quantiles.quantile(outputs(values), [0.2, 0.95])
    torch.testing.assert_close(got, torch.from_numpy(expected).float(), rtol=1e-7, atol=0)
