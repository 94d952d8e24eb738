"""Density of features under one Gaussian per class."""

import math
from collections.abc import Iterator
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks, moments, present_classes, principal_axes

_COVARIANCE_NUMBERS = 1 << 24
"""What the covariances of all classes may hold by default: 128 MiB of float64."""

_BLOCK_NUMBERS = 1 << 22
"""Numbers in one temporary block of scoring: 32 MiB of float64."""


class GMMDetector(Detector):
    """Flags features of low density under a mixture of one Gaussian per class, each with its own covariance.

    `−log Σ_c π_c N(f; μ_c, Σ_c)`, π_c the share of training rows: Gaussian discriminant analysis
    (Mukhoti et al.). Prefer it to `mahalanobis` where classes differ in shape and have many more rows than features.

    Args:
        dim: principal components of the features to keep first, 1 to D. By default all, unless the C covariances
            would then hold more than 16.8 million numbers, in which case as many as fit (129 for 1000 classes).
        covariance: "full", one per class; "tied", one for all (a smooth `mahalanobis`, as in GEM).
        ridge: added to the diagonal of every covariance, in squared feature units, ≥ 0. A class with no more rows
            than features needs it.
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the paper in the ridge: that tries growing ones until the covariances can be factorised.
    """

    name = "gmm"
    paper = "Mukhoti et al., Deep Deterministic Uncertainty: A New Simple Baseline, CVPR 2023, arXiv:2102.11582"
    cite = "mukhoti2023deep"
    equation = "−log Σ_c π_c N(f; μ_c, Σ_c)"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(C·dim²)"

    centre: Float[Tensor, " D"]
    axes: Float[Tensor, "D R"]
    means: Float[Tensor, "K R"]
    whiteners: Float[Tensor, "L R R"]
    log_weights: Float[Tensor, " K"]

    allowed = {"dim": "[1, inf)", "ridge": "[0, inf)", "absent": ("error", "skip")}

    def __init__(
        self, dim: int | None = None, covariance: str = "full", ridge: float = 1e-6, absent: str = "error"
    ) -> None:
        super().__init__()
        self.dim = dim
        self.covariance = covariance
        self.ridge = ridge
        self.absent = absent

    def fit(self, train: Outputs) -> Self:
        """Two sweeps over the labelled rows: means and components, then the covariance of each class."""
        if self.covariance not in ("full", "tied"):
            raise ValueError(f"covariance must be 'full' or 'tied', got {self.covariance!r}")
        if self.dim is not None and not 1 <= self.dim <= train.width:
            raise ValueError(f"dim must lie between 1 and {train.width}, got {self.dim}")
        gathered = moments(train)
        present = present_classes(gathered.counts, self.absent)
        fitting = math.isqrt(_COVARIANCE_NUMBERS // len(present)) if self.covariance == "full" else train.width
        dim = self.dim or min(train.width, max(1, fitting))
        _, axes = principal_axes(gathered.total)
        if dim == train.width:
            axes = torch.eye(dim, dtype=torch.float64, device=axes.device)  # nothing to leave out, so nothing to turn
        self.centre, self.axes = gathered.mean, axes[:, :dim].contiguous()
        self.means = (gathered.class_means[present] - self.centre) @ self.axes
        counts = gathered.counts[present]
        self.log_weights = (counts / counts.sum()).double().log()
        if self.covariance == "tied":
            covariances = (self.axes.T @ gathered.within @ self.axes).unsqueeze(0)
        else:
            covariances = self._class_covariances(train, present, counts)
        self.whiteners = self._whitened(covariances, present)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) negative log-densities, of either sign; higher = more out-of-distribution."""
        rows = self._reduced(outputs.features)
        width = rows.shape[1]
        log_norms = self.log_weights + self.whiteners.diagonal(dim1=1, dim2=2).log().sum(dim=1)
        log_norms = log_norms.double() - 0.5 * width * math.log(2 * math.pi)
        density = torch.full_like(rows[:, 0], -torch.inf)
        step = max(1, _BLOCK_NUMBERS // (width * max(1, len(rows))))
        for start in range(0, len(self.means), step):
            part = slice(start, start + step)
            whiteners = self.whiteners[part if len(self.whiteners) > 1 else slice(None)].double()
            standard = rows.unsqueeze(0) @ whiteners - self.means[part].double().unsqueeze(1) @ whiteners
            exponents = log_norms[part].unsqueeze(1) - 0.5 * standard.square_().sum(dim=2)
            density = torch.logaddexp(density, exponents.logsumexp(dim=0))
        return -density.to(outputs.features.dtype)

    def _reduced(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N R"]:
        return (features.double() - self.centre.double()) @ self.axes.double()

    def _class_covariances(
        self, train: Outputs, present: Int[Tensor, " K"], counts: Int[Tensor, " K"]
    ) -> Float[Tensor, "K R R"]:
        covariances = self.means.new_zeros(len(present), self.means.shape[1], self.means.shape[1])
        position = torch.full((train.classes,), -1, device=present.device)
        position[present] = torch.arange(len(present), device=present.device)
        for batch in blocks(train):
            for number, rows in _by_class(self._reduced(batch.features), batch.labels, position):
                about = rows - self.means[number]
                covariances[number].addmm_(about.T, about)
        return covariances.div_(counts.view(-1, 1, 1))

    def _whitened(self, covariances: Float[Tensor, "L R R"], present: Int[Tensor, " K"]) -> Float[Tensor, "L R R"]:
        covariances.diagonal(dim1=1, dim2=2).add_(self.ridge)
        factors, failed = torch.linalg.cholesky_ex(covariances)
        if failed.any():
            names = present[failed.nonzero().flatten()].tolist()[:5] if len(factors) > 1 else "all"
            raise ValueError(
                f"the covariance of classes {names} is singular with ridge={self.ridge:g}: give more rows, a larger "
                "ridge, a smaller dim, or covariance='tied'"
            )
        return torch.linalg.solve_triangular(factors.mT, torch.eye(factors.shape[1]).to(factors), upper=True)


def _by_class(rows: Tensor, labels: Tensor, position: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The rows of each class that occurs, with the class's number."""
    order = labels.argsort(stable=True)
    order = order[labels[order] >= 0]
    found, counts = labels[order].unique_consecutive(return_counts=True)
    for label, part in zip(found.tolist(), order.split(counts.tolist()), strict=True):
        yield int(position[label]), rows[part]
