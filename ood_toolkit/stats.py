"""Maths that more than one detector needs: moments, whitening, distances, neighbours.

The only room that chunks over rows or goes to float64 for precision.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.distributed import summed
from ood_toolkit.outputs import Outputs, full_precision

_CHUNK_NUMBERS = 1 << 24
"""Upper bound for the numbers in one temporary block: 64 MiB of float32, 128 MiB of float64."""

_SHIFT_ROWS = 1024
"""Rows whose mean is near enough to that of all, for sums about it."""

_BLOCK_NUMBERS = 1 << 21
"""How many numbers (logits, features, taps) a block of rows holds: 8 MiB of float32, so that what is made of it stays
in a CPU's cache. Entropy takes twice as long for a row in blocks of 64 MiB."""

_ACCELERATOR_BLOCK_NUMBERS = 1 << 24
"""The same on other devices, which are only busy with more."""

_BANK_ROWS = 1 << 14
"""Bank rows that one matrix product of `nearest` compares."""

_CANCELLED = 1e-2
"""Below this fraction of ‖a‖², a squared distance in float32 from ‖a‖² + ‖b‖² − 2ab may be off by more than 1e-5."""

_HISTOGRAM_BINS = 1 << 20
"""Upper bound for the bins of one histogram over all columns, and for the numbers counted at once: fits a cache."""


@dataclass(frozen=True)
class Moments:
    """First and second moments of labelled rows, gathered in one sweep in float64.

    Args:
        counts: (C,) rows of each class.
        class_means: (C, D); NaN for a class without a row.
        mean: (D,) over all counted rows.
        within: (D, D) shared covariance: mean outer product of rows minus their class mean (divided by N).
        total: (D, D) covariance about the grand mean (divided by N).
    """

    counts: Int[Tensor, " C"]
    class_means: Float[Tensor, "C D"]
    mean: Float[Tensor, " D"]
    within: Float[Tensor, "D D"]
    total: Float[Tensor, "D D"]


def blocks(outputs: Outputs, rows: int | None = None) -> Iterator[Outputs]:
    """Successive blocks of rows for a sweep: `outputs.batches` of a size at which arithmetic is fastest.

    Args:
        outputs: what to go through.
        rows: rows of a block; by default as many as make 8 MiB of float32, 64 MiB on a GPU.
    """
    if rows is None and len(outputs):
        first = outputs.rows(slice(0, 1))
        width = first.logits.numel() + first.features.numel() + sum(tap.numel() for tap in first.taps.values())
        numbers = _BLOCK_NUMBERS if first.logits.device.type == "cpu" else _ACCELERATOR_BLOCK_NUMBERS
        rows = max(64, numbers // width)
    yield from outputs.batches(rows)


def moments(
    train: Outputs,
    *,
    transform: Callable[[Tensor], Tensor] | None = None,
    groups: Callable[[Outputs], Tensor] | None = None,
) -> Moments:
    """Moments of the labelled rows of `train`, in one sweep; memory does not grow with the number of rows.

    Ranks of a run share the sweep, where the runner has said so (`ood_toolkit.distributed.sharing`).

    Args:
        train: outputs whose labels are known, at least for some rows.
        transform: what to do to the features first, e.g. `l2_normalise`; the identity by default.
        groups: the class of each row, (N,) integers; by default its label. Rows with a negative group are left out.
    """
    if not len(train):
        raise ValueError("fitting needs labelled training rows, but there are none")
    # sums about a nearby point: raw second moments would cancel
    near, _ = _counted(train.rows(slice(0, _SHIFT_ROWS)), transform, groups)
    shift = near.mean(dim=0).double() if len(near) else near.new_zeros(near.shape[1]).double()
    counts, sums, scatter = summed(_MomentSums(train.classes, shift, transform, groups), train)
    total_rows = int(counts.sum())
    if total_rows == 0:
        raise ValueError("fitting needs labelled training rows, but there are none")
    scatter = scatter.triu() + scatter.triu(1).T
    means = sums / counts.unsqueeze(1)
    centre = sums.sum(dim=0) / total_rows
    seen = counts > 0
    weighted = means[seen] * counts[seen].unsqueeze(1)
    return Moments(
        counts=counts,
        class_means=means + shift,
        mean=centre + shift,
        within=(scatter - weighted.T @ means[seen]) / total_rows,
        total=scatter / total_rows - torch.outer(centre, centre),
    )


@dataclass(frozen=True, eq=False)
class _MomentSums:
    """Counts, sums and upper products of rows about a point: what ranks can add up."""

    classes: int
    shift: Float[Tensor, " D"]
    transform: Callable[[Tensor], Tensor] | None
    groups: Callable[[Outputs], Tensor] | None

    def __call__(self, batches: Iterator[Outputs]) -> list[Tensor]:
        width = len(self.shift)
        counts = torch.zeros(self.classes, dtype=torch.int64, device=self.shift.device)
        sums, scatter = self.shift.new_zeros(self.classes, width), self.shift.new_zeros(width, width)
        for batch in batches:
            rows, group = _counted(batch, self.transform, self.groups)
            rows = rows - self.shift  # float64, because `shift` is
            counts += torch.bincount(group, minlength=self.classes)
            sums.index_add_(0, group, rows)
            _add_upper_products(scatter, rows)
        return [counts, sums, scatter]


def _counted(
    batch: Outputs, transform: Callable[[Tensor], Tensor] | None, groups: Callable[[Outputs], Tensor] | None
) -> tuple[Float[Tensor, "K D"], Int[Tensor, " K"]]:
    """The rows that have a group, transformed, and their groups."""
    group = batch.labels if groups is None else groups(batch)
    known = group >= 0
    features = batch.features
    if not known.all():
        features, group = features[known], group[known]
    return features if transform is None else transform(features), group


def _add_upper_products(scatter: Float[Tensor, "D D"], rows: Float[Tensor, "N D"]) -> None:
    """Adds `rows.T @ rows` to the upper triangle of `scatter` (and to some of the rest): five eighths of the work."""
    step = -(-rows.shape[1] // 4)
    for start in range(0, rows.shape[1], step):
        stop = start + step
        scatter[:stop, start:stop].addmm_(rows[:, :stop].T, rows[:, start:stop])


def one_group(outputs: Outputs) -> Int[Tensor, " N"]:
    """All rows in one group, whatever their label: `moments(train, groups=one_group)` counts every row."""
    return torch.zeros(len(outputs), dtype=torch.int64, device=outputs.features.device)


def present_classes(counts: Int[Tensor, " C"], absent: str) -> Int[Tensor, " K"]:
    """The classes with a training row, or an error that names those without one.

    Args:
        counts: (C,) training rows of each class.
        absent: "error" refuses classes without a row; "skip" leaves them out.
    """
    if absent not in ("error", "skip"):
        raise ValueError(f"absent must be 'error' or 'skip', got {absent!r}")
    missing = (counts == 0).nonzero().flatten().tolist()
    if missing and absent == "error":
        shown = str(missing) if len(missing) <= 10 else f"{str(missing[:10])[:-1]}, …] ({len(missing)} in all)"
        raise ValueError(
            f"every class needs a training row, but classes {shown} have none; "
            "give more fit data, or set absent='skip' to leave them out"
        )
    return (counts > 0).nonzero().flatten()


def l2_normalise(rows: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Rows of unit Euclidean length (a zero row stays zero)."""
    return torch.nn.functional.normalize(rows, dim=-1, eps=1e-12)


def whitening(covariance: Float[Tensor, "D D"], ridge: float = 0.0) -> Float[Tensor, "D R"]:
    """A matrix V with V Vᵀ = the (pseudo-)inverse of `covariance + ridge I`, so that ‖xV‖² is a Mahalanobis norm.

    Directions without variance (below D · ε₆₄ · the largest eigenvalue, the cut-off of `numpy.linalg.matrix_rank`)
    are left out: the pseudo-inverse.
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    values = values + ridge
    keep = values > len(values) * torch.finfo(torch.float64).eps * values[-1].clamp_min(1e-300)
    return vectors[:, keep] * values[keep].rsqrt()


def principal_axes(covariance: Float[Tensor, "D D"]) -> tuple[Float[Tensor, " D"], Float[Tensor, "D D"]]:
    """Variances, largest first and none below 0, and the orthonormal directions (columns) that have them."""
    values, vectors = torch.linalg.eigh(covariance.double())
    return values.flip(0).clamp_min(0.0), vectors.flip(1)


def components_for(variances: Float[Tensor, " D"], share: float) -> int:
    """The fewest leading components that hold at least `share` of the variance, at least 1."""
    cumulated = variances.cumsum(0) / variances.sum()
    # a share of 1 must not ask for more components than there are because of rounding
    return min(int((cumulated < share).sum()) + 1, len(variances))


def squared_distances(rows: Float[Tensor, "N R"], points: Float[Tensor, "K R"]) -> Float[Tensor, "N K"]:
    """Squared Euclidean distances by one matrix product, clamped at 0.

    ‖a‖² + ‖b‖² − 2ab cancels when a and b are close and far from 0: centre both first, or measure the few that
    matter again, as `nearest` and `nearest_point` do.
    """
    squares = rows.square().sum(dim=1, keepdim=True) + points.square().sum(dim=1)
    return squares.addmm_(rows, points.T, alpha=-2.0).clamp_min_(0.0)


def nearest_point(
    rows: Float[Tensor, "N R"], points: Float[Tensor, "K R"]
) -> tuple[Float[Tensor, " N"], Int[Tensor, " N"]]:
    """Squared distance of every row to the nearest of a few points, free of cancellation, and the point's number.

    A float32 matrix product finds the nearest; its distance is then measured again as ‖a − b‖² in the dtype given.
    """
    halves = (0.5 * points.square().sum(dim=1)).float()
    directions = points.float().T
    number = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    chunks = row_chunks(len(rows), len(points))
    for start in chunks:
        block = rows[start : start + chunks.step].float()
        # min, because argmin takes twice as long
        number[start : start + chunks.step] = torch.addmm(halves, block, directions, alpha=-1.0).min(dim=1).indices
    return (rows - points[number]).square().sum(dim=1), number


def row_chunks(rows: int, columns: int) -> range:
    """Starts of row blocks whose (block, columns) temporary stays within the room's bound; `.step` is the length."""
    return range(0, rows, max(1, _CHUNK_NUMBERS // max(1, columns)))


def nearest(
    queries: Float[Tensor, "N D"], bank: Float[Tensor, "M D"], k: int, *, largest_product: bool = False
) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
    """The k nearest bank rows of every query, exactly: squared distances ascending, and their row numbers.

    Args:
        queries: (N, D) rows to look up.
        bank: (M, D) rows to search; a memory-mapped tensor is read block by block.
        k: neighbours, 1 ≤ k ≤ M.
        largest_product: search by largest inner product instead; the first result is then the products, descending.
    """
    if not 1 <= k <= len(bank):
        raise ValueError(f"k must lie between 1 and the {len(bank)} bank rows, got {k}")
    parts = [slice(start, start + _BANK_ROWS) for start in range(0, len(bank), _BANK_ROWS)]
    # the nearest has the largest ab − ‖b‖²/2: one product and no pass over it before the choice
    halves = [-0.5 * bank[part].to(queries).square().sum(dim=1) for part in parts if not largest_product]
    values, indices = [queries.new_zeros(0, k)], [queries.new_zeros(0, k, dtype=torch.int64)]
    chunks = row_chunks(len(queries), min(len(bank), _BANK_ROWS))
    for start in chunks:
        block = queries[start : start + chunks.step]
        best = block.new_zeros(len(block), 0)
        where = torch.zeros(len(block), 0, dtype=torch.int64, device=block.device)
        for number, part in enumerate(parts):
            directions = bank[part].to(block).T
            near = block @ directions if largest_product else torch.addmm(halves[number], block, directions)
            top, position = largest_entries(near, min(k, near.shape[1]))
            best, order = torch.cat([best, top], dim=1).topk(min(k, best.shape[1] + top.shape[1]), dim=1)
            where = torch.cat([where, position + part.start], dim=1).gather(1, order)
        if not largest_product:
            squared = best.mul_(-2).add_(block.square().sum(dim=1, keepdim=True)).clamp_min_(0.0)
            best, order = _measured_again(block, bank, squared, where).sort(dim=1)
            where = where.gather(1, order)
        values.append(best)
        indices.append(where)
    return torch.cat(values), torch.cat(indices)


def largest_entries(values: Float[Tensor, "N K"], k: int) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
    """`values.topk(k, dim=1)`, and faster on a CPU where k is small: it takes 4 ns for each number, maxima take 0.5.

    The k largest lie in the k groups of columns whose maxima are largest.
    """
    columns, size = values.shape[1], 8
    groups = columns // size
    if groups < 4 * k or values.device.type != "cpu":
        return values.topk(k, dim=1)  # pyright: ignore[reportReturnType]
    maxima = values[:, : size * groups].unflatten(1, (size, groups)).amax(dim=1)
    members = torch.arange(size).mul(groups).view(-1, 1)
    where = (largest_entries(maxima, k)[1].unsqueeze(1) + members).flatten(1)
    rest = torch.arange(size * groups, columns).expand(len(where), -1)
    where = torch.cat([where, rest], dim=1)
    best, order = values.gather(1, where).topk(k, dim=1)
    return best, where.gather(1, order)


def largest_values(rows: Float[Tensor, "N K"], k: int) -> Float[Tensor, "N k"]:
    """The k largest numbers of every row, in any order. For k that is no small part of K.

    On a CPU by NumPy's partition, which is vectorised: 2 to 8 ns for each number, where `topk` takes 10 to 20.
    """
    if rows.device.type != "cpu" or rows.requires_grad or torch.compiler.is_compiling():
        return rows.topk(k, dim=1, sorted=False).values
    return torch.from_numpy(np.partition(rows.numpy(), rows.shape[1] - k, axis=1)[:, rows.shape[1] - k :])


def _measured_again(queries: Tensor, bank: Tensor, squared: Tensor, where: Tensor) -> Tensor:
    """The squared distances, those that lost digits to cancellation computed as ‖a − b‖²."""
    size = queries.square().sum(dim=1, keepdim=True)
    row, rank = (squared < _CANCELLED * size).nonzero(as_tuple=True)
    for part in torch.arange(len(row), device=row.device).split(max(1, _CHUNK_NUMBERS // queries.shape[1])):
        i, j = row[part], rank[part]
        squared[i, j] = (queries[i] - bank[where[i, j]].to(queries)).square().sum(dim=1)
    return squared


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
            digit = ((keys >> shift) & (bins - 1)).masked_fill_(parents != prefix, bins)  # the last bin is waste
            if shift == 0:
                beyond = keys.masked_fill(parents <= prefix, torch.iinfo(keys.dtype).max).amin(dim=0)
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
    return torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys)


def _values_of(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The float64 values that have these keys under `_ordered_integers`."""
    keys = keys.to(torch.int64 if dtype == torch.float64 else torch.int32)
    return torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys).view(dtype).double()
