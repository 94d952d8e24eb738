"""Tables of a run, from its records alone: detectors × tasks and calibrators × calibration metrics, in any format."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, TextIO

from ood_toolkit.records import ALL_CLASSES, Record
from ood_toolkit.reporting.assembly import assemble
from ood_toolkit.reporting.formats import FORMATS
from ood_toolkit.reporting.grid import Table
from ood_toolkit.reporting.options import DEFAULTS, MAIN_METRICS, TASKS, TableOptions, matches

_MANY = 12
"""More data sets than these stand below one another, not side by side."""
What = Literal["detectors", "calibrators", "all"]


def render(
    records: Iterable[Record],
    *,
    format: str,
    what: What = "all",
    options: TableOptions = DEFAULTS,
    siunitx: bool = False,
    standalone: bool = False,
) -> str:
    """The tables of a run as text.

    Args:
        records: of one run or of several that may be merged (see `merging`).
        format: "text", "latex", "markdown", "csv", "html" or "typst".
        what: which tables.
        options: how they are cut and shown.
        siunitx: LaTeX only: align numbers with siunitx' S columns.
        standalone: LaTeX only: a whole document instead of table environments.
    """
    require_format(format)
    found = tables(records, what=what, options=options)
    return render_tables(found, format=format, siunitx=siunitx, standalone=standalone)


def require_format(format: str) -> None:
    """Raises ValueError for a format that there is not, naming those there are."""
    if format not in FORMATS:
        raise ValueError(f"no format is named {format!r}; known: {', '.join(FORMATS)}")


def render_tables(found: Sequence[Table], *, format: str, siunitx: bool = False, standalone: bool = False) -> str:
    """Finished tables as text; see `render`."""
    require_format(format)
    if not (siunitx or standalone):
        return FORMATS[format](found)
    if format != "latex":
        raise ValueError(f"siunitx and standalone shape LaTeX only, not {format}")
    from ood_toolkit.reporting.formats import latex

    return (latex.document if standalone else latex.render)(found, siunitx=siunitx)


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
    if what not in ("all", *TASKS):
        raise ValueError(
            f"no table is named {what!r}; known: detectors, calibrators, robustness, classes, corruptions, all"
        )
    records = list(records)
    if not records:
        raise ValueError("there are no records to show")
    _check(records, options)
    suites = list(dict.fromkeys(record.suite for record in records))
    made: list[Table] = []
    for suite in suites:
        for name in TASKS if what == "all" else (what,):
            kept = [r for r in records if r.suite == suite and r.task in TASKS[name] and _chosen(r, options)]
            words = [suite] * (len(suites) > 1)
            many = options.group_by == "auto" and len({r.dataset for r in kept}) > _MANY
            shown = replace(options, group_by="dataset") if many else options
            made += [assemble(part, name, [*words, *more], shown) for more, part in _parts(kept, name, shown)]
    if not made:
        raise ValueError(f"none of {len(records)} records is left after choosing {_choice(options, what)}")
    return [table.transposed() for table in made] if options.transposed else made


def _parts(records: Sequence[Record], name: str, options: TableOptions) -> list[tuple[list[str], list[Record]]]:
    """The records of each table, with what tells it from the others of this name."""
    wide = [record for record in records if record.dataset.endswith(ALL_CLASSES)]
    masked = [record for record in records if not record.dataset.endswith(ALL_CLASSES)]
    # the same images under a class mask and under all classes are two protocols, and twice as wide as a terminal
    sides = [([], masked), ([ALL_CLASSES.strip()], wide)] if masked and wide else [([], list(records))]
    if options.group_by != "dataset":
        return [(words, part) for words, part in sides if part]
    parts = [
        (words, task, [record for record in part if record.task == task])
        for words, part in sides
        for task in TASKS[name]
    ]
    several = len(TASKS[name]) > 1
    return [([*words, *([task] if several else [])], part) for words, task, part in parts if part]


def _check(records: Sequence[Record], options: TableOptions) -> None:
    known_tasks = {task for tasks in TASKS.values() for task in tasks}
    strange = sorted({r.task for r in records} - known_tasks)
    if strange:
        raise ValueError(f"no table shows the tasks {strange}; known: {', '.join(sorted(known_tasks))}")
    present = {
        "metrics": {r.metric for r in records},
        "datasets": {r.dataset for r in records},
        "models": {r.model for r in records},
    }
    for field, known in present.items():
        unknown = [name for name in getattr(options, field) if name not in known]
        if unknown:
            raise ValueError(f"the records have no {field} {unknown}; they have {', '.join(sorted(known))}")
    methods = {r.method for r in records}
    unmatched = [p for p in options.methods if not any(matches(method, p) for method in methods)]
    if unmatched:
        raise ValueError(f"no method matches {unmatched}; the records have {', '.join(sorted(methods))}")


def _choice(options: TableOptions, what: str) -> str:
    chosen = {name: getattr(options, name) for name in ("metrics", "datasets", "methods", "models")}
    return ", ".join([what, *(f"{name} {list(values)}" for name, values in chosen.items() if values)])


def _chosen(record: Record, options: TableOptions) -> bool:
    metrics = options.metrics or MAIN_METRICS[record.task]
    return (
        record.metric in metrics
        and (not options.datasets or record.dataset in options.datasets)
        and (not options.models or record.model in options.models)
        and (not options.methods or any(matches(record.method, pattern) for pattern in options.methods))
    )
