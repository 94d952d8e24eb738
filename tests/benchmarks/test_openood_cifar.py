"""OpenOOD's CIFAR-10 table on small trees: its own images and lists, or the files of the sets' authors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ood_toolkit.benchmarks import openood_cifar
from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.command import run
from ood_toolkit.benchmarks.imagenet import Learning
from ood_toolkit.benchmarks.imagenet_suites import imagenet_suite
from ood_toolkit.benchmarks.openood import near_far
from ood_toolkit.benchmarks.suite import Part

TITLES = {"cifar-100": "cifar100", "tiny-imagenet": "tin", "mnist": "mnist", "svhn": "svhn", "textures": "texture",
          "places365": "places365"}  # fmt: skip


class Means(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.head = nn.Linear(12, 10)
        self.head.weight.data = 8 * torch.randn(10, 12, generator=generator)
        self.head.bias.data = -self.head.weight.data.sum(dim=1) / 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.adaptive_avg_pool2d(images, 2).flatten(1))


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((8, 8)))).permute(2, 0, 1)


def network() -> tuple[nn.Module, Any]:
    return Means().eval(), pixels


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (2, 2, 3)).repeat(16, axis=0).repeat(16, axis=1)
    Image.fromarray(coarse.astype(np.uint8)).save(path)


def openoods_tree(root: Path, *, left_out: tuple[str, ...] = ()) -> None:
    """Lists and images as OpenOOD's download script lays them; every folder has an image that no list names."""
    listed = {
        **{split: ("cifar10", [f"{n % 10}" for n in range(count)])
           for split, count in (("train_cifar10", 40), ("val_cifar10", 20), ("test_cifar10", 30))},
        **{f"test_{title}": (title, ["-1"] * 12) for name, title in TITLES.items() if name not in left_out},
    }  # fmt: skip
    seed = 0
    for file, (folder, labels) in listed.items():
        lines = []
        for number, label in enumerate(labels):
            seed += 1
            path = f"{folder}/{file.partition('_')[0]}/{number:03d}.png"
            picture(root / "images_classic" / path, seed)
            lines.append(f"{path} {label}\n")
        picture(root / f"images_classic/{folder}/unlisted.png", 9)
        target = root / f"benchmark_imglist/cifar10/{file}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(lines))


def authors_files(root: Path) -> None:
    """CIFAR-10 test images, all of one class after the other, and CIFAR-100's."""
    draw = np.random.default_rng(0)
    for place, prefix in (("cifar-10/test_batch.bin", ()), ("cifar-100/test.bin", (1,))):
        records = [
            bytes([*prefix, number % 10]) + draw.integers(0, 256, 3072, dtype=np.uint8).tobytes()
            for number in range(100)
        ]
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(b"".join(records))


def as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {name: 30 if name == "cifar-10" else 12 for name in openood_cifar.SCORED}
    monkeypatch.setattr(openood_cifar, "SCORED", counts)


def names_of(part: Part | None) -> set[str]:
    assert part is not None
    return {part.images.ids[int(row)] for row in part.indices}


def test_openoods_lists_decide_what_is_scored_and_what_is_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    openoods_tree(tmp_path)
    as_published(monkeypatch)
    suite = imagenet_suite("openood_cifar10", tmp_path)
    anomalies = [task for task in suite.tasks if task.kind == "anomaly"]
    assert [task.dataset for task in anomalies] == [*openood_cifar.NEAR, *openood_cifar.FAR]
    for task in anomalies:
        assert names_of(task.ood) == {f"{TITLES[task.dataset]}/test/{number:03d}.png" for number in range(12)}
        assert task.ood is not None
        assert task.ood.labels.tolist() == [-1] * 12
        assert names_of(task.id) == {f"cifar10/test/{number:03d}.png" for number in range(30)}
    assert anomalies[0].id.labels.tolist() == [number % 10 for number in range(30)]
    assert names_of(suite.fit) == {f"cifar10/train/{number:03d}.png" for number in range(40)}
    assert names_of(suite.calibration) == {f"cifar10/val/{number:03d}.png" for number in range(20)}
    assert suite.protocol == "openood-1.5"
    few = imagenet_suite("openood-cifar10", tmp_path, learning=Learning(per_class=3))
    assert few.fit is not None
    assert few.fit.labels.bincount().tolist() == [3] * 10
    held = imagenet_suite("openood-cifar10", tmp_path, learning=Learning(source="validation"))
    both = [names_of(held.fit), names_of(held.calibration)]
    assert not both[0] & both[1]
    assert both[0] | both[1] == {f"cifar10/val/{number:03d}.png" for number in range(20)}


def test_sets_that_are_absent_and_counts_that_differ_are_named(tmp_path: Path):
    openoods_tree(tmp_path, left_out=("tiny-imagenet", "svhn"))
    suite = imagenet_suite("openood-cifar10", tmp_path)
    assert suite.protocol == "openood-1.5-like"
    assert "tiny-imagenet, svhn left out, because not found" in suite.caption
    assert "places365 has 12 images here, OpenOOD scores 35,195" in suite.caption
    (tmp_path / "images_classic/mnist/test/003.png").unlink()
    with pytest.raises(ValueError, match=r"1 images of OpenOOD's list test_mnist\.txt are not there, first 'mnist"):
        imagenet_suite("openood-cifar10", tmp_path)


def test_the_authors_own_files_will_do_and_the_re_collected_sets_stand_beside(tmp_path: Path):
    authors_files(tmp_path)
    (tmp_path / "cifar-10.1").mkdir()
    again = np.random.default_rng(1).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "cifar-10.1/cifar10.1_v6_data.npy", again)
    np.save(tmp_path / "cifar-10.1/cifar10.1_v6_labels.npy", np.arange(20) % 10)
    suite = imagenet_suite("openood-cifar10", tmp_path)
    assert [(task.kind, task.dataset) for task in suite.tasks] == [
        ("anomaly", "cifar-100"),
        ("misclassification", "cifar-10"), ("misclassification", "cifar-10.1"),
        ("calibration", "cifar-10"), ("calibration", "cifar-10.1"),
    ]  # fmt: skip
    scored, learned = names_of(suite.tasks[0].id), names_of(suite.fit) | names_of(suite.calibration)
    assert (len(scored), len(learned)) == (70, 30)  # 20% and 10% of each class are held out, as there is no train
    assert not scored & learned
    assert suite.views is not None
    assert suite.views.names[3] == "cat"
    whole = imagenet_suite("openood-cifar10", tmp_path, learning=Learning(source="none"))
    assert len(whole.tasks[0].id) == 100
    for number in range(1, 6):
        (tmp_path / f"cifar-10/data_batch_{number}.bin").write_bytes(
            (tmp_path / "cifar-10/test_batch.bin").read_bytes()
        )
    trained = imagenet_suite("openood-cifar10", tmp_path)
    assert trained.fit is not None
    assert trained.fit.images.name == "cifar-10-train"
    assert len(trained.tasks[0].id) == 90


def test_what_cannot_be_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"needs the test images of CIFAR-10\. Get it with: ood-bench data get"):
        imagenet_suite("openood-cifar10", tmp_path)
    authors_files(tmp_path)
    with pytest.raises(ValueError, match="ImageNetV2 has none of the classes of openood-cifar10"):
        imagenet_suite("openood-cifar10", tmp_path, learning=Learning(source="v2"))
    with pytest.raises(ValueError, match="no training images of CIFAR-10 lie below"):
        imagenet_suite("openood-cifar10", tmp_path, learning=Learning(source="train"))
    with pytest.raises(ValueError, match="about all 10 classes, so it has no protocol 'masked'"):
        imagenet_suite("openood-cifar10", tmp_path, protocol="masked")
    (tmp_path / "cifar-100/test.bin").unlink()
    with pytest.raises(ValueError, match="none of cifar-100, tiny-imagenet, mnist, svhn, textures, places365 lies"):
        imagenet_suite("openood-cifar10", tmp_path)


def test_a_run_scores_every_set_and_means_near_and_far_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    openoods_tree(tmp_path / "data")
    as_published(monkeypatch)
    choices = Choices(
        suite="openood-cifar10",
        models=[f"{__name__}:network"],
        data_root=tmp_path / "data",
        out=tmp_path / "run",
        cache=tmp_path / "cache",
        detectors="msp,energy",
        calibrators="temperature",
        ensemble="none",
        resamples=0,
        workers=0,
        device="cpu",
    )
    records = run(choices).records
    found = [r for r in records if (r.method, r.metric, r.task) == ("msp", "auroc", "anomaly")]
    aurocs = {r.dataset: r.value for r in found if r.value is not None}
    assert aurocs["cifar-100"] == pytest.approx(by_hand(tmp_path / "data", "cifar100"))
    assert aurocs["near-ood"] == pytest.approx(np.mean([aurocs[name] for name in openood_cifar.NEAR]))
    assert aurocs["far-ood"] == pytest.approx(np.mean([aurocs[name] for name in openood_cifar.FAR]))
    assert records[0].protocol == "openood-1.5"
    assert near_far([replace(r, dataset="cifar-100") for r in records[:1]]) == []
    with pytest.raises(ValueError, match="has 1000 classes; openood-cifar10 needs 10, in this order: airplane"):
        run(replace(choices, models=["tests.benchmarks.tiny:factory"]))


def by_hand(root: Path, title: str) -> float:
    """The share of pairs in which the OOD image has the lower top probability, from the files themselves."""
    model, confidences = Means(), []
    for folder, count in (("cifar10", 30), (title, 12)):
        values = []
        for number in range(count):
            with Image.open(root / f"images_classic/{folder}/test/{number:03d}.png") as image, torch.no_grad():
                values.append(float(model(pixels(image)[None].double().float() / 255).double().softmax(dim=1).max()))
        confidences.append(values)
    return float(
        np.mean([(known > other) + (known == other) / 2 for known in confidences[0] for other in confidences[1]])
    )
