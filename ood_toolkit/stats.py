"""Maths that more than one detector needs: moments, whitening, distances, neighbours.

The only room that chunks over rows or goes to float64 for precision.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.outputs import Outputs

_CHUNK_NUMBERS = 1 << 24
"""Upper bound for the numbers in one temporary block: 64 MiB of float32, 128 MiB of float64."""


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


def moments(
    train: Outputs,
    *,
    transform: Callable[[Tensor], Tensor] | None = None,
    groups: Callable[[Outputs], Tensor] | None = None,
) -> Moments:
    """Moments of the labelled rows of `train`, in one sweep; memory does not grow with the number of rows.

    Args:
        transform: what to do to the features first, e.g. `l2_normalise`; the identity by default.
        groups: the class of each row, (N,) integers; by default its label. Rows with a negative group are left out.
    """
    classes = train.classes
    device = train.features.device
    counts = torch.zeros(classes, dtype=torch.int64, device=device)
    sums = scatter = shift = None
    for batch in train.batches():
        group = batch.labels if groups is None else groups(batch)
        known = group >= 0
        rows = batch.features[known] if transform is None else transform(batch.features[known])
        rows, group = rows.double(), group[known]
        if sums is None or scatter is None or shift is None:
            # sums about a nearby point: raw second moments would cancel
            shift = rows.mean(dim=0) if len(rows) else rows.new_zeros(rows.shape[1])
            sums = rows.new_zeros(classes, rows.shape[1])
            scatter = rows.new_zeros(rows.shape[1], rows.shape[1])
        rows = rows - shift
        counts += torch.bincount(group, minlength=classes)
        sums.index_add_(0, group, rows)
        scatter += rows.T @ rows
    total_rows = int(counts.sum())
    if sums is None or scatter is None or shift is None or total_rows == 0:
        raise ValueError("fitting needs labelled training rows, but there are none")
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


def squared_distances(rows: Float[Tensor, "N R"], points: Float[Tensor, "K R"]) -> Float[Tensor, "N K"]:
    """Squared Euclidean distances by one matrix product, clamped at 0.

    ‖a‖² + ‖b‖² − 2ab cancels when a and b are close and far from 0: centre both first.
    """
    squares = rows.square().sum(dim=1, keepdim=True) + points.square().sum(dim=1)
    return squares.addmm(rows, points.T, alpha=-2.0).clamp_min(0.0)


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
    values, indices = [], []
    for start in row_chunks(len(queries), min(len(bank), 8192)):
        block = queries[start : start + row_chunks(len(queries), min(len(bank), 8192)).step]
        best = bank_rows = None
        for offset in range(0, len(bank), 8192):
            part = bank[offset : offset + 8192].to(block.dtype)
            near = block @ part.T if largest_product else -squared_distances(block, part)
            top, where = near.topk(min(k, near.shape[1]), dim=1)
            where = where + offset
            if best is not None and bank_rows is not None:
                top, order = torch.cat([best, top], dim=1).topk(min(k, best.shape[1] + top.shape[1]), dim=1)
                where = torch.cat([bank_rows, where], dim=1).gather(1, order)
            best, bank_rows = top, where
        values.append(best if largest_product else -best)  # pyright: ignore
        indices.append(bank_rows)
    return torch.cat(values), torch.cat(indices)
