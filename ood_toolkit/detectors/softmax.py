"""What several logit detectors ask of the softmax: logarithms that do not round to 0, and means over classes."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks


def relative_terms(
    logits: Float[Tensor, "... C"],
) -> tuple[Float[Tensor, "... C"], Float[Tensor, "... C"], Float[Tensor, "... 1"]]:
    """Logits less the largest; their exponentials, 0 where they are 1 and so the largest; how many tie with that.

    The sum of such exponentials, and the ties, is the odds of all other classes against the largest: it keeps full
    relative precision near 0, where the sum of all of them less 1 would round.
    """
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    terms = shifted.exp()
    below = terms.frac()  # what is 1 becomes 0; a scatter would need argmax, which takes as long as all else here
    ties = (terms.sum(dim=-1, keepdim=True) - below.sum(dim=-1, keepdim=True)).round() - 1
    return shifted, below, ties


def odds_of_others(logits: Float[Tensor, "... C"]) -> Float[Tensor, "... 1"]:
    """`(1 − p) / p` of the largest probability p, without rounding near 0."""
    _, below, ties = relative_terms(logits)
    return below.sum(dim=-1, keepdim=True) + ties


def log_probabilities(logits: Float[Tensor, "... C"]) -> Float[Tensor, "... C"]:
    """Log-softmax with full relative precision also where a probability is almost 1.

    There `torch.log_softmax` gives 0 from about 17 logit units on in float32; here it is `-log1p(sum of the others)`,
    so `expm1` of it is `p − 1` without rounding.
    """
    shifted, below, ties = relative_terms(logits)
    return shifted.sub_((below.sum(dim=-1, keepdim=True) + ties).log1p())


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
    counts = torch.zeros(train.classes, dtype=torch.int64, device=train.device)
    sums = torch.zeros(train.classes, 1, dtype=torch.float64, device=train.device)
    for batch in blocks(train):
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
