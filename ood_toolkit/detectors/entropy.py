"""Entropy of the softmax: how many classes share the probability."""

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import relative_terms
from ood_toolkit.outputs import Outputs


def entropy(log_probabilities: Float[Tensor, "... C"]) -> Float[Tensor, "..."]:
    """`−Σ_c p_c log p_c` of log-probabilities, in nats; a class with p = 0 adds 0."""
    finite = log_probabilities.clamp_min(torch.finfo(log_probabilities.dtype).min)
    return -(log_probabilities.exp() * finite).sum(dim=-1)


def softmax_entropy(logits: Float[Tensor, "... C"]) -> Float[Tensor, "..."]:
    """The entropy of the softmax, in nats: `log Z + Σ_c p_c (z_max − z_c)`, all terms positive."""
    shifted, below, _, others = relative_terms(logits)
    # 0 × −inf would be NaN
    spread = shifted.clamp_min_(torch.finfo(shifted.dtype).min).mul_(below).sum(dim=-1, keepdim=True)
    return (others.log1p() - spread / (1 + others)).squeeze(-1)


class EntropyDetector(Detector):
    """Flags inputs whose softmax is spread over many classes. Needs no training data.

    Prefer it to `MSPDetector` where it matters how the rest of the probability is spread, not only how much it is.

    Differs from the paper in nothing but scale: Hendrycks and Gimpel measure the divergence from the uniform
    distribution, `log C − H`. pytorch-ood clips p at 1e-7, which shows at entropies below about 1e-5; this does not.
    """

    name = "entropy"
    paper = (
        "Hendrycks and Gimpel, A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural "
        "Networks, ICLR 2017, arXiv:1610.02136"
    )
    cite = "hendrycks2017baseline"
    equation = "−Σ_c p_c log p_c"
    family = "logits"
    reads = frozenset({"logits"})
    cost = "O(C)"

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, log C] nats; higher = more out-of-distribution."""
        return softmax_entropy(outputs.logits)
