"""Exact quantiles of more rows than memory holds."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ood_toolkit.outputs import Outputs, full_precision

_HISTOGRAM_BINS = 1 << 20
"""Upper bound for the bins of one histogram over all columns, and for the numbers counted at once: fits a cache."""

_SORTED_NUMBERS = 1 << 24
"""Upper bound for the numbers sorted at once: 64 MiB of float32."""

_SORTED_GROUPS = 8
"""Sweeps that sorting the columns may take."""

_SAMPLED_NUMBERS = 1 << 20
"""Numbers of the sample. Up to 1 % of all numbers then lie where it says that a quantile is."""

_Sweep = Callable[[], Iterator[Tensor]]


def quantile(
    batches: Outputs | Sequence[Outputs],
    q: float | Sequence[float],
    *,
    per_column: bool = False,
    of: Callable[[Outputs], Tensor] = lambda batch: batch.features,
) -> Tensor:
    """Exact quantiles over all rows, in memory that does not grow with the rows: `numpy.quantile`, linear.

    On a CPU, NumPy sorts a few columns at a time, in up to eight sweeps, or the numbers of a narrow span that a sample
    says the quantile lies in. Else radix selection: a histogram of the leading bits of the values tells which prefix
    holds the wanted rank, the next sweep looks at the bits that follow that prefix. float32 takes two sweeps, four for
    a thousand columns.

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

    parts: Sequence[Outputs] = [batches] if isinstance(batches, Outputs) else batches

    def sweep() -> Iterator[Tensor]:
        for part in parts:
            for values in map(of, part.batches()):
                table = full_precision(values.detach().flatten(1) if per_column else values.detach().reshape(-1, 1))
                yield from table.split(max(1, _HISTOGRAM_BINS // table.shape[1]))

    first = next(sweep(), None)
    if first is None:
        raise ValueError("a quantile needs at least one row, got none")
    row = next(of(part.rows(slice(0, 1))) for part in parts if len(part))
    found = _fastest(sweep, levels, sum(map(len, parts)) * row.numel(), first)
    answer = torch.stack(found) if per_column else torch.cat(found)
    return answer[0] if isinstance(q, int | float) else answer


def _fastest(sweep: _Sweep, levels: list[float], numbers: int, first: Tensor) -> list[Tensor]:
    """(columns,) quantiles at each level.

    Args:
        sweep: gives all values, in tables (rows, columns).
        levels: what to find.
        numbers: about how many values there are.
        first: the first table.
    """
    if first.device.type == "cpu":
        group = _SORTED_NUMBERS * first.shape[1] // numbers
        if group and first.shape[1] <= _SORTED_GROUPS * group:
            return _by_sorting(sweep, levels, first.shape[1], group)
        if first.shape[1] == 1:
            found = _by_sample(sweep, levels, numbers)
            if found is not None:
                return found
    return _by_digits(sweep, levels, first)


def _by_sorting(sweep: _Sweep, levels: list[float], columns: int, group: int) -> list[Tensor]:
    """Sorts `group` columns at a time. AVX-512 sorts a million numbers in 3 ms."""
    found: list[list[Tensor]] = [[] for _ in levels]
    for start in range(0, columns, group):
        table = torch.cat([values[:, start : start + group].T for values in sweep()], dim=1).contiguous()
        table.numpy().sort(axis=1)
        for level, values in zip(levels, found, strict=True):
            position = level * (table.shape[1] - 1)
            upper = min(int(position) + 1, table.shape[1] - 1)
            values.append(_between(table[:, int(position)], table[:, upper], position, table.dtype))
    return [torch.cat(values) for values in found]


def _by_sample(sweep: _Sweep, levels: list[float], numbers: int) -> list[Tensor] | None:
    """Of a single column, in two sweeps; None where the sample misleads or too many values are alike but not equal."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for values in sweep():
        chosen = math.ceil(len(values) * _SAMPLED_NUMBERS / max(numbers, _SAMPLED_NUMBERS))
        drawn.append(values.flatten()[torch.randint(len(values), (chosen,), generator=generator)])
    sample = np.sort(torch.cat(drawn).numpy())
    spans = [_Span(level, sample) for level in levels]
    dtype = drawn[0].dtype
    for values in sweep():
        for span in spans:
            span.see(values.numpy().ravel())
            if span.kept > _SORTED_NUMBERS // 4:
                return None
    found = [span.value(dtype) for span in spans]
    return None if any(value is None for value in found) else [value for value in found if value is not None]


class _Span:
    """Two numbers between which the quantile at a level lies unless one sample in 10⁸ misleads; all values there."""

    def __init__(self, level: float, sample: NDArray[Any]) -> None:
        middle = level * len(sample)
        slack = 6 * math.sqrt(middle * (1 - level)) + 8  # deviations of a binomial count, and what rounding may move
        low, high = math.floor(middle - slack), math.ceil(middle + slack)
        self.level = level
        self.low = sample[low] if low >= 0 else -np.inf
        self.high = sample[high] if high < len(sample) else np.inf
        self.total = self.under = self.lowest = self.highest = self.kept = 0
        self.inside: list[NDArray[Any]] = []

    def see(self, values: NDArray[Any]) -> None:
        """Counts what is below and at either end, keeps what is between."""
        self.total += len(values)
        self.under += int(np.count_nonzero(values < self.low))
        self.lowest += int(np.count_nonzero(values == self.low))
        if self.low < self.high:
            self.highest += int(np.count_nonzero(values == self.high))
        self.inside.append(values[(values > self.low) & (values < self.high)])
        self.kept += len(self.inside[-1])

    def value(self, dtype: torch.dtype) -> Tensor | None:
        """(1,) the quantile, or None if it lies outside."""
        between = np.sort(np.concatenate(self.inside))
        position = self.level * (self.total - 1)
        ranks = np.array([int(position), min(int(position) + 1, self.total - 1)]) - self.under
        ends = np.cumsum([self.lowest, len(between), self.highest])
        if ranks[0] < 0 or ranks[1] >= ends[-1]:
            return None
        known = np.array([self.low, self.high])
        pair = [known[0] if r < ends[0] else between[r - ends[0]] if r < ends[1] else known[1] for r in ranks]
        lower, upper = torch.tensor(np.array(pair, dtype=between.dtype)).unsqueeze(1)
        return _between(lower, upper, position, dtype)


def _between(lower: Tensor, upper: Tensor, position: float, dtype: torch.dtype) -> Tensor:
    """What lies at a fractional rank between the values of the two whole ones."""
    weight = position - int(position)
    return (torch.lerp(lower.double(), upper.double(), weight) if weight else lower).to(dtype)


def _by_digits(sweep: _Sweep, levels: list[float], first: Tensor) -> list[Tensor]:
    """Radix selection."""
    ranks = [_Rank(level) for level in levels]
    for shift, bits in _digits(first.dtype, first.shape[1]):
        for values in sweep():
            keys = _ordered_integers(values)
            for rank in ranks:
                rank.see(keys, shift, bits)
        for rank in ranks:
            rank.descend(bits)
    return [rank.value(first.dtype) for rank in ranks]


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
        return _between(lower, upper, self.position, dtype)


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
