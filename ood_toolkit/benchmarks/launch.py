"""A run as the command starts it: alone, or as one of the ranks that `torchrun` has started."""

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.command import follow, run
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.distributed import FailedElsewhere, PeerLost, World, joined
from ood_toolkit.extract import Progress


def launch(
    choices: Choices, *, say: Callable[[str], None], bars: Callable[[], AbstractContextManager[Progress]]
) -> RunFolder | None:
    """Runs what was chosen; the folder with the results, or None on a rank that only follows.

    Args:
        choices: what to run, the same on all ranks.
        say: told what happens, line by line, on rank 0.
        bars: progress bars, shown by rank 0.

    Raises:
        ValueError: on rank 0, whatever is wrong with the choices or the data, on any rank.
        PeerLost: another rank died; what was computed is kept.
    """
    rank = 0
    try:
        with joined(cuda=choices.device in ("auto", "cuda")) as world:
            rank = world.rank
            if world.main:
                with bars() as progress:
                    return run(choices, say=say, progress=progress, world=world)
            _follow_quietly(choices, world)
            return None
    except PeerLost:
        if rank > 1:  # rank 0 says it, or rank 1 where rank 0 is the one that died
            raise SystemExit(1) from None
        raise


def _follow_quietly(choices: Choices, world: World) -> None:
    """Follows rank 0, which also speaks of errors for all."""
    warnings.simplefilter("ignore")  # rank 0 shows its own, which are the same
    try:
        follow(choices, world)
    except FailedElsewhere:
        if os.environ.get("OOD_DEBUG"):
            raise
    except KeyboardInterrupt:
        raise SystemExit(1) from None
