"""NCI: neural collapse pulls training features towards the weight of their class."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.train_rows import feature_mean
from ood_toolkit.outputs import Outputs


class NCIDetector(Detector):
    """Flags inputs whose centred features do not point along the predicted class's weight, or are small.

    As cheap as it gets: one dot product per row. The score is minus `w_y · (f − μ) / ‖f − μ‖₂ + α ‖f‖₁`, with the
    weight w_y of the predicted class and the mean training feature μ.

    Args:
        alpha: weight of the feature's L1 norm, ≥ 0; the paper picks it on validation data, 0.0001 is the default of
            the authors' OpenOOD code. 0 drops that term.

    The weight's own norm stays in, as in the authors' code: it is not a cosine. Differs in direction only.
    """

    name = "nci"
    paper = (
        "Liu and Qin, Detecting Out-of-Distribution through the Lens of Neural Collapse, CVPR 2025, arXiv:2311.01479"
    )
    cite = "liu2025nci"
    equation = "−(w_y · (f − μ) / ‖f − μ‖₂ + α ‖f‖₁)"
    needs = "train"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D)"
    weight: Float[Tensor, "C D"]
    mean: Float[Tensor, " D"]

    sweep = {"alpha": (0.0001, 0.001, 0.01, 0.1)}

    allowed = {"alpha": "[0, inf)"}

    def __init__(self, alpha: float = 0.0001) -> None:
        super().__init__()
        self.alpha = alpha

    def fit(self, train: Outputs) -> Self:
        """Copies the head's weight and learns the mean feature. Returns itself."""
        self.weight = train.head.weight.clone()
        self.mean = feature_mean(train)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) negative proximities to the class weight; higher = more out-of-distribution."""
        centred = outputs.features - self.mean
        length = centred.norm(dim=1).clamp_min(torch.finfo(centred.dtype).tiny)
        proximity = (self.weight[outputs.predictions] * centred).sum(dim=1) / length
        return -proximity - self.alpha * outputs.features.abs().sum(dim=1)
