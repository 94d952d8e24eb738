"""Mahalanobis distance in several layers, added up."""

from functools import partial
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.layers import layer_slices, split_layers, tap_spec
from ood_toolkit.detectors.mahalanobis import whiten
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import Moments, blocks, moments, nearest_point, present_classes, whitening


class MahalanobisLayersDetector(Detector):
    """Flags images that are far from every class in any of several layers: the feature ensemble of the paper.

    `Σ_l α_l min_c d_{l,c}`, with d the squared Mahalanobis distance of layer l's mean over positions (Lee et al.,
    Algorithm 1). Choose it over `mahalanobis` when OOD images differ in texture or other low-level ways, which early
    layers see and the last one forgets.

    Args:
        layers: module names, as in the model; by default its stages.
        weights: α_l, one per layer; by default 1 each. The method `tuned(id, ood)` learns them as the paper
            does; not on the command line.
        scale: "none" adds the distances as they are; "std" first divides each layer's by its standard deviation over
            the training rows, so that no layer outweighs the others.
        ridge: added to the diagonal of every covariance, in squared feature units, ≥ 0. With 0, directions without
            variance are left out (the pseudo-inverse).
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the authors' code in scale (that keeps the ½ of the Gaussian). The input perturbation of the paper is
    `odin_mahalanobis`, for the last layer. OpenOOD and pytorch-ood sum the layers too (times ½; times 1/2N); oodeel
    is `scale="std"` divided by the number of layers.
    """

    name = "mahalanobis_layers"
    paper = (
        "Lee et al., A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks, "
        "NeurIPS 2018, arXiv:1807.03888, Eq. 2"
    )
    cite = "lee2018simple"
    equation = "Σ_l α_l min_c (f_l − μ_lc)ᵀ Σ_l⁻¹ (f_l − μ_lc)"
    family = "layers"
    needs = "train"
    reads = frozenset({"taps"})
    cost = "O(Σ D² + C·ΣD) over layers"

    widths: Int[Tensor, " L"]
    ranks: Int[Tensor, " L"]
    centres: Float[Tensor, " sum_D"]
    whiteners: Float[Tensor, " sum_DR"]
    means: Float[Tensor, "K sum_R"]
    factors: Float[Tensor, " L"]

    allowed = {"weights": "(-inf, inf)", "ridge": "[0, inf)", "absent": ("error", "skip")}

    def __init__(
        self,
        layers: tuple[str, ...] | None = None,
        weights: tuple[float, ...] | None = None,
        scale: str = "none",
        ridge: float = 0.0,
        absent: str = "error",
    ) -> None:
        super().__init__()
        if scale not in ("none", "std"):
            raise ValueError(f"scale must be 'none' or 'std', got {scale!r}")
        self.layers = layers
        self.weights = weights
        self.scale = scale
        self.ridge = ridge
        self.absent = absent

    @property
    def taps(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The stages' means over positions."""
        return (tap_spec("stage_means", self, "layers"),)

    def fit(self, train: Outputs) -> Self:
        """One sweep per layer, one more for `scale="std"`. Returns itself."""
        name = self.taps[0]
        layers = layer_slices(train.rows(slice(0, 1)).taps[name])
        if self.weights is not None and len(self.weights) != len(layers):
            raise ValueError(f"{len(self.weights)} weights for {len(layers)} layers")
        fitted = [_layer_moments(train, name, part) for part in layers]
        present = present_classes(fitted[0].counts, self.absent)
        whiteners = [whitening(layer.within, self.ridge) for layer in fitted]
        self.widths = torch.tensor([len(layer.mean) for layer in fitted], device=train.device)
        self.ranks = torch.tensor([whitener.shape[1] for whitener in whiteners], device=train.device)
        self.centres = torch.cat([layer.mean for layer in fitted])
        self.whiteners = torch.cat([whitener.flatten() for whitener in whiteners])
        pairs = zip(fitted, whiteners, strict=True)
        self.means = torch.cat([whiten(layer.class_means[present], layer.mean, w) for layer, w in pairs], dim=1)
        weights = self.weights or (1.0,) * len(layers)
        self.factors = torch.tensor(weights, dtype=torch.float64, device=train.device)
        if self.scale == "std":
            distances = torch.cat([self.distances(batch) for batch in blocks(train)])
            self.factors = self.factors / (distances.std(dim=0, correction=0) + 1e-10)
        return self

    def distances(self, outputs: Outputs) -> Float[Tensor, "N L"]:
        """(N, L) float64: the squared distance to the nearest class in every layer."""
        widths, ranks = self.widths.tolist(), self.ranks.tolist()
        layers = split_layers(outputs.taps[self.taps[0]])
        if (got := [layer.shape[1] for layer in layers]) != widths:
            raise ValueError(f"{self!r} was fitted on layers of {widths} channels, but these have {got}; fit it again")
        flat = self.whiteners.double().split([width * rank for width, rank in zip(widths, ranks, strict=True)])
        parts = zip(
            layers,
            self.centres.split(widths),
            (part.view(-1, rank) for part, rank in zip(flat, ranks, strict=True)),
            self.means.double().split(ranks, dim=1),
            strict=True,
        )
        near = [nearest_point(whiten(rows, centre, whitener), means)[0] for rows, centre, whitener, means in parts]
        return torch.stack(near, dim=1)

    def tuned(self, validation_id: Outputs, validation_ood: Outputs) -> Self:
        """A fitted copy whose weights a logistic regression has learned from a validation set of both kinds.

        As in the paper. Scores are then log-odds up to a constant. Say in any table which OOD set was used.
        """
        from sklearn.linear_model import LogisticRegression

        distances = torch.cat([self.distances(validation_id), self.distances(validation_ood)]).cpu().numpy()
        is_ood = [0] * len(validation_id) + [1] * len(validation_ood)
        deviations = distances.std(axis=0) + 1e-10  # one size for the regression's penalty
        weights = LogisticRegression(max_iter=1000).fit(distances / deviations, is_ood).coef_[0] / deviations
        copy = type(self)(self.layers, tuple(weights.tolist()), "none", self.ridge, self.absent)
        copy.load_state_dict(self.state_dict())
        copy.factors = torch.tensor(copy.weights, dtype=torch.float64, device=self.factors.device)
        return copy

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) weighted sums of squared distances; higher = more out-of-distribution."""
        return (self.distances(outputs) @ self.factors.double()).to(outputs.logits.dtype)


def _layer_moments(train: Outputs, tap: str, part: slice) -> Moments:
    return moments(train, of=partial(_layer, tap=tap, part=part))


def _layer(batch: Outputs, tap: str, part: slice) -> Float[Tensor, "N D"]:
    return batch.taps[tap][:, part]
