"""Energy score: how little mass the logits put anywhere."""

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.outputs import Outputs


def energy(logits: Float[Tensor, "N C"], temperature: float = 1.0) -> Float[Tensor, " N"]:
    """`-T log Σ_c exp(z_c / T)`, the free energy E(x; f) of the paper. Low for confident rows."""
    scaled = logits if temperature == 1 else logits / temperature
    return -temperature * scaled.logsumexp(dim=-1)


class EnergyDetector(Detector):
    """Flags inputs whose logits have high free energy. Needs no training data.

    Prefer it to `MSPDetector` when the common offset of the logits carries information: softmax
    cancels that offset, energy keeps it.

    Args:
        temperature: T > 0, in logit units. The paper uses 1.

    Differs from the paper in direction only: it thresholds -E, so there high means in-distribution.
    """

    name = "energy"
    paper = "Liu et al., Energy-based Out-of-distribution Detection, NeurIPS 2020, arXiv:2010.03759"
    cite = "liu2020energy"
    equation = "−T log Σ_c exp(z_c / T)"
    family = "logits"
    reads = frozenset({"logits"})
    needs_offset = True
    cost = "O(C)"

    sweep = {"temperature": (1.0, 10.0, 100.0, 1000.0)}

    allowed = {"temperature": "(0, inf)"}

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        self.temperature = temperature

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) free energies; higher = more out-of-distribution."""
        return energy(outputs.logits, self.temperature)
