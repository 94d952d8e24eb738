"""OpenMax: part of every logit goes to an unknown class, the more the farther the logits are from their class."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import class_means, right_labels
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks, largest_entries, present_classes, squared_distances


def weibull_fit(tails: Float[Tensor, "K M"]) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Maximum-likelihood shape and scale of a two-parameter Weibull for each row of positive numbers; NaN is no number.

    The shape k solves `Σ x^k log x / Σ x^k − mean(log x) = 1/k`, whose left side less the right one grows with k. It
    is bisected in log k within [1e-3, 1e4]; equal numbers give the upper end, a step.
    """
    logs = tails.double().log()
    here = ~logs.isnan()
    counts = here.sum(dim=1)
    filled = logs.nan_to_num(0.0)
    mean = filled.sum(dim=1) / counts
    low, high = logs.new_full((len(logs),), 1e-3), logs.new_full((len(logs),), 1e4)
    for _ in range(80):
        shape = (low * high).sqrt()
        weights = torch.where(here, shape.unsqueeze(1) * filled, -torch.inf).softmax(dim=1)
        too_large = (weights * filled).sum(dim=1) - mean > 1 / shape
        low, high = torch.where(too_large, low, shape), torch.where(too_large, shape, high)
    shape = (low * high).sqrt()
    powers = torch.where(here, shape.unsqueeze(1) * filled, -torch.inf)
    return shape, ((powers.logsumexp(dim=1) - counts.log()) / shape).exp()


class OpenMaxDetector(Detector):
    """Flags inputs whose logits lie farther from their class's mean logits than extreme training rows do.

    Choose it as the classical baseline of open-set recognition. The score is the probability of the unknown class
    (Algorithm 2 of the paper), which gets the part `w ω` of each of the α largest logits: w is the Weibull
    probability that the distance to the class is an outlier, ω falls from 1 to 1/α down the ranking.

    Args:
        tail: how many of the largest distances per class the Weibull is fitted to. The paper uses 20.
        alpha: how many of the largest logits are revised. The paper uses 10; all, where there are fewer classes.
        absent: "error" refuses classes without a correctly classified training row; "skip" never revises them.

    Differs from Algorithm 2, whose ω is `(α − i)/α`, in having the authors' `(α + 1 − i)/α`, without which the last of
    the α would not count. Distances are Euclidean, as in OpenOOD, where the authors add a cosine term; the Weibull is
    that of libMR, fitted to the tail shifted to start at 1. Only correctly classified rows enter the fit.
    """

    name = "openmax"
    paper = "Bendale and Boult, Towards Open Set Deep Networks, CVPR 2016, arXiv:1511.06233"
    cite = "bendale2016openmax"
    equation = "softmax₀(Σ_i w_i ω_i z₍ᵢ₎, z₍ᵢ₎ (1 − w_i ω_i)) with ω_i = (α + 1 − i) / α for i ≤ α, else 0"
    family = "logits"
    needs = "train"
    reads = frozenset({"logits"})
    cost = "O(C²)"
    centre: Float[Tensor, " C"]
    means: Float[Tensor, "C C"]
    starts: Float[Tensor, " C"]
    shapes: Float[Tensor, " C"]
    scales: Float[Tensor, " C"]

    allowed = {"tail": "[1, inf)", "alpha": "[1, inf)", "absent": ("error", "skip")}

    def __init__(self, tail: int = 20, alpha: int = 10, absent: str = "error") -> None:
        super().__init__()
        self.tail = tail
        self.alpha = alpha
        self.absent = absent

    def fit(self, train: Outputs) -> Self:
        """Learns mean logits and a Weibull of each class from the rows it classifies correctly. Returns itself."""
        means, counts = class_means(train, lambda batch: batch.logits, right_labels)
        present = present_classes(counts, self.absent)
        if not len(present):
            raise ValueError("OpenMax needs correctly classified training rows, but there are none")
        centre = means[present].mean(dim=0)
        tails = self._largest_distances(train, means)
        starts = tails.nan_to_num(torch.inf).amin(dim=1)
        shapes, scales = weibull_fit(tails - starts.unsqueeze(1) + 1)
        dtype = train.head.weight.dtype
        # an absent class starts at infinity: nothing is ever an outlier to it
        self.starts = torch.where(counts > 0, starts, torch.inf).to(dtype)
        self.shapes, self.scales = shapes.nan_to_num(1.0).to(dtype), scales.nan_to_num(1.0).to(dtype)
        self.means, self.centre = (means - centre).nan_to_num(0.0).to(dtype), centre.to(dtype)
        return self

    def _largest_distances(self, train: Outputs, means: Float[Tensor, "C C"]) -> Float[Tensor, "C tail"]:
        """For each class the largest distances of its rows to its mean, descending; NaN where there are too few."""
        best = means.new_full((train.classes, self.tail), -torch.inf)
        for batch in blocks(train):
            label = right_labels(batch)
            distances = (batch.logits[label >= 0].double() - means[label[label >= 0]]).norm(dim=1)
            label = label[label >= 0]
            # rank within class: rows sorted by class, and by falling distance within it
            order = distances.argsort(descending=True, stable=True)
            order = order[label[order].argsort(stable=True)]
            label, distances = label[order], distances[order]
            rank = torch.arange(len(label), device=label.device) - torch.searchsorted(label, label)
            kept = rank < self.tail
            new = torch.full_like(best, -torch.inf)
            new[label[kept], rank[kept]] = distances[kept]
            best = torch.cat([best, new], dim=1).topk(self.tail, dim=1).values
        return torch.where(best.isinf(), torch.nan, best)

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) probability of the unknown class, in [0, 1]; higher = more out-of-distribution."""
        logits = outputs.logits
        alpha = min(self.alpha, logits.shape[1])
        top, ranked = largest_entries(logits, alpha)
        distances = squared_distances(logits - self.centre, self.means).gather(1, ranked).sqrt()
        beyond = ((distances - self.starts[ranked] + 1).clamp_min(0.0) / self.scales[ranked]).pow(self.shapes[ranked])
        outlier = -(-beyond).expm1()
        shares = 1 - torch.arange(alpha, dtype=logits.dtype, device=logits.device) / self.alpha
        taken = shares * outlier * top
        left = logits.scatter(1, ranked, top - taken)
        return (taken.sum(dim=1) - left.logsumexp(dim=1)).sigmoid()
