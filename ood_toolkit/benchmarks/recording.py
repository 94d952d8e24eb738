"""From scores to records: which metric a task has, and what its records say."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ood_toolkit.benchmarks.measure import Bootstrap, Cell, anomaly, calibration, misclassification
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.benchmarks.suite import ClassMask, Suite, Task
from ood_toolkit.outputs import UNKNOWN, Outputs
from ood_toolkit.records import Record
from ood_toolkit.scorefile import Column

METRICS_OF = {
    "misclassification": ("auroc", "aupr_error", "aupr_success", "fpr95", "aurc", "e_aurc", "augrc"),
    "anomaly": ("auroc", "aupr", "aupr_id", "fpr95", "fpr95_id"),
    "calibration": ("accuracy", "accuracy5", "ece", "rms", "rms_official", "nll", "brier", "aurra"),
}


@dataclass(frozen=True)
class Row:
    """Who the records are about.

    Args:
        model: model spec, or the ensemble's name.
        method: detector, calibrator or pool spec.
        family: of the method.
        transform: preprocessing, in words.
        calibrator: spec of the calibrator before a detector.
        tuned_on: the OOD set that chose the hyper-parameters, or "".
        texts: what a zero-shot model was told, in words, or "".
    """

    model: str
    method: str
    family: str
    transform: str
    calibrator: str = ""
    tuned_on: str = ""
    texts: str = ""


@dataclass(frozen=True, eq=False)
class Recorder:
    """Writes the records and per-image scores of a run."""

    suite: Suite
    folder: RunFolder
    bootstrap: Bootstrap
    seed: int

    def detector(
        self, row: Row, scores: Mapping[str, Tensor] | str, parts: Mapping[str, Outputs], mask: ClassMask | None
    ) -> None:
        """Records a detector on every task under `mask`.

        Args:
            row: whose scores.
            scores: by part name, NaN for an image that has none and does not count; or why there are none at all.
            parts: the outputs that were scored, by part name.
            mask: the classes that count.
        """
        if not isinstance(scores, str):
            for part, values in scores.items():
                self.folder.scores.add(Column("score", row.model, row.method, part, _text(mask)), values)
        for part in self.suite.scored:
            self._keep_predictions(row.model, part.name, parts[part.name], mask)
        records = []
        for task in self.suite.tasks:
            if task.kind == "calibration" or not _same(task.mask, mask):
                continue
            cells, counts = self._detected(task, scores, parts)
            records += self._records(row, task, cells, counts)
        self.folder.add(records)

    def _detected(
        self, task: Task, scores: Mapping[str, Tensor] | str, parts: Mapping[str, Outputs]
    ) -> tuple[Mapping[str, Cell] | str, tuple[int, int]]:
        """The metrics of one task, or why there are none, and how many rows are positive and negative."""
        seen = {part.name: torch.ones(len(parts[part.name]), dtype=torch.bool) for part in (task.id, task.ood) if part}
        if not isinstance(scores, str):
            seen = {name: ~scores[name].isnan() for name in seen}
        if task.ood is not None:
            counts = (int(seen[task.ood.name].sum()), int(seen[task.id.name].sum()))
            if isinstance(scores, str):
                return scores, counts
            values, others = (scores[part.name][seen[part.name]] for part in (task.id, task.ood))
            return anomaly(values, others, self.bootstrap), counts
        known = seen[task.id.name] & (parts[task.id.name].labels != UNKNOWN)
        right = parts[task.id.name].correct[known]
        counts = (int((~right).sum()), int(right.sum()))
        if isinstance(scores, str):
            return scores, counts
        values = scores[task.id.name][known]
        return misclassification(values[right], values[~right], self.bootstrap), counts

    def calibrator(
        self,
        row: Row,
        log_probabilities: Mapping[str, Tensor] | str,
        parts: Mapping[str, Outputs],
        mask: ClassMask | None,
    ) -> None:
        """Records a calibrator, or a pool, on every task under `mask`.

        Args:
            row: whose probabilities.
            log_probabilities: by part name, or why there are none.
            parts: the outputs with the labels, by part name.
            mask: the classes that count.
        """
        records = []
        for task in self.suite.tasks:
            if task.kind != "calibration" or not _same(task.mask, mask):
                continue
            labels = parts[task.id.name].labels
            if isinstance(log_probabilities, str):
                records += self._records(row, task, log_probabilities, (len(labels), 0))
                continue
            log_p = log_probabilities[task.id.name]
            self._keep_confidence(row, task, log_p, labels, mask)
            known = labels != UNKNOWN
            cells = calibration(log_p[known], labels[known], self.bootstrap)
            records += self._records(row, task, cells, (int(known.sum()), 0))
        self.folder.add(records)

    def _keep_predictions(self, model: str, part: str, outputs: Outputs, mask: ClassMask | None) -> None:
        column = Column("prediction", model, "", part, _text(mask))
        if column not in self.folder.scores.columns:
            self.folder.scores.add(column, outputs.predictions)
            self.folder.scores.add(Column("label", "", "", part, _text(mask)), outputs.labels)

    def _keep_confidence(self, row: Row, task: Task, log_p: Tensor, labels: Tensor, mask: ClassMask | None) -> None:
        confidence, predicted = log_p.double().max(dim=1)
        columns = {
            Column("confidence", row.model, row.method, task.id.name, _text(mask)): confidence.exp(),
            Column("correct", row.model, row.method, task.id.name, _text(mask)): (predicted == labels).to(torch.uint8),
        }
        for column, values in columns.items():
            self.folder.scores.add(column, values)

    def _records(self, row: Row, task: Task, cells: Mapping[str, Cell] | str, counts: tuple[int, int]) -> list[Record]:
        records = []
        for metric in METRICS_OF[task.kind]:
            cell = Cell(reason=cells) if isinstance(cells, str) else cells[metric]
            records.append(
                Record(
                    suite=self.suite.name,
                    protocol=self.suite.protocol,
                    task=task.kind,
                    dataset=task.dataset,
                    model=row.model,
                    method=row.method,
                    family=row.family,
                    calibrator=row.calibrator,
                    metric=metric,
                    value=cell.value,
                    low=cell.low,
                    high=cell.high,
                    level=self.bootstrap.level if cell.low is not None else None,
                    reason=cell.reason,
                    positives=counts[0],
                    negatives=counts[1],
                    seed=self.seed,
                    transform=row.transform,
                    mask=_text(task.mask),
                    fit_set=self.suite.fit.description if self.suite.fit else "",
                    calibration_set=self.suite.calibration.description if self.suite.calibration else "",
                    tuned_on=row.tuned_on,
                    texts=row.texts,
                    run=self.folder.path.name,
                )
            )
        return records


def _text(mask: ClassMask | None) -> str:
    return mask.description if mask else ""


def _same(one: ClassMask | None, other: ClassMask | None) -> bool:
    return _text(one) == _text(other)
