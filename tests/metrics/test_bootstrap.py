"""The vectorised bootstrap against resampling spelled out, its cells against exact counts, intervals against truth."""

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from metric_cases import case_a, case_b, two_samples
from scipy.stats import norm

from ood_toolkit import metrics as m
from ood_toolkit.metrics import bootstrap
from ood_toolkit.metrics.counts import rank
from ood_toolkit.metrics.resamples import Cumulated, Drawn, Draws, Strata
from ood_toolkit.metrics.rows import CalibrationRows, calibration_rows, row_intervals


def spelled_out(scores, counts):
    return np.repeat(np.sort(scores)[::-1], counts)


@pytest.mark.parametrize("name", m.RESAMPLED)
@pytest.mark.parametrize("decimals", [0, 1, 12])
def test_a_resample_by_counts_equals_the_metric_of_the_repeated_rows(name, decimals):
    rng = np.random.default_rng(3)
    negatives = np.round(rng.normal(0, 1, 60), decimals)
    positives = np.round(rng.normal(1, 1, 40), decimals)
    drawn = [rng.multinomial(60, np.full(60, 1 / 60), size=8), rng.multinomial(40, np.full(40, 1 / 40), size=8)]
    plan = bootstrap.make_plan("row", rank(negatives, positives), [name], None)
    found = plan.evaluate([name], Drawn(*(Cumulated(counts) for counts in drawn)))[name]
    for row, low, high in zip(found, *drawn, strict=True):
        expected = m.RESAMPLED[name].metric(spelled_out(negatives, low), spelled_out(positives, high))
        assert row == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", ["overlapping", "far apart", "tied"])
@pytest.mark.parametrize("name", m.RESAMPLED)
def test_cells_change_a_bootstrap_value_by_a_fiftieth_of_its_spread(name, shape, monkeypatch):
    rng = np.random.default_rng(1)
    negatives, positives = rng.normal(0, 1, 8000), rng.normal({"far apart": 4}.get(shape, 1.2), 1.3, 2000)
    if shape == "tied":
        negatives[:2500] = positives[:200] = -1.5
        negatives, positives = np.round(negatives, 3), np.round(positives, 3)
    assert np.unique(np.r_[negatives, positives]).size > bootstrap.CELLS
    in_cells = m.replicates(name, negatives, positives, resamples=128)
    monkeypatch.setattr(bootstrap, "CELLS", 10**9)
    exact = m.replicates(name, negatives, positives, resamples=128)
    # the least of many thresholds' errors feels every threshold that a cell hides
    bound, spread = (0.15, 0.03) if name == "detection_error" else (0.025, 0.01)
    assert np.sqrt(np.mean((in_cells - exact) ** 2)) < bound * exact.std()
    assert abs(in_cells.std() / exact.std() - 1) < spread


@pytest.mark.parametrize("name", m.RESAMPLED)
def test_the_value_of_an_interval_is_the_metric_itself(name):
    rng = np.random.default_rng(4)
    for negatives, positives in (
        two_samples(*case_a()),
        two_samples(*case_b()),
        (rng.normal(0, 1, 6000), rng.normal(1, 1, 900)),
    ):
        found = m.interval(name, negatives, positives, resamples=20)
        assert found.value == pytest.approx(m.RESAMPLED[name].metric(negatives, positives), abs=1e-12)
        assert found.low < found.value < found.high


@pytest.mark.parametrize("metric", [m.auroc, m.aupr, m.aurc, m.fpr_at_tpr])
def test_intervals_agree_with_a_loop_that_calls_the_metric(metric):
    negatives, positives = two_samples(*case_a())
    strata = m.RESAMPLED[metric.__name__].strata
    fast = m.interval(metric, negatives, positives, resamples=1500)
    slow = m.interval(lambda n, p: metric(n, p), negatives, positives, resamples=1500, seed=1, strata=strata)
    width = slow.high - slow.low
    assert abs(fast.low - slow.low) < 0.12 * width
    assert abs(fast.high - slow.high) < 0.12 * width


@pytest.mark.parametrize("size", [1, 300, 120_000])
def test_two_bytes_hold_cumulated_counts_exactly(size):
    rng = np.random.default_rng(0)
    counts = np.stack([np.bincount(rng.integers(0, size, size), minlength=size) for _ in range(3)])
    ranks = np.unique(np.r_[0, size, rng.integers(0, size + 1, 500)])
    expected = np.concatenate([np.zeros((3, 1)), np.cumsum(counts, axis=1)], axis=1)[:, ranks]
    assert np.array_equal(Cumulated(counts).at(ranks), expected)


@pytest.mark.parametrize("strata", ["fixed", "random"])
def test_kept_resamples_are_those_drawn_anew_and_older_ones_make_room(strata):
    rng = np.random.default_rng(2)
    pairs = [(rng.normal(0, 1, 700), rng.normal(1, 1, size)) for size in (300, 200, 300)]
    draws = Draws(most_bytes=2 * 2 * 100 * 1100)  # two sets of about a thousand rows
    for pair in [*pairs, *pairs]:
        kept = m.intervals(["auroc", "aurc"], *pair, resamples=100, strata=strata, draws=draws)
        assert kept == m.intervals(["auroc", "aurc"], *pair, resamples=100, strata=strata)
    held = sum(part.nbytes for parts in draws._kept.values() for part in parts)
    assert 0 < held <= draws.most_bytes


def test_random_strata_draw_as_many_rows_as_there_are_and_fixed_ones_as_many_of_each():
    spreads: dict[Strata, float] = {"fixed": 0.0, "random": np.sqrt(100 * 0.3 * 0.7)}
    for strata, spread in spreads.items():
        chunks = [drawn for _, drawn in Draws().chunks((70, 30), strata, 2000, 0)]
        negatives = np.concatenate([drawn.negatives.at(np.array([70]))[:, 0] for drawn in chunks])
        positives = np.concatenate([drawn.positives.at(np.array([30]))[:, 0] for drawn in chunks])
        assert (negatives + positives == 100).all()
        assert positives.mean() == pytest.approx(30, abs=0.5)
        assert positives.std() == pytest.approx(spread, rel=0.1)


def test_a_table_gives_each_row_what_it_gives_alone():
    rng = np.random.default_rng(2)
    samples = {f"detector {i}": (rng.normal(0, 1, 700), rng.normal(i / 2, 1, 300)) for i in range(4)}
    samples["other sizes"] = rng.normal(0, 1, 50), rng.normal(1, 1, 60)
    names = ["auroc", "aupr_id", "aurc", "fpr_at_tpr_id_positive"]
    table = m.table_intervals(names, samples, resamples=100)
    for row, pair in samples.items():
        assert table[row] == m.intervals(names, *pair, resamples=100)


def test_the_same_seed_gives_the_same_interval_and_another_a_near_one():
    negatives, positives = two_samples(*case_a())
    first, again, other = (m.interval("auroc", negatives, positives, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert abs(first.low - other.low) < 0.2 * (first.high - first.low)


def test_random_strata_let_the_error_rate_vary():
    negatives, positives = two_samples(*case_a())
    fixed, free = (m.interval("augrc", negatives, positives, strata=strata) for strata in ("fixed", "random"))
    assert free.high - free.low > 1.3 * (fixed.high - fixed.low)


def test_without_errors_the_risk_is_zero_and_auroc_undefined():
    assert m.interval("aurc", [0.1, 0.2], []) == (0, 0, 0)
    assert m.interval("aurc", [], [0.1, 0.2]) == (1, 1, 1)
    with pytest.raises(m.UndefinedMetricError, match="there are 2 and 0"):
        m.interval("auroc", [0.1, 0.2], [])
    with pytest.raises(m.UndefinedMetricError, match="empty"):
        m.interval("aurc", [], [])


def test_single_rows_have_intervals_without_width():
    assert m.interval("auroc", [0.0], [1.0]) == (1, 1, 1)
    assert m.interval("fpr_at_tpr", [1.0], [0.0]) == (1, 1, 1)


def test_wrong_arguments_are_named():
    for call, message in (
        (lambda: m.interval("aucroc", [0.0], [1.0]), "no resampled metric is named 'aucroc'"),
        (lambda: m.intervals([m.autc], [0.0], [1.0]), "is not a resampled metric"),
        (lambda: m.interval("auroc", [0.0], [1.0], level=95), r"level is a share in \(0, 1\)"),
        (lambda: m.interval("auroc", [0.0], [1.0], strata=cast(Any, "both")), "strata must be 'fixed' or 'random'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.slow
def test_an_interval_covers_the_true_auroc_as_often_as_it_says():
    rng = np.random.default_rng(9)
    truth = norm.cdf(1 / np.sqrt(2))
    trials, covered = 700, 0
    for trial in range(trials):
        found = m.interval("auroc", rng.normal(0, 1, 200), rng.normal(1, 1, 100), resamples=300, seed=trial)
        covered += found.low <= truth <= found.high
    assert 0.93 <= covered / trials <= 0.97


@pytest.mark.slow
def test_an_interval_of_aurc_covers_its_true_value_although_the_error_rate_varies():
    rng = np.random.default_rng(10)

    def sample(rows):
        wrong = rng.random(rows) < 0.3
        scores = rng.normal(wrong, 1)
        return scores[~wrong], scores[wrong]

    truth = m.aurc(*sample(2_000_000))
    trials = 800  # fewer leave the coverage itself too uncertain: ± 0.8 points here
    found = [m.interval("aurc", *sample(800), resamples=200, seed=trial) for trial in range(trials)]
    assert 0.93 <= np.mean([one.low <= truth <= one.high for one in found]) <= 0.97


@pytest.mark.slow
def test_intervals_of_aupr_and_fpr_cover_their_true_values():
    rng = np.random.default_rng(11)

    def sample(rows):
        return rng.normal(0, 1, 2 * rows), rng.normal(1, 1, rows)

    exact = {
        "fpr_at_tpr": float(norm.sf(1 + norm.ppf(0.05))),
        "fpr_at_tpr_id_positive": float(norm.cdf(norm.ppf(0.95) - 1)),
    }
    truth: dict[str, float] = exact | {"aupr": m.aupr(*sample(1_000_000))}
    trials = 800
    found = [m.intervals(list(truth), *sample(200), resamples=300, seed=trial) for trial in range(trials)]
    for name, value in truth.items():
        assert 0.92 <= np.mean([one[name].low <= value <= one[name].high for one in found]) <= 0.97, name


@pytest.mark.slow
def test_calibration_intervals_cover_true_means_and_the_average_ece_of_so_many_rows():
    rng = np.random.default_rng(12)

    def sample(rows):
        logits = rng.normal(0, 2, (rows, 10))
        true, bold = (np.exp(factor * logits) for factor in (1.0, 1.6))
        true, bold = (powers / powers.sum(axis=1, keepdims=True) for powers in (true, bold))
        return bold, (true.cumsum(axis=1) > rng.random((rows, 1))).argmax(axis=1)

    many = sample(500_000)
    truth = {"accuracy": m.accuracy(*many), "nll": m.nll(*many), "brier": m.brier(*many)}
    truth["ece"] = float(np.mean([m.ece(*m.top_label(*sample(500))) for _ in range(2000)]))
    trials = 800
    found = [m.calibration_intervals(*sample(500), resamples=200, seed=trial) for trial in range(trials)]
    for name, value in truth.items():
        assert 0.92 <= np.mean([one[name].low <= value <= one[name].high for one in found]) <= 0.97, name
    fresh = [m.ece(*m.top_label(*sample(500))) for _ in range(trials)]
    inside = np.mean([one["ece"].low <= value <= one["ece"].high for one, value in zip(found, fresh, strict=True)])
    assert inside < 0.9  # an interval for the average is too narrow for a second sample's number


def test_calibration_intervals_hold_their_values_and_equal_rows_resampled_one_by_one():
    probabilities, labels = case_b()
    found = m.calibration_intervals(probabilities, labels, resamples=400)
    confidence, correct = m.top_label(probabilities, labels)
    assert found["accuracy"].value == m.accuracy(probabilities, labels)
    assert found["ece"].value == m.ece(confidence, correct)
    assert found["rms_calibration_error_official"].value == m.rms_calibration_error_official(confidence, correct)
    assert found["nll"].value == np.inf
    rng = np.random.default_rng(0)
    slow = {"brier": [], "ece": [], "rms_calibration_error": [], "rms_calibration_error_official": [], "aurra": []}
    for _ in range(400):
        rows = rng.integers(0, len(labels), len(labels))
        slow["brier"].append(m.brier(probabilities[rows], labels[rows]))
        slow["ece"].append(m.ece(confidence[rows], correct[rows]))
        slow["rms_calibration_error"].append(m.rms_calibration_error(confidence[rows], correct[rows]))
        slow["rms_calibration_error_official"].append(m.rms_calibration_error_official(confidence[rows], correct[rows]))
        sides = -confidence[rows][correct[rows]], -confidence[rows][~correct[rows]]
        slow["aurra"].append(m.aurra(*sides))
    for name, values in slow.items():
        low, high = np.quantile(values, [0.025, 0.975])
        assert found[name].low <= found[name].value <= found[name].high
        assert found[name].high - found[name].low == pytest.approx(high - low, rel=0.2)


def test_rows_reduced_in_blocks_give_what_the_whole_gives():
    probabilities, labels = case_a()
    cuts = [0, 1, 300, 1000]
    blocks = [calibration_rows(probabilities[i:j], labels[i:j]) for i, j in pairwise(cuts)]
    found = row_intervals(CalibrationRows.cat(blocks), resamples=20)
    assert found == m.calibration_intervals(probabilities, labels, resamples=20)


def test_small_calibration_tables_leave_out_the_published_error():
    probabilities, labels = case_a()
    found = m.calibration_intervals(probabilities[:60], labels[:60], resamples=50)
    assert "rms_calibration_error_official" not in found
    assert found["rms_calibration_error"].value == m.rms_calibration_error(
        *m.top_label(probabilities[:60], labels[:60])
    )
