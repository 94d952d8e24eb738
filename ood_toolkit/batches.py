"""Batches of decoded images on the device: each image is decoded once, whatever number of transforms wants it."""

import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ood_toolkit.batch_size import BatchSize
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
        batch_size: images per forward pass; 0 finds it, see `BatchSize`.
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
        size: BatchSize,
    ) -> Iterator[Batch]:
        """The batches of all stretches in order. One set of workers serves them all: its start is paid once.

        Args:
            sets: the images.
            transforms: what becomes of them.
            stretches: what to load.
            device: where the batches go.
            size: asked anew for every batch that is begun.

        Raises:
            ValueError: later, from the iterator: a decoding process died. See also `deaths_seen_by_loader`.
        """
        loader = torch.utils.data.DataLoader(
            _Decoded(sets, transforms),
            batch_sampler=_Plan(stretches, size),  # pyright: ignore
            num_workers=self.workers,
            collate_fn=_collate,
            pin_memory=device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
        )
        batches = _received(iter(loader), self.workers)
        return _one_ahead(batches, device) if device.type == "cuda" else (batch.to(device) for batch in batches)


@contextmanager
def deaths_seen_by_loader() -> Iterator[None]:
    """While this lasts, a decoding process that dies is an error where the loader waits for it, and only there.

    Torch's own handler raises wherever this process stands at that moment: in the midst of a forward pass, or of
    writing a shard. The loader looks by itself every five seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)


def _received(loader: Iterator[Batch], workers: int) -> Iterator[Batch]:
    """What the loader gives; ValueError with what to do when a decoding process has died."""
    while True:
        try:
            batch = next(loader)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            own = "Caught" in str(error) and "in DataLoader worker" in str(error)
            lost = not isinstance(error, RuntimeError) or "DataLoader worker" in str(error)
            if not workers or own or not lost:
                raise
            reason = str(error).splitlines()[0].strip() if str(error) else type(error).__name__
            # let go of the loader here, so that it ends its other processes before torch's handler is back
            traceback.clear_frames(error.__traceback__)
            del loader, error
            raise ValueError(
                f"a process that decodes images died ({reason}); mostly memory or /dev/shm ran out: take fewer than "
                f"{workers} --workers, or 0 to decode in this process. What was computed is kept: run it again"
            ) from None
        yield batch


class _Plan:
    """Rows of one batch after another, each as large as `size` says at that moment."""

    def __init__(self, stretches: Sequence[Stretch], size: BatchSize) -> None:
        self.stretches = stretches
        self.size = size

    def __iter__(self) -> Iterator[list[_Key]]:
        for stretch in self.stretches:
            rows = stretch.rows
            while rows:
                now, rows = rows[: self.size.size], rows[self.size.size :]
                yield [(stretch.images, row, stretch.transforms) for row in now]


def _one_ahead(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches on a GPU: the next one is copied on a stream of its own while the model works on this one."""
    copying = torch.cuda.Stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(copying):
            moved, copied = batch.to(device), torch.cuda.Event()
            copied.record(copying)
        if ahead:
            yield _arrived(*ahead, device)
        ahead = moved, copied
    if ahead:
        yield _arrived(*ahead, device)


def _arrived(batch: Batch, copied: "torch.cuda.Event", device: torch.device) -> Batch:
    computing = torch.cuda.current_stream(device)
    computing.wait_event(copied)
    for pixels in batch.pixels.values():
        # the allocator must not hand this memory to the next copy before the model has read it
        pixels.record_stream(computing)
    return batch


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
