"""What a whole run costs, over a bare timm inference loop on the same images with the same settings.

    python benchmarks/end_to_end.py --id imagenet_val1300 --labels imagenet_val1300_labels.tsv --ood textures
    python benchmarks/end_to_end.py --id photos --ood strange --limit 200 --slices 2 --no-run   # a quick look

The images are cut into slices. On each slice the bare loop, the extraction and the extraction with each live detector
run one after the other, so that what else the machine does hits all of them alike; ratios are taken slice by slice, and
the median is printed with the range. Then `ood-bench --detectors one-pass` runs on everything, and what it took beyond
the extraction is set against the bare loop over as many images. CPU seconds are beside wall seconds: on a shared
machine, believe those.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ood_toolkit.batches import Transform
from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.command import run
from ood_toolkit.benchmarks.loading import load_models, usable_device
from ood_toolkit.cli.allocation import keep_freed_memory
from ood_toolkit.datasets import FolderImages, ImageSet
from ood_toolkit.detectors import LiveDetector, ODINDetector, ODINMahalanobisDetector
from ood_toolkit.extract import Extractor
from ood_toolkit.models import LoadedClassifier
from ood_toolkit.outputs import Outputs


@dataclass(frozen=True)
class Seconds:
    """Of CPU and of the wall clock."""

    cpu: float
    wall: float


def seconds(function: Callable[[], object]) -> Seconds:
    """What one call takes; a GPU has finished by then."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


class Decoded(torch.utils.data.Dataset):
    """The images of the bare loop."""

    def __init__(self, images: ImageSet, transform: Transform) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.transform(self.images.open(row))


def bare_loop(model: LoadedClassifier, images: ImageSet, choices: Choices) -> torch.Tensor:
    """Logits as one would compute them by hand: a DataLoader, normalisation on the device, the timm model itself."""
    network, device = model.classifier.model.eval(), model.classifier.device
    mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (model.transform.mean, model.transform.std))
    loader = torch.utils.data.DataLoader(
        Decoded(images, model.transform),
        batch_size=choices.batch_size,
        num_workers=choices.workers,
        pin_memory=device.type == "cuda",
    )
    logits = []
    amp = model.classifier.amp
    with torch.inference_mode(), torch.autocast(device.type, dtype=amp, enabled=amp is not None):
        for pixels in loader:
            inputs = (pixels.to(device, non_blocking=True).float() / 255 - mean) / std
            logits.append(network(inputs).cpu())
    return torch.cat(logits)


def extraction(
    model: LoadedClassifier, images: ImageSet, choices: Choices, live: Sequence[LiveDetector] = (), keep: str = ""
) -> Outputs:
    """The same images through the extractor, into a store of their own."""
    with tempfile.TemporaryDirectory() as cache:
        extractor = Extractor(Path(keep or cache), choices.batch_size, choices.workers)
        return extractor.extract(model.classifier, model.transform, model.preprocessing, images, live).outputs


def slices_of(folder: Path, count: int, limit: int | None) -> list[FolderImages]:
    """Every `count`-th image, `count` times."""
    ids = FolderImages(folder).ids[:limit]
    return [FolderImages(folder, name=f"slice {n}", paths=ids[n::count]) for n in range(count)]


def measured(model: LoadedClassifier, choices: Choices, images: Sequence[ImageSet]) -> dict[str, list[Seconds]]:
    """Seconds of every way through every slice, in turn."""
    plain = replace(model, classifier=model.classifier.with_taps(()))
    learned = extraction(plain, images[0], choices)
    labels = learned.logits.argmax(dim=1)
    fitted = ODINMahalanobisDetector(absent="skip").fit(learned.with_labels(labels))
    ways: dict[str, Callable[[ImageSet], object]] = {
        "bare loop": lambda part: bare_loop(plain, part, choices),
        "extraction": lambda part: extraction(plain, part, choices),
        "extraction with odin": lambda part: extraction(plain, part, choices, [ODINDetector()]),
        "extraction with odin_mahalanobis": lambda part: extraction(plain, part, choices, [fitted]),
    }
    found: dict[str, list[Seconds]] = {name: [] for name in ways}
    for number, part in enumerate(images):
        order = list(ways.items())
        for name, way in order[number % len(order) :] + order[: number % len(order)]:
            found[name].append(seconds(lambda way=way, part=part: way(part)))
    return found


def ratios(found: dict[str, list[Seconds]]) -> list[str]:
    """Rows of the table: median ratio over the bare loop, smallest and largest."""
    lines = ["| what | CPU s | wall s | over the bare loop, CPU | wall |", "|---|---|---|---|---|"]
    for name, times in found.items():
        cells = []
        for kind in ("cpu", "wall"):
            values = [getattr(t, kind) / getattr(base, kind) for t, base in zip(times, found["bare loop"], strict=True)]
            cells.append(f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        cpu, wall = (sum(getattr(t, kind) for t in times) for kind in ("cpu", "wall"))
        lines.append(f"| {name} | {cpu:.1f} | {wall:.1f} | {cells[0]} | {cells[1]} |")
    return lines


def whole_run(choices: Choices, bare: Seconds, images: int) -> list[str]:
    """The command itself, from an empty store; its extraction, and everything after it."""
    with tempfile.TemporaryDirectory() as place:
        choices = replace(choices, out=Path(place, "run"), cache=Path(place, "cache"))
        first = seconds(lambda: run(choices))
        again = seconds(lambda: run(replace(choices, out=Path(place, "again"))))
        stages = json.loads(Path(place, "again", "run.json").read_text(encoding="utf-8"))["stages"]
    slowest = sorted(((s, name) for name, s in stages.items() if name != "total"), reverse=True)[:8]
    return [
        "",
        f"`--detectors {choices.detectors} --calibrators {choices.calibrators} --resamples {choices.resamples}` on all "
        f"{images} images; the bare loop would take {bare.cpu:.1f} CPU s, {bare.wall:.1f} wall s:",
        "",
        "| what | CPU s | wall s | over the bare loop, CPU | wall |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {t.cpu:.1f} | {t.wall:.1f} | {t.cpu / bare.cpu:.2f} | {t.wall / bare.wall:.2f} |"
            for name, t in (
                ("whole run", first),
                ("the same again: load the model, read the store, fit, score, intervals", again),
            )
        ),
        "",
        "Slowest stages after the extraction, wall s: " + ", ".join(f"{name} {s:.2f}" for s, name in slowest),
    ]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--id", type=Path, required=True, help="folder of images")
    parser.add_argument("--labels", type=Path, help="their classes; by default from the folders")
    parser.add_argument("--ood", type=Path, required=True, help="folder of other images, for the whole run")
    parser.add_argument("--model", default="demo:efficientnet_lite0")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--amp", default="auto")
    parser.add_argument("--channels-last", default="auto", help="for both sides: auto, on, off")
    parser.add_argument("--batch-size", type=int, default=16, help="for both sides")
    parser.add_argument("--workers", type=int, default=0, help="for both sides")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--slices", type=int, default=5)
    parser.add_argument("--limit", type=int, help="only the first images")
    parser.add_argument("--detectors", default="one-pass", help="of the whole run")
    parser.add_argument("--calibrators", default="none", help="of the whole run")
    parser.add_argument("--resamples", type=int, default=1000, help="of the whole run")
    parser.add_argument("--no-run", action="store_true", help="leave out the whole run")
    arguments = parser.parse_args()
    keep_freed_memory()  # for both sides, as the command does
    torch.set_num_threads(arguments.threads)
    device = usable_device(arguments.device)
    choices = Choices(
        suite="folders",
        models=(arguments.model,),
        detectors=arguments.detectors,
        calibrators=arguments.calibrators,
        ensemble="none",
        folders={"id": arguments.id} | ({"labels": arguments.labels} if arguments.labels else {}),
        ood=(f"ood={arguments.ood}",),
        absent_classes="skip",
        device=device,
        amp=arguments.amp,
        channels_last=arguments.channels_last,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        resamples=arguments.resamples,
    )
    (model,), _ = load_models(choices, "folders", device, ())
    images = slices_of(arguments.id, arguments.slices, arguments.limit)
    gap = (bare_loop(model, images[0], choices) - extraction(model, images[0], choices).logits).abs().max().item()
    found = measured(model, choices, images)
    count = sum(map(len, images))
    where = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()
    print(
        f"{arguments.model}, {count} images in {len(images)} slices, batch {arguments.batch_size}, "
        f"{arguments.workers} workers, {torch.get_num_threads()} threads, channels last {arguments.channels_last}, "
        f"amp {model.classifier.amp}, {where}, torch {torch.__version__}. Largest gap of logits to the bare loop: "
        f"{gap:.1g}\n"
    )
    print("\n".join(ratios(found)))
    if not arguments.no_run:
        every = len(FolderImages(arguments.id)) + len(FolderImages(arguments.ood))
        cpu, wall = (sum(getattr(t, kind) for t in found["bare loop"]) * every / count for kind in ("cpu", "wall"))
        print("\n".join(whole_run(choices, Seconds(cpu, wall), every)))


if __name__ == "__main__":
    main()
