"""`ood_toolkit.evaluate(model, …)`: a run from a notebook, with results that show themselves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.command import run
from ood_toolkit.records import Record, read_records
from ood_toolkit.reporting.tables import TableOptions, tables

if TYPE_CHECKING:
    import pandas as pd

    from ood_toolkit.reporting.grid import Table


@dataclass(frozen=True)
class Results:
    """What a run found.

    Args:
        path: the run folder.
        records: every number.
    """

    path: Path
    records: Sequence[Record]

    @staticmethod
    def open(path: Path | str) -> "Results":
        """The results of an earlier run, from its folder."""
        return Results(Path(path), tuple(read_records(Path(path) / "records.jsonl")))

    def table(self, what: str = "detectors", options: TableOptions | None = None) -> "Table":
        """The table of "detectors" or "calibrators"; a notebook shows it as HTML, `print` as text."""
        (found,) = tables(self.records, what=what, options=options or TableOptions())[:1]  # pyright: ignore
        return found

    def to_pandas(self) -> "pd.DataFrame":
        """One row per record."""
        import pandas as pd

        return pd.DataFrame([vars(record) for record in self.records])

    def plot_roc(self, *methods: str) -> Any:
        """A matplotlib figure with the ROC curves of detectors (specs; all by default) on the first anomaly set.

        Raises:
            ValueError: the run has no anomaly scores of these detectors.
        """
        from matplotlib.figure import Figure

        from ood_toolkit.metrics import roc_curve
        from ood_toolkit.reporting.runs import Run

        run = Run.open(self.path)
        questions = run.questions("anomaly")
        samples = [s for q in questions[:1] for s in run.samples("anomaly", *q) if not methods or s.method in methods]
        if not samples:
            raise ValueError(f"the run has no anomaly scores of {', '.join(methods) or 'any detector'}")
        figure = Figure(figsize=(4, 4), layout="constrained")
        axes = figure.subplots()
        for sample in samples:
            curve = roc_curve(sample.negatives, sample.positives)
            axes.plot(curve.fpr, curve.tpr, label=sample.method)
        axes.plot([0, 1], [0, 1], color="0.6", linestyle=":", linewidth=1)
        axes.set(
            xlabel="false positive rate (ID flagged)", ylabel="true positive rate (OOD caught)", title=questions[0][1]
        )
        axes.legend(fontsize="small")
        return figure

    def _repr_html_(self) -> str:
        kinds = {"detectors": ("misclassification", "anomaly"), "calibrators": ("calibration",)}
        tasks = {record.task for record in self.records}
        return "\n".join(self.table(kind)._repr_html_() for kind, its in kinds.items() if tasks & set(its))


def evaluate(
    model: str | Sequence[str] = (),
    *,
    suite: str = "",
    detectors: str = "all",
    calibrators: str = "all",
    ensemble: str = "none",
    out: Path | str = "runs/notebook",
    cache: Path | str | None = None,
    say: Callable[[str], None] = print,
    **choices: Any,
) -> Results:
    """Runs a suite as `ood-bench` does and returns the results, which a notebook shows as tables.

    Args:
        model: a model spec or several, as `--model` takes them; none for the embedded suite.
        suite: as `--suite`; "digits" where there is no model.
        detectors: as `--detectors`.
        calibrators: as `--calibrators`.
        ensemble: as `--ensemble`.
        out: the run folder.
        cache: the store of outputs; the command's default if None.
        say: told what happens.
        choices: further fields of `ood_toolkit.benchmarks.command.Choices`, e.g. `folders={"id": Path("photos")}`.

    Raises:
        ValueError: whatever the command would print.
    """
    from ood_toolkit.benchmarks.choices import DEFAULTS, default_cache

    specs = (model,) if isinstance(model, str) and model else tuple(model)
    wanted: Mapping[str, Any] = {
        "suite": suite or ("" if specs else "digits"),
        "models": specs,
        "detectors": detectors,
        "calibrators": calibrators,
        "ensemble": ensemble,
        "out": Path(out),
        "cache": Path(cache) if cache else default_cache(),
        **choices,
    }
    unknown = sorted(set(wanted) - set(vars(DEFAULTS)))
    if unknown:
        raise ValueError(f"evaluate does not know {unknown}; known: {', '.join(vars(DEFAULTS))}")
    selected: Choices = replace(DEFAULTS, **wanted)
    folder = run(selected, say=say)
    folder.finish({})
    return Results(folder.path, tuple(folder.records))
