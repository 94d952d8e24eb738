"""Tables of the robustness views of a run: accuracy in every view, the drop, wrong answers, and the transfer matrix."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ood_toolkit.reporting.captions import deviation, transforms
from ood_toolkit.reporting.corruptions import corruption_tables
from ood_toolkit.reporting.grid import Cell, Header, Table
from ood_toolkit.reporting.options import DEFAULTS, TableOptions

FILE = "robustness.json"
_SURE = "0.9"
"""The confidence from which on a wrong answer is shown as sure."""

_SHARE = "accuracy"
"""The metric whose digits and percent every number here has."""
_SEVERAL = 6
"""More sets than this are not listed one by one in a caption."""
_MATRICES = 12
"""More sets than this have a matrix each only where they are asked for by name."""

Views = Mapping[str, Any]


def read_views(run: Path) -> Views:
    """The views of a run folder, {} where it has none.

    Raises:
        ValueError: the file is not JSON.
    """
    file = run / FILE
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{str(file)!r} is not JSON ({error})") from error


def robustness_tables(views: Views, *, options: TableOptions = DEFAULTS) -> list[Table]:
    """One table of accuracies, drops and wrong answers, then a transfer matrix for every set, under the mask.

    The matrices without the mask are in the file, as are all of a run on many sets.

    Args:
        views: of one run, from `read_views`.
        options: of which `models`, `datasets`, `precision`, `scale`, `intervals` and `label` count here.
    """
    if not views:
        return []
    chosen = [row for row in views["accuracy"] if _chosen(row, options)]
    made = [_accuracies(views, chosen, options)] if chosen else []
    several = len(_masks(views)) > 1
    return made + [_transfer(views, entry, several, options) for entry in _matrices(views, options)]


def class_accuracies(views: Views, *, options: TableOptions = DEFAULTS) -> list[Table]:
    """For every model and set, one row per class, the least accurate first.

    Args:
        views: of one run, from `read_views`.
        options: see `robustness_tables`.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in views.get("classes", ()):
        if _chosen(row, options):
            groups.setdefault((row["model"], row["dataset"]), []).append(row)
    return [_classes(views, model, dataset, rows, options) for (model, dataset), rows in groups.items()]


def run_tables(
    runs: Sequence[Path], what: str, *, options: TableOptions = DEFAULTS, needed: bool = False
) -> list[Table]:
    """The tables of several run folders, one run after the other, under the runs' names where there are several.

    Args:
        runs: run folders, or files of records, which have none.
        what: "robustness", "classes" or "corruptions"; the last is of all runs together, and part of the first.
        options: see `robustness_tables`.
        needed: raise where there is nothing to show.

    Raises:
        ValueError: nothing is left to show, and it is needed.
    """
    of_runs = {run: read_views(run) for run in runs}
    make = {"robustness": robustness_tables, "classes": class_accuracies}.get(what)
    found = [
        replace(table, title=f"{table.title} ({run.resolve().name})") if len(runs) > 1 else table
        for run, views in of_runs.items()
        for table in (make(views, options=options) if make else [])
    ]
    if what != "classes":
        found += corruption_tables(list(of_runs.values()), options=options)
    if needed and not found:
        names = ", ".join(map(str, runs))
        sought = "no set of ImageNet-C or -P" if what == "corruptions" else "nothing"
        raise ValueError(f"there is no table of {what}: {names} has no {FILE}, or {sought} in it was chosen")
    return found


def human_line(views: Views) -> str:
    """The human landmark in one sentence, or ""."""
    human = views.get("human")
    if not human:
        return ""
    return f"On {human['dataset']} {human['about']}; source: {human['source']}"


def _accuracies(views: Views, rows: Sequence[Mapping[str, Any]], options: TableOptions) -> Table:
    masks = _masks(views)
    places = list(dict.fromkeys((row["model"], row["dataset"]) for row in rows))
    several = len({model for model, _ in places}) > 1
    headers = [Header(label=dataset, group=model if several else "") for model, dataset in places]
    cells = [_line(views, model, dataset, options) for model, dataset in places]
    notes = {"a": f"of its images that are not {_clean(views)}'s"} if any(c.marks for row in cells for c in row) else {}
    human = views["human"]
    if human and any(dataset == human["dataset"] for _, dataset in places):
        mark = "b" if notes else "a"
        notes[mark] = human_line(views)
        headers.append(Header(label=f"{human['dataset']}: humans", group="Reference" if several else "", marks=(mark,)))
        known = Cell(text=f"≈ {options.number(human['accuracy'], _SHARE)}", value=human["accuracy"])
        cells.append((known, *(Cell() for _ in cells[0][1:])))
    counts = {row["dataset"]: row["images"] for row in rows if row["mask"] == masks[0]}
    return Table(
        name="robustness",
        title="Robustness",
        stub="Set",
        rows=tuple(headers),
        columns=_columns(views),
        cells=tuple(cells),
        caption=(
            f"Robustness{_setting(views)}: {_sizes(counts)}",
            *_matrices_left_out(views, options),
            *(() if several else (f"Model {places[0][0]}",)),
            *_standing(views, [model for model, _ in places]),
        ),
        conventions=_conventions(views, options),
        notes=tuple(notes.items()),
        label=f"{options.label}:robustness",
        intervals=options.intervals != "none",
    )


def _sizes(counts: Mapping[str, int]) -> str:
    """Images of each set; of many sets, alike ones together."""
    if len(counts) <= _SEVERAL:
        return ", ".join(f"{count:,} images of {name}" for name, count in counts.items())
    alike: dict[int, list[str]] = {}
    for name, count in counts.items():
        alike.setdefault(count, []).append(name)
    return ", ".join(
        f"{count:,} images of {names[0]}"
        if len(names) == 1
        else f"{count:,} images of each of {len(names)} sets from {names[0]} to {names[-1]}"
        for count, names in alike.items()
    )


def _matrices_left_out(views: Views, options: TableOptions) -> list[str]:
    """A sentence where there are too many matrices to show."""
    if _matrices(views, options) or not views["transfer"]:
        return []
    return ["How errors transfer between models is shown of sets that --datasets names, because there are so many"]


def _matrices(views: Views, options: TableOptions) -> list[Mapping[str, Any]]:
    """The matrices under the mask of the sets that were chosen, or of all where they are not too many."""
    entries = [entry for entry in views["transfer"] if entry["mask"] == _masks(views)[0]]
    if options.datasets:
        return [entry for entry in entries if entry["dataset"] in options.datasets]
    return entries if len(entries) <= _MATRICES else []


def _line(views: Views, model: str, dataset: str, options: TableOptions) -> tuple[Cell, ...]:
    """Accuracies in every view; drop and wrong answers in the first."""
    masks = _masks(views)
    of_model = {(row["dataset"], row["mask"]): row for row in views["accuracy"] if row["model"] == model}
    drops = {
        row["adversarial"]: row["drop"] for row in views["drop"] if (row["model"], row["mask"]) == (model, masks[0])
    }
    (wrong,) = [
        row
        for row in views["wrong_confidence"]
        if (row["model"], row["dataset"], row["mask"]) == (model, dataset, masks[0])
    ]
    rest = f"{dataset} without {_clean(views)}"
    drop = _cell(drops.get(dataset) or drops.get(rest), options)
    return (
        *(_cell(of_model[dataset, mask][key], options) for mask in masks for key in ("top1", "top5")),
        *([replace(drop, marks=("a",)) if rest in drops else drop] if views["drop"] else []),
        _cell(wrong.get("mean"), options),
        _cell(wrong.get("at_least", {}).get(_SURE), options),
    )


def _columns(views: Views) -> tuple[Header, ...]:
    masks = _masks(views)
    several = len(masks) > 1
    named = f", {_view(masks[0], True)}" if several else ""
    accuracies = [
        Header(label=label, group=_view(mask, several), arrow="↑", about=_ABOUT[label])
        for mask in masks
        for label in ("Acc@1", "Acc@5")
    ]
    lost = Header(label="drop", group=f"Loss from {_clean(views)}{named}", arrow="↓", about=_ABOUT["drop"])
    return (
        *accuracies,
        *([lost] if views["drop"] else []),
        Header(label="mean", group=f"Confidence when wrong{named}", arrow="↓", about=_ABOUT["mean"]),
        Header(label=f"≥ {_SURE}", group=f"Confidence when wrong{named}", arrow="↓", about=_ABOUT["sure"]),
    )


def _transfer(views: Views, entry: Mapping[str, Any], several_views: bool, options: TableOptions) -> Table:
    kept = [i for i, model in enumerate(entry["models"]) if not options.models or model in options.models]
    view = f", {_view(entry['mask'], True)}" if several_views else ""
    rows = [Header(label=f"{entry['models'][a]} ({entry['wrong'][a]} wrong)") for a in kept]
    cells = [tuple(_cell(entry["shares"][a][b], options) for b in kept) for a in kept]
    rows.append(Header(label=f"all {entry['images']} images"))
    cells.append(tuple(_cell(entry["error_rates"][b], options) for b in kept))
    return Table(
        name="transfer",
        title=f"Transfer of errors on {entry['dataset']}{view}",
        stub="Of the images that this model gets wrong",
        rows=tuple(rows),
        columns=tuple(Header(label=entry["models"][b], group="the share that this one gets wrong") for b in kept),
        cells=tuple(cells),
        caption=(
            f"Transfer of errors on {entry['dataset']}{view}{_setting(views)}: of the images that the row's model gets "
            "wrong, the share that the column's model gets wrong",
            "The last row is the share over all images, which independent errors would give",
            *_standing(views, [entry["models"][i] for i in kept]),
        ),
        label=f"{options.label}:transfer:{entry['dataset']}:{entry['mask']}",
        intervals=options.intervals != "none",
    )


def _classes(views: Views, model: str, dataset: str, rows: Sequence[Mapping[str, Any]], options: TableOptions) -> Table:
    ordered = sorted(rows, key=lambda row: (row["top1"]["value"], -row["images"], row["class"]))
    cells = tuple(
        (
            Cell(text=str(row["images"]), value=row["images"]),
            _cell(row["top1"], options),
            _cell(row["top5"], options),
            Cell(text=options.number(row["confidence"], _SHARE), value=row["confidence"]),
        )
        for row in ordered
    )
    return Table(
        name="classes",
        title=f"Classes of {dataset}, {model}",
        stub="Class",
        rows=tuple(Header(label=_class_name(row)) for row in ordered),
        columns=(
            Header(label="images"),
            Header(label="Acc@1", arrow="↑", about=_ABOUT["Acc@1"]),
            Header(label="Acc@5", arrow="↑", about=_ABOUT["Acc@5"]),
            Header(label="confidence", about="Mean confidence of the plain softmax."),
        ),
        cells=cells,
        caption=(
            f"Classes of {dataset} with {model}{_setting(views)}, the least accurate first",
            *_standing(views, [model]),
        ),
        label=f"{options.label}:classes:{dataset}:{model}",
        intervals=options.intervals != "none",
    )


_ABOUT = {
    "Acc@1": "Share of right predictions.",
    "Acc@5": "Share of images whose class is among the five most likely.",
    "drop": "Clean minus this set's Acc@1; smaller is better at the same clean accuracy.",
    "mean": "Mean probability that the model gives its wrong answers.",
    "sure": f"Of the wrong answers, the share with a probability of at least {_SURE}.",
}


def _conventions(views: Views, options: TableOptions) -> tuple[str, ...]:
    parts = ["Drop: clean less this set's Acc@1"] if views["drop"] else []
    pooled = ", of an ensemble that of its pool" if any(" by " in row["model"] for row in views["accuracy"]) else ""
    parts.append(f"Confidence when wrong: of the plain softmax{pooled}")
    if options.intervals != "none" and views["level"]:
        parts.append(
            f"Intervals: {views['level']:.0%}, of shares by Wilson's score, of drops by Newcombe's, of means normal"
        )
    if options.scale == "percent":
        parts.append("Values in percent")
    return tuple(parts)


def _setting(views: Views) -> str:
    """Suite and protocol, to go on a caption's first words; "" for files of before these were written."""
    return f", suite {views['suite']}, protocol {views['protocol']}" if "suite" in views else ""


def _standing(views: Views, models: Sequence[str]) -> list[str]:
    """What lets a caption stand alone: deviation from the protocol, transforms, and what is not counted."""
    known = views.get("transforms", {})
    without = "; ".join(views.get("without", ()))
    parts = [
        deviation([views.get("protocol", "")]),
        transforms((model, known.get(model, "")) for model in dict.fromkeys(models)),
        f"Not counted here: {without}" if without else "",
    ]
    return [part for part in parts if part]


def _cell(number: Mapping[str, Any] | None, options: TableOptions) -> Cell:
    if number is None or number["value"] is None:
        return Cell()
    value, low, high = number["value"], number["low"], number["high"]
    text, bounds = options.number(value, _SHARE), ("", "")
    if options.intervals != "none" and low is not None:
        bounds = (options.number(low, _SHARE), options.number(high, _SHARE))
        half = options.number((high - low) / 2, _SHARE)
        text += f" ± {half}" if options.intervals == "plusminus" else f" [{bounds[0]}, {bounds[1]}]"
    return Cell(text=text, value=value, bounds=bounds if options.intervals == "brackets" else ("", ""))


def _chosen(row: Mapping[str, Any], options: TableOptions) -> bool:
    """An ensemble is chosen by its name in records too, without the way in which it is pooled."""
    known = {row["model"], row["model"].rpartition(" by ")[0]}
    return (not options.models or not known.isdisjoint(options.models)) and (
        not options.datasets or row["dataset"] in options.datasets
    )


def _masks(views: Views) -> list[str]:
    return list(dict.fromkeys(row["mask"] for row in views["accuracy"]))


def _clean(views: Views) -> str:
    return views["drop"][0]["clean"] if views["drop"] else ""


def _view(mask: str, named: bool) -> str:
    """A class mask in words: "imagenet-a:200" is its 200 classes."""
    if not named:
        return "Accuracy"
    return f"{mask.rpartition(':')[2]} classes" if mask else "all classes"


def _class_name(row: Mapping[str, Any]) -> str:
    name = row["name"] or f"class {row['class']}"
    return f"{name} ({row['wnid']})" if row["wnid"] else name
