"""Gram matrices: correlations of features that no training image of the predicted class has shown."""

from collections.abc import Iterator
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.layers import layer_slices, tap_spec
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks, present_classes


def gram_rows(layer: Float[Tensor, "N D P"], powers: int) -> Float[Tensor, "N powers D"]:
    """Row sums of the Gram matrix of order p, `G_p = (Fᵖ Fᵖᵀ)^(1/p)`, for p = 1 to `powers` (Sastry and Oore).

    As in the authors' code the sum over a row is taken first and the (signed) root of the sum after it. The D × D
    matrix is never built: its row sums are `Fᵖ (Fᵖᵀ 1)`. Numbers are divided by the image's largest one, and the
    result multiplied by its square, because a 10th power leaves the range of float32.
    """
    wide = layer if layer.device.type == "mps" else layer.double()
    largest_number = wide.abs().amax(dim=(1, 2), keepdim=True)
    base = wide / torch.where(largest_number == 0, 1.0, largest_number)
    power, rows = torch.ones_like(base), []
    for order in range(1, powers + 1):
        power = power * base
        sums = torch.einsum("ndp,np->nd", power, power.sum(dim=1))
        rows.append(sums.sign() * sums.abs() ** (1 / order))
    return (torch.stack(rows, dim=1) * largest_number.square()).to(layer.dtype)


def excess(values: Float[Tensor, "N D"], low: Float[Tensor, "N D"], high: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    """By how much values leave their bounds, relative to the bound, summed over a row (the paper's δ).

    `Σ relu(low − v) / |low + 10⁻⁶| + relu(v − high) / |high + 10⁻⁶|`, as in the authors' code.
    """
    below = (low - values).relu() / (low + 1e-6).abs()
    above = (values - high).relu() / (high + 1e-6).abs()
    return (below + above).sum(dim=1)


class GramDetector(Detector):
    """Flags images whose features co-occur, layer by layer, as they never did for the predicted class in training.

    Row sums of Gram matrices of several orders are compared with their minimum and maximum over the training images
    predicted as that class; the relative excess δ is summed over channels and orders, divided by the largest softmax
    probability, normalised per layer by its mean over held-out rows, and summed over layers. Strong on far OOD, where
    low-level statistics differ; weak on near OOD. Costs storage: one number per channel, layer and order for every
    image.

    Args:
        layers: module names, as in the model; by default its stages. The authors take every convolution and ReLU.
        powers: orders 1 to this one. The paper uses 10.
        group: whose bounds hold for a row: training rows predicted as its class ("prediction", the paper's), or
            labelled so ("label", as in OpenOOD and pytorch-ood).
        confidence: divide by the largest softmax probability, as the paper does.
        holdout: share of the training rows, evenly spread, that sets no bounds but the normaliser, 0 < h < 1. The
            authors take 10% of the test set instead.
        absent: "error" refuses classes without a training row, "skip" gives them the bounds of all rows together.

    Differs from the authors' code in where held-out rows come from, and in that the roots of the row sums are taken
    without overflow. OpenOOD divides by the confidence only after the normaliser; pytorch-ood never does; oodeel
    takes quantiles and the lower triangle of the matrix.
    """

    name = "gram"
    paper = (
        "Sastry and Oore, Detecting Out-of-Distribution Examples with In-distribution Examples and Gram Matrices, "
        "ICML 2020, arXiv:1912.12510"
    )
    cite = "sastry2020gram"
    equation = (
        "Σ_l δ_l / E[δ_l] with δ_l = Σ (relu(low − v) / |low| + relu(v − high) / |high|) / p_y over channels and "
        "orders v"
    )
    family = "layers"
    needs = "train"
    reads = frozenset({"logits", "taps"})
    cost = "O(P·ΣD) over layers, P orders"

    low: Float[Tensor, "C P sum_D"]
    high: Float[Tensor, "C P sum_D"]
    normalisers: Float[Tensor, " L"]

    allowed = {"powers": "[1, inf)", "absent": ("error", "skip")}

    def __init__(
        self,
        layers: tuple[str, ...] | None = None,
        powers: int = 10,
        group: str = "prediction",
        confidence: bool = True,
        holdout: float = 0.1,
        absent: str = "error",
    ) -> None:
        super().__init__()
        if group not in ("prediction", "label"):
            raise ValueError(f"group must be 'prediction' or 'label', got {group!r}")
        if not 0 < holdout < 1:
            raise ValueError(f"holdout must lie between 0 and 1, got {holdout}")
        self.layers = layers
        self.powers = powers
        self.group = group
        self.confidence = confidence
        self.holdout = holdout
        self.absent = absent

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The stages' Gram statistics."""
        return (tap_spec("stage_gram", self, "layers", "powers"),)

    def fit(self, train: Outputs) -> Self:
        """Two sweeps: bounds, then the normalisers on the rows held out. Returns itself."""
        first, device = train.rows(slice(0, 1)).taps[self.taps[0]], train.device
        low = torch.full((train.classes, *first.shape[1:]), torch.inf, device=device, dtype=first.dtype)
        high = torch.full_like(low, -torch.inf)
        counts = torch.zeros(train.classes, dtype=torch.int64, device=device)
        for batch, group, kept in self._split(train):
            chosen = (group >= 0) & kept
            rows, where = batch.taps[self.taps[0]][chosen].to(low), group[chosen]
            index = where.view(-1, 1, 1).expand_as(rows)
            low.scatter_reduce_(0, index, rows, "amin")
            high.scatter_reduce_(0, index, rows, "amax")
            counts += torch.bincount(where, minlength=train.classes)
        present = present_classes(counts, self.absent)
        if not len(present):
            raise ValueError("fitting needs training rows of a known class, but there are none")
        empty = counts == 0
        low[empty], high[empty] = low[present].amin(dim=0), high[present].amax(dim=0)
        self.low, self.high = low, high
        total, seen = torch.zeros(1), 0
        for batch, group, kept in self._split(train):
            chosen = ((group >= 0) & ~kept).nonzero().flatten()
            total = total.to(device) + self.deviations(batch.rows(chosen), group[chosen]).double().sum(dim=0)
            seen += len(chosen)
        if not seen:
            raise ValueError(
                f"no class has the {round(1 / self.holdout)} rows of which holdout={self.holdout} keeps one"
            )
        self.normalisers = (total / seen).to(low.dtype)
        return self

    def deviations(self, outputs: Outputs, group: Int[Tensor, " N"] | None = None) -> Float[Tensor, "N L"]:
        """(N, L): the excess over the bounds of each row's class in every layer, before the normalisation.

        Args:
            outputs: the rows.
            group: whose bounds to use; by default those of the predicted class.
        """
        tap = outputs.taps[self.taps[0]]
        group = outputs.predictions if group is None else group
        layers = [
            sum(
                excess(tap[:, power, part], self.low[group, power, part], self.high[group, power, part])
                for power in range(tap.shape[1])
            )
            for part in layer_slices(self.low)
        ]
        deviations = torch.stack([layer for layer in layers if isinstance(layer, Tensor)], dim=1)
        if not self.confidence:
            return deviations
        return deviations / outputs.logits.softmax(dim=1).amax(dim=1, keepdim=True)

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) ≥ 0; higher = more out-of-distribution. 0 for rows within all bounds."""
        return (self.deviations(outputs) / (self.normalisers + 1e-7)).sum(dim=1)

    def _split(self, train: Outputs) -> Iterator[tuple[Outputs, Int[Tensor, " N"], Bool[Tensor, " N"]]]:
        """Batches with each row's class and whether it sets bounds, or is held out: every 1/holdout-th with a class."""
        before = 0
        for batch in blocks(train):
            group = batch.predictions if self.group == "prediction" else batch.labels
            position = (before + (group >= 0).cumsum(dim=0)).double()
            before = int(position[-1])
            # 1e-9: the tenth multiple of 0.1 may be just below 1
            held = (position * self.holdout + 1e-9).floor() > ((position - 1) * self.holdout + 1e-9).floor()
            yield batch, group, ~held
