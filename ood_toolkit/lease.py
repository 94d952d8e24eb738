"""Who uses a store: a shared lock on one of its files, and the time of the last use."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nobody is known to use a store
    fcntl = None

_PATIENCE = 10.0
"""Seconds to wait for whoever removes a store while we open it."""
_A_DAY = 24 * 3600


class Lease:
    """Says that this process uses the store in a folder, until the lease is collected or the process ends.

    Args:
        folder: of the store; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "lease"
        self._handle: int | None = None
        deadline = time.monotonic() + _PATIENCE
        while not self._take(folder):
            if time.monotonic() > deadline:
                raise OSError(f"store {folder} is being removed by another process")
            time.sleep(0.01)

    def _take(self, folder: Path) -> bool:
        """False: whoever removes the store has it, or had it a moment ago."""
        folder.mkdir(parents=True, exist_ok=True)
        file = self._file
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # a cache that is only read, and that we cannot remove from either
        self._handle = handle
        if _locks(handle, alone=False) is False or not _same(handle, file):
            self.release()
            return False
        self.touch()
        return True

    def touch(self, when: float | None = None) -> None:
        """Sets the time of the last use: now, or another, in seconds since 1970."""
        with suppress(OSError):
            os.utime(self._file, None if when is None else (when, when))

    def release(self) -> None:
        """Gives the store free before the lease is collected."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.release()


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Whether nobody uses the store in this folder; if so, nobody opens it until the block ends.

    On a file system without locks a store counts as used for a day after it was last opened.
    """
    file = folder / "lease"
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        had = _locks(handle, alone=True)
        yield time.time() - file.stat().st_mtime > _A_DAY if had is None else had and _same(handle, file)
    finally:
        os.close(handle)


@contextmanager
def locked(file: Path, number: int) -> Iterator[None]:
    """Keeps other processes out of the same number's block, where the file system has locks."""
    handle = None
    with suppress(OSError):  # without locks the journal, which is looked for first, is guard enough
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        if fcntl is not None:
            fcntl.lockf(handle, fcntl.LOCK_EX, 1, number)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _locks(handle: int, *, alone: bool) -> bool | None:
    """Whether the file's lock could be had, shared or alone; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _same(handle: int, file: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False
