"""A weighted mean of the members' probabilities, the weights by how likely the mixture makes the labels."""

from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import EnsemblePool, checked
from ood_toolkit.calibrators.ets import mixture_weights


class StackedProbabilityEnsemble(EnsemblePool):
    """`Σ_m w_m softmax(z_m)` with non-negative weights that sum to 1 and maximise the held-out likelihood.

    For members of different quality, where the plain mean lets the worst have an equal say. A convex problem in M
    numbers, solved exactly; a member that adds nothing gets weight 0. Calibrate members first if their temperatures
    differ: `calibrate_then_pool(pool='stacked_probability')`.
    """

    name = "stacked_probability"
    paper = "Wolpert, Stacked Generalization, Neural Networks 1992; for densities: Smyth and Wolpert, NeurIPS 1997"
    cite = "wolpert1992stacked"
    equation = "Σ_m w_m softmax(z_m)"
    weights: Float[Tensor, " M"]

    def fit(self, member_logits: Float[Tensor, "M N C"], labels: Int[Tensor, " N"]) -> Self:
        """Finds the weights on held-out logits of all members. Returns itself."""
        true = []
        for logits in member_logits:
            logits, labels = checked(logits, labels)
            true.append(-torch.nn.functional.cross_entropy(logits, labels, reduction="none").double())
        log_likelihoods = torch.stack(true, dim=1)
        # only ratios within a row matter, so the largest may be 1
        scaled = (log_likelihoods - log_likelihoods.amax(dim=1, keepdim=True)).exp()
        weights = mixture_weights(scaled)
        self.weights = (weights / weights.sum()).to(member_logits.device)
        return self

    def forward(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
        """(N, C) logarithm of the weighted mean probability."""
        if len(member_logits) != len(self.weights):
            raise ValueError(f"fitted on {len(self.weights)} members, but got logits of {len(member_logits)}")
        log_weights = self.weights.log().to(member_logits.dtype)
        total = member_logits[0].log_softmax(dim=-1) + log_weights[0]
        for logits, log_weight in zip(member_logits[1:], log_weights[1:], strict=True):
            total = torch.logaddexp(total, logits.log_softmax(dim=-1) + log_weight)
        return total
