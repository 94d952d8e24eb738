"""Maximum softmax probability, the baseline of the field."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import odds_of_others
from ood_toolkit.outputs import Outputs


def one_minus_msp(logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """`1 − max_c softmax(z)_c`, computed as the sum of the *other* softmax terms.

    A float32 softmax rounds to 1.0 from about 17 logit units on, and the ties this makes move AUROC. The sum of the
    other terms keeps full relative precision near 0.
    """
    others = odds_of_others(logits).squeeze(-1)
    return others / (1 + others)


class MSPDetector(Detector):
    """Flags inputs whose most likely class has a low softmax probability. Needs no training data.

    The baseline every paper reports, and the strongest simple choice for misclassification detection.

    Differs from the paper in direction only: it is 1 − MSP, so that high means out-of-distribution.
    """

    name = "msp"
    paper = (
        "Hendrycks and Gimpel, A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural "
        "Networks, ICLR 2017, arXiv:1610.02136"
    )
    cite = "hendrycks2017baseline"
    equation = "1 − max_c p_c"
    family = "logits"
    reads = frozenset({"logits"})
    cost = "O(C)"

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 1 − 1/C]; higher = more out-of-distribution, or more likely wrong."""
        return one_minus_msp(outputs.logits)
