"""Time of the metrics beside torchmetrics, netcal and scikit-learn on the same arrays, in one run.

    python benchmarks/metrics_speed.py [--rows 50000] [--classes 1000] [--detectors 30]

Prints CPU seconds (they do not grow when the machine is shared), wall seconds, and the ratio of the peer's CPU time to
ours. The bootstrap has no peer: its line gives the time of all columns of a table of detectors.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from ood_toolkit import metrics as m
from ood_toolkit.benchmarks.measure import Bootstrap
from ood_toolkit.benchmarks.recording import Recorder, Row
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.benchmarks.suite import Part, Suite, Task
from ood_toolkit.datasets import ImageSet
from ood_toolkit.outputs import Outputs

ANOMALY = ["auroc", "aupr", "fpr_at_tpr"]
MISCLASSIFICATION = ["auroc", "aupr", "aupr_id", "fpr_at_tpr", "aurc"]


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Least CPU seconds and wall seconds of three calls."""
    runs = []
    for _ in range(3):
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        runs.append((time.process_time() - cpu, time.perf_counter() - wall))
    return min(runs)


def line(name: str, ours: Callable[[], Any], peers: dict[str, Callable[[], Any]] | None = None) -> None:
    cpu, wall = timed(ours)
    parts = [f"{name:<44} {cpu:8.3f} s cpu {wall:8.3f} s wall"]
    for peer, call in (peers or {}).items():
        theirs, _ = timed(call)
        parts.append(f"{peer} {theirs:.3f} s ({theirs / cpu:.1f}x)")
    print("   ".join(parts), flush=True)


def table_row(probabilities: np.ndarray, labels: np.ndarray, id_scores: np.ndarray, ood_scores: np.ndarray) -> None:
    """Every point value of one row: classification, calibration, misclassification, anomaly."""
    confidence, correct = m.top_label(probabilities, labels)
    right, wrong = -confidence[correct], -confidence[~correct]
    m.accuracy(probabilities, labels)
    m.top_k_accuracy(probabilities, labels)
    m.nll(probabilities, labels)
    m.brier(probabilities, labels)
    for metric in (m.ece, m.rms_calibration_error, m.rms_calibration_error_official):
        metric(confidence, correct)
    for two_sample in (m.auroc, m.aupr, m.aupr_id, m.fpr_at_tpr, m.aurc, m.e_aurc, m.augrc, m.aurra):
        two_sample(right, wrong)
    for two_sample in (m.auroc, m.aupr, m.aupr_id, m.fpr_at_tpr, m.fpr_at_tpr_id_positive):
        two_sample(id_scores, ood_scores)


def recorded(detectors: int, id_scores: np.ndarray, errors: int, outliers: int) -> None:
    """What `ood-bench` does with the scores of one detector after the other: records, intervals, files."""
    rows = len(id_scores)
    labels = torch.zeros(rows + outliers, dtype=torch.int64)
    logits = torch.zeros(rows + outliers, 2)
    logits[:, 0] = 1
    logits[rows - errors :, 1] = 2
    sets = {"id": slice(0, rows), "ood": slice(rows, None)}
    outputs = {name: Outputs.from_logits(logits[of], labels[of]) for name, of in sets.items()}
    names = [[f"{number}.jpg" for number in range(size)] for size in (rows, outliers)]
    parts = [
        Part(name, cast(ImageSet, SimpleNamespace(fingerprint=name, ids=ids)), rows=torch.arange(len(ids)))
        for name, ids in zip(sets, names, strict=True)
    ]
    tasks = [Task("misclassification", "id", parts[0]), Task("anomaly", "ood", parts[0], parts[1])]
    suite = Suite("simulated", "", tasks)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder), {})
        run.scores.ids = dict(zip(sets, names, strict=True))
        recorder = Recorder(suite, run, Bootstrap(), 0)
        for number in range(detectors):
            noise = torch.Generator().manual_seed(number)
            scores = {
                "id": torch.from_numpy(id_scores) + torch.randn(rows, generator=noise),
                "ood": torch.randn(outliers, generator=noise) + 2,
            }
            recorder.detector(Row("model", f"detector {number}", "simulated", ""), scores, outputs, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--detectors", type=int, default=30)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((options.rows, options.classes), dtype=np.float32) * 2
    labels = rng.integers(0, options.classes, options.rows)
    logits[np.arange(options.rows), labels] += rng.normal(7, 2, options.rows).astype(np.float32)
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    confidence, correct = m.top_label(probabilities, labels)
    outliers = options.rows // 5
    id_scores, ood_scores = rng.normal(0, 1, options.rows), rng.normal(1.2, 1, outliers)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from netcal.metrics import ECE
        from sklearn.metrics import average_precision_score, roc_auc_score
        from torchmetrics.functional import classification as tm

    tensors, targets = torch.from_numpy(probabilities), torch.from_numpy(labels)
    scores = np.concatenate([id_scores, ood_scores])
    is_ood = np.concatenate([np.zeros(options.rows), np.ones(outliers)])
    score_tensor, ood_tensor = torch.from_numpy(scores).sigmoid(), torch.from_numpy(is_ood).long()
    hits = correct.astype(np.int64)

    print(f"{options.rows} x {options.classes}, {outliers} outliers, accuracy {correct.mean():.3f}")
    line("all point metrics of a table row", lambda: table_row(probabilities, labels, id_scores, ood_scores))
    line("class-wise ECE", lambda: m.classwise_ece(probabilities, labels))
    line(
        "ECE from probabilities",
        lambda: m.ece(*m.top_label(probabilities, labels)),
        {
            "netcal": lambda: ECE(15).measure(probabilities, labels),
            "torchmetrics": lambda: tm.multiclass_calibration_error(tensors, targets, options.classes, n_bins=15),
        },
    )
    line(
        "ECE from confidences",
        lambda: m.ece(confidence, correct),
        {"netcal": lambda: ECE(15).measure(confidence, hits)},
    )
    line(
        "AUROC",
        lambda: m.auroc(id_scores, ood_scores),
        {
            "scikit-learn": lambda: roc_auc_score(is_ood, scores),
            "torchmetrics": lambda: tm.binary_auroc(score_tensor, ood_tensor),
        },
    )
    line(
        "average precision",
        lambda: m.aupr(id_scores, ood_scores),
        {
            "scikit-learn": lambda: average_precision_score(is_ood, scores),
            "torchmetrics": lambda: tm.binary_average_precision(score_tensor, ood_tensor),
        },
    )
    line("smooth ECE", lambda: m.smooth_ece(confidence, correct))
    line("kernel ECE", lambda: m.kernel_ece(confidence, correct))

    anomaly = {
        f"detector {i}": (rng.normal(0, 1, options.rows), rng.normal(1.2, 1, outliers))
        for i in range(options.detectors)
    }
    errors = options.rows // 4
    misclassification = {
        f"detector {i}": (rng.normal(0, 1, options.rows - errors), rng.normal(1, 1, errors))
        for i in range(options.detectors)
    }

    def both() -> None:
        m.table_intervals(ANOMALY, anomaly)
        m.table_intervals(MISCLASSIFICATION, misclassification, strata="random")

    line(f"1000-fold bootstrap, {options.detectors} detectors, 8 columns", both)
    right, wrong = (rng.normal(i, 1, rows) for i, rows in enumerate((options.rows - errors, errors)))
    line(
        f"a run's records of {options.detectors} detectors, 12 columns",
        lambda: recorded(options.detectors, np.append(right, wrong), errors, outliers),
    )
    line("1000-fold bootstrap, calibration columns", lambda: m.calibration_intervals(probabilities, labels))


if __name__ == "__main__":
    main()
