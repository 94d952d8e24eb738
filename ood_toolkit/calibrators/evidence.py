"""How much a sample says that parameters differ from class to class: pairs of rows against their chance agreement.

Used by the calibrators whose penalties the data choose. At temperature scaling the gradient of a parameter is a sum
over rows; of its square, what is left without the rows' own squares is a sum over pairs of different rows, which is 0
on average where the parameter has no effect, and grows with the square of an effect.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

_ERRORS = 3.0
"""Standard errors by which evidence must exceed nothing, and which are taken off it."""
PAIRED_ROWS = 1000
"""Rows whose pairs tell how much evidence an effect would give."""


def paired_rows(rows: int) -> slice:
    """About `PAIRED_ROWS` of the rows, evenly spaced."""
    return slice(None, None, -(-rows // PAIRED_ROWS))


def curvature_products(
    p: Float[Tensor, "n C"], x: Float[Tensor, "n C"], power: int
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """For every pair of rows, `Σ_i a_i x_ni^k x_mi^k` and `Σ_i p_ni p_mi x_ni^k x_mi^k`, k the power.

    With `a_i = p_ni p_mi (1 - p_ni - p_mi)`, what the product of the diagonals of `A = diag(p) - p pᵀ` has beyond
    `(p_ni p_mi)²`.
    """
    once = p * x**power
    cross = (p * once) @ once.T
    both = once @ once.T
    return both - cross - cross.T, both


def coordinate_evidence(
    p: Float[Tensor, "n C"], errors: Float[Tensor, "n C"], x: Float[Tensor, "n C"], power: int
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """For one parameter per class whose gradient in row n is `errors_nc x_nc^k`: evidence expected and seen, by pair.

    Expected under a variance of 1 is `tr(A_n K A_m K)` with K the diagonal matrix of `x_ni^k x_mi^k`; seen is the
    product of the two rows' gradients. k = 1 is a slope, k = 0 an offset.
    """
    squares, _ = curvature_products(p, x, 2 * power)
    _, both = curvature_products(p, x, power)
    slopes = errors * x**power
    return squares + both.square(), slopes @ slopes.T


def least_variance(
    excess: Float[Tensor, " K"],
    expected: Sequence[Float[Tensor, "n n"]],
    seen: Sequence[Float[Tensor, "n n"]],
    rows: int,
) -> Float[Tensor, " K"]:
    """What the true values of each kind of parameter vary by at least, 0 without clear evidence.

    The excess has the standard error of a sum over pairs, from their own squares, so that a confident mistake does not
    pass for evidence; three of them are taken off.

    Args:
        excess: summed squared gradients of each kind, less the rows' own squares, over all rows.
        expected: by kind, the excess that a variance of 1 gives a pair on average.
        seen: by kind, the excess of each pair.
        rows: how many rows `excess` is summed over; the pairs may be from fewer.
    """
    paired = len(seen[0])
    scale = rows * (rows - 1) / max(1, paired * (paired - 1))
    size = scale * torch.stack([part.fill_diagonal_(0).sum() for part in expected])
    error = (2 * scale * torch.stack([part.fill_diagonal_(0).square().sum() for part in seen])).sqrt()
    return (excess - _ERRORS * error).clamp_min(0) / size.clamp_min(1e-300)
