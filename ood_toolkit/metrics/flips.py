"""How steady predictions are along a sequence of slightly different images (ImageNet-P).

Hendrycks, Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019,
section 4.2. Frames are compared with the one before; those of noise sequences, whose frames are independent of each
other, with the first one. Lower is steadier, whether or not the predictions are right.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ood_toolkit.metrics.arrays import UndefinedMetricError, to_numpy


def flip_probability(predictions: ArrayLike, *, with_first: bool = False) -> float:
    """The share of comparisons in which the predicted class is another, of one sequence; 0 to 1.

    The paper's FP of a perturbation is the mean of this over its sequences.

    Args:
        predictions: (F,) class indices of the frames, in order.
        with_first: compare with the first frame, as for noise, instead of the one before.

    >>> flip_probability([3, 3, 5, 3]), flip_probability([3, 3, 5, 3], with_first=True)
    (0.6666666666666666, 0.3333333333333333)
    """
    reference, others = _compared(to_numpy(predictions), 1, with_first=with_first)
    return float((others != reference).mean())


def top5_distance(rankings: ArrayLike, *, with_first: bool = False) -> float:
    """How far the five most likely classes move, averaged over the comparisons of one sequence; 0 to 15.

    Of one comparison it is `Σ_{i=1}^5 |i − min(σ(i), 6)|`, with σ(i) the place in the later frame of the class that the
    earlier one has in place i: the double sum of the paper, which counts places beyond the fifth alike.

    Args:
        rankings: (F, 5) class indices, the most likely first.
        with_first: see `flip_probability`.

    >>> top5_distance([[1, 2, 3, 4, 5], [2, 1, 3, 4, 9]])
    3.0
    """
    earlier, later = _compared(to_numpy(rankings), 2, with_first=with_first)
    same = earlier[:, :, None] == later[:, None, :]
    place = np.where(same.any(axis=2), same.argmax(axis=2), same.shape[2])
    return float(np.abs(np.arange(same.shape[1]) - place).sum(axis=1).mean())


def _compared(frames: NDArray[np.generic], axes: int, *, with_first: bool) -> tuple[NDArray, NDArray]:
    """Two arrays with one row per comparison: the earlier frames, or the first one, and the later ones."""
    if frames.ndim != axes:
        raise ValueError(f"expected {axes} axes with the frames along the first, got the shape {frames.shape}")
    if len(frames) < 2:
        raise UndefinedMetricError(f"a sequence needs two frames to compare, got {len(frames)}")
    return (frames[:1] if with_first else frames[:-1]), frames[1:]
