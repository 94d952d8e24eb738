"""What changed between two runs, by how much, and whether that is more than chance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ood_toolkit.records import METRICS, Record
from ood_toolkit.reporting.formats import FORMATS
from ood_toolkit.reporting.grid import Cell, Header, Table
from ood_toolkit.reporting.merging import SETTINGS, method_of, setting
from ood_toolkit.reporting.runs import Run, Sample
from ood_toolkit.reporting.significance import PairedTest, holm, pair_of

_NOISE = 1e-9
"""A change smaller than this is rounding."""
_RANKED = {"misclassification": "errors", "anomaly": "OOD"}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One cell before and after.

    Args:
        task: the kind of question.
        dataset: the record's.
        model: the model of the first run.
        method: the row's name.
        metric: its key.
        before: the value in the first run, or None.
        after: the value in the second.
        p_value: two-sided, paired over images and Holm-adjusted over all cells tested; None where it was not tested.
        untested: why there is no p-value.
        settings: what differs beside the value, in words.
    """

    task: str
    dataset: str
    model: str
    method: str
    metric: str
    before: float | None
    after: float | None
    p_value: float | None = None
    untested: str = ""
    settings: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        """After minus before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def loss(self) -> float:
        """How much worse it became, in the metric's unit: negative where it improved, infinite where it was lost."""
        if self.before is None:
            return 0.0
        if self.after is None:
            return float("inf")
        gain = self.after - self.before
        known = METRICS.get(self.metric)
        return 0.0 if known is None else -gain if known.higher_is_better else gain

    @property
    def verdict(self) -> str:
        """One of "better", "worse", "same", "lost" and "new"."""
        if self.before is None or self.after is None:
            return "same" if self.before is self.after else "new" if self.before is None else "lost"
        return "worse" if self.loss > _NOISE else "better" if self.loss < -_NOISE else "same"


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Args:
        before: name of the first run.
        after: name of the second.
        changes: every cell that either run has, also those that stayed the same.
    """

    before: str
    after: str
    changes: tuple[Change, ...]

    @property
    def changed(self) -> tuple[Change, ...]:
        """The cells that did not stay the same, the largest loss first."""
        moved = (change for change in self.changes if change.verdict != "same")
        return tuple(sorted(moved, key=lambda change: -change.loss))


def compare(
    run_a: Path, run_b: Path, *, test: PairedTest | None = None, tested_metrics: Sequence[str] = ("auroc",)
) -> Comparison:
    """Compares two run folders cell by cell.

    Where each run has exactly one model, these two are compared even if they differ in name.

    Args:
        run_a: the run before.
        run_b: the run after.
        test: a paired test on per-image scores; None for no p-values.
        tested_metrics: keys of the metrics to test.
    """
    before, after = Run.open(run_a), Run.open(run_b)
    cells_a, cells_b = _cells(before), _cells(after)
    (one, *more_a), (other, *more_b) = before.models(), after.models()
    renamed = {other: one} if not more_a and not more_b else {}
    cells_b = {(*key[:2], renamed.get(key[2], key[2]), *key[3:]): record for key, record in cells_b.items()}
    changes = [_change(key, cells_a.get(key), cells_b.get(key)) for key in dict.fromkeys([*cells_a, *cells_b])]
    if test is not None:
        changes = _tested(changes, before, after, {v: k for k, v in renamed.items()}, test, tested_metrics)
    return Comparison(before.name, after.name, tuple(changes))


def worse(
    comparison: Comparison, *, tolerance: float = 0.0, metrics: Sequence[str] = (), level: float = 0.05
) -> list[Change]:
    """The changes that should fail a build: cells that got worse by more than `tolerance`, or lost their value.

    A cell that was tested counts only where the loss is also significant.

    Args:
        comparison: of two runs.
        tolerance: in unit scale, at least 0.
        metrics: keys that count; by default all.
        level: of the paired tests.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    return [
        change
        for change in comparison.changed
        if change.loss > tolerance + _NOISE
        and (not metrics or change.metric in metrics)
        and (change.p_value is None or change.p_value < level)
    ]


def render_comparison(comparison: Comparison, *, format: str = "text", everything: bool = False) -> str:
    """The changes as a table in any format of `tables.render`.

    Args:
        comparison: of two runs.
        format: a key of `FORMATS`.
        everything: also the cells that stayed the same.
    """
    if format not in FORMATS:
        raise ValueError(f"no format is named {format!r}; known: {', '.join(FORMATS)}")
    return FORMATS[format]([comparison_table(comparison, everything=everything)])


def comparison_table(comparison: Comparison, *, everything: bool = False) -> Table:
    """One row per changed cell: before, after, change and p-value."""
    shown = comparison.changes if everything else comparison.changed
    groups = list(dict.fromkeys(_group(change) for change in shown))
    rows = sorted(shown, key=lambda change: groups.index(_group(change)))
    notes: dict[str, str] = {}
    headers = tuple(_header(change, notes) for change in rows)
    tested = any(change.p_value is not None for change in rows)
    counts = {
        word: sum(c.verdict == word for c in comparison.changes) for word in ("better", "worse", "same", "lost", "new")
    }
    summary = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    columns = ["before", "after", "change", "verdict", *["p"] * tested]
    return Table(
        name="comparison",
        title=f"From {comparison.before} to {comparison.after}",
        stub="Method and metric",
        rows=headers,
        columns=tuple(Header(label=label) for label in columns),
        cells=tuple(tuple(_texts(change)[label] for label in columns) for change in rows),
        caption=(f"Of {len(comparison.changes)} cells: {summary or 'none'}",),
        conventions=("p: paired over images, two-sided, adjusted by Holm's method over all cells tested",) * tested,
        notes=tuple((mark, text) for text, mark in notes.items()),
        label="tab:comparison",
    )


_Key = tuple[str, str, str, str, str, str]


def _cells(run: Run) -> dict[_Key, Record]:
    """Records by (task, data set, model, row, metric, tuned_on)."""
    cells: dict[_Key, Record] = {}
    for r in run.records:
        key = (r.task, r.dataset, r.model, method_of(r), r.metric, r.tuned_on)
        if key in cells and cells[key].value != r.value:
            raise ValueError(f"{run.name} holds two values of {r.metric} of {method_of(r)} on {r.dataset} ({r.model})")
        cells[key] = r
    return cells


def _change(key: _Key, before: Record | None, after: Record | None) -> Change:
    differing = []
    if before is not None and after is not None:
        for name in (*SETTINGS, "model", "suite"):
            one, other = setting(before, name), setting(after, name)
            if one != other and before.value is not None and after.value is not None:
                differing.append(f"{name.replace('_', ' ')}: {one or 'none'} → {other or 'none'}")
    return Change(
        task=key[0],
        dataset=key[1],
        model=key[2],
        method=key[3],
        metric=key[4],
        before=before.value if before else None,
        after=after.value if after else None,
        settings=tuple(differing),
    )


def _tested(
    changes: list[Change], before: Run, after: Run, names: dict[str, str], test: PairedTest, metrics: Sequence[str]
) -> list[Change]:
    samples_a, samples_b = _samples(before, {}), _samples(after, {new: old for old, new in names.items()})
    p_values: dict[int, float] = {}
    made = list(changes)
    for index, change in enumerate(changes):
        if change.task not in _RANKED or change.metric not in metrics or change.difference is None:
            continue
        key = (change.task, change.dataset, change.model, change.method)
        pair = _aligned(samples_a.get(key), samples_b.get(key))
        if isinstance(pair, str):
            made[index] = replace(change, untested=pair)
        else:
            p_values[index] = test(change.metric, pair_of(pair[0]), pair_of(pair[1]))
    for index, p in zip(p_values, holm(list(p_values.values())), strict=True):
        made[index] = replace(made[index], p_value=p)
    return made


def _samples(run: Run, renamed: dict[str, str]) -> dict[tuple[str, str, str, str], Sample]:
    return {
        (task, dataset, renamed.get(model, model), sample.method): sample
        for task in _RANKED
        for model, dataset in run.questions(task)
        for sample in run.samples(task, model, dataset)
    }


def _aligned(one: Sample | None, other: Sample | None) -> tuple[Sample, Sample] | str:
    """Both samples with the second's images in the order of the first, or why they cannot be paired."""
    import numpy as np

    if one is None or other is None:
        return "no per-image scores"
    if set(one.negative_ids) != set(other.negative_ids) or set(one.positive_ids) != set(other.positive_ids):
        return "not the same images" if one.record.task == "anomaly" else "not wrong on the same images"
    order = {name: i for i, name in enumerate(other.negative_ids)}, {n: i for i, n in enumerate(other.positive_ids)}
    return one, replace(
        other,
        negatives=other.negatives[np.array([order[0][name] for name in one.negative_ids], dtype=int)],
        positives=other.positives[np.array([order[1][name] for name in one.positive_ids], dtype=int)],
        negative_ids=one.negative_ids,
        positive_ids=one.positive_ids,
    )


def _group(change: Change) -> str:
    return f"{change.task}: {change.dataset}, {change.model}"


def _header(change: Change, notes: dict[str, str]) -> Header:
    metric = METRICS.get(change.metric)
    arrow = "" if metric is None else "↑" if metric.higher_is_better else "↓"
    texts = [*change.settings, *([f"not tested: {change.untested}"] if change.untested else [])]
    marks = tuple(notes.setdefault(text, str(len(notes) + 1)) for text in texts)
    label = f"{change.method} {metric.label if metric else change.metric}"
    return Header(label=label, group=_group(change), arrow=arrow, marks=marks)


def _texts(change: Change) -> dict[str, Cell]:
    def number(value: float | None, style: str) -> Cell:
        return Cell() if value is None else Cell(text=f"{value:{style}}", value=value)

    return {
        "before": number(change.before, ".4f"),
        "after": number(change.after, ".4f"),
        "change": number(change.difference, "+.4f"),
        "verdict": Cell(text=change.verdict, value=0.0),
        "p": number(change.p_value, ".2g"),
    }
