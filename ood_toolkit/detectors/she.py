"""SHE: how well the features match the pattern stored for the predicted class."""

from typing import Self

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.softmax import right_labels
from ood_toolkit.detectors.train_rows import class_patterns
from ood_toolkit.outputs import Outputs

METRICS = ("inner_product", "euclidean", "cosine")


class SHEDetector(Detector):
    """Flags inputs whose features have a small inner product with the mean feature of the predicted class.

    The Simplified Hopfield Energy `E(ξ) = −S_cᵀ ξ`: one dot product per row, the stored pattern S_c being the mean of
    the *correctly classified* training features of class c. It sees feature norm and direction at once.

    Args:
        metric: "inner_product" (the paper's), or "euclidean" (distance to the pattern) and "cosine", OpenOOD's options.
        absent: "mean" lets the mean of all correctly classified rows stand for the pattern of a class that has none;
            "error" refuses such a class.

    Differs from OpenOOD where a class has no correct row: there its pattern, and each score against it, is NaN.
    """

    name = "she"
    paper = (
        "Zhang et al., Out-of-Distribution Detection based on In-Distribution Data Patterns Memorization with Modern "
        "Hopfield Energy, ICLR 2023"
    )
    cite = "zhang2023she"
    equation = "−S_y · f with S_c = E[f | correctly classified as c]"
    needs = "train"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D)"
    patterns: Float[Tensor, "C D"]

    allowed = {"absent": ("error", "mean")}

    def __init__(self, metric: str = "inner_product", absent: str = "mean") -> None:
        super().__init__()
        if metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
        self.metric = metric
        self.absent = absent

    def fit(self, train: Outputs) -> Self:
        """Stores the pattern of every class. Returns itself."""
        what = "a correctly classified training row"
        self.patterns = class_patterns(train, right_labels, absent=self.absent, what=what)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) Hopfield energies, or distances; higher = more out-of-distribution."""
        pattern = self.patterns[outputs.predictions]
        if self.metric == "euclidean":
            return (outputs.features - pattern).norm(dim=1)
        if self.metric == "cosine":
            return -cosine_similarity(outputs.features, pattern, dim=1)
        return -(outputs.features * pattern).sum(dim=1)
