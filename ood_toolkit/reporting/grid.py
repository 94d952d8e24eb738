"""A finished table, before any format: headers, cells as text, notes. Every format prints these same strings."""

from dataclasses import dataclass, replace

MISSING = "—"
"""The text of a cell without a number."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The head of one row or one column.

    Args:
        label: what it holds, e.g. a detector's spec or "AUROC".
        group: what it stands under, e.g. a model, a family, or "OOD: textures"; "" for none.
        arrow: "↑" where higher is better, "↓" where lower is, "" where there is no direction.
        marks: footnote marks.
        about: one sentence for a tooltip or a glossary.
    """

    label: str
    group: str = ""
    arrow: str = ""
    marks: tuple[str, ...] = ()
    about: str = ""

    @property
    def text(self) -> str:
        """Label and arrow."""
        return f"{self.label} {self.arrow}".strip()

    @property
    def full(self) -> str:
        """Group, label and arrow on one line, for formats with a single header row."""
        return f"{self.group} {self.text}".strip()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number as text.

    Args:
        text: what is printed, the same in every format.
        place: 1 for the best of its column, 2 for the second, 0 for the rest.
        marks: footnote marks.
        value: the number in unit scale, unrounded, for sorting.
        bounds: lower and upper end as text, for formats with a column each; ("", "") where there are none.
    """

    text: str = MISSING
    place: int = 0
    marks: tuple[str, ...] = ()
    value: float | None = None
    bounds: tuple[str, str] = ("", "")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows, columns and cells; `cells[i][j]` stands in row i and column j.

    Args:
        name: a short word for file names and labels, e.g. "detectors".
        title: what the table shows, a few words.
        stub: head of the column of row labels.
        caption: what was measured on what, in sentences without full stops.
        conventions: what the numbers mean, in such sentences.
        notes: (mark, text) of every footnote, in order.
        label: for references in LaTeX and Typst.
        intervals: whether some cell's text holds an interval.
        scope: what the best is the best of, e.g. " within each model"; "" for the whole column.
    """

    name: str
    title: str
    stub: str
    rows: tuple[Header, ...]
    columns: tuple[Header, ...]
    cells: tuple[tuple[Cell, ...], ...]
    caption: tuple[str, ...] = ()
    conventions: tuple[str, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    label: str = ""
    intervals: bool = False
    scope: str = ""

    def __post_init__(self) -> None:
        if len(self.cells) != len(self.rows) or any(len(row) != len(self.columns) for row in self.cells):
            raise ValueError(
                f"{len(self.rows)} rows and {len(self.columns)} columns need as many cells, got "
                f"{len(self.cells)} rows of {sorted({len(row) for row in self.cells})}"
            )

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from ood_toolkit.reporting.formats import html

        return html.render([self])

    def __str__(self) -> str:
        from ood_toolkit.reporting.formats import terminal

        return terminal.render([self])

    @property
    def legend(self) -> str:
        """What the emphasis means; "" where nothing is emphasised."""
        ranked = any(cell.place for row in self.cells for cell in row)
        return f"Best in bold, second underlined, by the printed digits{self.scope}" if ranked else ""

    def transposed(self) -> "Table":
        """Rows as columns. Best and second stay with their numbers."""
        return replace(
            self,
            stub="",
            rows=self.columns,
            columns=self.rows,
            cells=tuple(zip(*self.cells, strict=True)) if self.rows else tuple(() for _ in self.columns),
        )

    def column_groups(self) -> list[tuple[str, list[int]]]:
        """Runs of neighbouring columns under one group, as (group, indices)."""
        return _runs(self.columns)

    def row_groups(self) -> list[tuple[str, list[int]]]:
        """Runs of neighbouring rows under one group, as (group, indices)."""
        return _runs(self.rows)

    def select_columns(self, indices: list[int]) -> "Table":
        """The table cut down to some columns."""
        return replace(
            self,
            columns=tuple(self.columns[j] for j in indices),
            cells=tuple(tuple(row[j] for j in indices) for row in self.cells),
        )

    def select_rows(self, indices: list[int]) -> "Table":
        """The table cut down to some rows."""
        return replace(self, rows=tuple(self.rows[i] for i in indices), cells=tuple(self.cells[i] for i in indices))


def sentences(*parts: str) -> str:
    """The parts that are not empty, each with a full stop."""
    return " ".join(f"{part}." for part in parts if part)


def _runs(headers: tuple[Header, ...]) -> list[tuple[str, list[int]]]:
    runs: list[tuple[str, list[int]]] = []
    for index, header in enumerate(headers):
        if not runs or runs[-1][0] != header.group:
            runs.append((header.group, []))
        runs[-1][1].append(index)
    return runs
