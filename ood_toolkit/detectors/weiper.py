"""WeiPer+KLD: many perturbed heads, and how far a row's values are distributed as the training rows' are."""

from collections.abc import Iterator
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d, linear, normalize, pad

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.msp import one_minus_msp
from ood_toolkit.detectors.train_rows import subset
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import row_chunks

SMOOTH_FLOOR, SMOOTH_FLOOR_PERTURBED = 0.01, 0.025
"""What the authors' code adds to every bin of the features' and of the perturbed logits' densities."""


def perturbed_weights(
    weight: Float[Tensor, "C D"], distance: float, repeats: int, seed: int
) -> Iterator[Float[Tensor, "C D"]]:
    """The head's weight plus noise of relative length δ: `w_c + δ ‖w_c‖ ε / ‖ε‖`, one matrix after another.

    Drawn on the CPU from the seed and never kept: at 100 repeats for ImageNet they would take 512 MB.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = distance * weight.norm(dim=1, keepdim=True)
    for _ in range(repeats):
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        yield weight + lengths * normalize(noise, dim=1)


def row_histograms(
    values: Float[Tensor, "N K"], low: Float[Tensor, ""], high: Float[Tensor, ""], bins: int
) -> Int[Tensor, "N bins"]:
    """How many of each row's values lie in each of the equal bins from `low` to `high`, both ends included."""
    slots = bins + 2  # the first and the last are waste
    # a hair narrower, so that `high` itself falls into the last bin
    scale = (1 - 4 * torch.finfo(values.dtype).eps) * bins / (high - low).clamp_min(1e-12)
    cells = ((values - low).mul_(scale)).add_(1).clamp_(0, bins + 1).int()
    cells += torch.arange(0, len(values) * slots, slots, dtype=torch.int32, device=values.device).unsqueeze(1)
    return torch.bincount(cells.flatten(), minlength=len(values) * slots).view(-1, slots)[:, 1:-1]


def smoothed(density: Float[Tensor, "N bins"], size: int) -> Float[Tensor, "N bins"]:
    """The mean over windows of `size` bins, ends repeated; an even window reaches one bin further to the right."""
    left = (size - 1) // 2
    return avg_pool1d(pad(density.unsqueeze(0), (left, size - 1 - left), mode="replicate"), size, stride=1).squeeze(0)


def symmetric_divergence(
    train: Float[Tensor, " bins"], density: Float[Tensor, "N bins"], floor: float
) -> Float[Tensor, " N"]:
    """`KL(p ‖ q) + KL(q ‖ p) = Σ (p − q)(log p − log q)`, both densities lifted by `floor` and normalised."""
    p, q = train + floor, density + floor
    p, q = p / p.sum(), q / q.sum(dim=1, keepdim=True)
    return ((p - q) * (p.log() - q.log())).sum(dim=1)


class WeiPerDetector(Detector):
    """Flags inputs whose features and perturbed logits are distributed unlike the training rows'.

    Choose it for near-OOD, where the paper finds it strongest; it is the dearest of the head-based scores. Each row's
    D features make one histogram, its r·C logits under r perturbed heads another; the score is
    `KL(features) + λ₁ KL(perturbed logits) − λ₂ MSP_W`, symmetric divergences from the training mean, MSP_W being the
    mean maximum softmax probability over the perturbed heads.

    Args:
        repeats: r, perturbed copies of the head.
        distance: δ, length of the noise relative to the weight of its class.
        bins: of both histograms, from the smallest to the largest training value.
        smoothing: s₁, bins averaged in the features' histogram.
        smoothing_perturbed: s₂, bins averaged in the perturbed logits' histogram.
        lambda_1: weight of the second divergence.
        lambda_2: weight of MSP_W.
        rows: training rows for the mean densities, drawn at random; None takes all, twice r times the head's cost each.
        seed: of the noise and of that draw.

    The defaults are those of the authors' function; the paper picks δ, s₁, s₂, λ₁ and λ₂ for each data set on
    validation OOD data (r = 100 everywhere). As in the authors' code only the row's densities are smoothed, not the
    training mean. Differs from it in the number of training rows: 300,000 there for ImageNet.
    """

    name = "weiper"
    paper = (
        "Granz et al., WeiPer: OOD Detection using Weight Perturbations of Class Projections, NeurIPS 2024, "
        "arXiv:2405.17164"
    )
    cite = "granz2024weiper"
    equation = "KL(features) + λ₁ KL(perturbed logits) − λ₂ MSP_W, both KL symmetric and against the training mean"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(rCD)"
    block_rows = 8192  # the heads are drawn anew for each block
    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, " C"]
    ranges: Float[Tensor, "2 2"]
    density: Float[Tensor, " bins"]
    density_perturbed: Float[Tensor, " bins"]

    allowed = {
        "repeats": "[1, inf)",
        "distance": "[0, inf)",
        "bins": "[1, inf)",
        "smoothing": "[1, inf)",
        "smoothing_perturbed": "[1, inf)",
        "lambda_1": "[0, inf)",
        "lambda_2": "[0, inf)",
        "rows": "[1, inf)",
    }

    def __init__(
        self,
        repeats: int = 100,
        distance: float = 2.1,
        bins: int = 100,
        smoothing: int = 20,
        smoothing_perturbed: int = 20,
        lambda_1: float = 1.0,
        lambda_2: float = 1.0,
        rows: int | None = 5000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.repeats = repeats
        self.distance = distance
        self.bins = bins
        self.smoothing = smoothing
        self.smoothing_perturbed = smoothing_perturbed
        self.lambda_1 = lambda_1
        self.lambda_2 = lambda_2
        self.rows = rows
        self.seed = seed

    def fit(self, train: Outputs) -> Self:
        """Copies the head; learns both ranges and both mean training densities. Returns itself."""
        if not len(train):
            raise ValueError("fitting needs training rows, but there are none")
        self.weight = train.head.weight.clone()
        self.bias = train.head.bias.clone()
        rows = len(train) if self.rows is None else self.rows
        ends = torch.stack([self._extremes(batch.features) for batch in subset(train, rows, self.seed, step=8192)])
        self.ranges = torch.stack([ends[:, :, 0].amin(dim=0), ends[:, :, 1].amax(dim=0)], dim=1)
        plain = perturbed = 0.0
        for batch in subset(train, rows, self.seed, step=8192):
            densities, densities_perturbed, _ = self._describe(batch.features)
            plain = plain + densities.double().sum(dim=0)
            perturbed = perturbed + densities_perturbed.double().sum(dim=0)
        self.density = (plain / min(rows, len(train))).to(self.weight.dtype)  # pyright: ignore
        self.density_perturbed = (perturbed / min(rows, len(train))).to(self.weight.dtype)  # pyright: ignore
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) divergences minus confidence; higher = more out-of-distribution."""
        densities, densities_perturbed, unsure = self._describe(outputs.features)
        plain = symmetric_divergence(self.density, smoothed(densities, self.smoothing), SMOOTH_FLOOR)
        perturbed = symmetric_divergence(
            self.density_perturbed, smoothed(densities_perturbed, self.smoothing_perturbed), SMOOTH_FLOOR_PERTURBED
        )
        return plain + self.lambda_1 * perturbed + self.lambda_2 * (unsure - 1)

    def _heads(self) -> Iterator[Float[Tensor, "C D"]]:
        return perturbed_weights(self.weight, self.distance, self.repeats, self.seed)

    def _extremes(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "2 2"]:
        """Smallest and largest feature; smallest and largest perturbed logit."""
        parts = features.split(row_chunks(len(features), 16 * max(self.weight.shape)).step)
        # in place: numbers kept from every repeat would lie between the freed heads, and no head would fit there again
        low, high = features.new_full((), torch.inf), features.new_full((), -torch.inf)
        for weight in self._heads():
            for part in parts:
                smallest, largest = torch.aminmax(linear(part, weight, self.bias))
                torch.minimum(low, smallest, out=low)
                torch.maximum(high, largest, out=high)
        return torch.stack([torch.stack(torch.aminmax(features)), torch.stack([low, high])])

    def _describe(
        self, features: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, "N bins"], Float[Tensor, "N bins"], Float[Tensor, " N"]]:
        """Density of the features, density of the perturbed logits, and the mean 1 − MSP, of every row."""
        (low, high), (low_perturbed, high_perturbed) = self.ranges
        plain = features.new_empty(len(features), self.bins)
        counts = torch.zeros(len(features), self.bins, dtype=torch.int64, device=features.device)
        unsure = features.new_zeros(len(features))
        steps = row_chunks(len(features), 16 * max(self.weight.shape))  # 4 MiB of logits for 1000 classes
        blocks = [slice(start, start + steps.step) for start in steps]
        for block in blocks:
            plain[block] = row_histograms(features[block], low, high, self.bins) / features.shape[1]
        for weight in self._heads():
            for block in blocks:
                logits = linear(features[block], weight, self.bias)
                counts[block] += row_histograms(logits, low_perturbed, high_perturbed, self.bins)
                unsure[block] += one_minus_msp(logits)
        return plain, counts.to(features.dtype) / (self.repeats * len(self.weight)), unsure / self.repeats
