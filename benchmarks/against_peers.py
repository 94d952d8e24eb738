"""Ten detectors on real images through this toolkit, pytorch-ood and oodeel: time, memory, and whether they agree.

    python benchmarks/against_peers.py --id IMAGES --labels LABELS.tsv --ood OTHER_IMAGES --out results.md

Every tool gets the same network (EfficientNet-Lite0, ImageNet weights), images, batches and threads, in a process of
its own, and is used as its documentation shows: pytorch-ood fits a detector on a loader and calls it on every batch,
oodeel fits one and scores a loader, so both run the network again for every detector; this toolkit extracts outputs
once and scores them. The clock starts when the network is loaded and stops at the last score. Memory is the peak of
resident memory above that start. The labels file has a header line and tab-separated columns: file name, WordNet id,
class number. Install pytorch-ood==0.4.0 and oodeel==0.4.0 (with faiss-cpu and datasets) for their columns; absent ones
are named.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MODEL = "demo:efficientnet_lite0"
DETECTORS = ("msp", "maxlogit", "energy", "entropy", "gen", "react", "knn", "vim", "mahalanobis", "rmds")
VIM_DIM = 128
TOOLS = ("ood-toolkit", "pytorch-ood", "oodeel")

Scores = tuple[Tensor, Tensor]
"""Of the ID images and of the OOD images; higher = more out-of-distribution."""


@dataclass(frozen=True)
class Images:
    """Files with class numbers; -1 is out-of-distribution."""

    files: Sequence[Path]
    labels: Sequence[int]


@dataclass(frozen=True)
class Job:
    """What a tool gets."""

    fit: Images
    id: Images
    ood: Images
    batch_size: int


class Transformed(torch.utils.data.Dataset):
    """The images as a peer wants them: normalised floats, and a label."""

    def __init__(self, images: Images, transform: Callable[[Any], Tensor], mean: Tensor, std: Tensor) -> None:
        self.images, self.transform, self.mean, self.std = images, transform, mean, std

    def __len__(self) -> int:
        return len(self.images.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        from PIL import Image

        pixels = self.transform(Image.open(self.images.files[row]).convert("RGB")).float() / 255
        return (pixels - self.mean) / self.std, self.images.labels[row]


def loaders(job: Job, loaded: Any) -> list[torch.utils.data.DataLoader]:
    """Fit, ID and OOD images in batches."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (loaded.transform.mean, loaded.transform.std))
    parts = [Transformed(part, loaded.transform, mean, std) for part in (job.fit, job.id, job.ood)]
    return [torch.utils.data.DataLoader(part, batch_size=job.batch_size) for part in parts]


def through_ood_toolkit(job: Job, loaded: Any) -> dict[str, Scores]:
    """One pass, then every detector on what it left behind."""
    from ood_toolkit.datasets import FolderImages
    from ood_toolkit.extract import Extractor
    from ood_toolkit.registry import build_detector

    specs = {"vim": f"vim(dim={VIM_DIM})", "mahalanobis": "mahalanobis(absent='skip')", "rmds": "rmds(absent='skip')"}
    with tempfile.TemporaryDirectory() as cache:
        extractor = Extractor(Path(cache), batch_size=job.batch_size)

        def outputs(part: Images, name: str) -> Any:
            root = Path(os.path.commonpath([file.parent for file in part.files]))
            paths = [str(file.relative_to(root)) for file in part.files]
            labels = dict(zip(paths, part.labels, strict=True))
            images = FolderImages(root, name=name, paths=paths, labels=labels)
            return extractor.extract(loaded.classifier, loaded.transform, loaded.preprocessing, images).outputs

        fit, known, unknown = outputs(job.fit, "fit"), outputs(job.id, "id"), outputs(job.ood, "ood")
        scores = {}
        for name in DETECTORS:
            detector = build_detector(specs.get(name, name)).fit(fit)
            scores[name] = (detector(known), detector(unknown))
        return scores


def through_pytorch_ood(job: Job, loaded: Any) -> dict[str, Scores]:
    """A detector around the network, fitted on a loader and called on every batch."""
    from pytorch_ood import detector as peers

    network = loaded.classifier.model
    head = network.get_classifier()
    features = nn.Sequential(*(layer for name, layer in network.named_children() if name != "classifier"))
    makers: dict[str, Callable[[], Any]] = {
        "msp": lambda: peers.MaxSoftmax(network),
        "maxlogit": lambda: peers.MaxLogit(network),
        "energy": lambda: peers.EnergyBased(network),
        "entropy": lambda: peers.Entropy(network),
        "gen": lambda: peers.GEN(network, M=100),
        "react": lambda: peers.ReAct(features, head),
        "knn": lambda: peers.KNN(features),
        "vim": lambda: peers.ViM(features, d=VIM_DIM, w=head.weight.detach(), b=head.bias.detach()),
        "mahalanobis": lambda: peers.Mahalanobis(features),
        "rmds": lambda: peers.RMD(features),
    }
    fit, known, unknown = loaders(job, loaded)
    scores = {}
    for name in DETECTORS:
        detector = makers[name]().to("cpu")
        with torch.no_grad():
            if detector.requires_fit:
                detector.fit(fit)
            scores[name] = tuple(torch.cat([detector(x) for x, _ in loader]) for loader in (known, unknown))
    return scores


def through_oodeel(job: Job, loaded: Any) -> dict[str, Scores]:
    """A detector fitted to the network and a loader, and a score for each loader."""
    from oodeel import methods as peers

    network = loaded.classifier.model
    fit, known, unknown = loaders(job, loaded)
    makers: dict[str, Callable[[], Any]] = {
        "msp": lambda: peers.MLS(output_activation="softmax"),
        "maxlogit": lambda: peers.MLS(),
        "energy": lambda: peers.Energy(),
        "entropy": lambda: peers.Entropy(),
        "gen": lambda: peers.GEN(),
        "react": lambda: peers.Energy(use_react=True, react_quantile=0.9),
        "knn": lambda: peers.DKNN(),
        "vim": lambda: peers.VIM(princ_dims=VIM_DIM),
        "mahalanobis": lambda: peers.Mahalanobis(eps=0.0),
        "rmds": lambda: peers.RMDS(eps=0.0),
    }
    scores = {}
    for name in DETECTORS:
        detector = makers[name]()
        layers = {"head_layer_id": "classifier"}
        if name in ("knn", "vim", "mahalanobis", "rmds"):
            detector.fit(network, fit_dataset=fit, feature_layers_id=["global_pool"], **layers)
        elif name == "react":
            detector.fit(network, fit_dataset=fit, **layers)
        else:
            detector.fit(network, **layers)
        scores[name] = tuple(torch.as_tensor(detector.score(loader)[0]) for loader in (known, unknown))
    return scores


THROUGH = dict(zip(TOOLS, (through_ood_toolkit, through_pytorch_ood, through_oodeel), strict=True))


def read_job(options: argparse.Namespace) -> Job:
    """The same images for every tool: the first ones fit, the next ones are scored."""
    lines = [line.split("\t") for line in options.labels.read_text().splitlines()[1:]]
    files = [options.id / line[0] for line in lines]
    # pytorch-ood takes class numbers to be 0, 1, 2, … without a gap
    known = sorted({int(line[2]) for line in lines[: options.fit]})
    number = {label: place for place, label in enumerate(known)}
    labels = [number.get(int(line[2]), 0) for line in lines]
    first, last = options.fit, options.fit + options.images
    others = sorted(file for file in options.ood.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    others = others[:: max(1, len(others) // options.images)][: options.images]
    return Job(
        fit=Images(files[:first], labels[:first]),
        id=Images(files[first:last], labels[first:last]),
        ood=Images(others, [-1] * len(others)),
        batch_size=options.batch_size,
    )


def measure(options: argparse.Namespace) -> None:
    """One tool, in this process; what it found goes to a file."""
    import warnings

    from ood_toolkit.models import load_classifier

    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    job, loaded = read_job(options), load_classifier(MODEL)
    with torch.no_grad():
        loaded.classifier(torch.zeros(1, *loaded.input_size, dtype=torch.uint8))
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before, wall, cpu = resident("VmRSS"), time.perf_counter(), cpu_seconds()
    scores = THROUGH[options.tool](job, loaded)
    cost = {
        "wall": time.perf_counter() - wall,
        "cpu": cpu_seconds() - cpu,
        "peak": resident("VmHWM") - before,
        "images": [len(part.files) for part in (job.fit, job.id, job.ood)],
    }
    torch.save({"cost": cost, "scores": scores}, options.result)


def resident(field: str) -> float:
    """MiB of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


def cpu_seconds() -> float:
    """Of this process and those that it waited for."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def run(tool: str, options: argparse.Namespace, folder: Path) -> dict[str, Any] | str:
    """What a tool found in a process of its own, or why there is nothing."""
    result = folder / f"{tool}.pt"
    command = [sys.executable, __file__, *sys.argv[1:], "--tool", tool, "--result", str(result)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return torch.load(result, weights_only=True)


def table(found: dict[str, dict[str, Any] | str], options: argparse.Namespace) -> str:
    """The record, in Markdown."""
    from ood_toolkit.metrics import auroc

    good = {tool: each for tool, each in found.items() if not isinstance(each, str)}
    ours = good["ood-toolkit"]["cost"]
    counts = ours["images"]
    lines = [
        "# Ten detectors through this toolkit and its peers",
        "",
        f"{MODEL.removeprefix('demo:')}; {counts[0]} images fit, {counts[1]} ID and {counts[2]} OOD images are scored. "
        "Wall and CPU time from the loaded network to the last score, and peak memory above that start.",
        "",
        "    python benchmarks/against_peers.py --id IMAGES --labels LABELS --ood TEXTURES "
        f"--fit {options.fit} --images {options.images} --batch-size {options.batch_size} --threads {options.threads}",
        "",
        f"{cpu_name()}, {os.cpu_count()} cores, {options.threads} threads used, load {os.getloadavg()[0]:.1f} at the "
        f"end; Python {platform.python_version()}, torch {torch.__version__}; {datetime.now(UTC):%Y-%m-%d}.",
        "",
        "| tool | wall, s | × ours | CPU, s | × ours | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    for tool, each in found.items():
        if isinstance(each, str):
            lines.append(f"| {tool} | not run: {each} | | | | |")
            continue
        cost = each["cost"]
        ratios = f"{cost['wall']:.1f} | {cost['wall'] / ours['wall']:.1f} | {cost['cpu']:.1f} | "
        lines.append(f"| {tool} | {ratios}{cost['cpu'] / ours['cpu']:.1f} | {cost['peak']:.0f} |")
    lines += ["", f"| AUROC | {' | '.join(good)} |", "|---|" + "---|" * len(good)]
    for name in DETECTORS:
        cells = [f"{auroc(*each['scores'][name]):.4f}" for each in good.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", NOTES, ""])


NOTES = """\
ViM has 128 principal dimensions, GEN M = 100 and γ = 0.1, KNN k = 50, ReAct the 90th percentile, everywhere. With fewer
fit images than features the covariances of Mahalanobis, RMDS and ViM are singular, and each tool has its own way with
that; elsewhere the tools should agree to the digits shown. oodeel's Mahalanobis and RMDS run without its default
perturbation of the images (eps = 0), which would add a backward pass. Classes without a fit image are left out."""


def cpu_name() -> str:
    """As the kernel has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--id", type=Path, required=True, help="folder of in-distribution images")
    parser.add_argument("--labels", type=Path, required=True, help="file name, WordNet id, class number")
    parser.add_argument("--ood", type=Path, required=True, help="folder of other images")
    parser.add_argument("--fit", type=int, default=400, help="images to fit on")
    parser.add_argument("--images", type=int, default=250, help="ID images, and OOD images, to score")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--out", type=Path, help="Markdown file for the record")
    parser.add_argument("--tool", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tool:
        measure(options)
        return
    found: dict[str, dict[str, Any] | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tool in options.tools.split(","):
            found[tool] = run(tool, options, Path(folder))
            each = found[tool]
            print(tool, each if isinstance(each, str) else json.dumps(each["cost"]), file=sys.stderr, flush=True)
    text = table(found, options)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
