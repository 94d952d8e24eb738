"""Projection: an image's trajectory of class similarities through the layers, along that of training images."""

from collections.abc import Iterator
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.layers import split_layers, tap_spec
from ood_toolkit.detectors.softmax import class_means
from ood_toolkit.outputs import Outputs
from ood_toolkit.quantiles import quantile
from ood_toolkit.stats import blocks, l2_normalise, present_classes

Layers = list[Float[Tensor, "N _"]]


def class_similarity(
    rows: Float[Tensor, "N D"], directions: Float[Tensor, "K D"], shares: Float[Tensor, "N K"]
) -> Float[Tensor, " N"]:
    """`Σ_c p_c ‖x‖ cos(x, μ_c)`: lengths along the class means of a layer, weighted by the softmax (Dadalto et al.).

    As one dot product with the mixed direction `Σ_c p_c μ_c / ‖μ_c‖`, so that nothing of size (N, K, D) is made.

    Args:
        rows: one layer, pooled.
        directions: unit-length class means of that layer.
        shares: the softmax.
    """
    return (rows * (shares @ directions)).sum(dim=1)


class ProjectionDetector(Detector):
    """Flags images whose similarity to their class, followed through the layers, falls short of training images'.

    The trajectory of an image has one number for every layer and one for the logits: how far the layer's pooled
    output reaches along the class means, weighted by the softmax. The score is minus the scalar projection on the mean
    training trajectory. Choose it where OOD images look wrong in middle layers before the last ones average it away.

    Args:
        layers: module names, as in the model; by default its stages but the first, as in the authors' code.
        tokens: what stands for a transformer's layer: "first", its class token, as in the authors' code, or the "max"
            over tokens, for models without one.
        absent: "error" refuses classes without a training row, "skip" leaves them out of the softmax too, or all images
            of theirs would look strange.

    Differs from the authors' code in leaving out the 10⁻⁷ that it adds to denominators. Their README multiplies by ‖x‖
    twice, their code once.
    """

    name = "projection"
    paper = (
        "Dadalto et al., A Functional Data Perspective and Baseline on Multi-Layer Out-of-Distribution Detection, "
        "2023, arXiv:2306.03522"
    )
    cite = "dadalto2023functional"
    equation = "−Σ_l t_l t̄_l / Σ_l t̄_l² with t_l = Σ_c p_c ‖x_l‖ cos(x_l, μ_lc) / max over training rows, t̄ = E[t]"
    family = "layers"
    needs = "train"
    reads = frozenset({"logits", "taps"})
    cost = "O(C·ΣD) over layers"

    directions: Float[Tensor, "K sum_D"]
    present: Bool[Tensor, " C"]
    largest: Float[Tensor, " L"]
    mean: Float[Tensor, " L"]

    allowed = {"tokens": ("first", "max"), "absent": ("error", "skip")}

    def __init__(self, layers: tuple[str, ...] | None = None, tokens: str = "first", absent: str = "error") -> None:
        super().__init__()
        self.layers = layers
        self.tokens = tokens
        self.absent = absent

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The stages' maxima over positions."""
        return (tap_spec("block_maxima", self, "layers", "tokens"),)

    def fit(self, train: Outputs) -> Self:
        """Two sweeps: the class means of every layer, then the largest and the mean training trajectory."""
        means, counts = class_means(train, self._joined, lambda batch: batch.labels)
        classes = present_classes(counts, self.absent)
        if not len(classes):
            raise ValueError("fitting needs labelled training rows, but there are none")
        self.present = counts > 0
        widths = [layer.shape[1] for layer in self.read(train.rows(slice(0, 1)))]
        parts = means[classes].split(widths, dim=1)
        self.directions = torch.cat([l2_normalise(part) for part in parts], dim=1).to(train.head.weight.dtype)
        largest, total = means.new_full((len(widths),), -torch.inf), means.new_zeros(len(widths))
        for trajectories in map(self._raw, blocks(train)):
            largest = torch.maximum(largest, trajectories.double().amax(dim=0))
            total = total + trajectories.double().sum(dim=0)
        # a layer that is 0 for every training row says nothing
        self.largest = torch.where(largest == 0, 1.0, largest)
        self.mean = total / len(train) / self.largest
        return self

    def read(self, outputs: Outputs) -> Layers:
        """The layers of the trajectory, from the first on; the last are the logits whose softmax weighs the classes."""
        return [*split_layers(outputs.taps[self.taps[0]]), outputs.logits]

    def trajectories(self, outputs: Outputs) -> Float[Tensor, "N L"]:
        """(N, L) numbers per layer, at most 1 for the training rows."""
        return self._raw(outputs) / self.largest.to(outputs.logits.dtype)

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) scores, −1 for the mean training trajectory; higher = more out-of-distribution."""
        weights = self.mean / self.mean.square().sum().clamp_min(torch.finfo(self.mean.dtype).tiny)
        return -(self.trajectories(outputs) @ weights.to(outputs.logits.dtype))

    def _joined(self, outputs: Outputs) -> Float[Tensor, "N sum_D"]:
        return torch.cat(self.read(outputs), dim=1)

    def _raw(self, outputs: Outputs) -> Float[Tensor, "N L"]:
        layers = self.read(outputs)
        shares = layers[-1][:, self.present].softmax(dim=1)
        return torch.stack([class_similarity(*pair, shares) for pair in self._by_layer(layers)], dim=1)

    def _by_layer(self, layers: Layers) -> Iterator[tuple[Tensor, Tensor]]:
        directions = self.directions.split([layer.shape[1] for layer in layers], dim=1)
        return zip(layers, (part.to(layers[0].dtype) for part in directions), strict=True)


class ReActProjectionDetector(ProjectionDetector):
    """Flags images as `projection` does, with features that are cut off as ReAct cuts them.

    The trajectory also has the clipped features, and ends with their logits, whose softmax weighs the classes. Prefer
    it to `projection` where `react` beats `energy`: for networks with ReLU features.

    Args:
        layers: module names, as in the model; by default its stages but the first.
        percentile: features are cut off at this percentile of all numbers in the training features.
        threshold: where they are cut off instead; the authors' code takes 1.0, for a ResNet-50 on ImageNet.
        tokens: what stands for a transformer's layer: "first", its class token, or the "max" over tokens.
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the authors' code in that the threshold follows ReAct's percentile, unless it is given.
    """

    name = "react_projection"
    paper = ProjectionDetector.paper
    cite = ProjectionDetector.cite
    equation = (
        "−Σ_l t_l t̄_l / Σ_l t̄_l² with t_l = Σ_c p_c ‖x_l‖ cos(x_l, μ_lc) / max over training rows, where the last two "
        "x_l are min(f, c) and W min(f, c) + b, and p is their softmax"
    )
    reads = frozenset({"features", "taps"})
    cost = "O(C·(D + ΣD)) over layers"

    cut: Float[Tensor, ""]
    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, " C"]

    allowed = {"percentile": "[0, 100)", "threshold": "(-inf, inf)"}

    def __init__(
        self,
        layers: tuple[str, ...] | None = None,
        percentile: float = 90.0,
        threshold: float | None = None,
        tokens: str = "first",
        absent: str = "error",
    ) -> None:
        super().__init__(layers, tokens, absent)
        self.percentile = percentile
        self.threshold = threshold

    def fit(self, train: Outputs) -> Self:
        """As `projection`, and the threshold before, in sweeps of its own. Returns itself."""
        given = self.threshold
        self.cut = quantile(train, self.percentile / 100) if given is None else train.head.weight.new_tensor(given)
        self.weight, self.bias = train.head.weight.clone(), train.head.bias.clone()
        return super().fit(train)

    def read(self, outputs: Outputs) -> Layers:
        """The layers, the clipped features and their logits."""
        features = outputs.features.clamp(max=self.cut.to(outputs.features.dtype))
        logits = linear(features, self.weight.to(features), self.bias.to(features))
        return [*split_layers(outputs.taps[self.taps[0]]), features, logits]
