"""The robustness views of real commands on small official trees, counted again with loops over the score file."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ood_toolkit import cli
from ood_toolkit.datasets.classes import class_list, imagenet_names, validation_labels
from ood_toolkit.records import read_records
from ood_toolkit.reporting.classes import class_table
from ood_toolkit.reporting.runs import Run
from ood_toolkit.scorefile import Column, ScoreFile
from tests.datasets.official import A_CLASSES, imagenet_a, jpeg

A_LIST = class_list("imagenet_a")
MASK = "imagenet-a:200"
MODELS = ["test_robustness:one", "test_robustness:two", "test_robustness:blind"]
PARTS = ["imagenet-a", "imagenet-a+clean", "imagenet-a-clean"]
Z = 1.959963984540054


class _Pooled(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.head = nn.Linear(27, 1000)
        self.head.weight.data = 5 * torch.randn(1000, 27, generator=generator)
        # around grey, the classes that are there, and tench, which is outside the mask, win often
        self.head.bias.data = -self.head.weight.data.sum(dim=1) / 2
        self.head.bias.data[[0, *(A_LIST[wnid] for wnid in A_CLASSES)]] += 6

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.adaptive_avg_pool2d(images, 3).flatten(1))


def _pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((9, 9)))).permute(2, 0, 1).float() / 255


def one() -> tuple[nn.Module, Any]:
    return _Pooled(1), _pixels


def two() -> tuple[nn.Module, Any]:
    return _Pooled(2), _pixels


def blind() -> tuple[nn.Module, Any]:
    """Never right: it calls everything a harvestman, of which ImageNet-A has no image here."""
    model = _Pooled(3)
    model.head.weight.data.zero_()
    model.head.bias.data.zero_()
    model.head.bias.data[A_LIST["n01770081"]] = 9.0
    return model, _pixels


def call(*words: object) -> int:
    sys.argv = ["ood-bench", *map(str, words)]
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of ImageNet-A as its tar unpacks, nine images each more, their validation images, two of O."""
    root = tmp_path_factory.mktemp("official")
    imagenet_a(root)
    seed = 100
    for wnid in A_CLASSES:
        for number in range(9):
            seed += 1
            jpeg(root / "imagenet-a" / wnid / f"0.{number:06d}_chime _ chime_0.{seed}.jpg", seed)
        numbers = [n for n, label in enumerate(validation_labels(), 1) if label == A_LIST[wnid]]
        for number in numbers[:20]:
            seed += 1
            jpeg(root / "imagenet-1k" / "val" / wnid / f"ILSVRC2012_val_{number:08d}.JPEG", seed)
    for wnid in ("n01443537", "n01770081"):
        jpeg(root / "imagenet-o" / wnid / "benthos_0.99.JPEG", seed)
        for number in [n for n, label in enumerate(validation_labels(), 1) if class_list("imagenet_o")[wnid] == label][
            :9
        ]:
            jpeg(root / "imagenet-1k" / "val" / wnid / f"ILSVRC2012_val_{number:08d}.JPEG", number)
    return root


@pytest.fixture(scope="module")
def folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one command with three models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        out = tmp_path_factory.mktemp("run")
        patch.setattr(sys, "argv", sys.argv)
        code = call(
            "--suite", "natural-adversarial", "--data-root", root, "--learn", "validation", "--detectors", "msp",
            "--calibrators", "none", "--ensemble", "none", "--resamples", 50, "--out", out, "--cache", out / "cache",
            *(word for model in MODELS for word in ("--model", model)),
        )  # fmt: skip
        assert code == 0
    return out


@pytest.fixture(scope="module")
def views(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "robustness.json").read_text())


class Sheet:
    """The score file as lists of rows: (id, label, prediction, right, right among five, confidence)."""

    def __init__(self, folder: Path) -> None:
        self.file = ScoreFile.load(folder / "scores.safetensors")

    def rows(self, model: str, part: str, mask: str) -> list[tuple[str, int, int, bool, bool, float]]:
        def column(kind: Any, method: str = "", of: str = model) -> list[Any]:
            return self.file.columns[Column(kind, of, method, part, mask)].tolist()

        labels = column("label", of="")
        rows = zip(
            self.file.ids[part],
            labels,
            column("prediction"),
            map(bool, column("correct", "none")),
            map(bool, column("correct5", "none")),
            column("confidence", "none"),
            strict=True,
        )
        return [row for row in rows if row[1] >= 0]


@pytest.fixture(scope="module")
def sheet(folder: Path) -> Sheet:
    return Sheet(folder)


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The two roots of (p − x)² = z² x (1 − x) / n."""
    p = hits / total
    a, b, c = 1 + Z * Z / total, -(2 * p + Z * Z / total), p * p
    root = math.sqrt(b * b - 4 * a * c)
    return max(0.0, (-b - root) / (2 * a)), min(1.0, (-b + root) / (2 * a))


def entry(views: dict[str, Any], key: str, **place: Any) -> dict[str, Any]:
    (found,) = [row for row in views[key] if all(row[name] == value for name, value in place.items())]
    return found


@pytest.mark.parametrize("mask", [MASK, ""])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("model", MODELS)
def test_accuracies_are_counted_image_by_image_with_and_without_the_mask(
    views: dict[str, Any], sheet: Sheet, model: str, part: str, mask: str
):
    right = right5 = total = 0
    for _, label, prediction, is_right, among_five, _ in sheet.rows(model, part, mask):
        assert is_right == (prediction == label)
        assert among_five or not is_right
        total += 1
        right += prediction == label
        right5 += among_five
    found = entry(views, "accuracy", model=model, dataset=part, mask=mask)
    assert found["images"] == total
    for key, hits in (("top1", right), ("top5", right5)):
        assert found[key]["value"] == hits / total
        assert (found[key]["low"], found[key]["high"]) == pytest.approx(wilson(hits, total), abs=1e-12)


def test_the_views_name_suite_protocol_and_transforms(views: dict[str, Any], folder: Path):
    record = next(iter(read_records(folder / "records.jsonl")))
    assert (views["suite"], views["protocol"]) == (record.suite, record.protocol)
    assert list(views["transforms"]) == MODELS
    assert views["transforms"][record.model] == record.transform != ""
    assert views["without"] == []  # no ensemble was asked for


def test_the_five_most_likely_are_those_of_the_logits(sheet: Sheet, root: Path):
    model, transform = one()
    classes = list(A_LIST.values())
    for mask, kept in ((MASK, classes), ("", list(range(1000)))):
        for name, label, _, _, among_five, confidence in sheet.rows(MODELS[0], "imagenet-a", mask):
            folder, _, image = name.partition("/")
            with Image.open(root / folder / image) as file, torch.no_grad():
                logits = model(transform(file.convert("RGB"))[None])[0]
            own = [(float(logits[index]), position) for position, index in enumerate(kept)]
            best = [position for _, position in sorted(own, reverse=True)[:5]]
            assert (label in best) == among_five
            total = sum(math.exp(value) for value, _ in own)
            assert confidence == pytest.approx(math.exp(max(own)[0]) / total, rel=1e-4)


def test_the_mask_of_the_accuracies_is_that_of_the_records(views: dict[str, Any], folder: Path):
    for record in read_records(folder / "records.jsonl"):
        if record.task == "calibration" and record.metric in ("accuracy", "accuracy5"):
            found = entry(views, "accuracy", model=record.model, dataset=record.dataset, mask=record.mask)
            assert found[{"accuracy": "top1", "accuracy5": "top5"}[record.metric]]["value"] == record.value
            assert found["images"] == record.positives


@pytest.mark.parametrize("mask", [MASK, ""])
@pytest.mark.parametrize("model", MODELS)
def test_the_drop_is_from_clean_to_adversarial_and_each_set_counts_once(
    views: dict[str, Any], sheet: Sheet, model: str, mask: str
):
    found = entry(views, "drop", model=model, mask=mask)  # imagenet-a+clean without clean is imagenet-a: not twice
    assert (found["clean"], found["adversarial"]) == ("imagenet-a-clean", "imagenet-a")
    hits, totals = {}, {}
    for part in ("imagenet-a-clean", "imagenet-a"):
        rows = sheet.rows(model, part, mask)
        hits[part], totals[part] = sum(row[3] for row in rows), len(rows)
    assert found["images"] == list(totals.values())
    clean, adversarial = (hits[part] / totals[part] for part in hits)
    assert found["clean_top1"]["value"] == clean
    assert found["adversarial_top1"]["value"] == adversarial
    assert found["drop"]["value"] == pytest.approx(clean - adversarial, abs=1e-15)
    assert found["relative"] == (pytest.approx((clean - adversarial) / clean) if clean else None)
    (l1, u1), (l2, u2) = (wilson(hits[part], totals[part]) for part in hits)
    low = clean - adversarial - math.hypot(clean - l1, u2 - adversarial)
    high = clean - adversarial + math.hypot(u1 - clean, adversarial - l2)
    assert (found["drop"]["low"], found["drop"]["high"]) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize("mask", [MASK, ""])
@pytest.mark.parametrize("part", PARTS)
def test_transfer_pairs_the_same_images_of_every_two_models(views: dict[str, Any], sheet: Sheet, part: str, mask: str):
    found = entry(views, "transfer", dataset=part, mask=mask)
    assert found["models"] == MODELS
    wrong = [{row[0] for row in sheet.rows(model, part, mask) if not row[3]} for model in MODELS]
    every = [row[0] for row in sheet.rows(MODELS[0], part, mask)]
    assert found["images"] == len(every)
    assert found["wrong"] == [len(names) for names in wrong]
    for a, of_a in enumerate(wrong):
        for b, of_b in enumerate(wrong):
            both = sum(name in of_b for name in of_a)
            cell = found["shares"][a][b]
            assert cell["value"] == both / len(of_a)
            assert (cell["low"], cell["high"]) == pytest.approx(wilson(both, len(of_a)), abs=1e-12)
        assert found["error_rates"][a]["value"] == len(of_a) / len(every)
    assert 0 < len(wrong[0] & wrong[1]) < len(wrong[0])  # the example is one where something can be got wrong


@pytest.mark.parametrize("mask", [MASK, ""])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_confidence_of_wrong_answers_is_that_of_the_wrong_rows(
    views: dict[str, Any], sheet: Sheet, model: str, part: str, mask: str
):
    confidences = [row[5] for row in sheet.rows(model, part, mask) if not row[3]]
    found = entry(views, "wrong_confidence", model=model, dataset=part, mask=mask)
    assert found["wrong"] == len(confidences)
    mean = sum(confidences) / len(confidences)
    assert found["mean"]["value"] == pytest.approx(mean)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in confidences) / (len(confidences) - 1))
    half = Z * deviation / math.sqrt(len(confidences))
    assert found["mean"]["low"] == pytest.approx(max(0.0, mean - half))
    assert found["median"] == pytest.approx(float(np.median(confidences)))
    for threshold, share in found["at_least"].items():
        hits = sum(value >= float(threshold) for value in confidences)
        assert share["value"] == hits / len(confidences)
        assert (share["low"], share["high"]) == pytest.approx(wilson(hits, len(confidences)), abs=1e-12)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("model", MODELS)
def test_classes_are_counted_by_their_own_index_name_and_wordnet_id(
    views: dict[str, Any], sheet: Sheet, model: str, part: str
):
    found = [row for row in views["classes"] if (row["model"], row["dataset"]) == (model, part)]
    masked = list(A_LIST.values())
    by_class: dict[int, list[tuple[bool, bool, float]]] = {}
    for name, label, _, right, among_five, confidence in sheet.rows(model, part, MASK):
        by_class.setdefault(masked[label], []).append((right, among_five, confidence))
        if "imagenet-a/" in name:
            assert list(class_list("imagenet1k"))[masked[label]] == name.split("/")[1]
    assert [row["class"] for row in found] == sorted(by_class)
    clean_too = set() if part == "imagenet-a" else {"n01770081"}  # a class of both sets, with validation images here
    assert {row["wnid"] for row in found} == {*A_CLASSES, *clean_too}
    for row in found:
        own = by_class[row["class"]]
        assert (row["mask"], row["images"], row["name"]) == (MASK, len(own), imagenet_names()[row["class"]])
        assert row["top1"]["value"] == sum(right for right, _, _ in own) / len(own)
        assert row["top5"]["value"] == sum(five for _, five, _ in own) / len(own)
        assert row["confidence"] == pytest.approx(sum(c for _, _, c in own) / len(own))
        assert (row["top1"]["low"], row["top1"]["high"]) == pytest.approx(
            wilson(sum(right for right, _, _ in own), len(own)), abs=1e-12
        )


def test_the_human_landmark_stands_beside_imagenet_a_with_its_source(views: dict[str, Any]):
    assert views["human"]["accuracy"] == 0.9
    assert views["human"]["dataset"] == "imagenet-a"
    assert "Natural Adversarial Examples" in views["human"]["source"]


def test_the_command_shows_the_views_and_the_report_names_masked_classes_right(
    folder: Path, views: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert call("table", folder, "--what", "robustness", "--format", "csv") == 0
    lines = capsys.readouterr().out.splitlines()
    shown = entry(views, "accuracy", model=MODELS[1], dataset="imagenet-a", mask="")["top5"]["value"]
    assert any("imagenet-a," in line and f"{shown:.3f}" in line for line in lines)
    assert any("humans" in line for line in lines)
    assert call("table", folder) == 0
    assert "Transfer of errors on imagenet-a, 200 classes" in capsys.readouterr().out
    assert call("table", folder, "--what", "nothing") == 2
    run = Run.open(folder)
    table = class_table(run, MODELS[0], "imagenet-a", names=run.facts["class_names"])
    assert table is not None
    assert {row.label for row in table.rows} == {imagenet_names()[A_LIST[wnid]] for wnid in A_CLASSES}
    by_name = {row["name"]: row["top1"]["value"] for row in views["classes"]
               if (row["model"], row["dataset"]) == (MODELS[0], "imagenet-a")}  # fmt: skip
    for header, cells in zip(table.rows, table.cells, strict=True):
        assert cells[1].value == by_name[header.label]


def test_a_mixture_alone_gives_the_drop_to_its_other_images(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(sys, "argv", sys.argv)
    common = ("--data-root", root, "--learn", "none", "--detectors", "msp", "--calibrators", "none", "--resamples", 0,
              "--model", MODELS[0], "--cache", tmp_path / "cache")  # fmt: skip
    assert call("--suite", "imagenet-a+clean", "--out", tmp_path / "mixed", *common) == 0
    mixed = json.loads((tmp_path / "mixed" / "robustness.json").read_text())
    sheet = Sheet(tmp_path / "mixed")
    found = entry(mixed, "drop", mask=MASK)
    assert found["adversarial"] == "imagenet-a+clean without imagenet-a-clean"
    alone = [row for row in sheet.rows(MODELS[0], "imagenet-a+clean", MASK) if row[0].startswith("imagenet-a/")]
    assert found["images"] == [69, len(alone)] == [69, 36]
    assert found["adversarial_top1"] == {"value": sum(row[3] for row in alone) / 36, "low": None, "high": None}
    assert mixed["level"] is None
    assert mixed["transfer"] == []
    assert call("--suite", "imagenet-a", "--out", tmp_path / "alone", *common) == 0
    assert json.loads((tmp_path / "alone" / "robustness.json").read_text())["drop"] == []  # nothing clean is scored
    assert call("--suite", "imagenet-o", "--out", tmp_path / "anomalies", *common) == 0
    assert not (tmp_path / "anomalies" / "robustness.json").exists()


def test_a_run_without_views_leaves_none_of_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "robustness.json").write_text("{}")
    words = ("--suite", "digits", "--detectors", "msp", "--calibrators", "none", "--ensemble", "none", "--resamples", 0)
    assert call(*words, "--out", tmp_path / "run", "--cache", tmp_path / "cache") == 0
    assert not (tmp_path / "run" / "robustness.json").exists()


def test_an_ensemble_has_the_views_of_its_own_pooled_answers(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(sys, "argv", sys.argv)
    code = call(
        "--suite", "imagenet-a+clean", "--data-root", root, "--learn", "validation", "--detectors", "msp",
        "--calibrators", "none", "--ensemble", "mean_probability,mean_logit", "--resamples", 0,
        "--model", MODELS[0], "--member", MODELS[1], "--out", tmp_path, "--cache", tmp_path / "cache",
    )  # fmt: skip
    assert code == 0
    views = json.loads((tmp_path / "robustness.json").read_text())
    name = f"ensemble[{MODELS[0]}, {MODELS[1]}]"
    assert [row["model"] for row in views["drop"] if row["mask"] == MASK] == [
        MODELS[0], f"{name} by mean_probability", f"{name} by mean_logit",
    ]  # fmt: skip
    assert views["without"] == []
    assert {row["model"] for row in views["classes"]} == {MODELS[0]}  # classes and transfer are of models alone
    sheet, networks = Sheet(tmp_path), [one(), two()]
    classes = list(A_LIST.values())
    for pool, mask, kept in (
        ("mean_probability", MASK, classes),
        ("mean_probability", "", list(range(1000))),
        ("mean_logit", MASK, classes),
    ):
        right, right5, sure = 0, 0, []
        ids, labels = sheet.file.ids["imagenet-a+clean"], sheet.file.columns[
            Column("label", "", "", "imagenet-a+clean", mask)
        ].tolist()  # fmt: skip
        for image, label in zip(ids, labels, strict=True):
            folder, _, path = image.partition("/")
            place = root / ("imagenet-1k/val" if folder == "imagenet-1k" else folder) / path
            with Image.open(place) as file, torch.no_grad():
                logits = torch.stack([model(pixels(file.convert("RGB"))[None])[0] for model, pixels in networks])
            cut = logits[:, kept].double()
            mean = cut.softmax(dim=1).mean(dim=0) if pool == "mean_probability" else cut.mean(dim=0).softmax(dim=0)
            order = mean.argsort(descending=True).tolist()
            right += order[0] == label
            right5 += label in order[:5]
            sure += [float(mean.max())] if order[0] != label else []
        found = entry(views, "accuracy", model=f"{name} by {pool}", dataset="imagenet-a+clean", mask=mask)
        assert (found["top1"]["value"], found["top5"]["value"]) == (right / len(ids), right5 / len(ids))
        wrong = entry(views, "wrong_confidence", model=f"{name} by {pool}", dataset="imagenet-a+clean", mask=mask)
        assert wrong["wrong"] == len(sure)
        assert wrong["mean"]["value"] == pytest.approx(sum(sure) / len(sure), rel=1e-4)
