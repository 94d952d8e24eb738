"""Paired tests on per-image scores. The tests themselves live in the metrics room and are handed in."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ood_toolkit.records import METRICS
from ood_toolkit.reporting.runs import Run, Sample

if TYPE_CHECKING:
    from numpy import ndarray

Pair = tuple["ndarray", "ndarray"]
"""(negatives, positives): the scores of one detector."""
PairedTest = Callable[[str, Pair, Pair], float]
"""(metric key, one detector's scores, another's on the same images) → two-sided p-value of no difference."""


def tied(
    run: Run, test: PairedTest, *, metrics: Sequence[str] = ("auroc",), level: float = 0.05
) -> frozenset[tuple[str, str, str, str, str]]:
    """Cells that a paired test cannot tell from the best of their column: `TableOptions.tied`.

    The p-values of a column are Holm-adjusted, because every detector is compared with the best.

    Args:
        run: with per-image scores.
        test: the paired test.
        metrics: keys of the metrics to test.
        level: p-values of at least this much count as tied.
    """
    found: set[tuple[str, str, str, str, str]] = set()
    for task in ("misclassification", "anomaly"):
        for model, dataset in run.questions(task):
            samples = {(s.record.method, s.record.calibrator): s for s in run.samples(task, model, dataset)}
            for metric in metrics:
                found |= {
                    (model, sample.method, task, dataset, metric)
                    for sample in _tied(run, list(samples.values()), test, metric, level)
                }
    return frozenset(found)


def _tied(run: Run, samples: list[Sample], test: PairedTest, metric: str, level: float) -> list[Sample]:
    values = {(r.task, r.model, r.dataset, r.method, r.calibrator): r.value for r in run.records if r.metric == metric}
    known: list[tuple[float, Sample]] = []
    for sample in samples:
        r = sample.record
        value = values.get((r.task, r.model, r.dataset, r.method, r.calibrator))
        if value is not None:
            known.append((value, sample))
    if len(known) < 2:
        return []
    ranked = sorted(known, key=lambda pair: pair[0], reverse=METRICS[metric].higher_is_better)
    best, others = ranked[0][1], [sample for _, sample in ranked[1:]]
    raw = [test(metric, pair_of(best), pair_of(sample)) for sample in others]
    return [sample for sample, p in zip(others, holm(raw), strict=True) if p >= level]


def pair_of(sample: Sample) -> Pair:
    """The scores as the tests take them."""
    return sample.negatives, sample.positives


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given."""
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for step, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, p_values[index] * (len(p_values) - step)))
        adjusted[index] = running
    return adjusted
