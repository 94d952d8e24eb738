"""One file per output format: finished tables in, text out. No format rounds, ranks or leaves out a number."""

from collections.abc import Callable, Sequence

from ood_toolkit.reporting.formats import delimited, html, latex, markdown, terminal, typst
from ood_toolkit.reporting.grid import Table

FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {
    "text": terminal.render,
    "markdown": markdown.render,
    "latex": latex.render,
    "csv": delimited.render,
    "html": html.render,
    "typst": typst.render,
}
