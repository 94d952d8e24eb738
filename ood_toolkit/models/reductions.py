"""Taps that reduce the map of every layer in the pass itself: means, Gram rows, channel statistics, maxima."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.gram import gram_rows
from ood_toolkit.detectors.layers import join_layers
from ood_toolkit.models.stages import Map, Stages


class Tap(ABC):
    """One thing to keep of inner layers."""

    name: ClassVar[str]


class Reduction(Tap):
    """Reduces the map of every layer, in the pass itself; the results lie side by side, see `join_layers`.

    Args:
        layers: module names; by default the model's stages, see `find_stages`.
    """

    before: ClassVar[bool] = False
    """Whether it looks at what enters the modules, as it is, instead of at the maps that leave them."""

    def __init__(self, layers: Sequence[str] | None = None) -> None:
        self.layers = None if layers is None else tuple(layers)

    def chosen(self, stages: Stages) -> tuple[str, ...]:
        """The layers that are looked at: those that were named, or all stages."""
        return stages.names if self.layers is None else self.layers

    @abstractmethod
    def reduce(self, layer: Map) -> Float[Tensor, "N *rest D"]:
        """What is kept of one layer's map."""

    def reduce_tokens(self, layer: Map) -> Float[Tensor, "N *rest D"]:
        """The same where the positions are a transformer's tokens."""
        return self.reduce(layer)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """All layers in one tensor."""
        return join_layers(parts)


class StageMeans(Reduction):
    """(N, D₁ + … + D_L + L − 1): every stage's mean over its positions."""

    name = "stage_means"

    def reduce(self, layer: Map) -> Float[Tensor, "N D"]:
        """The mean over positions."""
        return layer.mean(dim=2)


class StageGram(Reduction):
    """(N, powers, D₁ + … + D_L + L − 1): every stage's `gram_rows`.

    Args:
        layers: module names; by default the model's stages.
        powers: orders 1 to this one.
    """

    name = "stage_gram"

    def __init__(self, layers: Sequence[str] | None = None, powers: int = 10) -> None:
        super().__init__(layers)
        self.powers = powers

    def reduce(self, layer: Map) -> Float[Tensor, "N powers D"]:
        """The row statistics of the Gram matrices."""
        return gram_rows(layer, self.powers)


class ShallowStatistics(Reduction):
    """(N, 2, D₁ + … + D_L + L − 1): mean and unbiased variance over positions of every channel of the first stage.

    Args:
        layers: module names; by default the first stage alone.
    """

    name = "shallow_statistics"

    def chosen(self, stages: Stages) -> tuple[str, ...]:
        """The layers that were named, or the first stage."""
        return stages.names[:1] if self.layers is None else self.layers

    def reduce(self, layer: Map) -> Float[Tensor, "N 2 D"]:
        """Means, then variances; a single position has none."""
        variance, mean = torch.var_mean(layer, dim=2, correction=min(1, layer.shape[2] - 1))
        return torch.stack([mean, variance], dim=1)


class BlockMaxima(Reduction):
    """(N, D₁ + … + D_L + L − 1): every stage's largest number of each channel, without the first stage.

    Args:
        layers: module names; by default all stages but the first.
        tokens: what is kept of a transformer's tokens: the "first", its class token, or their "max".
    """

    name = "block_maxima"

    def __init__(self, layers: Sequence[str] | None = None, tokens: str = "first") -> None:
        super().__init__(layers)
        if tokens not in ("first", "max"):
            raise ValueError(f"tokens must be 'first' or 'max', got {tokens!r}")
        self.tokens = tokens

    def chosen(self, stages: Stages) -> tuple[str, ...]:
        """The layers that were named, or the stages after the first (the only one, where there are no others)."""
        return (stages.names[1:] or stages.names) if self.layers is None else self.layers

    def reduce(self, layer: Map) -> Float[Tensor, "N D"]:
        """The maximum over positions."""
        return layer.amax(dim=2)

    def reduce_tokens(self, layer: Map) -> Float[Tensor, "N D"]:
        """The class token, or the maximum over tokens."""
        return layer[:, :, 0] if self.tokens == "first" else self.reduce(layer)


class ActivationExtremes(Reduction):
    """(N, 2 L): the smallest and the largest number that enter each activation; of several calls the last counts.

    Args:
        layers: module names; by default every activation that a pass calls, see `Stages`.
    """

    name = "activation_extremes"
    before = True

    def chosen(self, stages: Stages) -> tuple[str, ...]:
        """The modules that were named, or all activations."""
        if self.layers is None and not stages.activations:
            raise ValueError("this model calls no activation as a module of its own; name modules with layers=(...)")
        return stages.activations if self.layers is None else self.layers

    def reduce(self, layer: Tensor) -> Float[Tensor, "N 2"]:
        """The extremes of an image."""
        axes = tuple(range(1, layer.ndim))
        extremes = torch.stack([layer.amin(dim=axes), layer.amax(dim=axes)], dim=1)
        return extremes if extremes.dtype == torch.float64 else extremes.float()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """All layers side by side, without gaps."""
        return torch.cat(list(parts), dim=1)
