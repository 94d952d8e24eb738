"""`ood_toolkit.evaluate(model, …)`: a run from a notebook, with results that show themselves."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ood_toolkit.benchmarks.asked import asked, in_python
from ood_toolkit.benchmarks.choices import default_cache
from ood_toolkit.benchmarks.command import run
from ood_toolkit.records import Record, read_records
from ood_toolkit.reporting.options import TableOptions
from ood_toolkit.reporting.robustness import run_tables
from ood_toolkit.reporting.tables import tables

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
        """The results of an earlier run, from its folder.

        Raises:
            ValueError: it is no run folder.
        """
        records = Path(path) / "records.jsonl"
        if not records.is_file():
            raise ValueError(
                f"{str(path)!r} is no run folder: it has no records.jsonl; give the folder that `out` named"
            )
        return Results(Path(path), tuple(read_records(records)))

    def table(self, what: str = "detectors", options: TableOptions | None = None) -> "Table":
        """A table that a notebook shows as HTML, and `print` as text.

        Args:
            what: "detectors", "calibrators", "robustness" (accuracies, drops, wrong answers; see docs/run-folder.md),
                "corruptions" (of ImageNet-C and -P) or "classes".
            options: how it is cut and shown.

        Raises:
            ValueError: the run has no such table.
        """
        shown = options or TableOptions()
        if what in ("robustness", "classes", "corruptions"):
            return run_tables([self.path], what, options=shown, needed=True)[0]
        if what not in ("detectors", "calibrators"):
            raise ValueError(
                f"no table is named {what!r}; known: detectors, calibrators, robustness, classes, corruptions"
            )
        return tables(self.records, what=what, options=shown)[0]

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
            known = [s.method for question in questions[:1] for s in run.samples("anomaly", *question)]
            raise ValueError(
                f"the run has no anomaly scores of {', '.join(methods) or 'any detector'}; "
                f"it has those of {', '.join(known) or 'none'}"
            )
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
    model: Any = (),
    *,
    suite: str = "",
    detectors: Any = "all",
    calibrators: Any = "all",
    ensemble: Any = "none",
    out: Path | str = "runs/notebook",
    cache: Path | str | None = None,
    say: Callable[[str], None] = print,
    **choices: Any,
) -> Results:
    """Runs a suite as `ood-bench` does and returns the results, which a notebook shows as tables.

    Args:
        model: a model spec as `--model` takes it, a torch module, a pair (module, transform), a mapping from name to
            one of these, or a list of any; none for the embedded suite. Without a transform a module gets ImageNet's
            size, crop and normalisation; a transform gives the module what it expects.
        suite: as `--suite`; "digits" where there is no model.
        detectors: as `--detectors`, or a list of specs or of detectors.
        calibrators: as `--calibrators`, likewise.
        ensemble: as `--ensemble`, likewise.
        out: the run folder.
        cache: the store of outputs; the command's default if None.
        say: told what happens.
        choices: further fields of `ood_toolkit.benchmarks.choices.Choices`, e.g. `folders={"id": "photos/known"}`,
            `ood={"strange": "photos/strange"}`.

    Raises:
        ValueError: whatever the command would print, with its options as they are written here.
        TypeError: a value of a kind that cannot be meant.
    """
    for name in ("models", "model"):
        if name in choices:
            raise ValueError(f"{name} is the first argument: evaluate({choices[name]!r}, …)")
    specs, given = _specs(model)
    selected = asked(
        {
            "suite": suite or ("" if specs else "digits"),
            "models": specs,
            "detectors": detectors,
            "calibrators": calibrators,
            "ensemble": ensemble,
            "out": out,
            "cache": cache if cache is not None else default_cache(),
            **choices,
        }
    )
    try:
        with _importable(given):
            folder = run(selected, say=say)
    except ValueError as error:
        raise ValueError(in_python(str(error))) from error
    folder.finish({})
    for spec, reason in folder.facts["failed"].items():
        warnings.warn(f"{spec} has no numbers: {in_python(reason)}", stacklevel=2)
    return Results(folder.path, tuple(folder.records))


_given: dict[str, Any] = {}
"""Modules that `evaluate` was given, by name, while it runs: their specs are `ood_toolkit.notebook:NAME`."""


def __getattr__(name: str) -> Any:
    """The factory of a module that was given under this name."""
    if name in _given:
        return lambda: _given[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def _importable(given: Mapping[str, Any]) -> Iterator[None]:
    """Lets specs name the given modules, and leaves these in the mode they were in."""
    modules = [one[0] if isinstance(one, tuple) else one for one in given.values()]
    modes = [(part, part.training) for module in modules for part in module.modules()]
    _given.update(given)
    try:
        yield
    finally:
        _given.clear()
        for part, training in modes:
            part.training = training


def _specs(model: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Specs of whatever was given as model, and what those of them stand for that are no text."""
    specs: list[str] = []
    given: dict[str, Any] = {}
    for name, one in _named(model):
        if isinstance(one, str):
            specs.append(one)
            continue
        wanted = key = name or type(one[0] if isinstance(one, tuple) else one).__name__
        number = 2
        while key in given and given[key] is not one:
            key, number = f"{wanted}_{number}", number + 1
        given[key] = one
        specs.append(f"{__name__}:{key}")
    return tuple(specs), given


def _named(model: Any) -> list[tuple[str, Any]]:
    """(name or "", spec or module) of every model."""
    if model is None or (isinstance(model, str) and not model):
        return []
    if isinstance(model, str) or _is_given(model):
        return [("", model)]
    if isinstance(model, Mapping):
        return [(str(name), found) for name, one in model.items() for _, found in _named(one)]
    if isinstance(model, Iterable):
        return [pair for one in model for pair in _named(one)]
    raise TypeError(
        "model must be a spec such as 'timm:resnet50', a torch module, a pair (module, transform), or a list or "
        f"mapping of these; got {model!r}, a {type(model).__name__}"
    )


def _is_given(model: Any) -> bool:
    """A module, or a pair of a module and a transform."""
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], nn.Module):
        return callable(model[1]) and not isinstance(model[1], nn.Module)
    return isinstance(model, nn.Module)
