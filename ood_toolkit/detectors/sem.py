"""SEM: how likely the features are, apart from how likely the image's style is."""

from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.layers import split_layers, tap_spec
from ood_toolkit.detectors.mixture import fit_tied_mixture, log_joint
from ood_toolkit.outputs import Outputs
from ood_toolkit.scratch import room_for
from ood_toolkit.stats import blocks, leading_axes, moments, one_group


class SEMDetector(Detector):
    """Flags images whose content is unlikely, but not those whose style alone is: full-spectrum OOD detection.

    `−log p(f) + w log p(s)`: p(f) is a mixture of Gaussians over the features, which hold content and style, and p(s)
    one over low-level statistics s, mean and spread of every channel of the first stage, which hold style only. In the
    ratio the style cancels. Choose it where sketches, fogged or recoloured images of known classes must pass. With
    `weight=0` it is a mixture of features that needs no labels.

    Args:
        weight: w ≥ 0 of the style's log-density. 1 is the ratio; the authors' configurations for CIFAR-10 have 1e-4
            and 1e-6, with which the features all but decide alone.
        components: Gaussians over the features; 10 in the authors' configurations.
        style_components: Gaussians over the statistics; 3 in the authors' code.
        dim: principal components of the features that are kept; all where there are fewer. The authors' configurations
            have 10 or 50.
        style_dim: the same of the statistics.
        layers: module names that give the statistics; by default the first stage.
        spread: "variance", as in the authors' code, or "std".
        ridge: added to the diagonal of the covariances, in squared units.
        tolerance: expectation maximisation stops when the mean log-density changes by less.
        iterations: at most so many.
        seed: of the k-means that it starts from.

    Differs from the authors' code in that log-densities are exact: it leaves out their constants and takes the
    logarithm of p + 10⁻⁴⁰ in float32, so that rows more than about 13 standard deviations away tie. k-means starts
    from at most 16,384 rows.
    """

    name = "sem"
    paper = "Yang et al., Full-Spectrum Out-of-Distribution Detection, IJCV 2023, arXiv:2204.05306"
    cite = "yang2023full"
    equation = (
        "−log Σ_k π_k N(f; μ_k, Σ) + w log Σ_j ρ_j N(s; ν_j, Σ_s), s: mean and variance of every channel of the first "
        "stage"
    )
    family = "layers"
    needs = "train"
    reads = frozenset({"features", "taps"})
    cost = "O(D·dim + K·dim)"
    centre: Float[Tensor, " D"]
    whitener: Float[Tensor, "D R"]
    means: Float[Tensor, "K R"]
    log_factors: Float[Tensor, " K"]
    style_centre: Float[Tensor, " S"]
    style_whitener: Float[Tensor, "S T"]
    style_means: Float[Tensor, "J T"]
    style_log_factors: Float[Tensor, " J"]

    sweep = {"weight": (1.0, 0.1, 0.01, 1e-4, 1e-6)}

    allowed = {
        "weight": "[0, inf)",
        "components": "[1, inf)",
        "style_components": "[1, inf)",
        "dim": "[1, inf)",
        "style_dim": "[1, inf)",
        "ridge": "[0, inf)",
        "tolerance": "[0, inf)",
        "iterations": "[1, inf)",
        "spread": ("variance", "std"),
    }

    def __init__(
        self,
        weight: float = 1.0,
        components: int = 10,
        style_components: int = 3,
        dim: int = 50,
        style_dim: int = 50,
        layers: tuple[str, ...] | None = None,
        spread: str = "variance",
        ridge: float = 1e-6,
        tolerance: float = 1e-3,
        iterations: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.components = components
        self.style_components = style_components
        self.dim = dim
        self.style_dim = style_dim
        self.layers = layers
        self.spread = spread
        self.ridge = ridge
        self.tolerance = tolerance
        self.iterations = iterations
        self.seed = seed

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The first stage's channel statistics."""
        return (tap_spec("shallow_statistics", self, "layers"),)

    def fit(self, train: Outputs) -> Self:
        """Two mixtures: two sweeps each, then sweeps of the reduced rows, which are kept meanwhile. Returns itself."""
        found = self._mixture(train, _features, self.dim, self.components)
        self.centre, self.whitener, self.means, self.log_factors = found
        found = self._mixture(train, self._style, self.style_dim, self.style_components)
        self.style_centre, self.style_whitener, self.style_means, self.style_log_factors = found
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) log-density ratios, of either sign; higher = more out-of-distribution."""
        content = _log_density(outputs.features, self.centre, self.whitener, self.means, self.log_factors)
        style = _log_density(
            self._style(outputs), self.style_centre, self.style_whitener, self.style_means, self.style_log_factors
        )
        return (self.weight * style - content).to(outputs.features.dtype)

    @property
    def _style(self) -> Callable[[Outputs], Float[Tensor, "N S"]]:
        return partial(_statistics, tap=self.taps[0], spread=self.spread)

    def _mixture(
        self, train: Outputs, of: Callable[[Outputs], Tensor], dim: int, components: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Centre, whitener, means and factors of a mixture over the principal components of what `of` reads."""
        gathered = moments(train, groups=one_group, of=of)
        axes = leading_axes(gathered.total, dim)
        reduced = room_for(len(train), axes.shape[1], like=of(train.rows(slice(0, 1))))
        start = 0
        for batch in blocks(train):
            reduced[start : start + len(batch)] = (of(batch).double() - gathered.mean) @ axes
            start += len(batch)
        mixture = fit_tied_mixture(
            reduced,
            components,
            ridge=self.ridge,
            tolerance=self.tolerance,
            iterations=self.iterations,
            seed=self.seed,
        )
        return gathered.mean, axes @ mixture.whitener, mixture.means, mixture.log_factors


def _log_density(
    rows: Float[Tensor, "N D"],
    centre: Float[Tensor, " D"],
    whitener: Float[Tensor, "D R"],
    means: Float[Tensor, "K R"],
    log_factors: Float[Tensor, " K"],
) -> Float[Tensor, " N"]:
    white = (rows.double() - centre.double()) @ whitener.double()
    return log_joint(white, means.double(), log_factors.double()).logsumexp(dim=1)


def _features(batch: Outputs) -> Float[Tensor, "N D"]:
    return batch.features


def _statistics(batch: Outputs, tap: str, spread: str) -> Float[Tensor, "N S"]:
    """Means and spreads of all channels of all layers, side by side."""
    parts = []
    for layer in split_layers(batch.taps[tap]):
        mean, variance = layer.unbind(dim=1)
        parts += [mean, variance if spread == "variance" else variance.sqrt()]
    return torch.cat(parts, dim=1)
