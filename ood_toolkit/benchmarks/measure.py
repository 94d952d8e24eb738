"""The metrics of a table row, each with its interval, or with the reason why it has no value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ood_toolkit import metrics
from ood_toolkit.metrics import UndefinedMetricError
from ood_toolkit.metrics.bootstrap import Interval, intervals
from ood_toolkit.metrics.resamples import Draws, Strata
from ood_toolkit.metrics.rows import CalibrationRows, calibration_rows, row_intervals

_BLOCK_NUMBERS = 1 << 18
"""Numbers reduced at a time: 2 MiB of float64, which stay in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """How intervals are made.

    Args:
        resamples: how many; 0 for none.
        level: coverage, in (0, 1).
        seed: of the resamples.
        draws: the resamples themselves, which the methods of a run share.
    """

    resamples: int = 1000
    level: float = 0.95
    seed: int = 0
    draws: Draws = field(default_factory=Draws, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A number with its interval, or the reason why there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""


_ANOMALY = {
    "auroc": "auroc",
    "aupr": "aupr",
    "aupr_id": "aupr_id",
    "fpr95": "fpr_at_tpr",
    "fpr95_id": "fpr_at_tpr_id_positive",
}
_MISCLASSIFICATION = {
    "auroc": "auroc",
    "aupr_error": "aupr",
    "aupr_success": "aupr_id",
    "fpr95": "fpr_at_tpr",
    "aurc": "aurc",
    "e_aurc": "e_aurc",
    "augrc": "augrc",
}
_CALIBRATION = {
    "accuracy": "accuracy",
    "accuracy5": "top_5_accuracy",
    "ece": "ece",
    "rms": "rms_calibration_error",
    "rms_official": "rms_calibration_error_official",
    "nll": "nll",
    "brier": "brier",
    "aurra": "aurra",
}


def anomaly(id_scores: Tensor, ood_scores: Tensor, bootstrap: Bootstrap) -> dict[str, Cell]:
    """Every metric of anomaly detection; OOD is the positive class. Both sizes are part of the design: fixed strata."""
    return _ranked(_ANOMALY, id_scores, ood_scores, bootstrap, "fixed")


def misclassification(right_scores: Tensor, wrong_scores: Tensor, bootstrap: Bootstrap) -> dict[str, Cell]:
    """Every metric of misclassification detection; a wrong prediction is the positive class.

    The error rate is an outcome, and resampled with the rows.
    """
    return _ranked(_MISCLASSIFICATION, right_scores, wrong_scores, bootstrap, "random")


def calibration(log_probabilities: Tensor, labels: Tensor, bootstrap: Bootstrap) -> dict[str, Cell]:
    """Every metric of calibration and accuracy, over labelled rows."""
    rows = max(64, _BLOCK_NUMBERS // log_probabilities.shape[1])
    blocks = [
        calibration_rows(_normalised(some), true)
        for some, true in zip(log_probabilities.split(rows), labels.split(rows), strict=True)
    ]
    found = row_intervals(
        CalibrationRows.cat(blocks), resamples=bootstrap.resamples or 1, level=bootstrap.level, seed=bootstrap.seed
    )
    cells = {key: _cell(found[name], bootstrap) for key, name in _CALIBRATION.items() if name in found}
    missing = Cell(reason=f"the published form needs 100 rows, there are {len(labels)}")
    return {key: cells.get(key, missing) for key in _CALIBRATION}


def _normalised(log_probabilities: Tensor) -> Tensor:
    probabilities = log_probabilities.double().exp()
    return probabilities / probabilities.sum(dim=1, keepdim=True)


def _ranked(
    names: Mapping[str, str], negatives: Tensor, positives: Tensor, bootstrap: Bootstrap, strata: Strata
) -> dict[str, Cell]:
    """Cells by our key; `names` maps it to the metric's function. One undefined metric does not take the others."""
    cells = {}
    defined = dict(names)
    if not bootstrap.resamples or not len(negatives) or not len(positives):
        for key, name in names.items():
            try:
                cells[key] = Cell(value=getattr(metrics, name)(negatives, positives))
            except UndefinedMetricError as error:
                cells[key] = Cell(reason=str(error))
                del defined[key]
    if bootstrap.resamples and defined:
        found = intervals(
            list(defined.values()),
            negatives,
            positives,
            resamples=bootstrap.resamples,
            level=bootstrap.level,
            seed=bootstrap.seed,
            strata=strata,
            draws=bootstrap.draws,
        )
        cells |= {key: _cell(found[name], bootstrap) for key, name in defined.items()}
    return cells


def _cell(interval: Interval, bootstrap: Bootstrap) -> Cell:
    value, low, high = map(float, interval)
    if not math.isfinite(value):
        return Cell(reason=f"the value is {value}")
    if not bootstrap.resamples or not (math.isfinite(low) and math.isfinite(high)):
        return Cell(value=value)
    return Cell(value=value, low=low, high=high)
