"""Contact sheets: the images that a model or a detector got most surely wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ood_toolkit.reporting.plots import style
from ood_toolkit.reporting.plots.style import Drawing
from ood_toolkit.reporting.runs import Confidences, Run, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

COUNT = 12
_SIDE = 160
"""Pixels of a thumbnail's longer side."""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One image on a sheet.

    Args:
        file: the image.
        identifier: its name, "part/id".
        text: the number that put it there.
    """

    file: Path
    identifier: str
    text: str


def most_confidently_wrong(run: Run, found: Confidences, count: int = COUNT) -> list[Exhibit]:
    """Wrong answers with the highest confidence, surest first; only images whose files are there."""
    import numpy as np

    names = run.scores.ids[found.part]
    order = np.argsort(-np.where(found.correct, -1.0, found.confidence), kind="stable")
    wrong = [i for i in order.tolist() if not found.correct[i]]
    return _exhibits(run, [(f"{found.part}/{names[i]}", f"{found.confidence[i]:.3f}") for i in wrong], count)


def most_surely_missed(run: Run, sample: Sample, count: int = COUNT) -> list[Exhibit]:
    """Positives with the lowest scores, with the share of ID images that score higher."""
    import numpy as np

    order = np.argsort(sample.positives, kind="stable").tolist()
    above = [float((sample.negatives > sample.positives[i]).mean()) for i in order[: 4 * count]]
    texts = [f"{share:.0%} of ID higher" for share in above]
    return _exhibits(run, list(zip((sample.positive_ids[i] for i in order), texts, strict=False)), count)


def contact_sheet(exhibits: Sequence[Exhibit], name: str, title: str, about: str) -> Drawing:
    """The images in rows of four, each with its name and number.

    Args:
        exhibits: at least one.
        name: file name.
        title: a few words.
        about: what was chosen, and how.
    """
    figure, axes = style.tiles(len(exhibits), 4, 1.9)
    for ax, exhibit in zip(axes, exhibits, strict=True):
        ax.imshow(thumbnail(exhibit.file))
        ax.axis("off")
        name_of_file = exhibit.identifier.partition("/")[2]
        ax.set_title(style.plain(f"{exhibit.text}\n{style.short(name_of_file, 30)}"), fontsize=5.5)
    return Drawing(name=name, title=title, about=about, figure=figure)


def thumbnail(file: Path) -> "Image":
    """The image as RGB, at most 160 pixels wide and high."""
    from PIL import Image as pillow

    with pillow.open(file) as image:
        image.draft("RGB", (2 * _SIDE, 2 * _SIDE))
        small = image.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    return small


def _exhibits(run: Run, ranked: Sequence[tuple[str, str]], count: int) -> list[Exhibit]:
    made: list[Exhibit] = []
    for identifier, text in ranked:
        file = run.image(identifier)
        if file is not None:
            made.append(Exhibit(file=file, identifier=identifier, text=text))
        if len(made) == count:
            break
    return made
