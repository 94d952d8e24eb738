"""What tells one set of images from another, and from itself once it has changed."""

import os
from abc import ABC, abstractmethod
from functools import cached_property


class Fingerprinted(ABC):
    """A set whose fingerprint is computed when it is first asked for, and kept; `_hash` says what counts."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the images or their order may have changed. Labels do not count."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return self._hash()

    @abstractmethod
    def _hash(self) -> str: ...


def stamp(name: str, status: os.stat_result) -> bytes:
    """A file's line in a fingerprint: its name, size and time of modification."""
    return f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape")
