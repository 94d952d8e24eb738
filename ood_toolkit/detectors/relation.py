"""Neural relation graph: how strongly a row is tied to the training data by features and predictions."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import threshold

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.train_rows import subset
from ood_toolkit.outputs import Outputs
from ood_toolkit.scratch import room_for
from ood_toolkit.stats import l2_normalise

_QUERIES, _BANK = 4096, 512
"""Rows of one block of the graph: 8 MiB of float32. A small block of rows of few classes is one that most inputs need
not look at."""


class RelationDetector(Detector):
    """Flags inputs that few training rows resemble in direction *and* in prediction.

    Choose it when compatible predictions matter as much as near features; it costs a pass over the training rows, all
    the shorter the surer the softmax is: blocks of rows too unlike in their predictions for an edge are left out. The
    score is minus the sum over them of the edges `(max(cos(f, fᵢ), 0) · ⟨p, pᵢ⟩)^t`, p being softmax probabilities;
    edges of at most `threshold` count as 0.

    Args:
        power: t, the kernel's temperature. The paper uses 1 for OOD detection (4 for label errors).
        threshold: the smallest edge that counts; 0.03 in the authors' code.
        alpha: share of the training rows that forms the graph, drawn at random; in (0, 1].
        seed: of that draw.

    Differs from the paper in direction only: there a large sum means in-distribution.
    """

    name = "relation"
    paper = (
        "Kim et al., Neural Relation Graph: A Unified Framework for Identifying Label Noise and Outlier Data, "
        "NeurIPS 2023, arXiv:2301.12321"
    )
    cite = "kim2023relation"
    equation = "−Σ_i (relu(cos(f, f_i)) p · p_i)^t over edges above the threshold"
    needs = "train"
    reads = frozenset({"logits", "features"})
    cost = "O(N(C + D))"
    block_rows = 4096  # each block goes through the training rows
    directions: Float[Tensor, "M D"]
    probabilities: Float[Tensor, "M C"]
    summits: Float[Tensor, "B C"]

    sweep = {"power": (1.0, 2.0, 4.0, 6.0, 8.0)}

    allowed = {"power": "(0, inf)", "threshold": "(-inf, inf)", "alpha": "(0, 1]"}

    def __init__(self, power: float = 1.0, threshold: float = 0.03, alpha: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha, the share of training rows in the graph, must lie in (0, 1], got {alpha}")
        self.power = power
        self.threshold = threshold
        self.alpha = alpha
        self.seed = seed

    def fit(self, train: Outputs) -> Self:
        """Stores directions and probabilities of the graph's rows. Returns itself."""
        if not len(train):
            raise ValueError("fitting needs training rows, but there are none")
        rows = max(1, int(len(train) * self.alpha))
        predictions = torch.cat([batch.predictions for batch in subset(train, rows, self.seed)])
        place = predictions.argsort(stable=True).argsort()  # rows of a class become neighbours
        directions = room_for(rows, train.width, like=train.head.weight)
        probabilities = room_for(rows, train.classes, like=train.head.weight)
        start = 0
        for batch in subset(train, rows, self.seed):
            block = place[start : start + len(batch)]
            directions[block] = l2_normalise(batch.features)
            probabilities[block] = batch.logits.softmax(dim=1)
            start += len(batch)
        self.directions, self.probabilities = directions, probabilities
        self.summits = torch.stack([part.amax(dim=0) for part in probabilities.split(_BANK)])
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) negative sums of edges; higher = more out-of-distribution."""
        return -torch.cat(
            [self._relation(outputs.rows(slice(s, s + _QUERIES))) for s in range(0, len(outputs), _QUERIES)]
        )

    def _relation(self, outputs: Outputs) -> Float[Tensor, " N"]:
        directions, probabilities = l2_normalise(outputs.features), outputs.logits.softmax(dim=1)
        total = directions.new_zeros(len(outputs))
        # an edge is at most p · pᵢ, which is at most p times the largest of each class in the block
        least = 0.999 * self.threshold
        reachable = probabilities @ self.summits.T > least
        for number, near in enumerate(reachable.T):
            block = slice(number * _BANK, (number + 1) * _BANK)
            rows = near.nonzero().squeeze(1)
            agreement = probabilities[rows] @ self.probabilities[block].T
            some = (agreement.amax(dim=1) > least).nonzero().squeeze(1)
            rows = rows[some]
            edges = (directions[rows] @ self.directions[block].T).clamp_min_(0).mul_(agreement[some])
            edges = threshold(edges, self.threshold, 0.0, inplace=True)
            total.index_add_(0, rows, (edges if self.power == 1 else edges.pow_(self.power)).sum(dim=1))
        return total
