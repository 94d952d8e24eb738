"""Rel-U: uncertainty measured with the confusions that the classifier is seen to make."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import log_probabilities
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks


class RelUDetector(Detector):
    """Flags predictions that are spread over pairs of classes which wrong predictions are spread over, `pᵀ D p`.

    For misclassification detection with labelled rows at hand, some of them wrong: held-out ones, since a network
    makes few mistakes on its training rows. Without any it measures the Gini coefficient, as DOCTOR does.

    `D_ij = relu(λ E[p_i p_j | wrong] − (1 − λ) E[p_i p_j | right])` off the diagonal, 0 on it, scaled to unit
    Frobenius norm (the paper's closed form).

    Args:
        trade_off: λ in [0, 1]. The authors' code uses 0.5; larger values trust the wrong rows more.
        temperature: T > 0 that divides the logits. The authors' code uses 1; the paper tunes both.

    Differs from the authors' code in one case: without a wrong row its mean is NaN, here it is 0.
    """

    name = "rel_u"
    paper = (
        "Dadalto et al., A Data-Driven Measure of Relative Uncertainty for Misclassification Detection, ICLR 2024, "
        "arXiv:2306.01710"
    )
    cite = "dadalto2024relative"
    equation = "pᵀ D p with D_ij ∝ relu(λ E[p_i p_j | wrong] − (1 − λ) E[p_i p_j | right]), D_ii = 0"
    family = "logits"
    needs = "train"
    held_out = True
    reads = frozenset({"logits"})
    cost = "O(C²)"
    distances: Float[Tensor, "C C"]

    allowed = {"trade_off": "[0, 1]", "temperature": "(0, inf)"}

    def __init__(self, trade_off: float = 0.5, temperature: float = 1.0) -> None:
        super().__init__()
        self.trade_off = trade_off
        self.temperature = temperature

    def fit(self, train: Outputs) -> Self:
        """Learns D from the labelled rows. Returns itself."""
        products = torch.zeros(2, train.classes, train.classes, dtype=torch.float64, device=train.device)
        counts = [0, 0]
        for batch in blocks(train):
            for wrong in (0, 1):
                rows = (batch.labels >= 0) & (batch.correct != bool(wrong))
                p = log_probabilities(batch.logits[rows].double() / self.temperature).exp()
                products[wrong] += p.T @ p
                counts[wrong] += len(p)
        if sum(counts) == 0:
            raise ValueError("Rel-U needs labelled training rows, but there are none")
        right, wrong = (product / max(1, count) for product, count in zip(products, counts, strict=True))
        distances = (self.trade_off * wrong - (1 - self.trade_off) * right).relu().fill_diagonal_(0.0)
        if not distances.any():
            distances = torch.ones_like(distances).fill_diagonal_(0.0)
        self.distances = (distances / distances.norm()).to(train.head.weight.dtype)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 1]; higher = more likely wrong, or out-of-distribution."""
        p = log_probabilities(outputs.logits / self.temperature).exp()
        return ((p @ self.distances) * p).sum(dim=1)
