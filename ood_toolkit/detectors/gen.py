"""GEN: a generalised entropy of the largest probabilities."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import relative_terms
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import largest_values


def generalised_entropy(logits: Float[Tensor, "N C"], gamma: float, top: int) -> Float[Tensor, " N"]:
    """`Σ p_c^γ (1 − p_c)^γ` over the `top` largest probabilities (the paper's G_γ, negated)."""
    terms = relative_terms(logits)
    shifted = largest_values(terms.shifted, top) if top < logits.shape[-1] else terms.shifted
    logs = shifted - terms.others.log1p()
    # p^γ (1 − p)^γ by one exponential: powers take three times as long
    return (gamma * (logs + (-logs.expm1()).log())).exp().sum(dim=-1)


class GENDetector(Detector):
    """Flags inputs by a generalised entropy that small changes near certainty move much. Needs no training data.

    Usually the best score that sees only logits; γ near 0 counts how many classes are not ruled out.

    Args:
        gamma: γ > 0, below 1 in the paper, which uses 0.1.
        top: M, how many of the largest probabilities count. The paper uses 100 on ImageNet; with fewer classes all.

    Differs from the paper in direction only: its G_γ is the negative. pytorch-ood averages over the M terms, clips p
    at 1e-7 and uses all classes by default; this sums, and neither p nor 1 − p is rounded.
    """

    name = "gen"
    paper = "Liu et al., GEN: Pushing the Limits of Softmax-Based Out-of-Distribution Detection, CVPR 2023"
    cite = "liu2023gen"
    equation = "Σ_{i ≤ M} p₍ᵢ₎^γ (1 − p₍ᵢ₎)^γ over the M largest probabilities"
    family = "logits"
    reads = frozenset({"logits"})
    cost = "O(C)"

    sweep = {"gamma": (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0), "top": (10, 50, 100, 200, 500, 1000)}

    allowed = {"gamma": "(0, inf)", "top": "[1, inf)"}

    def __init__(self, gamma: float = 0.1, top: int = 100) -> None:
        super().__init__()
        self.gamma = gamma
        self.top = top

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) above 0; higher = more out-of-distribution."""
        return generalised_entropy(outputs.logits, self.gamma, self.top)
