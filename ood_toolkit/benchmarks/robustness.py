"""Robustness views of a run: what the ImageNet-A literature asks beside one accuracy.

Everything is counted from the per-image answers in the run's score file, so that anyone can count again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ood_toolkit.benchmarks.masking import masked
from ood_toolkit.benchmarks.suite import ClassMask, Part, Suite, Views
from ood_toolkit.metrics import UndefinedMetricError, drop_interval, share_interval, top_k_correct, wrong_confidence
from ood_toolkit.metrics.bootstrap import Interval
from ood_toolkit.outputs import UNKNOWN, Outputs
from ood_toolkit.registry import build_calibrator
from ood_toolkit.scorefile import Column, ScoreFile

ROBUSTNESS_FILE = "robustness.json"
PLAIN = "none"
"""The calibrator that is the plain softmax: whose answers are counted."""
HUMAN = {
    "dataset": "imagenet-a",
    "accuracy": 0.9,
    "about": "humans are near 90%, a rounded landmark whose sample size is not known, so without an interval",
    "source": "this project's notes on the protocol of Hendrycks et al., Natural Adversarial Examples, CVPR 2021",
}
"""What people reach on ImageNet-A."""
_ROWS_AT_ONCE = 4096
_TOP = 5

_Key = tuple[str, str, str]
"""Model, part, view."""


@dataclass(frozen=True)
class _Answers:
    """What one model answered on the labelled images of one part, in one view.

    Args:
        ids: (N,) image identifiers.
        label: (N,) class index within the view.
        right: (N,) bool, top-1.
        right5: (N,) bool, the label is among the five most likely.
        confidence: (N,) probability of the answer.
    """

    ids: Sequence[str]
    label: Tensor
    right: Tensor
    right5: Tensor
    confidence: Tensor

    def without(self, ids: frozenset[str]) -> "_Answers":
        rows = torch.tensor([row for row, name in enumerate(self.ids) if name not in ids], dtype=torch.int64)
        kept = [self.ids[int(row)] for row in rows]
        return _Answers(kept, self.label[rows], self.right[rows], self.right5[rows], self.confidence[rows])


def keep_answers(scores: ScoreFile, suite: Suite, model: str, parts: Mapping[str, Outputs]) -> None:
    """Adds to the score file what the views count: answers of one model on every labelled part, in every view.

    Args:
        scores: of the run.
        suite: with its views.
        model: model spec.
        parts: outputs by part, of all classes.
    """
    for part in _labelled(suite):
        for mask in _views(suite):
            for column, values in _columns(masked(parts[part.name], mask), model, part.name, _text(mask)).items():
                if column not in scores.columns:
                    scores.add(column, values)


def robustness(
    suite: Suite,
    scores: ScoreFile,
    models: Mapping[str, str],
    *,
    ensembles: Sequence[str] = (),
    level: float | None = 0.95,
) -> dict[str, Any]:
    """The views of a run as plain values, or {} where the suite has none; docs/run-folder.md describes them.

    Args:
        suite: what was run.
        scores: its score file, after `keep_answers` of every model.
        models: transform in words by model spec, in the order of the tables.
        ensembles: names of those that the run has scored; they have records, and no views.
        level: of the intervals, or None for none.
    """
    parts = [part.name for part in _labelled(suite)]
    if not parts:
        return {}
    views = [_text(mask) for mask in _views(suite)]
    answers = {
        (model, part, view): _read(scores, model, part, view) for model in models for part in parts for view in views
    }
    count = _Counting(suite, answers, level)
    places = [(model, part, view) for model in models for part in parts for view in views]
    return {
        "suite": suite.name,
        "protocol": suite.protocol,
        "transforms": dict(models),
        "without": list(ensembles),
        "level": level,
        "human": dict(HUMAN) if HUMAN["dataset"] in parts else None,
        "accuracy": [count.accuracy(*place) for place in places],
        "drop": [drop for model in models for view in views for drop in count.drops(model, view)],
        "wrong_confidence": [count.wrong(*place) for place in places],
        "transfer": [count.transfer(list(models), part, view) for part in parts for view in views if len(models) > 1],
        "classes": [row for model in models for part in parts for row in count.classes(model, part)],
    }


def as_json(views: Mapping[str, Any]) -> str:
    """The views as JSON, one line for each entry of a list."""
    lines = []
    for key, value in views.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


@dataclass(frozen=True)
class _Counting:
    """Counts the views of one run."""

    suite: Suite
    answers: Mapping[_Key, _Answers]
    level: float | None

    def accuracy(self, model: str, part: str, view: str) -> dict[str, Any]:
        """Top-1 and top-5 of one model on one part in one view."""
        found = self.answers[model, part, view]
        place = {"model": model, "dataset": part, "mask": view, "images": len(found.ids)}
        return place | {"top1": self._share(found.right), "top5": self._share(found.right5)}

    def drops(self, model: str, view: str) -> list[dict[str, Any]]:
        """What the model loses from the clean part to every other part; the same images count once."""
        parts = {part.name: part for part in _labelled(self.suite)}
        clean = parts.pop(self.suite.views.clean, None) if self.suite.views else None
        if clean is None:
            return []
        reference = self.answers[model, clean.name, view]
        drops: dict[tuple[str, ...], dict[str, Any]] = {}
        for part in parts.values():
            whole = self.answers[model, part.name, view]
            same_set = part.images.fingerprint == clean.images.fingerprint
            other = whole.without(frozenset(reference.ids)) if same_set else whole
            if reference.ids and other.ids and tuple(other.ids) not in drops:
                name = part.name if len(other.ids) == len(whole.ids) else f"{part.name} without {clean.name}"
                sides = {"model": model, "clean": clean.name, "adversarial": name, "mask": view}
                drops[tuple(other.ids)] = sides | self._drop(reference, other)
        return list(drops.values())

    def wrong(self, model: str, part: str, view: str) -> dict[str, Any]:
        """How sure the model is where it is wrong."""
        found = self.answers[model, part, view]
        place: dict[str, Any] = {"model": model, "dataset": part, "mask": view}
        try:
            about = wrong_confidence(found.confidence, found.right)
        except UndefinedMetricError as error:
            return place | {"wrong": 0, "reason": str(error)}
        of_wrong = found.confidence[~found.right].double()
        return place | {
            "wrong": about.wrong,
            "mean": self._mean(of_wrong),
            "median": about.median,
            "at_least": {str(threshold): self._share(of_wrong >= threshold) for threshold in about.thresholds},
        }

    def transfer(self, models: Sequence[str], part: str, view: str) -> dict[str, Any]:
        """Of the images that each model (row) gets wrong, the share that each (column) gets wrong; paired by image."""
        by_image = []
        for model in models:
            found = self.answers[model, part, view]
            by_image.append(dict(zip(found.ids, found.right.tolist(), strict=True)))
        shared = [image for image in by_image[0] if all(image in right for right in by_image)]
        wrong = [torch.tensor([not right[image] for image in shared], dtype=torch.bool) for right in by_image]
        return {
            "dataset": part,
            "mask": view,
            "images": len(shared),
            "models": list(models),
            "wrong": [int(own.sum()) for own in wrong],
            "shares": [[self._share(other[own]) if own.any() else None for other in wrong] for own in wrong],
            "error_rates": [self._share(own) for own in wrong],
        }

    def classes(self, model: str, part: str) -> list[dict[str, Any]]:
        """Class by class under the mask, in the order of their indices; a class without an image has no row."""
        mask, views = _views(self.suite)[0], self.suite.views or Views()
        found = self.answers[model, part, _text(mask)]
        rows = []
        for label in found.label.unique().tolist():
            own = found.label == label
            index = int(mask.classes[label]) if mask else label
            rows.append(
                {"model": model, "dataset": part, "mask": _text(mask), "class": index}
                | {
                    "name": dict(enumerate(views.names)).get(index, ""),
                    "wnid": dict(enumerate(views.wnids)).get(index, ""),
                }
                | {"images": int(own.sum()), "top1": self._share(found.right[own])}
                | {"top5": self._share(found.right5[own]), "confidence": float(found.confidence[own].double().mean())}
            )
        return rows

    def _drop(self, clean: _Answers, adversarial: _Answers) -> dict[str, Any]:
        level = self.level or 0.95
        sides = [share_interval(int(side.right.sum()), len(side.ids), level=level) for side in (clean, adversarial)]
        drop = drop_interval(*sides)
        return {
            "images": [len(clean.ids), len(adversarial.ids)],
            "clean_top1": self._number(sides[0]),
            "adversarial_top1": self._number(sides[1]),
            "drop": self._number(drop),
            "relative": drop.value / sides[0].value if sides[0].value else None,
        }

    def _share(self, hits: Tensor) -> dict[str, float | None]:
        if not len(hits):
            return {"value": None, "low": None, "high": None}
        return self._number(share_interval(int(hits.sum()), len(hits), level=self.level or 0.95))

    def _mean(self, values: Tensor) -> dict[str, float | None]:
        mean = float(values.mean())
        if len(values) < 2:
            return {"value": mean, "low": None, "high": None}
        z = NormalDist().inv_cdf(0.5 + (self.level or 0.95) / 2)
        half = z * float(values.std()) / len(values) ** 0.5
        return self._number(Interval(mean, max(0.0, mean - half), min(1.0, mean + half)))

    def _number(self, interval: Interval) -> dict[str, float | None]:
        value, low, high = map(float, interval)
        return {"value": value, "low": low, "high": high} if self.level else {"value": value, "low": None, "high": None}


def _columns(view: Outputs, model: str, part: str, mask: str) -> dict[Column, Tensor]:
    """Labels and answers of one part in one view, as the score file has them."""
    known = (view.labels != UNKNOWN).nonzero().flatten()
    log_probabilities = build_calibrator(PLAIN).log_probabilities
    right5 = torch.zeros(len(view), dtype=torch.uint8)
    confidence = torch.zeros(len(view), dtype=torch.float64)
    predicted = torch.zeros(len(view), dtype=torch.int64)
    for rows in torch.arange(len(view)).split(_ROWS_AT_ONCE):
        log_p = log_probabilities(view.rows(slice(int(rows[0]), int(rows[-1]) + 1)).logits).double()
        confidence[rows], predicted[rows] = log_p.max(dim=1)
        own = known[torch.isin(known, rows)]
        if len(own):
            hits = top_k_correct(log_p[own - rows[0]].exp(), view.labels[own], k=_TOP)
            right5[own] = torch.from_numpy(hits).to(torch.uint8)
    return {
        Column("label", "", "", part, mask): view.labels,
        Column("prediction", model, "", part, mask): view.predictions,
        Column("confidence", model, PLAIN, part, mask): confidence.exp(),
        Column("correct", model, PLAIN, part, mask): (predicted == view.labels).to(torch.uint8),
        Column("correct5", model, PLAIN, part, mask): right5,
    }


def _read(scores: ScoreFile, model: str, part: str, view: str) -> _Answers:
    label = scores.columns[Column("label", "", "", part, view)]
    known = (label != UNKNOWN).nonzero().flatten()
    ids = [scores.ids[part][int(row)] for row in known]
    right, right5, confidence = (
        scores.columns[Column(kind, model, PLAIN, part, view)][known] for kind in ("correct", "correct5", "confidence")
    )
    return _Answers(ids, label[known], right.bool(), right5.bool(), confidence)


def _labelled(suite: Suite) -> list[Part]:
    """The parts with labels, each once, where the suite has views."""
    if suite.views is None:
        return []
    return list({task.id.name: task.id for task in suite.tasks if task.kind == "calibration"}.values())


def _views(suite: Suite) -> list[ClassMask | None]:
    """With and without the suite's class mask."""
    mask = suite.views.mask if suite.views else None
    return [mask, None] if mask else [None]


def _text(mask: ClassMask | None) -> str:
    return mask.description if mask else ""
