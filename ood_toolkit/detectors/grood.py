"""GROOD: how hard a row would pull at an artificial out-of-distribution prototype."""

from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import class_means
from ood_toolkit.outputs import Outputs
from ood_toolkit.scratch import room_for
from ood_toolkit.stats import blocks, nearest, present_classes, row_chunks, squared_distances

PROTOTYPES = ("mixup", "mean")


class GROODDetector(Detector):
    """Flags inputs whose gradient on an OOD prototype resembles that of no training row.

    A nearest-prototype classifier over the class means and one OOD prototype P gives the probability q of P by
    softmax over negative distances. The gradient of its cross-entropy with respect to P is, in closed form,
    `g(f) = q(f) · (f − P) / ‖f − P‖`; the score is the distance from g to the nearest of the training rows' gradients
    (those the model classifies correctly). It wants many training rows of each class: with one or two, they lie on
    their prototypes, their gradients vanish, and the score falls with the distance from P.

    Args:
        prototype: where P comes from. "mixup": the mean over training rows of the half-way point to the prototype of
            their second most likely class; "mean": the mean of the class prototypes, an option of the authors' code.
        rows: training rows whose gradients are stored, drawn at random from those classified correctly; None is all.
        seed: of that draw.
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the paper, which mixes at an early layer and runs the rest of the network: here the mixing happens in
    the penultimate layer, the only one that `Outputs` hold. The authors' OpenOOD default takes P from a validation OOD
    set, which a post-hoc detector must not see. Differs from their code in an exact neighbour search instead of an
    inverted file, and in the distance, which there is squared.
    """

    name = "grood"
    paper = "ElAraby et al., GROOD: GRadient-Aware Out-of-Distribution Detection, TMLR 2025, arXiv:2312.14427"
    cite = "elaraby2025grood"
    equation = "min_i ‖g(f) − g(f_i)‖₂ with g(f) = q(f) (f − P) / ‖f − P‖₂"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(ND + CD)"
    block_rows = 4096  # each block goes through the training rows
    class_prototypes: Float[Tensor, "C D"]
    ood_prototype: Float[Tensor, " D"]
    gradients: Float[Tensor, "M D"]
    scale: Float[Tensor, ""]

    allowed = {"rows": "[1, inf)", "absent": ("error", "skip")}

    def __init__(self, prototype: str = "mixup", rows: int | None = None, seed: int = 0, absent: str = "error") -> None:
        super().__init__()
        if prototype not in PROTOTYPES:
            raise ValueError(f"prototype must be one of {', '.join(PROTOTYPES)}, got {prototype!r}")
        self.prototype = prototype
        self.rows = rows
        self.seed = seed
        self.absent = absent

    def fit(self, train: Outputs) -> Self:
        """Learns the prototypes and stores the gradients of training rows. Returns itself."""
        means, counts = class_means(train, lambda batch: batch.features, lambda batch: batch.labels)
        means = means.to(train.head.weight.dtype)
        present = present_classes(counts, self.absent)
        self.class_prototypes = means[present]
        mean = self.class_prototypes.mean(dim=0)
        self.ood_prototype = mean if self.prototype == "mean" else _mixed_prototype(train, means, present)
        right = [batch.correct for batch in blocks(train)]
        index = torch.cat(right).nonzero().flatten()
        if not len(index):
            raise ValueError("fitting needs a correctly classified training row, but there is none")
        if self.rows is not None and self.rows < len(index):
            drawn = torch.randperm(len(index), generator=torch.Generator().manual_seed(self.seed))[: self.rows]
            index = index[drawn.sort().values.to(index.device)]
        gradients = room_for(len(index), train.width, like=train.head.weight)
        for start in (steps := row_chunks(len(index), 8 * (train.width + train.classes))):
            block = slice(start, start + steps.step)
            gradients[block] = self._gradients(train.rows(index[block]).features)
        # confident rows have tiny gradients whose squares would underflow: a common scale keeps them apart
        self.scale = gradients.norm(dim=1).mean().clamp_min(torch.finfo(gradients.dtype).tiny)
        self.gradients = gradients.div_(self.scale)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) distances between gradients; higher = more out-of-distribution."""
        squares, _ = nearest(self._gradients(outputs.features) / self.scale, self.gradients, 1)
        return squares.squeeze(1).sqrt() * self.scale

    def _gradients(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        centre = self.ood_prototype
        to_classes = squared_distances(features - centre, self.class_prototypes - centre).sqrt()
        away = features - centre
        distances = torch.cat([to_classes, away.norm(dim=1, keepdim=True)], dim=1)
        return (-distances).softmax(dim=1)[:, -1:] * normalize(away, dim=1)


def _mixed_prototype(train: Outputs, means: Float[Tensor, "C D"], present: Int[Tensor, " K"]) -> Float[Tensor, " D"]:
    total = means.new_zeros(means.shape[1], dtype=torch.float64)
    for batch in blocks(train):
        second = batch.logits[:, present].topk(min(2, len(present)), dim=1).indices[:, -1]
        total += (0.5 * batch.features + 0.5 * means[present[second]]).double().sum(dim=0)
    return (total / len(train)).to(means.dtype)
