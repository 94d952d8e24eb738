"""MaxLogit-pNorm: the largest logit as a share of the size of all, which mends broken confidence estimators."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.msp import one_minus_msp
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks

_MSP = -1.0
"""The learned p of a fit that fell back to MSP."""


def maxlogit_pnorm(logits: Float[Tensor, "N C"], p: float) -> Float[Tensor, " N"]:
    """`−max_c z̃_c / ‖z̃‖_p` with z̃ = z − mean(z). p = 0 divides by C: no normalisation.

    Logits that are all equal give 0.
    """
    centred = logits - logits.mean(dim=-1, keepdim=True)
    return -centred.amax(dim=-1) / torch.linalg.vector_norm(centred, ord=p, dim=-1).clamp_min(1e-12)


def area_under_risk_coverage(scores: Float[Tensor, " N"], wrong: Float[Tensor, " N"]) -> float:
    """The mean error of the k rows with the lowest scores, over k = 1 … N."""
    errors = wrong.double()[scores.argsort(stable=True)].cumsum(0)
    return float((errors / torch.arange(1, len(errors) + 1, device=errors.device)).mean())


class MaxLogitPNormDetector(Detector):
    """Flags predictions whose largest logit is small beside the p-norm of all logits. For misclassification detection.

    Choose it where MSP ranks right and wrong predictions badly, as it does for many networks trained with modern
    recipes; it also makes MSP-like scores of different inputs comparable in scale. `fit` chooses p among 0 … 9 by the
    area under the risk-coverage curve on labelled rows, and falls back to MSP where no p beats it. Rows the network
    was trained on are all classified correctly and say nothing: give held-out ones.

    Args:
        p: the norm, ≥ 0; None chooses it in `fit`. With a given p nothing is learned and no fit is needed.
        largest_p: the grid is 0, 1, …, largest_p.
        fallback: whether MSP may win the choice.

    Differs from the authors' code in direction only. Their paper tunes p on a validation set in the same way.
    """

    name = "maxlogit_pnorm"
    paper = (
        "Cattelan and Silva, How to Fix a Broken Confidence Estimator: Evaluating Post-hoc Methods for Selective "
        "Classification with Deep Neural Networks, UAI 2024, arXiv:2305.15508"
    )
    cite = "cattelan2024fix"
    equation = "−max_c z̃_c / ‖z̃‖_p with z̃ = z − mean(z)"
    family = "logits"
    needs = "train"
    held_out = True
    reads = frozenset({"logits"})
    cost = "O(C)"
    chosen: Float[Tensor, ""]

    allowed = {"p": "[0, inf]", "largest_p": "[0, 1000]"}

    def __init__(self, p: float | None = None, largest_p: int = 9, fallback: bool = True) -> None:
        super().__init__()
        self.p = p
        self.largest_p = largest_p
        self.fallback = fallback

    def fit(self, train: Outputs) -> Self:
        """Chooses p on the labelled rows. Returns itself."""
        if self.p is not None:
            return self
        grid = ([_MSP] if self.fallback else []) + [float(p) for p in range(self.largest_p + 1)]
        known = train.labels >= 0
        if not known.any():
            raise ValueError("choosing p needs labelled rows, but there are none; give a p instead")
        scores = train.head.weight.new_empty(len(grid), len(train))
        wrong = torch.zeros_like(known)
        start = 0
        for batch in blocks(train):
            rows = slice(start, start + len(batch))
            wrong[rows] = ~batch.correct
            for line, p in zip(scores, grid, strict=True):
                line[rows] = _score(batch.logits, p)
            start += len(batch)
        risks = [area_under_risk_coverage(line[known], wrong[known]) for line in scores]
        best = grid[risks.index(min(risks))]  # the first of equals: MSP, then small p
        self.chosen = torch.tensor(best, dtype=train.head.weight.dtype, device=train.device)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [−1, 0], or 1 − MSP after a fallback; higher = more likely wrong, or out-of-distribution."""
        return _score(outputs.logits, float(self.chosen) if self.p is None else self.p)


def _score(logits: Float[Tensor, "N C"], p: float) -> Float[Tensor, " N"]:
    return one_minus_msp(logits) if p == _MSP else maxlogit_pnorm(logits, p)
