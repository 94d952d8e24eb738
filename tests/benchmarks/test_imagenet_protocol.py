"""The rules of the ImageNet-A/O authors, written down once more and literally, against a run of the suites."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ood_toolkit import metrics
from ood_toolkit.benchmarks.imagenet import Learning
from ood_toolkit.benchmarks.measure import Bootstrap
from ood_toolkit.benchmarks.methods import parse_calibrators, parse_detectors
from ood_toolkit.benchmarks.natural_adversarial import natural_adversarial_suite
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.benchmarks.runner import Runner, Settings
from ood_toolkit.extract import Extractor
from ood_toolkit.models import Classifier, LoadedClassifier
from ood_toolkit.models.transforms import ImageTransform
from tests.benchmarks.official_rules import aurra, average_precision, fpr_at_95, pairs_won, rms
from tests.benchmarks.tiny import Pooled, photograph, to_tensor
from tests.datasets.official import as_shards, as_tar

PROTOCOL = Path(__file__).parents[2].parent / "shared" / "protocol"
A_CLASSES = ("n01498041", "n01531178", "n01770081", "n07753592", "n12267677")
O_CLASSES = ("n01443537", "n01704323", "n01770081", "n12267677")


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Class lists and validation labels, read here and not by the toolkit."""
    if not PROTOCOL.is_dir():
        pytest.skip("../shared/protocol is not beside this checkout")

    def table(name: str) -> list[list[str]]:
        lines = (PROTOCOL / name).read_text().splitlines()
        return [line.split("\t") for line in lines if not line.startswith("#")]

    return {
        "all": [row[0] for row in table("imagenet1k_classes.txt")],
        "a": [row[0] for row in table("imagenet_a_classes.txt")],
        "o": [row[0] for row in table("imagenet_o_classes.txt")],
        "validation": [row[1] for row in table("ilsvrc2012_val_labels.tsv")],
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, facts: dict[str, Any]) -> Path:
    """Folders as the official tars unpack: 150 images of ImageNet-A, 48 of ImageNet-O, validation images, READMEs."""
    root = tmp_path_factory.mktemp("official")
    seed = 0
    for wnid in A_CLASSES:
        for number in range(30):
            seed += 1
            name = f"0.{number:06d}_digital clock _ l'œuf & co_0.{seed:06d}.jpg"
            photograph(root / "imagenet-a" / wnid / name, seed, ("RGB", "L", "CMYK")[seed % 3])
    for wnid in O_CLASSES:
        for _ in range(12):
            seed += 1
            photograph(root / "imagenet-o" / wnid / f"benthos_0.{seed:06d}.JPEG", seed)
    for name in ("imagenet-a", "imagenet-o"):
        (root / name / "README.txt").write_text("about the set\n")
    for wnid in {*A_CLASSES, *O_CLASSES, "n01440764"}:  # tench is in neither set and must not count
        numbers = [n for n, label in enumerate(facts["validation"], 1) if label == wnid][:12]
        for number in numbers:
            seed += 1
            photograph(root / "imagenet-1k" / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", seed)
    return root


def run(root: Path, out: Path, suite: str, protocol: Any = "official", detectors: str = "msp") -> RunFolder:
    classifier = Classifier(Pooled().eval(), mean=(0.0,), std=(1.0,))
    classifier.check(torch.rand(2, 3, 24, 24))
    model = LoadedClassifier(
        classifier=classifier,
        spec="pooled",
        transform=ImageTransform(to_tensor, "24x24 pixels", (0.0,), (1.0,), (3, 24, 24)),
        class_names=None,
    )
    settings = Settings(
        models=[model],
        methods=parse_detectors(detectors),
        calibrators=parse_calibrators("none"),
        extractor=Extractor(cache=out / "cache", batch_size=64),
        bootstrap=Bootstrap(resamples=0),
    )
    folder = RunFolder(out / "run", {})
    Runner(
        natural_adversarial_suite(suite, root, protocol=protocol, learning=Learning(source="none")), settings, folder
    ).run()
    return folder


def table(folder: RunFolder) -> dict[tuple[str, str, str], float | None]:
    return {(r.task, r.dataset, r.metric): r.value for r in folder.records}


# ---- the rules, literally ----


def confidence_and_class(path: Path, classes: list[str], facts: dict[str, Any]) -> tuple[float, int]:
    """Confidence and local prediction: the logits of `classes` alone, then the softmax, then its maximum."""
    model = Pooled()
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    features = pixels.reshape(3, 8, 3, 8, 3).mean(axis=(1, 3)).transpose(2, 0, 1).ravel()
    logits = model.head.weight.detach().double().numpy() @ features + model.head.bias.detach().double().numpy()
    kept = np.array([value for value, wnid in zip(logits, facts["all"], strict=True) if wnid in set(classes)])
    exponentials = np.exp(kept - kept.max())
    softmax = exponentials / exponentials.sum()
    return float(softmax.max()), int(softmax.argmax())


def judged(paths: list[tuple[Path, str]], classes: list[str], facts: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    rows = [(*confidence_and_class(path, classes, facts), classes.index(wnid)) for path, wnid in paths]
    return np.array([row[0] for row in rows]), np.array([row[1] == row[2] for row in rows])


def adversarial(root: Path) -> list[tuple[Path, str]]:
    return [(path, path.parent.name) for path in sorted((root / "imagenet-a").glob("n*/*.jpg"))]


def clean(root: Path, classes: list[str], facts: dict[str, Any]) -> list[tuple[Path, str]]:
    found = []
    for path in sorted((root / "imagenet-1k" / "val").iterdir()):
        wnid = facts["validation"][int(path.stem.rpartition("_")[2]) - 1]
        if wnid in classes:
            found.append((path, wnid))
    return found


# ---- the laws ----


def test_the_transcription_gives_the_authors_numbers(facts: dict[str, Any]):
    for vector in json.loads((PROTOCOL / "official_metric_vectors.json").read_text())["vectors"]:
        draw = np.random.default_rng(vector["seed"])
        if vector["kind"] == "calibration":
            confidence = draw.beta(2, 1.5, vector["n"])
            correct = (draw.random(vector["n"]) < confidence**2).astype(np.int64)
            assert rms(confidence, correct, drop_last=True) == pytest.approx(vector["rms_official_drops_last_bin"])
            assert rms(confidence, correct, drop_last=False) == pytest.approx(vector["rms_all_bins"])
            assert aurra(confidence, correct) == pytest.approx(vector["aurra"])
        else:
            score = -np.concatenate([draw.beta(5, 1.2, vector["ni"]), draw.beta(4, 1.5, vector["no"])])
            positive = np.arange(len(score)) >= vector["ni"]
            assert average_precision(score, positive) == pytest.approx(vector["aupr_official_average_precision"])
            assert fpr_at_95(score, positive) == pytest.approx(vector["fpr95_official"])


def test_a_run_gives_the_numbers_of_the_rules(root: Path, facts: dict[str, Any], tmp_path: Path):
    measured = table(run(root, tmp_path, "natural-adversarial"))

    for name, paths in (
        ("imagenet-a", adversarial(root)),
        ("imagenet-a-clean", clean(root, facts["a"], facts)),
        ("imagenet-a+clean", adversarial(root) + clean(root, facts["a"], facts)),
    ):
        confidence, correct = judged(paths, facts["a"], facts)
        assert 0 < correct.sum() < len(correct)
        assert measured["calibration", name, "accuracy"] == pytest.approx(correct.mean())
        assert measured["calibration", name, "aurra"] == pytest.approx(aurra(confidence, correct), abs=1e-6)
        if len(correct) >= 100:
            for metric, drop_last in (("rms", False), ("rms_official", True)):
                expected = rms(confidence, correct, drop_last=drop_last)
                assert measured["calibration", name, metric] == pytest.approx(expected, abs=1e-5)
        if name != "imagenet-a-clean":
            wrong = average_precision(-confidence, ~correct)
            assert measured["misclassification", name, "aupr_error"] == pytest.approx(wrong, abs=1e-6)
            assert measured["misclassification", name, "auroc"] == pytest.approx(
                pairs_won(-confidence, ~correct), abs=1e-6
            )

    inside = [path for path, _ in clean(root, facts["o"], facts)]
    outside = sorted((root / "imagenet-o").glob("n*/*.JPEG"))
    assert (len(inside), len(outside)) == (60, 48)  # banana is in both lists
    score = -np.array([confidence_and_class(path, facts["o"], facts)[0] for path in inside + outside])
    positive = np.arange(len(score)) >= len(inside)
    assert measured["anomaly", "imagenet-o", "aupr"] == pytest.approx(average_precision(score, positive), abs=1e-6)
    assert measured["anomaly", "imagenet-o", "auroc"] == pytest.approx(pairs_won(score, positive), abs=1e-6)
    official = metrics.fpr_at_tpr_official(torch.from_numpy(score[~positive]), torch.from_numpy(score[positive]))
    assert float(official) == pytest.approx(fpr_at_95(score, positive))


def test_all_1000_classes_count_where_the_protocol_says_so(root: Path, facts: dict[str, Any], tmp_path: Path):
    both = table(run(root, tmp_path / "both", "natural-adversarial", "official+1000way"))
    confidence, correct = judged(adversarial(root), facts["all"], facts)
    assert both["calibration", "imagenet-a 1000-way", "accuracy"] == pytest.approx(correct.mean())
    assert both["calibration", "imagenet-a 1000-way", "aurra"] == pytest.approx(aurra(confidence, correct), abs=1e-6)
    masked = judged(adversarial(root), facts["a"], facts)[1]
    assert both["calibration", "imagenet-a", "accuracy"] == pytest.approx(masked.mean())
    assert masked.mean() > correct.mean()

    paths = [path for path, _ in clean(root, facts["all"], facts)] + sorted((root / "imagenet-o").glob("n*/*.JPEG"))
    score = -np.array([confidence_and_class(path, facts["all"], facts)[0] for path in paths])
    positive = np.arange(len(score)) >= len(paths) - 48
    whole = table(run(root, tmp_path / "whole", "imagenet-o", "vim-1000way"))
    assert whole["anomaly", "imagenet-o", "auroc"] == pytest.approx(pairs_won(score, positive), abs=1e-6)


def test_the_scores_are_the_same_from_folders_tars_and_shards(root: Path, facts: dict[str, Any], tmp_path: Path):
    tars, shards = tmp_path / "tars", tmp_path / "shards"
    for name in ("imagenet-a", "imagenet-o"):
        as_tar(root / name, tars / f"{name}.tar")
        files = [
            p.relative_to(root / name).as_posix()
            for p in (root / name).rglob("*")
            if p.suffix != ".txt" and p.is_file()
        ]
        local = facts[name[-1]]
        as_shards(root / name, shards / name, {f: local.index(f[:9]) for f in files}, per_shard=40, field="cls")
    as_tar(root / "imagenet-1k" / "val", tars / "ILSVRC2012_img_val.tar", top=".")
    (shards / "imagenet-1k" / "val").mkdir(parents=True)
    for path in (root / "imagenet-1k" / "val").iterdir():
        folder = shards / "imagenet-1k" / "val" / facts["validation"][int(path.stem.rpartition("_")[2]) - 1]
        folder.mkdir(exist_ok=True)
        (folder / path.name).write_bytes(path.read_bytes())
    specs = "msp,energy,gradnorm"
    first, *others = [
        table(run(where, tmp_path / str(number), "natural-adversarial", detectors=specs))
        for number, where in enumerate((root, tars, shards))
    ]
    assert len(first) > 40
    for other in others:
        assert other.keys() == first.keys()
        assert all(other[key] == pytest.approx(first[key], abs=1e-12) for key in first)
