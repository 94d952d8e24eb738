"""HTML: a `<table>` with a caption, scoped heads and the unrounded numbers as `data-value` for sorting."""

from collections.abc import Sequence
from html import escape

from ood_toolkit.reporting.grid import Cell, Header, Table, sentences


def render(tables: Sequence[Table]) -> str:
    """One `<figure>` per table, without style of its own: it reads well in any page."""
    return "\n".join(_table(table) for table in tables) + "\n"


def _table(table: Table) -> str:
    legend = table.legend.replace("bold", "<strong>bold</strong>").replace("underlined", "<u>underlined</u>")
    caption = sentences(*map(escape, table.caption), legend)
    lines = [
        '<figure class="ood-table">',
        f'<table id="{escape("-".join(table.label.split()))}">',
        f"<caption>{caption}</caption>",
        *_head(table),
        *_body(table),
        "</table>",
    ]
    if table.notes:
        notes = " ".join(f"<span><sup>{mark}</sup> {escape(text)}.</span>" for mark, text in table.notes)
        lines.append(f'<p class="notes">{notes}</p>')
    if table.conventions:
        lines.append(f'<p class="notes">{sentences(*map(escape, table.conventions))}</p>')
    return "\n".join([*lines, "</figure>"])


def _head(table: Table) -> list[str]:
    groups = table.column_groups()
    stub = escape(table.stub)
    lines = ["<thead>"]
    if any(group for group, _ in groups):
        cells = "".join(
            f'<th scope="colgroup" colspan="{len(indices)}">{escape(group)}</th>' for group, indices in groups
        )
        lines.append(f"<tr><td></td>{cells}</tr>")
    heads = "".join(
        f'<th scope="col" class="number"{_title(column)}>{escape(column.text)}{_marks(column.marks)}</th>'
        for column in table.columns
    )
    first = f'<th scope="col">{stub}</th>' if stub else "<td></td>"
    return [*lines, f"<tr>{first}{heads}</tr>", "</thead>"]


def _title(column: Header) -> str:
    return f' title="{escape(column.about)}"' if column.about else ""


def _body(table: Table) -> list[str]:
    lines = []
    grouped = any(header.group for header in table.rows)
    for group, indices in table.row_groups():
        lines.append("<tbody>")
        if grouped:
            span = len(table.columns) + 1
            lines.append(f'<tr class="group"><th scope="rowgroup" colspan="{span}">{escape(group) or "–"}</th></tr>')
        for i in indices:
            header = table.rows[i]
            cells = "".join(_cell(cell) for cell in table.cells[i])
            lines.append(f'<tr><th scope="row">{escape(header.text)}{_marks(header.marks)}</th>{cells}</tr>')
        lines.append("</tbody>")
    return lines


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    text = {1: f"<strong>{text}</strong>", 2: f"<u>{text}</u>"}.get(cell.place, text)
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    return f'<td class="number"{value}>{text}{_marks(cell.marks)}</td>'


def _marks(marks: Sequence[str]) -> str:
    return f"<sup>{','.join(marks)}</sup>" if marks else ""
