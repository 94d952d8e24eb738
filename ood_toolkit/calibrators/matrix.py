"""Matrix scaling: every logit a linear mixture of all, held back by ODIR."""

from collections.abc import Iterator
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked
from ood_toolkit.calibrators.evidence import curvature_products, least_variance, paired_rows
from ood_toolkit.calibrators.minimise import minimise
from ood_toolkit.calibrators.temperature import fit_temperature

_MOST_STEPS = 120
"""Descent steps. Where classes outnumber rows the loss is flat for long: what is left after these moves it by 1 %."""


class MatrixCalibrator(Calibrator):
    """`softmax(W z + b)`, with penalties on what is off the diagonal of W and on b (ODIR).

    The most flexible linear map: it can move probability from one class to those it is confused with. C² numbers need
    many rows per class; the paper's penalties `λ mean_{i≠j} w_ij² + μ mean b_i²`, added to the mean NLL, leave the
    diagonal free, which with few rows per class wrecks the predictions. By default the data choose instead, by
    empirical Bayes, how far off-diagonals, diagonal and intercepts may leave temperature scaling (W = I/T, b = 0);
    each stays there unless pairs of rows agree by three standard errors that it should move. So with few rows per
    class the result is temperature scaling, and with many it is near the plain maximum.

    At 1000 classes that test takes a second; where anything moves, one sweep is two products of (N, C) and (C, C):
    expect minutes, and see whether `vector` will do.

    Args:
        off_diagonal: λ ≥ 0 with a free diagonal, as in the paper, or None for the data's choice of both.
        intercept: μ ≥ 0, or None for the data's choice, which is about b where the inputs are at their means.

    Differs from the paper by default: penalties on the diagonal too, and none chosen by cross-validation. A mixture
    of -inf means nothing: `fit` refuses such logits, and later rows are read with their smallest finite logit in its
    place, the class staying impossible.
    """

    name = "matrix"
    paper = (
        "Guo et al., On Calibration of Modern Neural Networks, ICML 2017, arXiv:1706.04599, Eq. 8; ODIR: Kull et al., "
        "Beyond temperature scaling, NeurIPS 2019, arXiv:1910.12656"
    )
    cite = "kull2019dirichlet"
    equation = "softmax(W z + b)"
    weight: Float[Tensor, "C C"]
    bias: Float[Tensor, " C"]

    allowed = {"off_diagonal": "[0, inf)", "intercept": "[0, inf)"}

    def __init__(self, off_diagonal: float | None = None, intercept: float | None = None) -> None:
        super().__init__()
        for value in (off_diagonal, intercept):
            if value is not None and value < 0:
                raise ValueError(f"penalties must be ≥ 0 or None, got {value}")
        self.off_diagonal = off_diagonal
        self.intercept = intercept

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Finds W and b. Returns itself."""
        logits, labels = checked(logits, labels)
        if bool(logits.isneginf().any()):
            raise ValueError(f"{self.name} mixes the logits of all classes, so none may be -inf; select classes first")
        slope = 1 / fit_temperature(logits, labels).temperature
        self.weight, self.bias = _fit(self._inputs(logits), labels, slope, self.off_diagonal, self.intercept)
        return self

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) softmax of W z + b."""
        return self._scaled(logits).softmax(dim=-1)

    def log_probabilities(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-softmax of W z + b."""
        return self._scaled(logits).log_softmax(dim=-1)

    def _inputs(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        return logits

    def _scaled(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        impossible = logits.isneginf()
        smallest = torch.where(impossible, torch.inf, logits).amin(dim=-1, keepdim=True)
        inputs = self._inputs(logits.maximum(smallest))
        scaled = torch.nn.functional.linear(inputs, self.weight.to(inputs.dtype), self.bias.to(inputs.dtype))
        return scaled.masked_fill(impossible, -torch.inf)


def _fit(
    inputs: Float[Tensor, "N C"],
    labels: Int[Tensor, " N"],
    slope: float,
    off_diagonal: float | None,
    intercept: float | None,
) -> tuple[Float[Tensor, "C C"], Float[Tensor, " C"]]:
    """W and b that minimise mean NLL plus penalties, from W = slope · I and b = 0."""
    rows, classes = inputs.shape
    centre = inputs.new_zeros(classes, dtype=torch.float64)
    if intercept is None:  # else every off-diagonal would also be an offset: log p is around -10 for all classes
        centre = inputs.mean(dim=0, dtype=torch.float64)
        inputs = inputs - centre.to(inputs.dtype)
    start = torch.zeros(classes, classes + 1, dtype=torch.float64, device=inputs.device)
    start.fill_diagonal_(slope)
    start[:, -1] = slope * centre
    # what all inputs of a row share tells nothing of mixing, but in log p it would hide it
    relative = inputs - inputs.mean(dim=1, keepdim=True)
    excess, curvature = _first_step(relative, labels, start)
    variance = _variance(relative, labels, start, excess)
    precision = torch.zeros_like(start)  # of the loss's penalty, ½ · precision · (w - start)²
    if off_diagonal is None:
        precision[:, :-1] = 1 / (rows * variance[0])
        precision.fill_diagonal_(float(1 / (rows * variance[1])))
    else:
        precision[:, :-1] = 2 * off_diagonal / max(1, classes * (classes - 1))
        precision.fill_diagonal_(0.0)
    precision[:, -1] = 1 / (rows * variance[2]) if intercept is None else 2 * intercept / classes
    free = precision.isfinite()
    table = start.clone()
    if bool(free.any()):
        table = _descend(inputs, labels, start, free, precision, curvature / rows)
    weight = table[:, :-1].contiguous()
    return weight, table[:, -1] - weight @ centre


def _descend(
    inputs: Float[Tensor, "N C"],
    labels: Int[Tensor, " N"],
    start: Float[Tensor, "C C+1"],
    free: Bool[Tensor, "C C+1"],
    precision: Float[Tensor, "C C+1"],
    curvature: Float[Tensor, "C C+1"],
) -> Float[Tensor, "C C+1"]:
    """The best table whose numbers that are not free stay at their start."""
    numbers, classes = start.numel(), len(start)
    precision, mask = precision.where(free, torch.zeros_like(precision)), free.to(start.dtype)
    own = (curvature + precision).clamp_min(1e-12).rsqrt() * mask
    mix, scale = torch.eye(classes + 1, dtype=start.dtype, device=start.device), own
    if bool(free[0, 1:-1].any()):
        mix, scale = _principal(inputs, precision, curvature)

    def change(point: Tensor) -> Tensor:
        moved = point[:numbers].view_as(start) @ mix.T
        moved.diagonal().add_(point[numbers:])
        return moved * mask

    def objective(point: Tensor) -> tuple[float, Tensor]:
        moved = change(point)
        loss, gradient = _loss(inputs, labels, start + moved)
        penalty = precision * moved
        gradient = (gradient + penalty) * mask
        return loss + 0.5 * float((penalty * moved).sum()), torch.cat([(gradient @ mix).flatten(), gradient.diagonal()])

    scales = torch.cat([scale.flatten(), own.diagonal()])
    found = minimise(
        objective, torch.zeros_like(scales), scale=scales, most_steps=_MOST_STEPS, tolerance=1e-5, settled=1e-9
    )
    return start + change(found)


def _principal(
    inputs: Float[Tensor, "N C"], precision: Float[Tensor, "C C+1"], curvature: Float[Tensor, "C C+1"]
) -> tuple[Float[Tensor, "C+1 C+1"], Float[Tensor, "C C+1"]]:
    """Directions of the inputs, one per column, along which the loss curves independently, and steps along each.

    The Hessian is about a_i S + P for class i, with S the second moments of (x, 1) and P the penalties: inputs move
    together (log p has one common offset), so single numbers are badly scaled, but not the principal directions of S
    in units of P. The diagonal, whose penalty is another, has variables of its own beside these.
    """
    total = inputs.new_zeros(inputs.shape[1] + 1, inputs.shape[1] + 1, dtype=torch.float64)
    for rows, _ in _blocks(inputs, torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)):
        extended = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
        total += (extended.T @ extended).double()
    moments, of_class = total / len(inputs), curvature[:, -1]
    penalty = precision[0, 1].expand(len(moments)).clone()
    penalty[-1] = precision[0, -1]
    penalty += 1e-2 * of_class.mean() * moments.diagonal() + 1e-300  # where nothing is penalised, the curvature itself
    unit = penalty.rsqrt()
    values, vectors = torch.linalg.eigh(unit[:, None] * moments * unit)
    return unit[:, None] * vectors, (of_class[:, None] * values.clamp_min(0) + 1).rsqrt()


def _first_step(
    inputs: Float[Tensor, "N C"], labels: Int[Tensor, " N"], start: Float[Tensor, "C C+1"]
) -> tuple[Float[Tensor, "3"], Float[Tensor, "C C+1"]]:
    """At temperature scaling, the excess of squared gradients over their noise, and the curvature of the summed NLL.

    The excess is that of off-diagonals, diagonals and intercepts: a gradient is a sum over rows, and of its square
    what is left without the rows' own squares is the sum over pairs of different rows, 0 on average without effects.
    """
    gradient, curvature = torch.zeros_like(start), torch.zeros_like(start)
    noise = start.new_zeros(3)
    for rows, true in _blocks(inputs, labels):
        probabilities = _at_start(rows, start)
        weights = probabilities * (1 - probabilities)
        difference = probabilities.scatter_add_(1, true, -torch.ones_like(rows[:, :1]))
        gradient[:, :-1] += difference.T @ rows
        gradient[:, -1] += difference.sum(dim=0)
        squares, errors = rows.square(), difference.square()
        curvature[:, :-1] += weights.T @ squares
        curvature[:, -1] += weights.sum(dim=0)
        own, error = (errors * squares).sum(dtype=torch.float64), errors.sum(dim=1)
        noise += torch.stack([(error @ squares.sum(dim=1)).double() - own, own, error.sum(dtype=torch.float64)])
    squared = gradient.square()
    diagonal = squared.diagonal().sum()
    return torch.stack([squared[:, :-1].sum() - diagonal, diagonal, squared[:, -1].sum()]) - noise, curvature


def _variance(
    inputs: Float[Tensor, "N C"],
    labels: Int[Tensor, " N"],
    start: Float[Tensor, "C C+1"],
    excess: Float[Tensor, "3"],
) -> Float[Tensor, "3"]:
    """What the true off-diagonals, diagonals and intercepts vary by at least, given the excess of `_first_step`.

    Numbers that vary by τ² make the excess τ² Σ_{n≠m} tr(A_n K_nm A_m K_nm) on average, where A = diag(p) - p pᵀ and
    K_nm is the diagonal matrix of what the rows n and m share in each class: Σ_{j≠i} x_nj x_mj, x_ni x_mi, or 1. Not
    each number's own curvature: C off-diagonals of a class move its logit together.
    """
    sample = paired_rows(len(inputs))
    x, true = inputs[sample].double(), labels[sample, None]
    p = _at_start(x, start)
    errors = p.scatter_add(1, true, -torch.ones_like(p[:, :1]))
    shared = x @ x.T
    (level, both), (slope, mixed), (square, _) = (curvature_products(p, x, power) for power in range(3))
    off_diagonal = shared.square() * level - 2 * shared * slope + square + (shared * both - mixed).square()
    alike, own = errors @ errors.T, (errors * x) @ (errors * x).T
    expected = [off_diagonal, square + mixed.square(), level + both.square()]
    return least_variance(excess, expected, [shared * alike - own, own, alike], len(inputs))


def _at_start(rows: Float[Tensor, "B C"], start: Float[Tensor, "C C+1"]) -> Float[Tensor, "B C"]:
    return torch.addcmul(start[:, -1].to(rows.dtype), rows, start.diagonal().to(rows.dtype)).softmax(dim=1)


def _loss(
    inputs: Float[Tensor, "N C"], labels: Int[Tensor, " N"], table: Float[Tensor, "C C+1"]
) -> tuple[float, Float[Tensor, "C C+1"]]:
    """Mean NLL at (W, b) and its gradient, in the dtype of the inputs, added up in float64."""
    weight, bias = table[:, :-1].to(inputs.dtype), table[:, -1].to(inputs.dtype)
    total = torch.zeros((), dtype=torch.float64, device=inputs.device)
    gradient = torch.zeros_like(table)
    for rows, true in _blocks(inputs, labels):
        scaled = torch.addmm(bias, rows, weight.T)
        log_mass = scaled.logsumexp(dim=1, keepdim=True)
        total += (log_mass - scaled.gather(1, true)).sum(dtype=torch.float64)
        difference = scaled.sub_(log_mass).exp_()
        difference.scatter_add_(1, true, -torch.ones_like(log_mass))
        gradient[:, :-1] += difference.T @ rows
        gradient[:, -1] += difference.sum(dim=0)
    return float(total) / len(inputs), gradient / len(inputs)


def _blocks(inputs: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Iterator[tuple[Tensor, Tensor]]:
    step = max(64, (1 << 22) // inputs.shape[1])
    for start in range(0, len(inputs), step):
        yield inputs[start : start + step], labels[start : start + step, None]
