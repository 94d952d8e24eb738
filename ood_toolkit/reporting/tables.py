"""Tables of a run, from its records alone: detectors × tasks and calibrators × calibration metrics, in any format."""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TextIO

from ood_toolkit.records import METRICS, Record
from ood_toolkit.reporting.captions import caption
from ood_toolkit.reporting.formats import FORMATS
from ood_toolkit.reporting.grid import Cell, Header, Table
from ood_toolkit.reporting.merging import Column, Measurement, Row, merge

What = Literal["detectors", "calibrators", "all"]
_TASKS = {"detectors": ("misclassification", "anomaly"), "calibrators": ("calibration",)}
_METRICS = {
    "misclassification": ("auroc", "aupr_error", "fpr95", "aurc"),
    "anomaly": ("auroc", "aupr", "fpr95"),
    "calibration": ("accuracy", "ece", "rms", "nll", "brier", "aurra"),
}
_NOT_SHARES = frozenset({"nll", "brier"})
_AVERAGE = "\0average"
"""The data set of an average over OOD sets; no real one can be named so."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How a table is cut and shown. The default is what `ood-bench` prints.

    Args:
        metrics: keys of `METRICS` to show, in this order; by default those of the main job.
        datasets: data sets to show, in this order; by default all.
        methods: specs or patterns (`knn*`) of the rows to show, in this order; by default all.
        models: model specs to show; by default all.
        group_by: what rows stand under. "auto" is the model where there are several, else the family.
            Grouped by data set there is one table per task. Best and second are marked within a model or a
            data set, and over the whole table for "family" and "none".
        precision: digits after the point; by default 3 for units and 1 for percent.
        scale: "percent" multiplies every share by 100 (not NLL and Brier, which are no shares).
        intervals: "brackets" prints `0.934 [0.921, 0.945]`, "plusminus" half the width. A mean over seeds always has
            ± its standard deviation.
        average: whether anomaly detection has columns for the mean over OOD sets, where there are several.
        transposed: methods as columns.
        allow: settings whose differences become footnotes; see `merging.SETTINGS`.
        caption: replaces the first sentence of the caption.
        label: the label of LaTeX and Typst references.
    """

    metrics: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    group_by: Literal["auto", "none", "family", "model", "dataset"] = "auto"
    precision: int | None = None
    scale: Literal["unit", "percent"] = "unit"
    intervals: Literal["none", "brackets", "plusminus"] = "none"
    average: bool = True
    transposed: bool = False
    allow: tuple[str, ...] = ()
    caption: str = ""
    label: str = ""

    @property
    def digits(self) -> int:
        """Digits after the point."""
        if self.precision is not None:
            return self.precision
        return 1 if self.scale == "percent" else 3


DEFAULTS = TableOptions()


def render(
    records: Iterable[Record],
    *,
    format: str,
    what: What = "all",
    options: TableOptions = DEFAULTS,
    siunitx: bool = False,
) -> str:
    """The tables of a run as text.

    Args:
        records: of one run or of several that may be merged (see `merging`).
        format: "latex", "markdown", "csv", "html", "typst" or "text".
        what: which tables.
        options: how they are cut and shown.
        siunitx: align LaTeX numbers with siunitx' S columns.
    """
    if format not in FORMATS:
        raise ValueError(f"no format is named {format!r}; known: {', '.join(FORMATS)}")
    if siunitx and format != "latex":
        raise ValueError(f"siunitx aligns LaTeX only, not {format}")
    found = tables(records, what=what, options=options)
    if siunitx:
        from ood_toolkit.reporting.formats import latex

        return latex.render(found, siunitx=True)
    return FORMATS[format](found)


def print_terminal(
    records: Iterable[Record], *, what: What = "all", options: TableOptions = DEFAULTS, file: TextIO | None = None
) -> None:
    """Prints the tables: aligned and coloured on a terminal, plain text when piped.

    Args:
        records: see `render`.
        what: see `render`.
        options: see `render`.
        file: where to; standard output by default.
    """
    from ood_toolkit.reporting.formats import terminal

    terminal.show(tables(records, what=what, options=options), file=file)


def tables(records: Iterable[Record], *, what: What = "all", options: TableOptions = DEFAULTS) -> list[Table]:
    """Finished tables: for each suite one of detectors and one of calibrators, where there are any.

    Raises:
        ValueError: when nothing is left to show, or records cannot share a table.
    """
    if what not in ("all", *_TASKS):
        raise ValueError(f"no table is named {what!r}; known: detectors, calibrators, all")
    records = list(records)
    if not records:
        raise ValueError("there are no records to show")
    _check_choice(records, options)
    suites = list(dict.fromkeys(record.suite for record in records))
    made: list[Table] = []
    for suite in suites:
        for name in _TASKS if what == "all" else (what,):
            kept = [r for r in records if r.suite == suite and r.task in _TASKS[name] and _chosen(r, options)]
            if not kept:
                continue
            parts = [kept]
            if options.group_by == "dataset":
                parts = [[r for r in kept if r.task == task] for task in _TASKS[name]]
            title = name if len(suites) == 1 else f"{name}, {suite}"
            made += [_build(part, name, title, options) for part in parts if part]
    if not made:
        raise ValueError(f"no record is left of {len(records)} after choosing {_choice(options, what)}")
    return [table.transposed() for table in made] if options.transposed else made


def _check_choice(records: Sequence[Record], options: TableOptions) -> None:
    present = {
        "metrics": {r.metric for r in records},
        "datasets": {r.dataset for r in records},
        "models": {r.model for r in records},
    }
    for field, known in present.items():
        unknown = [name for name in getattr(options, field) if name not in known]
        if unknown:
            raise ValueError(f"the records have no {field} {unknown}; they have {', '.join(sorted(known))}")


def _choice(options: TableOptions, what: str) -> str:
    chosen = {name: getattr(options, name) for name in ("metrics", "datasets", "methods", "models")}
    return ", ".join([what, *(f"{name} {list(values)}" for name, values in chosen.items() if values)])


def _chosen(record: Record, options: TableOptions) -> bool:
    metrics = options.metrics or _METRICS[record.task]
    return (
        record.metric in metrics
        and (not options.datasets or record.dataset in options.datasets)
        and (not options.models or record.model in options.models)
        and (not options.methods or any(_matches(record, pattern) for pattern in options.methods))
    )


def _matches(record: Record, pattern: str) -> bool:
    return record.method == pattern or fnmatch.fnmatchcase(record.method, pattern)


def _build(records: list[Record], name: str, title: str, options: TableOptions) -> Table:
    cells = merge(records, allow=options.allow)
    rows, columns = _ordered(records, cells, options)
    models = {row.model for _, row in rows}
    group_by = options.group_by
    if group_by == "auto":
        group_by = "model" if len(models) > 1 else "family"
    notes = _Notes()
    headers = tuple(_row_header(dataset, row, cells, notes, group_by, len(models) > 1) for dataset, row in rows)
    grid = [
        [_measure(cells, row, replace(column, dataset=dataset or column.dataset), columns) for column in columns]
        for dataset, row in rows
    ]
    texts = [[_text(m, c.metric, options) for m, c in zip(line, columns, strict=True)] for line in grid]
    shown = list(dict.fromkeys(column.metric for column in columns))
    blocks = [header.group for header in headers] if group_by in ("model", "dataset") else [""] * len(headers)
    places = [_places([line[j] for line in texts], column.metric, blocks) for j, column in enumerate(columns)]
    return Table(
        name=name,
        title=title.capitalize(),
        stub="Detector" if name == "detectors" else "Calibrator",
        rows=headers,
        columns=tuple(_column_header(column, columns, options) for column in columns),
        cells=tuple(
            tuple(_cell(m, texts[i][j], places[j][i], columns[j].metric, notes, options) for j, m in enumerate(line))
            for i, line in enumerate(grid)
        ),
        caption=_caption(records, title, shown, options),
        notes=notes.listed,
        label=f"{options.label}-{name}" if options.label else f"tab:{name}",
        intervals=options.intervals != "none",
    )


def _caption(records: list[Record], title: str, metrics: list[str], options: TableOptions) -> tuple[str, ...]:
    sentences = caption(records, title.capitalize(), metrics=metrics, intervals=options.intervals != "none")
    if options.caption:
        sentences = (options.caption.rstrip("."), *sentences[1:])
    if options.scale == "percent":
        exempt = [METRICS[key].label for key in metrics if key in _NOT_SHARES]
        sentences += ("Values in percent" + (f", except {' and '.join(exempt)}" if exempt else ""),)
    return sentences


def _ordered(
    records: list[Record], cells: dict[tuple[Row, Column], Measurement], options: TableOptions
) -> tuple[list[tuple[str, Row]], list[Column]]:
    """Rows as (data set or "", row), and columns, in the order in which they are shown."""
    rows = list(dict.fromkeys(row for row, _ in cells))
    if options.methods:
        rows.sort(key=lambda row: next(i for i, p in enumerate(options.methods) if _row_matches(row, p, records)))
    key = {"none": lambda _: "", "family": lambda row: row.family}.get(options.group_by, lambda row: row.model)
    several = len({row.model for row in rows}) > 1
    if options.group_by == "auto" and not several:
        key = lambda row: row.family  # noqa: E731
    groups = list(dict.fromkeys(key(row) for row in rows))
    rows.sort(key=lambda row: groups.index(key(row)))
    found = list(dict.fromkeys(column for _, column in cells))
    datasets = options.datasets or tuple(dict.fromkeys(column.dataset for column in found))
    tasks = [task for group in _TASKS.values() for task in group]
    found.sort(
        key=lambda c: (
            tasks.index(c.task),
            datasets.index(c.dataset),
            (options.metrics or _METRICS[c.task]).index(c.metric),
        )
    )
    if options.group_by == "dataset":
        columns = list(dict.fromkeys(replace(column, dataset="") for column in found))
        present = {(column.dataset, row) for row, column in cells}
        return [(d, row) for d in datasets for row in rows if (d, row) in present], columns
    sets = list(dict.fromkeys(column.dataset for column in found if column.task == "anomaly"))
    if options.average and len(sets) > 1:
        metrics = dict.fromkeys(column.metric for column in found if column.task == "anomaly")
        found += [Column(task="anomaly", dataset=_AVERAGE, metric=metric) for metric in metrics]
    return [("", row) for row in rows], found


def _row_matches(row: Row, pattern: str, records: list[Record]) -> bool:
    return any(_matches(r, pattern) for r in records if r.model == row.model and row.method.endswith(r.method))


def _measure(
    cells: dict[tuple[Row, Column], Measurement], row: Row, column: Column, columns: list[Column]
) -> Measurement:
    if column.dataset != _AVERAGE:
        return cells.get((row, column), Measurement(value=None, reason="not in the records"))
    parts = [
        cells.get((row, c))
        for c in columns
        if c.task == column.task and c.metric == column.metric and c.dataset != _AVERAGE
    ]
    values = [part.value for part in parts if part is not None and part.value is not None]
    if len(values) < len(parts):
        return Measurement(value=None, reason="an average is given only where every OOD set has a number")
    return Measurement(value=sum(values) / len(values))


def _row_header(
    dataset: str,
    row: Row,
    cells: dict[tuple[Row, Column], Measurement],
    notes: "_Notes",
    group_by: str,
    several: bool,
) -> Header:
    group = {"none": "", "family": row.family, "model": row.model, "dataset": dataset}[group_by]
    label = f"{row.model}: {row.method}" if several and group_by != "model" else row.method
    marks = []
    if row.tuned_on:
        tested = any(column.dataset == row.tuned_on and column.task == "anomaly" for _, column in cells)
        also = ", which is also tested on: optimistic" if tested else ""
        marks.append(notes.mark(f"hyper-parameters were chosen on the OOD set {row.tuned_on}{also}"))
    marks += [notes.mark(f"{name.replace('_', ' ')}: {value}") for name, value in row.variant]
    usual = next(iter(cells.values())).seeds
    own = {m.seeds for (other, _), m in cells.items() if other == row and m.seeds != usual}
    marks += [notes.mark("seed " + ", ".join(map(str, seeds))) for seeds in sorted(own)]
    return Header(label=label, group=group, marks=tuple(marks))


def _column_header(column: Column, columns: list[Column], options: TableOptions) -> Header:
    metric = METRICS.get(column.metric)
    words = {"misclassification": "Errors", "anomaly": "OOD", "calibration": "Calibration"}
    group = f"{words[column.task]}: {column.dataset}"
    if column.dataset == _AVERAGE:
        sets = {c.dataset for c in columns if c.task == "anomaly"} - {_AVERAGE}
        group = f"OOD: mean of {len(sets)}"
    elif not column.dataset:
        group = words[column.task]
    if metric is None:
        return Header(label=column.metric, group=group)
    arrow = "↑" if metric.higher_is_better else "↓"
    return Header(label=metric.label, group=group, arrow=arrow, about=metric.about)


def _cell(measured: Measurement, text: str, place: int, metric: str, notes: "_Notes", options: TableOptions) -> Cell:
    if measured.value is None:
        return Cell(marks=(notes.mark(measured.reason),))
    bounds = ("", "")
    if options.intervals == "brackets" and measured.low is not None and measured.high is not None:
        bounds = (_number(measured.low, metric, options), _number(measured.high, metric, options))
    return Cell(text=text, place=place, value=measured.value, bounds=bounds)


def _number(value: float, metric: str, options: TableOptions) -> str:
    scaled = value * 100 if options.scale == "percent" and metric not in _NOT_SHARES else value
    digits = options.digits if options.scale == "unit" or metric not in _NOT_SHARES else options.digits + 2
    text = f"{scaled:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def _text(measured: Measurement, metric: str, options: TableOptions) -> str:
    if measured.value is None:
        return ""
    text = _number(measured.value, metric, options)
    if options.intervals == "none":
        return text
    if measured.deviation is not None:
        return f"{text} ± {_number(measured.deviation, metric, options)}"
    if measured.low is None or measured.high is None:
        return text
    if options.intervals == "plusminus":
        return f"{text} ± {_number((measured.high - measured.low) / 2, metric, options)}"
    return f"{text} [{_number(measured.low, metric, options)}, {_number(measured.high, metric, options)}]"


def _places(texts: list[str], metric: str, blocks: list[str]) -> list[int]:
    """1 for the best and 2 for the second of each block, by the printed digits, so that equal print ranks equal."""
    places = [0] * len(texts)
    if metric not in METRICS:
        return places
    for block in dict.fromkeys(blocks):
        numbers = {i: float(texts[i].split()[0]) for i, name in enumerate(blocks) if name == block and texts[i]}
        ranked = sorted(set(numbers.values()), reverse=METRICS[metric].higher_is_better)
        if len(ranked) < 2:  # all equal: nothing stands out
            continue
        for index, number in numbers.items():
            rank = ranked.index(number) + 1
            places[index] = rank if rank <= 2 else 0
    return places


class _Notes:
    """Footnotes, each text once, marked a, b, c, … in order of appearance."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, text: str) -> str:
        if text not in self._marks:
            self._marks[text] = _letters(len(self._marks))
        return self._marks[text]

    @property
    def listed(self) -> tuple[tuple[str, str], ...]:
        return tuple((mark, text) for text, mark in self._marks.items())


def _letters(index: int) -> str:
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return letters
