"""CombOOD: distance to the nearest training features, and how extreme the numbers inside the network are."""

from collections.abc import Iterator
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.layers import tap_spec
from ood_toolkit.outputs import Outputs
from ood_toolkit.scratch import room_for
from ood_toolkit.stats import blocks, l2_normalise, nearest, row_chunks, whitening

_POWERS = (-30.0, 32.0)
"""Where the power of a column is sought: beyond those of very skewed ones, and before a float64 overflows."""

_STEPS = 55
"""Golden sections that narrow it down to 2e-10."""

_LARGEST = 1e120
"""What a transformed number is at most, so that its square is still a number."""


def yeo_johnson(values: Float[Tensor, "N K"], powers: Float[Tensor, " K"]) -> Float[Tensor, "N K"]:
    """The power transform of Yeo and Johnson with one λ per column, which makes skewed numbers more nearly Gaussian.

    `((1 + x)^λ − 1) / λ` for x ≥ 0 and `−((1 − x)^(2−λ) − 1) / (2 − λ)` below, with logarithms where the power is 0.
    """
    logs = values.abs().log1p()
    power = torch.where(values >= 0, powers, 2 - powers)
    zero = power.abs() < 1e-12
    grown = torch.where(zero, logs, (power * logs).expm1() / torch.where(zero, 1.0, power))
    return grown.copysign(values)


class CombOODDetector(Detector):
    """Flags images far from all training features, or with unusually small or large numbers inside the network.

    A nearest-neighbour density of the features and a Gaussian one of the extremes add up as log-densities:
    `w log d_k² + m²`. d_k is the distance of the unit-length feature to the k-th nearest of training; m is the
    Mahalanobis distance of the smallest and the largest number that enter each activation, and of the smallest and
    largest logit, each standardised and made Gaussian by a power transform. Choose it over `knn` where OOD images
    differ in low-level ways too. It keeps its training rows.

    Args:
        k: which neighbour; the authors take 50.
        weight: w; by default √D, as the authors' code runs. D would be the density of D-dimensional neighbours.
        ridge: added to the diagonal of the covariance of the transformed extremes, whose variances are 1; 1 in the
            authors' code.
        layers: names of the activations; by default all that a pass calls.

    Differs from the authors' code in that extremes are of what enters an activation: its hook runs afterwards, when an
    activation that works in place has overwritten that. At distance 0, where it reads memory that nobody has written,
    the logarithm of the smallest float32 counts. The entries of the OpenOOD board for near-OOD on ImageNet are 13 to 22
    points above what others measure (OpenOOD issue 307, which finds the rest sound): perhaps of other image sets.
    """

    name = "combood"
    paper = (
        "Rajasekaran et al., COMBOOD: A Semiparametric Approach for Detecting Out-of-distribution Data for Image "
        "Classification, SDM 2024"
    )
    cite = "rajasekaran2024combood"
    equation = (
        "w log ‖f̂ − f̂₍ₖ₎‖² + eᵀ (Σ + ridge I)⁻¹ e, e being the power-transformed extremes of every activation's input "
        "and of the logits"
    )
    family = "layers"
    needs = "train"
    reads = frozenset({"logits", "features", "taps"})
    cost = "O(N·D)"
    block_rows = 4096  # each block goes through the training rows

    bank: Float[Tensor, "M D"]
    centre: Float[Tensor, " E"]
    scale: Float[Tensor, " E"]
    powers: Float[Tensor, " E"]
    shift: Float[Tensor, " E"]
    whitener: Float[Tensor, "E E"]

    sweep = {"k": (10, 50, 100, 200)}
    allowed = {"k": "[1, inf)", "weight": "[0, inf)", "ridge": "[0, inf)"}

    def __init__(
        self, k: int = 50, weight: float | None = None, ridge: float = 1.0, layers: tuple[str, ...] | None = None
    ) -> None:
        super().__init__()
        self.k = k
        self.weight = weight
        self.ridge = ridge
        self.layers = layers

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The extremes of what enters the activations."""
        return (tap_spec("activation_extremes", self, "layers"),)

    def fit(self, train: Outputs) -> Self:
        """Keeps the features in one sweep, and learns a transform of the extremes, labelled or not. Returns itself."""
        if not 1 <= self.k <= len(train):
            raise ValueError(f"k must lie between 1 and the {len(train)} training rows, got {self.k}")
        first = train.rows(slice(0, 1))
        bank = room_for(len(train), train.width, like=first.features)
        extremes = room_for(len(train), self.extremes(first).shape[1], like=self.extremes(first))
        start = 0
        for batch in blocks(train):
            part = slice(start, start + len(batch))
            bank[part], extremes[part] = l2_normalise(batch.features), self.extremes(batch)
            start = part.stop
        self.bank = bank
        ones = torch.ones(extremes.shape[1], dtype=torch.float64, device=extremes.device)
        self.centre, spread = _moments(extremes, 0 * ones, ones, ones)
        self.scale = _not_zero(spread.diagonal().sqrt())
        self.powers = torch.where(spread.diagonal() > 0, _likeliest_powers(extremes, self.centre, self.scale), 1.0)
        self.shift, covariance = _moments(extremes, self.centre, self.scale, self.powers)
        sizes = _not_zero(covariance.diagonal().sqrt())
        correlation = covariance / torch.outer(sizes, sizes) * len(train) / max(1, len(train) - 1)
        self.whitener = whitening(correlation, self.ridge) / sizes.unsqueeze(1)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) log-density deficits up to a constant, of either sign; higher = more out-of-distribution."""
        given = outputs.features.dtype
        rows = l2_normalise(outputs.features)
        kth = nearest(rows, self.bank, self.k)[1][:, -1]
        # measured again, because ‖a‖² + ‖b‖² − 2ab loses digits to cancellation
        squared = (rows - self.bank[kth].to(rows)).double().square().sum(dim=1)
        weight = self.bank.shape[1] ** 0.5 if self.weight is None else self.weight
        logarithms = squared.clamp_min(torch.finfo(torch.float32).tiny).log()
        return (weight * logarithms + self.extremity(outputs)).clamp(max=torch.finfo(given).max).to(given)

    def extremes(self, outputs: Outputs) -> Float[Tensor, "N E"]:
        """The extremes of the activations' inputs and of the logits."""
        ends = [outputs.logits.amin(dim=1), outputs.logits.amax(dim=1)]
        return torch.cat([outputs.taps[self.taps[0]].to(outputs.logits.dtype), torch.stack(ends, dim=1)], dim=1)

    def extremity(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) float64: squared Mahalanobis distances of the transformed extremes."""
        standard = (self.extremes(outputs).double() - self.centre.double()) / self.scale.double()
        transformed = yeo_johnson(standard, self.powers.double()).clamp(-_LARGEST, _LARGEST)
        deviations = transformed - self.shift.double()
        return (deviations @ self.whitener.double()).square().sum(dim=1)


def _likeliest_powers(
    rows: Float[Tensor, "N E"], centre: Float[Tensor, " E"], scale: Float[Tensor, " E"]
) -> Float[Tensor, " E"]:
    """The powers under which the standardised columns are likeliest to be Gaussian, by golden section."""
    signed = sum(
        (part.sign() * part.abs().log1p()).sum(dim=0)
        for part in ((block - centre) / scale for block in _double_blocks(rows))
    )

    def cost(powers: Tensor) -> Tensor:
        variances = _moments(rows, centre, scale, powers, shared=False)[1]
        return 0.5 * variances.log() - (powers - 1) * signed / len(rows)

    ratio = (5**0.5 - 1) / 2
    low, high = torch.full_like(centre, _POWERS[0]), torch.full_like(centre, _POWERS[1])
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = cost(left), cost(right)
    for _ in range(_STEPS):
        falls = at_left < at_right  # the minimum lies left of `right`
        low, high = torch.where(falls, low, left), torch.where(falls, right, high)
        new = torch.where(falls, high - ratio * (high - low), low + ratio * (high - low))
        at_new = cost(new)
        left, right = torch.where(falls, new, right), torch.where(falls, left, new)
        at_left, at_right = torch.where(falls, at_new, at_right), torch.where(falls, at_left, at_new)
    return (low + high) / 2


def _moments(
    rows: Float[Tensor, "N E"],
    centre: Float[Tensor, " E"],
    scale: Float[Tensor, " E"],
    powers: Float[Tensor, " E"],
    *,
    shared: bool = True,
) -> tuple[Float[Tensor, " E"], Tensor]:
    """Mean and covariance (divided by N) of the transformed columns, blocks merged about their own means.

    Args:
        rows: raw columns.
        centre: subtracted first.
        scale: divided by next.
        powers: of the transform.
        shared: False gives the variances alone.
    """
    count, mean = 0, torch.zeros_like(centre)
    spread: Tensor = torch.zeros_like(centre)
    if shared:
        spread = spread.unsqueeze(1) + spread
    for block in _double_blocks(rows):
        values = yeo_johnson((block - centre) / scale, powers)
        there = values.mean(dim=0)
        about, apart = values - there, there - mean
        total = count + len(values)
        inner = about.T @ about if shared else about.square().sum(dim=0)
        between = torch.outer(apart, apart) if shared else apart.square()
        spread = spread + inner + between * (count * len(values) / total)
        mean = mean + apart * (len(values) / total)
        count = total
    return mean, spread / count


def _double_blocks(rows: Float[Tensor, "N E"]) -> Iterator[Float[Tensor, "M E"]]:
    chunks = row_chunks(len(rows), 8 * rows.shape[1])
    yield from (rows[start : start + chunks.step].double() for start in chunks)


def _not_zero(sizes: Tensor) -> Tensor:
    """A column that never varies is left as it is."""
    return torch.where(sizes > 0, sizes, 1.0)
