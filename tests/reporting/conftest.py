"""Made-up runs, as the runner would write them."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ood_toolkit.records import METRICS, Record

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

MakeRun = Callable[..., list[Record]]


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    """Builds the records of one run: six detectors on two tasks, three calibrators; mahalanobis lacks anomaly rows."""
    return build_run


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
