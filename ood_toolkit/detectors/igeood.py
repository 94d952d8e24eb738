"""IGEOOD on logits: distances between softmax distributions along the curved simplex."""

import math
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import class_means, log_probabilities, small_batches
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import present_classes

_SWEEPS = 30


def roots(logits: Float[Tensor, "N C"], temperature: float) -> Float[Tensor, "N C"]:
    """√p of the softmax at T: a point on the unit sphere, where Fisher-Rao distances are twice the angles."""
    return (0.5 * log_probabilities(logits / temperature)).exp()


def fisher_rao(points: Float[Tensor, "N C"], centres: Float[Tensor, "K C"]) -> Float[Tensor, "N K"]:
    """`2 arccos Σ_c √(p_c q_c)`, of points and centres on the sphere; in [0, π]."""
    return 2 * (points @ centres.T).clamp(-1.0, 1.0).arccos()


class IgeoodDetector(Detector):
    """Flags inputs whose softmax lies in nobody's corner: near to all class centroids instead of to one.

    The score is `−Σ_k d(p, μ_k)` with the Fisher-Rao distance: confident rows are near one centroid and at
    distance π from the C − 1 others, an undecided one is at 2 arccos(1/√C) < π from all.

    Args:
        temperature: T > 0 that divides the logits. The paper tunes it on a validation set; 1 does not rescale.
        centroids: "median" minimises the mean distance to the rows of a class, as the paper defines; "mean" takes
            the softmax of the class-mean logits, as the authors' later package does.
        absent: "error" refuses classes without a training row; "skip" leaves them out.

    Differs from the authors' code, which takes 100 gradient steps of 0.01 towards the median, starting from unit
    logits; this iterates Weiszfeld's map on the sphere until it stands. Their package `detectors` returns the mean
    over centroids, so its values are −1/K of these. The input perturbation needs the network and is not here.
    """

    name = "igeood"
    paper = (
        "Dadalto et al., Igeood: An Information Geometry Approach to Out-of-Distribution Detection, ICLR 2022, "
        "arXiv:2203.07798"
    )
    cite = "dadalto2022igeood"
    equation = "−Σ_k 2 arccos Σ_c √(p_c μ_kc)"
    family = "logits"
    needs = "train"
    reads = frozenset({"logits"})
    cost = "O(C²)"
    centres: Float[Tensor, "K C"]

    allowed = {"temperature": "(0, inf)", "absent": ("error", "skip")}

    def __init__(self, temperature: float = 1.0, centroids: str = "median", absent: str = "error") -> None:
        super().__init__()
        if centroids not in ("median", "mean"):
            raise ValueError(f"centroids must be 'median' or 'mean', got {centroids!r}")
        self.temperature = temperature
        self.centroids = centroids
        self.absent = absent

    def fit(self, train: Outputs) -> Self:
        """Learns one centroid per labelled class. Returns itself."""
        if self.centroids == "mean":
            logits, counts = class_means(train, lambda batch: batch.logits, lambda batch: batch.labels)
            centres = roots(logits, self.temperature)
        else:
            centres, counts = class_means(train, self._roots, lambda batch: batch.labels)
            centres = torch.nn.functional.normalize(centres, dim=1)
            for _ in range(_SWEEPS):
                centres, moved = self._towards_the_median(train, centres)
                if moved < 1e-6:
                    break
        self.centres = centres[present_classes(counts, self.absent)].to(train.head.weight.dtype)
        return self

    def _roots(self, batch: Outputs) -> Float[Tensor, "N C"]:
        return roots(batch.logits.double(), self.temperature)

    def _towards_the_median(self, train: Outputs, centres: Float[Tensor, "K C"]) -> tuple[Tensor, float]:
        """One step of Weiszfeld's map: the mean of the tangent vectors towards the rows, weighted by 1/distance."""
        pull, weights = torch.zeros_like(centres), centres.new_zeros(len(centres))
        for batch in small_batches(train):
            known = batch.labels >= 0
            label = batch.labels[known]
            points = roots(batch.logits[known], self.temperature)
            base = centres[label].to(points.dtype)
            chord = (points - base).norm(dim=1)
            tangent = points - (1 - chord.square() / 2).unsqueeze(1) * base
            # log map divided by the angle: a unit vector, and 0 for a row that sits on its centre
            pull.index_add_(0, label, torch.nn.functional.normalize(tangent, dim=1, eps=1e-12).double())
            angle = 2 * (chord.double() / 2).clamp_max(1.0).arcsin()
            weights.index_add_(0, label, 1 / angle.clamp_min(1e-6))
        step = pull / weights.clamp_min(1e-300).unsqueeze(1)
        length = step.norm(dim=1, keepdim=True).clamp_max(math.pi / 4)
        moved = length.cos() * centres + length.sin() * torch.nn.functional.normalize(step, dim=1)
        return moved, float(length.nan_to_num().max())

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [−K π, 0]; higher = more out-of-distribution."""
        points = roots(outputs.logits, self.temperature)
        distances = fisher_rao(points, self.centres)
        # the arccos of almost 1 rounds: measure the nearest centre again by the chord, d = 4 arcsin(‖√p − √q‖ / 2)
        near, number = distances.min(dim=1)
        chord = (points - self.centres[number]).norm(dim=1)
        return near - 4 * (chord / 2).clamp_max(1.0).arcsin() - distances.sum(dim=1)
