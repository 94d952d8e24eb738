"""GitHub-flavoured Markdown. Best in bold, second underlined with `<ins>`, which GitHub keeps."""

from collections.abc import Sequence

from ood_toolkit.reporting.grid import Cell, Header, Table, sentences

_SPECIAL = set("\\`*_[]<>|~$&")


def render(tables: Sequence[Table]) -> str:
    """Pipe tables, each under its title, with caption and notes below."""
    return "\n\n".join(_table(table) for table in tables) + "\n"


def escape(text: str) -> str:
    """The text as Markdown that renders as itself, on one line."""
    return "".join("\\" + c if c in _SPECIAL else c for c in " ".join(text.split()))


def _table(table: Table) -> str:
    grouped = any(header.group for header in table.rows)
    heads = [escape(table.stub), *(escape(column.full) + _marks(column.marks) for column in table.columns)]
    ruler = [":--", *("--:" for _ in table.columns)]
    lines = [_line(heads), _line(ruler)]
    for group, indices in table.row_groups():
        if grouped:
            lines.append(_line([f"*{escape(group) or '–'}*", *("" for _ in table.columns)]))
        lines += [_line([_label(table.rows[i]), *(_cell(c) for c in table.cells[i])]) for i in indices]
    legend = table.legend.replace("bold", "**bold**").replace("underlined", "<ins>underlined</ins>")
    caption = sentences(*map(escape, table.caption), legend)
    caption = "\\" + caption if caption[:1] in "#+-=" else caption  # else it would open a heading or a list
    parts = [f"**{escape(table.title)}**", "\n".join(lines), caption]
    parts.append("<br>\n".join(f"<sup>{mark}</sup> {escape(text)}" for mark, text in table.notes))
    parts.append(sentences(*map(escape, table.conventions)))
    return "\n\n".join(part for part in parts if part)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _label(header: Header) -> str:
    return escape(header.text) + _marks(header.marks)


def _cell(cell: Cell) -> str:
    # brackets of an interval need no escape: nothing here defines a link reference
    text = {1: f"**{cell.text}**", 2: f"<ins>{cell.text}</ins>"}.get(cell.place, cell.text)
    return text + _marks(cell.marks)


def _marks(marks: Sequence[str]) -> str:
    return f"<sup>{','.join(marks)}</sup>" if marks else ""
