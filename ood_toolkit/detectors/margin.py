"""Margins: the lead of the most likely class over the next."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import relative_terms
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import largest_entries


def softmax_margin(logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """`1 − (p₁ − p₂)` for the two most likely classes, without rounding where p₁ is almost 1."""
    terms = relative_terms(logits)
    top = largest_entries(terms.shifted, 2)[0] - terms.others.log1p()
    return top[..., 1].exp() - top[..., 0].expm1()


class MarginDetector(Detector):
    """Flags predictions whose probability is close to that of the runner-up. Needs no training data.

    For misclassification detection between similar classes; it is blind to what the other classes get.

    Differs from the paper in direction and by a constant: it is 1 − margin, so that high means doubtful.
    """

    name = "margin"
    paper = "Scheffer et al., Active Hidden Markov Models for Information Extraction, IDA 2001"
    cite = "scheffer2001active"
    equation = "1 − (p₍₁₎ − p₍₂₎)"
    family = "logits"
    reads = frozenset({"logits"})
    cost = "O(C)"

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 1]; higher = more likely wrong, or out-of-distribution."""
        return softmax_margin(outputs.logits)


class LogitMarginDetector(Detector):
    """Flags predictions whose logit is close to that of the runner-up. Needs no training data.

    Prefer it to `MarginDetector` where the softmax saturates: it does not depend on the other classes at all.

    Differs from the paper in direction only.
    """

    name = "logit_margin"
    paper = (
        "Streeter, Approximation Algorithms for Cascading Prediction Models, ICML 2018, arXiv:1802.07697; "
        "as used by Cattelan and Silva, UAI 2024, arXiv:2305.15508"
    )
    cite = "streeter2018approximation"
    equation = "−(z₍₁₎ − z₍₂₎)"
    family = "logits"
    reads = frozenset({"logits"})
    cost = "O(C)"

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) `−(z₁ − z₂)`, at most 0, in logit units; higher = more likely wrong, or out-of-distribution."""
        top, _ = largest_entries(outputs.logits, 2)
        return top[:, 1] - top[:, 0]
