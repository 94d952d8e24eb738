"""A mixture of Gaussians that share one covariance, fitted by expectation maximisation without labels."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.stats import row_chunks, squared_distances, whitening

_FIRST_ROWS = 1 << 14
"""Rows of which k-means makes the first guess."""


@dataclass(frozen=True, eq=False)
class TiedMixture:
    """K Gaussians with one covariance, in coordinates in which that is the identity.

    Args:
        whitener: (R, S), from the rows' coordinates to these.
        means: (K, S).
        log_factors: (K,) log weights, with the logarithm of the Gaussians' normalising constant.
    """

    whitener: Float[Tensor, "R S"]
    means: Float[Tensor, "K S"]
    log_factors: Float[Tensor, " K"]


def log_joint(
    white: Float[Tensor, "N S"], means: Float[Tensor, "K S"], log_factors: Float[Tensor, " K"]
) -> Float[Tensor, "N K"]:
    """`log π_k N(x; μ_k, Σ)` of whitened rows for each Gaussian; its log-sum-exp is the log-density of the mixture."""
    return log_factors - 0.5 * squared_distances(white, means)


def fit_tied_mixture(
    rows: Float[Tensor, "N R"],
    components: int,
    *,
    ridge: float = 1e-6,
    tolerance: float = 1e-3,
    iterations: int = 100,
    seed: int = 0,
) -> TiedMixture:
    """The mixture that expectation maximisation finds from a k-means start, as `GaussianMixture` of scikit-learn does.

    Args:
        rows: about their mean, or near it; may be memory-mapped, and is gone through block by block.
        components: K, at most N.
        ridge: added to the diagonal of the covariance.
        tolerance: stops when the mean log-density of a row changes by less.
        iterations: at most so many.
        seed: of the first guess.
    """
    if not 1 <= components <= len(rows):
        raise ValueError(f"a mixture of {components} Gaussians needs as many rows, but there are {len(rows)}")
    chunks = row_chunks(len(rows), components + 2 * rows.shape[1])
    blocks = [slice(start, start + chunks.step) for start in chunks]
    scatter = torch.stack([(wide := rows[part].double()).T @ wide for part in blocks]).sum(dim=0)
    centres = _first_centres(rows, components, seed)
    counts, sums = torch.zeros_like(centres[:, 0]), torch.zeros_like(centres)
    for part in blocks:
        near = squared_distances(rows[part].double(), centres).argmin(dim=1)
        counts += torch.bincount(near, minlength=components)
        sums.index_add_(0, near, rows[part].double())
    mixture, bound = _maximised(counts, sums, scatter, ridge), -math.inf
    for _ in range(iterations):
        counts, sums, total = torch.zeros_like(counts), torch.zeros_like(sums), 0.0
        for part in blocks:
            wide = rows[part].double()
            joint = log_joint(wide @ mixture.whitener, mixture.means, mixture.log_factors)
            density = joint.logsumexp(dim=1, keepdim=True)
            shares = (joint - density).exp_()
            counts, sums, total = counts + shares.sum(dim=0), sums + shares.T @ wide, total + float(density.sum())
        mixture = _maximised(counts, sums, scatter, ridge)
        if abs(total / len(rows) - bound) < tolerance:
            break
        bound = total / len(rows)
    return mixture


def _maximised(
    counts: Float[Tensor, " K"], sums: Float[Tensor, "K R"], scatter: Float[Tensor, "R R"], ridge: float
) -> TiedMixture:
    """The mixture in which Gaussians have these shares of the rows: a shared covariance needs no second moments."""
    counts = counts + 10 * torch.finfo(counts.dtype).eps  # a Gaussian may have lost all rows
    means = sums / counts.unsqueeze(1)
    whitener = whitening((scatter - (counts * means.T) @ means) / counts.sum(), ridge)
    # ½ log det of the precision V Vᵀ
    log_norm = torch.linalg.svdvals(whitener).log().sum() - 0.5 * whitener.shape[1] * math.log(2 * math.pi)
    return TiedMixture(whitener, means @ whitener, (counts / counts.sum()).log() + log_norm)


def _first_centres(rows: Float[Tensor, "N R"], components: int, seed: int) -> Float[Tensor, "K R"]:
    """Centres of k-means on a sample of the rows, drawn and computed on the CPU: the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.arange(len(rows))
    if len(rows) > max(_FIRST_ROWS, components):
        sample = torch.randperm(len(rows), generator=generator)[: max(_FIRST_ROWS, components)]
    few = rows[sample.to(rows.device)].cpu().double()
    centres, before = few[_spread_out(few, components, generator)], None
    for _ in range(100):
        near = squared_distances(few, centres).argmin(dim=1)
        if before is not None and torch.equal(near, before):
            break
        counts = torch.bincount(near, minlength=components).unsqueeze(1)
        sums = torch.zeros_like(centres).index_add_(0, near, few)
        centres, before = torch.where(counts > 0, sums / counts.clamp_min(1), centres), near
    return centres.to(rows.device)


def _spread_out(rows: Float[Tensor, "N R"], count: int, generator: torch.Generator) -> Int[Tensor, " count"]:
    """Row numbers by k-means++: each the best of a few drawn by squared distance from those before."""
    chosen = [int(torch.randint(len(rows), (1,), generator=generator))]
    nearest = squared_distances(rows, rows[chosen]).squeeze(1)
    for _ in range(count - 1):
        weights = nearest if bool(nearest.any()) else torch.ones_like(nearest)
        drawn = weights.multinomial(2 + int(math.log(count)), replacement=True, generator=generator)
        options = torch.minimum(nearest.unsqueeze(1), squared_distances(rows, rows[drawn]))
        best = int(options.sum(dim=0).argmin())
        nearest = options[:, best]
        chosen.append(int(drawn[best]))
    return torch.tensor(chosen)
