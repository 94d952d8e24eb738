"""Distance to the k-th nearest training feature."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.outputs import Outputs
from ood_toolkit.scratch import room_for
from ood_toolkit.stats import blocks, l2_normalise, nearest


class KNNDetector(Detector):
    """Flags features whose direction has few training features nearby. Assumes nothing about their distribution.

    The Euclidean distance of the unit-length feature to the k-th nearest unit-length training feature
    (Sun et al.). Strong on well-clustered features; costs most of all at scoring, and it keeps its training rows: 4·N·D
    bytes. Fit it on a sample of the rows where that is too much; the paper divides k by the same factor.

    Args:
        k: which neighbour, from 1 (the nearest) to the number of training rows. The paper uses 50 for CIFAR-10, 200
            for CIFAR-100, 1000 for all of ImageNet and 10 for 1 % of it.
        normalise: False compares the features as they are.

    Differs from the authors' code in scale: FAISS gives it squared distances. The ranking is the same.
    """

    name = "knn"
    paper = "Sun et al., Out-of-Distribution Detection with Deep Nearest Neighbors, ICML 2022, arXiv:2204.06507"
    cite = "sun2022out"
    equation = "‖f̂ − f̂₍ₖ₎‖₂, f̂₍ₖ₎ being the k-th nearest training row"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(N·D)"
    block_rows = 4096  # each block goes through the training rows

    bank: Float[Tensor, "M D"]

    sweep = {"k": (50, 100, 200, 500, 1000)}

    allowed = {"k": "[1, inf)"}

    def __init__(self, k: int = 50, normalise: bool = True) -> None:
        super().__init__()
        self.k = k
        self.normalise = normalise

    def fit(self, train: Outputs) -> Self:
        """Keeps the rows, labelled or not."""
        if not 1 <= self.k <= len(train):
            raise ValueError(f"k must lie between 1 and the {len(train)} training rows, got {self.k}")
        first = train.rows(slice(0, 1)).features
        bank = room_for(len(train), train.width, like=first)
        start = 0
        for batch in blocks(train):
            bank[start : start + len(batch)] = self._prepared(batch.features)
            start += len(batch)
        self.bank = bank
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) distances, in [0, 2] for unit-length features; higher = more out-of-distribution."""
        rows = self._prepared(outputs.features)
        kth = nearest(rows, self.bank, self.k)[1][:, -1]
        # measured again, because ‖a‖² + ‖b‖² − 2ab loses digits to cancellation
        return torch.linalg.vector_norm(rows - self.bank[kth].to(rows), dim=1)

    def _prepared(self, features: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        return l2_normalise(features) if self.normalise else features
