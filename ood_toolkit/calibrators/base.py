"""What every calibrator is: logits in, probabilities out."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.fitted import Fitted, parse
from ood_toolkit.head import require_tensor
from ood_toolkit.outputs import Outputs, full_precision
from ood_toolkit.stats import row_chunks

Kind = TypeVar("Kind", bound=Fitted)
Family = Literal["scaling", "binning", "isotonic", "composition", "prior", "ensemble"]


class Calibrator(Fitted, ABC):
    """Turns logits into probabilities that can be taken at their word, after seeing labelled held-out logits.

    A subclass sets `name`, `paper` and the class facts below, stores its hyper-parameters in `__init__`, learns
    tensors in `fit`, and gives either `forward` alone or, where the method lives in log space, `log_probabilities`
    and a `forward` that exponentiates it.
    """

    family: ClassVar[Family] = "scaling"
    preserves_argmax: ClassVar[bool] = False
    """Whether the most likely class can never change."""
    cite: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for method in ("fit", "forward", "log_probabilities"):
            if method in vars(cls):
                setattr(cls, method, _takes_logits(vars(cls)[method]))

    def require_classes(self, classes: int) -> None:
        """Raises ValueError unless what was learned belongs to this number of classes, or to any."""
        learned = self.learned_size("C")
        if learned not in (None, classes):
            raise ValueError(
                f"{self!r} was fitted on logits of {learned} classes, but these have {classes}; fit it on logits of "
                "the same model and class mask"
            )

    @abstractmethod
    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Learns from held-out logits and their true classes (no unknown ones). Returns itself."""

    @abstractmethod
    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) probabilities; rows sum to 1."""

    def log_probabilities(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-probabilities: calibrated logits, which any detector that reads logits can score."""
        probabilities = self.forward(logits)
        return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def _takes_logits(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, which refuses anything but logits, and when calibrating those of another number of classes."""
    name = method.__name__

    @functools.wraps(method)
    def guarded(self: Any, *given: Any, **named: Any) -> Any:
        logits = next(iter((*given, *named.values())), None)
        if isinstance(logits, Outputs):
            call, words = (".fit", ", outputs.labels") if name == "fit" else ("", "")
            raise TypeError(
                f"{type(self).__name__}{call} takes logits, got Outputs; write calibrator{call}(outputs.logits{words})"
            )
        if name != "fit":
            self.require_classes(require_logits(logits).shape[1])
        return method(self, *given, **named)

    return guarded


def _takes_members(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, which refuses anything but the logits of members, (M, N, C)."""

    @functools.wraps(method)
    def guarded(self: Any, *given: Any, **named: Any) -> Any:
        _require_members(next(iter((*given, *named.values())), None))
        return method(self, *given, **named)

    return guarded


def _require_members(given: object) -> None:
    members = require_tensor(given, "member_logits", "; torch.stack([first.logits, second.logits]) makes one")
    if members.ndim != 3 or not len(members) or not members.is_floating_point():
        raise ValueError(
            "a pool takes the floating-point logits of at least one member, (M, N, C), but got shape "
            f"{tuple(members.shape)} in {members.dtype}"
        )


def require_logits(given: object) -> Float[Tensor, "N C"]:
    """The logits, if they are floating-point (N, C); raises TypeError or ValueError otherwise."""
    logits = require_tensor(given, "logits")
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating-point (N, C), got {logits.dtype} {tuple(logits.shape)}")
    return logits


class Identity(Calibrator):
    """The softmax itself: the uncalibrated row of every table."""

    name = "none"
    equation = "softmax(z)"
    preserves_argmax = True

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Learns nothing, but refuses what every calibrator refuses."""
        checked(logits, labels)
        return self

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) softmax of the logits."""
        return logits.softmax(dim=-1)

    def log_probabilities(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-softmax of the logits."""
        return logits.log_softmax(dim=-1)


class EnsemblePool(Fitted, ABC):
    """Pools the logits of M members into one set of log-probabilities: the one place where a member axis exists.

    The result is a set of logits again, so an ensemble goes through every calibrator and every logit detector.
    """

    family: ClassVar[Family] = "ensemble"
    cite: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for method in ("fit", "forward"):
            if method in vars(cls):
                setattr(cls, method, _takes_members(vars(cls)[method]))

    def fit(self, member_logits: Float[Tensor, "M N C"], labels: Int[Tensor, " N"]) -> Self:
        """Learns from held-out logits of every member. Returns itself."""
        _require_members(member_logits)
        return self

    @abstractmethod
    def forward(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-probabilities; their exponentials sum to 1."""


def checked(logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> tuple[Float[Tensor, "N C"], Int[Tensor, " N"]]:
    """Calibration data, or an error that says what is wrong with them. Half-precision logits come back as float32.

    `-inf` marks a class that cannot be; `+inf`, NaN, and a label on an impossible class are refused.
    """
    require_logits(logits)
    require_tensor(labels, "labels")
    rows, classes = logits.shape
    if labels.shape != (rows,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be {rows} integers, one per row, got {labels.dtype} {tuple(labels.shape)}")
    if rows == 0 or classes == 0:
        raise ValueError(f"calibration needs labelled rows, got logits of shape {(rows, classes)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(f"labels must lie in [0, {classes}), but span [{low}, {high}]; leave unknown rows out")
    peaks = logits.amax(dim=1)  # NaN if the row holds one
    bad = (~peaks.isfinite()).nonzero().flatten()
    if bad.numel():
        raise ValueError(
            f"every row needs a finite largest logit, but {bad.numel()} of {rows} rows hold NaN, +inf or only -inf, "
            f"first {bad[:5].tolist()}"
        )
    labels = labels.long().to(logits.device)
    impossible = logits.gather(1, labels[:, None]).flatten().isneginf().nonzero().flatten()
    if impossible.numel():
        raise ValueError(
            f"{impossible.numel()} rows have a label whose logit is -inf, first {impossible[:5].tolist()}: "
            "no calibration makes an impossible class possible; unmask the class or leave the rows out"
        )
    return full_precision(logits), labels


def rowwise(function: Callable[[Tensor], Tensor], logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
    """`function` over blocks of rows in float64, so that temporaries stay small. The dtype follows the input."""
    if torch.compiler.is_compiling():
        return function(logits.double()).to(logits.dtype)
    result = torch.empty_like(logits)
    chunks = row_chunks(len(logits), 8 * logits.shape[1])
    for start in chunks:
        block = slice(start, start + chunks.step)
        result[block] = function(logits[block].double())
    return result


def from_spec(spec: str, base: type[Kind]) -> Kind:
    """An unfitted part of a composition, from its spec: `temperature`, `histogram(bins=20)`.

    Known are the imported subclasses of `base`; `registry.build_calibrator` reads the same specs from above.
    """
    name, arguments = parse(spec)
    name, _, variant = name.partition(":")
    known: dict[str, Any] = {kind.name: kind for kind in _descendants(base) if "name" in vars(kind)}
    if name not in known:
        raise ValueError(f"no {base.__name__} is named {name!r}; known: {', '.join(sorted(known))}")
    return known[name].variant(variant, arguments) if variant else known[name](**arguments)


def _descendants(kind: type[Kind]) -> list[type[Kind]]:
    direct = kind.__subclasses__()
    return [*direct, *(below for child in direct for below in _descendants(child))]
