"""Platt scaling of every class against the rest."""

from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked, rowwise
from ood_toolkit.stats import row_chunks

_MOST_STEPS = 50


class PlattCalibrator(Calibrator):
    """One sigmoid per class on the log-odds of its probability against all others; rows are then normalised.

    2C numbers fitted class by class, all classes in one Newton iteration. For few classes, or where classes are
    biased each in its own way; `vector` does the same jointly. It can change the prediction. A class without a
    held-out row keeps its own probability, before normalisation.

    Args:
        prior_count: pseudo-rows of each kind in every class's targets, > 0, or None for 1 / C. Platt's is 1; over 1000
            classes that many add up to more than the rows of truth: on 650 real rows NLL became 4.7 from 0.8.

    Differs from scikit-learn's one-vs-rest sigmoid in that, and in reading log-odds of the softmax, not raw logits,
    which share a free offset.
    """

    name = "platt"
    paper = "Platt, Probabilistic Outputs for Support Vector Machines, Advances in Large Margin Classifiers 1999"
    cite = "platt1999probabilistic"
    equation = "p′_c ∝ σ(a_c log(p_c / (1 − p_c)) + b_c)"
    slopes: Float[Tensor, " C"]
    offsets: Float[Tensor, " C"]

    allowed = {"prior_count": "(0, inf)"}

    def __init__(self, prior_count: float | None = None) -> None:
        super().__init__()
        if prior_count is not None and prior_count <= 0:
            raise ValueError(f"prior_count must be positive or None, got {prior_count}")
        self.prior_count = prior_count

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Finds every class's sigmoid. Returns itself."""
        logits, labels = checked(logits, labels)
        rows, classes = logits.shape
        positives = torch.bincount(labels, minlength=classes).double()
        prior = 1 / classes if self.prior_count is None else self.prior_count
        high, low = (positives + prior) / (positives + 2 * prior), prior / (rows - positives + 2 * prior)
        # slope 0 and the best constant
        weights = torch.stack([torch.zeros_like(positives), ((positives + prior) / (rows - positives + prior)).log()])
        loss, gradient, hessian = _newton_terms(logits, labels, weights, high, low)
        length = torch.ones_like(loss)
        step = _solve(hessian, gradient)
        for _ in range(_MOST_STEPS):
            trial = weights - length * step
            new_loss, new_gradient, new_hessian = _newton_terms(logits, labels, trial, high, low)
            better = new_loss <= loss + 1e-12 * loss.abs()
            weights = torch.where(better, trial, weights)
            if bool(((step * gradient).sum(0) <= 1e-10 * loss.abs())[better].all()) and bool(better.all()):
                break
            loss = torch.where(better, new_loss, loss)
            gradient = torch.where(better, new_gradient, gradient)
            hessian = torch.where(better, new_hessian, hessian)
            length = torch.where(better, 1.0, length / 2)
            step = _solve(hessian, gradient)
        self.slopes = torch.where(positives > 0, weights[0], 1.0)
        self.offsets = torch.where(positives > 0, weights[1], 0.0)
        return self

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) sigmoids, each row divided by its sum."""
        return rowwise(self._mapped, logits)

    def _mapped(self, rows: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        # in log space: a row whose sigmoids all underflow still has a sum
        scaled = log_odds(rows) * self.slopes.double() + self.offsets.double()
        return torch.nn.functional.logsigmoid(scaled).softmax(dim=-1)


def log_odds(rows: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
    """`log(p / (1 - p))` of every class's softmax probability, within ±700; the largest one's without cancellation."""
    log_p = rows.log_softmax(dim=-1)
    odds = log_p - torch.log1p(-log_p.exp().clamp(max=0.75))
    top = log_p.argmax(dim=-1, keepdim=True)
    rest = log_p.scatter(-1, top, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return odds.scatter(-1, top, log_p.gather(-1, top) - rest).clamp(-700, 700)


def _newton_terms(
    logits: Float[Tensor, "N C"],
    labels: Int[Tensor, " N"],
    weights: Float[Tensor, "2 C"],
    high: Float[Tensor, " C"],
    low: Float[Tensor, " C"],
) -> tuple[Float[Tensor, " C"], Float[Tensor, "2 C"], Float[Tensor, "3 C"]]:
    """Every class's loss, gradient and Hessian (aa, ab, bb), summed over rows."""
    classes = logits.shape[1]
    loss, gradient, hessian = (
        torch.zeros(size, classes, dtype=torch.float64, device=logits.device) for size in (1, 2, 3)
    )
    chunks = row_chunks(len(logits), 64 * classes)
    for start in chunks:
        x = log_odds(logits[start : start + chunks.step].double())
        target = low.expand_as(x).scatter(1, labels[start : start + chunks.step, None], 0.0)
        true = labels[start : start + chunks.step, None]
        target = target.scatter(1, true, high[true.squeeze(1), None])
        scaled = torch.addcmul(weights[1], x, weights[0])
        loss[0] += (torch.nn.functional.softplus(scaled) - target * scaled).sum(dim=0)
        p = scaled.sigmoid_()
        weight = p * (1 - p)
        difference = p.sub_(target)
        gradient[1] += difference.sum(dim=0)
        gradient[0] += difference.mul_(x).sum(dim=0)
        hessian[2] += weight.sum(dim=0)
        hessian[1] += weight.mul_(x).sum(dim=0)
        hessian[0] += weight.mul_(x).sum(dim=0)
    return loss[0], gradient, hessian


def _solve(hessian: Float[Tensor, "3 C"], gradient: Float[Tensor, "2 C"]) -> Float[Tensor, "2 C"]:
    """The Newton step of every class; a Hessian without inverse is made one by a trifle on its diagonal."""
    aa, ab, bb = hessian
    aa, bb = aa * (1 + 1e-10) + 1e-300, bb * (1 + 1e-10) + 1e-300
    determinant = aa * bb - ab.square()
    return torch.stack([bb * gradient[0] - ab * gradient[1], aa * gradient[1] - ab * gradient[0]]) / determinant
