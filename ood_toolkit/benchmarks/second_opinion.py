"""A second opinion: the MCM score of a zero-shot model on the images of another model.

For anomaly detection it says how little an image looks like any of the classes to the zero-shot model. For
misclassification it says how much the zero-shot model doubts the image; it does not look at the prediction of the model
whose errors are sought.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.detectors import MCMDetector
from ood_toolkit.outputs import Outputs


def second_opinion(second: Mapping[str, Outputs]) -> dict[str, Float[Tensor, " N"]]:
    """MCM of a zero-shot model's outputs, all under one class mask, by part; higher = more out-of-distribution."""
    detector = MCMDetector()
    with torch.no_grad():
        detector.fit(next(iter(second.values())).rows(slice(0, 0)))
        return {name: detector(outputs).cpu() for name, outputs in second.items()}


def beside(scores: Float[Tensor, " M"], rows: Int[Tensor, " M"], others: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The scores in the order of another model's images; NaN for those that only the other model could read.

    Args:
        scores: one per image that the zero-shot model could read.
        rows: which images of the set these are.
        others: which images the other model could read.
    """
    last = int(torch.cat([rows, others, torch.tensor([-1])]).max())
    found = scores.new_full((last + 1,), torch.nan)
    found[rows] = scores
    return found[others]
