"""SSD's score: Mahalanobis distance to clusters found without labels."""

from functools import partial
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.mahalanobis import whiten
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks, l2_normalise, moments, nearest_point, whitening


class SSDDetector(Detector):
    """Flags feature directions far from the training directions, in units of their covariance. Needs no labels.

    `min_m (z − μ_m)ᵀ Σ_m⁻¹ (z − μ_m)` over k-means clusters of unit-length features z, each with its own covariance
    (Sehwag et al.). Made for self-supervised networks; with labels, prefer `mahalanobis_pp`.

    Args:
        clusters: m ≥ 1. The paper finds 1 best, and so does its code by default.
        sweeps: of k-means over the training rows, where there are several clusters.
        seed: of the first centres, which are training rows.

    Differs from the authors' code in nothing that a score shows: it standardises each dimension first, which a
    Mahalanobis distance does not see.
    """

    name = "ssd"
    paper = "Sehwag et al., SSD: A Unified Framework for Self-Supervised Outlier Detection, ICLR 2021, arXiv:2103.12051"
    cite = "sehwag2021ssd"
    equation = "min_m (f̂ − μ_m)ᵀ Σ_m⁻¹ (f̂ − μ_m)"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(clusters·D²)"

    centres: Float[Tensor, "M D"]
    whiteners: Float[Tensor, "M D D"]

    allowed = {"clusters": "[1, inf)", "sweeps": "[1, inf)"}

    def __init__(self, clusters: int = 1, sweeps: int = 20, seed: int = 0) -> None:
        super().__init__()
        self.clusters = clusters
        self.sweeps = sweeps
        self.seed = seed

    def fit(self, train: Outputs) -> Self:
        """One sweep over all rows, labelled or not, for the covariance of each cluster, after those of k-means."""
        if not 1 <= self.clusters <= len(train):
            raise ValueError(f"clusters must lie between 1 and the {len(train)} training rows, got {self.clusters}")
        points = _clustered(train, self.clusters, self.sweeps, self.seed)
        centres, whiteners = [], []
        for cluster in _assigned(train, points).unique().tolist():
            gathered = moments(train, transform=_directions, groups=partial(_members, points=points, cluster=cluster))
            thin = whitening(gathered.total)
            centres.append(gathered.mean)
            whiteners.append(torch.nn.functional.pad(thin, (0, train.width - thin.shape[1])))
        self.centres, self.whiteners = torch.stack(centres), torch.stack(whiteners)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) squared distances ≥ 0; higher = more out-of-distribution."""
        rows = _directions(outputs.features)
        distances = [
            whiten(rows, centre, whitener).square().sum(dim=1)
            for centre, whitener in zip(self.centres, self.whiteners, strict=True)
        ]
        return torch.stack(distances).amin(dim=0).to(outputs.features.dtype)


def _directions(features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    return l2_normalise(features.double())


def _assigned(train: Outputs, points: Float[Tensor, "M D"]) -> Int[Tensor, " N"]:
    """The number of each row's nearest point."""
    return torch.cat([nearest_point(_directions(batch.features), points)[1] for batch in blocks(train)])


def _members(batch: Outputs, points: Float[Tensor, "M D"], cluster: int) -> Int[Tensor, " N"]:
    """For `moments`: group 0 for the rows nearest to this point, none for the others."""
    return torch.where(nearest_point(_directions(batch.features), points)[1] == cluster, 0, -1)


def _clustered(train: Outputs, clusters: int, sweeps: int, seed: int) -> Float[Tensor, "M D"]:
    """k-means centres of the directions, each sweep one reading of the rows."""
    first = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:clusters]
    points = _directions(train.rows(first).features)
    for _ in range(sweeps if clusters > 1 else 0):
        sums, counts = torch.zeros_like(points), torch.zeros(clusters, dtype=torch.int64, device=points.device)
        for batch in blocks(train):
            rows = _directions(batch.features)
            number = nearest_point(rows, points)[1]
            sums.index_add_(0, number, rows)
            counts += torch.bincount(number, minlength=clusters)
        # a cluster that has lost its rows stays where it was
        points = torch.where(counts.unsqueeze(1) > 0, sums / counts.clamp_min(1).unsqueeze(1), points)
    return points
