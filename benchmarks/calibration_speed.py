"""Fit and apply time, memory and held-out NLL of every calibrator, beside netcal and scikit-learn on the same arrays.

Each line runs in a process of its own, one thread, on float32 logits made from a seed: half of the rows to fit, half
held out. CPU seconds are compared, because wall time on a shared machine measures the neighbours.

    python benchmarks/calibration_speed.py --rows 50000 --classes 1000 --out benchmarks/results/calibration_speed.md
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

OURS = [
    "none",
    "temperature",
    "vector",
    "vector(prior='none')",
    "matrix",
    "dirichlet",
    "ets",
    "entropy_temperature",
    "pts",
    "platt",
    "isotonic",
    "irova_ts",
    "irm",
    "mix_n_match",
    "prior_shift",
    "top_label_platt",
    "beta",
    "top_label_isotonic",
    "histogram",
    "histogram(equal='mass')",
    "scaling_binning",
    "spline",
    "bbq",
    "enir",
]
SLOW = ["matrix(off_diagonal=1000.0, intercept=1.0)", "dirichlet(off_diagonal=1000.0, intercept=1.0)"]
"""A hundred products of (N, C) and (C, C) matrices: minutes at 1000 classes, run only when asked for."""
PEERS = {
    "netcal TemperatureScaling (float64)": "temperature",
    "netcal HistogramBinning, one-vs-rest (float64)": "(we bin top labels only)",
    "netcal IsotonicRegression, one-vs-rest (float64)": "isotonic",
    "scikit-learn isotonic, one-vs-rest": "isotonic",
    "L-BFGS of torch, vector scaling": "vector(prior='none')",
    "L-BFGS of torch, temperature (lr 0.01, 50 steps)": "temperature",
}


def data(rows: int, classes: int):
    """Logits that are twice those from whose softmax the labels are drawn: the true temperature is 2."""
    import torch

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator)
    peaks = torch.randint(0, classes, (rows,), generator=generator)
    logits[torch.arange(rows), peaks] += 8 + 3 * torch.randn(rows, generator=generator)
    labels = torch.empty(rows, dtype=torch.int64)
    for start in range(0, rows, 1000):
        labels[start : start + 1000] = logits[start : start + 1000].softmax(1).multinomial(1, generator=generator)[:, 0]
    return logits.mul_(2), labels


def measure(name: str, arrays: Path) -> dict[str, float]:
    """One line, in this process."""
    import torch

    torch.set_num_threads(1)
    logits, labels = torch.load(arrays, weights_only=True)
    half = len(logits) // 2
    fit, apply = PEER_CODE[name]() if name in PEER_CODE else ours(name)
    import_peers(name)
    floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with quiet():
        fit(logits[:half], labels[:half])
    fitted = time.process_time()
    with quiet():
        probabilities = apply(logits[half:])
    applied = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    true = torch.as_tensor(probabilities).gather(1, labels[half:, None]).double().clamp_min(1e-12)
    return {
        "fit": fitted - start,
        "apply": applied - fitted,
        "memory": (peak - floor) / 1024,
        "nll": -float(true.log().mean()),
    }


@contextlib.contextmanager
def quiet():
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def import_peers(name: str) -> None:
    """Imports are paid before the clock starts."""
    for module in ("scipy.interpolate", "scipy.optimize", "sklearn.isotonic"):
        importlib.import_module(module)
    if "netcal" in name or name in ("bbq", "enir"):
        importlib.import_module("netcal.scaling")
        importlib.import_module("netcal.binning")


def ours(name: str):
    from ood_toolkit import registry

    calibrator = registry.build_calibrator(name)
    return calibrator.fit, calibrator


def netcal(room: str, kind: str):
    calibrator = getattr(importlib.import_module(f"netcal.{room}"), kind)()

    def fit(logits, labels):
        calibrator.fit(logits.double().softmax(1).numpy(), labels.numpy())

    return fit, lambda logits: calibrator.transform(logits.double().softmax(1).numpy())


def sklearn_isotonic():
    import numpy as np
    from sklearn.isotonic import IsotonicRegression

    maps = []

    def fit(logits, labels):
        p = logits.double().softmax(1).numpy()
        maps.extend(
            IsotonicRegression(out_of_bounds="clip").fit(p[:, index], labels.numpy() == index)
            for index in range(p.shape[1])
        )

    def apply(logits):
        p = logits.double().softmax(1).numpy()
        mapped = np.stack([fitted.predict(p[:, index]) for index, fitted in enumerate(maps)], axis=1) + 1e-9 * p
        return mapped / mapped.sum(1, keepdims=True)

    return fit, apply


def torch_lbfgs(shape: str):
    import torch

    parameters = []

    def scaled(logits):
        return logits / parameters[0] if shape == "temperature" else logits * parameters[0] + parameters[1]

    def fit(logits, labels):
        if shape == "temperature":
            parameters.append(torch.ones(1, requires_grad=True))
            optimiser = torch.optim.LBFGS(parameters, lr=0.01, max_iter=50)
        else:
            parameters.append(torch.ones(logits.shape[1], requires_grad=True))
            parameters.append(torch.zeros(logits.shape[1], requires_grad=True))
            optimiser = torch.optim.LBFGS(parameters, max_iter=100, line_search_fn="strong_wolfe")

        def closure():
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(scaled(logits), labels)
            loss.backward()
            return loss

        optimiser.step(closure)

    def apply(logits):
        with torch.no_grad():
            return scaled(logits).softmax(1)

    return fit, apply


PEER_CODE = {
    "netcal TemperatureScaling (float64)": lambda: netcal("scaling", "TemperatureScaling"),
    "netcal HistogramBinning, one-vs-rest (float64)": lambda: netcal("binning", "HistogramBinning"),
    "netcal IsotonicRegression, one-vs-rest (float64)": lambda: netcal("binning", "IsotonicRegression"),
    "scikit-learn isotonic, one-vs-rest": sklearn_isotonic,
    "L-BFGS of torch, vector scaling": lambda: torch_lbfgs("vector"),
    "L-BFGS of torch, temperature (lr 0.01, 50 steps)": lambda: torch_lbfgs("temperature"),
}


def in_own_process(name: str, arrays: Path, seconds: float) -> dict[str, float] | str:
    command = [sys.executable, __file__, "--one", name, "--arrays", str(arrays)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=True)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    except subprocess.CalledProcessError as error:
        return error.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, dict[str, float] | str], rows: int, classes: int) -> str:
    lines = [
        f"# Calibrators at {rows:,} × {classes:,}",
        "",
        f"Half of the rows fitted, half applied to and scored. float32 logits, one thread. CPU seconds; memory is the "
        f"rise of the peak over the logits themselves. {cpu()}, Python {platform.python_version()}.",
        "",
        f"    python benchmarks/calibration_speed.py --rows {rows} --classes {classes}",
        "",
        "| calibrator | fit, CPU s | apply, CPU s | memory, MiB | held-out NLL |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        if isinstance(result, str):
            lines.append(f"| {name} | {result} | | | |")
        else:
            fit, apply, memory, nll = (result[key] for key in ("fit", "apply", "memory", "nll"))
            lines.append(f"| {name} | {fit:.2f} | {apply:.2f} | {memory:.0f} | {nll:.4f} |")
    lines += ["", "| peer | fits slower than ours by | ours |", "|---|---|---|"]
    for peer, own in PEERS.items():
        theirs, mine = results.get(peer), results.get(own)
        if isinstance(theirs, dict) and isinstance(mine, dict):
            lines.append(f"| {peer} | {theirs['fit'] / max(mine['fit'], 1e-3):.1f} × | {own} |")
    return "\n".join(lines) + "\n"


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    return f"{len(names)} × {names[0]}" if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--only", nargs="*", help="names to run; by default all but the slow")
    parser.add_argument("--slow", action="store_true", help="also matrix and dirichlet with given penalties")
    parser.add_argument("--seconds", type=float, default=900, help="wall time after which a line is given up")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--arrays", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.arrays)))
        return
    import torch

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "arrays.pt"
        torch.save(data(options.rows, options.classes), arrays)
        for name in options.only or [*OURS, *(SLOW if options.slow else []), *PEERS]:
            results[name] = in_own_process(name, arrays, options.seconds)
            print(name, results[name], flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(table(results, options.rows, options.classes))


if __name__ == "__main__":
    main()
