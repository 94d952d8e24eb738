"""Maths that more than one detector needs: moments, whitening, distances, neighbours.

The only room that chunks over rows or goes to float64 for precision.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.distributed import summed
from ood_toolkit.outputs import Outputs

_CHUNK_NUMBERS = 1 << 24
"""Upper bound for the numbers in one temporary block: 64 MiB of float32, 128 MiB of float64."""

_SHIFT_ROWS = 1024
"""Rows whose mean is near enough to that of all, for sums about it."""

_TRIANGLE = 128
"""Columns up to which a symmetric product is computed whole. Smaller triangles gain nothing, larger ones lose."""

_PADDING = 8
"""Numbers left free after each row. Rows that begin multiples of 1 KiB apart share few places of a CPU's cache: without
this, products of 1280 columns take 27 % longer, of 2048 16 %."""

_BLOCK_NUMBERS = 1 << 21
"""How many numbers (logits, features, taps) a block of rows holds: 8 MiB of float32, so that what is made of it stays
in a CPU's cache. Entropy takes twice as long for a row in blocks of 64 MiB."""

_ACCELERATOR_BLOCK_NUMBERS = 1 << 24
"""The same on other devices, which are only busy with more."""

_BANK_ROWS = 1 << 14
"""Bank rows that one matrix product of `nearest` compares."""

_CANCELLED = 1e-2
"""Below this fraction of ‖a‖², a squared distance in float32 from ‖a‖² + ‖b‖² − 2ab may be off by more than 1e-5."""


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
        rows: rows of a block; by default `block_length`.
    """
    yield from outputs.batches(rows or block_length(outputs))


def block_length(outputs: Outputs) -> int:
    """Rows of a block: as many as make 8 MiB of float32, 64 MiB on a GPU."""
    if not len(outputs):
        return 64
    first = outputs.rows(slice(0, 1))
    width = first.logits.numel() + first.features.numel() + sum(tap.numel() for tap in first.taps.values())
    numbers = _BLOCK_NUMBERS if first.logits.device.type == "cpu" else _ACCELERATOR_BLOCK_NUMBERS
    return max(64, numbers // width)


def moments(
    train: Outputs,
    *,
    transform: Callable[[Tensor], Tensor] | None = None,
    groups: Callable[[Outputs], Tensor] | None = None,
    of: Callable[[Outputs], Tensor] = attrgetter("features"),
) -> Moments:
    """Moments of the labelled rows of `train`, in one sweep; memory does not grow with the number of rows.

    Products are in float64, about the mean of the first rows: their rounding is that of the rows' variances however far
    from 0 the rows lie, and hangs on neither the blocks nor the ranks. Ranks of a run share the sweep, where the runner
    has said so (`ood_toolkit.distributed.sharing`).

    Args:
        train: outputs whose labels are known, at least for some rows.
        transform: what to do to the features first, e.g. `l2_normalise`; the identity by default.
        groups: the class of each row, (N,) integers; by default its label. Rows with a negative group are left out.
        of: the values of a batch, (rows, D); its features by default.

    Ranks can share what survives pickling: named functions, bound methods, `functools.partial`; no lambda.
    """
    if not len(train):
        raise ValueError("fitting needs training rows, but there are none")
    # sums about a nearby point: raw second moments would cancel
    near, _ = _counted(train.rows(slice(0, _SHIFT_ROWS)), transform, groups, of)
    shift = near.mean(dim=0).double() if len(near) else near.new_zeros(near.shape[1]).double()
    counts, sums, scatter = summed(_MomentSums(train.classes, shift, transform, groups, of), train)
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
    of: Callable[[Outputs], Tensor]

    def __call__(self, batches: Iterator[Outputs]) -> list[Tensor]:
        width = len(self.shift)
        counts = torch.zeros(self.classes, dtype=torch.int64, device=self.shift.device)
        sums, scatter = self.shift.new_zeros(self.classes, width + _PADDING), self.shift.new_zeros(width, width)
        room = sums[:0]
        for block in (block for batch in batches for block in blocks(batch)):
            rows, group = _counted(block, self.transform, self.groups, self.of)
            if len(rows) > len(room):
                room = sums.new_zeros(len(rows), width + _PADDING)
            # in the same room each time: 9 MB of new memory cost a tenth of the products
            centred = room[: len(rows), :width].copy_(rows).sub_(self.shift)
            counts += torch.bincount(group, minlength=self.classes)
            sums.index_add_(0, group, room[: len(rows)])
            _add_upper_products(scatter, centred)
        return [counts, sums[:, :width], scatter]


def _counted(
    batch: Outputs,
    transform: Callable[[Tensor], Tensor] | None,
    groups: Callable[[Outputs], Tensor] | None,
    of: Callable[[Outputs], Tensor],
) -> tuple[Float[Tensor, "K D"], Int[Tensor, " K"]]:
    """The rows that have a group, transformed, and their groups."""
    group = batch.labels if groups is None else groups(batch)
    known = group >= 0
    features = of(batch)
    if not known.all():
        features, group = features[known], group[known]
    return features if transform is None else transform(features), group


def _add_upper_products(scatter: Float[Tensor, "D D"], rows: Float[Tensor, "N D"]) -> None:
    """Adds `rows.T @ rows` to the upper triangle of `scatter` (and some of the rest): little over half the work."""
    width = rows.shape[1]
    if width <= _TRIANGLE:
        scatter.addmm_(rows.T, rows)
        return
    left, right = slice(0, width // 2), slice(width // 2, width)
    _add_upper_products(scatter[left, left], rows[:, left])
    _add_upper_products(scatter[right, right], rows[:, right])
    scatter[left, right].addmm_(rows[:, left].T, rows[:, right])


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
    covariance = covariance.double()
    root = _triangular_root(covariance + ridge * torch.eye(len(covariance)).to(covariance))
    if root is not None:
        return root
    values, vectors = torch.linalg.eigh(covariance)
    values = values + ridge
    keep = values > len(values) * torch.finfo(torch.float64).eps * values[-1].clamp_min(1e-300)
    return vectors[:, keep] * values[keep].rsqrt()


def _triangular_root(matrix: Float[Tensor, "D D"]) -> Float[Tensor, "D D"] | None:
    """V with V Vᵀ = the inverse, in a tenth of the time of eigenvectors; None unless it is far from singular."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        return None
    root = torch.linalg.solve_triangular(factor.mT, torch.eye(len(matrix)).to(matrix), upper=True)
    # an upper bound for the largest eigenvalue over the smallest
    condition = float(matrix.trace() * root.square().sum())
    return root if condition * len(matrix) * torch.finfo(torch.float64).eps < 1e-2 else None


def principal_axes(covariance: Float[Tensor, "D D"]) -> tuple[Float[Tensor, " D"], Float[Tensor, "D D"]]:
    """Variances, largest first and none below 0, and the orthonormal directions (columns) that have them."""
    values, vectors = torch.linalg.eigh(covariance.double())
    return values.flip(0).clamp_min(0.0), vectors.flip(1)


def leading_axes(covariance: Float[Tensor, "D D"], dim: int) -> Float[Tensor, "D R"]:
    """The `dim` directions of largest variance, or as many as have any, at least one.

    Rows that are fewer than `dim` span fewer: which of the directions without variance came next, only rounding would
    decide. The cut-off is that of `whitening`.
    """
    variances, axes = principal_axes(covariance)
    varying = int((variances > len(variances) * torch.finfo(torch.float64).eps * variances[0]).sum())
    return axes[:, : max(1, min(dim, varying))].contiguous()


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
    halves = [
        torch.linalg.vector_norm(bank[part].to(queries), dim=1).square_().mul_(-0.5)
        for part in parts
        if not largest_product
    ]
    values, indices = [queries.new_zeros(0, k)], [queries.new_zeros(0, k, dtype=torch.int64)]
    chunks = row_chunks(len(queries), min(len(bank), _BANK_ROWS))
    # all products in the same room: 64 MB of new memory each time cost a twelfth of the products
    room = queries.new_empty(min(chunks.step, len(queries)) * min(len(bank), _BANK_ROWS))
    for start in chunks:
        block = queries[start : start + chunks.step]
        best = block.new_zeros(len(block), 0)
        where = torch.zeros(len(block), 0, dtype=torch.int64, device=block.device)
        for number, part in enumerate(parts):
            directions = bank[part].to(block).T
            out = None if block.requires_grad else room[: len(block) * directions.shape[1]].view(len(block), -1)
            if largest_product:
                near = torch.mm(block, directions, out=out)
            else:
                near = torch.addmm(halves[number], block, directions, out=out)
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
