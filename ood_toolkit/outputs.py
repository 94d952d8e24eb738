"""What one forward pass leaves behind: the only thing that detectors and calibrators ever see."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.head import Head as Head
from ood_toolkit.head import require_tensor
from ood_toolkit.reading import Column, Reading
from ood_toolkit.reading import full_precision as full_precision

UNKNOWN = -1
"""The label of a row whose class is not known, or is none of the head's classes."""

_BATCH_NUMBERS = 1 << 24
"""How many numbers (logits, features and the widest tap) `Outputs.batches` puts into one batch: 64 MiB of float32."""


class NaNRows(ValueError):
    """Some rows hold NaN; `rows` says which."""

    def __init__(self, what: str, rows: list[int], total: int) -> None:
        super().__init__(f"{what} hold NaN in {len(rows)} of {total} rows, first {rows[:5]}")
        self.what = what
        self.rows = rows


@dataclass(frozen=True, eq=False, kw_only=True)
class Outputs:
    """Logits, features, labels and head of N inputs. Row i of every field describes the same input.

    The law: `head(features) == logits`, up to the rounding of the network's dtype. Fields are read-only by
    convention: detectors and calibrators never write into them. Half-precision fields are promoted to float32,
    because a bfloat16 logit has 8 bits and would make ties; logits, features and head in different dtypes come to the
    widest of them.

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
        for name in ("logits", "features", "labels"):
            require_tensor(getattr(self, name), name)
        if not isinstance(self.head, Head):
            raise TypeError(f"head must be Head(weight, bias), got {type(self.head).__name__}")
        for name in ("logits", "features"):
            value = getattr(self, name)
            if value.ndim != 2 or not value.is_floating_point():
                raise ValueError(f"{name} must be floating-point (N, columns), got {value.dtype} {tuple(value.shape)}")
            object.__setattr__(self, name, full_precision(value))
        self._share_one_dtype()
        object.__setattr__(self, "taps", {k: full_precision(v) for k, v in self.taps.items()})
        self._check_shapes()
        # an exported graph cannot ask what a number is
        for name in () if torch.compiler.is_compiling() else ("logits", "features"):
            bad = getattr(self, name).isnan().any(dim=1).nonzero().flatten().tolist()
            if bad:
                raise NaNRows(name, bad, len(self))

    def _share_one_dtype(self) -> None:
        """Brings logits, features and head to the widest of their dtypes, so that they can be multiplied."""
        widest = torch.promote_types(self.logits.dtype, self.features.dtype)
        widest = torch.promote_types(widest, self.head.weight.dtype)
        for name in ("logits", "features"):
            object.__setattr__(self, name, getattr(self, name).to(widest))
        if self.head.weight.dtype != widest:
            object.__setattr__(self, "head", self.head.to(widest))

    def _check_shapes(self) -> None:
        rows, (classes, width) = len(self), self.head.weight.shape
        expected = {"logits": (rows, classes), "features": (rows, width), "labels": (rows,)}
        for name, shape in expected.items():
            got = tuple(getattr(self, name).shape)
            if got != shape:
                raise ValueError(f"{name} should be {shape} for {rows} rows under a head {(classes, width)}, got {got}")
        for name, tap in self.taps.items():
            if len(tap) != rows:
                raise ValueError(f"tap {name!r} has {len(tap)} rows where the logits have {rows}")
        self._check_labels()

    def _check_labels(self) -> None:
        rows, classes = len(self), self.classes
        if self.labels.shape != (rows,):
            raise ValueError(f"labels should be {(rows,)} for {rows} rows, got {tuple(self.labels.shape)}")
        if self.labels.is_floating_point() or self.labels.dtype == torch.bool:
            raise ValueError(f"labels must be integers, got {self.labels.dtype}")
        if torch.compiler.is_compiling():
            return
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
        require_tensor(logits, "logits")
        if logits.ndim != 2:
            raise ValueError(f"logits must be (N, classes), got {tuple(logits.shape)}; one row is logits[None]")
        if not logits.is_floating_point():
            raise ValueError(f"logits must be floating-point, got {logits.dtype}")
        logits = full_precision(logits)
        if labels is None:
            labels = torch.full((len(logits),), UNKNOWN, dtype=torch.int64, device=logits.device)
        return Outputs(logits=logits, features=logits, labels=labels, head=Head.identity(logits.shape[1], logits))

    @staticmethod
    def mapped(
        *,
        logits: Tensor,
        features: Tensor,
        labels: Tensor,
        head: Head,
        taps: Mapping[str, Tensor] | None = None,
        owner: object = None,
    ) -> "Outputs":
        """Outputs over memory-mapped tensors: nothing is read, checked or promoted until a row is asked for.

        Selected rows, class masks, calibrated logits and moves to a device stay promises: `batches()` keeps them
        for one block at a time, reading only the fields that are asked for, so a sweep over a store larger than
        memory is possible. A field of all rows, untouched, is the mapped tensor itself in the dtype of the file;
        any other is read, promoted, when it is asked for. Whoever wrote the file has checked the rows.

        Args:
            logits: (N, C).
            features: (N, D).
            labels: (N,), in memory.
            head: in memory.
            taps: each (N, ...).
            owner: kept alive as long as these outputs, or any made of them, are: the store's lease.
        """
        columns = {"logits": logits, "features": features, **{_TAP + name: tap for name, tap in (taps or {}).items()}}
        fields = {name: Column(column) for name, column in columns.items()}
        reading = Reading(range(len(logits)), fields, logits.device, full_precision(logits[:0]).dtype, owner)
        made = _Mapped.over(reading, labels=labels, head=head)
        made._check_shapes()
        return made

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def device(self) -> torch.device:
        """Where the rows are, or will be once they are read."""
        return self.logits.device

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
            rows: rows per batch; by default as many as make 64 MiB of float32 logits, features and widest tap.
        """
        rows = rows or max(64, _BATCH_NUMBERS // (self.classes + self.width + self._widest_tap()))
        for start in range(0, len(self), rows):
            yield self.rows(slice(start, start + rows))

    def _widest_tap(self) -> int:
        return max((tap.shape[1:].numel() for tap in self.taps.values()), default=0)

    def select_classes(self, classes: Int[Tensor, " K"]) -> "Outputs":
        """The same rows seen by a classifier that knows only `classes`, in that order: the mask before the softmax.

        Logits and head are cut alike, so every detector sees the masked model; labels become positions in
        `classes`, or `UNKNOWN` where the true class is not among them.
        """
        classes = torch.as_tensor(classes, dtype=torch.int64, device=self.labels.device)
        if classes.unique().numel() != classes.numel():
            raise ValueError("a class mask must not name a class twice")
        if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < self.classes:
            low, high = int(classes.min()), int(classes.max())
            raise ValueError(f"a class mask must lie in [0, {self.classes}), but spans [{low}, {high}]")
        lookup = torch.full((self.classes + 1,), UNKNOWN, dtype=torch.int64, device=self.labels.device)
        lookup[classes] = torch.arange(len(classes), device=self.labels.device)
        labels = lookup[self.labels]  # UNKNOWN (-1) reads the last entry, which stays UNKNOWN
        return self._cut(classes, labels, self.head.select(classes))

    def _cut(self, classes: Int[Tensor, " K"], labels: Int[Tensor, " N"], head: Head) -> "Outputs":
        logits = full_precision(self.logits[:, classes.to(self.logits.device)])
        return Outputs._trusted(logits=logits, features=self.features, labels=labels, head=head, taps=self.taps)

    def through(self, calibrate: Callable[[Tensor], Tensor]) -> "Outputs":
        """The same rows with calibrated logits, which are the features too, under an identity head. No taps.

        Args:
            calibrate: (rows, C) logits to (rows, C) calibrated ones, row by row.
        """
        return Outputs.from_logits(calibrate(full_precision(self.logits)), self.labels)

    def with_labels(self, labels: Int[Tensor, " N"]) -> "Outputs":
        """The same rows under other labels."""
        made = self._with(labels=labels.to(self.labels.device))
        made._check_labels()
        return made

    def _with(self, **fields: object) -> "Outputs":
        return Outputs._trusted(**{**vars(self), **fields})

    def with_taps(self, taps: Mapping[str, Tensor]) -> "Outputs":
        """The same rows with these taps beside those they have."""
        more = {name: full_precision(require_tensor(tap, f"tap {name!r}")) for name, tap in taps.items()}
        made = Outputs._trusted(
            logits=self.logits, features=self.features, labels=self.labels, head=self.head, taps={**self.taps, **more}
        )
        made._check_shapes()
        return made

    def choose_taps(self, chosen: Mapping[str, tuple[str, Sequence[Callable[[Tensor], Tensor]]]]) -> "Outputs":
        """The same rows with some of their taps, maybe under other names.

        Args:
            chosen: by the new name: the name a tap has now, and what is done to it, row by row.
        """
        return self._with(taps={name: _after(steps, self.taps[tap]) for name, (tap, steps) in chosen.items()})

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
        if len({part.head.weight.dtype for part in parts}) > 1:
            parts = [part.to(torch.float64) for part in parts]
            first = parts[0]
        return Outputs._trusted(
            logits=torch.cat([p.logits for p in parts]),
            features=torch.cat([p.features for p in parts]),
            labels=torch.cat([p.labels for p in parts]),
            head=first.head,
            taps={name: torch.cat([p.taps[name] for p in parts]) for name in first.taps},
        )


def _after(steps: Sequence[Callable[[Tensor], Tensor]], tap: Tensor) -> Tensor:
    for step in steps:
        tap = step(tap)
    return tap


_TAP = "tap:"


class _Mapped(Outputs):
    """Outputs that stay in their files until a field of them is asked for."""

    reading: Reading

    def __new__(cls, **fields: object) -> "Outputs":
        """Whoever replaces a field of mapped outputs gets plain ones."""
        return Outputs(**fields)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def over(reading: Reading, *, labels: Tensor, head: Head) -> "_Mapped":
        made = object.__new__(_Mapped)
        for name, value in {"reading": reading, "labels": labels, "head": head, "_read": {}}.items():
            object.__setattr__(made, name, value)
        return made

    def _field(self, name: str) -> Tensor:
        kept: dict[str, Tensor] = vars(self)["_read"]
        found = kept[name] if name in kept else self.reading.read(name)
        if found.numel() <= _BATCH_NUMBERS:  # a block is read once, however often it is asked for
            kept[name] = found
        return found

    @property
    def logits(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._field("logits")

    @property
    def features(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._field("features")

    @property
    def taps(self) -> Mapping[str, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _Taps(self)

    @property
    def device(self) -> torch.device:
        return self.reading.device

    @property
    def predictions(self) -> Int[Tensor, " N"]:
        """The class with the largest logit."""
        if "predictions" not in (kept := vars(self)["_read"]):
            found = [batch.logits.argmax(dim=1) for batch in self.batches()]
            kept["predictions"] = torch.cat(found) if found else torch.empty_like(self.labels)
        return kept["predictions"]

    def __len__(self) -> int:
        return len(self.reading)

    def rows(self, index: slice | Sequence[int] | Tensor) -> Outputs:
        if not isinstance(index, slice):
            index = torch.as_tensor(index)
            index = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
        here = index if isinstance(index, slice) else index.to(self.labels.device)
        return _Mapped.over(self.reading.select(index), labels=self.labels[here], head=self.head)

    def through(self, calibrate: Callable[[Tensor], Tensor]) -> Outputs:
        if len(self) * self.classes <= _BATCH_NUMBERS:
            return super().through(calibrate)  # once, and not for every sweep
        logits = self.reading.columns["logits"].then(calibrate)
        reading = self.reading.but(columns={"logits": logits, "features": logits})
        return _Mapped.over(reading, labels=self.labels, head=Head.identity(self.classes, self.head.weight))

    def to(self, *args: object, **kwargs: object) -> Outputs:
        def move(rows: Tensor) -> Tensor:
            return rows.to(*args, **kwargs)  # pyright: ignore

        before = torch.empty(0, dtype=self.reading.dtype, device=self.device)
        after, head = move(before), self.head.to(*args, **kwargs)
        if after is before and head.weight.dtype == self.head.weight.dtype:
            return self  # all rows stay the mapped tensor itself
        columns = {name: column.then(move) for name, column in self.reading.columns.items()}
        reading = self.reading.but(columns=columns, device=after.device, dtype=after.dtype)
        return _Mapped.over(reading, labels=self.labels.to(after.device), head=head)

    def _cut(self, classes: Int[Tensor, " K"], labels: Int[Tensor, " N"], head: Head) -> Outputs:
        columns = self.reading.columns
        cut = columns["logits"].then(lambda logits: logits[:, classes])
        return _Mapped.over(self.reading.but(columns={**columns, "logits": cut}), labels=labels, head=head)

    def choose_taps(self, chosen: Mapping[str, tuple[str, Sequence[Callable[[Tensor], Tensor]]]]) -> Outputs:
        columns = {name: column for name, column in self.reading.columns.items() if not name.startswith(_TAP)}
        for name, (tap, steps) in chosen.items():
            column = self.reading.columns[_TAP + tap]
            columns[_TAP + name] = Column(column.values, (*column.steps, *steps))
        return _Mapped.over(self.reading.but(columns=columns), labels=self.labels, head=self.head)

    def _with(self, **fields: Any) -> Outputs:
        return _Mapped.over(self.reading, labels=fields["labels"], head=self.head)

    def _widest_tap(self) -> int:
        columns = self.reading.columns.items()
        return max((c.width for name, c in columns if name.startswith(_TAP)), default=0)


class _Taps(Mapping[str, Tensor]):
    """The taps of mapped outputs; each is read when it is asked for."""

    def __init__(self, outputs: _Mapped) -> None:
        self._outputs = outputs

    def __getitem__(self, name: str) -> Tensor:
        if _TAP + name not in self._outputs.reading.columns:
            raise KeyError(name)
        return self._outputs._field(_TAP + name)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(_TAP) for name in self._outputs.reading.columns if name.startswith(_TAP))

    def __len__(self) -> int:
        return sum(1 for _ in self)
