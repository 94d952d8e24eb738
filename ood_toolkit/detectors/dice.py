"""DICE: the head with only the weights that matter for the training data."""

from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear

from ood_toolkit.detectors.rectifier import Rectifier, checked_percentile
from ood_toolkit.detectors.train_rows import feature_mean
from ood_toolkit.outputs import Outputs


def salient_weights(weight: Float[Tensor, "C D"], mean: Float[Tensor, " D"], percentile: float) -> Bool[Tensor, "C D"]:
    """Which weights have a contribution `mean_d · w_cd` above the percentile of all C·D contributions."""
    contributions = weight * mean
    flat = contributions.flatten()
    position = percentile / 100 * (len(flat) - 1)
    # torch.quantile refuses more than 2^24 numbers
    ranks = int(position) + 1, min(int(position) + 2, len(flat))
    below, above = (flat.kthvalue(rank).values.double() for rank in ranks)
    return contributions > torch.lerp(below, above, position - int(position))


class DICEDetector(Rectifier):
    """Flags inputs whose confidence rests on weights that matter little for the training data.

    Choose it where features are many and noisy (DenseNet, ResNet). The logits become `(M ⊙ W)ᵀ h(x) + b`, where the
    mask M keeps the weights with the largest contribution `E[h] ⊙ w_c`.

    Args:
        percentile: p, share of the weights that is dropped, in percent of the whole matrix. 90 is the default of the
            authors' code.
        score: the equation that reads the new logits.

    Differs from a widespread shortcut that ranks the weights by size alone: the mean feature belongs in the ranking.
    """

    name = "dice"
    paper = "Sun and Li, DICE: Leveraging Sparsification for Out-of-Distribution Detection, ECCV 2022, arXiv:2111.09805"
    cite = "sun2022dice"
    equation = "S((M ⊙ W) f + b) with M_cd = 1 where w_cd E[f_d] exceeds the p-th percentile of all, else 0"
    needs = "train"

    def __init__(self, percentile: float = 90.0, score: str = "energy") -> None:
        super().__init__(score)
        self.percentile = checked_percentile(percentile)

    def fit(self, train: Outputs) -> Self:
        """Learns which weights to keep, from the mean feature. Returns itself."""
        super().fit(train)
        self.weight = self.weight * salient_weights(self.weight, feature_mean(train), self.percentile)
        return self

    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The features as they are: `weight` is the sparse head's."""
        return features

    def rectified_logits(self, outputs: Outputs) -> Float[Tensor, "N C"]:
        """One matrix product with the masked weight, instead of the (N, C, D) array of the authors' code."""
        return linear(outputs.features, self.weight, self.bias)
