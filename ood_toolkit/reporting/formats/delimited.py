"""CSV for pandas, R and spreadsheets: one header row, one line per method, an empty field where there is no number.

Several tables are stacked, with their name in the first column and the union of their columns.
"""

import csv
import io
from collections.abc import Sequence

from ood_toolkit.reporting.grid import Header, Table


def render(tables: Sequence[Table]) -> str:
    """CSV text (RFC 4180, with plain newlines).

    Columns: table, group, method, one per number, with intervals two more named "… low" and "… high" (there the number
    stands alone), and notes: the reasons and footnotes of the row in words.
    """
    heads: list[str] = []
    for table in tables:
        for column in table.columns:
            name = _name(column)
            heads += [h for h in (name, *_bounds(name, table)) if h not in heads]
    out = io.StringIO()
    writer = csv.DictWriter(out, ["table", "group", "method", *heads, "notes"], lineterminator="\n", restval="")
    writer.writeheader()
    for table in tables:
        writer.writerows(_rows(table))
    return out.getvalue()


def _name(column: Header) -> str:
    """The column's name without arrow, which not every reader of CSV decodes."""
    return f"{column.group} {column.label}".strip()


def _bounds(name: str, table: Table) -> tuple[str, ...]:
    return (f"{name} low", f"{name} high") if table.intervals else ()


def _rows(table: Table) -> list[dict[str, str]]:
    reasons = dict(table.notes)
    made = []
    for header, cells in zip(table.rows, table.cells, strict=True):
        row = {"table": table.title, "group": header.group, "method": header.label}
        notes = [reasons[mark] for mark in header.marks]
        for column, cell in zip(table.columns, cells, strict=True):
            name = _name(column)
            notes += [f"{name}: {reasons[mark]}" for mark in cell.marks]
            if cell.value is None:
                continue
            low, high = cell.bounds
            row[name] = cell.text.split(" [")[0] if low else cell.text
            if low:
                row |= {f"{name} low": low, f"{name} high": high}
        made.append(row | {"notes": "; ".join(notes)})
    return made
