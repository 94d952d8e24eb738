"""What a call of `ood-bench` gives, by the fixture `bench`."""

from collections.abc import Callable
from typing import NamedTuple


class Result(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


Bench = Callable[..., Result]
