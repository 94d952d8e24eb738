"""Bootstrap resamples by rank: how many draws fell on the r highest scores of a sample, for every r.

Which row is the r-th highest makes no difference to a draw, so the same cumulated counts serve every detector, and the
counts of one sample serve every task that it is part of.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ood_toolkit.metrics.arrays import Floats, Ints

Strata = Literal["fixed", "random"]

CHUNK = 32  # resamples at a time
_WIDE = 10**7
"""Rows from which a cumulated count may be further than 2¹⁵ from its expectation."""


class Cumulated:
    """Cumulated draw counts of R resamples, two bytes each.

    A count is kept modulo 2¹⁶: the r first ranks get r draws on average with a standard deviation of at most √N / 2, so
    that what is near r is known from its last 16 bits.

    Args:
        counts: R times (N,): how often each rank is drawn.
    """

    def __init__(self, counts: Sequence[Ints] | NDArray[np.integer]) -> None:
        resamples, size = len(counts), len(counts[0])
        self._kind = np.dtype(np.int16 if size < _WIDE else np.int64)
        sums = np.zeros((resamples, size + 1), dtype=self._kind)
        for row, into in zip(counts, sums, strict=True):  # row by row: three times as fast as along an axis
            np.cumsum(row, out=into[1:], dtype=self._kind)
        # in memory the R resamples lie side by side, so looking up a rank copies one run of numbers for all of them
        self._sums = np.ascontiguousarray(sums.T)

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self._sums.nbytes

    def at(self, ranks: Ints) -> Floats:
        """Draws on the r highest scores, for every r of `ranks`: shape (R, K), resamples side by side in memory."""
        off = self._sums.take(ranks, axis=0)
        off -= ranks.astype(self._kind)[:, None]  # wraps around, and so is exact
        draws = off.astype(np.float64)
        draws += ranks.astype(np.float64)[:, None]
        return draws.T


class Drawn(NamedTuple):
    """Resamples of two samples."""

    negatives: Cumulated
    positives: Cumulated


class Draws:
    """Resamples of pairs of samples by their sizes; keeps them, so that the methods of a run share theirs.

    Args:
        most_bytes: memory for what is kept; the longest unused goes first. 0 keeps nothing.
    """

    def __init__(self, most_bytes: int = 1 << 28) -> None:
        self.most_bytes = most_bytes
        self._kept: OrderedDict[tuple[int, ...], list[Cumulated]] = OrderedDict()

    def chunks(
        self, sizes: tuple[int, int], strata: Strata, resamples: int, seed: int
    ) -> Iterator[tuple[slice, Drawn]]:
        """Chunks of resamples, and which of them each holds.

        Args:
            sizes: rows of the negative and of the positive sample.
            strata: "fixed" draws as many rows of each; "random" draws as many rows of both together.
            resamples: how many.
            seed: of all draws. Each chunk, sample and size has a stream of its own, whatever is drawn before it.
        """
        if strata not in ("fixed", "random"):
            raise ValueError(f"strata must be 'fixed' or 'random', but is {strata!r}")
        sides = [self._side(sizes, side, strata, resamples, seed) for side in (0, 1)]
        for start, negatives, positives in zip(range(0, resamples, CHUNK), *sides, strict=True):
            yield slice(start, min(start + CHUNK, resamples)), Drawn(negatives, positives)

    def _side(
        self, sizes: tuple[int, int], side: int, strata: Strata, resamples: int, seed: int
    ) -> Iterator[Cumulated]:
        of = (sizes[side], side, *(sizes if strata == "random" else ()), resamples, seed)
        if of in self._kept:
            self._kept.move_to_end(of)
            return iter(self._kept[of])
        new = _draw(sizes, side, strata, resamples, seed)
        needed = 2 * resamples * (sizes[side] + 1)
        if needed > self.most_bytes:
            return new
        while (
            self._kept and needed + sum(part.nbytes for kept in self._kept.values() for part in kept) > self.most_bytes
        ):
            self._kept.popitem(last=False)
        self._kept[of] = list(new)
        return iter(self._kept[of])


def _draw(sizes: tuple[int, int], side: int, strata: Strata, resamples: int, seed: int) -> Iterator[Cumulated]:
    size, total = sizes[side], sum(sizes)
    for start in range(0, resamples, CHUNK):
        count = min(CHUNK, resamples - start)
        draws = np.full(count, size)
        if strata == "random":
            positives = np.random.default_rng((seed, start)).binomial(total, sizes[1] / total, count)
            draws = positives if side else total - positives
        rng = np.random.default_rng((seed, start, side, size))
        yield Cumulated([draw_counts(rng, size, int(number)) for number in draws])


def draw_counts(rng: np.random.Generator, size: int, draws: int) -> Ints:
    """How often each of `size` rows is drawn in `draws` draws with replacement, shape (size,)."""
    return np.bincount(rng.integers(0, size, draws), minlength=size) if size else np.zeros(0, dtype=np.int64)
