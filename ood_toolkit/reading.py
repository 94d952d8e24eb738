"""Rows of memory-mapped columns that are read when they are asked for, and not before."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

BLOCK_NUMBERS = 1 << 24
"""How many numbers are read at once: 64 MiB of float32."""


def full_precision(tensor: Tensor) -> Tensor:
    """The tensor itself, or its float32 copy if it is in half precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@dataclass(frozen=True, eq=False)
class Column:
    """A mapped tensor, and what is done to its rows once they are read."""

    values: Tensor
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return self.values.shape[1:].numel()

    def then(self, step: Callable[[Tensor], Tensor]) -> "Column":
        """The same column with one more step."""
        return Column(self.values, (*self.steps, step))

    def read(self, index: range | Tensor) -> Tensor:
        """Some rows, in full precision, after all steps."""
        where = slice(index.start, index.stop, index.step) if isinstance(index, range) else index
        found = full_precision(self.values[where])
        for step in self.steps:
            found = step(found)
        return found


@dataclass(frozen=True, eq=False)
class Reading:
    """Which rows of which columns are meant.

    Args:
        index: row numbers of the file.
        columns: by name.
        device: where the numbers are after all steps.
        dtype: that of logits after all steps.
        owner: kept alive as long as somebody may read.
        untouched: nothing was chosen and nothing is to be done: a field is the mapped tensor itself.
    """

    index: range | Tensor
    columns: Mapping[str, Column]
    device: torch.device
    dtype: torch.dtype
    owner: object = None
    untouched: bool = True

    def __len__(self) -> int:
        return len(self.index)

    def read(self, name: str) -> Tensor:
        """The rows of a column, in blocks where they are many, so that nothing but the result is large."""
        column = self.columns[name]
        if self.untouched:
            return column.values
        step = max(64, BLOCK_NUMBERS // max(1, column.width))
        if len(self) <= step:
            return self._block(column, slice(0, None))
        found = self._block(column, slice(0, 1))
        found = found.new_empty(len(self), *found.shape[1:])
        for start in range(0, len(self), step):
            found[start : start + step] = self._block(column, slice(start, start + step))
        return found

    def _block(self, column: Column, rows: slice) -> Tensor:
        return column.read(_part(self.index, rows))

    def select(self, rows: slice | Tensor) -> "Reading":
        """Some of these rows: a slice, or integers."""
        return self.but(index=_part(self.index, rows if isinstance(rows, slice) else rows.cpu()))

    def but(self, **changes: Any) -> "Reading":
        """The same with some fields changed."""
        return replace(self, untouched=False, **changes)


def _part(index: range | Tensor, rows: slice | Tensor) -> range | Tensor:
    """The index of some of the indexed rows; successive rows stay a range, which copies nothing."""
    if isinstance(index, Tensor):
        return index[rows]
    if isinstance(rows, slice):
        return index[rows]
    rows = torch.where(rows < 0, rows + len(index), rows)
    if len(rows) and bool((rows.diff() == 1).all()):
        return index[int(rows[0]) : int(rows[-1]) + 1]
    return rows * index.step + index.start
