"""WDiscOOD: distances in the discriminative and in the residual part of the whitened feature space."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.mahalanobis import whiten
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import l2_normalise, moments, nearest_point, present_classes, principal_axes, whitening


class WDiscOODDetector(Detector):
    """Flags features far from every class where classes differ, or far from the mean where they do not.

    Whitened linear discriminant analysis (Chen et al.): features are whitened by the within-class
    covariance; the directions in which class means differ most span the discriminative space, the rest is residual.
    The score is `min_c ‖D(x − μ_c)‖ + weight · ‖R(x − μ)‖`.

    Args:
        discriminants: dimensions of the discriminative space, from 1; by default C − 1, but at most two thirds of D,
            which gives the paper's choices (all for D = 2048, 512 for D = 768).
        weight: of the residual distance, ≥ 0. The authors use 5 for ResNet-50 and 1 for ViT.
        normalise: brings features to unit length first, as the authors do for ViT and for contrastive networks.
        ridge: added to the diagonal of the within-class covariance, in squared feature units, ≥ 0. With 0,
            directions without variance are left out (the pseudo-inverse).
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the authors' code in direction (there high means in-distribution), and in never taking directions in
    which class means do not differ, which that code fills up with arbitrary ones if asked for more than C − 1.
    """

    name = "wdiscood"
    paper = (
        "Chen et al., WDiscOOD: Out-of-Distribution Detection via Whitened Linear Discriminant Analysis, ICCV 2023, "
        "arXiv:2303.07543"
    )
    cite = "chen2023wdiscood"
    equation = "min_c ‖A (f − μ_c)‖₂ + weight · ‖B (f − μ)‖₂, A the discriminative, B the residual whitened axes"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(D² + C·D)"

    centre: Float[Tensor, " D"]
    discriminative: Float[Tensor, "D q"]
    residual: Float[Tensor, "D r"]
    means: Float[Tensor, "K q"]

    allowed = {"discriminants": "[1, inf)", "weight": "[0, inf)", "ridge": "[0, inf)", "absent": ("error", "skip")}

    def __init__(
        self,
        discriminants: int | None = None,
        weight: float = 5.0,
        normalise: bool = False,
        ridge: float = 0.0,
        absent: str = "error",
    ) -> None:
        super().__init__()
        self.discriminants = discriminants
        self.weight = weight
        self.normalise = normalise
        self.ridge = ridge
        self.absent = absent

    def fit(self, train: Outputs) -> Self:
        """One sweep over the labelled rows."""
        gathered = moments(train, transform=self._prepared)
        present = present_classes(gathered.counts, self.absent)
        wanted = self.discriminants or min(len(present) - 1, 2 * train.width // 3)
        if wanted < 1:
            raise ValueError(f"discriminants must be at least 1, got {wanted} with {len(present)} classes")
        self.centre = gathered.mean
        whitener = whitening(gathered.within, self.ridge)
        means = whiten(gathered.class_means[present], self.centre, whitener)
        # class means about the mean of all rows, every class with the same weight, as in the authors' code
        between, axes = principal_axes(means.T @ means / len(means))
        rank = int((between > len(between) * torch.finfo(torch.float64).eps * between[0]).sum())
        kept = min(wanted, rank)
        self.discriminative = whitener @ axes[:, :kept]
        self.residual = whitener @ axes[:, kept:]
        self.means = means @ axes[:, :kept]
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) weighted sums of two distances ≥ 0; higher = more out-of-distribution."""
        features = self._prepared(outputs.features)
        squared = nearest_point(whiten(features, self.centre, self.discriminative), self.means.double())[0]
        rest = torch.linalg.vector_norm(whiten(features, self.centre, self.residual), dim=1)
        return (squared.sqrt() + self.weight * rest).to(outputs.features.dtype)

    def _prepared(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        return l2_normalise(features.double()) if self.normalise else features
