"""pNML: the regret of not having been trained on the input, for the last layer."""

import math
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import log_probabilities
from ood_toolkit.outputs import Head, Outputs
from ood_toolkit.stats import l2_normalise, moments, one_group, whitening


def regret(logits: Float[Tensor, "N C"], leverage: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """`log Σ_c p_c / (p_c + p_c^κ (1 − p_c))` with κ = h / (1 + h), h the leverage of the row."""
    logs = log_probabilities(logits)
    kappa = (leverage / (1 + leverage)).unsqueeze(-1)
    top = logs.max(dim=-1, keepdim=True).indices
    # each term is 1 / (1 + u) with u = p^(κ − 1) (1 − p); beyond the largest u of the dtype it adds nothing
    rest = logs.expm1().neg_()
    largest = 0.99 * math.log(torch.finfo(logs.dtype).max)
    u = logs.mul_(kappa - 1).clamp_max_(largest).exp_().mul_(rest)
    u_top = u.gather(-1, top).squeeze(-1)
    terms = u.add_(1).reciprocal_().scatter_(-1, top, 0.0)
    # Σ − 1 = the other terms − (1 − the largest), both small where the softmax is sure
    return (terms.sum(dim=-1) - u_top / (1 + u_top)).log1p()


class PNMLDetector(Detector):
    """Flags inputs on which a last layer that had also been trained on them would have been sure of any class.

    Choose it where both an undecided softmax and a direction that the training features never take should count. The
    leverage is `h = fᵀ (XᵀX)⁺ f` with X all training features; features have unit length, in the logits too.

    Differs from the paper's pseudocode in the unit length, which the authors' code and pytorch-ood have too, and in
    the division by log C, which they have as well.
    """

    name = "pnml"
    paper = (
        "Bibas et al., Single Layer Predictive Normalized Maximum Likelihood for Out-of-Distribution Detection, "
        "NeurIPS 2021, arXiv:2110.09246"
    )
    cite = "bibas2021pnml"
    equation = "log Σ_c p_c / (p_c + p_c^κ (1 − p_c)) / log C with κ = h / (1 + h), h = f̂ᵀ (XᵀX)⁺ f̂"
    family = "features"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(D² + CD)"
    projection: Float[Tensor, "D R"]
    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, " C"]

    def fit(self, train: Outputs) -> Self:
        """Learns the inverse correlation of the features, and the head; labels are not used. Returns itself."""
        if not len(train):
            raise ValueError("pNML needs training rows, but there are none")
        gathered = moments(train, groups=one_group, transform=l2_normalise)
        correlation = len(train) * (gathered.total + torch.outer(gathered.mean, gathered.mean))
        self.projection = whitening(correlation).to(train.head.weight.dtype)
        self.weight, self.bias = train.head.weight.clone(), train.head.bias.clone()
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 1], the regret in units of log C; higher = more out-of-distribution."""
        rows = l2_normalise(outputs.features)
        leverage = torch.linalg.vector_norm(rows @ self.projection, dim=1).square()
        return regret(Head(self.weight, self.bias)(rows), leverage) / math.log(len(self.bias))
