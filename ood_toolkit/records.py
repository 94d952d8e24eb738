"""One measured number, as one flat row of JSON. Standard library only, so that old results open anywhere."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Record:
    """One cell of a table, with everything that says what it means. Text fields are "" where they do not apply.

    Args:
        suite: the benchmark, e.g. "digits", "folders".
        protocol: the rules of evaluation, e.g. "default", "official", "vim-1000way".
        task: "anomaly" (ID against OOD), "misclassification" (right against wrong) or "calibration".
        dataset: what was scored: the OOD set's name for "anomaly", the ID set's for the others.
        model: model spec, or the ensemble's name.
        method: detector or calibrator spec, as `registry.build` reads it.
        family: the method's family, for grouping.
        calibrator: spec of the calibrator applied before a detector.
        metric: "auroc", "aupr", "aupr_id", "fpr95", "aurc", … A key of `METRICS`.
        value: the number, in unit scale (0.93, not 93); None where there is none.
        low: lower end of the interval, or None.
        high: upper end.
        level: the interval's coverage, e.g. 0.95.
        reason: why `value` is None.
        positives: rows of the positive class (OOD, or wrong), or all rows for calibration.
        negatives: rows of the negative class.
        seed: the run's seed.
        transform: preprocessing, in words.
        mask: class subset and its size, e.g. "imagenet-o:200"; "" for all classes.
        fit_set: what detectors were fitted on, with its size and hash.
        calibration_set: what calibrators were fitted on, with its size and hash.
        tuned_on: the OOD validation set that chose hyper-parameters, or "".
        texts: what a zero-shot model was told, in words: prompts, class names, outlier prompts, negative labels.
        run: identifier of the run that made it.
    """

    suite: str
    task: str
    dataset: str
    model: str
    method: str
    metric: str
    value: float | None
    protocol: str = "default"
    family: str = ""
    calibrator: str = ""
    low: float | None = None
    high: float | None = None
    level: float | None = None
    reason: str = ""
    positives: int = 0
    negatives: int = 0
    seed: int = 0
    transform: str = ""
    mask: str = ""
    fit_set: str = ""
    calibration_set: str = ""
    tuned_on: str = ""
    texts: str = ""
    run: str = ""

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{name} of {self.method}/{self.metric} is {number}; say None and give the reason")
        if self.value is None and not self.reason:
            raise ValueError(f"{self.method}/{self.metric} has no value and no reason")


GROUP_MEANS = ("near-ood", "far-ood")
"""Data sets of records that are means over others: OpenOOD's two groups."""
ALL_CLASSES = " 1000-way"
"""Ends the name of a data set that is scored once more, under all classes instead of a mask."""


@dataclass(frozen=True)
class Metric:
    """How a metric is shown.

    Args:
        key: as in `Record.metric`.
        label: column head.
        higher_is_better: the direction of its arrow.
        about: one sentence with the positive class.
    """

    key: str
    label: str
    higher_is_better: bool
    about: str


METRICS = {
    metric.key: metric
    for metric in (
        Metric("auroc", "AUROC", True, "Area under the ROC curve; OOD (or error) is the positive class."),
        Metric("aupr", "AUPR", True, "Average precision (step-wise); OOD is the positive class."),
        Metric("aupr_error", "AUPR-error", True, "Average precision; a wrong prediction is the positive class."),
        Metric("aupr_success", "AUPR-success", True, "Average precision; a right prediction is the positive class."),
        Metric("aupr_id", "AUPR-ID", True, "Average precision; ID is the positive class."),
        Metric("fpr95", "FPR95", False, "Share of ID (right) rows flagged when 95% of OOD (wrong) rows are."),
        Metric("fpr95_id", "FPR95-ID", False, "Share of OOD rows accepted when 95% of ID rows are."),
        Metric("aurc", "AURC", False, "Area under the risk-coverage curve."),
        Metric("e_aurc", "E-AURC", False, "AURC above that of a perfect ranking."),
        Metric("augrc", "AUGRC", False, "Area under the generalised risk-coverage curve."),
        Metric("accuracy", "Acc@1", True, "Share of right predictions."),
        Metric("accuracy5", "Acc@5", True, "Share of rows whose class is among the five most likely."),
        Metric("ece", "ECE", False, "Expected calibration error, 15 equal-width bins."),
        Metric("rms", "RMS", False, "RMS calibration error, adaptive bins of 100 rows, every bin counted."),
        Metric("rms_official", "RMS-pub", False, "RMS calibration error as published: the last bin is left out."),
        Metric("nll", "NLL", False, "Mean negative log-likelihood, in nats."),
        Metric("brier", "Brier", False, "Sum over classes of squared errors, mean over rows: 0 to 2."),
        Metric("aurra", "AURRA", True, "Area under the response-rate accuracy curve, mean over tie orders."),
    )
}


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Writes all records, one JSON object per line, atomically."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text("".join(json.dumps(vars(r), ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    temporary.replace(path)


def read_records(path: Path) -> Iterator[Record]:
    """Reads records back. Fields this version does not know are refused by name, missing ones take their default."""
    known = {f.name for f in fields(Record)}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            unknown = sorted(set(row) - known)
            if unknown:
                raise ValueError(f"unknown fields {unknown}")
            yield Record(**row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a record ({error})") from error
