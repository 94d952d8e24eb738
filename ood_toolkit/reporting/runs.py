"""A run folder, opened for reading: records, the facts of run.json, and per-image scores put back into their tasks."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ood_toolkit.records import Record, read_records
from ood_toolkit.reporting.merging import method_of
from ood_toolkit.scorefile import Column, ScoreFile

if TYPE_CHECKING:
    from numpy import ndarray

PLAIN = "none"
"""The calibrator that is the plain softmax: its correctness is the model's."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The per-image scores behind one row and one task.

    Args:
        record: one of its records, for names and settings.
        negatives: (n,) scores of ID (or right) images; higher = more OOD, or more likely wrong.
        positives: (m,) scores of OOD (or wrong) images.
        negative_ids: image identifiers, "part/id", in the order of `negatives`.
        positive_ids: the same for `positives`.
    """

    record: Record
    negatives: "ndarray"
    positives: "ndarray"
    negative_ids: tuple[str, ...] = ()
    positive_ids: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """The row's name."""
        return method_of(self.record)

    @property
    def both(self) -> "ndarray":
        """All scores, negatives first."""
        import numpy as np

        return np.concatenate([self.negatives, self.positives])


@dataclass(frozen=True, kw_only=True)
class Confidences:
    """Top-label confidence and correctness of one calibrator on one set.

    Args:
        record: one of its records.
        confidence: (N,) probability of the predicted class, in [0, 1].
        correct: (N,) bool.
        part: the part of the images.
    """

    record: Record
    confidence: "ndarray"
    correct: "ndarray"
    part: str


@dataclass(frozen=True)
class Run:
    """One run folder.

    Args:
        path: the folder.
        records: its records.
        facts: run.json, or {} where there is none.
        scores: per-image scores, empty where there are none.
    """

    path: Path
    records: tuple[Record, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    scores: ScoreFile = field(default_factory=ScoreFile)

    @staticmethod
    def open(path: Path) -> "Run":
        """Reads a run folder; only records.jsonl must be there.

        Raises:
            ValueError: it is no run folder.
        """
        if not (path / "records.jsonl").is_file():
            raise ValueError(f"{str(path)!r} is no run folder: it has no records.jsonl")
        records = tuple(read_records(path / "records.jsonl"))
        if not records:
            raise ValueError(f"{str(path / 'records.jsonl')!r} holds no records")
        facts_file, scores_file = path / "run.json", path / "scores.safetensors"
        try:
            facts = json.loads(facts_file.read_text(encoding="utf-8")) if facts_file.is_file() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"{str(facts_file)!r} is not JSON ({error})") from error
        return Run(path, records, facts, ScoreFile.load(scores_file) if scores_file.is_file() else ScoreFile())

    @cached_property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    def models(self) -> list[str]:
        """Model specs, in the order of the records."""
        return list(dict.fromkeys(record.model for record in self.records))

    def questions(self, task: str) -> list[tuple[str, str]]:
        """(model, data set) of every question of one kind, in the order of the records."""
        return list(dict.fromkeys((r.model, r.dataset) for r in self.records if r.task == task))

    def samples(self, task: str, model: str, dataset: str) -> list[Sample]:
        """The scores of every detector on one question; those that have none are left out."""
        wanted = [r for r in self.records if (r.task, r.model, r.dataset) == (task, model, dataset)]
        rows = {(r.method, r.calibrator, r.mask): r for r in wanted if r.value is not None}
        found = (self._anomaly(r) if task == "anomaly" else self._misclassification(r) for r in rows.values())
        return [sample for sample in found if sample is not None]

    def confidences(self, model: str, dataset: str) -> list[Confidences]:
        """Confidence and correctness of every calibrator on one set, the plain softmax first."""
        wanted = [r for r in self.records if (r.task, r.model, r.dataset) == ("calibration", model, dataset)]
        rows = {(r.method, r.mask): r for r in wanted if r.value is not None}
        made = []
        for record in sorted(rows.values(), key=lambda r: r.method != PLAIN):
            part = self._part("calibration", record, (record.positives, record.negatives))
            confidence = self._column("confidence", record, part)
            correct = self._column("correct", record, part)
            if confidence is not None and correct is not None:
                made.append(
                    Confidences(record=record, confidence=confidence, correct=correct.astype(bool), part=part or "")
                )
        return made

    def image(self, identifier: str) -> Path | None:
        """The file of an image named "part/id", where it is a file that is there."""
        part, _, name = identifier.partition("/")
        root = self.scores.roots.get(part, "")
        file = Path(root, name)
        return file if root and file.is_file() else None

    def _anomaly(self, record: Record) -> Sample | None:
        tasks = self._tasks("anomaly", record)
        ood_part = tasks[0]["ood"] if tasks else self._named(record)
        id_part = tasks[0]["id"] if tasks else self._part("anomaly", record, (record.negatives, 0))
        negatives, positives = (self._column("score", record, part) for part in (id_part, ood_part))
        if negatives is None or positives is None:
            return None
        return Sample(
            record=record,
            negatives=negatives,
            positives=positives,
            negative_ids=tuple(f"{id_part}/{name}" for name in self.scores.ids[id_part or ""]),
            positive_ids=tuple(f"{ood_part}/{name}" for name in self.scores.ids[ood_part]),
        )

    def _misclassification(self, record: Record) -> Sample | None:
        part = self._part("misclassification", record, (record.positives, record.negatives))
        scores, correct = self._column("score", record, part), self._correct(record, part)
        if scores is None or correct is None or part is None:
            return None
        names = [f"{part}/{name}" for name in self.scores.ids[part]]
        return Sample(
            record=record,
            negatives=scores[correct],
            positives=scores[~correct],
            negative_ids=tuple(name for name, right in zip(names, correct, strict=True) if right),
            positive_ids=tuple(name for name, right in zip(names, correct, strict=True) if not right),
        )

    def _named(self, record: Record) -> str:
        """The OOD part of a data set: of the same name, or the longest name that the data set's begins with."""
        fitting = [part for part, names in self.scores.ids.items() if len(names) == record.positives]
        return max((part for part in fitting if record.dataset.startswith(part)), key=len, default=record.dataset)

    def _tasks(self, task: str, record: Record) -> list[Mapping[str, str]]:
        """What run.json says about the parts of a task, as {"kind", "dataset", "id", "ood"}."""
        known = self.facts.get("tasks", ())
        return [t for t in known if (t["kind"], t["dataset"]) == (task, record.dataset)]

    def _part(self, task: str, record: Record, counts: tuple[int, int]) -> str | None:
        """The part of the in-distribution images: from run.json, or else the one whose counts fit the record's."""
        tasks = self._tasks(task, record)
        if tasks:
            return tasks[0]["id"]
        for column, values in self.scores.select("correct"):
            if (column.model, column.mask) != (record.model, record.mask) or len(values) != sum(counts):
                continue
            wrong = len(values) - int(values.sum())
            if task != "misclassification" or wrong == counts[0]:
                return column.part
        return None

    def _correct(self, record: Record, part: str | None) -> "ndarray | None":
        """Whether the model is right; for an ensemble, whether the pool that made the logits is."""
        for method in (PLAIN, record.calibrator):
            values = self._tensor(Column("correct", record.model, method, part or "", record.mask))
            if values is not None:
                return values.astype(bool)
        return None

    def _column(self, kind: Any, record: Record, part: str | None) -> "ndarray | None":
        return self._tensor(Column(kind, record.model, record.method, part or "", record.mask))

    def _tensor(self, column: Column) -> "ndarray | None":
        values = self.scores.columns.get(column)
        return None if values is None else values.double().numpy()


def merged_records(paths: Iterable[Path]) -> list[Record]:
    """The records of several run folders or record files, in order."""
    made: list[Record] = []
    for path in paths:
        file = path / "records.jsonl" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{str(path)!r} is neither a run folder nor a file of records")
        made += read_records(file)
    return made
