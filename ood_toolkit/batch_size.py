"""How many images go through a model at once: fixed, or found while the pass runs."""

import torch

CPU_SIZE = 16
"""Images of 224×224 per pass where the number is free, on a CPU: with more, maps fall out of its caches."""

_CPU_PIXELS = CPU_SIZE * 224 * 224
_LARGEST_ON_CPU = 256

_FIRST_GPU_SIZE = 64
_LARGEST = 512
_WORTH = 1.05
"""A doubled batch has to raise the rate by this factor for the next doubling to be tried."""
_TIMED = 3
"""Batches of one size before its rate is believed; the first, where kernels are chosen, does not count."""


class BatchSize:
    """A number of images that is halved when memory runs out, and doubled while that raises the rate.

    Args:
        size: images per forward pass; 0 finds it: on a CPU 16 of 224×224, more of smaller ones; on a GPU 64, doubled
            up to 512 (one shard of a store) as long as that makes the pass 5% faster.
        device: where the model runs.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        if size < 0:
            raise ValueError(f"the batch size must be at least 1, or 0 to have it found; got {size}")
        on_cpu = device.type == "cpu"
        self.size = size or (CPU_SIZE if on_cpu else _FIRST_GPU_SIZE)
        self._growing = not size and not on_cpu
        self._by_pixels = not size and on_cpu
        self._seconds: list[float] = []
        self._smaller_rate = 0.0

    def saw(self, height: int, width: int) -> None:
        """Learns how large images are."""
        if self._by_pixels:
            self.size = max(CPU_SIZE, min(_LARGEST_ON_CPU, _CPU_PIXELS // max(1, height * width)))
            self._by_pixels = False

    def took(self, images: int, seconds: float) -> None:
        """Learns what a batch took on the device; doubles the size, or settles for the one before."""
        if not self._growing or images != self.size:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < _TIMED:
            return
        rate = self.size / max(min(self._seconds[1:]), 1e-9)
        self._seconds = []
        if rate < _WORTH * self._smaller_rate:
            self.size //= 2
            self._growing = False
        elif 2 * self.size > _LARGEST:
            self._growing = False
        else:
            self.size *= 2
            self._smaller_rate = rate

    def too_big(self, images: int) -> None:
        """Learns that memory ran out at so many images: from here on at most half of them.

        Raises:
            ValueError: it was a single one.
        """
        if images <= 1:
            raise ValueError(
                "memory ran out on a single image; close what else uses the device, take fewer detectors that run the "
                "model again, a half-precision --amp, or another --device"
            )
        self.size = min(self.size, images // 2)
        self._growing = self._by_pixels = False


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that the device or the machine has no memory left."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in _SIGNS)


_SIGNS = (
    "DefaultCPUAllocator",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
