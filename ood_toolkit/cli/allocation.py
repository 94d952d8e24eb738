"""How this process gets its memory."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets glibc keep freed memory for the next tensor, instead of giving it back; says whether it could.

    By default every feature map above 32 MB is mapped, zeroed page by page, and unmapped again, batch after batch:
    a fifth of the CPU time of a plain pass at times, and a third of one with gradients. The peak stays what it was.
    It holds for the whole process, so only the command does it.
    """
    if not sys.platform.startswith("linux"):
        return False
    allocate = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(allocate and allocate(_MMAP_THRESHOLD, _NEVER) and allocate(_TRIM_THRESHOLD, _NEVER))
