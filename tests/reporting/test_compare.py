from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from ood_toolkit.metrics import significance as room
from ood_toolkit.records import METRICS, read_records, write_records
from ood_toolkit.reporting.compare import Change, Comparison, compare, render_comparison, worse
from ood_toolkit.reporting.runs import Run
from ood_toolkit.reporting.significance import Pair, holm, tied
from ood_toolkit.scorefile import ScoreFile

MakeFolder = Callable[..., Path]


def delong(metric: str, one: Pair, other: Pair) -> float:
    assert metric == "auroc"
    return room.delong_test(one, other).p_value


def change(before: float | None, after: float | None, metric: str = "auroc", p_value: float | None = None) -> Change:
    return Change(
        task="anomaly", dataset="d", model="m", method="x", metric=metric, before=before, after=after, p_value=p_value
    )


def test_a_run_compared_with_itself_has_changed_nothing(make_folder: MakeFolder) -> None:
    folder = make_folder()
    comparison = compare(folder, folder, test=delong)
    assert comparison.changed == ()
    assert {c.p_value for c in comparison.changes if c.metric == "auroc"} == {1.0}
    assert worse(comparison) == []


def test_every_change_is_after_minus_before(make_folder: MakeFolder) -> None:
    one, other = make_folder("one"), make_folder("other", skill=1.2)
    before = {(r.task, r.dataset, r.method, r.metric): r.value for r in read_records(one / "records.jsonl")}
    after = {(r.task, r.dataset, r.method, r.metric): r.value for r in read_records(other / "records.jsonl")}
    for c in compare(one, other).changes:
        key = (c.task, c.dataset, c.method, c.metric)
        assert (c.before, c.after) == (before[key], after[key])
        gap, direction = c.difference, METRICS[c.metric].higher_is_better
        expected = "same" if not gap else "better" if (gap > 0) == direction else "worse"
        assert c.verdict == expected


values = st.one_of(st.none(), st.floats(0, 1))


@given(values, values, st.sampled_from(["auroc", "fpr95"]), st.floats(0, 0.5))
def test_swapping_the_runs_swaps_better_and_worse(
    one: float | None, other: float | None, metric: str, tolerance: float
) -> None:
    opposite = {"better": "worse", "worse": "better", "same": "same", "lost": "new", "new": "lost"}
    there, back = change(one, other, metric), change(other, one, metric)
    assert back.verdict == opposite[there.verdict]
    failing = [bool(worse(Comparison("a", "b", (c,)), tolerance=tolerance)) for c in (there, back)]
    assert not all(failing)


def test_what_fails_a_build_is_a_loss_beyond_the_tolerance_that_is_not_chance() -> None:
    def fails(c: Change, tolerance: float = 0.01) -> bool:
        return bool(worse(Comparison("a", "b", (c,)), tolerance=tolerance))

    assert fails(change(0.9, 0.88))
    assert fails(change(0.1, 0.12, "fpr95"))
    assert not fails(change(0.9, 0.895))
    assert not fails(change(0.88, 0.9))
    assert not fails(change(0.9, 0.88, p_value=0.2))
    assert fails(change(0.9, 0.88, p_value=0.001))
    assert fails(change(0.9, None))
    assert not fails(change(None, 0.2))
    assert not worse(Comparison("a", "b", (change(0.9, 0.5),)), metrics=["aupr"])
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        worse(Comparison("a", "b", ()), tolerance=-0.1)


def test_paired_tests_align_images_by_name_and_are_holm_adjusted(make_folder: MakeFolder) -> None:
    one, other = make_folder("one"), make_folder("other", skill=1.45)
    pairs: list[tuple[Pair, Pair]] = []

    def test(metric: str, a: Pair, b: Pair) -> float:
        pairs.append((a, b))
        return delong(metric, a, b)

    comparison = compare(one, other, test=test)
    tested = [c for c in comparison.changes if c.p_value is not None]
    assert len(tested) == len(pairs) == 18
    for c, (a, b) in zip(tested, pairs, strict=True):
        for value, (negatives, positives) in ((c.before, a), (c.after, b)):
            truth = np.repeat([0, 1], [len(negatives), len(positives)])
            assert value == pytest.approx(roc_auc_score(truth, np.concatenate([negatives, positives])))
    raw = [room.delong_test(a, b).p_value for a, b in pairs]
    assert [c.p_value for c in tested] == pytest.approx(room.holm(raw).tolist())


def test_the_order_of_images_in_a_run_does_not_matter(make_folder: MakeFolder) -> None:
    one, other = make_folder("one"), make_folder("other", skill=1.45)
    straight = compare(one, other, test=delong)
    file = ScoreFile.load(other / "scores.safetensors")
    for part, names in file.ids.items():
        order = np.random.default_rng(1).permutation(len(names))
        file.ids[part] = [names[int(i)] for i in order]
        columns = {c: v[torch.from_numpy(order)] for c, v in file.columns.items() if c.part == part}
        file.columns.update(columns)
    file.save(other / "scores.safetensors")
    shuffled = compare(one, other, test=delong)
    assert [c.p_value for c in shuffled.changes] == [
        c.p_value if c.p_value is None else pytest.approx(c.p_value, rel=1e-9) for c in straight.changes
    ]


def test_images_of_another_set_are_not_tested_and_the_reason_is_given(make_folder: MakeFolder) -> None:
    one, other = make_folder("one"), make_folder("other", rows=300)
    comparison = compare(one, other, test=delong)
    reasons = {c.task: c.untested for c in comparison.changes if c.metric == "auroc"}
    assert reasons == {"anomaly": "not the same images", "misclassification": "not wrong on the same images"}
    assert "not tested: not the same images" in render_comparison(comparison, format="markdown")


def test_two_single_models_are_compared_and_the_difference_is_footnoted(make_folder: MakeFolder) -> None:
    one, other = make_folder("one"), make_folder("other", model="timm:resnet50", skill=1.2)
    comparison = compare(one, other, test=delong)
    assert {c.verdict for c in comparison.changes} <= {"same", "better", "worse"}
    assert all(c.p_value is not None for c in comparison.changes if c.metric == "auroc")
    text = render_comparison(comparison)
    assert "model: demo:efficientnet_lite0 → timm:resnet50" in text


def test_lost_and_new_cells_are_named(make_folder: MakeFolder) -> None:
    one, other = make_folder("one"), make_folder("other")
    records = list(read_records(other / "records.jsonl"))
    kept = [r for r in records if r.method != "vim"] + [
        replace(r, method="fdbd") for r in records if r.method == "vim" and r.metric == "auroc"
    ]
    write_records(other / "records.jsonl", kept)
    comparison = compare(one, other)
    assert {c.method for c in comparison.changes if c.verdict == "lost"} == {"vim"}
    assert {c.method for c in comparison.changes if c.verdict == "new"} == {"fdbd"}
    assert {c.method for c in worse(comparison)} == {"vim"}


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_is_the_metrics_rooms(p_values: list[float]) -> None:
    assert holm(p_values) == pytest.approx(room.holm(np.array(p_values)).tolist())


def test_tied_cells_are_those_that_the_test_cannot_tell_from_the_best(make_folder: MakeFolder) -> None:
    run = Run.open(make_folder(skill=0.6))
    for level in (0.05, 1e-9):
        marked = tied(run, delong, level=level)
        for task in ("misclassification", "anomaly"):
            for model, dataset in run.questions(task):
                samples = run.samples(task, model, dataset)
                pairs = [(s.negatives, s.positives) for s in samples]
                areas = [room.delong_test(p, p).first for p in pairs]
                best = int(np.argmax(areas))
                others = [i for i in range(len(samples)) if i != best]
                adjusted = room.holm([room.delong_test(pairs[best], pairs[i]).p_value for i in others])
                expected = {samples[i].method for i, p in zip(others, adjusted, strict=True) if p >= level}
                assert {key[1] for key in marked if key[2:4] == (task, dataset)} == expected
