"""KL matching: how far the softmax is from the typical softmax of every class."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.entropy import entropy
from ood_toolkit.detectors.softmax import class_means, log_probabilities
from ood_toolkit.outputs import Outputs


def smallest_divergence(logits: Float[Tensor, "N C"], log_templates: Float[Tensor, "K C"]) -> Float[Tensor, " N"]:
    """`min_k KL(p ‖ d_k)`, p the softmax of the logits."""
    logs = log_probabilities(logits)
    # −Σ p log d is a mean of positive terms, so one matrix product keeps its relative precision
    return -(logs.exp() @ log_templates.T).amax(dim=1) - entropy(logs)


class KLMatchingDetector(Detector):
    """Flags inputs whose softmax resembles the mean softmax of no class.

    Choose it where classes are confused in regular ways: a softmax that is spread over a usual pair is no surprise.

    Differs from the paper in nothing. `d_k` is the mean softmax of the training rows *predicted* as k; a class that
    is never predicted has none and is left out. The `detectors` package and pytorch-ood 0.2 compare with the
    predicted class only.
    """

    name = "kl_matching"
    paper = (
        "Hendrycks et al., Scaling Out-of-Distribution Detection for Real-World Settings, ICML 2022, arXiv:1911.11132"
    )
    cite = "hendrycks2022scaling"
    equation = "min_k KL(p ‖ d_k) with d_k = E[p | y = k]"
    family = "logits"
    needs = "train"
    reads = frozenset({"logits"})
    cost = "O(C²)"
    log_templates: Float[Tensor, "K C"]

    def fit(self, train: Outputs) -> Self:
        """Learns the mean softmax of each predicted class; labels are not used. Returns itself."""
        means, counts = class_means(
            train, lambda batch: batch.logits.double().softmax(dim=1), lambda batch: batch.predictions
        )
        if not counts.any():
            raise ValueError("KL matching needs training rows, but there are none")
        dtype = train.head.weight.dtype
        # a class that no training row gives any mass costs 88 nats times its probability, not infinity
        self.log_templates = means[counts > 0].clamp_min(torch.finfo(dtype).tiny).log().to(dtype)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) at least 0 up to rounding, in nats; higher = more out-of-distribution."""
        return smallest_divergence(outputs.logits, self.log_templates)
