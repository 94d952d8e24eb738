"""Suites on shifted sets, run as the command runs them, against the rules of the sets' authors, written once more."""

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.command import run
from ood_toolkit.benchmarks.imagenet import Learning
from ood_toolkit.benchmarks.imagenet_suites import imagenet_suite
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.datasets.classes import class_list, folder_map, validation_labels
from tests.benchmarks.tiny import SPEC, TWIN, Pooled, photograph, small

TWO_OF_OBJECTNET = {"chair": (423, 559, 765), "banana": (954,)}  # barber, folding and rocking chair
BY_INDEX = {index: wnid for wnid, index in class_list("imagenet1k").items()}


def measured(suite: str, root: Path, out: Path, **choices: Any) -> RunFolder:
    made = Choices(
        suite=suite,
        models=[SPEC],
        data_root=root,
        out=out / "run",
        cache=out / "cache",
        detectors="msp",
        calibrators="none",
        ensemble="none",
        learn="none",
        resamples=0,
        workers=0,
        device="cpu",
    )
    return run(Choices(**{**vars(made), **choices}))


def values(folder: RunFolder) -> dict[tuple[str, str, str], float | None]:
    return {(r.task, r.dataset, r.metric): r.value for r in folder.records}


def ranked(image: Any, seed: int = 1) -> list[int]:
    """Classes from the most to the least likely, by arithmetic on the pixels."""
    model = Pooled(seed)
    pixels = small(image).double().numpy() / 255
    features = pixels.reshape(3, 3, 8, 3, 8).mean(axis=(2, 4)).ravel()
    logits = model.head.weight.detach().double().numpy() @ features + model.head.bias.detach().double().numpy()
    return np.argsort(-logits).tolist()


def bordered(path: Path, seed: int) -> None:
    """A photograph in two pixels of red, which would change every answer."""
    photograph(path, seed)
    with Image.open(path) as inside:
        framed = Image.new("RGB", (28, 28), "red")
        framed.paste(inside.convert("RGB"), (2, 2))
    framed.save(path)


@pytest.fixture
def objectnet(tmp_path: Path) -> Path:
    seed = 0
    for folder in (*TWO_OF_OBJECTNET, "air_freshener"):
        for number in range(30):
            seed += 1
            bordered(tmp_path / f"objectnet-1.0/images/{folder}/{number:03d}.png", seed)
    for index in (423, 559, 954, 0):  # tench is no class of ObjectNet
        for number in [n for n, label in enumerate(validation_labels(), 1) if label == index][:10]:
            seed += 1
            photograph(tmp_path / f"imagenet-1k/val/ILSVRC2012_val_{number:08d}.JPEG", seed)
    return tmp_path


def favouring(monkeypatch: pytest.MonkeyPatch, classes: list[int]) -> None:
    """Lets the tiny model choose among these classes often."""
    original = Pooled.__init__

    def init(self: Pooled, seed: int = 1) -> None:
        original(self, seed)
        self.head.bias.data[classes] += 40

    monkeypatch.setattr(Pooled, "__init__", init)


def test_objectnet_counts_any_class_of_a_folder_as_its_authors_do(
    objectnet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    favouring(monkeypatch, [423, 559, 765, 954, 900])
    answers = []
    for folder, right in TWO_OF_OBJECTNET.items():
        for path in sorted((objectnet / "objectnet-1.0/images" / folder).iterdir()):
            with Image.open(path) as image:
                width, height = image.size
                answers.append((ranked(image.crop((2, 2, width - 2, height - 2))), set(right)))
    found = values(measured("objectnet", objectnet, tmp_path / "all"))
    top1 = np.mean([order[0] in right for order, right in answers])
    top5 = np.mean([bool(set(order[:5]) & right) for order, right in answers])
    assert 0 < top1 < top5
    assert found["calibration", "objectnet", "accuracy"] == pytest.approx(top1)
    assert found["calibration", "objectnet", "accuracy5"] == pytest.approx(top5)

    mask = {index for right in folder_map("objectnet").values() for index in right}
    masked = measured("objectnet", objectnet, tmp_path / "masked", protocol="masked")
    cut = [(next(index for index in order if index in mask), right) for order, right in answers]
    assert values(masked)["calibration", "objectnet", "accuracy"] == pytest.approx(np.mean([a in r for a, r in cut]))
    assert masked.records[0].mask == "objectnet:125"

    clean = []
    for path in sorted((objectnet / "imagenet-1k/val").iterdir()):
        label = validation_labels()[int(path.stem[-8:]) - 1]
        right = {559, 423, 765} if label in (559, 423) else {label}
        if label in mask:
            with Image.open(path) as image:
                clean.append(ranked(image)[0] in right)
    assert len(clean) == 30
    assert found["calibration", "imagenet-1k", "accuracy"] == pytest.approx(np.mean(clean))


def test_an_ensemble_is_right_where_its_own_answer_is_any_of_the_classes(
    objectnet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    favouring(monkeypatch, [423, 559, 765, 954])
    folder = measured("objectnet", objectnet, tmp_path, models=[SPEC, TWIN], ensemble="mean_probability", learn="none")
    right = []
    models = [Pooled(1), Pooled(2)]
    for name, classes in TWO_OF_OBJECTNET.items():
        for path in sorted((objectnet / "objectnet-1.0/images" / name).iterdir()):
            with Image.open(path) as image:
                pixels = small(image.crop((2, 2, 26, 26)))[None].float() / 255
            with torch.no_grad():
                mean = torch.stack([model(pixels).softmax(dim=1) for model in models]).mean(dim=0)
            right.append(int(mean.argmax()) in classes)
    ensembles = [r for r in folder.records if r.model.startswith("ensemble[") and r.metric == "accuracy"]
    assert {r.dataset: r.value for r in ensembles}["objectnet"] == pytest.approx(np.mean(right))
    views = json.loads((folder.path / "robustness.json").read_text())
    pooled = f"{ensembles[0].model} by mean_probability"
    assert views["without"] == []
    assert {row["model"] for row in views["accuracy"]} == set(views["transforms"]) == {SPEC, TWIN, pooled}
    place = (pooled, "objectnet", "")
    (of_pool,) = [row for row in views["accuracy"] if (row["model"], row["dataset"], row["mask"]) == place]
    assert of_pool["top1"]["value"] == pytest.approx(np.mean(right))
    assert 0 < np.mean(right) < 1


def test_a_domain_of_domainnet_is_judged_by_the_map_of_imagenet_d(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    favouring(monkeypatch, [647, 153, 160, 968])
    answers = []
    for number in range(40):
        folder = ("mug", "dog", "angel")[number % 3]
        path = tmp_path / f"domainnet/sketch/{folder}/sketch_{number}.jpg"
        photograph(path, number)
        photograph(tmp_path / f"domainnet/real/{folder}/real_{number}.jpg", 100 + number)
        right = {"mug": {647, 968}, "dog": {*range(151, 269), 273, 275}, "angel": set()}[folder]
        with Image.open(path) as image:
            answers += [ranked(image)[0] in right] if right else []
    found = values(measured("domainnet/sketch", tmp_path, tmp_path / "out"))
    assert len(answers) == 27
    assert 0 < np.mean(answers) < 1
    assert found["calibration", "domainnet/sketch", "accuracy"] == pytest.approx(np.mean(answers))
    with pytest.raises(ValueError, match="say which part of domainnet, e"):
        imagenet_suite("domainnet", tmp_path)
    with pytest.raises(ValueError, match="has no folder 'paper'"):
        imagenet_suite("domainnet/paper", tmp_path)


def test_imagenet_hard_counts_any_class_of_an_image(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow", reason="the optional package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    labels = [[0, 954], [70], [11, 0, 51], [954]] * 10
    images, answers = [], []
    for number, right in enumerate(labels):
        photograph(tmp_path / "one.png", number)
        images.append({"bytes": (tmp_path / "one.png").read_bytes(), "path": None})
        with Image.open(io.BytesIO(images[-1]["bytes"])) as image:
            answers.append(ranked(image)[0] in right)
    (tmp_path / "imagenet-hard/data").mkdir(parents=True)
    table = arrow.table({"image": images, "label": labels})
    parquet.write_table(table, tmp_path / "imagenet-hard/data/validation-00000-of-00001.parquet", row_group_size=7)
    folder = measured("imagenet-hard", tmp_path, tmp_path / "out")
    assert 0 < np.mean(answers) < 1
    assert values(folder)["calibration", "imagenet-hard", "accuracy"] == pytest.approx(np.mean(answers))
    assert "any of an image's classes" in folder.facts["caption"]


def test_every_frame_of_a_perturbation_is_scored(tmp_path: Path):
    av = pytest.importorskip("av", reason="the optional package av is not installed")
    for wnid in ("n01440764", "n07753592"):
        path = tmp_path / f"imagenet-p/tilt/{wnid}/ILSVRC2012_val_00000001.mp4"
        path.parent.mkdir(parents=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width = stream.height = 32
            for number in range(4):
                frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 60 * number, np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    folder = measured("imagenet-p/tilt", tmp_path, tmp_path / "out")
    assert len(folder.scores.ids["imagenet-p/tilt"]) == 8
    (steady,) = json.loads((folder.path / "robustness.json").read_text())["perturbations"]
    assert (steady["perturbation"], steady["videos"], steady["left_out"]) == ("tilt", 2, 0)
    whole = imagenet_suite("imagenet-p", tmp_path)
    assert [task.dataset for task in whole.tasks] == ["imagenet-p/tilt"] * 2
    assert whole.protocol == "full-1000way-like"
    assert "Left out, because not found: gaussian_noise, shot_noise," in whole.caption


@pytest.fixture
def inverted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for corrupt-tta."""
    package = types.ModuleType("corrupt_tta")
    package.corrupt = lambda pixels, severity, corruption_name: 255 - pixels  # pyright: ignore
    package.__version__ = "0"  # pyright: ignore
    monkeypatch.setitem(sys.modules, "corrupt_tta", package)


@pytest.mark.usefixtures("inverted")
def test_ones_own_imagenet_c_corrupts_the_images_that_are_scored_and_no_others(objectnet: Path, tmp_path: Path):
    suite = imagenet_suite("imagenet_c_own/fog/3", objectnet, learning=Learning(source="validation"))
    corrupted, clean = (task.id for task in suite.tasks[:2])
    assert (suite.name, corrupted.name, clean.name) == ("imagenet-c-own/fog/3", "imagenet-c-own/fog/3", "imagenet-1k")
    ids = [[part.images.ids[int(row)] for row in part.indices] for part in (corrupted, clean)]
    assert ids[0] == ids[1]
    assert suite.fit is not None
    assert suite.calibration is not None
    learned = {suite.fit.images.ids[int(row)] for part in (suite.fit, suite.calibration) for row in part.indices}
    assert (len(learned), len(ids[0])) == (12, 28)  # 20% and 10% of 10 of each of 4 classes
    assert not learned & set(ids[0])
    assert corrupted.images.open(0).size == (224, 224)
    found = values(measured("imagenet-c-own/fog/3", objectnet, tmp_path))
    answers = []
    for path in sorted((objectnet / "imagenet-1k/val").iterdir()):
        label = validation_labels()[int(path.stem[-8:]) - 1]
        with Image.open(path) as image:
            large = image.convert("RGB").resize((256, 256), Image.Resampling.BILINEAR).crop((16, 16, 240, 240))
            answers.append(ranked(Image.fromarray(255 - np.array(large)))[0] == label)
    assert found["calibration", "imagenet-c-own/fog/3", "accuracy"] == pytest.approx(np.mean(answers))
    for wrong in ("heavy", "6", "0"):
        with pytest.raises(ValueError, match=r"a severity is one of \(1, 2, 3, 4, 5\)"):
            imagenet_suite(f"imagenet-c-own/fog/{wrong}", objectnet)
    with pytest.raises(ValueError, match="no corruption is named 'rain'"):
        imagenet_suite("imagenet-c-own/rain/3", objectnet)


def test_what_a_suite_cannot_have_is_refused(objectnet: Path):
    with pytest.raises(ValueError, match="is about all 1000 classes, so it has no protocol 'masked'"):
        imagenet_suite("mos-imagenet", objectnet, protocol="masked")
    with pytest.raises(ValueError, match=r"none of inaturalist, sun, places, textures lies below"):
        imagenet_suite("mos-imagenet", objectnet)
    with pytest.raises(ValueError, match="is about ImageNet-A and ImageNet-O, not 'objectnet'"):
        imagenet_suite("objectnet", objectnet, protocol="official+1000way")
