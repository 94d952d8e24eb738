"""Weighted energy: the free energy with a say in how much every class counts."""

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.energy import energy
from ood_toolkit.outputs import Outputs


def weighted_energy(logits: Float[Tensor, "N C"], weights: Float[Tensor, " C"]) -> Float[Tensor, " N"]:
    """`−log Σ_c relu(w_c) exp(z_c)`."""
    return -(logits + weights.relu().log()).logsumexp(dim=-1)


class WeightedEnergyDetector(Detector):
    """Flags inputs whose weighted logits have high free energy. Needs no training data.

    The paper learns the weights together with the network, with virtual outliers; take them from such a network.
    Without weights it is the energy at T = 1.

    Args:
        weights: one number per class; negative ones count as 0. None means 1 for every class.

    Differs from the paper in direction only: it thresholds the negative energy.
    """

    name = "weighted_energy"
    paper = "Du et al., VOS: Learning What You Don't Know by Virtual Outlier Synthesis, ICLR 2022, arXiv:2202.01197"
    cite = "du2022vos"
    equation = "−log Σ_c relu(w_c) exp(z_c)"
    family = "logits"
    reads = frozenset({"logits"})
    needs_offset = True
    cost = "O(C)"

    allowed = {"weights": "(-inf, inf)"}

    def __init__(self, weights: tuple[float, ...] | None = None) -> None:
        super().__init__()
        if weights is not None and max(weights) <= 0:
            raise ValueError("at least one class needs a weight above 0")
        self.weights = weights

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) free energies; higher = more out-of-distribution."""
        logits = outputs.logits
        if self.weights is None:
            return energy(logits)
        if len(self.weights) != logits.shape[1]:
            raise ValueError(f"{len(self.weights)} weights for {logits.shape[1]} classes")
        return weighted_energy(logits, torch.tensor(self.weights, dtype=logits.dtype, device=logits.device))
