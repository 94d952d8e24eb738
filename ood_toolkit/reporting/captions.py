"""What a caption must say so that a table cannot be misread: suite, sets, sizes, settings and conventions."""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

from ood_toolkit.records import METRICS, Record

T = TypeVar("T")
_SUITES = {
    "digits": (
        "A demonstration on scikit-learn's handwritten digits with a small network trained on the spot; "
        "its numbers say nothing about ImageNet models"
    ),
}
_POOL = "ensemble["
"""How the names of ensembles begin: `ensemble[first, second]`."""
_SEVERAL = 6
"""More sets than this have their sizes in one sentence, from the least to the most."""
_BASE_RATES = {"aupr": "OOD", "aupr_error": "wrong"}


def caption(records: Sequence[Record], title: str, *, metrics: Sequence[str]) -> tuple[str, ...]:
    """What was measured on what, in sentences without full stops.

    Args:
        records: every record of the table.
        title: the first sentence's head, e.g. "Detectors".
        metrics: keys of the metrics shown.
    """
    parts = [
        _opening(records, title),
        deviation(r.protocol for r in records),
        _SUITES.get(records[0].suite, ""),
        *_sizes(records, metrics),
        *_fits(records),
        transforms((r.model, r.transform) for r in records),
        *_texts(records),
        _masks(records),
    ]
    return tuple(part for part in parts if part)


def conventions(records: Sequence[Record], *, metrics: Sequence[str], intervals: bool) -> tuple[str, ...]:
    """What the numbers mean: positive classes, orientations, bins, intervals.

    Args:
        records: every record of the table.
        metrics: keys of the metrics shown.
        intervals: whether intervals are printed.
    """
    direction = "Scores are high where the input is out-of-distribution or the prediction likely wrong"
    parts = [
        direction if any(r.task != "calibration" for r in records) else "",
        *(METRICS[key].label + ": " + METRICS[key].about.rstrip(".") for key in metrics if key in METRICS),
        _intervals(records) if intervals else "",
    ]
    return tuple(part for part in parts if part)


def _opening(records: Sequence[Record], title: str) -> str:
    names = _models(_distinct(r.model for r in records))
    protocols = " and ".join(_distinct(r.protocol for r in records))
    seeds = sorted({r.seed for r in records})
    over = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean over {len(seeds)} seeds {_listed(map(str, seeds))}"
    return f"{title} on suite {records[0].suite}, protocol {protocols}, {names}, {over}"


def _models(names: Sequence[str]) -> str:
    """Which models, or how many; an ensemble is none of them, and is named by its members."""
    pools = [name.removeprefix(_POOL).removesuffix("]") for name in names if name.startswith(_POOL)]
    single = [name for name in names if not name.startswith(_POOL)]
    words = [f"model {single[0]}" if len(single) == 1 else f"{len(single)} models"] if single else []
    words += [f"the ensemble of {pools[0]}" if len(pools) == 1 else f"{len(pools)} ensembles"] if pools else []
    return " and ".join(words)


def deviation(protocols: Iterable[str]) -> str:
    """Where a protocol's name ends in what suites add to it: that the numbers are not those of the published one."""
    differ = _distinct(name for name in protocols if name.endswith(("-like", "-standin")))
    where = "the caption in run.json, which the report shows, names what differs"
    return f"Not the published protocol ({_listed(differ)}): {where}" if differ else ""


def _sizes(records: Sequence[Record], metrics: Sequence[str]) -> list[str]:
    order = {"misclassification": 0, "anomaly": 1, "calibration": 2}
    by_task: dict[str, dict[str, list[Record]]] = {task: {} for task in order}
    for r in records:
        if r.value is not None:
            by_task[r.task].setdefault(r.dataset, []).append(r)
    sentences = []
    for task, by_set in by_task.items():
        names = list(by_set)
        if len(names) > _SEVERAL:
            together = [r for measured in by_set.values() for r in measured]
            sentences.append(_size(task, f"{len(names)} sets from {names[0]} to {names[-1]}", together, metrics))
        else:
            sentences += [_size(task, name, measured, metrics) for name, measured in by_set.items()]
    return sentences


def _size(task: str, where: str, measured: Sequence[Record], metrics: Sequence[str]) -> str:
    if task == "calibration":
        return f"Calibration on {where}: {_span(r.positives + r.negatives for r in measured)} rows"
    positive, negative = _span(r.positives for r in measured), _span(r.negatives for r in measured)
    words = ("OOD", "ID") if task == "anomaly" else ("wrong", "right")
    shown = {r.metric for r in measured} & set(metrics) & set(_BASE_RATES)
    chance = f" (AUPR by chance: {_base_rate(measured)})" if shown else ""
    return f"{task.capitalize()} detection on {where}: {positive} {words[0]} against {negative} {words[1]} rows{chance}"


def _base_rate(records: Sequence[Record]) -> str:
    rates = {f"{r.positives / (r.positives + r.negatives):.3f}" for r in records if r.positives + r.negatives}
    return " to ".join(sorted({min(rates), max(rates)})) if rates else "unknown"


def _fits(records: Sequence[Record]) -> list[str]:
    detecting = [r for r in records if r.task != "calibration"]
    calibrated = [r for r in records if r.calibrator or (r.task == "calibration" and r.method != "none")]
    return [
        _settings(detecting, "fit_set", "Detectors that learn were fitted on"),
        _settings(calibrated, "calibration_set", "Calibrators were fitted on"),
    ]


def _settings(records: Sequence[Record], name: str, words: str) -> str:
    sets = _distinct(getattr(r, name) for r in records if getattr(r, name))
    return f"{words} {_listed(sets)}" if sets else ""


def transforms(of_models: Iterable[tuple[str, str]]) -> str:
    """How images were brought to the models, from (model, transform in words); "" where no transform is known.

    An ensemble has the transforms of its members, which are named once.
    """
    pairs = _distinct(pair for pair in of_models if pair[1])
    single = [pair for pair in pairs if not pair[0].startswith(_POOL)]
    pools = [text for model, text in pairs if model.startswith(_POOL)]
    known = _distinct(text for _, text in single)
    foreign = _distinct(each for text in pools for each in text.split("; ") if each not in known)
    parts = []
    if len(known) == 1:
        parts.append(f"Transform: {known[0]}")
    elif known:
        parts.append("Each model has its own transform: " + "; ".join(f"{model}: {text}" for model, text in single))
    if foreign:
        whose = "Transforms of the ensemble's other members" if known else "Transforms of the ensemble's members"
        parts.append(f"{whose if known or len(foreign) > 1 else 'Transform'}: {'; '.join(foreign)}")
    return ". ".join(parts)


def _texts(records: Sequence[Record]) -> list[str]:
    """What zero-shot models were told: once for each model, and what concerns single methods beside their names."""
    sentences = []
    for model in _distinct(r.model for r in records if r.texts):
        pairs = _distinct((r.method, r.texts) for r in records if r.model == model and r.texts)
        own = [text for _, text in pairs if not text.startswith("second opinion")]
        common = _common(own)
        sentences += [f"{model} is {common}"] if common else []
        rest = [(method, text.removeprefix(common).removeprefix("; ")) for method, text in pairs]
        sentences += [f"{method}: {text}" for method, text in rest if text]
    return sentences


def _common(texts: Sequence[str]) -> str:
    """The clauses that all of them begin with."""
    columns = zip(*(text.split("; ") for text in texts), strict=False)
    return "; ".join(clauses[0] for clauses in takewhile(lambda clauses: len(set(clauses)) == 1, columns))


def _masks(records: Sequence[Record]) -> str:
    masks = _distinct((r.dataset, r.mask) for r in records if r.mask)
    if len({mask for _, mask in masks}) == 1 and {r.mask for r in records} == {masks[0][1]}:
        return f"Classes were masked before the softmax: {masks[0][1]}"
    return "Classes were masked before the softmax: " + _listed(f"{d} by {m}" for d, m in masks) if masks else ""


def _intervals(records: Sequence[Record]) -> str:
    levels = _distinct(f"{r.level:.0%}" for r in records if r.level is not None)
    one = f"{_listed(levels)} bootstrap intervals over rows" if levels else ""
    many = "± sample standard deviation over seeds" if len({r.seed for r in records}) > 1 else ""
    return "; ".join(part for part in (one, many) if part)


def _distinct(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))


def _span(values: Iterable[int]) -> str:
    numbers = set(values)
    return f"{min(numbers)}" if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"


def _listed(values: Iterable[str]) -> str:
    items = list(values)
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
