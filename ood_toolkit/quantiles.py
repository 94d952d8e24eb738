"""Exact quantiles of more rows than memory holds."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ood_toolkit.outputs import Outputs, full_precision

_HISTOGRAM_BINS = 1 << 20
"""Upper bound for the bins of one histogram over all columns, and for the numbers counted at once: fits a cache."""


def quantile(
    batches: Outputs | Sequence[Outputs],
    q: float | Sequence[float],
    *,
    per_column: bool = False,
    of: Callable[[Outputs], Tensor] = lambda batch: batch.features,
) -> Tensor:
    """Exact quantiles over all rows, in memory that does not grow with the rows: `numpy.quantile`, linear.

    Radix selection: a histogram of the leading bits of the values tells which prefix holds the wanted rank, the next
    sweep looks at the bits that follow that prefix. float32 takes two sweeps, four for a thousand columns.

    Args:
        batches: outputs, or a sequence of them, which is read several times.
        q: one quantile in [0, 1], or several.
        per_column: one quantile for each column of the values, instead of one over all numbers.
        of: the values of a batch, (rows, ...) float without NaN; its features by default.

    Returns:
        () or (columns,), after a leading axis (len(q),) where `q` is a sequence. Interpolated in float64, returned in
        the dtype of the values.
    """
    levels = [float(q)] if isinstance(q, int | float) else [float(level) for level in q]
    if not levels or not all(0 <= level <= 1 for level in levels):
        raise ValueError(f"a quantile must lie in [0, 1], got {q}")

    def sweep() -> Iterator[Tensor]:
        for part in [batches] if isinstance(batches, Outputs) else batches:
            for values in map(of, part.batches()):
                table = full_precision(values.flatten(1) if per_column else values.reshape(-1, 1))
                yield from table.split(max(1, _HISTOGRAM_BINS // table.shape[1]))

    first = next(sweep(), None)
    if first is None:
        raise ValueError("a quantile needs at least one row, got none")
    ranks = [_Rank(level) for level in levels]
    for shift, bits in _digits(first.dtype, first.shape[1]):
        for values in sweep():
            keys = _ordered_integers(values)
            for rank in ranks:
                rank.see(keys, shift, bits)
        for rank in ranks:
            rank.descend(bits)
    found = [rank.value(first.dtype) for rank in ranks]
    answer = torch.stack(found) if per_column else torch.cat(found)
    return answer[0] if isinstance(q, int | float) else answer


class _Rank:
    """Finds the value at one level of every column, digit by digit from the most significant one."""

    def __init__(self, level: float) -> None:
        self.level = level
        self.position: float | None = None  # known once the rows are counted
        self.prefix: Tensor | None = None  # (columns,): the leading digits of the value, once known
        self.left: Tensor | None = None  # (columns,): its rank among the values under that prefix
        self.histogram: Tensor | None = None  # (columns, bins): values by their next digit
        self.above: Tensor | None = None  # (columns,): the smallest key beyond the prefix
        self.following: Tensor | None = None  # (columns,): the key of the next rank

    def see(self, keys: Tensor, shift: int, bits: int) -> None:
        """Counts the digit of `bits` bits at `shift` among the keys that start with the prefix."""
        bins = 1 << bits
        if self.prefix is None:
            digit = (keys >> shift) + bins // 2  # signed at the top
        else:
            parents, prefix = keys >> (shift + bits), self.prefix.to(keys.dtype)
            # comparisons as numbers: filling where a mask says so takes ten times as long
            other = torch.ne(parents, prefix, out=torch.empty_like(keys))
            digit = ((keys >> shift) & (bins - 1)).add_(other, alpha=bins).clamp_max_(bins)  # the last bin is waste
            if shift == 0:
                within = torch.le(parents, prefix, out=other)
                # the smallest integer less 1 is the largest
                beyond = torch.maximum(keys, torch.iinfo(keys.dtype).min - within).amin(dim=0)
                self.above = beyond if self.above is None else torch.minimum(self.above, beyond)
        columns = keys.shape[1]
        digit += torch.arange(columns, dtype=keys.dtype, device=keys.device) * (bins + 1)
        counted = torch.bincount(digit.flatten(), minlength=columns * (bins + 1)).view(columns, bins + 1)[:, :bins]
        self.histogram = counted if self.histogram is None else self.histogram + counted

    def descend(self, bits: int) -> None:
        """Appends the digit under which the rank lies."""
        assert self.histogram is not None
        reached = self.histogram.cumsum(dim=1)
        if self.prefix is None or self.left is None:
            self.position = self.level * (int(reached[0, -1]) - 1)
            self.left = torch.full_like(reached[:, 0], int(self.position))
        digit = (reached <= self.left.unsqueeze(1)).sum(dim=1, keepdim=True)
        counts = self.histogram.gather(1, digit)
        self.left = self.left - (reached.gather(1, digit) - counts).squeeze(1)
        start = -(1 << (bits - 1)) if self.prefix is None else self.prefix << bits
        self.prefix = digit.squeeze(1) + start
        self.following = self._next_key(digit, self.left + 1 < counts.squeeze(1))
        self.histogram = None

    def _next_key(self, digit: Tensor, same: Tensor) -> Tensor:
        """(columns,) keys of the rank that follows: the same bin, a later one, or beyond the prefix."""
        assert self.histogram is not None
        assert self.prefix is not None
        bins = torch.arange(self.histogram.shape[1], device=digit.device)
        later = (self.histogram > 0) & (bins > digit)
        step = later.to(torch.uint8).argmax(dim=1) - digit.squeeze(1)
        beyond = self.prefix if self.above is None else self.above
        return torch.where(same, self.prefix, torch.where(later.any(dim=1), self.prefix + step, beyond))

    def value(self, dtype: torch.dtype) -> Tensor:
        """(columns,) values, between those of the two ranks around the position."""
        assert self.position is not None
        assert self.prefix is not None
        assert self.following is not None
        lower, upper = (_values_of(keys, dtype) for keys in (self.prefix, self.following))
        weight = self.position - int(self.position)
        return (torch.lerp(lower, upper, weight) if weight else lower).to(dtype)


def _digits(dtype: torch.dtype, columns: int) -> Iterator[tuple[int, int]]:
    """Shift and number of bits of each digit of a key, from the most significant one."""
    bits = min(16, max(4, (_HISTOGRAM_BINS // columns).bit_length() - 1))
    shift = torch.finfo(dtype).bits
    while shift > 0:
        bits = min(bits, shift)
        shift -= bits
        yield shift, bits


def _ordered_integers(values: Tensor) -> Tensor:
    """Signed integers in the order of the floating-point `values`: the bits, with those of negative numbers flipped."""
    keys = values.contiguous().view(torch.int64 if values.dtype == torch.float64 else torch.int32)
    return keys ^ ((keys >> (torch.iinfo(keys.dtype).bits - 1)) & torch.iinfo(keys.dtype).max)


def _values_of(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The float64 values that have these keys under `_ordered_integers`."""
    keys = keys.to(torch.int64 if dtype == torch.float64 else torch.int32)
    return torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys).view(dtype).double()
