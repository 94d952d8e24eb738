"""Pools without a parameter: many members' logits in, one set of log-probabilities out.

A member is anything that gives logits for the same rows and classes: independently trained networks, snapshots of
one run, repeated passes with dropout on, passes over augmented copies of the images. Stack their logits to (M, N, C);
members may see different image sizes and transforms.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.base import EnsemblePool


def mean_log_probability(member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
    """`log (1/M) Σ_m softmax(z_m)`, in log space throughout and one member at a time."""
    total = member_logits[0].log_softmax(dim=-1)
    for logits in member_logits[1:]:
        total = torch.logaddexp(total, logits.log_softmax(dim=-1))
    return total - math.log(len(member_logits))


class MeanProbabilityEnsemble(EnsemblePool):
    """Averages the members' probabilities: the deep ensemble, a mixture of members.

    The default. Members that disagree make the pool shy, which is usually what calibration wants; a pool of
    well-calibrated members is under-confident, so calibrate the pool (`pool_then_calibrate`).
    """

    name = "mean_probability"
    paper = (
        "Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles, "
        "NeurIPS 2017, arXiv:1612.01474"
    )
    cite = "lakshminarayanan2017ensembles"
    equation = "(1/M) Σ_m softmax(z_m)"

    def forward(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
        """(N, C) logarithm of the mean probability."""
        return mean_log_probability(member_logits)


class MeanLogitEnsemble(EnsemblePool):
    """Averages the members' logits and normalises.

    The same distribution as `geometric_mean`: the softmax cancels whatever a row's logits have in common, so it
    does not matter whether members are normalised first. Bolder than the mean probability; one member that finds a
    class impossible (-inf) vetoes it.
    """

    name = "mean_logit"
    paper = "Hinton, Training Products of Experts by Minimizing Contrastive Divergence, Neural Computation 2002"
    cite = "hinton2002products"
    equation = "softmax((1/M) Σ_m z_m)"

    def forward(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
        """(N, C) log-softmax of the mean logit."""
        return member_logits.mean(dim=0).log_softmax(dim=-1)


class GeometricMeanEnsemble(EnsemblePool):
    """Averages the members' log-probabilities and normalises: the normalised geometric mean.

    Equal to `mean_logit` up to rounding, and here under its own name because papers use both. Of all distributions
    it has the smallest mean Kullback-Leibler divergence to the members, KL(pool ‖ member).
    """

    name = "geometric_mean"
    paper = "Genest and Zidek, Combining Probability Distributions, Statistical Science 1986 (the logarithmic pool)"
    cite = "genest1986combining"
    equation = "p_c ∝ exp((1/M) Σ_m log softmax_c(z_m))"

    def forward(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
        """(N, C) normalised mean of the log-probabilities."""
        total = member_logits[0].log_softmax(dim=-1)
        for logits in member_logits[1:]:
            total = total + logits.log_softmax(dim=-1)
        return (total / len(member_logits)).log_softmax(dim=-1)


class MajorityVoteEnsemble(EnsemblePool):
    """Each member votes for its most likely class; the probability of a class is its share of the votes.

    Choose it when members' confidences cannot be compared. The mean probability casts one further vote of weight
    `soft_vote`: it breaks ties, and leaves no class of the members at probability 0. At most 1, it never overturns a
    majority.

    Args:
        soft_vote: weight of the mean probability, in votes, 0 to 1. At 0 shares are plain, ties go to the lowest
            class number, and classes without a vote get log-probability -inf.
    """

    name = "majority_vote"
    paper = "Hansen and Salamon, Neural Network Ensembles, TPAMI 1990"
    cite = "hansen1990ensembles"
    equation = "p_c ∝ #{m : argmax z_m = c} + soft_vote · (1/M) Σ_m softmax_c(z_m)"

    allowed = {"soft_vote": "[0, 1]"}

    def __init__(self, soft_vote: float = 0.01) -> None:
        super().__init__()
        if not 0 <= soft_vote <= 1:
            raise ValueError(f"soft_vote must lie in [0, 1], got {soft_vote}")
        self.soft_vote = soft_vote

    def forward(self, member_logits: Float[Tensor, "M N C"]) -> Float[Tensor, "N C"]:
        """(N, C) logarithm of the share of votes."""
        votes = torch.zeros_like(member_logits[0])
        for logits in member_logits:
            votes.scatter_add_(1, logits.argmax(dim=1, keepdim=True), torch.ones_like(logits[:, :1]))
        if self.soft_vote:
            votes = votes + self.soft_vote * mean_log_probability(member_logits).exp()
        return (votes / (len(member_logits) + self.soft_vote)).log()
