"""DOCTOR: the odds that a prediction is wrong, for a reader who only sees the softmax."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import odds_of_others, relative_terms
from ood_toolkit.outputs import Outputs

_PAPER = (
    "Granese et al., DOCTOR: A Simple Method for Detecting Misclassification Errors, NeurIPS 2021, arXiv:2106.02395"
)


def gini_odds(logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """`(1 − g) / g` with g = Σ_c p_c² (the paper's discriminator D_α)."""
    _, below, ties, others = relative_terms(logits)
    squares = below.square().sum(dim=-1, keepdim=True) + ties
    # g = (1 + squares) / (1 + others)², and 1 − g, which would round, is Σ p (1 − p)
    return ((others * (2 + others) - squares) / (1 + squares)).squeeze(-1)


def error_odds(logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """`(1 − max p) / max p` (the paper's discriminator D_β)."""
    return odds_of_others(logits).squeeze(-1)


class DoctorAlphaDetector(Detector):
    """Flags predictions by the odds that a class drawn from the softmax differs from a second draw.

    For misclassification detection without training data. Unlike MSP it also looks at how the rest is spread.

    Args:
        temperature: T > 0 that divides the logits; the paper uses 1 where only probabilities are known.

    Differs from the paper in nothing; the `detectors` package leaves out the ratio and returns 1 − g, which ranks
    alike. The paper's input perturbation needs the network and is not here.
    """

    name = "doctor_alpha"
    paper = _PAPER
    cite = "granese2021doctor"
    equation = "(1 − g) / g with g = Σ_c p_c²"
    family = "logits"
    reads = frozenset({"logits"})
    cost = "O(C)"

    allowed = {"temperature": "(0, inf)"}

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, C − 1]; higher = more likely wrong, or out-of-distribution."""
        return gini_odds(outputs.logits / self.temperature)


class DoctorBetaDetector(Detector):
    """Flags predictions by the odds of an error if the softmax is right. Ranks as MSP at the same temperature.

    Choose it where the score itself should be read as odds.

    Args:
        temperature: T > 0 that divides the logits; the paper uses 1 where only probabilities are known.

    Differs from the paper in nothing.
    """

    name = "doctor_beta"
    paper = _PAPER
    cite = "granese2021doctor"
    equation = "(1 − p_y) / p_y"
    family = "logits"
    reads = frozenset({"logits"})
    cost = "O(C)"

    allowed = {"temperature": "(0, inf)"}

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, C − 1]; higher = more likely wrong, or out-of-distribution."""
        return error_odds(outputs.logits / self.temperature)
