"""Fit and score time and peak memory of every registered detector, beside pytorch-ood's on the same arrays.

    python benchmarks/detectors_speed.py                      # 20,000 × 1280 scored, 50,000 fitted, 1000 classes
    python benchmarks/detectors_speed.py --rows 2000 --fit-rows 5000 --width 256 --classes 100 --only knn,vim

Each detector runs in its own forked process, which measures ours and then the peer's on the arrays it inherits. Peaks
are resident memory above what the process held before: the inputs do not count. A peer that would take longer than
--budget CPU seconds scores fewer rows, and its time is scaled up (marked ~); one that needs more than --peer-memory
or --limit CPU seconds is stopped and says so. Install pytorch-ood==0.4.0 for the ratios; without it they stay empty.
The table is written after each detector, and --resume goes on where a stopped run ended.
"""

import argparse
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_ood_detectors import PEERS, Arrays
from torch import Tensor

from ood_toolkit.detectors import Detector
from ood_toolkit.detectors.layers import join_layers
from ood_toolkit.outputs import Head, Outputs
from ood_toolkit.registry import detector_classes

MEBIBYTE = 1 << 20
SHORT = 0.5
"""CPU seconds below which a fit or a score is timed more than once: one call of a few hundredths says little."""


@dataclass(frozen=True)
class Cost:
    """Seconds (wall, CPU) and MiB above the start; `rows` were scored of those wanted, and times are scaled to all."""

    fit: tuple[float, float]
    score: tuple[float, float]
    peak: float
    scaled: bool = False


def synthetic(rows: int, fit_rows: int, width: int, classes: int) -> Arrays:
    """ReLU features round class means, a head that reads them, and half of the scored rows round other means."""
    random = np.random.default_rng(0)
    means = random.standard_normal((classes, width), dtype=np.float32)
    other = random.standard_normal((classes, width), dtype=np.float32)
    weight = torch.from_numpy(means - means.mean(axis=0)) * (2.0 / width**0.5)
    head = Head(weight, torch.from_numpy(0.1 * random.standard_normal(classes, dtype=np.float32)))

    def outputs(number: int, foreign: int) -> Outputs:
        labels = random.permutation(np.arange(number) % classes)
        features = random.standard_normal((number, width), dtype=np.float32)
        features += np.where(np.arange(number)[:, None] < foreign, 0.7 * other[labels], means[labels])
        tensor = torch.from_numpy(np.maximum(features, 0, out=features))
        return Outputs(logits=head(tensor), features=tensor, labels=torch.from_numpy(labels), head=head)

    return Arrays(train=outputs(fit_rows, 0), test=outputs(rows, rows // 2))


def tap_of(name: str, rows: Outputs) -> Tensor:
    """Random numbers of the shape that this tap has for these rows: networks of four stages, an ensemble of five."""
    number, width = len(rows), rows.width
    generator = torch.Generator().manual_seed(number)

    def positive(*shape: int) -> Tensor:
        return torch.rand(number, *shape, generator=generator)

    shapes: dict[str, Callable[[], Tensor]] = {
        **dict.fromkeys(("gradient_density", "gradient_means"), lambda: positive(29)),
        "nudged_features": lambda: rows.features + 0.01 * positive(width),
        "member_logits": lambda: rows.logits.unsqueeze(1) + positive(5, 1),
        "dropout_logits": lambda: rows.logits.unsqueeze(1) + positive(10, 1),
        "augmented_logits": lambda: rows.logits.unsqueeze(1) + positive(7, 1),
        "local_mcm": lambda: positive().squeeze(),
        "negative_cosines": lambda: positive(10_000),
        "outlier_cosines": lambda: positive(100),
        "rank_one_removed": lambda: positive(2, width),
        "stage_gram": lambda: join_layers([positive(10, channels) for channels in (16, 24, 40, 80)]),
        "shallow_statistics": lambda: positive(2, 64),
        "activation_extremes": lambda: positive(34),
        "block_maxima": lambda: join_layers([positive(channels) for channels in (128, 320, width)]),
        "stage_means": lambda: join_layers([positive(channels) for channels in (64, 128, 320, width)]),
    }
    if name.endswith("_map"):
        return rows.features
    return shapes[name]()


def with_taps(detector: Detector, arrays: Arrays) -> Arrays:
    """The arrays with what this detector reads beside logits and features."""
    if not detector.taps:
        return arrays
    train, test = arrays.train, arrays.test
    if detector.needs == "train":
        train = train.with_taps({tap: tap_of(tap, train) for tap in detector.taps})
    return Arrays(train=train, test=test.with_taps({tap: tap_of(tap, test) for tap in detector.taps}))


class Meter:
    """Wall and CPU seconds and the peak of resident memory since the start."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # starts the high-water mark anew
        self.start = self._memory("VmRSS")

    @staticmethod
    def _memory(line: str) -> float:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        return int(text.split(f"{line}:")[1].split()[0]) / 1024

    @property
    def peak(self) -> float:
        """MiB above the start."""
        return self._memory("VmHWM") - self.start

    @staticmethod
    def timed(act: Callable[[], Any], least: float = 0.0) -> tuple[float, float]:
        """Wall and CPU seconds of one call: of the fastest, where several are made until `least` CPU seconds are up."""
        start, best = time.process_time(), (math.inf, math.inf)
        while best[1] == math.inf or time.process_time() - start < least:
            wall, cpu = time.perf_counter(), time.process_time()
            act()
            best = min(best, (time.perf_counter() - wall, time.process_time() - cpu), key=lambda times: times[1])
        return best


def our_cost(name: str, arrays: Arrays) -> Cost:
    """Of the registered detector with its defaults."""
    detector = built(name)
    arrays = with_taps(detector, arrays)
    meter = Meter()
    fit = meter.timed(lambda: detector.fit(arrays.train), SHORT) if detector.needs != "nothing" else (0.0, 0.0)
    score = meter.timed(lambda: detector(arrays.test), SHORT)
    return Cost(fit, score, meter.peak)


def built(name: str) -> Detector:
    """The detector of this name with its defaults."""
    detector = detector_classes()[name]()
    assert isinstance(detector, Detector)
    return detector


def peer_cost(name: str, arrays: Arrays, budget: float) -> Cost:
    """Of pytorch-ood's class; scores as many rows as the budget allows and scales up."""
    import pytorch_ood.detector

    peer, arrays = PEERS[name], with_taps(built(name), arrays)
    theirs = peer.build(getattr(pytorch_ood.detector, peer.kind), arrays)
    meter = Meter()
    fit = meter.timed(lambda: peer.fit and peer.fit(theirs, arrays), SHORT if peer.fit else 0.0)
    total = len(arrays.test)
    probe = arrays.test.rows(slice(0, min(100, peer.batch, total)))
    pace = meter.timed(lambda: peer.score(theirs, probe))[1] / len(probe)
    rows = min(total, max(len(probe), int(budget / max(pace, 1e-9))))
    starts = range(0, rows, min(rows, peer.batch))

    def run() -> None:
        for start in starts:
            peer.score(theirs, arrays.test.rows(slice(start, min(start + starts.step, rows))))

    wall, cpu = meter.timed(run, SHORT)
    return Cost(fit, (wall * total / rows, cpu * total / rows), meter.peak, scaled=rows < total)


def measured(name: str, arrays: Arrays, options: argparse.Namespace) -> tuple[Cost | str, Cost | str | None]:
    """Ours and the peer's, or the reason why not. The peer runs in a process of its own if ours has to be killed."""
    ours = _forked(lambda: our_cost(name, arrays), options.limit, None)
    if name not in PEERS or not _installed():
        return ours, None
    return ours, _forked(lambda: peer_cost(name, arrays, options.budget), options.limit, options.peer_memory)


def _installed() -> bool:
    return importlib.util.find_spec("pytorch_ood") is not None


def _forked(act: Callable[[], Cost], limit: float, memory: float | None) -> Cost | str:
    """What `act` returns in a forked child, or why it gave nothing."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(THREADS)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
        if memory is not None:
            held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_DATA, (held + int(memory * 1024) * MEBIBYTE,) * 2)
        try:
            send.send(act())
        except Exception as error:  # a peer may fail in any way; the table says how
            out_of_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
            send.send(f"needs over {memory:g} GiB" if out_of_memory else f"{type(error).__name__}: {error}"[:80])

    process = context.Process(target=child)
    process.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        process.join()
        return f"over {limit:.0f} CPU s" if process.exitcode == -signal.SIGXCPU else "the process died"
    finally:
        process.join()


def _seconds(cost: Cost | str | None, part: str, index: int) -> str:
    if not isinstance(cost, Cost):
        return "–"
    value = getattr(cost, part)[index]
    mark = "~" if cost.scaled and part == "score" else ""
    return "0" if value == 0 else f"{mark}{value:.2f}" if value < 10 else f"{mark}{value:.0f}"


def _ratio(ours: Cost | str, theirs: Cost | str | None, part: str) -> str:
    if not isinstance(ours, Cost) or not isinstance(theirs, Cost) or getattr(theirs, part)[1] < 1e-4:
        return ""
    value = getattr(theirs, part)[1] / max(getattr(ours, part)[1], 1e-4)
    return f"{value:.1f}×" if value < 10 else f"{value:.0f}×"


COLUMNS = (
    "detector",
    "fit s",
    "score s",
    "fit CPU s",
    "score CPU s",
    "peak MiB",
    "pytorch-ood",
    "fit CPU s",
    "score CPU s",
    "peak MiB",
    "fit ratio",
    "score ratio",
)


def row(name: str, ours: Cost | str, theirs: Cost | str | None) -> list[str]:
    """One line of the table."""
    cells = [name, *(_seconds(ours, part, index) for index in (0, 1) for part in ("fit", "score"))]
    cells += [f"{ours.peak:.0f}" if isinstance(ours, Cost) else ours]
    cells += [PEERS[name].kind if theirs is not None else ""]
    if theirs is None:
        return [*cells, "", "", "", "", ""]
    cells += [_seconds(theirs, "fit", 1), _seconds(theirs, "score", 1)]
    cells += [f"{theirs.peak:.0f}" if isinstance(theirs, Cost) else theirs]
    return [*cells, _ratio(ours, theirs, "fit"), _ratio(ours, theirs, "score")]


def chosen(only: str | None) -> tuple[list[str], list[str]]:
    """Detectors to measure, and a line for each that is left out."""
    names, skipped = [], []
    for name, kind in detector_classes().items():
        if only and name not in only.split(","):
            continue
        if issubclass(kind, Detector):
            names.append(name)
        else:
            skipped.append(f"`{name}` runs the model itself")
    return names, skipped


def hardware() -> str:
    """Processor, threads and versions."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return (
        f"{model}, {os.cpu_count()} cores, {THREADS} threads used, load {os.getloadavg()[0]:.1f} at the start; "
        f"Python {platform.python_version()}, torch {torch.__version__}, {_peer_version()}"
    )


def _peer_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"pytorch-ood {version('pytorch-ood')}"
    except PackageNotFoundError:
        return "pytorch-ood not installed"


def report(table: list[list[str]], skipped: list[str], facts: str, arrays: Arrays) -> str:
    """The whole Markdown file."""
    lines = [
        "# Cost of every detector",
        "",
        f"Fit on {len(arrays.train):,} rows, score {len(arrays.test):,}; D = {arrays.train.width}, "
        f"C = {arrays.train.classes}, float32. Ratios are pytorch-ood's CPU seconds over ours. Peaks are above the "
        "inputs. ~: fewer rows scored, time scaled up. Where fitting or scoring takes less than half a second, the "
        "best of several. Taps are random numbers of the right shape: what fills them runs in the model's pass.",
        "",
        f"    python benchmarks/detectors_speed.py {' '.join(sys.argv[1:])}".rstrip(),
        "",
        f"{facts}; {datetime.now(UTC):%Y-%m-%d}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(cells)} |" for cells in table),
        "",
        *(f"- Not measured: {line}." for line in skipped),
    ]
    return "\n".join(lines).rstrip() + "\n"


THREADS = 2


def kept(path: Path, facts: dict[str, Any]) -> dict[str, list[str]]:
    """The rows of the table that an earlier run with the same settings has left beside `path`."""
    if not path.exists():
        return {}
    left = json.loads(path.read_text(encoding="utf-8"))
    if left["settings"] != facts:
        raise SystemExit(f"{path} is of a run with other settings, {left['settings']}; run without --resume")
    return left["rows"]


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="rows to score")
    parser.add_argument("--fit-rows", type=int, default=50_000, help="rows to fit on")
    parser.add_argument("--width", type=int, default=1280, help="features, D")
    parser.add_argument("--classes", type=int, default=1000, help="classes, C")
    parser.add_argument("--threads", type=int, default=THREADS, help="threads of each side")
    parser.add_argument(
        "--budget", type=float, default=20.0, help="CPU seconds of scoring after which a peer is scaled up"
    )
    parser.add_argument("--limit", type=float, default=400.0, help="CPU seconds after which a process is stopped")
    parser.add_argument("--peer-memory", type=float, default=6.0, help="GiB above the inputs that a peer may take")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run with these settings measured")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "detectors_speed.md")
    return parser.parse_args()


def main() -> None:
    global THREADS
    chosen_options = options()
    THREADS = chosen_options.threads
    torch.set_num_threads(1)  # a parent with a pool of threads cannot be forked safely
    if _installed():
        importlib.import_module("pytorch_ood.detector")  # here, so that no child pays for it
    facts = hardware()
    settings = {n: v for n, v in vars(chosen_options).items() if n not in ("only", "resume", "out")}
    chosen_options.out.parent.mkdir(parents=True, exist_ok=True)
    state = chosen_options.out.with_suffix(".json")
    table = kept(state, settings) if chosen_options.resume else {}
    arrays = synthetic(chosen_options.rows, chosen_options.fit_rows, chosen_options.width, chosen_options.classes)
    names, skipped = chosen(chosen_options.only)
    for name in names:
        if name in table:
            continue
        ours, theirs = measured(name, arrays, chosen_options)
        table[name] = row(name, ours, theirs)
        print(" | ".join(table[name]), flush=True)
        # a stopped run leaves these
        lines = [table[known] for known in detector_classes() if known in table]
        state.write_text(json.dumps({"settings": settings, "rows": table}, indent=1) + "\n", encoding="utf-8")
        chosen_options.out.write_text(report(lines, skipped, facts, arrays), encoding="utf-8")


if __name__ == "__main__":
    main()
