"""What one forward pass leaves behind: the only thing that detectors and calibrators ever see."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

UNKNOWN = -1
"""The label of a row whose class is not known, or is none of the head's classes."""

_BATCH_NUMBERS = 1 << 24
"""How many numbers (logits and features together) `Outputs.batches` puts into one batch: 64 MiB of float32."""


class NaNRows(ValueError):
    """Some rows hold NaN; `rows` says which."""

    def __init__(self, what: str, rows: list[int], total: int) -> None:
        super().__init__(f"{what} hold NaN in {len(rows)} of {total} rows, first {rows[:5]}")
        self.what = what
        self.rows = rows


@dataclass(frozen=True, eq=False)
class Head:
    """The last linear layer: `logits = features @ weight.T + bias`. Shared by all rows.

    Args:
        weight: (C, D), one row per class.
        bias: (C,); zeros where the layer has none.
    """

    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, " C"]

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"a head needs a weight (C, D) and a bias (C,), but got {tuple(self.weight.shape)} "
                f"and {tuple(self.bias.shape)}"
            )
        for name in ("weight", "bias"):
            object.__setattr__(self, name, full_precision(getattr(self, name).detach()))

    def __call__(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N C"]:
        """The logits of `features`."""
        return torch.nn.functional.linear(features, self.weight, self.bias)

    @staticmethod
    def identity(classes: int, like: Tensor) -> "Head":
        """The head of a model known only by its logits: features are the logits themselves."""
        return Head(
            torch.eye(classes, dtype=like.dtype, device=like.device),
            torch.zeros(classes, dtype=like.dtype, device=like.device),
        )

    def select(self, classes: Int[Tensor, " K"]) -> "Head":
        """The head cut down to the given classes, in the given order."""
        classes = classes.to(self.weight.device)
        return Head(self.weight[classes], self.bias[classes])

    def to(self, *args: object, **kwargs: object) -> "Head":
        """Moves or casts both parts, with the arguments of `torch.Tensor.to`."""
        return Head(self.weight.to(*args, **kwargs), self.bias.to(*args, **kwargs))  # pyright: ignore


@dataclass(frozen=True, eq=False, kw_only=True)
class Outputs:
    """Logits, features, labels and head of N inputs. Row i of every field describes the same input.

    The law: `head(features) == logits`, up to the rounding of the network's dtype. Fields are read-only by
    convention: detectors and calibrators never write into them. Half-precision fields are promoted to float32,
    because a bfloat16 logit has 8 bits and would make ties.

    Args:
        logits: (N, C), float. `-inf` is allowed (a class that cannot be), NaN is not.
        features: (N, D), float: what enters the head.
        labels: (N,), integers in [0, C), or `UNKNOWN` (-1).
        head: the linear layer that turns features into logits.
        taps: further per-row tensors that some detectors ask for (see `Detector.taps`), each (N, ...).
    """

    logits: Float[Tensor, "N C"]
    features: Float[Tensor, "N D"]
    labels: Int[Tensor, " N"]
    head: Head
    taps: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name in ("logits", "features"):
            value = getattr(self, name)
            if value.ndim != 2 or not value.is_floating_point():
                raise ValueError(f"{name} must be floating-point (N, columns), got {value.dtype} {tuple(value.shape)}")
            object.__setattr__(self, name, full_precision(value))
        object.__setattr__(self, "taps", {k: full_precision(v) for k, v in self.taps.items()})
        self._check_shapes()
        for name in ("logits", "features"):
            bad = getattr(self, name).isnan().any(dim=1).nonzero().flatten().tolist()
            if bad:
                raise NaNRows(name, bad, len(self))

    def _check_shapes(self) -> None:
        rows, (classes, width) = len(self.logits), self.head.weight.shape
        expected = {"logits": (rows, classes), "features": (rows, width), "labels": (rows,)}
        for name, shape in expected.items():
            got = tuple(getattr(self, name).shape)
            if got != shape:
                raise ValueError(f"{name} should be {shape} for {rows} rows under a head {(classes, width)}, got {got}")
        for name, tap in self.taps.items():
            if len(tap) != rows:
                raise ValueError(f"tap {name!r} has {len(tap)} rows where the logits have {rows}")
        if self.labels.is_floating_point() or self.labels.dtype == torch.bool:
            raise ValueError(f"labels must be integers, got {self.labels.dtype}")
        if rows and (int(self.labels.min()) < UNKNOWN or int(self.labels.max()) >= classes):
            low, high = int(self.labels.min()), int(self.labels.max())
            raise ValueError(f"labels must lie in [0, {classes}) or be {UNKNOWN} (unknown), but span [{low}, {high}]")

    @classmethod
    def _trusted(cls, **fields: object) -> "Outputs":
        """Builds without checks and without promotion, from parts that were checked when they entered."""
        made = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    @staticmethod
    def from_logits(logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"] | None = None) -> "Outputs":
        """A model known only by its logits: they are the features too, under an identity head.

        >>> Outputs.from_logits(torch.tensor([[2.0, 0.0]])).features
        tensor([[2., 0.]])
        """
        logits = full_precision(logits)
        if labels is None:
            labels = torch.full((len(logits),), UNKNOWN, dtype=torch.int64, device=logits.device)
        return Outputs(logits=logits, features=logits, labels=labels, head=Head.identity(logits.shape[1], logits))

    @classmethod
    def mapped(
        cls,
        *,
        logits: Tensor,
        features: Tensor,
        labels: Tensor,
        head: Head,
        taps: Mapping[str, Tensor] | None = None,
    ) -> "Outputs":
        """Outputs over memory-mapped tensors: nothing is read, checked or promoted until a row is asked for.

        Read them through `batches()` or `rows()`, which promote half precision; the fields themselves keep the
        dtype of the file. Whoever wrote the file has checked the rows.
        """
        made = cls._trusted(logits=logits, features=features, labels=labels, head=head, taps=dict(taps or {}))
        made._check_shapes()
        return made

    def __len__(self) -> int:
        return len(self.logits)

    def __repr__(self) -> str:
        known = int((self.labels != UNKNOWN).sum())
        taps = f", taps={sorted(self.taps)}" if self.taps else ""
        return f"Outputs({len(self)} rows, {self.classes} classes, {self.width} features, {known} labelled{taps})"

    @property
    def classes(self) -> int:
        """C, the number of classes."""
        return self.head.weight.shape[0]

    @property
    def width(self) -> int:
        """D, the number of features."""
        return self.head.weight.shape[1]

    @property
    def predictions(self) -> Int[Tensor, " N"]:
        """The class with the largest logit."""
        return self.logits.argmax(dim=1)

    @property
    def correct(self) -> Tensor:
        """(N,) bool: the prediction equals the label. Rows with an unknown label are False."""
        return self.predictions == self.labels

    def rows(self, index: slice | Sequence[int] | Tensor) -> "Outputs":
        """The rows at `index` (a slice, integers, or a boolean mask), under the same head."""
        if not isinstance(index, slice):
            index = torch.as_tensor(index, device=self.logits.device)
        return Outputs._trusted(
            logits=full_precision(self.logits[index]),
            features=full_precision(self.features[index]),
            labels=self.labels[index],
            head=self.head,
            taps={name: full_precision(tap[index]) for name, tap in self.taps.items()},
        )

    def batches(self, rows: int | None = None) -> Iterator["Outputs"]:
        """Successive blocks of rows, so that one sweep over a store larger than memory is possible.

        Args:
            rows: rows per batch; by default as many as make 64 MiB of float32 logits and features.
        """
        rows = rows or max(64, _BATCH_NUMBERS // (self.classes + self.width))
        for start in range(0, len(self), rows):
            yield self.rows(slice(start, start + rows))

    def select_classes(self, classes: Int[Tensor, " K"]) -> "Outputs":
        """The same rows seen by a classifier that knows only `classes`, in that order: the mask before the softmax.

        Logits and head are cut alike, so every detector sees the masked model; labels become positions in
        `classes`, or `UNKNOWN` where the true class is not among them.
        """
        classes = torch.as_tensor(classes, dtype=torch.int64, device=self.logits.device)
        if classes.unique().numel() != classes.numel():
            raise ValueError("a class mask must not name a class twice")
        lookup = torch.full((self.classes + 1,), UNKNOWN, dtype=torch.int64, device=self.labels.device)
        lookup[classes] = torch.arange(len(classes), device=self.labels.device)
        return Outputs._trusted(
            logits=full_precision(self.logits[:, classes]),
            features=self.features,
            labels=lookup[self.labels],  # UNKNOWN (-1) reads the last entry, which stays UNKNOWN
            head=self.head.select(classes),
            taps=self.taps,
        )

    def with_labels(self, labels: Int[Tensor, " N"]) -> "Outputs":
        """The same rows under other labels."""
        made = Outputs._trusted(**{**vars(self), "labels": labels.to(self.labels.device)})
        made._check_shapes()
        return made

    def with_taps(self, taps: Mapping[str, Tensor]) -> "Outputs":
        """The same rows with these taps beside those they have."""
        more = {name: full_precision(tap) for name, tap in taps.items()}
        made = Outputs._trusted(**{**vars(self), "taps": {**self.taps, **more}})
        made._check_shapes()
        return made

    def to(self, *args: object, **kwargs: object) -> "Outputs":
        """Moves to a device or casts the floating-point fields, with the arguments of `torch.Tensor.to`."""

        def move(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                return tensor.to(*args, **kwargs)  # pyright: ignore
            return tensor.to(torch.empty(0).to(*args, **kwargs).device)  # pyright: ignore

        return Outputs._trusted(
            logits=move(self.logits),
            features=move(self.features),
            labels=self.labels.to(move(self.logits[:0]).device),
            head=self.head.to(*args, **kwargs),
            taps={name: move(tap) for name, tap in self.taps.items()},
        )

    @staticmethod
    def cat(parts: Sequence["Outputs"]) -> "Outputs":
        """The rows of all parts, one after another. They must share one head."""
        if not parts:
            raise ValueError("nothing to concatenate")
        first = parts[0]
        if any(part.head.weight.shape != first.head.weight.shape for part in parts):
            raise ValueError("outputs under different heads cannot be concatenated")
        return Outputs._trusted(
            logits=torch.cat([p.logits for p in parts]),
            features=torch.cat([p.features for p in parts]),
            labels=torch.cat([p.labels for p in parts]),
            head=first.head,
            taps={name: torch.cat([p.taps[name] for p in parts]) for name in first.taps},
        )


def full_precision(tensor: Tensor) -> Tensor:
    """The tensor itself, or its float32 copy if it is in half precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
