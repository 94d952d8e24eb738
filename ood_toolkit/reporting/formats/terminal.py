"""Plain text, aligned; coloured where the output is a terminal."""

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from ood_toolkit.reporting.grid import Cell, Table, sentences

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_GAP = "  "
_STYLES = {1: "bold green", 2: "underline cyan"}


def render(tables: Sequence[Table]) -> str:
    """The text that a pipe gets: no colour, no wrapping."""
    out = io.StringIO()
    show(tables, file=out)
    return out.getvalue()


def show(tables: Sequence[Table], *, file: TextIO | None = None) -> None:
    """Prints tables. On a terminal too narrow for all columns, groups of columns are printed below one another."""
    from rich.console import Console

    console = Console(file=file or sys.stdout, highlight=False)
    console.soft_wrap = not console.is_terminal  # a pipe never wraps
    for number, table in enumerate(tables):
        if number:
            console.print()
        _show(console, table)


def _show(console: "Console", table: Table) -> None:
    from rich.text import Text

    console.print(Text(table.title, style="bold"))
    for part in _fitting(console, table):
        for line in _lines(part):
            console.print(line, soft_wrap=True)
        console.print()
    # colour and underline do not survive a pipe, so only a terminal is told what they mean
    console.print(
        Text(sentences(*table.caption, *table.conventions, table.legend if console.is_terminal else ""), style="dim")
    )
    for mark, text in table.notes:
        console.print(Text(f"({mark}) {text}", style="dim"))


def _fitting(console: "Console", table: Table) -> list[Table]:
    """The table, or its column groups apart where they do not fit side by side."""
    if not console.is_terminal:
        return [table]
    parts: list[list[int]] = []
    for _, indices in table.column_groups():
        if parts and _lines(table.select_columns(parts[-1] + indices))[-1].cell_len <= console.width:
            parts[-1] += indices
        else:
            parts.append(list(indices))
    return [table.select_columns(part) for part in parts]


def _lines(table: Table) -> list["Text"]:
    from rich.cells import cell_len
    from rich.text import Text

    heads = [Text(column.text + _marks(column.marks), style="bold") for column in table.columns]
    body = [[_cell(cell) for cell in row] for row in table.cells]
    labels = [Text(header.text + _marks(header.marks)) for header in table.rows]
    tails = [max((cell_len(_marks(row[j].marks)) for row in table.cells), default=0) for j in range(len(heads))]
    for row, cells in zip(body, table.cells, strict=True):
        for text, cell, tail in zip(row, cells, tails, strict=True):
            text.append(" " * (tail - cell_len(_marks(cell.marks))))  # marks hang, so that points stay aligned
    for head, tail in zip(heads, tails, strict=True):
        head.append(" " * tail)
    widths = [max(text.cell_len for text in (head, *(row[j] for row in body))) for j, head in enumerate(heads)]
    first = max(text.cell_len for text in (Text(table.stub), *labels, *_group_names(table)))
    spans = _widen(table, widths)
    lines: list[Text] = []
    if any(group for group, _ in table.column_groups()):
        lines.append(_join(Text(" " * first), [_pad(Text(group), width, "left") for group, width in spans]))
        lines.append(_join(Text(" " * first), [Text("─" * width, style="dim") for _, width in spans]))
    lines.append(_join(_pad(Text(table.stub, style="bold"), first, "left"), _padded(heads, widths)))
    lines.append(Text("─" * lines[-1].cell_len, style="dim"))
    for group, indices in table.row_groups():
        if group:
            lines.append(Text(group, style="italic"))
        lines += [_join(_pad(labels[i], first, "left"), _padded(body[i], widths)) for i in indices]
    return lines


def _group_names(table: Table) -> list["Text"]:
    from rich.text import Text

    return [Text(group) for group, _ in table.row_groups()]


def _widen(table: Table, widths: list[int]) -> list[tuple[str, int]]:
    """Every column group with its width; widens the last column of a group narrower than its name."""
    from rich.cells import cell_len

    spans = []
    for group, indices in table.column_groups():
        width = sum(widths[j] for j in indices) + len(_GAP) * (len(indices) - 1)
        if cell_len(group) > width:
            widths[indices[-1]] += cell_len(group) - width
            width = cell_len(group)
        spans.append((group, width))
    return spans


def _padded(texts: Sequence["Text"], widths: Sequence[int]) -> list["Text"]:
    return [_pad(text, width, "right") for text, width in zip(texts, widths, strict=True)]


def _pad(text: "Text", width: int, side: str) -> "Text":
    from rich.text import Text

    space = Text(" " * (width - text.cell_len))
    return text + space if side == "left" else space + text


def _join(first: "Text", rest: Sequence["Text"]) -> "Text":
    from rich.text import Text

    return Text(_GAP).join([first, *rest])


def _cell(cell: Cell) -> "Text":
    from rich.text import Text

    text = Text(cell.text, style=_STYLES.get(cell.place, ""))
    return Text() + text + Text(_marks(cell.marks), style="dim")


def _marks(marks: Sequence[str]) -> str:
    return f" ({','.join(marks)})" if marks else ""
