"""Maximum logit: the raw evidence for the most likely class."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.outputs import Outputs


class MaxLogitDetector(Detector):
    """Flags inputs whose largest logit is small. Needs no training data.

    Prefer it to `MSPDetector` where there are many classes: probability that is spread over a few similar classes
    lowers MSP, not the largest logit.

    Differs from the paper in nothing: its anomaly score is −max as well.
    """

    name = "maxlogit"
    paper = (
        "Hendrycks et al., Scaling Out-of-Distribution Detection for Real-World Settings, ICML 2022, arXiv:1911.11132"
    )
    cite = "hendrycks2022scaling"
    equation = "−max_c z_c"
    family = "logits"
    reads = frozenset({"logits"})
    needs_offset = True
    cost = "O(C)"

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) `−max_c z_c`, in logit units; higher = more out-of-distribution."""
        return -outputs.logits.amax(dim=1)
