"""The per-class view: how often each class is right, how sure the model is, and which classes swallow OOD images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ood_toolkit.reporting.grid import Cell, Header, Table
from ood_toolkit.reporting.runs import Confidences, Run
from ood_toolkit.scorefile import Column

if TYPE_CHECKING:
    from numpy import ndarray


def class_table(run: Run, model: str, dataset: str, *, names: Sequence[str] = ()) -> Table | None:
    """One row per class, the least accurate first; None where the run folder does not say which class an image has.

    Args:
        run: with confidences.
        model: model spec.
        dataset: of the calibration records.
        names: class names by index, for labels that are numbers.
    """
    import numpy as np

    found = run.confidences(model, dataset)
    if not found:
        return None
    labels = _labels(run, found[0], names)
    if labels is None:
        return None
    swallowed = _swallowed(run, model, found[0].record.mask, names)
    rows = []
    for name in dict.fromkeys(labels):
        of_class = np.array([label == name for label in labels])
        accuracy = float(found[0].correct[of_class].mean())
        confidence = float(found[0].confidence[of_class].mean())
        rows.append((name, int(of_class.sum()), accuracy, confidence))
    rows.sort(key=lambda row: (row[2], -row[1], row[0]))
    columns = [
        Header(label="images"),
        Header(label="Acc@1", arrow="↑"),
        Header(label="confidence", about="Mean confidence of the plain softmax."),
        Header(label="overconfidence", about="Confidence minus accuracy."),
        *(Header(label=f"called so in {part}", arrow="↓") for part in swallowed),
    ]
    cells = [
        (
            Cell(text=str(count), value=count),
            Cell(text=f"{accuracy:.3f}", value=accuracy),
            Cell(text=f"{confidence:.3f}", value=confidence),
            Cell(text=f"{confidence - accuracy:+.3f}", value=confidence - accuracy),
            *(Cell(text=str(calls.get(name, 0)), value=calls.get(name, 0)) for calls in swallowed.values()),
        )
        for name, count, accuracy, confidence in rows
    ]
    return Table(
        name="classes",
        title=f"Classes of {dataset}, {model}",
        stub="Class",
        rows=tuple(Header(label=name) for name, *_ in rows),
        columns=tuple(columns),
        cells=tuple(cells),
        caption=(f"Classes of {dataset} with {model}, the least accurate first",),
        label=f"classes:{dataset}:{model}",
    )


def _labels(run: Run, found: Confidences, names: Sequence[str]) -> list[str] | None:
    """The class of every image: from the run's labels, else the folder its identifier names."""
    for mask in (found.record.mask, ""):
        values = run.scores.columns.get(Column("label", "", "", found.part, mask))
        if values is not None:
            kept = _names_under(run, mask, names)
            return [_name(int(label), kept) for label in values.tolist()]
    folders = [identifier.rpartition("/")[0] for identifier in run.scores.ids[found.part]]
    return folders if all(folders) and len(set(folders)) > 1 else None


def _swallowed(run: Run, model: str, mask: str, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """How many images of every OOD part the model calls by each class."""
    parts = [dataset for of, dataset in run.questions("anomaly") if of == model]
    calls: dict[str, dict[str, int]] = {}
    for part in parts:
        values = run.scores.columns.get(Column("prediction", model, "", part, mask))
        if values is None:
            continue
        calls[part] = {}
        kept = _names_under(run, mask, names)
        for label in values.tolist():
            name = _name(int(label), kept)
            calls[part][name] = calls[part].get(name, 0) + 1
    return calls


def _names_under(run: Run, mask: str, names: Sequence[str]) -> Sequence[str]:
    """The names of the classes that a mask keeps, in its order: labels and predictions under it count from 0."""
    if not mask:
        return names
    kept = run.facts.get("masks", {}).get(mask, ())
    return [names[int(index)] for index in kept if index < len(names)]


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if 0 <= label < len(names) else f"class {label}" if label >= 0 else "unknown"


def hardest(confidence: "ndarray", correct: "ndarray", count: int) -> list[int]:
    """Row numbers of the `count` wrong answers with the highest confidence, surest first."""
    import numpy as np

    wrong = np.flatnonzero(~correct)
    return wrong[np.argsort(-confidence[wrong], kind="stable")][:count].tolist()
