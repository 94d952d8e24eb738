"""Logistic regression on a few features, by Newton's method in float64: what Platt and beta calibration share."""

import torch
from jaxtyping import Float
from torch import Tensor

_MOST_STEPS = 100


def platt_targets(correct: Float[Tensor, " N"], prior_count: float) -> Float[Tensor, " N"]:
    """Targets in place of 0 and 1: `a / (N₋ + 2a)` and `(N₊ + a) / (N₊ + 2a)` with a = `prior_count`.

    With a = 1 Platt's, the posterior means under a uniform prior; with a = 0 the labels themselves.
    """
    right = correct.sum()
    wrong = len(correct) - right
    low = prior_count / (wrong + 2 * prior_count).clamp_min(1e-300)
    high = (right + prior_count) / (right + 2 * prior_count).clamp_min(1e-300)
    return torch.where(correct > 0, high, low)


def fit_logistic(features: Float[Tensor, "N K"], targets: Float[Tensor, " N"]) -> Float[Tensor, " K"]:
    """Weights w that maximise `Σ t log σ(xw) + (1 - t) log σ(-xw)`, to the precision of float64.

    Where features separate the targets no finite maximum exists, and this raises.
    """
    features, targets = features.double(), targets.double()
    scale = features.abs().amax(dim=0).clamp_min(1e-300)
    features = features / scale
    weights = features.new_zeros(features.shape[1])
    loss = _loss(features @ weights, targets)
    for _ in range(_MOST_STEPS):
        probabilities = (features @ weights).sigmoid()
        gradient = features.T @ (targets - probabilities)
        hessian = (features.T * (probabilities * (1 - probabilities))) @ features
        # pseudo-inverse: a feature that repeats another, or is constant 0, gets no say of its own
        step = torch.linalg.pinv(hessian, hermitian=True) @ gradient
        decrease = float(gradient @ step)
        if decrease < 1e-20 * len(targets):
            return weights / scale
        length = 1.0
        while length > 1e-10:
            trial = _loss(features @ (weights + length * step), targets)
            if trial <= loss:
                break
            length /= 2
        else:
            return weights / scale  # no descent left in float64
        improvement, loss = loss - trial, trial
        weights = weights + length * step
        if improvement == 0:
            return weights / scale
        if loss < 1e-9 * len(targets):
            break
    raise ValueError(
        "the predictions' confidence separates right from wrong perfectly (or all rows are right, or all wrong), so "
        "the likelihood has no finite maximum; give more held-out rows, or set prior_count=1"
    )


def _loss(margins: Float[Tensor, " N"], targets: Float[Tensor, " N"]) -> float:
    return float(torch.nn.functional.binary_cross_entropy_with_logits(margins, targets, reduction="sum"))
