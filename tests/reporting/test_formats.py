import csv
import io
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ood_toolkit.records import Record
from ood_toolkit.reporting.formats import FORMATS, latex, markdown, typst
from ood_toolkit.reporting.grid import MISSING, Cell, Header, Table
from ood_toolkit.reporting.options import TableOptions
from ood_toolkit.reporting.tables import print_terminal, render, tables

MakeRun = Callable[..., list[Record]]
NASTY = r"""my_pkg:Odd(a='x_y', b="50%", c=[1, 2], d={'k': '#$&'}, e='\\n~^|`<b>*_', f='--ε≥中é')"""
OPTIONS = {
    "plain": TableOptions(),
    "intervals": TableOptions(intervals="brackets"),
    "percent": TableOptions(scale="percent", precision=2, intervals="plusminus"),
    "transposed": TableOptions(transposed=True),
}


class Cells(HTMLParser):
    """The text of every row's cells, row heads first; superscripts left out."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._open = False
        self._silent = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._open = True
        self._silent = tag == "sup" or self._silent

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag not in ("td", "th")
        self._silent = self._silent and tag != "sup"

    def handle_data(self, data: str) -> None:
        if self._open and not self._silent:
            self.rows[-1][-1] += data


def expected(records: list[Record], options: TableOptions) -> list[list[str]]:
    return [
        [row.text, *(cell.text for cell in cells)]
        for table in tables(records, options=options)
        for row, cells in zip(table.rows, table.cells, strict=True)
    ]


def body(rows: list[list[str]], records: list[Record], options: TableOptions) -> list[list[str]]:
    """The rows that are neither heads nor group names."""
    widths = {len(row) for row in expected(records, options)}
    heads = {table.stub for table in tables(records, options=options)}
    return [row for row in rows if len(row) in widths and row[0] not in heads and any(row[1:])]


@pytest.mark.parametrize("name", OPTIONS)
def test_html_holds_the_same_numbers(make_run: MakeRun, name: str) -> None:
    records, options = make_run(), OPTIONS[name]
    rows = Cells(render(records, format="html", options=options)).rows
    assert body(rows, records, options)[-len(expected(records, options)) :][0:3] == expected(records, options)[0:3]
    assert [r for r in rows if r in expected(records, options)] == expected(records, options)


@pytest.mark.parametrize("name", OPTIONS)
def test_markdown_holds_the_same_numbers_after_a_commonmark_parser(make_run: MakeRun, name: str) -> None:
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    records, options = make_run(), OPTIONS[name]
    rows = Cells(parser.render(render(records, format="markdown", options=options))).rows
    assert [r for r in rows if r in expected(records, options)] == expected(records, options)


@pytest.mark.parametrize("name", ["plain", "percent"])
def test_csv_round_trips_through_pandas(make_run: MakeRun, name: str) -> None:
    records, options = make_run(), OPTIONS[name]
    frame = pd.read_csv(io.StringIO(render(records, format="csv", options=options)), dtype=str, keep_default_na=False)
    found = [
        [text for text in row if text] for row in frame.drop(columns=["table", "group", "notes"]).to_numpy().tolist()
    ]
    assert found == [[text for text in row if text != MISSING] for row in expected(records, options)]
    if name == "plain":
        numeric = pd.read_csv(io.StringIO(render(records, format="csv", what="detectors")))
        assert numeric["OOD: textures AUROC"].dtype == float
        assert list(numeric["OOD: textures AUROC"].isna()).count(True) == 1


def test_csv_gives_each_end_of_an_interval_its_own_column(make_run: MakeRun) -> None:
    records = make_run()
    text = render(records, format="csv", what="detectors", options=TableOptions(intervals="brackets"))
    row = next(csv.DictReader(io.StringIO(text)))
    record = next(r for r in records if (r.method, r.dataset, r.metric) == ("msp", "textures", "auroc"))
    found = tuple(row["OOD: textures AUROC" + end] for end in ("", " low", " high"))
    assert found == (f"{record.value:.3f}", f"{record.low:.3f}", f"{record.high:.3f}")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("siunitx", [False, True])
def test_latex_holds_the_same_numbers(make_run: MakeRun, name: str, siunitx: bool) -> None:
    records, options = make_run(), OPTIONS[name]
    lines = render(records, format="latex", options=options, siunitx=siunitx).splitlines()
    rows = [line.removesuffix(r" \\").split(" & ") for line in lines if " & " in line]
    plain = [[unlatex(cell) for cell in row] for row in rows]
    wanted = [[row[0], *row[1:]] for row in expected(records, options)]
    assert [row for row in plain if row in wanted] == wanted


def unlatex(cell: str) -> str:
    cell = re.sub(r"\\textsuperscript\{[^}]*\}", "", cell)
    for code, text in {
        r"\textquotesingle{}": "'",
        r"\textemdash{}": "—",
        r"$\pm$": "±",
        r"$\uparrow$": "↑",
        r"$\downarrow$": "↓",
        r"\_": "_",
    }.items():
        cell = cell.replace(code, text)
    cell = re.sub(r"^\{(.*)\}$", r"\1", cell)
    return re.sub(r"\\(?:textbf|underline)\{(.*)\}", r"\1", cell)


@pytest.mark.parametrize("name", OPTIONS)
def test_typst_and_text_hold_the_same_numbers(make_run: MakeRun, name: str) -> None:
    records, options = make_run(), OPTIONS[name]
    numbers = [text for row in expected(records, options) for text in row[1:]]
    grids = re.sub(r'super\("[^"]*"\)', "", render(records, format="typst", options=options))
    literals = re.findall(r'(?<=[ (])"((?:\d|—)[^"]*)"', grids)
    assert literals == numbers
    lines = render(records, format="text", options=options).splitlines()
    for row in expected(records, options):
        pattern = r"\s+(?:\(\w\)\s+)?".join(re.escape(text) for text in row)
        assert any(re.match(pattern, line) for line in lines), row


@pytest.mark.parametrize("name", FORMATS)
def test_no_format_leaves_out_a_note(make_run: MakeRun, name: str) -> None:
    text = render(make_run(), format=name)
    assert "every class needs a training row, but classes" in text


@pytest.mark.parametrize(
    ("name", "best", "second", "legend"),
    [
        ("markdown", "**{}**", "<ins>{}</ins>", "Best in **bold**, second <ins>underlined</ins>"),
        ("html", "<strong>{}</strong>", "<u>{}</u>", "Best in <strong>bold</strong>, second <u>underlined</u>"),
        ("latex", r"\textbf{{{}}}", r"\underline{{{}}}", r"Best in \textbf{bold}, second \underline{underlined}"),
        ("typst", 'strong("{}")', 'underline("{}")', "Best in bold, second underlined"),
    ],
)
def test_best_and_second_look_as_the_legend_says(
    make_run: MakeRun, name: str, best: str, second: str, legend: str
) -> None:
    records = make_run()
    text = render(records, format=name)
    assert legend in text
    cells = [cell for table in tables(records) for row in table.cells for cell in row]
    for place, style in ((1, best), (2, second)):
        for cell in cells:
            assert (cell.place != place) or style.format(cell.text) in text


def rendered_by_commonmark(text: str) -> str:
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    _, row = Cells(parser.render(f"| x |\n| :-- |\n| {text} |\n")).rows
    return row[0]


@settings(max_examples=150)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"]), min_size=1))
def test_any_text_survives_markdown(text: str) -> None:
    assert rendered_by_commonmark(markdown.escape(text)) == text


def test_a_nasty_spec_survives_every_format(make_run: MakeRun) -> None:
    records = [replace(r, method=NASTY) if r.method == "vim" else r for r in make_run()]
    assert any(row[0] == NASTY for row in Cells(render(records, format="html")).rows)
    assert NASTY in pd.read_csv(io.StringIO(render(records, format="csv")))["method"].tolist()
    assert NASTY in render(records, format="text")
    assert rendered_by_commonmark(markdown.escape(NASTY)) == NASTY


def run_latex(text: str, folder: Path) -> str:
    """Compiles a document; returns the text of its pages."""
    if not shutil.which("pdflatex"):
        pytest.skip("pdflatex is not installed (Debian: texlive-latex-recommended, texlive-science)")
    (folder / "table.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=120)
    if "File `" in done.stdout and "not found" in done.stdout:
        pytest.skip("a LaTeX package is not installed: " + done.stdout.split("File `")[1].split("'")[0])
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if line.startswith("!"))
    assert "Overfull" not in done.stdout
    if not shutil.which("pdftotext"):
        pytest.skip("it compiles, but pdftotext is not installed (Debian: poppler-utils)")
    return subprocess.run(["pdftotext", "-layout", "table.pdf", "-"], cwd=folder, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("siunitx", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_latex_compiles_and_prints_every_number(make_run: MakeRun, tmp_path: Path, name: str, siunitx: bool) -> None:
    records = [replace(r, method=NASTY) if r.method == "vim" else r for r in make_run()]
    options = OPTIONS[name]
    text = render(records, format="latex", options=options, siunitx=siunitx, standalone=True)
    page = run_latex(text, tmp_path)
    printed = re.sub(r"\s+", " ", page)
    for row in expected(records, options):
        assert all(number in printed for number in row[1:] if number != MISSING)


@pytest.mark.slow
def test_a_table_of_many_rows_is_continued_on_the_next_page_under_one_number(make_run: MakeRun, tmp_path: Path) -> None:
    template = [r for r in make_run() if r.method == "vim"]
    records = [replace(r, method=f"knn(k={k})") for k in range(1, 101) for r in template]
    page = run_latex(render(records, format="latex", standalone=True, what="detectors"), tmp_path)
    assert all(page.count(f"knn(k={k})") == 1 for k in range(1, 101))
    assert page.count("Table 1:") == 3
    assert page.count("(continued)") == 2
    assert page.count("FPR95: Share of ID") == 1
    assert "Float too large" not in (tmp_path / "table.log").read_text(encoding="utf-8", errors="replace")


@pytest.mark.slow
def test_typst_compiles(make_run: MakeRun, tmp_path: Path) -> None:
    compiler = pytest.importorskip("typst")
    records = [replace(r, method=NASTY) if r.method == "vim" else r for r in make_run()]
    for options in OPTIONS.values():
        source = tmp_path / "table.typ"
        source.write_text(render(records, format="typst", options=options), encoding="utf-8")
        assert compiler.compile(str(source), format="pdf").startswith(b"%PDF")


def test_a_bracket_or_star_at_the_start_of_a_latex_row_is_no_argument_of_the_row_before() -> None:
    cell = Cell(text="1.0", value=1.0)
    table = Table(
        name="t",
        title="T",
        stub="S",
        rows=(Header(label="[3mm] x"), Header(label="* y")),
        columns=(Header(label="C"),),
        cells=((cell,), (cell,)),
    )
    lines = latex.render([table]).splitlines()
    assert "{[}3mm{]} x & 1.0 \\\\" in lines
    assert "{*} y & 1.0 \\\\" in lines


@given(st.text())
def test_a_typst_literal_ends_where_it_should(text: str) -> None:
    literal = typst.literal(text)
    assert re.fullmatch(r'"(?:[^"\\]|\\["\\])*"', literal, re.DOTALL)
    assert re.sub(r"\\(.)", r"\1", literal[1:-1]) == " ".join(text.split())


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colour_and_a_pipe_gets_none(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen, pipe = Screen(), io.StringIO()
    print_terminal(make_run(), file=screen)
    print_terminal(make_run(), file=pipe)
    assert "\x1b[" in screen.getvalue()
    assert "\x1b[" not in pipe.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert max(len(line) for line in plain.splitlines()) <= 100
    assert plain.count("odin(temperature=1000, epsilon=0.0014)") == 4  # the column groups stand below one another
