"""Cosines between a feature and the class means, absolute and relative."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.msp import one_minus_msp
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks, l2_normalise, nearest_point, present_classes


class MaxCosineDetector(Detector):
    """Flags features whose direction is far from that of every class mean.

    `1 − max_c cos(f, μ_c)`, μ_c the mean training feature of class c. Cheap and without matrices to invert; prefer
    `mahalanobis_pp` where the features are strongly correlated.

    Args:
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the paper in the directions: there they are the weights of a head trained on cosines; class means
    need no special training. Computed as half a squared distance, so cosines near 1 keep their digits.
    """

    name = "maxcosine"
    paper = (
        "Techapanurak et al., Hyperparameter-Free Out-of-Distribution Detection Using Cosine Similarity, ACCV 2020, "
        "arXiv:1905.10628"
    )
    cite = "techapanurak2020hyperparameter"
    equation = "1 − max_c cos(f, μ_c)"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(C·D)"

    directions: Float[Tensor, "K D"]

    allowed = {"absent": ("error", "skip")}

    def __init__(self, absent: str = "error") -> None:
        super().__init__()
        self.absent = absent

    def fit(self, train: Outputs) -> Self:
        """One sweep over the labelled rows."""
        self.directions = _class_directions(train, self.absent)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 2]; higher = more out-of-distribution."""
        rows = l2_normalise(outputs.features)
        return 0.5 * nearest_point(rows, self.directions.to(rows))[0]


class RelativeCosineDetector(Detector):
    """Flags features whose direction fits no class mean much better than the others.

    `1 − max_c softmax_c(cos(f, μ_c) / T)`, the relative cosine of NINCO's evaluation: `maxcosine` compared with the
    cosines to the other classes.

    Args:
        temperature: T > 0. The paper uses 1.
        absent: "error" refuses classes without a training row, "skip" leaves them out.

    Differs from the paper's code in direction: there high means in-distribution.
    """

    name = "rcos"
    paper = (
        "Bitterwolf, Müller and Hein, In or Out? Fixing ImageNet Out-of-Distribution Detection Evaluation, ICML 2023, "
        "arXiv:2306.00826"
    )
    cite = "bitterwolf2023ninco"
    equation = "1 − max_c softmax_c(cos(f, μ) / T)"
    needs = "train"
    reads = frozenset({"features"})
    cost = "O(C·D)"

    directions: Float[Tensor, "K D"]

    allowed = {"temperature": "(0, inf)", "absent": ("error", "skip")}

    def __init__(self, temperature: float = 1.0, absent: str = "error") -> None:
        super().__init__()
        self.temperature = temperature
        self.absent = absent

    def fit(self, train: Outputs) -> Self:
        """One sweep over the labelled rows."""
        self.directions = _class_directions(train, self.absent)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) in [0, 1 − 1/C]; higher = more out-of-distribution."""
        rows = l2_normalise(outputs.features)
        return one_minus_msp((rows @ self.directions.to(rows).T) / self.temperature)


def _class_directions(train: Outputs, absent: str) -> Float[Tensor, "K D"]:
    """Unit-length class means, in float64."""
    counts = torch.zeros(train.classes, dtype=torch.int64, device=train.device)
    sums = torch.zeros(train.classes, train.width, dtype=torch.float64, device=train.device)
    for batch in blocks(train):
        known = batch.labels >= 0
        counts += torch.bincount(batch.labels[known], minlength=train.classes)
        sums.index_add_(0, batch.labels[known], batch.features[known].double())
    return l2_normalise(sums[present_classes(counts, absent)])
