"""Any netcal calibrator, fed what it can handle: `netcal:BBQ`, `netcal:HistogramBinning(bins=20)`."""

import contextlib
import io
import warnings
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked, rowwise
from ood_toolkit.calibrators.isotonic import interpolate
from ood_toolkit.calibrators.top_label import top_label_log_odds, with_top_confidence
from ood_toolkit.stats import row_chunks

Shape = Literal["steps", "line", "logistic"]
SHAPES: dict[str, Shape] = {
    "HistogramBinning": "steps",
    "BBQ": "steps",
    "ENIR": "steps",
    "NearIsotonicRegression": "steps",
    "IsotonicRegression": "line",
    "LogisticCalibration": "logistic",
    "BetaCalibration": "logistic",
    "TemperatureScaling": "logistic",
}
"""What the fitted map of one confidence looks like, by netcal's class name."""


class NetcalCalibrator(Calibrator):
    """A calibrator of the netcal package under this package's laws, by its class name there.

    netcal sees what it is right on: float64, one confidence per row and whether the row is right (or the class is
    the one in question). The fitted map is then kept as plain tensors, so it moves, saves and loads like any other:
    exactly, because the map of one confidence is piecewise constant, piecewise linear, or logistic in ln p and
    ln(1 - p). Confidence becomes a distribution by the rule of `TopLabelCalibrator`.

    Guarded on the way: float32 input, on which netcal's scaling methods silently do nothing; the task guessed from
    the labels; a class without rows, which becomes NaN there and keeps its own probability here; its temperature,
    which is 1/T; equal-mass bins, which it can fit but not apply (use `histogram(equal="mass")`).

    Args:
        method: netcal's class: HistogramBinning, BBQ, ENIR, NearIsotonicRegression, IsotonicRegression,
            LogisticCalibration, BetaCalibration or TemperatureScaling.
        task: "top_label", the predicted class's confidence; or "multiclass", every class against the rest, rows then
            normalised, for the binning and isotonic methods (hours at 1000 classes for BBQ and ENIR). The scaling
            methods are joint there: use `temperature`, `vector`, `dirichlet`.
        options: further arguments of netcal's class, as pairs: `(("bins", 20),)`.
    """

    name = "netcal"
    paper = "Küppers et al., Multivariate Confidence Calibration for Object Detection, CVPR Workshops 2020 (netcal)"
    cite = "kueppers2020multivariate"
    equation = "the map of the named class of netcal"
    family = "binning"
    default_method: ClassVar[str] = "HistogramBinning"
    positions: Float[Tensor, " K"]
    values: Float[Tensor, " K"]
    starts: Int[Tensor, " C+1"]
    """Where each map begins in `positions` and `values`; one map for top labels."""

    def __init__(
        self,
        method: str = "HistogramBinning",
        task: Literal["top_label", "multiclass"] = "top_label",
        options: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        super().__init__()
        if method not in SHAPES:
            close = [name for name in SHAPES if name.lower() == method.lower().replace("_", "")]
            hint = f" did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"no netcal calibrator is known by {method!r};{hint} known: {', '.join(SHAPES)}")
        if task not in ("top_label", "multiclass"):
            raise ValueError(f"task must be 'top_label' or 'multiclass', got {task!r}")
        if task == "multiclass" and SHAPES[method] == "logistic":
            raise ValueError(f"netcal's {method} is joint over classes; use temperature, vector or dirichlet instead")
        if dict(options).get("equal_intervals") is False:
            raise ValueError("netcal fits equal-mass bins but cannot apply them; use histogram(equal='mass')")
        sampling = dict(options).get("method")
        if sampling in ("mcmc", "variational"):
            raise ValueError(
                f"netcal's {method} with method={sampling!r} gives a sample of maps, and here one map is kept; leave "
                "`method` out for the one of highest likelihood"
            )
        self.method = method
        self.task: Literal["top_label", "multiclass"] = task
        self.options = options

    @classmethod
    def variant(cls, method: str, arguments: dict[str, Any]) -> "NetcalCalibrator":
        """From the spec `netcal:method(arguments)`: arguments that are not known here go to netcal's class."""
        task = arguments.pop("task", "top_label")
        return cls(method=method, task=task, options=tuple(arguments.items()))

    @property
    def spec(self) -> str:
        """`netcal:METHOD(options)`: a table says which of netcal's calibrators a row is, also of the default."""
        given = [("task", self.task)] * (self.task != "top_label") + list(self.options)
        arguments = ", ".join(f"{name}={value!r}" for name, value in given)
        return f"{self.name}:{self.method}" + (f"({arguments})" if arguments else "")

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Fits netcal's calibrator and reads its map off. Returns itself."""
        logits, labels = checked(logits, labels)
        if self.task == "top_label":
            chunks = row_chunks(len(logits), 4 * logits.shape[1])
            log_odds = torch.cat([top_label_log_odds(logits[i : i + chunks.step].double()) for i in chunks])
            maps = [fit_map(self.method, self.options, log_odds.sigmoid(), logits.argmax(dim=1) == labels)]
        else:
            probabilities = logits.double().softmax(dim=1)
            maps = [
                fit_map(self.method, self.options, column.contiguous(), labels == index)
                if bool((labels == index).any())
                else _identity(self.method, column)
                for index, column in enumerate(probabilities.T)
            ]
        self.starts = torch.tensor([0, *(len(x) for x, _ in maps)], device=logits.device).cumsum(0)
        self.positions = torch.cat([x for x, _ in maps])
        self.values = torch.cat([y for _, y in maps])
        return self

    def require_classes(self, classes: int) -> None:
        """Raises ValueError unless there is one map for each of this number of classes, or one for all."""
        maps = len(self.starts) - 1
        if self.task == "multiclass" and maps != classes:
            raise ValueError(
                f"{self!r} was fitted on logits of {maps} classes, but these have {classes}; fit it on logits of the "
                "same model and class mask"
            )

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) calibrated probabilities."""
        return rowwise(self._top_label if self.task == "top_label" else self._multiclass, logits)

    def _top_label(self, rows: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        shape = SHAPES[self.method]
        mapped = apply_map(shape, self.positions.double(), self.values.double(), top_label_log_odds(rows))
        return with_top_confidence(rows, mapped)

    def _multiclass(self, rows: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        shape, starts = SHAPES[self.method], self.starts.tolist()
        probabilities = rows.softmax(dim=-1)
        odds = torch.logit(probabilities)
        mapped = torch.empty_like(rows)
        for index in range(rows.shape[1]):
            own = slice(starts[index], starts[index + 1])
            mapped[:, index] = apply_map(shape, self.positions[own].double(), self.values[own].double(), odds[:, index])
        mapped = mapped + 1e-9 * probabilities  # orders ties, and no row sums to 0
        return mapped / mapped.sum(dim=-1, keepdim=True)


def apply_map(
    shape: Shape, positions: Float[Tensor, " K"], values: Float[Tensor, " K"], log_odds: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """The map of one confidence, given by its log-odds.

    Steps: `values[k]` on (positions[k-1], positions[k]]; a line through the knots; or
    `σ(v₀ ln p - v₁ ln(1 - p) + v₂)` with p held in [positions[0], positions[1]].
    """
    if shape == "steps":
        index = torch.bucketize(log_odds.sigmoid(), positions).clamp_max(len(positions) - 1)
        return values[index]
    if shape == "line":
        return interpolate(log_odds.sigmoid(), positions, values)
    return (_logistic_features(log_odds.sigmoid().clamp(positions[0], positions[1])) @ values).sigmoid()


def fit_map(
    method: str, options: tuple[tuple[str, Any], ...], confidence: Float[Tensor, " N"], correct: Tensor
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Fits netcal's `method` on 1-D float64 confidence and correctness, and gives its map as `apply_map` reads it."""
    right = int(correct.sum())
    if right in (0, len(correct)):
        raise ValueError(
            f"netcal's {method} needs right and wrong rows, but {right} of {len(correct)} are right; "
            "give more held-out rows"
        )
    inputs = confidence.double().cpu().numpy()
    fitted = _fitted(method, options, inputs, correct.cpu().numpy().astype(np.int64))
    if SHAPES[method] == "logistic":
        positions, values = _read_logistic(method, fitted)
    else:
        positions = _places(method, fitted, inputs)
        values = _quietly(fitted.transform, positions)
        if SHAPES[method] == "steps":
            last = np.append(values[1:] != values[:-1], True)
            positions, values = positions[last], values[last]
    if not np.isfinite(values).all():
        raise ValueError(f"netcal's {method} gave NaN on these {len(correct)} rows, {right} of them right")
    return torch.as_tensor(positions).to(confidence.device), torch.as_tensor(values).to(confidence.device)


def _fitted(method: str, options: tuple[tuple[str, Any], ...], confidence: np.ndarray, correct: np.ndarray) -> Any:
    import importlib

    room = "netcal.scaling" if SHAPES[method] == "logistic" else "netcal.binning"
    try:
        calibrator = getattr(importlib.import_module(room), method)(**dict(options))
        _quietly(calibrator.fit, confidence, correct)
    except ImportError as error:
        raise ValueError(
            f"netcal's {method} needs {error.name or 'a package'}, which is not installed here; "
            "install it, or use a calibrator of our own"
        ) from error
    except (TypeError, ValueError, AttributeError, AssertionError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options) or "its defaults"
        raise ValueError(f"netcal's {method} with {given} failed: {error}") from error
    return calibrator


def _places(method: str, fitted: Any, confidence: np.ndarray) -> np.ndarray:
    """Where to read the map: its knots, or for steps the closed right ends of everything that could be a step."""
    seen = np.unique(confidence)
    if method in ("HistogramBinning", "BBQ"):
        # netcal's own edges, bit for bit; BBQ averages histograms of different widths
        models = getattr(fitted, "_binning_models", None) or [fitted]
        return np.unique(np.concatenate([model._bin_bounds[0] for model in models]))[1:]
    if method == "IsotonicRegression":
        return seen
    # near-isotonic steps lie half-way between neighbouring held-out confidences, or on one where it is repeated
    return np.unique(np.concatenate([seen, (seen[1:] + seen[:-1]) / 2, [1.0]]))


def _read_logistic(method: str, fitted: Any) -> tuple[np.ndarray, np.ndarray]:
    """The three weights, solved from the map at three points and checked at others. netcal clips p to [ε, 1 - ε]."""
    epsilon = float(np.finfo(np.float64).eps)
    points = np.array([0.2, 0.5, 0.9, 0.05, 0.4, 0.7, 0.99])
    mapped = np.asarray(_quietly(fitted.transform, points)).reshape(-1)
    features = _logistic_features(torch.logit(torch.as_tensor(points)).sigmoid()).numpy()
    odds = np.log(mapped) - np.log1p(-mapped)
    weights = np.linalg.solve(features[:3], odds[:3])
    if not np.allclose(features @ weights, odds, rtol=1e-6, atol=1e-6):
        raise ValueError(f"netcal's {method} is not logistic in ln p and ln(1 - p) any more; is this netcal 1.4?")
    return np.array([epsilon, 1 - epsilon, 1.0]), weights


def _logistic_features(confidence: Float[Tensor, " N"]) -> Float[Tensor, "N 3"]:
    return torch.stack([confidence.log(), -torch.log1p(-confidence), torch.ones_like(confidence)], dim=1)


def _identity(method: str, column: Tensor) -> tuple[Tensor, Tensor]:
    """For a class without a row: its own probability, to a thousandth where the map consists of steps."""
    if SHAPES[method] == "line":
        return column.new_tensor([0.0, 1.0]), column.new_tensor([0.0, 1.0])
    edges = torch.linspace(0, 1, 1001, dtype=column.dtype, device=column.device)
    return edges[1:], (edges[1:] + edges[:-1]) / 2


def _quietly(function: Any, *arguments: Any) -> Any:
    """Runs what prints progress, draws bars and calls what its dependencies deprecate; nobody here can act on that."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return function(*arguments)
