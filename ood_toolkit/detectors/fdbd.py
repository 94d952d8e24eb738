"""fDBD: the distance from the features to the decision boundaries, in closed form."""

from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.detectors.base import Detector
from ood_toolkit.detectors.train_rows import feature_mean
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import row_chunks

NORMALISERS = ("centre", "origin", "none")
REDUCTIONS = ("mean", "sum")


def boundary_widths(weight: Float[Tensor, "C D"], classes: Int[Tensor, " K"]) -> Float[Tensor, "K C"]:
    """`‖w_k − w_c‖₂` for some classes k and all classes c, by one Gram matrix in float64; 1 where it is 0."""
    rows = weight.double()
    norms = rows.square().sum(dim=1)
    squares = (norms[classes].unsqueeze(1) + norms).addmm(rows[classes], rows.T, alpha=-2.0)
    # below the rounding of the Gram matrix two weights are the same: there is no boundary between their classes
    floor = 1e-12 * (norms[classes].unsqueeze(1) + norms)
    return torch.where(squares > floor, squares, 1.0).sqrt().to(weight.dtype)


class FDBDDetector(Detector):
    """Flags inputs whose features lie close to the decision boundaries, relative to how far out they are.

    A strong default that needs one mean of the training data and no search. The score is minus the mean over the
    other classes c of `(z_y − z_c) / ‖w_y − w_c‖₂`, y being the predicted class: the distance to the boundary between
    them; all divided by `‖f − μ‖₂`, μ being the mean training feature.

    Args:
        reduction: "mean" over the C − 1 other classes, as in the paper, or "sum", as in the authors' code.
        normaliser: "centre" divides by `‖f − μ‖`, the paper's; "origin" by `‖f‖` (OpenOOD with
            `distance_as_normalizer` off); "none" not at all (pytorch-ood with it off).

    Differs from the authors' code in the factor 1 / (C − 1) only, which leaves the ranking as it is.
    """

    name = "fdbd"
    paper = "Liu and Qin, Fast Decision Boundary based Out-of-Distribution Detector, ICML 2024, arXiv:2312.11536, Eq. 8"
    cite = "liu2024fdbd"
    equation = "−(1/(C − 1)) Σ_{c ≠ y} (z_y − z_c) / ‖w_y − w_c‖₂ / ‖f − μ‖₂"
    needs = "train"
    reads = frozenset({"logits", "features"})
    cost = "O(C + D)"
    block_rows = 4096  # each block measures the boundaries of the classes it predicts
    weight: Float[Tensor, "C D"]
    mean: Float[Tensor, " D"]

    def __init__(self, reduction: str = "mean", normaliser: str = "centre") -> None:
        super().__init__()
        if reduction not in REDUCTIONS or normaliser not in NORMALISERS:
            raise ValueError(
                f"reduction must be one of {', '.join(REDUCTIONS)} and normaliser one of {', '.join(NORMALISERS)}, "
                f"got {reduction!r} and {normaliser!r}"
            )
        self.reduction = reduction
        self.normaliser = normaliser

    def fit(self, train: Outputs) -> Self:
        """Copies the head's weight and learns the mean feature. Returns itself."""
        self.weight = train.head.weight.clone()
        self.mean = feature_mean(train)
        return self

    def score(self, outputs: Outputs) -> Float[Tensor, " N"]:
        """(N,) negative boundary distances; higher = more out-of-distribution."""
        steps = row_chunks(len(outputs), 4 * outputs.classes)
        distance = outputs.logits.new_empty(len(outputs))
        for start in steps:
            block = slice(start, start + steps.step)
            distance[block] = self._boundary_distance(outputs.logits[block])
        if self.reduction == "mean":
            distance = distance / max(1, outputs.classes - 1)
        if self.normaliser == "none":
            return -distance
        from_where = outputs.features - self.mean if self.normaliser == "centre" else outputs.features
        return -distance / from_where.norm(dim=1).clamp_min(torch.finfo(distance.dtype).tiny)

    def _boundary_distance(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
        top, predictions = logits.max(dim=1, keepdim=True)
        classes, which = predictions.flatten().unique(return_inverse=True)
        return ((top - logits) / boundary_widths(self.weight, classes)[which]).sum(dim=1)
