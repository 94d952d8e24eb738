"""RankFeat: what remains of the logits when a feature map loses its first singular component."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.energy import energy
from ood_toolkit.outputs import Outputs

BLOCKS = ("both", "last", "before")


def without_rank_one(layer: Float[Tensor, "N D P"]) -> Float[Tensor, "N D P"]:
    """`X − σ₁ u₁ v₁ᵀ`: the map of each image without its first singular component (Song et al.).

    The singular vector is the first eigenvector of the smaller of `X Xᵀ` and `Xᵀ X`, in float64.
    """
    if layer.shape[1] < layer.shape[2]:
        return without_rank_one(layer.transpose(1, 2)).transpose(1, 2)
    wide = layer.double()
    first = torch.linalg.eigh(wide.transpose(1, 2) @ wide).eigenvectors[:, :, -1:]
    return (wide - (wide @ first) @ first.transpose(1, 2)).to(layer.dtype)


class RankFeatDetector(Detector):
    """Flags images whose confidence rests on the rank-1 part of their last feature maps. Needs no training data.

    `−T log Σ_c exp(z̄_c / T)`, with z̄ the mean of the logits when the last stage's map loses `σ₁ u₁ v₁ᵀ` and when the
    last but one's does (Song et al., with the fusion of blocks 3 and 4). OOD images owe more of their
    activation to that component, so its removal flattens them more. Costs a further pass for the earlier stage, and a
    small eigenvalue problem per image and stage.

    Args:
        block: "both" (the paper's fusion), "last" (block 4 of a ResNet) or "before" (block 3).
        temperature: T > 0, in logit units. The paper uses 1.

    Differs from the authors' code in direction only. The singular vector is exact; their power iteration is an
    approximation for speed.
    """

    name = "rankfeat"
    paper = (
        "Song, Sebe and Wang, RankFeat: Rank-1 Feature Removal for Out-of-distribution Detection, NeurIPS 2022, "
        "arXiv:2209.08590"
    )
    cite = "song2022rankfeat"
    equation = "−T log Σ_c exp(z̄_c / T), z̄ from the maps X − σ₁ u₁ v₁ᵀ of the last two stages"
    family = "layers"
    needs = "head"
    reads = frozenset({"taps"})
    cost = "1 more forward pass, an eigenvalue problem of the positions per map"
    taps = ("rank_one_removed",)

    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, " C"]

    allowed = {"temperature": "(0, inf)"}

    def __init__(self, block: str = "both", temperature: float = 1.0) -> None:
        super().__init__()
        if block not in BLOCKS:
            raise ValueError(f"block must be one of {', '.join(BLOCKS)}; got {block!r}")
        self.block = block
        self.temperature = temperature

    def fit(self, train: Outputs) -> Self:
        """Copies the head. Returns itself."""
        self.weight = train.head.weight.clone()
        self.bias = train.head.bias.clone()
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) free energies; higher = more out-of-distribution."""
        stages = outputs.taps["rank_one_removed"]
        # the head is linear, so the mean of two logits is the logit of the mean
        features = {"last": stages[:, 0], "before": stages[:, 1], "both": stages.mean(dim=1)}[self.block]
        return energy(features @ self.weight.T + self.bias, self.temperature)
