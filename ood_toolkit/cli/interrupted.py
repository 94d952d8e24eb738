"""Ctrl-C: one line that says what is kept."""

from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended: 128 and the signal's number."""


class Interrupted(Exception):
    """The user stopped the command; the text says what is kept."""


@contextmanager
def interruptible(kept: str) -> Iterator[None]:
    """Turns Ctrl-C inside the block into `Interrupted`.

    Args:
        kept: what is kept, and what the same command will do about it.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {kept}") from None
