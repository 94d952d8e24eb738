"""Virtual-logit matching and the residual norm inside it: what a feature has outside the principal subspace."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.outputs import Head, Outputs
from ood_toolkit.stats import blocks, moments, one_group, principal_axes

_PAPER = "Wang et al., ViM: Out-Of-Distribution with Virtual-logit Matching, CVPR 2022, arXiv:2203.10807"


def origin(head: Head, cutoff: float | None = None) -> Float[Tensor, " D"]:
    """`o = −W⁺ b`, the shortest feature whose logits come nearest to 0, in float64.

    Args:
        head: the last layer, W (C, D) and b (C,).
        cutoff: singular values of W below this fraction of the largest count as 0; by default max(C, D) · ε of
            float32, the rounding of the weights. A head whose rows sum to 0 has such a singular value, made of
            rounding alone.
    """
    weight = head.weight.double()
    if cutoff is None:
        cutoff = max(weight.shape) * torch.finfo(torch.float32).eps
    bias = head.bias.double()
    if cutoff < 1e-6:
        return -(torch.linalg.pinv(weight, rtol=cutoff) @ bias)
    # above, squares of singular values keep enough digits, and their eigenvectors cost a third of an SVD
    wide = weight.shape[0] <= weight.shape[1]
    values, vectors = torch.linalg.eigh(weight @ weight.T if wide else weight.T @ weight)
    inverse = torch.where(values > cutoff**2 * values[-1], 1 / values, 0.0)
    if wide:
        return -(weight.T @ (vectors @ (inverse * (vectors.T @ bias))))
    return -(vectors @ (inverse * (vectors.T @ (weight.T @ bias))))


def principal_dimension(dim: int | None, width: int, rows: int) -> int:
    """`dim`, or the rule of the authors' benchmarks: 1000 where D ≥ 2048, 512 where D ≥ 768, else D / 2.

    Args:
        dim: dimensions asked for, or None for the rule; the rule gives half the rows where there are too few for it.
        width: D.
        rows: training rows. No more dimensions than rows are learned: beyond, every training row has residual 0.
    """
    if dim is None:
        rule = 1000 if width >= 2048 else 512 if width >= 768 else max(1, width // 2)
        return rule if rows > rule else max(1, rows // 2)
    if not 1 <= dim < width:
        raise ValueError(f"dim must lie between 1 and {width - 1} for {width} features, got {dim}")
    if dim >= rows:
        raise ValueError(f"dim must be below the {rows} training rows, which have no residual otherwise, got {dim}")
    return dim


def residual(
    features: Float[Tensor, "N D"], centre: Float[Tensor, " D"], complement: Float[Tensor, "D R"]
) -> Float[Tensor, " N"]:
    """`‖Rᵀ (x − o)‖`, the length of the part outside the principal subspace, R a basis of its complement."""
    return torch.linalg.vector_norm((features - centre.to(features)) @ complement.to(features), dim=1)


class ResidualDetector(Detector):
    """Flags features with much outside the principal subspace of the training features.

    The first half of `vim` on its own: it does not look at the logits.

    Args:
        dim: dimensions of the principal subspace, 1 to D − 1; by default 1000 where D ≥ 2048, 512 where D ≥ 768,
            else D / 2, the rule of the authors' benchmarks, but half the training rows where they are no more.
        cutoff: relative cut-off for singular values of W in the origin −W⁺ b; by default the rounding of float32
            weights, max(C, D) · 1.2e-7. The authors' NumPy uses 1e-15, which differs only for a head without full rank.

    Differs from the authors' code in that cut-off only.
    """

    name = "residual"
    paper = f"{_PAPER}, Eq. 3"
    cite = "wang2022vim"
    equation = "‖Rᵀ (f − o)‖₂ with o = −W⁺ b"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(D·(D − dim))"

    centre: Float[Tensor, " D"]
    complement: Float[Tensor, "D R"]

    sweep = {"dim": (256, 512, 1000)}

    allowed = {"dim": "[1, inf)", "cutoff": "[0, inf)"}

    def __init__(self, dim: int | None = None, cutoff: float | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.cutoff = cutoff

    def fit(self, train: Outputs) -> Self:
        """One sweep over all rows, labelled or not."""
        gathered = moments(train, groups=one_group)
        dim = principal_dimension(self.dim, train.width, int(gathered.counts.sum()))
        self.centre = origin(train.head, self.cutoff).to(gathered.mean.device)
        offset = gathered.mean - self.centre
        _, axes = principal_axes(gathered.total + torch.outer(offset, offset))
        self.complement = axes[:, dim:]
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) lengths ≥ 0; higher = more out-of-distribution."""
        return residual(outputs.features, self.centre, self.complement)


class ViMDetector(ResidualDetector):
    """Flags inputs whose feature residual, scaled like a logit, stands out against the logits.

    `α ‖x^{P⊥}‖ − log Σ_c exp(z_c)` (Wang et al.): the log-odds of the virtual logit against all others,
    so the ranking is that of its softmax probability without the saturation. α makes the mean residual of the
    training rows equal to their mean largest logit. Good where logits and features fail on different inputs.

    Args:
        dim: dimensions of the principal subspace, 1 to D − 1; by default 1000 where D ≥ 2048, 512 where D ≥ 768,
            else D / 2, the rule of the authors' benchmarks, but half the training rows where they are no more.
        cutoff: relative cut-off for singular values of W in the origin −W⁺ b; by default the rounding of float32
            weights, max(C, D) · 1.2e-7. The authors' NumPy uses 1e-15, which differs only for a head without full rank.

    Differs from the authors' code in that cut-off and in direction: there high means in-distribution.
    """

    name = "vim"
    paper = f"{_PAPER}, Eq. 6 and 8"
    equation = "α ‖Rᵀ (f − o)‖₂ − log Σ_c exp(z_c) with α = Σ max_c z_c / Σ ‖Rᵀ (f − o)‖₂ in training"
    reads = frozenset({"logits", "features"})
    cost = "O(D·(D − dim) + C)"

    alpha: Float[Tensor, ""]

    allowed = {"dim": "[1, inf)", "cutoff": "[0, inf)"}

    def fit(self, train: Outputs) -> Self:
        """Two sweeps over all rows, labelled or not: the subspace, then α."""
        super().fit(train)
        largest = lengths = torch.zeros((), dtype=torch.float64, device=self.centre.device)
        centre, complement = self.centre.to(train.head.weight), self.complement.to(train.head.weight)
        for batch in blocks(train):
            largest = largest + batch.logits.amax(dim=1).double().sum()
            lengths = lengths + residual(batch.features, centre, complement).double().sum()
        self.alpha = largest / lengths
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) log-odds of the virtual logit; higher = more out-of-distribution."""
        lengths = residual(outputs.features, self.centre, self.complement)
        return self.alpha.to(lengths) * lengths - outputs.logits.logsumexp(dim=1)
