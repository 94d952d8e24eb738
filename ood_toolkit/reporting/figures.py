"""Every figure of a run, as vector PDF and SVG and as PNG: `figures(run_dir, out)`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ood_toolkit.records import Record
from ood_toolkit.reporting.merging import merge, method_of
from ood_toolkit.reporting.options import TableOptions, matches
from ood_toolkit.reporting.plots import overview, ranking, reliability, sheets, style
from ood_toolkit.reporting.plots.style import Drawing, Picture
from ood_toolkit.reporting.runs import Run, Sample
from ood_toolkit.reporting.tables import tables

T = TypeVar("T")
FORMATS = ("pdf", "svg", "png")
_WORDS = {"anomaly": ("ID", "OOD"), "misclassification": ("right", "wrong")}
_TILES = 28
"""Histograms or reliability diagrams on one page."""


@dataclass(frozen=True)
class Gallery:
    """What was drawn, and why the rest was not.

    Args:
        pictures: in reading order.
        left_out: (figure, reason).
    """

    pictures: tuple[Picture, ...]
    left_out: tuple[tuple[str, str], ...]


def figures(
    run_dir: Path,
    out: Path,
    *,
    formats: Sequence[str] = FORMATS,
    methods: Sequence[str] = (),
    datasets: Sequence[str] = (),
    images: bool = False,
) -> Gallery:
    """Draws a run folder's figures into `out`.

    Args:
        run_dir: a folder that `ood-bench` wrote.
        out: made if missing.
        formats: of "pdf", "svg", "png".
        methods: detectors to draw, by spec or pattern (`knn*`); by default all.
        datasets: sets with curves and histograms of their own; by default all. Heat maps show all.
        images: also contact sheets, which copy images of the data sets: mind their licences.

    Raises:
        ValueError: `run_dir` is no run folder, or a format or data set is unknown.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ValueError(f"figures cannot be written as {unknown}; known: {', '.join(FORMATS)}")
    run = Run.open(run_dir)
    known = list(dict.fromkeys(record.dataset for record in run.records))
    if absent := [name for name in datasets if name not in known]:
        raise ValueError(f"the run has no data sets {absent}; it has {', '.join(known)}")
    pictures, left_out = [], []
    with style.look():
        for made in _drawings(run, tuple(methods), tuple(datasets) or tuple(known), images):
            if isinstance(made, Drawing):
                pictures.append(style.save(made, out, tuple(formats)))
            else:
                left_out.append(made)
    return Gallery(tuple(pictures), tuple(dict.fromkeys(left_out)))


Made = Drawing | tuple[str, str]


def _drawings(run: Run, methods: tuple[str, ...], datasets: tuple[str, ...], images: bool) -> Iterator[Made]:
    for model in run.models():
        for made in _of_model(run, model, methods, datasets, images):
            yield replace(made, model=model) if isinstance(made, Drawing) else made


def _of_model(
    run: Run, model: str, methods: tuple[str, ...], datasets: tuple[str, ...], images: bool
) -> Iterator[Made]:
    yield from _heat_map(run, model, methods)
    yield from _critical_differences(run, model, methods)
    if not run.scores.columns:
        yield "curves and histograms", "the run folder has no scores.safetensors"
        return
    for task in ("misclassification", "anomaly"):
        for dataset in (d for m, d in run.questions(task) if m == model and d in datasets):
            samples = _wanted(run.samples(task, model, dataset), methods)
            if samples:
                yield from _ranked(run, task, samples, _slug(run, model, dataset), images)
            else:
                yield f"curves of {task} on {dataset} with {model}", "no detector has per-image scores there"
    for dataset in (d for m, d in run.questions("calibration") if m == model and d in datasets):
        yield from _calibrated(run, model, dataset, images)


def _ranked(run: Run, task: str, samples: list[Sample], slug: str, images: bool) -> Iterator[Made]:
    words = _WORDS[task]
    kind = "ood" if task == "anomaly" else "errors"
    for page, some in _pages(samples):
        yield ranking.score_histograms(some, f"{kind}-scores-{slug}{page}", words)
    yield ranking.ranking_curves(samples, f"{kind}-roc-{slug}", words)
    if task == "misclassification":
        yield ranking.risk_coverage_curves(
            samples, f"{kind}-risk-coverage-{slug}", _recorded(run, samples[0].record, "aurc")
        )
    if len(samples) > 1:
        yield overview.score_agreement(samples, f"{kind}-agreement-{slug}")
    if task == "anomaly" and images:
        yield _missed(run, samples, slug)


def _pages(items: Sequence[T]) -> Iterator[tuple[str, Sequence[T]]]:
    """Pages of tiles with the suffix of their file name."""
    for number, start in enumerate(range(0, len(items), _TILES)):
        yield f"-{number + 1}" * bool(number), items[start : start + _TILES]


def _recorded(run: Run, one: Record, metric: str) -> dict[str, float]:
    """A metric by method, on the question of `one`."""
    return {
        method_of(r): r.value
        for r in run.records
        if (r.task, r.model, r.dataset, r.metric) == (one.task, one.model, one.dataset, metric) and r.value is not None
    }


def _missed(run: Run, samples: list[Sample], slug: str) -> Made:
    best = max(samples, key=ranking.auroc)
    exhibits = sheets.most_surely_missed(run, best)
    title = f"Most surely missed on {best.record.dataset}"
    if not exhibits:
        return title, "the images are no files that are still there"
    about = (
        f"OOD images of {best.record.dataset} with the lowest scores under {best.method}, the detector of highest AUROC"
    )
    return sheets.contact_sheet(exhibits, f"ood-missed-{slug}", title, about + ".")


def _calibrated(run: Run, model: str, dataset: str, images: bool) -> Iterator[Made]:
    found = run.confidences(model, dataset)
    slug = _slug(run, model, dataset)
    if not found:
        yield f"reliability on {dataset} with {model}", "no confidences were kept"
        return
    for page, some in _pages(found):
        yield reliability.reliability_diagrams(some, f"reliability-{slug}{page}")
    wrong = [one for one in found if not one.correct.all()]
    if not wrong:
        yield f"confidence of wrong answers on {dataset} with {model}", "every answer is right"
        return
    yield reliability.wrong_confidence(wrong, f"wrong-confidence-{slug}", _recorded(run, wrong[0].record, "nll"))
    if images:
        title = f"Most confidently wrong on {dataset}"
        exhibits = sheets.most_confidently_wrong(run, wrong[0])
        about = f"Wrong answers of {model} on {dataset} with the highest confidence ({wrong[0].record.method})."
        if exhibits:
            yield sheets.contact_sheet(exhibits, f"errors-sheet-{slug}", title, about)
        else:
            yield title, "the images are no files that are still there"


def _heat_map(run: Run, model: str, methods: tuple[str, ...]) -> Iterator[Made]:
    records = [r for r in run.records if r.model == model and r.metric == "auroc" and _fits(r.method, methods)]
    if not any(r.value is not None for r in records):
        yield f"heat map of {model}", "no detector has an AUROC"
        return
    (table,) = tables(records, what="detectors", options=TableOptions(metrics=("auroc",), group_by="none"))
    yield overview.heat_map(table, f"heat-map-{_slug(run, model)}".rstrip("-"), "auroc")


def _critical_differences(run: Run, model: str, methods: tuple[str, ...]) -> Iterator[Made]:
    import numpy as np

    for task in ("anomaly", "misclassification"):
        records = [
            r for r in run.records if (r.task, r.model, r.metric) == (task, model, "auroc") and _fits(r.method, methods)
        ]
        cells = {(row, column.dataset): m.value for (row, column), m in merge(records).items()}
        datasets = list(dict.fromkeys(dataset for _, dataset in cells))
        rows = [
            row
            for row in dict.fromkeys(row for row, _ in cells)
            if all(cells.get((row, dataset)) is not None for dataset in datasets)
        ]
        if len(datasets) < 3 or len(rows) < 3:
            reason = f"needs 3 sets and 3 complete detectors, has {len(datasets)} and {len(rows)}"
            yield f"critical differences of {task} with {model}", reason
            continue
        values = np.array([[cells[row, dataset] for dataset in datasets] for row in rows], dtype=float)
        name = f"critical-difference-{task}-{_slug(run, model)}"
        yield overview.critical_differences([row.method for row in rows], values, name.rstrip("-"), "auroc")


def _wanted(samples: list[Sample], methods: tuple[str, ...]) -> list[Sample]:
    return [
        s
        for s in samples
        if len(s.negatives) and len(s.positives) and (_fits(s.record.method, methods) or _fits(s.method, methods))
    ]


def _fits(method: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(matches(method, pattern) for pattern in patterns)


def _slug(run: Run, model: str, dataset: str = "") -> str:
    """A file name for a question; the model is in it only where there are several."""
    parts = [dataset, model if len(run.models()) > 1 else ""]
    text = "-".join(part for part in parts if part)
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text).strip("-").lower()
