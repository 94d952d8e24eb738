"""Several processes, one run: who this one is, and what they say to each other.

`torchrun` starts the same command N times. Rank 0 leads; the others do their share of what it asks. Every exchange is
made so that an error on any rank becomes the same error on all of them, and no rank is left waiting.
"""

import io
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ood_toolkit.outputs import Outputs

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
"""How long a rank waits for another: rank 0 may work alone for hours. A dead peer is noticed at once, not by this."""

_LOOK_EVERY = 1.0
"""Seconds between two looks at whether another rank has failed."""

_GO_ON = "what was computed is in the store: run the same command again, with any number of ranks, to go on from there"


class PeerLost(RuntimeError):
    """Another rank died, or the launcher ends the run because one did."""


class _Ended(BaseException):
    """SIGTERM came. No `except Exception` on the way may take it for a broken image or the like."""


class FailedElsewhere(RuntimeError):
    """What this rank did is in vain, because another failed; rank 0 raises the error itself."""


@dataclass
class _Link:
    """The connections of a joined process, and its threads: while all ranks work, and while rank 0 works alone."""

    store: Any
    together: int
    alone: int
    nccl: Any = None
    calls: int = 0
    looked: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class World:
    """The ranks of a run. All of them must make the same calls in the same order.

    Args:
        rank: of this process, 0 to size − 1.
        size: number of ranks.
        local_rank: of this process among those of its machine.
        local_size: number of ranks on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    _link: _Link | None = None

    @property
    def main(self) -> bool:
        """Whether this is the rank that scores, records and prints."""
        return self.rank == 0

    @property
    def has_nccl(self) -> bool:
        """Whether sums of CUDA tensors go from GPU to GPU."""
        return self._link is not None and self._link.nccl is not None

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks; doubles as a barrier."""
        if self._link is None:
            return [value]
        values: list[Any] = [None] * self.size
        with _noticing_death():
            dist.all_gather_object(values, value)
        return values

    def told(self, make: Callable[[], T] | None = None) -> T:
        """What `make` gives on rank 0; other ranks need not have a `make`. The value travels pickled.

        Raises:
            Exception: on rank 0, what `make` raised.
            FailedElsewhere: on the other ranks then.
        """
        if self._link is None:
            assert make is not None
            return make()
        message: list[Any] = [None]
        mine: Exception | None = None
        if self.main:
            assert make is not None
            try:
                message = [(make(), None)]
            except Exception as error:
                mine, message = error, [(None, str(error) or type(error).__name__)]
        with _noticing_death():
            dist.broadcast_object_list(message, src=0)
        value, failure = message[0]
        if failure is not None:
            raise mine or FailedElsewhere(failure)
        return value

    def first(self, do: Callable[[], T]) -> T:
        """`each`, with rank 0 before the others: what it downloads, they find."""
        found: list[T] = []
        with self._sharing_cores():
            self.told(lambda: found.append(do()))
        return self.each(lambda: found[0] if self.main else do())

    def each(self, do: Callable[[], T]) -> T:
        """Runs `do` on every rank and gives this rank's result once all are done.

        Raises:
            Exception: on rank 0, the error of the lowest rank where `do` failed.
            FailedElsewhere: on the other ranks then, since rank 0 speaks for all.
        """
        if self._link is None:
            return do()
        self._link.calls += 1
        value, mine = None, None
        try:
            with self._sharing_cores():
                value = do()
        except PeerLost:
            raise
        except Exception as error:
            mine = error
            with _noticing_death():
                self._link.store.set(f"failed/{self._link.calls}", str(self.rank))
        errors = self.gather(None if mine is None else _portable(mine, self.rank))
        failed = [error for error in errors if error and not isinstance(error, FailedElsewhere)]
        if failed and not self.main:
            raise FailedElsewhere(str(failed[0])) from mine
        if failed:
            raise (mine if mine and errors[0] is failed[0] else failed[0])
        return value  # pyright: ignore[reportReturnType]  # no error, so `do` has returned

    def look(self) -> None:
        """Raises `FailedElsewhere` if another rank has failed in the current `each`: call it now and then in there."""
        if self._link is None or time.monotonic() - self._link.looked < _LOOK_EVERY:
            return
        self._link.looked = time.monotonic()
        with _noticing_death():
            failed = self._link.store.check([f"failed/{self._link.calls}"])
        if failed:
            raise FailedElsewhere("another rank has failed")

    def sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks of each tensor, on the device and in the dtype given; sum in float64 or int64.

        GPU to GPU (NCCL) where every rank has a GPU of its own, else through memory (gloo).
        """
        if self._link is None:
            return list(values)
        # NCCL does not notice a dead peer; after this, all are there
        self.gather(None)
        return [self._sum_one(value) for value in values]

    def _sum_one(self, value: Tensor) -> Tensor:
        assert self._link is not None
        with _noticing_death():
            if value.is_cuda and self._link.nccl is not None:
                total = value.clone()
                dist.all_reduce(total, group=self._link.nccl)
                return total
            total = value.to("cpu", copy=True).contiguous()
            dist.all_reduce(total)
            return total.to(value.device)

    @contextmanager
    def _sharing_cores(self) -> Iterator[None]:
        if self._link is None:
            yield
            return
        torch.set_num_threads(self._link.together)
        try:
            yield
        finally:
            torch.set_num_threads(self._link.alone)

    def share(self, rows: int, step: int = 1) -> slice:
        """This rank's part of so many rows: neighbouring rows, the ranks in order.

        Args:
            rows: of all ranks.
            step: where to cut, at multiples of it: a float32 product of other rows at once rounds differently.
        """
        steps = -(-rows // step)
        start, stop = (min(rows, steps * rank // self.size * step) for rank in (self.rank, self.rank + 1))
        return slice(start, stop)


ALONE = World()
"""One process, which was not launched with others."""


def launched() -> bool:
    """Whether `torchrun` started this process."""
    return all(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"))


@contextmanager
def joined(*, cuda: bool = True) -> Iterator[World]:
    """The world of this process: all ranks of the launch under `torchrun`, else `ALONE`.

    Args:
        cuda: GPUs may be used; each rank then takes the GPU of its local number where there are enough of them.
    """
    if not launched():
        yield ALONE
        return
    rank, size, local_rank, local_size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank, size, timeout=_PATIENCE))
    named = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=named("gloo", store), rank=rank, world_size=size, timeout=_PATIENCE)
    link = _Link(named("ood", store), *_threads(rank, local_size))
    torch.set_num_threads(link.alone)
    world = World(rank, size, local_rank, local_size, link)
    has_gpu = cuda and dist.is_nccl_available() and local_size <= torch.cuda.device_count()
    if all(world.gather(has_gpu)):
        torch.cuda.set_device(local_rank)
        link.nccl = dist.new_group(backend="nccl")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield world
        dist.destroy_process_group()
    except _Ended:
        raise PeerLost(f"the launcher ended this run, most likely because another rank died; {_GO_ON}") from None
    except PeerLost:
        before = signal.SIG_IGN  # the launcher's SIGTERM is on its way, and would come before this has been said
        raise  # taking the connections down would wait for the dead
    except Exception:
        dist.destroy_process_group()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def own_device(world: World, device: str) -> str:
    """The device of this rank: where "cuda" leaves the choice of a GPU, the one of its local number."""
    if device != "cuda" or world.size == 1:
        return device
    return f"cuda:{world.local_rank % torch.cuda.device_count()}"


class Sums(Protocol):
    """Sums over the rows of outputs. Must survive pickling to be shared."""

    def __call__(self, batches: Iterator[Outputs], /) -> list[Tensor]:
        """The sums over these batches, in float64 or int64; zeros where there is none."""
        ...


_shared: ContextVar[tuple[Outputs, Callable[[Sums], list[Tensor]]] | None] = ContextVar("_shared", default=None)


@contextmanager
def sharing(rows: Outputs, total: Callable[[Sums], list[Tensor]]) -> Iterator[None]:
    """Within the block, `summed(sums, rows)` over these very outputs asks `total`, which may share the work."""
    token = _shared.set((rows, total))
    try:
        yield
    finally:
        _shared.reset(token)


def summed(sums: Sums, rows: Outputs) -> list[Tensor]:
    """Sums over all batches of `rows`, computed here, or on all ranks where `sharing` says so."""
    shared = _shared.get()
    if shared is None or shared[0] is not rows:
        return sums(rows.batches())
    return shared[1](sums)


class _Writer(pickle.Pickler):
    """Leaves tensors out, and keeps them beside."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor:
            return None
        self.tensors.append(obj.detach().cpu())
        return len(self.tensors) - 1


class _Reader(pickle.Unpickler):
    """Puts the tensors back, on a device."""

    def __init__(self, buffer: io.BytesIO, tensors: Sequence[Tensor], device: str) -> None:
        super().__init__(buffer)
        self.tensors = tensors
        self.device = device

    def persistent_load(self, pid: Any) -> Tensor:
        return self.tensors[pid].to(self.device, copy=True)


@dataclass(frozen=True, eq=False)
class Packed:
    """A value on its way to other ranks: everything but the tensors, and the tensors in memory."""

    frame: bytes
    tensors: Sequence[Tensor]


def packed(value: object) -> Packed | None:
    """The value ready for a message, tensors included, or None where it cannot be pickled."""
    buffer = io.BytesIO()
    writer = _Writer(buffer)
    try:
        writer.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return Packed(buffer.getvalue(), writer.tensors)


def unpacked(message: Packed, device: str) -> Any:
    """The value of `packed`, its tensors on `device`. Only for messages from another rank of this run.

    They are as trusted as every object that torch.distributed sends, which travels pickled too.
    """
    return _Reader(io.BytesIO(message.frame), message.tensors, device).load()


def _threads(rank: int, local_size: int) -> tuple[int, int]:
    """Threads of this rank while all work, its share of the cores, and while rank 0 works alone, when it has all.

    What the user has said with OMP_NUM_THREADS stands. torchrun itself sets it to 1 where nothing was said, so 1
    counts as nothing.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return torch.get_num_threads(), torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    together = max(1, cores // local_size)
    return together, cores if rank == 0 else together


@contextmanager
def _noticing_death() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # DistError and gloo's own; both derive from it
        if isinstance(error, PeerLost):
            raise
        # gloo: "[file:line] Connection closed by peer [address]:port. This is typically …"
        what = str(error).partition("] ")[2].partition(". ")[0] or str(error)
        raise PeerLost(f"another rank of this run died ({what}); {_GO_ON}") from error


def _end(signum: int, frame: object) -> None:
    raise _Ended


def _portable(error: Exception, rank: int) -> Exception:
    """The error as one that rank 0 can unpickle and raise: wrong input stays wrong input."""
    text = str(error)
    if isinstance(error, FailedElsewhere):
        return FailedElsewhere(text)
    if isinstance(error, ValueError | OSError):
        return ValueError(text)
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {text}")
