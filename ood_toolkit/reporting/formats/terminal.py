"""Plain text, aligned; coloured by rich where the output is a terminal."""

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from ood_toolkit.reporting.grid import Cell, Header, Table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

_WIDE = 100_000
"""Columns of an output that is no terminal: a pipe must not wrap."""
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
    if not console.is_terminal:
        console = Console(file=file or sys.stdout, highlight=False, width=_WIDE, color_system=None)
    for number, table in enumerate(tables):
        if number:
            console.print()
        _show(console, table)


def _show(console: "Console", table: Table) -> None:
    from rich.text import Text

    console.print(Text(table.title, style="bold"))
    for part in _fitting(console, table):
        console.print(_grid(part))
    caption = ". ".join(table.caption) + "."
    legend = " Best in bold, second underlined, by the printed digits." if table.ranked else ""
    if console.is_terminal:
        console.print(Text(caption + legend, style="dim"))
    else:
        console.print(Text(caption))
    for mark, text in table.notes:
        console.print(Text(f"({mark}) {text}", style="dim"))


def _fitting(console: "Console", table: Table) -> list[Table]:
    """The table, or its column groups apart where they do not fit side by side."""
    parts: list[list[int]] = []
    for _, indices in table.column_groups():
        if parts and _width(console, table.select_columns(parts[-1] + indices)) <= console.width:
            parts[-1] += indices
        else:
            parts.append(list(indices))
    return [table.select_columns(part) for part in parts]


def _width(console: "Console", table: Table) -> int:
    return console.measure(_grid(table), options=console.options.update(max_width=_WIDE)).maximum


def _grid(table: Table) -> "RichTable":
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    grouped = any(column.group for column in table.columns)
    grid.add_column(Text(("\n" if grouped else "") + table.stub), overflow="fold")
    shown = ""
    for column in table.columns:
        group = column.group if column.group != shown else ""
        shown = column.group
        head = f"{group}\n{_text(column)}" if grouped else _text(column)
        grid.add_column(Text(head, justify="left" if group else "right"), justify="right", no_wrap=True)
    sections = any(header.group for header in table.rows)
    for group, indices in table.row_groups():
        if sections:
            grid.add_row(Text(group or "–", style="italic"))
        for i in indices:
            grid.add_row(Text(_text(table.rows[i])), *(_cell(cell) for cell in table.cells[i]))
    return grid


def _text(header: Header) -> str:
    return header.text + _marks(header.marks)


def _cell(cell: Cell) -> "Text":
    from rich.text import Text

    text = Text(cell.text, style=_STYLES.get(cell.place, ""))
    return text.append(_marks(cell.marks), style="dim") if cell.marks else text


def _marks(marks: Sequence[str]) -> str:
    return f" ({','.join(marks)})" if marks else ""
