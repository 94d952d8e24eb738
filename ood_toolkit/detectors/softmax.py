"""What several logit detectors ask of the softmax: logarithms that do not round to 0, and means over classes."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.outputs import Outputs


def log_probabilities(logits: Float[Tensor, "... C"]) -> Float[Tensor, "... C"]:
    """Log-softmax with full relative precision also where a probability is almost 1.

    There `torch.log_softmax` gives 0 from about 17 logit units on in float32; here it is `-log1p(sum of the others)`,
    so `expm1` of it is `p − 1` without rounding.
    """
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    others = shifted.exp().scatter(-1, shifted.argmax(dim=-1, keepdim=True), 0.0).sum(dim=-1, keepdim=True)
    return shifted - others.log1p()


def small_batches(train: Outputs) -> Iterator[Outputs]:
    """Batches of about 4 MB of float64 logits: what sweeps the rows many times is faster inside the cache."""
    return train.batches(rows=max(64, (1 << 19) // train.classes))


def class_means(
    train: Outputs, rows: Callable[[Outputs], Tensor], groups: Callable[[Outputs], Tensor]
) -> tuple[Float[Tensor, "C K"], Int[Tensor, " C"]]:
    """The mean of `rows(batch)` over each class, in float64 (NaN for a class without a row), and the rows of each.

    Args:
        train: the rows; read batch by batch.
        rows: what to average, (N, K) of a batch.
        groups: the class of each row of a batch; rows with a negative one are left out.
    """
    counts = torch.zeros(train.classes, dtype=torch.int64, device=train.logits.device)
    sums = torch.zeros(train.classes, 1, dtype=torch.float64, device=train.logits.device)
    for batch in train.batches():
        group = groups(batch)
        known = group >= 0
        values = rows(batch)[known].double()
        if sums.shape[1] != values.shape[1]:
            sums = values.new_zeros(train.classes, values.shape[1])
        sums.index_add_(0, group[known], values)
        counts += torch.bincount(group[known], minlength=train.classes)
    return sums / counts.unsqueeze(1), counts


def right_labels(batch: Outputs) -> Int[Tensor, " N"]:
    """The label where the prediction equals it, −1 elsewhere."""
    return torch.where(batch.correct, batch.labels, -1)
