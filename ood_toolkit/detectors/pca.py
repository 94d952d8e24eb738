"""Reconstruction errors of principal component analysis: of features, of their directions, of a kernel map."""

import math
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import components_for, l2_normalise, moments, one_group, principal_axes


def reconstruction_error(rows: Float[Tensor, "N M"], axes: Float[Tensor, "M q"]) -> Float[Tensor, " N"]:
    """`‖x − U Uᵀ x‖` of centred rows, U the kept axes. Taken of the difference itself, so nothing cancels."""
    return torch.linalg.vector_norm(rows - (rows @ axes) @ axes.T, dim=1)


def draw_frequencies(
    width: int, features: int, *, gamma: float, seed: int
) -> tuple[Float[Tensor, "D M"], Float[Tensor, " M"]]:
    """Ω ~ N(0, 2γ I) and u uniform in [0, 2π), for `exp(−γ ‖a − b‖²)`. On the CPU: every device draws the same."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = torch.randn(width, features, generator=generator, dtype=torch.float64)
    phases = torch.rand(features, generator=generator, dtype=torch.float64)
    return math.sqrt(2 * gamma) * frequencies, 2 * math.pi * phases


def fourier_features(
    rows: Float[Tensor, "N D"], frequencies: Float[Tensor, "D M"], phases: Float[Tensor, " M"]
) -> Float[Tensor, "N M"]:
    """`√(2/M) cos(xΩ + u)`: products of such rows are those of a shift-invariant kernel, up to O(1/√M)."""
    angles = torch.addmm(phases.to(rows), rows, frequencies.to(rows))
    return angles.cos_().mul_(math.sqrt(2 / angles.shape[1]))


class PCADetector(Detector):
    """Flags features that the principal components of the training features reconstruct badly.

    `‖(I − U Uᵀ)(x − μ)‖ / ‖x‖`. The plain baseline of the subspace methods; prefer `cop`, `corp` or `vim`.

    Args:
        dim: components kept, 1 to D; by default the fewest that hold `variance` of the total.
        variance: the share of the variance to keep, in (0, 1], where `dim` is not given.
        relative: divides by ‖x‖ (the regularised error of Guan et al.); False gives the plain error.

    Differs from Guan et al. in being used alone: they fuse it with a logit score, as `pca_fusion` does.
    """

    name = "pca"
    paper = "Guan et al., Revisit PCA-based Technique for Out-of-Distribution Detection, ICCV 2023"
    cite = "guan2023revisit"
    equation = "‖(I − U Uᵀ) (f − μ)‖₂ / ‖f‖₂"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(D·dim)"

    centre: Float[Tensor, " M"]
    axes: Float[Tensor, "M q"]

    allowed = {"dim": "[1, inf)", "variance": "(0, 1]"}

    def __init__(self, dim: int | None = None, variance: float = 0.9, relative: bool = True) -> None:
        super().__init__()
        self.dim = dim
        self.variance = variance
        self.relative = relative

    def fit(self, train: Outputs) -> Self:
        """One sweep over all rows, labelled or not."""
        gathered = moments(train, groups=one_group)
        self.centre, self.axes = gathered.mean, _kept(gathered.total, self.dim, self.variance)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) lengths ≥ 0; higher = more out-of-distribution."""
        features = outputs.features
        error = reconstruction_error(features - self.centre.to(features), self.axes.to(features))
        if not self.relative:
            return error
        return error / torch.linalg.vector_norm(features, dim=1).clamp_min(1e-12)


class CoPDetector(Detector):
    """Flags feature directions that the principal components of the training directions reconstruct badly.

    Kernel PCA with the cosine kernel (Fang et al.): `pca` on features of unit length.

    Args:
        variance: the share of the variance to keep, in (0, 1]. The authors use 0.99 for ImageNet and 0.85 for CIFAR-10.

    Differs from the authors' code in nothing but its direction: there high means in-distribution.
    """

    name = "cop"
    paper = "Fang et al., Kernel PCA for Out-of-Distribution Detection, NeurIPS 2024, arXiv:2402.02949"
    cite = "fang2024kernel"
    equation = "‖(I − U Uᵀ) (f̂ − μ)‖₂"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(D·dim)"

    centre: Float[Tensor, " M"]
    axes: Float[Tensor, "M q"]

    allowed = {"variance": "(0, 1]"}

    def __init__(self, variance: float = 0.99) -> None:
        super().__init__()
        self.variance = variance

    def fit(self, train: Outputs) -> Self:
        """One sweep over all rows, labelled or not."""
        gathered = moments(train, groups=one_group, transform=self.mapped)
        self.centre, self.axes = gathered.mean, _kept(gathered.total, None, self.variance)
        return self

    def mapped(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N M"]:
        """The feature map of the kernel."""
        return l2_normalise(features)

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) lengths ≥ 0; higher = more out-of-distribution."""
        rows = self.mapped(outputs.features)
        return reconstruction_error(rows - self.centre.to(rows), self.axes.to(rows))


class CoRPDetector(CoPDetector):
    """Flags features that kernel PCA with a Gaussian kernel on their directions reconstructs badly.

    The kernel `exp(−γ ‖a − b‖²)` on unit-length features is replaced by random Fourier features
    `√(2/M) cos(ω·x + u)`, ω ~ N(0, 2γ I), u uniform in [0, 2π) (Fang et al.), then as `cop`. Bends the
    subspace round the training directions, where `cop` keeps it flat.

    Args:
        variance: the share of the variance to keep, in (0, 1]. The authors use 0.5 for ImageNet and 0.8 for CIFAR-10.
        gamma: γ > 0 of the kernel. The authors use 3 for ImageNet and 2 for CIFAR-10.
        width: M, how many random features; by default 2·D, which is near the authors' 4096 for D = 2048.
        seed: of the random features.

    Differs from the authors' code in the random draws only.
    """

    name = "corp"
    equation = "‖(I − U Uᵀ) (φ(f̂) − μ)‖₂ with φ_m(a) = √(2/M) cos(ω_m · a + u_m)"
    cost = "O(M·(D + dim))"

    frequencies: Float[Tensor, "D M"]
    phases: Float[Tensor, " M"]

    allowed = {"gamma": "(0, inf)", "width": "[1, inf)"}

    def __init__(self, variance: float = 0.5, gamma: float = 3.0, width: int | None = None, seed: int = 0) -> None:
        super().__init__(variance)
        self.gamma = gamma
        self.width = width
        self.seed = seed

    def fit(self, train: Outputs) -> Self:
        """One sweep over all rows, labelled or not."""
        shape = train.width, self.width or 2 * train.width
        frequencies, phases = draw_frequencies(*shape, gamma=self.gamma, seed=self.seed)
        self.frequencies, self.phases = frequencies.to(train.device), phases.to(train.features.device)
        return super().fit(train)

    def mapped(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N M"]:
        """The random Fourier features of the directions."""
        return fourier_features(l2_normalise(features), self.frequencies, self.phases)


def _kept(covariance: Float[Tensor, "M M"], dim: int | None, variance: float) -> Float[Tensor, "M q"]:
    """The leading axes: `dim` of them, or the fewest that hold `variance` of the total."""
    if not 0 < variance <= 1:
        raise ValueError(f"variance must lie in (0, 1], got {variance}")
    if dim is not None and not 1 <= dim <= len(covariance):
        raise ValueError(f"dim must lie between 1 and {len(covariance)}, got {dim}")
    variances, axes = principal_axes(covariance)
    return axes[:, : dim or components_for(variances, variance)].contiguous()
