"""Fit and score from a store of a thousand to a million rows: time should be linear in N, and memory flat.

    python benchmarks/scaling.py --out benchmarks/results/scaling.md                # N to 1,000,000; D = 512, C = 1000
    python benchmarks/scaling.py --rows 10000,100000 --width 2048 --only vim,knn
    python benchmarks/scaling.py --processes 1,2,4 --id IMAGES --ood OTHER_IMAGES  # extraction through torchrun

The store is made up (class means and noise, float16), written once, and seen up to row N. Every detector and N has a
process of its own, one thread, and CPU time. Memory is the peak of the process's anonymous memory (RssAnon) above what
it held before: pages of the mapped store, which the system may drop, do not count. A detector that keeps training rows
scores only the first 1,000 rows, so that its time too is that of one sweep; the others score all N, or as many as
--scored says.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ood_toolkit.outputs import Head, Outputs
from ood_toolkit.store import Store

ROWS = "1000,3000,10000,30000,100000,300000,1000000"
DETECTORS = "energy,gen,react,ash_s,she,mahalanobis,rmds,vim,neco,knn"
KEEPS_ROWS = ("knn", "nnguide", "relation", "grood", "cfood")
QUERIES = 1000
GROUP = "outputs"


def make_store(path: Path, rows: int, width: int, classes: int) -> None:
    """A store of float16 outputs whose features are those of `rows % classes`, plus noise."""
    store = Store(path, rows, {"made": "up"})
    generator = torch.Generator().manual_seed(0)
    means, noise = 1 + torch.rand(classes, width, generator=generator), torch.randn(8192, width, generator=generator)
    weight = torch.randn(classes, width, generator=generator) / width**0.5
    torch.save({"weight": weight, "classes": classes}, path / "head.partial")
    mean_logits, noise_logits = means @ weight.T, 0.5 * noise @ weight.T
    for shard in store.shards:
        row = torch.arange(shard.start, shard.stop)
        # another noise for every class and shard, without a matrix product for each
        label, tile = row % classes, (row * 31 + shard.number * 17) % len(noise)
        features = torch.addcmul(means[label], noise[tile], torch.tensor(0.5)).abs().half()
        logits = (mean_logits[label] + noise_logits[tile]).half()
        store.write(GROUP, shard, {"logits": logits, "features": features}, {})
    store.seal(GROUP)


def open_store(path: Path, rows: int) -> Outputs:
    """The first rows of the store."""
    saved = torch.load(path / "head.partial", weights_only=True)
    columns = Store.found(path).columns(GROUP)
    return Outputs.mapped(
        logits=columns["logits"][:rows],
        features=columns["features"][:rows],
        labels=torch.arange(rows) % saved["classes"],
        head=Head(saved["weight"], torch.zeros(saved["classes"])),
    )


class Peak:
    """The most anonymous memory that this process holds while it runs, looked at every 5 ms."""

    def __enter__(self) -> "Peak":
        self.before = self.most = anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, anonymous())


def anonymous() -> float:
    """MiB of memory that no file stands behind."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


def measure(path: Path, spec: str, rows: int, scored_rows: int) -> dict[str, float]:
    """Opening, fitting and scoring of one detector, in this process."""
    from ood_toolkit.registry import build_detector

    torch.set_num_threads(1)
    detector = build_detector(spec)
    detector.fit(small := open_store(path, 2000))(small)  # whatever is made once is made now
    detector = build_detector(spec)
    started = time.process_time()
    outputs = open_store(path, rows)
    float(outputs.rows(slice(rows // 2, rows // 2 + 1)).features.sum())
    opened = time.process_time()
    asked = QUERIES if detector.name in KEEPS_ROWS else scored_rows or rows
    queries = outputs.rows(slice(0, asked)) if asked < rows else outputs
    with Peak() as peak, torch.no_grad():
        began = time.process_time()
        detector.fit(outputs)
        fitted = time.process_time()
        scores = detector(queries)
        scored = time.process_time()
    assert scores.isfinite().all()
    return {
        "rows": rows,
        "open": opened - started,
        "fit": fitted - began,
        "score": scored - fitted,
        "peak": peak.most - peak.before,
    }


def points(options: argparse.Namespace, path: Path) -> dict[str, list[dict[str, float]]]:
    """The measurements of every detector, N by N; one that fails is left out with its reason on stderr."""
    found: dict[str, list[dict[str, float]]] = {}
    for spec in options.only.split(","):
        for rows in counts(options.rows):
            command = [sys.executable, __file__, "--measure", str(path), spec, str(rows), str(options.scored)]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if done.returncode:
                print(spec, rows, done.stderr.strip().splitlines()[-1], file=sys.stderr)
                break
            found.setdefault(spec, []).append(json.loads(done.stdout))
            print(spec, found[spec][-1], file=sys.stderr, flush=True)
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line through the points."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def exponent(each: Sequence[dict[str, float]]) -> str:
    """How the time grows with N: 1 is linear. From the last points, where the start does not count."""
    import math

    last = [point for point in each if point["fit"] + point["score"] > 0.05][-3:]
    if len(last) < 2:
        return "–"
    logs = [(math.log(point["rows"]), math.log(point["fit"] + point["score"])) for point in last]
    return f"{slope(*zip(*logs, strict=True)):.2f}"


def report(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> str:
    """The record, in Markdown."""
    rows = counts(options.rows)
    size = rows[-1] * 2 * (options.width + options.classes) / 1e9
    lines = [
        "# Time and memory against the number of rows",
        "",
        f"D = {options.width}, C = {options.classes}, float16 store of {size:.1f} GB; one thread, CPU seconds. Every "
        "number is from a process of its own.",
        "",
        f"    python benchmarks/scaling.py --rows {options.rows} --width {options.width} --classes {options.classes} "
        f"--only {options.only}" + (f" --scored {options.scored}" if options.scored else ""),
        "",
        f"{cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; "
        f"Python {platform.python_version()}, torch {torch.__version__}; {datetime.now(UTC):%Y-%m-%d}.",
        "",
        "## Time of fit + score, CPU s",
        "",
        f"| detector | {' | '.join(f'{n:,}' for n in rows)} | exponent of N |",
        "|---|" + "---|" * (len(rows) + 1),
    ]
    for spec, each in found.items():
        cells = [f"{point['fit']:.2f} + {point['score']:.2f}" for point in each] + [""] * (len(rows) - len(each))
        lines.append(f"| {spec} | {' | '.join(cells)} | {exponent(each)} |")
    lines += [
        "",
        "The exponent is the slope of log time over log N at the last three points above 50 ms; 1 is linear.",
        "",
        "## Peak of anonymous memory above the store, MiB",
        "",
        f"| detector | {' | '.join(f'{n:,}' for n in rows)} | MiB for 100,000 rows more |",
        "|---|" + "---|" * (len(rows) + 1),
    ]
    for spec, each in found.items():
        late = [point for point in each if point["rows"] >= 30_000]
        growth = slope([p["rows"] / 1e5 for p in late], [p["peak"] for p in late]) if len(late) > 1 else float("nan")
        cells = [f"{point['peak']:.0f}" for point in each] + [""] * (len(rows) - len(each))
        lines.append(f"| {spec} | {' | '.join(cells)} | {growth:.1f} |")
    opened = [
        1000 * max(point["open"] for each in found.values() for point in each if point["rows"] == n) for n in rows
    ]
    lines += [
        "",
        f"Growth is fitted from 30,000 rows on: below, blocks are not full. Labels and scores themselves take 8 and 4 "
        f"bytes a row, {12e5 / 2**20:.1f} MiB for 100,000.",
        "",
        "Opening the store and reading one row, CPU ms at most: "
        + ", ".join(f"{time_:.1f} at {n:,}" for n, time_ in zip(rows, opened, strict=True))
        + ".",
        "",
    ]
    return "\n".join(lines)


def extraction(options: argparse.Namespace) -> str:
    """Wall time of the same run by several processes, each with its own part of the images."""
    few = f", the first {options.limit} images of each" if options.limit else ""
    lines = [
        "## Extraction by several processes",
        "",
        f"`ood-bench --suite folders --detectors msp` on {options.id.name} and {options.ood.name}{few}, through "
        f"torchrun, an empty cache each time; start and report included. A core for each process, of {len(cores())}.",
        "",
        "| processes | cores | wall, s | images/s |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        known = limited(options.id, Path(folder, "known"), options.limit)
        strange = limited(options.ood, Path(folder, "strange"), options.limit)
        images = sum(1 for root in (known, strange) for file in root.rglob("*") if file.is_file())
        choices = ["--suite", "folders", "--model", options.model, "--id", str(known), "--ood", f"other={strange}"]
        choices += ["--labels", str(labels_of(known, options.labels, Path(folder)))] if options.labels else []
        choices += ["--detectors", "msp", "--calibrators", "none", "--resamples", "0", "--workers", "0"]
        for count in counts(options.processes):
            used = cores()[:count]
            seconds = launched(count, choices, used)
            lines.append(f"| {count} | {len(used)} | {seconds:.1f} | {images / seconds:.0f} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, ""])


def cores() -> list[int]:
    """The cores that this process may use; [] where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def confined(used: Sequence[int]) -> Iterator[None]:
    """While this lasts, what is launched has these cores only: the ranks of a machine share all that they find."""
    before = cores()
    if before:
        os.sched_setaffinity(0, used)
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


def launched(count: int, choices: Sequence[str], used: Sequence[int]) -> float:
    """Wall seconds of a run by so many processes on these cores, from an empty cache."""
    with tempfile.TemporaryDirectory() as folder, confined(used):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command += ["-m", "ood_toolkit", *choices, "--cache", f"{folder}/cache", "--out", f"{folder}/run"]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.stderr)
        return time.perf_counter() - started


def limited(root: Path, folder: Path, limit: int | None) -> Path:
    """The folder itself, or one with links to its first images."""
    if limit is None:
        return root
    files = sorted(file for file in root.rglob("*") if file.is_file())[:limit]
    for file in files:
        link = folder / file.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
    return folder


def labels_of(images: Path, labels: Path, folder: Path) -> Path:
    """The lines of a labels file that are about these images."""
    there = {str(file.relative_to(images)) for file in images.rglob("*") if file.is_file()}
    lines = labels.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = folder / labels.name
    kept.write_text("".join(line for line in lines if line.split()[0] in there or line.startswith("#")), "utf-8")
    return kept


def counts(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in text.split(",")]


def cpu_name() -> str:
    """As the kernel has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def figure(found: dict[str, list[dict[str, float]]], file: Path) -> None:
    """Time and memory over N, on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    canvas, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for spec, each in found.items():
        rows = [point["rows"] for point in each]
        left.loglog(rows, [max(0.001, point["fit"] + point["score"]) for point in each], marker=".", label=spec)
        right.loglog(rows, [max(1.0, point["peak"]) for point in each], marker=".", label=spec)
    left.set(xlabel="rows", ylabel="fit + score, CPU s")
    right.set(xlabel="rows", ylabel="peak memory above the store, MiB")
    right.axhline(1500, color="grey", linestyle=":")
    left.legend(fontsize=7)
    canvas.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=ROWS, help="numbers of rows, ascending")
    parser.add_argument("--width", type=int, default=512, help="D")
    parser.add_argument("--classes", type=int, default=1000, help="C")
    parser.add_argument("--only", default=DETECTORS, help="specs of detectors")
    parser.add_argument("--scored", type=int, default=0, help="score at most so many rows; 0 scores all")
    parser.add_argument(
        "--folder", type=Path, help="where the made-up store lies, and stays; a temporary one by default"
    )
    parser.add_argument("--processes", default="", help="numbers of processes of an extraction; needs --id and --ood")
    parser.add_argument("--limit", type=int, help="of such an extraction: only the first images of each folder")
    parser.add_argument("--model", default="demo:efficientnet_lite0")
    parser.add_argument("--id", type=Path)
    parser.add_argument("--labels", type=Path, help="file of image path and class, where --id has no class folders")
    parser.add_argument("--ood", type=Path)
    parser.add_argument("--out", type=Path, help="Markdown file for the record; a figure beside it")
    parser.add_argument("--measure", nargs=4, metavar=("STORE", "SPEC", "ROWS", "SCORED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        path, spec, rows, scored = options.measure
        print(json.dumps(measure(Path(path), spec, int(rows), int(scored))))
        return
    text = extraction(options) if options.processes else sweep(options)
    print(text)
    if options.out:
        with options.out.open("a" if options.processes else "w", encoding="utf-8") as file:
            file.write(("\n" if options.processes else "") + text)


def sweep(options: argparse.Namespace) -> str:
    """The store, the measurements, the record."""
    with tempfile.TemporaryDirectory() as temporary:
        path = (options.folder or Path(temporary)) / "store"
        if not path.exists():
            make_store(path, counts(options.rows)[-1], options.width, options.classes)
        found: dict[str, Any] = points(options, path)
    if options.out:
        figure(found, options.out.with_suffix(".svg"))
    return report(found, options)


if __name__ == "__main__":
    main()
