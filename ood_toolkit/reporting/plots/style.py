"""One look for all figures: paper widths, embedded fonts, and lines that differ without colour."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.25, 6.75
"""Widths of one column and of the page in two-column papers, in inches."""
PAGE_HEIGHT = 9.0
"""The tallest figure that fits on a page, in inches."""
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#56B4E9")
"""Okabe and Ito's palette, which the colour-blind can tell apart, with a darker yellow for white paper."""
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (3, 1)),
    (0, (8, 2)),
    (0, (1, 2)),
)
"""Line styles in step with `COLOURS`, for print without colour."""
ID_COLOUR, OOD_COLOUR = "#9ECAE1", "#B03000"
GREY = "#B0B0B0"

_SETTINGS: dict[str, Any] = {
    "font.size": 8,
    "font.family": "DejaVu Sans",  # ships with matplotlib, so every machine draws the same
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.2,
    "hatch.linewidth": 0.5,
    "figure.dpi": 200,  # as saved: text is as wide when it is laid out as when it is drawn
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # TrueType, embedded: journals refuse Type 3
    "ps.fonttype": 42,
    "svg.fonttype": "path",  # outlines, so that the file needs no font
    "svg.hashsalt": "ood-toolkit",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.06,
    "figure.constrained_layout.h_pad": 0.06,
}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure on disk.

    Args:
        name: file name without suffix.
        title: a few words.
        about: what it shows and how to read it; the alternative text.
        width: in inches.
        model: whose results it shows.
        files: one per format.
    """

    name: str
    title: str
    about: str
    width: float
    model: str = ""
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure that is still open, with its texts."""

    name: str
    title: str
    about: str
    figure: "Figure"
    model: str = ""


@contextmanager
def look() -> Iterator[None]:
    """The settings of all figures, for the time of the block."""
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS):  # pyright: ignore[reportArgumentType]  # newer stubs list every key
        yield


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any) -> "tuple[Figure, list[Axes]]":
    """A figure without any window system, and its axes in reading order.

    Args:
        width: in inches.
        height: in inches; cut at the height of a page.
        rows: of axes.
        columns: of axes.
        grid: `sharex`, `sharey` of `Figure.subplots`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, min(height, PAGE_HEIGHT)))
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **grid)
    return figure, list(axes.flat)


def tiles(count: int, columns: int, tile_height: float, **grid: Any) -> "tuple[Figure, list[Axes]]":
    """A page-wide grid of `count` axes; those left over are removed."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = canvas(PAGE * columns / 4 if columns < 4 else PAGE, rows * tile_height + 0.4, rows, columns, **grid)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def line(index: int) -> dict[str, Any]:
    """Colour and dashes of the line number `index`."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def short(text: str, width: int = 26) -> str:
    """The text cut in its middle."""
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def plain(text: str) -> str:
    """The text with dollar signs escaped, which matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def save(drawing: Drawing, folder: Path, formats: tuple[str, ...]) -> Picture:
    """Writes the figure in every format, without dates, so that equal figures are equal files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    drawing.figure.draw_without_rendering()  # lays out once; the formats then share it
    drawing.figure.set_layout_engine("none")
    for suffix in formats:
        file = folder / f"{drawing.name}.{suffix}"
        metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(suffix)
        drawing.figure.savefig(file, metadata=metadata)
        files.append(file)
    return Picture(
        name=drawing.name,
        title=drawing.title,
        about=drawing.about,
        width=float(drawing.figure.get_size_inches()[0]),
        model=drawing.model,
        files=tuple(files),
    )
