"""Matrix scaling: every logit a linear mixture of all, held back by ODIR."""

from collections.abc import Iterator
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked
from ood_toolkit.calibrators.minimise import minimise
from ood_toolkit.calibrators.temperature import fit_temperature


class MatrixCalibrator(Calibrator):
    """`softmax(W z + b)`, with penalties on what is off the diagonal of W and on b (ODIR).

    The most flexible linear map: it can move probability from one class to those it is confused with. C² numbers need
    many rows per class; the penalties `λ mean_{i≠j} w_ij² + μ mean b_i²`, added to the mean NLL, leave the diagonal
    free (Kull et al.). By default λ and μ come from the data by empirical Bayes, as in `VectorCalibrator`;
    where the off-diagonal shows nothing but noise it stays 0.

    At 1000 classes one sweep is two products of (N, C) and (C, C): expect minutes, and see whether `vector` will do.

    Args:
        off_diagonal: λ ≥ 0, or None for the data's choice.
        intercept: μ ≥ 0, or None for the data's choice.

    Differs from the paper in choosing λ and μ without cross-validation. A mixture of -inf means nothing: `fit` refuses
    such logits, and later rows are read with their smallest finite logit in its place, the class staying impossible.
    """

    name = "matrix"
    paper = (
        "Guo et al., On Calibration of Modern Neural Networks, ICML 2017, arXiv:1706.04599; ODIR: Kull et al., "
        "Beyond temperature scaling, NeurIPS 2019, arXiv:1910.12656"
    )
    cite = "kull2019dirichlet"
    equation = "softmax(W z + b)"
    weight: Float[Tensor, "C C"]
    bias: Float[Tensor, " C"]

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
    """W and b that minimise mean NLL plus ODIR, from W = slope · I and b = 0."""
    rows, classes = inputs.shape
    curvature, variance = _first_step(inputs, labels, slope)
    off = ~torch.eye(classes, classes + 1, dtype=torch.bool, device=inputs.device)
    off[:, -1] = False
    precision = torch.zeros_like(curvature)  # of the loss's penalty, ½ · precision · w²
    precision[off] = 1 / (rows * variance[0]) if off_diagonal is None else 2 * off_diagonal / (classes * (classes - 1))
    precision[:, -1] = 1 / (rows * variance[1]) if intercept is None else 2 * intercept / classes
    free = precision.isfinite()
    precision = torch.where(free, precision, 0.0)
    scale = torch.where(free, (curvature / rows + precision).clamp_min(1e-12).rsqrt(), 0.0)
    start = torch.zeros_like(curvature)
    start.fill_diagonal_(slope)

    def objective(point: Tensor) -> tuple[float, Tensor]:
        table = point.view(classes, classes + 1)
        loss, gradient = _loss(inputs, labels, table)
        penalty = precision * table
        return loss + 0.5 * float((penalty * table).sum()), (gradient + penalty).flatten()

    found = minimise(objective, start.flatten(), scale=scale.flatten(), most_steps=200, tolerance=1e-5)
    table = found.view(classes, classes + 1)
    return table[:, :-1].contiguous(), table[:, -1].contiguous()


def _first_step(
    inputs: Float[Tensor, "N C"], labels: Int[Tensor, " N"], slope: float
) -> tuple[Float[Tensor, "C C+1"], Float[Tensor, "2"]]:
    """Curvature of the summed NLL by (W, b), and by moments the variances of true off-diagonals and intercepts."""
    classes = inputs.shape[1]
    gradient, noise, curvature = (
        torch.zeros(classes, classes + 1, dtype=torch.float64, device=inputs.device) for _ in range(3)
    )
    for rows, true in _blocks(inputs, labels):
        probabilities = (rows * slope).softmax(dim=1)
        weights = probabilities * (1 - probabilities)
        difference = probabilities.scatter_add_(1, true, -torch.ones_like(rows[:, :1]))
        squares = rows.square()
        for total, terms, factor in ((gradient, difference, rows), (noise, difference.square(), squares)):
            total[:, :-1] += terms.T @ factor
            total[:, -1] += terms.sum(dim=0)
        curvature[:, :-1] += weights.T @ squares
        curvature[:, -1] += weights.sum(dim=0)
    excess = gradient.square() - noise
    excess[:, :-1].fill_diagonal_(0)
    square = curvature.square()
    square[:, :-1].fill_diagonal_(0)
    sums = [(excess[:, :-1].sum(), square[:, :-1].sum()), (excess[:, -1].sum(), square[:, -1].sum())]
    return curvature, torch.stack([top.clamp_min(0) / bottom.clamp_min(1e-300) for top, bottom in sums])


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
