"""L1 norm of the features: how strongly the network responds at all."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.outputs import Outputs


class L1NormDetector(Detector):
    """Flags inputs to which the features hardly respond. Needs no training data.

    The factor of GradNorm that sees the features (there U = ‖f‖₁), and a check on every method that
    multiplies by a norm: where it does as well alone, the rest adds nothing.

    Differs from the `detectors` package in direction: there a large norm means out-of-distribution, against the
    paper, in which in-distribution features are the larger ones.
    """

    name = "l1norm"
    paper = (
        "Huang et al., On the Importance of Gradients for Detecting Distributional Shifts in the Wild, NeurIPS 2021, "
        "arXiv:2110.00218"
    )
    cite = "huang2021gradnorm"
    equation = "−‖f‖₁"
    family = "features"
    reads = frozenset({"features"})
    cost = "O(D)"

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) `−‖f‖₁`; higher = more out-of-distribution."""
        return -outputs.features.abs().sum(dim=1)
