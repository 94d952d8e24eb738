"""Batches of decoded images on the device: each image is decoded once, whatever number of transforms wants it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ood_toolkit.datasets import ImageSet

if TYPE_CHECKING:
    from PIL.Image import Image

Transform = Callable[["Image"], Tensor]
"""PIL image → (3, H, W) tensor, uint8 or float in [0, 1]."""

_Key = tuple[int, int, tuple[int, ...]]
"""Number of the set, row in it, numbers of the transforms."""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring rows of one set that go through the same transforms; no batch crosses its ends.

    Args:
        images: number of the set.
        rows: rows in it.
        transforms: numbers of the transforms.
    """

    images: int
    rows: range
    transforms: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Some rows of one set.

    Args:
        rows: of the images that could be read.
        pixels: (rows, 3, H, W) by number of the transform.
        unreadable: reason by row, for the others.
    """

    rows: list[int]
    pixels: dict[int, Tensor]
    unreadable: dict[int, str]

    def __len__(self) -> int:
        return len(self.rows) + len(self.unreadable)

    def pin_memory(self) -> "Batch":
        """The same in memory that a GPU can fetch by itself; the loader calls this."""
        return replace(self, pixels={number: pixels.pin_memory() for number, pixels in self.pixels.items()})

    def to(self, device: torch.device) -> "Batch":
        """The same on a device, without waiting for the copy."""
        return replace(self, pixels={n: pixels.to(device, non_blocking=True) for n, pixels in self.pixels.items()})


@dataclass(frozen=True)
class Loading:
    """How batches are made.

    Args:
        batch_size: images per batch.
        workers: processes that decode images; 0 decodes in this one.
    """

    batch_size: int = 64
    workers: int = 0

    def batches(
        self,
        sets: Sequence[ImageSet],
        transforms: Sequence[Transform],
        stretches: Sequence[Stretch],
        device: torch.device,
    ) -> Iterator[Batch]:
        """The batches of all stretches in order. One set of workers serves them all: its start is paid once."""
        loader = torch.utils.data.DataLoader(
            _Decoded(sets, transforms),
            batch_sampler=self._plan(stretches),  # pyright: ignore
            num_workers=self.workers,
            collate_fn=_collate,
            pin_memory=device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
        )
        for batch in loader:
            yield batch.to(device)

    def _plan(self, stretches: Sequence[Stretch]) -> list[list[_Key]]:
        return [
            [(stretch.images, row, stretch.transforms) for row in stretch.rows[start : start + self.batch_size]]
            for stretch in stretches
            for start in range(0, len(stretch.rows), self.batch_size)
        ]


class _Decoded(torch.utils.data.Dataset):
    """Decodes and transforms; a broken image becomes its reason instead of an exception."""

    def __init__(self, sets: Sequence[ImageSet], transforms: Sequence[Transform]) -> None:
        self.sets = sets
        self.transforms = transforms

    def __getitem__(self, key: _Key) -> tuple[int, dict[int, Tensor] | str]:
        images, row, transforms = key
        try:
            image = self.sets[images].open(row)
        except Exception as error:  # Pillow's plugins raise whatever a broken file makes them stumble over
            return row, str(error) or type(error).__name__
        # a transform may write into its image, so others get copies
        *copied, last = transforms
        pixels = {number: self.transforms[number](image.copy()) for number in copied}
        return row, pixels | {last: self.transforms[last](image)}


def _collate(items: list[tuple[int, dict[int, Tensor] | str]]) -> Batch:
    good = [(row, pixels) for row, pixels in items if not isinstance(pixels, str)]
    bad = {row: reason for row, reason in items if isinstance(reason, str)}
    numbers = good[0][1] if good else {}
    pixels = {number: torch.stack([images[number] for _, images in good]) for number in numbers}
    return Batch([row for row, _ in good], pixels, bad)
