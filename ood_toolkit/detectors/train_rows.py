"""What several feature detectors ask of the training rows: means, and a seeded subset."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.detectors.softmax import class_means
from ood_toolkit.outputs import Outputs
from ood_toolkit.stats import blocks


def feature_mean(train: Outputs) -> Float[Tensor, " D"]:
    """The mean feature of all rows, labelled or not, sums of blocks added in float64, in the head's dtype."""
    if not len(train):
        raise ValueError("fitting needs training rows, but there are none")
    total = sum(block.features.sum(dim=0).double() for block in blocks(train))
    return (total / len(train)).to(train.head.weight.dtype)  # pyright: ignore


def class_patterns(
    train: Outputs, groups: Callable[[Outputs], Int[Tensor, " N"]], *, absent: str, what: str
) -> Float[Tensor, "C D"]:
    """The mean feature of each group of rows, with something sensible for a class without a row.

    Args:
        train: the rows to sweep over, once.
        groups: the class of each row of a batch; rows with a negative one are left out.
        absent: "mean" gives a class without a row the mean of all counted rows; "error" refuses it.
        what: what a row must be to count, for the error message.
    """
    if absent not in ("error", "mean"):
        raise ValueError(f"absent must be 'error' or 'mean', got {absent!r}")
    means, counts = class_means(train, lambda batch: batch.features, groups)
    empty = counts == 0
    missing = empty.nonzero().flatten().tolist()
    if len(missing) == len(counts):
        raise ValueError(f"fitting needs {what}, but there is none")
    if missing and absent == "error":
        shown = str(missing) if len(missing) <= 10 else f"{str(missing[:10])[:-1]}, …] ({len(missing)} in all)"
        raise ValueError(
            f"every class needs {what}, but classes {shown} have none; "
            "give more fit data, or set absent='mean' to let the mean of all classes stand for them"
        )
    means = means.nan_to_num(0.0)
    overall = (counts.double() @ means) / counts.sum()
    return torch.where(empty.unsqueeze(1), overall, means).to(train.head.weight.dtype)


def subset(train: Outputs, number: int, seed: int, *, step: int | None = None) -> Iterator[Outputs]:
    """`number` rows drawn without replacement, in their order in `train`, batch by batch. All rows if there are fewer.

    The draw is made on the CPU, so it is the same on every device.
    """
    if number >= len(train):
        yield from blocks(train, step)
        return
    drawn = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:number].sort().values
    step = step or max(64, (1 << 22) // (train.classes + train.width))
    for start in range(0, number, step):
        yield train.rows(drawn[start : start + step])
