"""From merged measurements to a finished table: which rows and columns, in what order, with which marks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ood_toolkit.records import ALL_CLASSES, GROUP_MEANS, METRICS, Record
from ood_toolkit.reporting.captions import caption, conventions
from ood_toolkit.reporting.grid import Cell, Header, Table
from ood_toolkit.reporting.merging import Column, Measurement, Row, merge
from ood_toolkit.reporting.options import MAIN_METRICS, NOT_SHARES, TASKS, TableOptions, matches

AVERAGE = "\0average"
"""The data set of a mean over OOD sets; no real one can be named so."""
_ABSENT = Measurement(value=None, reason="not in the records")
_TASK_WORDS = {"misclassification": "Errors", "anomaly": "OOD", "calibration": "Calibration"}
_ORDER = tuple(task for tasks in TASKS.values() for task in tasks)

Cells = dict[tuple[Row, Column], Measurement]


@dataclass(frozen=True)
class _Line:
    """A row of the table: a method, and its data set where rows are grouped by it."""

    row: Row
    dataset: str
    group: str

    def at(self, column: Column) -> Column:
        return replace(column, dataset=self.dataset) if self.dataset else column


class _Notes:
    """Footnotes, each text once, marked a, b, c, … in order of appearance."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, text: str, mark: str = "") -> str:
        """The mark of `text`: a given one, or the next letter."""
        if text not in self._marks:
            letters = sum(known.isalpha() for known in self._marks.values())
            self._marks[text] = mark or _letters(letters)
        return self._marks[text]

    @property
    def listed(self) -> tuple[tuple[str, str], ...]:
        """(mark, text), in order."""
        return tuple((mark, text) for text, mark in self._marks.items())


def assemble(records: list[Record], name: str, words: Sequence[str], options: TableOptions) -> Table:
    """One table.

    Args:
        records: all of one suite and of the table's tasks, already chosen.
        name: "detectors" or "calibrators".
        words: what tells this table from others of the same name.
        options: how it is shown.
    """
    cells = merge(records, allow=options.allow)
    lines, columns = _lines(cells, options), _columns(cells, options)
    notes = _Notes()
    headers = tuple(_row_header(line, cells, lines, notes, options) for line in lines)
    grid = [[_measure(cells, line, column, columns) for column in columns] for line in lines]
    texts = [[options.text(m, c.metric) for m, c in zip(row, columns, strict=True)] for row in grid]
    blocks = [line.group if _scope(lines, options) else "" for line in lines]
    places = [places_of([row[j] for row in texts], column.metric, blocks) for j, column in enumerate(columns)]

    def cell(i: int, j: int) -> Cell:
        marks = _cell_marks(grid[i][j], lines[i], columns[j], notes, options)
        return _cell(grid[i][j], texts[i][j], places[j][i], marks, columns[j].metric, options)

    table_cells = tuple(tuple(cell(i, j) for j in range(len(columns))) for i in range(len(lines)))
    shown = list(dict.fromkeys(column.metric for column in columns))
    title = ", ".join([name.capitalize(), *words])
    return Table(
        name=name,
        title=title,
        stub=name.removesuffix("s").capitalize(),
        rows=headers,
        columns=tuple(_column_header(column, columns) for column in columns),
        cells=table_cells,
        caption=_caption(records, name, shown, options),
        conventions=_conventions(records, shown, options),
        notes=notes.listed,
        label=":".join([options.label, "-".join([name, *words])]),
        intervals=options.intervals != "none",
        scope=_scope(lines, options),
    )


def _several_models(cells: Cells) -> bool:
    return len({row.model for row, _ in cells}) > 1


def _scope(lines: list[_Line], options: TableOptions) -> str:
    """What best and second are marked within: " within each model"."""
    if options.group_by == "dataset":
        return " within each data set"
    several = len({line.row.model for line in lines}) > 1
    return " within each model" if several and options.group_by in ("auto", "model") else ""


def _lines(cells: Cells, options: TableOptions) -> list[_Line]:
    group_by = options.group_by
    if group_by == "auto":
        group_by = "model" if _several_models(cells) else "family"
    rows = list(dict.fromkeys(row for row, _ in cells))
    datasets = [""]
    if group_by == "dataset":
        datasets = list(options.datasets or dict.fromkeys(column.dataset for _, column in cells))
    present = {(column.dataset, row) for row, column in cells}
    lines = [
        _Line(row, dataset, {"family": row.family, "model": row.model, "dataset": dataset}.get(group_by, ""))
        for dataset in datasets
        for row in rows
        if not dataset or (dataset, row) in present
    ]
    groups = list(dict.fromkeys(line.group for line in lines))
    return sorted(lines, key=lambda line: (groups.index(line.group), _wish(line.row.method, options)))


def _wish(method: str, options: TableOptions) -> int:
    """The place of a row in `options.methods`."""
    return next((i for i, pattern in enumerate(options.methods) if matches(method, pattern)), len(options.methods))


def _columns(cells: Cells, options: TableOptions) -> list[Column]:
    found = list(dict.fromkeys(column for _, column in cells))
    datasets = list(options.datasets or dict.fromkeys(column.dataset for column in found))
    found.sort(
        key=lambda c: (
            _ORDER.index(c.task),
            datasets.index(c.dataset),
            (options.metrics or MAIN_METRICS[c.task]).index(c.metric),
        )
    )
    if options.group_by == "dataset":
        return list(dict.fromkeys(replace(column, dataset="") for column in found))
    sets = _averaged_sets(found)
    if options.average and len(sets) > 1:
        metrics = dict.fromkeys(column.metric for column in found if column.task == "anomaly")
        found += [Column(task="anomaly", dataset=AVERAGE, metric=metric) for metric in metrics]
    return found


def _averaged_sets(columns: Sequence[Column]) -> set[str]:
    """The OOD sets, each once: without what is a mean already, and without what comes again under all classes."""
    sets = {column.dataset for column in columns if column.task == "anomaly"} - {AVERAGE, *GROUP_MEANS}
    return sets - {f"{name}{ALL_CLASSES}" for name in sets}


def _measure(cells: Cells, line: _Line, column: Column, columns: list[Column]) -> Measurement:
    if column.dataset != AVERAGE:
        return cells.get((line.row, line.at(column)), _ABSENT)
    sets = _averaged_sets(columns)
    same = [c for c in columns if (c.task, c.metric) == (column.task, column.metric) and c.dataset in sets]
    values = [cells.get((line.row, c), _ABSENT).value for c in same]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Measurement(value=None, reason="an average is given only where every OOD set has a number")
    return Measurement(value=sum(known) / len(known))


def _row_header(line: _Line, cells: Cells, lines: list[_Line], notes: _Notes, options: TableOptions) -> Header:
    row = line.row
    named = line.group == row.model or not _several_models(cells)
    marks = []
    if row.tuned_on:
        tested = any(column.dataset == row.tuned_on and column.task == "anomaly" for _, column in cells)
        also = ", which it is also tested on here: optimistic" if tested else ""
        marks.append(notes.mark(f"hyper-parameters were chosen on the OOD set {row.tuned_on}{also}"))
    marks += [notes.mark(f"{name.replace('_', ' ')}: {value}") for name, value in row.variant]
    usual = next(iter(cells.values())).seeds
    own = {m.seeds for (other, _), m in cells.items() if other == row and m.seeds != usual}
    marks += [notes.mark("measured with seed " + ", ".join(map(str, seeds))) for seeds in sorted(own)]
    return Header(label=row.method if named else f"{row.model}: {row.method}", group=line.group, marks=tuple(marks))


def _column_header(column: Column, columns: list[Column]) -> Header:
    group = _TASK_WORDS[column.task]
    if column.dataset == AVERAGE:
        group = f"{group}: mean of {len(_averaged_sets(columns))}"
    elif column.dataset:
        group = f"{group}: {column.dataset}"
    metric = METRICS.get(column.metric)
    if metric is None:
        return Header(label=column.metric, group=group)
    arrow = "↑" if metric.higher_is_better else "↓"
    return Header(label=metric.label, group=group, arrow=arrow, about=metric.about)


def _cell_marks(
    measured: Measurement, line: _Line, column: Column, notes: _Notes, options: TableOptions
) -> tuple[str, ...]:
    if measured.value is None:
        return (notes.mark(measured.reason),)
    key = (line.row.model, line.row.method, column.task, line.at(column).dataset, column.metric)
    if key in options.tied:
        return (notes.mark("a paired test cannot tell it from the best of its column", "≈"),)
    return ()


def _cell(
    measured: Measurement, text: str, place: int, marks: tuple[str, ...], metric: str, options: TableOptions
) -> Cell:
    if measured.value is None:
        return Cell(marks=marks)
    bounds = ("", "")
    if options.intervals == "brackets" and measured.low is not None and measured.high is not None:
        bounds = (options.number(measured.low, metric), options.number(measured.high, metric))
    return Cell(text=text, place=place, marks=marks, value=measured.value, bounds=bounds)


def places_of(texts: Sequence[str], metric: str, blocks: Sequence[str]) -> list[int]:
    """1 for the best and 2 for the second of each block, by the printed digits, so that equal print ranks equal.

    Args:
        texts: one column of the table, "" where there is no number.
        metric: its key; without a known direction nothing is marked.
        blocks: the block of each row.
    """
    places = [0] * len(texts)
    if metric not in METRICS:
        return places
    for block in dict.fromkeys(blocks):
        numbers = {i: float(texts[i].split()[0]) for i, name in enumerate(blocks) if name == block and texts[i]}
        ranked = sorted(set(numbers.values()), reverse=METRICS[metric].higher_is_better)
        if len(ranked) < 2:  # all equal: nothing stands out
            continue
        for index, number in numbers.items():
            place = ranked.index(number) + 1
            places[index] = place if place <= 2 else 0
    return places


def _caption(records: list[Record], name: str, metrics: list[str], options: TableOptions) -> tuple[str, ...]:
    parts = caption(records, name.capitalize(), metrics=metrics)
    return (options.caption.rstrip("."), *parts[1:]) if options.caption else parts


def _conventions(records: list[Record], metrics: list[str], options: TableOptions) -> tuple[str, ...]:
    parts = conventions(records, metrics=metrics, intervals=options.intervals != "none")
    if options.scale == "percent":
        exempt = [METRICS[key].label for key in metrics if key in NOT_SHARES]
        parts += ("Values in percent" + (f", except {' and '.join(exempt)}" if exempt else ""),)
    return parts


def _letters(index: int) -> str:
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return letters
