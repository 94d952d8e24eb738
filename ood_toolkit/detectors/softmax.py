"""What several logit detectors ask of the softmax: logarithms that do not round to 0, and means over classes."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks


class RelativeTerms(NamedTuple):
    """The parts of a softmax relative to its largest term."""

    shifted: Float[Tensor, "... C"]
    """Logits less the largest."""
    below: Float[Tensor, "... C"]
    """Their exponentials, 0 where they are 1 and so the largest."""
    ties: Float[Tensor, "... 1"]
    """How many more are the largest."""
    others: Float[Tensor, "... 1"]
    """The sum of `below` and the ties: the odds `(1 − p) / p` of all other classes against the largest, with full
    relative precision near 0, where the sum of all terms less 1 would round."""


def relative_terms(logits: Float[Tensor, "... C"]) -> RelativeTerms:
    """What softmax scores are made of, in few passes over the numbers."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return RelativeTerms(shifted, *_below(shifted.exp()))


def _below(terms: Float[Tensor, "... C"]) -> tuple[Tensor, Tensor, Tensor]:
    """All of `RelativeTerms` that its exponentials say. Takes their place."""
    total = terms.sum(dim=-1, keepdim=True)
    # what is 1 becomes 0; a scatter would need argmax, which takes as long as all else here
    below = terms.frac() if terms.requires_grad else terms.frac_()
    rest = below.sum(dim=-1, keepdim=True)
    ties = (total - rest).round() - 1
    return below, ties, rest + ties


def odds_of_others(logits: Float[Tensor, "... C"]) -> Float[Tensor, "... 1"]:
    """`(1 − p) / p` of the largest probability p, without rounding near 0."""
    return _below((logits - logits.amax(dim=-1, keepdim=True)).exp_())[2]


def bold_odds_of_others(
    logits: Float[Tensor, "... C"], temperature: float | Float[Tensor, ""]
) -> Float[Tensor, "... 1"]:
    """`odds_of_others(logits / temperature)`, as fast where most terms underflow: there `exp` takes 50 times as long.

    Terms below the smallest normal number, 1e-38 in float32, count as that.
    """
    shifted = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature)
    smallest = math.log(torch.finfo(shifted.dtype).tiny) + 0.3  # the exponential of less than that is slow
    return _below(shifted.clamp_min_(smallest).exp_())[2]


def log_probabilities(logits: Float[Tensor, "... C"]) -> Float[Tensor, "... C"]:
    """Log-softmax with full relative precision also where a probability is almost 1.

    There `torch.log_softmax` gives 0 from about 17 logit units on in float32; here it is `-log1p(sum of the others)`,
    so `expm1` of it is `p − 1` without rounding.
    """
    terms = relative_terms(logits)
    return terms.shifted.sub_(terms.others.log1p())


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
