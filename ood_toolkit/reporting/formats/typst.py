"""Typst. Every text is a string literal, so that no character of a spec can mean markup."""

import re
from collections.abc import Sequence

from ood_toolkit.reporting.grid import Cell, Header, Table, sentences


def render(tables: Sequence[Table]) -> str:
    """One `#figure` per table, to be pasted or included as it is."""
    return "\n".join(_table(table) for table in tables)


def literal(text: str) -> str:
    """The text as a Typst string literal."""
    return '"' + " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _table(table: Table) -> str:
    groups = table.column_groups()
    lines = [
        "#figure(",
        "  kind: table,",
        f"  caption: [{_caption(table)}],",
        "  {",
        "    table(",
        f"      columns: {len(table.columns) + 1},",
        f"      align: (left, {'right, ' * len(table.columns)}),",
        "      stroke: none,",
        "      inset: (x: 4pt, y: 3pt),",
        "      table.hline(stroke: 0.8pt),",
    ]
    if any(group for group, _ in groups):
        spans = ", ".join(
            f"table.cell(colspan: {len(indices)}, align: center, {literal(group)})" for group, indices in groups
        )
        lines.append(f'      "", {spans},')
    heads = ", ".join(_header(column) for column in table.columns)
    lines += [f"      {literal(table.stub)}, {heads},", "      table.hline(stroke: 0.5pt),"]
    grouped = any(header.group for header in table.rows)
    for group, indices in table.row_groups():
        if grouped:
            lines.append(f"      table.cell(colspan: {len(table.columns) + 1}, emph({literal(group or '–')})),")
        lines += [f"      {_header(table.rows[i])}, {', '.join(map(_cell, table.cells[i]))}," for i in indices]
    lines += ["      table.hline(stroke: 0.8pt),", "    )"]
    lines += [_note(f"super({literal(mark)}) + {literal(' ' + text)}") for mark, text in table.notes]
    if table.conventions:
        lines.append(_note(literal(sentences(*table.conventions))))
    return "\n".join([*lines, "  },", f") <{re.sub(r'[^A-Za-z0-9_:.-]', '-', table.label)}>", ""])


def _note(content: str) -> str:
    return f"    align(left, text(size: 0.8em, {content}))"


def _caption(table: Table) -> str:
    return f"#{literal(sentences(*table.caption, table.legend))}"


def _header(header: Header) -> str:
    return literal(header.text) + _marks(header.marks)


def _cell(cell: Cell) -> str:
    text = {1: f"strong({literal(cell.text)})", 2: f"underline({literal(cell.text)})"}.get(
        cell.place, literal(cell.text)
    )
    return text + _marks(cell.marks)


def _marks(marks: Sequence[str]) -> str:
    return f" + super({literal(','.join(marks))})" if marks else ""
