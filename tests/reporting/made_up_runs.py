"""Made-up runs, as the runner would write them."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from ood_toolkit.records import METRICS, Record, write_records
from ood_toolkit.scorefile import Column, ScoreFile

DETECTORS = (
    ("msp", "logits"),
    ("energy(temperature=2.0)", "logits"),
    ("odin(temperature=1000, epsilon=0.0014)", "live"),
    ("knn(k=50, metric='cosine')", "features"),
    ("vim", "features"),
    ("mahalanobis", "features"),
)
CALIBRATORS = (("none", "scaling"), ("temperature", "scaling"), ("histogram(bins=15)", "binning"))
DETECTION = {
    "misclassification": ("auroc", "aupr_error", "fpr95", "aurc"),
    "anomaly": ("auroc", "aupr", "fpr95"),
}
CALIBRATION = ("accuracy", "ece", "rms", "nll", "brier", "aurra")


def build_run(
    *,
    seed: int = 0,
    model: str = "demo:efficientnet_lite0",
    run: str = "run-a",
    ood: Sequence[str] = ("textures", "openimage_o"),
    **settings: Any,
) -> list[Record]:
    draw = random.Random(f"{seed} {model}")
    common: dict[str, Any] = {
        "suite": "folders",
        "model": model,
        "seed": seed,
        "run": run,
        "transform": "resize 256 bicubic, crop 224",
        "fit_set": "val1300/fit, 650 rows, 1f2e3d4c",
        "calibration_set": "val1300/calibrate, 200 rows, aa00bb11",
        "level": 0.95,
    } | settings
    return [
        *_detection(draw, common, "misclassification", "val1300", 217, 1083),
        *(record for name in ood for record in _detection(draw, common, "anomaly", name, 1000, 1300)),
        *(
            _record(draw, common, "calibration", "val1300", method, family, metric, 1300, 0)
            for method, family in CALIBRATORS
            for metric in CALIBRATION
        ),
    ]


def _detection(
    draw: random.Random, common: dict[str, Any], task: str, dataset: str, positives: int, negatives: int
) -> list[Record]:
    return [
        _record(draw, common, task, dataset, method, family, metric, positives, negatives)
        for method, family in DETECTORS
        for metric in DETECTION[task]
    ]


def _record(
    draw: random.Random,
    common: dict[str, Any],
    task: str,
    dataset: str,
    method: str,
    family: str,
    metric: str,
    positives: int,
    negatives: int,
) -> Record:
    value = draw.uniform(0.7, 0.98) if METRICS[metric].higher_is_better else draw.uniform(0.02, 0.4)
    cell: dict[str, Any] = {"task": task, "dataset": dataset, "method": method, "family": family, "metric": metric}
    if method == "mahalanobis" and task == "anomaly":
        reason = "every class needs a training row, but classes [3, 17] have none"
        return Record(**common, **cell, value=None, reason=reason)
    counts: dict[str, Any] = {"positives": positives, "negatives": negatives}
    return Record(**common, **cell, **counts, value=value, low=value - 0.0131, high=value + 0.0122)


def build_folder(
    path: Path,
    *,
    model: str = "demo:efficientnet_lite0",
    detectors: Sequence[tuple[str, str]] = DETECTORS,
    ood: Sequence[str] = ("textures", "openimage_o"),
    rows: int = 400,
    skill: float = 1.5,
    seed: int = 0,
    images: Path | None = None,
) -> Path:
    draw = np.random.default_rng(seed)
    path.mkdir()
    file = ScoreFile(ids={part: [f"{part}-{i:04}.jpg" for i in range(rows)] for part in ("val1300", *ood)})
    if images:
        file.roots = {part: str(images) for part in file.ids}
    difficulty, correct = draw.normal(size=rows), draw.random(rows) < 0.8
    shift = np.where(correct, 0.0, skill)
    records = [
        replace(r, value=None, reason="not measured", low=None, high=None, level=None, run=path.name)
        for r in build_run(model=model, ood=ood, seed=seed)
        if r.task == "calibration"
    ]
    template = replace(records[0], value=0.0, reason="")
    for number, (method, family) in enumerate(detectors):
        noise = 0.5 + 0.1 * number
        kept = difficulty + shift + noise * draw.normal(size=rows)
        parts = {"val1300": kept} | {name: skill + draw.normal(size=rows) * (1 + noise / 4) for name in ood}
        for part, scores in parts.items():
            file.add(Column("score", model, method, part), torch.from_numpy(scores))
            positives, negatives = (kept[~correct], kept[correct]) if part == "val1300" else (scores, kept)
            task = "misclassification" if part == "val1300" else "anomaly"
            about = replace(template, task=task, dataset=part, method=method, family=family)
            records += _scored(about, negatives, positives)
    for number, (method, family) in enumerate(CALIBRATORS):
        sure = 1 / (1 + np.exp(-(3.0 - number) * (1.2 - difficulty - shift)))
        confidence = np.clip(sure, 0.02, 0.9999)
        file.add(Column("confidence", model, method, "val1300"), torch.from_numpy(confidence))
        file.add(Column("correct", model, method, "val1300"), torch.from_numpy(correct.astype(np.uint8)))
        about = replace(template, method=method, family=family, positives=rows, negatives=0)
        records = [r for r in records if (r.task, r.method, r.metric) != ("calibration", method, "accuracy")]
        records.append(replace(about, metric="accuracy", value=float(correct.mean())))
    write_records(path / "records.jsonl", records)
    file.save(path / "scores.safetensors")
    facts = {
        "ood_toolkit": "0.1.0",
        "command": ["ood-bench", "--ood", "textures=my textures", "--seed", str(seed)],
        "started": "2026-11-30T15:44:44+00:00",
        "finished": "2026-11-30T15:46:10+00:00",
        "suite": "folders",
        "caption": "A made-up run.",
        "packages": {"torch": "2.14.1"},
        "stages": {"extract": 12.5, "detect msp": 0.1, "total": 13.0},
        "parts": {"val1300": "val1300 (400 images, 1f2e)"},
        "detectors": {method: method for method, _ in detectors},
        "unreadable": {"val1300": {"broken.jpg": "truncated"}},
        "left_out": {model: {"gram": "needs tap layer3"}},
    }
    (path / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return path


def _scored(about: Record, negatives: np.ndarray, positives: np.ndarray) -> list[Record]:
    truth = np.concatenate([np.zeros(len(negatives)), np.ones(len(positives))])
    scores = np.concatenate([negatives, positives])
    false_alarms, hits, _ = roc_curve(truth, scores, drop_intermediate=False)
    order = np.argsort(scores)
    values = {
        "auroc": roc_auc_score(truth, scores),
        "aupr" if about.task == "anomaly" else "aupr_error": average_precision_score(truth, scores),
        "fpr95": false_alarms[np.argmax(hits >= 0.95)],
    }
    if about.task == "misclassification":
        values["aurc"] = np.mean(np.cumsum(truth[order]) / np.arange(1, len(truth) + 1))
    counts = {"positives": len(positives), "negatives": len(negatives)}
    return [replace(about, metric=metric, value=float(value), **counts) for metric, value in values.items()]
