r"""LaTeX with booktabs: a table environment that compiles as it is, or a whole document.

The first line names the packages that the preamble needs: booktabs, siunitx where that is asked for, and graphicx where
a table is scaled to fit the page.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from ood_toolkit.reporting.grid import MISSING, Cell, Header, Table, sentences

_NARROW, _PAGE = 235.0, 397.0
"""Points in one column of a two-column paper, and across the page of a one-column one: the narrowest in use."""
_SIZES = {"small": 9.0, "footnotesize": 8.0, "scriptsize": 7.0}
_EM = 0.5
"""Mean width of a character, in font sizes."""
_COLSEP = 4.0
_ROWS = 48
"""Rows that fit on a page beside caption and notes."""
_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\ttfamily\char34}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # after \\ an open bracket or a star would be read as its argument
    "]": "{]}",
    "*": "{*}",
    "—": r"\textemdash{}",
    "–": r"\textendash{}",
    "±": r"$\pm$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "−": "$-$",
    "·": r"$\cdot$",
    "…": r"\ldots{}",
    "’": "'",
    "‘": "`",
    "“": "``",
    "”": "''",
}
_GREEK = frozenset("αβγδεζηθικλμνξπρστυφχψω")


def render(tables: Sequence[Table], *, siunitx: bool = False) -> str:
    r"""One table environment per table, to be pasted or `\input` as it is.

    Args:
        tables: finished tables.
        siunitx: align numbers at the point with S columns.
    """
    packages = ["booktabs", *["siunitx"] * siunitx, *["graphicx"] * any(_fit(table)[2] for table in tables)]
    return f"% \\usepackage{{{','.join(packages)}}}\n" + "\n".join(
        part for table in tables for part in _parts(table, siunitx)
    )


def document(tables: Sequence[Table], *, siunitx: bool = False) -> str:
    """A whole document with the tables, for a look at them: `pdflatex FILE`."""
    return "\n".join(
        [
            r"\documentclass[twocolumn]{article}",
            r"\usepackage[utf8]{inputenc}",
            r"\usepackage[T1]{fontenc}",
            r"\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}",  # outlines instead of bitmaps
            r"\usepackage[margin=15mm]{geometry}",
            r"\usepackage{booktabs,graphicx}",
            *([r"\usepackage{siunitx}"] if siunitx else []),
            r"\begin{document}",
            render(tables, siunitx=siunitx),
            r"\end{document}",
            "",
        ]
    )


def escape(text: str) -> str:
    """The text as LaTeX that prints as itself under any engine.

    Characters that pdfTeX's standard fonts lack are printed as their code point, `U+4E2D`.
    """
    made = "".join(_character(c) for c in " ".join(text.split()))
    return re.sub("-(?=-)", "-{}", made)  # no ligature to a dash


def _character(c: str) -> str:
    if c in _ESCAPES:
        return _ESCAPES[c]
    if ord(c) < 128 or (c.isalpha() and "LATIN" in unicodedata.name(c, "") and ord(c) < 0x180):
        return c
    if c in _GREEK:
        return f"$\\{unicodedata.name(c).split()[-1].lower().replace('lamda', 'lambda')}$"
    return f"\\texttt{{U+{ord(c):04X}}}"


def _parts(table: Table, siunitx: bool) -> list[str]:
    """One environment, or several under one number where the rows do not fit on a page."""
    starts = range(0, max(1, len(table.rows)), _ROWS)
    whole = [list(range(start, min(start + _ROWS, len(table.rows)))) for start in starts]
    last = len(whole) - 1
    made = []
    for number, rows in enumerate(whole):
        part = table.select_rows(rows)
        part = part if number == last else replace(part, notes=(), conventions=())
        caption = [rf"\caption{{{_caption(table)}}}", rf"\label{{{_key(table.label)}}}"]
        if number:
            caption = [r"\addtocounter{table}{-1}", r"\caption{(continued)}"]
        made.append(_table(part, siunitx, caption, _fit(table)))
    return made


def _table(table: Table, siunitx: bool, caption: Sequence[str], fit: tuple[str, str, bool]) -> str:
    star, size, squeeze = fit
    width = r"\textwidth" if star else r"\columnwidth"
    kind = f"S[table-format={_shape(table)}]" if siunitx and not table.intervals else "r"
    lines = [
        rf"\begin{{table{star}}}[tb]",
        r"\centering",
        rf"\{size}",
        rf"\setlength{{\tabcolsep}}{{{_COLSEP:g}pt}}",
        *caption,
        r"\smallskip",
        *[r"\resizebox{\textwidth}{!}{%"] * squeeze,
        rf"\begin{{tabular}}{{@{{}}l{kind * len(table.columns)}@{{}}}}",
        r"\toprule",
        *_head(table, kind),
        r"\midrule",
        *_body(table, kind),
        r"\bottomrule",
        r"\end{tabular}" + "}" * squeeze,
    ]
    notes = [rf"\textsuperscript{{{mark}}}\,{escape(text)}." for mark, text in table.notes]
    below = " ".join([*notes, sentences(*map(escape, table.conventions))]).strip()
    if below:
        lines.append(rf"\par\smallskip\parbox{{{width}}}{{\footnotesize {below}}}")
    return "\n".join([*lines, rf"\end{{table{star}}}", ""])


def _key(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9:.-]", "-", label)


def _fit(table: Table) -> tuple[str, str, bool]:
    """What makes the table fit: "*" to span two columns, the font size, and whether it must be scaled as well."""
    labels = max(len(header.text) + len(header.marks) for header in table.rows)
    numbers = [
        max(len(head.text), *(len(row[j].text) + len(row[j].marks) for row in table.cells))
        for j, head in enumerate(table.columns)
    ]
    characters, gaps = labels + sum(numbers), 2 * _COLSEP * len(numbers)
    for star, room in (("", _NARROW), ("*", _PAGE)):
        for size, points in _SIZES.items():
            if characters * points * _EM + gaps <= room:
                return star, size, False
    return "*", "scriptsize", True


def _caption(table: Table) -> str:
    legend = table.legend.replace("bold", r"\textbf{bold}").replace("underlined", r"\underline{underlined}")
    return sentences(*map(escape, table.caption), legend)


def _shape(table: Table) -> str:
    numbers = [cell.text for row in table.cells for cell in row if cell.value is not None] or ["0.000"]
    parts = [number.lstrip("-").partition(".") for number in numbers]
    sign = "-" if any(number.startswith("-") for number in numbers) else ""
    return f"{sign}{max(len(p[0]) for p in parts)}.{max(len(p[2]) for p in parts)}"


def _head(table: Table, kind: str) -> list[str]:
    lines = []
    groups = table.column_groups()
    if any(group for group, _ in groups):
        spans = " & ".join(
            rf"\multicolumn{{{len(indices)}}}{{{'rc'[len(indices) > 1]}}}{{{escape(group)}}}"
            for group, indices in groups
        )
        rules = " ".join(rf"\cmidrule(lr){{{ix[0] + 2}-{ix[-1] + 2}}}" for group, ix in groups if group)
        lines += [rf" & {spans} \\", rules]
    heads = [escape(column.text) + _marks(column.marks) for column in table.columns]
    braced = heads if kind == "r" else [f"{{{head}}}" for head in heads]
    return [*lines, " & ".join([escape(table.stub), *braced]) + r" \\"]


def _body(table: Table, kind: str) -> list[str]:
    lines: list[str] = []
    grouped = any(header.group for header in table.rows)
    for number, (group, indices) in enumerate(table.row_groups()):
        if grouped:
            lines += [r"\addlinespace"] * bool(number)
            span = len(table.columns) + 1
            lines.append(rf"\multicolumn{{{span}}}{{@{{}}l}}{{\textit{{{escape(group or '–')}}}}} \\")
        for i in indices:
            cells = [_cell(cell) if kind == "r" else _aligned(cell) for cell in table.cells[i]]
            lines.append(" & ".join([_label(table.rows[i]), *cells]) + r" \\")
    return lines


def _label(header: Header) -> str:
    return escape(header.text) + _marks(header.marks)


def _cell(cell: Cell) -> str:
    if cell.text == MISSING:
        return escape(MISSING) + _marks(cell.marks)
    text = cell.text.replace("±", r"$\pm$")
    text = f"$-${text[1:]}" if text.startswith("-") else text
    return {1: rf"\textbf{{{text}}}", 2: rf"\underline{{{text}}}"}.get(cell.place, text) + _marks(cell.marks)


def _aligned(cell: Cell) -> str:
    """A cell of an S column: bare where it is a plain number, else in braces, which siunitx sets as text."""
    return cell.text if cell.value is not None and not cell.place and not cell.marks else f"{{{_cell(cell)}}}"


def _marks(marks: Sequence[str]) -> str:
    return rf"\textsuperscript{{{','.join(marks)}}}" if marks else ""
