"""What the ranks of `test_distributed` run: the command, a suite under a class mask, or bare exchanges.

Shards and blocks hold 8 rows, and any number of rows is worth sharing, so that small sets go through all the machinery.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ood_toolkit import stats, store
from ood_toolkit.benchmarks import crew
from ood_toolkit.distributed import World, joined


def network() -> tuple[nn.Module, Any]:
    """A factory for `ranks_program:network`: four classes of brightness, 60, 90, 120 and 150 of 255."""
    torch.manual_seed(0)
    if os.environ.get("ODD_RANK") == os.environ.get("RANK", "0"):
        torch.manual_seed(1)
    filters, head = nn.Conv2d(3, 6, 3, bias=False), nn.Linear(6, 4)
    centres = (60 + 30 * torch.arange(4)) / 255
    with torch.no_grad():
        # three features of contrast, after the brightness of each colour
        filters.weight.sub_(filters.weight.mean(dim=(2, 3), keepdim=True)).mul_(8)
        filters.weight[:3] = torch.eye(3)[:, :, None, None] / 9
        head.weight.mul_(6)
        head.weight[:, :3] = 12 * centres[:, None]
        head.bias[:] = -18 * centres.square()
    model = nn.Sequential(filters, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    return model, as_it_is


def as_it_is(image: Any) -> Tensor:
    """The transform: the pixels, uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def noise(brightness: Sequence[float]) -> np.ndarray:
    """(N, 12, 12, 3) uint8: images of about these brightnesses."""
    generator, rows = np.random.default_rng(0), len(brightness)
    colours = np.asarray(brightness)[:, None, None, None] + generator.normal(0, 30, (rows, 1, 1, 3))
    contrast = generator.uniform(10, 60, (rows, 1, 1, 1))
    return (colours + contrast * generator.uniform(-1, 1, (rows, 12, 12, 3))).clip(0, 255).astype(np.uint8)


def bench(arguments: list[str]) -> None:
    """`ood-bench`, where the environment may say which rank is to die after how many shards: KILL=RANK:SHARDS."""
    from ood_toolkit import cli

    rank, _, shards = os.environ.get("KILL", "").partition(":")
    if rank and os.environ["RANK"] == rank:
        _die_after(int(shards))
    elif rank:
        _be_slow_to_tell(cli)
    sys.argv = ["ood-bench", *arguments]
    cli.main()


def _die_after(shards: int) -> None:
    write, written = store.Store.write, []

    def dying(self: store.Store, *arguments: Any) -> None:
        write(self, *arguments)
        written.append(arguments)
        if len(written) == shards:
            os.kill(os.getpid(), signal.SIGKILL)

    store.Store.write = dying  # pyright: ignore[reportAttributeAccessIssue]


def _be_slow_to_tell(cli: Any) -> None:
    """The launcher's SIGTERM comes before the error has been said."""
    ending = cli._ending

    def late(error: Exception) -> object:
        time.sleep(0.5)
        return ending(error)

    cli._ending = late


def masked(place: str) -> None:
    """One model on two sets, of whose four classes two count, with live detectors, fitted ones and shared sums."""
    from ood_toolkit.benchmarks.crew import Crew, Follower
    from ood_toolkit.benchmarks.measure import Bootstrap
    from ood_toolkit.benchmarks.methods import parse_calibrators, parse_detectors
    from ood_toolkit.benchmarks.results import RunFolder
    from ood_toolkit.benchmarks.runner import Runner, Settings
    from ood_toolkit.benchmarks.suite import ClassMask, Part, Suite, Task
    from ood_toolkit.datasets import ArrayImages
    from ood_toolkit.extract import Extractor
    from ood_toolkit.models import load_classifier

    pixels = noise([60 + 30 * (n % 4) for n in range(100)] + [200] * 30)
    known = ArrayImages(pixels[:100], name="known", labels=[n % 4 for n in range(100)])
    strange = ArrayImages(pixels[100:], name="strange")
    mask = ClassMask("two", torch.tensor([2, 0]))
    fit, held, scored = (Part(f"known-{n}", known, torch.arange(n, 100, 3)) for n in range(3))
    other = Part("strange", strange)
    tasks = [Task("misclassification", "known", scored, None, m) for m in (mask, None)]
    tasks += [Task("anomaly", "strange", scored, other, m) for m in (mask, None)]
    suite = Suite("masked", "a mask", tasks, fit=fit, calibration=held)
    with joined(cuda=False) as world:
        methods = parse_detectors("odin,odin_mahalanobis,mahalanobis,vim,knn(k=3),energy")
        taps = tuple(sorted({tap for method in methods for tap in method.detector.taps}))
        model = load_classifier("ranks_program:network", taps=taps)
        extractor = Extractor(Path(place) / "cache", batch_size=3, world=world)
        if not world.main:
            Follower(suite, [model], extractor, "cpu").serve()
            return
        with Crew(world) as team:
            settings = Settings(
                models=[model],
                methods=methods,
                calibrators=parse_calibrators("none"),
                extractor=extractor,
                bootstrap=Bootstrap(resamples=10, seed=0),
                crew=team,
            )
            Runner(suite, settings, RunFolder(Path(place) / "run", {})).run()


def exchanges(place: str) -> None:
    """Every exchange once; each rank leaves what it saw in a file."""
    saw: dict[str, Any] = {}
    with joined(cuda=False) as world:
        rank = world.rank
        saw["ranks"] = [world.rank, world.size, world.local_rank, world.local_size]
        saw["gathered"] = world.gather(f"rank {rank}")
        saw["threads"] = [world.each(torch.get_num_threads), torch.get_num_threads()]
        saw["told"] = world.told(lambda: f"from {rank}")
        values = [torch.full((3,), rank / 7, dtype=torch.float64), torch.tensor([rank, 2**53])]
        saw["sums"] = [value.tolist() for value in world.sum(values)]
        order: list[float] = [time.time()]
        saw["first"] = world.first(lambda: order.append(time.time()) or rank)
        saw["after"] = world.gather(order[1])
        saw["told_error"] = _error(lambda: world.told(lambda: [][0]))
        saw["each_error"] = _error(lambda: world.each(lambda: _fail(world, 1)))
        saw["own_error"] = _error(lambda: world.each(lambda: _fail(world, 0)))
        started = time.monotonic()
        saw["early_error"] = _error(lambda: world.each(lambda: _wait_long(world)))
        saw["waited"] = time.monotonic() - started
        saw["afterwards"] = world.each(lambda: rank)
    Path(place, f"{rank}.json").write_text(json.dumps(saw))


def _fail(world: World, rank: int) -> None:
    if world.rank == rank:
        raise ValueError(f"rank {rank} sees a broken image")


def _wait_long(world: World) -> None:
    if world.rank == world.size - 1:
        raise KeyError("lost")
    for _ in range(600):
        time.sleep(0.1)
        world.look()


def _error(do: Any) -> str:
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gpu_sums(place: str) -> None:
    """Sums over GPUs, and whether they went through NCCL."""
    with joined() as world:
        device = f"cuda:{world.local_rank}"
        (total,) = world.sum([torch.full((5,), world.rank + 1.0, dtype=torch.float64, device=device)])
        saw = {"nccl": world.has_nccl, "total": total.tolist(), "device": str(total.device)}
    Path(place, f"{world.rank}.json").write_text(json.dumps(saw))


if __name__ == "__main__":
    store.SHARD_ROWS = 8
    stats.block_length = lambda outputs: 8
    crew._ROWS_WORTH_SHARING = 1
    chosen, *rest = sys.argv[1:]
    if chosen == "bench":
        bench(rest)
    else:
        {"masked": masked, "exchanges": exchanges, "gpu_sums": gpu_sums}[chosen](*rest)
