"""ExGrad: how far the head's weight would move on average if labels were drawn from the model's own prediction."""

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.gradnorm import GRADIENTS
from ood_toolkit.detectors.softmax import relative_terms
from ood_toolkit.outputs import Outputs


def expected_distance(logits: Float[Tensor, "N C"], order: int = 1) -> Float[Tensor, " N"]:
    """`Σ_c p_c ‖p − e_c‖`, the expected length of the gradient with respect to the logits, e_c the one-hot label.

    With the L1 norm it is `2 Σ_c p_c (1 − p_c)`, twice the Gini impurity. Keeps its relative precision near 0.

    Args:
        logits: divided by the temperature.
        order: of the norm, 1 or 2.
    """
    shifted, below, ties, others = relative_terms(logits)
    squares = below.square().sum(dim=1, keepdim=True) + ties
    total = 1 + others
    if order == 1:
        return (2 * (others * (2 + others) - squares) / total.square()).squeeze(1)
    # all terms are relative to the largest, which is 1: what remains without it is known without a difference
    terms = shifted.exp()
    is_largest = terms == 1
    rest = torch.where(is_largest, others, total - terms)
    elsewhere = torch.where(is_largest, squares, 1 + squares - terms.square())
    return (terms * torch.hypot(rest, elsewhere.sqrt())).sum(dim=1) / total.squeeze(1).square()


class ExGradDetector(Detector):
    """Flags inputs whose head would have to move far, whatever label the model's own prediction draws.

    The norm of the gradient of `−log softmax(z / T)_c` with respect to the head's weight, averaged over classes c with
    the predicted probabilities. The gradient is the outer product of `p − e_c` and f, so that no backward pass is
    needed: `‖f‖ · Σ_c p_c ‖p − e_c‖ / T`. `gradnorm` takes the norm of the gradient averaged over uniform labels, and
    large there means familiar; here the label is drawn from p, and large means strange. Needs no training data.

    Args:
        temperature: T > 0.
        norm: 1 or 2, the order of the norm.
        gradient_of: "weight", or "weight+bias", which adds the bias's gradient.

    Differs from the first author's code, which calls it EpiGrad, in that its gradients are of weight and bias
    (`gradient_of="weight+bias"`), in the L1 norm. That code turns a score round where its AUROC is below ½; here large
    is always strange. The paper's own choice of norm could not be read. As it argues, gradients are not needed: it is a
    feature norm times the impurity of the softmax.
    """

    name = "exgrad"
    paper = "Igoe et al., How Useful are Gradients for OOD Detection Really?, 2022, arXiv:2205.10439"
    cite = "igoe2022useful"
    equation = "‖f‖ Σ_c p_c ‖p − e_c‖ / T, with the L1 norm 2 ‖f‖₁ Σ_c p_c (1 − p_c) / T"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D)"

    allowed = {"temperature": "(0, inf)", "norm": (1, 2), "gradient_of": GRADIENTS}

    def __init__(self, temperature: float = 1.0, norm: int = 1, gradient_of: str = "weight") -> None:
        super().__init__()
        self.temperature = temperature
        self.norm = norm
        self.gradient_of = gradient_of

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) expected gradient norms ≥ 0; higher = more out-of-distribution."""
        size = torch.linalg.vector_norm(outputs.features, ord=self.norm, dim=1)
        if self.gradient_of == "weight+bias":
            size = size + 1 if self.norm == 1 else size.square().add_(1).sqrt_()
        return size * expected_distance(outputs.logits / self.temperature, self.norm) / self.temperature
