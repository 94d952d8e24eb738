"""Tensors for training rows that a detector keeps: in memory, or in a file where they are many."""

import os
import tempfile
from contextlib import suppress

import torch
from torch import Tensor

_IN_MEMORY = 1 << 28
"""Bytes up to which rows are kept in memory."""


def room_for(rows: int, width: int, *, like: Tensor) -> Tensor:
    """An empty (rows, width) tensor of the dtype and device of another.

    Beyond 256 MiB on a CPU its numbers lie in a nameless file of the temporary folder ($TMPDIR), which the system may
    write out when memory is short, and which is gone with the tensor. Where that folder has no space it lies in memory.
    """
    size = rows * width
    if like.device.type != "cpu" or size * like.element_size() <= _IN_MEMORY or not hasattr(os, "posix_fallocate"):
        return like.new_empty(rows, width)
    with suppress(OSError), tempfile.NamedTemporaryFile(prefix="ood-rows-") as file:
        # space is taken now: a mapped file that cannot grow ends the process
        os.posix_fallocate(file.fileno(), 0, size * like.element_size())
        return torch.from_file(file.name, shared=True, size=size, dtype=like.dtype).view(rows, width)
    return like.new_empty(rows, width)
