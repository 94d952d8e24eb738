"""CF-OOD: for how many neighbours a row would have to ask before enough training rows count it as theirs."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.train_rows import subset
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import l2_normalise, row_chunks, squared_distances


def neighbourhood_sizes() -> Float[Tensor, " levels"]:
    """The neighbourhood sizes that are tried, as shares of the reference rows: fine steps first, as the authors'."""
    fine, middle, coarse = (0.001, 0.1, 100), (0.105, 0.5, 81), (0.51, 0.99, 49)
    return torch.cat([torch.linspace(*part, dtype=torch.float64) for part in (fine, middle, coarse)])


class CFOODDetector(Detector):
    """Flags inputs that few training rows would count among their own nearest neighbours.

    The concentration-free outlier factor: it ranks by *reverse* neighbourhood, which does not degenerate in many
    dimensions as distances do. The score is the smallest share κ of the reference rows such that at least `fraction`
    of them have the row among their κ n nearest neighbours; features are normalised to unit length.

    Args:
        fraction: share of reference rows that must count the row as theirs, in (0, 1]; 0.01 in the authors' code.
        alpha: share of the training rows that are reference rows, drawn at random; 0.1 in the authors' code.
        seed: of that draw.

    The score takes the 230 values of `neighbourhood_sizes` and 1, so ties are many, by the authors' construction.
    """

    name = "cfood"
    paper = (
        "Angiulli, Fassetti and Zupi, CF-OOD: Concentration-Free Density Estimation for Reliable OOD Detection, 2026"
    )
    cite = "angiulli2026cfood"
    equation = "min {κ : #{i : f is among the κ n nearest of f_i} ≥ fraction · n}, n reference rows of unit length"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(αND)"
    block_rows = 4096  # each block goes through the training rows
    reference: Float[Tensor, "M D"]
    radii: Float[Tensor, "M levels"]
    levels: Float[Tensor, " levels_and_one"]

    sweep = {"alpha": (0.1, 0.5, 1.0), "fraction": (0.001, 0.005, 0.01, 0.05)}

    def __init__(self, fraction: float = 0.01, alpha: float = 0.1, seed: int = 0) -> None:
        super().__init__()
        if not 0 < alpha <= 1 or not 0 < fraction <= 1:
            raise ValueError(f"fraction and alpha are shares in (0, 1], got {fraction} and {alpha}")
        self.fraction = fraction
        self.alpha = alpha
        self.seed = seed

    def fit(self, train: Outputs) -> Self:
        """Stores the reference rows and the radii of their neighbourhoods. Returns itself."""
        rows = max(2, int(len(train) * self.alpha))
        if len(train) < rows:
            raise ValueError(f"fitting needs at least 2 training rows, got {len(train)}")
        reference = torch.cat([l2_normalise(batch.features) for batch in subset(train, rows, self.seed)])
        sizes = neighbourhood_sizes()
        positions = (sizes * rows - 1).long()  # truncated towards 0
        grows = torch.cat([positions.new_ones(1, dtype=torch.bool), positions[1:] > positions[:-1]])
        sizes, positions = sizes[grows], positions[grows].to(reference.device)
        radii = []
        for start in (steps := row_chunks(rows, 2 * rows)):
            near = squared_distances(reference[start : start + steps.step], reference).sort(dim=1).values
            radii.append(near[:, positions + 1])  # the nearest row is the row itself
        self.reference, self.radii = reference, torch.cat(radii)
        self.levels = torch.cat([sizes, sizes.new_ones(1)]).to(reference)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) neighbourhood shares in (0, 1]; higher = more out-of-distribution."""
        enough = max(1, -int(-self.fraction * len(self.reference) // 1))  # rounded up
        features = l2_normalise(outputs.features)
        scores = []
        for start in (steps := row_chunks(len(outputs), 4 * len(self.reference))):
            distances = squared_distances(self.reference, features[start : start + steps.step])
            level = torch.searchsorted(self.radii, distances)
            scores.append(self.levels[level.topk(enough, dim=0, largest=False, sorted=False).values.amax(dim=0)])
        return torch.cat(scores)
