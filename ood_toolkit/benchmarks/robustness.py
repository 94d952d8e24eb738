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

from ood_toolkit.benchmarks.answers import (
    Answerer,
    Answers,
    answerers,
    labelled_parts,
    read_answers,
    view_text,
    views_of,
)
from ood_toolkit.benchmarks.perturbations import steadiness
from ood_toolkit.benchmarks.suite import Suite, Views
from ood_toolkit.metrics import UndefinedMetricError, drop_interval, share_interval, wrong_confidence
from ood_toolkit.metrics.bootstrap import Interval
from ood_toolkit.scorefile import ScoreFile

ROBUSTNESS_FILE = "robustness.json"
HUMAN = {
    "dataset": "imagenet-a",
    "accuracy": 0.9,
    "about": "humans are near 90%, a rounded landmark whose sample size is not known, so without an interval",
    "source": "often quoted beside Hendrycks et al., Natural Adversarial Examples, CVPR 2021; not checked in its text",
}
"""What people reach on ImageNet-A."""
_Key = tuple[str, str, str]
"""Who, part, view."""


def robustness(
    suite: Suite,
    scores: ScoreFile,
    models: Mapping[str, str],
    *,
    ensembles: Mapping[str, str] | None = None,
    level: float | None = 0.95,
) -> dict[str, Any]:
    """The views of a run as plain values, or {} where the suite has none; docs/run-folder.md describes them.

    Args:
        suite: what was run.
        scores: its score file, after `keep_answers` of every model and `keep_pooled_answers` of every ensemble.
        models: transform in words by model spec, in the order of the tables.
        ensembles: likewise by name, of those that have records. Transfer and classes are of models alone.
        level: of the intervals, or None for none.
    """
    parts = [part.name for part in labelled_parts(suite)]
    if not parts:
        return {}
    views = [view_text(mask) for mask in views_of(suite)]
    pooled = [who for who in answerers(scores) if who.model in (ensembles or {})]
    everyone = [*map(Answerer, models), *pooled]
    answers = {
        (str(who), part, view): read_answers(scores, who, part, view)
        for who in everyone
        for part in parts
        for view in views
    }
    count = _Counting(suite, answers, level)
    places = [(str(who), part, view) for who in everyone for part in parts for view in views]
    return {
        "suite": suite.name,
        "protocol": suite.protocol,
        "transforms": {**models, **{str(who): (ensembles or {})[who.model] for who in pooled}},
        "without": [name for name in ensembles or {} if name not in {who.model for who in pooled}],
        "level": level,
        "human": dict(HUMAN) if HUMAN["dataset"] in parts else None,
        "accuracy": [count.accuracy(*place) for place in places],
        "drop": [drop for who in everyone for view in views for drop in count.drops(str(who), view)],
        "wrong_confidence": [count.wrong(*place) for place in places],
        "transfer": [count.transfer(list(models), part, view) for part in parts for view in views if len(models) > 1],
        "classes": [row for model in models for part in parts for row in count.classes(model, part)],
        "perturbations": [
            steadiness(scores, who, part, view, level)
            for who in everyone
            for part in parts
            for view in views
            if suite.views is not None and part in suite.views.sequences
        ],
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
    answers: Mapping[_Key, Answers]
    level: float | None

    def accuracy(self, model: str, part: str, view: str) -> dict[str, Any]:
        """Top-1 and top-5 of one model on one part in one view."""
        found = self.answers[model, part, view]
        place = {"model": model, "dataset": part, "mask": view, "images": len(found.ids)}
        return place | {"top1": self._share(found.right), "top5": self._share(found.right5)}

    def drops(self, model: str, view: str) -> list[dict[str, Any]]:
        """What the model loses from the clean part to every other part; the same images count once."""
        parts = {part.name: part for part in labelled_parts(self.suite)}
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
        mask, views = views_of(self.suite)[0], self.suite.views or Views()
        found = self.answers[model, part, view_text(mask)]
        rows = []
        for label in found.label.unique().tolist():
            own = found.label == label
            index = int(mask.classes[label]) if mask else label
            rows.append(
                {"model": model, "dataset": part, "mask": view_text(mask), "class": index}
                | {
                    "name": dict(enumerate(views.names)).get(index, ""),
                    "wnid": dict(enumerate(views.wnids)).get(index, ""),
                }
                | {"images": int(own.sum()), "top1": self._share(found.right[own])}
                | {"top5": self._share(found.right5[own]), "confidence": float(found.confidence[own].double().mean())}
            )
        return rows

    def _drop(self, clean: Answers, adversarial: Answers) -> dict[str, Any]:
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
