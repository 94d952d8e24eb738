"""GradNorm and its squared-L2 sibling: gradients of the head's weight, without a backward pass."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.outputs import Outputs

GRADIENTS = ("weight", "weight+bias")
"""Of what a gradient can be taken: the head's weight, or all of its parameters."""


class GradNormDetector(Detector):
    """Flags inputs whose softmax needs little gradient to become uniform. Needs no training data.

    It joins feature norm and confidence in one product. The score is minus the L1 norm of the gradient of the
    cross-entropy between the uniform distribution and `softmax(z / T)` with respect to the head's weight, which is an
    outer product: `‖f‖₁ · ‖softmax(z / T) − 1/C‖₁ / T` (the paper's decomposition U · V).

    Args:
        temperature: T > 0; the paper uses 1.
        gradient_of: "weight", the paper's choice, or "weight+bias", which adds the bias's gradient:
            `(‖f‖₁ + 1) · ‖…‖₁ / T`.

    Differs from the authors' code and OpenOOD, which sum the loss over classes where the paper averages: C times.
    """

    name = "gradnorm"
    paper = (
        "Huang et al., On the Importance of Gradients for Detecting Distributional Shifts in the Wild, NeurIPS 2021, "
        "arXiv:2110.00218, Eq. 4 for the gradient"
    )
    cite = "huang2021gradnorm"
    equation = "−‖f‖₁ ‖p − 1/C‖₁ / T"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D)"

    allowed = {"temperature": "(0, inf)", "gradient_of": GRADIENTS}

    def __init__(self, temperature: float = 1.0, gradient_of: str = "weight") -> None:
        super().__init__()
        self.temperature = temperature
        self.gradient_of = gradient_of

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) negative gradient norms; higher = more out-of-distribution."""
        to_uniform = (outputs.logits / self.temperature).softmax(dim=1).sub_(1 / outputs.classes).abs_().sum(dim=1)
        size = outputs.features.abs().sum(dim=1) + (self.gradient_of == "weight+bias")
        return -size * to_uniform / self.temperature


class GradUncertaintyDetector(Detector):
    """Flags inputs that a *confounding* label, every class at once, hardly disturbs. Needs no training data.

    The squared L2 norm where GradNorm takes L1. The loss is the binary cross-entropy between the softmax p and a
    vector of ones; its gradient with respect to the logits is `C p − 1`, so that with respect to the head's weight it
    has the squared norm `‖f‖₂² · ‖C p − 1‖₂²`, and the score is minus that.

    Args:
        gradient_of: "weight+bias", all of the head's parameters: `(‖f‖₂² + 1) · ‖…‖₂²`; or "weight".

    Differs from the paper, which takes the norms of all layers and trains a small network on ID and OOD data to read
    them: this is the head's part, read as pytorch-ood reads it, large = familiar. A supervised reading is not post-hoc.
    """

    name = "graduncertainty"
    paper = "Lee and AlRegib, Gradients as a Measure of Uncertainty in Neural Networks, ICIP 2020, arXiv:2008.08030"
    cite = "lee2020gradients"
    equation = "−(‖f‖₂² + 1) ‖C p − 1‖₂²"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D)"

    allowed = {"gradient_of": GRADIENTS}

    def __init__(self, gradient_of: str = "weight+bias") -> None:
        super().__init__()
        self.gradient_of = gradient_of

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) negative squared gradient norms; higher = more out-of-distribution."""
        to_uniform = outputs.logits.softmax(dim=1).mul_(outputs.classes).sub_(1).square_().sum(dim=1)
        size = outputs.features.square().sum(dim=1) + (self.gradient_of == "weight+bias")
        return -size * to_uniform
