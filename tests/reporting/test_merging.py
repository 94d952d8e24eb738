import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ood_toolkit.records import Record
from ood_toolkit.reporting.merging import Column, merge, method_of

MakeRun = Callable[..., list[Record]]

values = st.floats(0, 1, allow_nan=False)


def cell(value: float | None = 0.5, **fields: Any) -> Record:
    known: dict[str, Any] = {
        "suite": "s",
        "task": "anomaly",
        "dataset": "textures",
        "model": "net",
        "method": "msp",
        "metric": "auroc",
        "reason": "" if value is not None else "no rows",
        "positives": 10,
        "negatives": 20,
    }
    return Record(value=value, **(known | fields))


@given(st.lists(values, min_size=2, max_size=6))
def test_records_that_differ_in_the_seed_become_their_mean_and_sample_deviation(numbers: list[float]) -> None:
    merged = merge([cell(v, seed=seed) for seed, v in enumerate(numbers)])
    (measured,) = merged.values()
    mean = sum(numbers) / len(numbers)
    deviation = (sum((v - mean) ** 2 for v in numbers) / (len(numbers) - 1)) ** 0.5
    assert measured.value == pytest.approx(mean, abs=1e-12)
    assert measured.deviation == pytest.approx(deviation, abs=1e-12)
    assert measured.seeds == tuple(range(len(numbers)))


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_the_order_of_records_changes_no_cell(draw: random.Random, seeds: int) -> None:
    from made_up_runs import build_run

    records = [r for seed in range(seeds) for r in build_run(seed=seed)]
    shuffled = draw.sample(records, len(records))
    assert merge(shuffled) == merge(records)


def test_a_run_merged_with_itself_is_itself(make_run: MakeRun) -> None:
    assert merge(make_run() + make_run(run="again")) == merge(make_run())


@given(values, values)
def test_two_values_of_one_cell_are_refused_unless_they_are_the_same_number(one: float, other: float) -> None:
    pair = [cell(one, run="a"), cell(other, run="b")]
    if abs(one - other) <= 1e-6:
        assert len(merge(pair)) == 1
    else:
        with pytest.raises(ValueError, match=r"two values for one cell: auroc of msp on textures .*run a.*run b"):
            merge(pair)


@pytest.mark.parametrize(
    ("field", "one", "other", "words"),
    [
        ("protocol", "official", "vim-1000way", "the protocol"),
        ("mask", "", "imagenet-o:200", "the class mask"),
        ("fit_set", "train, 100 rows", "train, 50 rows", "the fit set"),
        ("calibration_set", "a", "b", "the calibration set"),
        ("transform", "crop 224", "crop 256", "the transform"),
        ("level", 0.95, 0.9, "the intervals' coverage"),
    ],
)
def test_a_difference_in_settings_is_refused_by_name_or_footnoted(field: str, one: Any, other: Any, words: str) -> None:
    pair = [cell(method="msp", run="a", **{field: one}), cell(method="knn", run="b", **{field: other})]
    with pytest.raises(ValueError, match=words) as refusal:
        merge(pair)
    assert repr(str(one)) in str(refusal.value)
    assert repr(str(other)) in str(refusal.value)
    assert "run a" in str(refusal.value)
    assert "run b" in str(refusal.value)
    rows = [row for row, _ in merge(pair, allow=[field])]
    assert [row.variant for row in rows] == [(), ((field, str(other)),)]


def test_one_method_under_two_allowed_settings_has_two_rows() -> None:
    pair = [cell(0.8), cell(0.9, mask="imagenet-o:200")]
    assert [(row.variant, m.value) for (row, _), m in merge(pair, allow=["mask"]).items()] == [
        ((), 0.8),
        ((("mask", "imagenet-o:200"),), 0.9),
    ]


def test_a_method_scored_on_fewer_rows_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the number of scored rows differs: '10 positive and 20 negative'.*'10 .* 19"
    ):
        merge([cell(method="msp"), cell(method="odin", negatives=19)])


def test_models_may_be_wrong_on_different_numbers_of_the_same_rows() -> None:
    pair = [
        cell(task="misclassification", model=model, positives=wrong, negatives=100 - wrong)
        for model, wrong in (("a", 10), ("b", 25))
    ]
    assert len(merge(pair)) == 2


def test_each_model_may_have_its_own_transform() -> None:
    assert len(merge([cell(model="a", transform="crop 224"), cell(model="b", transform="crop 380")])) == 2


def test_each_column_may_have_its_own_mask_and_size() -> None:
    pair = [cell(dataset="o", mask="imagenet-o:200"), cell(dataset="textures", positives=99)]
    assert len(merge(pair)) == 2


def test_seeds_may_split_the_sets_differently() -> None:
    (measured,) = merge([cell(seed=0, fit_set="hash a"), cell(seed=1, fit_set="hash b", positives=11)]).values()
    assert measured.seeds == (0, 1)


def test_a_detector_that_learns_nothing_needs_no_fit_set() -> None:
    assert len(merge([cell(method="knn", fit_set="train"), cell(method="msp", fit_set="")])) == 2


def test_a_mean_over_seeds_needs_every_seed() -> None:
    (measured,) = merge([cell(0.9, seed=0), cell(None, seed=1), cell(0.8, seed=2)]).values()
    assert measured.value is None
    assert measured.reason == "seed 1: no rows"


def test_a_tuned_method_is_another_row_than_an_untuned_one() -> None:
    merged = merge([cell(0.8), cell(0.9, tuned_on="ninco")])
    assert [row.tuned_on for row, _ in merged] == ["", "ninco"]


def test_the_mean_of_cells_equals_the_mean_of_runs(make_run: MakeRun) -> None:
    runs = [make_run(seed=seed) for seed in range(3)]
    merged = merge([record for run in runs for record in run])
    for (row, column), measured in merged.items():
        same = [
            r.value
            for run in runs
            for r in run
            if (r.method, Column(task=r.task, dataset=r.dataset, metric=r.metric)) == (row.method, column)
        ]
        known = [v for v in same if v is not None]
        assert measured.value == (pytest.approx(statistics.fmean(known)) if known else None)


@pytest.mark.parametrize(
    ("calibrator", "method", "shown"),
    [
        ("", "msp", "msp"),
        ("temperature", "msp", "temperature+msp"),
        ("temperature", "temperature+msp", "temperature+msp"),
    ],
)
def test_a_calibrated_detector_names_its_calibrator_once(calibrator: str, method: str, shown: str) -> None:
    assert method_of(replace(cell(), method=method, calibrator=calibrator)) == shown


def test_a_detector_that_reads_an_ensembles_members_is_not_named_after_a_pool() -> None:
    record = replace(cell(), model="ensemble[a, b]", method="mutual_information", calibrator="mean_probability")
    assert method_of(record) == "mutual_information"


def test_an_unknown_setting_cannot_be_allowed() -> None:
    with pytest.raises(ValueError, match="cannot allow a difference in \\['masks'\\]; known settings: protocol, mask"):
        merge([cell()], allow=["masks"])
