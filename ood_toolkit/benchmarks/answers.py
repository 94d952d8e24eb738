"""What was answered on every labelled image, model by model and ensemble by ensemble, in the run's score file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ood_toolkit.benchmarks.masking import masked
from ood_toolkit.benchmarks.suite import ClassMask, Part, Suite
from ood_toolkit.metrics import top_k_correct
from ood_toolkit.outputs import UNKNOWN, Outputs
from ood_toolkit.registry import build_calibrator
from ood_toolkit.scorefile import Column, ScoreFile

PLAIN = "none"
"""The calibrator that is the plain softmax: a model's answers are those under it."""
_ROWS_AT_ONCE = 4096
_TOP = 5


@dataclass(frozen=True, order=True)
class Answerer:
    """Who answers.

    Args:
        model: model spec, or the ensemble's name.
        method: how the members are pooled; `PLAIN` for a model by itself.
    """

    model: str
    method: str = PLAIN

    def __str__(self) -> str:
        return self.model if self.method == PLAIN else f"{self.model} by {self.method}"


@dataclass(frozen=True)
class Answers:
    """What one model or ensemble answered on the labelled images of one part, in one view.

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

    def without(self, ids: frozenset[str]) -> "Answers":
        """The answers on the other images."""
        rows = torch.tensor([row for row, name in enumerate(self.ids) if name not in ids], dtype=torch.int64)
        kept = [self.ids[int(row)] for row in rows]
        return Answers(kept, self.label[rows], self.right[rows], self.right5[rows], self.confidence[rows])


def keep_answers(scores: ScoreFile, suite: Suite, model: str, parts: Mapping[str, Outputs]) -> None:
    """Adds to the score file what the views count: answers of one model on every labelled part, in every view.

    Args:
        scores: of the run.
        suite: with its views.
        model: model spec.
        parts: outputs by part, of all classes.
    """
    for mask in views_of(suite):
        _keep(scores, suite, Answerer(model), mask, lambda name, mask=mask: masked(parts[name], mask))


def keep_pooled_answers(
    scores: ScoreFile,
    suite: Suite,
    who: Answerer,
    pooled: Callable[[ClassMask | None], Mapping[str, Outputs]],
) -> None:
    """The same for an ensemble.

    Args:
        scores: see `keep_answers`.
        suite: see `keep_answers`.
        who: the ensemble.
        pooled: its outputs by part under a mask; log-probabilities in place of logits.
    """
    for mask in views_of(suite):
        outputs = pooled(mask)
        _keep(scores, suite, who, mask, outputs.__getitem__)


def answerers(scores: ScoreFile) -> list[Answerer]:
    """Everyone whose answers are kept, in the order in which they came."""
    return list(dict.fromkeys(Answerer(column.model, column.method) for column, _ in scores.select("correct5")))


def read_answers(scores: ScoreFile, who: Answerer, part: str, view: str) -> Answers:
    """The answers on a part's labelled images."""
    label = scores.columns[Column("label", "", "", part, view)]
    known = (label != UNKNOWN).nonzero().flatten()
    ids = [scores.ids[part][int(row)] for row in known]
    right, right5, confidence = (
        scores.columns[Column(kind, who.model, who.method, part, view)][known]
        for kind in ("correct", "correct5", "confidence")
    )
    return Answers(ids, label[known], right.bool(), right5.bool(), confidence)


def labelled_parts(suite: Suite) -> list[Part]:
    """The parts with labels, each once, where the suite has views."""
    if suite.views is None:
        return []
    return list({task.id.name: task.id for task in suite.tasks if task.kind == "calibration"}.values())


def views_of(suite: Suite) -> list[ClassMask | None]:
    """With and without the suite's class mask."""
    mask = suite.views.mask if suite.views else None
    return [mask, None] if mask else [None]


def view_text(mask: ClassMask | None) -> str:
    """The view as columns and records have it."""
    return mask.description if mask else ""


def _keep(
    scores: ScoreFile, suite: Suite, who: Answerer, mask: ClassMask | None, outputs_of: Callable[[str], Outputs]
) -> None:
    for part in labelled_parts(suite):
        columns = _columns(outputs_of(part.name), who, part.name, view_text(mask))
        if suite.views is not None and part.name not in suite.views.sequences:
            columns = {column: values for column, values in columns.items() if column.kind != "ranking"}
        for column, values in columns.items():
            if column not in scores.columns:
                scores.add(column, values)


def _columns(view: Outputs, who: Answerer, part: str, mask: str) -> dict[Column, Tensor]:
    """Labels and answers of one part in one view, as the score file has them."""
    known = (view.labels != UNKNOWN).nonzero().flatten()
    log_probabilities = build_calibrator(PLAIN).log_probabilities
    right5 = torch.zeros(len(view), dtype=torch.uint8)
    confidence = torch.zeros(len(view), dtype=torch.float64)
    predicted = torch.zeros(len(view), dtype=torch.int64)
    ranking = torch.zeros(len(view), min(_TOP, view.logits.shape[1]), dtype=torch.int32)
    for rows in torch.arange(len(view)).split(_ROWS_AT_ONCE):
        logits = view.rows(slice(int(rows[0]), int(rows[-1]) + 1)).logits
        # an ensemble's log-probabilities are what they are; a model's logits become some
        log_p = (log_probabilities(logits) if who.method == PLAIN else logits).double()
        confidence[rows], predicted[rows] = log_p.max(dim=1)
        ranking[rows] = log_p.topk(ranking.shape[1], dim=1).indices.to(torch.int32)
        own = known[torch.isin(known, rows)]
        if len(own):
            hits = top_k_correct(log_p[own - rows[0]].exp(), view.labels[own], k=_TOP)
            right5[own] = torch.from_numpy(hits).to(torch.uint8)
    return {
        Column("label", "", "", part, mask): view.labels,
        Column("prediction", who.model, "", part, mask): view.predictions,
        Column("confidence", who.model, who.method, part, mask): confidence.exp(),
        Column("correct", who.model, who.method, part, mask): (predicted == view.labels).to(torch.uint8),
        Column("correct5", who.model, who.method, part, mask): right5,
        Column("ranking", who.model, who.method, part, mask): ranking,
    }
