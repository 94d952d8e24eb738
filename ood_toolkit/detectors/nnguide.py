"""NNGuide: the energy, trusted as far as the nearest training rows are near and confident."""

from typing import Self

from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.energy import energy
from ood_toolkit.detectors.train_rows import subset
from ood_toolkit.outputs import Outputs
from ood_toolkit.scratch import room_for
from ood_toolkit.stats import l2_normalise, nearest


class NNGuideDetector(Detector):
    """Flags inputs with a high energy, or whose direction no confident training row shares.

    Choose it to repair an energy that is overconfident far away from the training data, at the cost of a search. The
    score is `−E(x) · G(x)`, where E is the negative free energy and the guidance G the mean of the k largest
    `E(xᵢ) ⟨f/‖f‖, fᵢ/‖fᵢ‖⟩` over the bank of training rows.

    Args:
        k: neighbours. 10 in the paper.
        alpha: share of the training rows that enters the bank, drawn at random; in (0, 1].
        seed: of that draw.

    Differs from OpenOOD, which adds 1e-10 to every normalised coordinate, fills the bank with the loader's first
    batches instead of a random share, and defaults to k = 100, alpha = 0.01.
    """

    name = "nnguide"
    paper = "Park et al., Nearest Neighbor Guidance for Out-of-Distribution Detection, ICCV 2023, arXiv:2309.14888"
    cite = "park2023nnguide"
    equation = "−E(f) (1/k) Σ_i E(f_i) cos(f, f_i) over the k largest terms, with E = log Σ_c exp(z_c)"
    needs = "train"
    reads = frozenset({"logits", "features"})
    cost = "O(ND)"
    block_rows = 4096  # each block goes through the training rows
    bank: Float[Tensor, "M D"]

    allowed = {"k": "[1, inf)", "alpha": "(0, 1]"}

    def __init__(self, k: int = 10, alpha: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha, the share of training rows in the bank, must lie in (0, 1], got {alpha}")
        self.k = k
        self.alpha = alpha
        self.seed = seed

    def fit(self, train: Outputs) -> Self:
        """Fills the bank with normalised features times their energy. Returns itself."""
        rows = max(1, int(len(train) * self.alpha)) if len(train) else 0
        bank = room_for(rows, train.width, like=train.head.weight)
        start = 0
        for batch in subset(train, rows, self.seed):
            guide = l2_normalise(batch.features) * -energy(batch.logits).unsqueeze(1)
            bank[start : start + len(batch)] = guide
            start += len(batch)
        if not 1 <= self.k <= rows:
            raise ValueError(f"k must lie between 1 and the {rows} rows of the bank, got {self.k}")
        self.bank = bank
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) negative guided energies; higher = more out-of-distribution."""
        products, _ = nearest(l2_normalise(outputs.features), self.bank, self.k, largest_product=True)
        return energy(outputs.logits) * products.mean(dim=1)
