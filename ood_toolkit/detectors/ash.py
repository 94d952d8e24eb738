"""ASH: most features can go, and what remains tells more."""

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ood_toolkit.detectors.rectifier import Rectifier, checked_percentile
from ood_toolkit.stats import largest_values


def kept_count(width: int, percentile: float) -> int:
    """`D − round(D p / 100)`, halves rounded to even as in the authors' code, and at least 1."""
    return max(1, width - round(width * percentile / 100))


def largest(features: Float[Tensor, "N D"], percentile: float) -> Bool[Tensor, "N D"]:
    """Which features of a row belong to its `kept_count` largest; among equals, the first ones.

    The indices of `topk` would leave the choice among equals to the device, and after a ReLU equals are common: zeros.
    """
    return largest_mask(features, kept_count(features.shape[1], percentile))


def largest_mask(features: Float[Tensor, "N D"], kept: int) -> Bool[Tensor, "N D"]:
    """Which features of a row belong to its `kept` largest; among equals, the first ones."""
    threshold = largest_values(features, kept).amin(dim=1, keepdim=True)
    mask = features >= threshold
    if int(mask.count_nonzero()) > kept * len(features):
        tied = mask.sum(dim=1) > kept
        rows, limit = features[tied], threshold[tied]
        above, equal = rows > limit, rows == limit
        spare = kept - above.sum(dim=1, keepdim=True)
        mask[tied] = above | (equal & (equal.cumsum(dim=1) <= spare))
    return mask


def sum_ratio(features: Float[Tensor, "N D"], top: Float[Tensor, "N 1"]) -> Float[Tensor, "N 1"]:
    """`s₁ / s₂`: the sum of all features over `top`, that of the largest ones; 1 where `top` is 0.

    With features of both signs the ratio can be any number; it is limited to ±80 so that its exponential is finite.
    """
    ratio = features.sum(dim=1, keepdim=True) / torch.where(top == 0, 1.0, top)
    return torch.where(top == 0, 1.0, ratio).clamp(-80.0, 80.0)


def concentration(features: Float[Tensor, "N D"], percentile: float) -> Float[Tensor, "N 1"]:
    """`s₁ / s₂`: the sum of all features over that of the `kept_count` largest; see `sum_ratio`."""
    kept = kept_count(features.shape[1], percentile)
    return sum_ratio(features, largest_values(features, kept).sum(dim=1, keepdim=True))


class ActivationShaping(Rectifier):
    """Keeps the largest features of each row, zeroes the others, then treats what is left.

    Args:
        percentile: share of the features that is dropped, in percent of the D features of the row.
        score: the equation that reads the new logits.
    """

    paper = (
        "Djurisic et al., Extremely Simple Activation Shaping for Out-of-Distribution Detection, ICLR 2023, "
        "arXiv:2209.09858"
    )
    cite = "djurisic2023ash"

    sweep = {"percentile": (65.0, 70.0, 75.0, 80.0, 85.0, 90.0, 95.0)}

    def __init__(self, percentile: float, score: str) -> None:
        super().__init__(score)
        self.percentile = checked_percentile(percentile)

    @abstractmethod
    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The shaped features."""


class ASHPDetector(ActivationShaping):
    """Flags inputs whose few largest features do not make a confident prediction. Needs no training data.

    The plainest of the three: prune, nothing else. ASH-B and ASH-S do better in the paper.

    Args:
        percentile: share of the features that is dropped, in percent. The authors' function has 65.
        score: the equation that reads the new logits.

    Features are the pooled ones, as in the authors' networks; shaping the feature map before pooling ranks otherwise.
    """

    name = "ash_p"
    equation = "S(W g + b) with g_d = f_d for the k largest, k = D − round(D p / 100), else 0"

    def __init__(self, percentile: float = 60.0, score: str = "energy") -> None:
        super().__init__(percentile, score)

    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The largest features; zero elsewhere."""
        return torch.where(largest(features, self.percentile), features, 0.0)


class ASHBDetector(ActivationShaping):
    """Flags inputs by *which* features are largest, not by how large they are. Needs no training data.

    The k kept features all become `s₁ / k`, s₁ being the row's sum before pruning.

    Args:
        percentile: share of the features that is dropped, in percent. 65 is the default of the authors' function.
        score: the equation that reads the new logits.
    """

    name = "ash_b"
    equation = "S(W g + b) with g_d = s₁ / k for the k largest f_d, k = D − round(D p / 100), else 0"

    def __init__(self, percentile: float = 65.0, score: str = "energy") -> None:
        super().__init__(percentile, score)

    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """`s₁ / k` at the largest features; zero elsewhere."""
        fill = features.sum(dim=1, keepdim=True) / kept_count(features.shape[1], self.percentile)
        return torch.where(largest(features, self.percentile), fill, 0.0)


class ASHSDetector(ActivationShaping):
    """Flags inputs whose pruned features, sharpened by how much was pruned, are unconvincing. Needs no training data.

    The authors' choice on ImageNet. Kept features times `exp(s₁ / s₂)`, the row's sums before and
    after pruning.

    Args:
        percentile: share of the features that is dropped, in percent. 90 is the authors' ImageNet setting.
        score: the equation that reads the new logits.

    Meant for non-negative features. Where features have both signs, `s₁ / s₂` is limited to ±80.
    """

    name = "ash_s"
    equation = "S(W g + b) with g_d = exp(s₁/s₂) f_d for the k largest, k = D − round(D p / 100), else 0"

    def __init__(self, percentile: float = 90.0, score: str = "energy") -> None:
        super().__init__(percentile, score)

    def rectify(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The largest features, times `exp(s₁ / s₂)`; zero elsewhere."""
        pruned = torch.where(largest(features, self.percentile), features, 0.0)
        return pruned.mul_(sum_ratio(features, pruned.sum(dim=1, keepdim=True)).exp())
