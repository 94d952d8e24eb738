"""Tables of what the papers of ImageNet-C and ImageNet-P average, from the robustness views of any number of runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ood_toolkit.corruptions import (
    ALEXNET_FLIPS,
    AVERAGED,
    CORRUPTIONS,
    PERTURBATIONS,
    SEVERITIES,
    corruption_error,
    mean_over,
    relative_corruption_error,
)
from ood_toolkit.reporting.captions import deviation, transforms
from ood_toolkit.reporting.grid import Cell, Header, Table
from ood_toolkit.reporting.options import DEFAULTS, TableOptions

_PART = re.compile(r"imagenet-c-(?P<group>\w+)/(?P<corruption>\w+)/(?P<severity>[1-5])")
_OWN = "own"
_CLEAN = "imagenet-1k"
_SHARE = "accuracy"
"""The metric whose digits and percent every number here has."""
_WHY = {
    "cell": "no run has this corruption at this severity",
    "differ": "the runs give different numbers",
    "corruption": "needs all five severities",
    "means": "needs all fifteen corruptions at all five severities",
    "clean": "needs the error on the same runs' images without corruption",
    "perturbation": "no run has this perturbation",
    "all": "needs all ten perturbations",
    "alexnet": "no flip probability of AlexNet is known here",
    "videos": "no video has all its frames",
}

Views = Mapping[str, Any]


def corruption_tables(found: Sequence[Views], *, options: TableOptions = DEFAULTS) -> list[Table]:
    """Corruption errors model by model, then over models, then flip probabilities; [] where there is none of it.

    A number that is missing stays missing, with the reason in a footnote, and so do the means over it.

    Args:
        found: robustness views of runs, which together may have all corruptions.
        options: of which `models`, `precision`, `scale` and `label` count here; with `datasets` there is no such table.
    """
    if options.datasets:
        return []
    made: list[Table] = []
    for own in (False, True):
        models = _errors(found, own, options)
        made += [_by_severity(model, errors, own, found, options) for model, errors in models.items()]
        made += [_over_models(models, own, found, options)] if len(models) > 1 else []
    steady = _steadiness(found, options)
    return made + ([_flips(steady, found, options)] if steady else [])


@dataclass
class _Errors:
    """Top-1 errors of one model, each as often as runs have it."""

    at: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    clean: list[float] = field(default_factory=list)
    images: set[int] = field(default_factory=set)
    clean_images: set[int] = field(default_factory=set)

    def error(self, corruption: str, severity: int) -> float | None:
        return _agreed(self.at.get((corruption, severity), []))

    def five(self, corruption: str) -> list[float]:
        """The errors at all severities, or [] where one is missing."""
        known = [error for error in (self.error(corruption, s) for s in SEVERITIES) if error is not None]
        return known if len(known) == len(SEVERITIES) else []

    def mean(self, corruption: str) -> float | None:
        five = self.five(corruption)
        return fmean(five) if five else None

    def relative_to_alexnet(self, corruption: str) -> float | None:
        five = self.five(corruption)
        return corruption_error(corruption, five) if five else None

    def relative(self, corruption: str) -> float | None:
        five, clean = self.five(corruption), _agreed(self.clean)
        return relative_corruption_error(corruption, five, clean) if five and clean is not None else None

    def means(self) -> tuple[float | None, float | None, float | None]:
        """Of the fifteen: mean error, mCE and relative mCE."""
        kinds = (self.mean, self.relative_to_alexnet, self.relative)
        mean, ce, relative = (mean_over(AVERAGED, {name: kind(name) for name in AVERAGED}) for kind in kinds)
        return mean, ce, relative


class _Notes:
    """Footnotes, each text once, marked a, b, c, … in order of appearance."""

    def __init__(self) -> None:
        self.marks: dict[str, str] = {}

    def cell(self, value: float | None, why: str, options: TableOptions) -> Cell:
        if value is not None:
            return Cell(text=options.number(value, _SHARE), value=value)
        mark = self.marks.setdefault(_WHY[why], chr(ord("a") + len(self.marks)))
        return Cell(marks=(mark,))

    @property
    def listed(self) -> tuple[tuple[str, str], ...]:
        return tuple((mark, text) for text, mark in self.marks.items())


def _agreed(values: Sequence[float]) -> float | None:
    """The number that all runs give, or None."""
    return values[0] if len(set(values)) == 1 else None


def _errors(found: Sequence[Views], own: bool, options: TableOptions) -> dict[str, _Errors]:
    """By model, of the published files or of one's own; models without a corrupted set are left out."""
    models: dict[str, _Errors] = {}
    for views in found:
        rows = [row for row in views.get("accuracy", ()) if not row["mask"] and _chosen(row["model"], options)]
        rows = [row for row in rows if row["top1"]["value"] is not None]
        corrupted = set()
        for row in rows:
            part = _PART.fullmatch(row["dataset"])
            if part is not None and (part["group"] == _OWN) == own:
                corrupted.add(row["model"])
                place = part["corruption"], int(part["severity"])
                errors = models.setdefault(row["model"], _Errors())
                errors.at.setdefault(place, []).append(1 - row["top1"]["value"])
                errors.images.add(row["images"])
        for row in rows:
            if row["dataset"] == _CLEAN and row["model"] in corrupted:
                models[row["model"]].clean.append(1 - row["top1"]["value"])
                models[row["model"]].clean_images.add(row["images"])
    return models


def _by_severity(model: str, errors: _Errors, own: bool, found: Sequence[Views], options: TableOptions) -> Table:
    notes = _Notes()
    headers, cells = [], []
    for group, names in CORRUPTIONS.items():
        for name in names:
            if group == "extra" and not any(place[0] == name for place in errors.at):
                continue
            headers.append(Header(label=name, group=group if group != "extra" else "extra, in no mean"))
            severities = [
                notes.cell(errors.error(name, s), "differ" if (name, s) in errors.at else "cell", options)
                for s in SEVERITIES
            ]
            relative = "corruption" if not errors.five(name) else "clean"
            last = [(errors.mean(name), "corruption"), (errors.relative_to_alexnet(name), "corruption")]
            last.append((errors.relative(name), relative))
            cells.append((*severities, *(notes.cell(value, why, options) for value, why in last)))
    mean, ce, relative = errors.means()
    headers += [Header(label="clean", group="Means"), Header(label="of the fifteen", group="Means")]
    blank = tuple(Cell(text="") for _ in SEVERITIES)
    clean = notes.cell(_agreed(errors.clean), "clean" if not errors.clean else "differ", options)
    cells.append((*blank, clean, Cell(text=""), Cell(text="")))
    of_all = ((mean, "means"), (ce, "means"), (relative, "means" if mean is None else "clean"))
    cells.append((*blank, *(notes.cell(value, why, options) for value, why in of_all)))
    return Table(
        name="corruptions",
        title=f"{_named(own)}, {model}",
        stub="Corruption",
        rows=tuple(headers),
        columns=(
            *(Header(label=str(s), group="Error at severity", arrow="↓") for s in SEVERITIES),
            Header(label="mean", group="Error at severity", arrow="↓", about="Mean top-1 error over the severities."),
            *_RELATIVE,
        ),
        cells=tuple(cells),
        caption=_caption(own, found, {model: errors}),
        conventions=_CONVENTIONS,
        notes=notes.listed,
        label=f"{options.label}:corruptions:{model}",
    )


def _over_models(models: Mapping[str, _Errors], own: bool, found: Sequence[Views], options: TableOptions) -> Table:
    """The paper's table: a row for every model."""
    notes = _Notes()
    cells = []
    for errors in models.values():
        mean, ce, relative = errors.means()
        of_all = ((_agreed(errors.clean), "clean" if not errors.clean else "differ"), (mean, "means"), (ce, "means"))
        of_each = ((errors.relative_to_alexnet(name), "corruption") for name in AVERAGED)
        values = (*of_all, (relative, "means" if mean is None else "clean"), *of_each)
        cells.append(tuple(notes.cell(value, why, options) for value, why in values))
    groups = {name: group for group, names in CORRUPTIONS.items() for name in names}
    return Table(
        name="corruption-errors",
        title=f"{_named(own)}, all models",
        stub="Model",
        rows=tuple(Header(label=model) for model in models),
        columns=(
            Header(label="clean", group="Error", arrow="↓"),
            Header(label="mean", group="Error", arrow="↓"),
            Header(label="mCE", group="Means of the fifteen", arrow="↓"),
            Header(label="relative mCE", group="Means of the fifteen", arrow="↓"),
            *(Header(label=_short(name), group=f"CE, {groups[name]}", arrow="↓", about=name) for name in AVERAGED),
        ),
        cells=tuple(cells),
        caption=_caption(own, found, models),
        conventions=_CONVENTIONS,
        notes=notes.listed,
        label=f"{options.label}:corruption-errors",
    )


def _short(corruption: str) -> str:
    """As the paper's table heads its columns: "gaussian" under noise."""
    return corruption.partition("_")[0]


_RELATIVE = (
    Header(label="CE", group="Relative to AlexNet", arrow="↓", about="Sum of errors over AlexNet's sum."),
    Header(
        label="relative CE",
        group="Relative to AlexNet",
        arrow="↓",
        about="The same of what corruption adds to the clean error.",
    ),
)
_CONVENTIONS = (
    "CE: the sum of top-1 errors over the five severities, over AlexNet's (Hendrycks & Dietterich 2019); its mean of "
    "the fifteen is mCE, the mean error is not normalised",
    "Relative CE: likewise of each error less the clean one; both are 1 for AlexNet",
)


def _span(counts: set[int]) -> str:
    """One number, or from the least to the most."""
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


def _named(own: bool) -> str:
    return "Corruption errors, corruptions made here" if own else "Corruption errors on ImageNet-C"


def _caption(own: bool, found: Sequence[Views], models: Mapping[str, _Errors]) -> tuple[str, ...]:
    sizes = _span({count for errors in models.values() for count in errors.images})
    clean = {count for errors in models.values() for count in errors.clean_images}
    known = {model: text for views in found for model, text in views.get("transforms", {}).items()}
    foreign = (
        "The recipe is ImageNet-C's, the pixels are not those of its files, on which AlexNet was measured: not "
        "comparable with published numbers"
    )
    parts = [
        f"{_named(own)}: {sizes} images at each severity" + (f", {_span(clean)} clean ones" if clean else ""),
        foreign if own else "",
        deviation([str(views.get("protocol", "")) for views in found]),
        transforms((model, known.get(model, "")) for model in models),
    ]
    return tuple(part for part in parts if part)


def _steadiness(found: Sequence[Views], options: TableOptions) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """By model and perturbation, what runs have of it."""
    models: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for views in found:
        for row in views.get("perturbations", ()):
            if _chosen(row["model"], options) and not row["mask"]:
                models.setdefault(row["model"], {}).setdefault(row["perturbation"], []).append(row)
    return models


def _flips(
    models: Mapping[str, Mapping[str, list[Mapping[str, Any]]]], found: Sequence[Views], options: TableOptions
) -> Table:
    notes = _Notes()
    extra = [name for rows in models.values() for name in rows if name not in PERTURBATIONS]
    names = [*PERTURBATIONS, *dict.fromkeys(extra)]
    several = len(models) > 1
    rows, cells = [], []
    for model, of in models.items():
        known = {name: _flip(of.get(name, [])) for name in names}
        columns = (
            {name: flip for name, (flip, _) in known.items()},
            {name: _rate(name, flip) for name, (flip, _) in known.items()},
            {name: distance for name, (_, distance) in known.items()},
        )
        for name in names:
            group = model if several else "" if name in PERTURBATIONS else "validation, in no mean"
            aside = several and name not in PERTURBATIONS
            rows.append(Header(label=f"{name} (in no mean)" if aside else name, group=group))
            lacks = _lacks(of.get(name, []))
            whys = (lacks, _lacks(of.get(name, []), name), lacks)
            cells.append(tuple(notes.cell(by[name], why, options) for by, why in zip(columns, whys, strict=True)))
        rows.append(Header(label="of the ten", group=model if several else "Means"))
        cells.append(tuple(notes.cell(mean_over(PERTURBATIONS, values), "all", options) for values in columns))
    return Table(
        name="perturbations",
        title="Flips on ImageNet-P" + ("" if several else f", {next(iter(models))}"),
        stub="Perturbation",
        rows=tuple(rows),
        columns=tuple(Header(label=label, arrow="↓", about=about) for label, about in _MEASURES.items()),
        cells=tuple(cells),
        caption=_perturbation_caption(models, found),
        conventions=(
            "FP: share of comparisons in which the prediction is another, with the frame before, of noise with the "
            "first frame; every video counts alike",
            "FR: FP over AlexNet's (Hendrycks & Dietterich 2019); its mean over the ten is mFR",
            "T5D: top-5 distance, not normalised: no file with AlexNet's is known",
        ),
        notes=notes.listed,
        label=f"{options.label}:perturbations",
    )


_MEASURES = {
    "FP": "Flip probability.",
    "FR": "Flip rate: the flip probability over AlexNet's.",
    "T5D": "How far the five most likely classes move, 0 to 15.",
}


def _flip(rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    known = [row for row in rows if "flip" in row]
    flip = _agreed([row["flip"]["value"] for row in known])
    return flip, _agreed([row["top5_distance"]["value"] for row in known])


def _rate(name: str, flip: float | None) -> float | None:
    return flip / ALEXNET_FLIPS[name] if flip is not None and name in ALEXNET_FLIPS else None


def _lacks(rows: Sequence[Mapping[str, Any]], rate_of: str = "") -> str:
    if not rows:
        return "perturbation"
    if not any("flip" in row for row in rows):
        return "videos"
    return "alexnet" if rate_of and rate_of not in ALEXNET_FLIPS else "differ"


def _perturbation_caption(models: Mapping[str, Mapping[str, Any]], found: Sequence[Views]) -> tuple[str, ...]:
    rows = [row for by_name in models.values() for many in by_name.values() for row in many]
    span = _span({row["videos"] for row in rows})
    torn = max(row["left_out"] for row in rows)
    known = {model: text for views in found for model, text in views.get("transforms", {}).items()}
    parts = [
        f"Flips on ImageNet-P: {span} videos of each perturbation",
        f"Up to {torn:,} videos that lack a frame are left out" if torn else "",
        deviation([str(views.get("protocol", "")) for views in found]),
        transforms((model, known.get(model, "")) for model in models),
    ]
    return tuple(part for part in parts if part)


def _chosen(model: str, options: TableOptions) -> bool:
    return not options.models or not {model, model.rpartition(" by ")[0]}.isdisjoint(options.models)
