"""How tables are cut and shown, and how a number becomes text."""

import fnmatch
from dataclasses import dataclass
from typing import Literal

from ood_toolkit.reporting.merging import Measurement

TASKS = {"detectors": ("misclassification", "anomaly"), "calibrators": ("calibration",)}
"""The tasks of each table, in the order of its columns."""
MAIN_METRICS = {
    "misclassification": ("auroc", "aupr_error", "fpr95", "aurc"),
    "anomaly": ("auroc", "aupr", "fpr95"),
    "calibration": ("accuracy", "ece", "rms", "nll", "brier", "aurra"),
}
"""The metrics shown unless others are asked for."""
NOT_SHARES = frozenset({"nll", "brier"})
"""Metrics that percent would misname."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How a table is cut and shown. The default is what `ood-bench` prints.

    Args:
        metrics: keys of `METRICS` to show, in this order; by default those of the main job.
        datasets: data sets to show, in this order; by default all.
        methods: specs or patterns (`knn*`) of the rows to show, in this order; by default all.
        models: model specs to show; by default all.
        group_by: what rows stand under. "auto" is the data set where there are more than twelve, the model where there
            are several, else the family.
            Grouped by data set there is one table per task. Best and second are marked within a model or a
            data set, and over the whole table for "family" and "none".
        precision: digits after the point; by default 3 for units and 1 for percent.
        scale: "percent" multiplies every share by 100 (not NLL and Brier, which are no shares).
        intervals: "brackets" prints `0.934 [0.921, 0.945]`, "plusminus" half the width. A mean over seeds has
            ± its standard deviation under both.
        average: whether anomaly detection has columns for the mean over OOD sets, where there are several.
        transposed: methods as columns.
        allow: settings whose differences become footnotes; see `merging.SETTINGS`.
        tied: (model, method, task, dataset, metric) of cells that a paired test cannot tell from the best of their
            column; they are marked. See `significance.tied`.
        caption: replaces the first sentence of the caption.
        label: the label of LaTeX and Typst references, completed by the table's name.
    """

    metrics: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    group_by: Literal["auto", "none", "family", "model", "dataset"] = "auto"
    precision: int | None = None
    scale: Literal["unit", "percent"] = "unit"
    intervals: Literal["none", "brackets", "plusminus"] = "none"
    average: bool = True
    transposed: bool = False
    allow: tuple[str, ...] = ()
    tied: frozenset[tuple[str, str, str, str, str]] = frozenset()
    caption: str = ""
    label: str = "tab"

    def __post_init__(self) -> None:
        choices = {
            "group_by": ("auto", "none", "family", "model", "dataset"),
            "scale": ("unit", "percent"),
            "intervals": ("none", "brackets", "plusminus"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} cannot be {getattr(self, name)!r}; known: {', '.join(known)}")
        if self.precision is not None and not 0 <= self.precision <= 12:
            raise ValueError(f"precision is a number of digits from 0 to 12, not {self.precision}")

    def number(self, value: float, metric: str) -> str:
        """The value as text, in the chosen scale and precision. Never "-0.000"."""
        digits = 3 if self.precision is None else self.precision
        if self.scale == "percent" and metric not in NOT_SHARES:
            value, digits = value * 100, 1 if self.precision is None else self.precision
        text = f"{value:.{digits}f}"
        return text.lstrip("-") if float(text) == 0 else text

    def text(self, measured: Measurement, metric: str) -> str:
        """The number with its interval, where that is asked for and known; "" where there is no number."""
        if measured.value is None:
            return ""
        text = self.number(measured.value, metric)
        if self.intervals == "none":
            return text
        if measured.deviation is not None:
            return f"{text} ± {self.number(measured.deviation, metric)}"
        if measured.low is None or measured.high is None:
            return text
        if self.intervals == "plusminus":
            return f"{text} ± {self.number((measured.high - measured.low) / 2, metric)}"
        return f"{text} [{self.number(measured.low, metric)}, {self.number(measured.high, metric)}]"


DEFAULTS = TableOptions()


def matches(method: str, pattern: str) -> bool:
    """Whether the pattern is the method's spec, or a shell pattern (`knn*`) that fits it."""
    return method == pattern or fnmatch.fnmatchcase(method, pattern)
