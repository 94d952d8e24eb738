from pathlib import Path

import pytest

from ood_toolkit.records import METRICS, Record, read_records, write_records

RECORD = Record(
    suite="s", task="anomaly", dataset="ö", model="m", method="energy(temperature=2)", metric="auroc", value=0.25
)


def test_records_come_back_as_they_were_written(tmp_path: Path):
    missing = Record(
        suite="s", task="anomaly", dataset="d", model="m", method="knn", metric="aupr", value=None, reason="no fit data"
    )
    write_records(tmp_path / "r.jsonl", [RECORD, missing])
    assert list(read_records(tmp_path / "r.jsonl")) == [RECORD, missing]
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_a_number_that_is_none_needs_a_reason():
    with pytest.raises(ValueError, match="no value and no reason"):
        Record(suite="s", task="anomaly", dataset="d", model="m", method="knn", metric="aupr", value=None)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_no_number_is_refused(number: float):
    with pytest.raises(ValueError, match="say None and give the reason"):
        Record(suite="s", task="anomaly", dataset="d", model="m", method="knn", metric="aupr", value=number)


def test_a_foreign_line_is_named(tmp_path: Path):
    file = tmp_path / "r.jsonl"
    write_records(file, [RECORD])
    file.write_text(file.read_text() + '{"suite": "s", "mystery": 1}\n')
    with pytest.raises(ValueError, match=r"line 2: not a record .*mystery"):
        list(read_records(file))


def test_every_metric_says_its_direction_in_words():
    assert all(metric.about.endswith(".") and metric.label for metric in METRICS.values())
    assert {key for key, metric in METRICS.items() if not metric.higher_is_better} == {
        "fpr95", "fpr95_id", "aurc", "e_aurc", "augrc", "ece", "rms", "rms_official", "nll", "brier",
    }  # fmt: skip
