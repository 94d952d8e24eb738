"""A dry run against the real one: nothing is written, and its figures are what the run then does."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ood_toolkit.benchmarks.plan import require_usable
from ood_toolkit.datasets import FolderImages, JoinedImages, SubsetImages
from ood_toolkit.datasets.archives import TarImages
from ood_toolkit.datasets.sizes import file_bytes
from tests.command_line import Bench
from tests.datasets.official import as_tar, imagenet_a


def network(classes: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes))


def _pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((12, 12)))).permute(2, 0, 1)


def one() -> tuple[nn.Module, Any]:
    return network(), _pixels


def two() -> tuple[nn.Module, Any]:
    return network(seed=1), _pixels


class _Stops(nn.Module):
    """Presses Ctrl-C after so many images."""

    after = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.seen = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        if self.seen > self.after:
            raise KeyboardInterrupt
        return self.inner(images)


def stops() -> tuple[nn.Module, Any]:
    return _Stops(), _pixels


class _Slow(nn.Module):
    clock = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        _Slow.clock += 0.02 * len(images)
        return self.inner(images)


def slow() -> tuple[nn.Module, Any]:
    """20 ms an image, by its own clock."""
    return _Slow(), _pixels


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 known images of four classes: more than one shard; 40 strange ones."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    places = [f"known/{name}/{number}.png" for name in "abcd" for number in range(150)]
    for place in [*places, *(f"strange/{number}.png" for number in range(40))]:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(root / place)
    return root


def words(photos: Path, place: Path, *more: object, models: tuple[str, ...] = ("one",)) -> tuple[object, ...]:
    return ("--suite", "folders", *(word for m in models for word in ("--model", f"test_plan:{m}")),
            "--id", photos / "known", "--ood", f"strange={photos / 'strange'}", "--calibrators", "temperature",
            "--workers", 0, "--resamples", 0, "--out", place / "run", "--cache", place / "cache", *more)  # fmt: skip


def planned(bench: Bench, *arguments: object) -> dict[str, Any]:
    result = bench(*arguments, "--dry-run", "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def computed(err: str, model: str) -> int:
    """How many images the run says that a model has seen, over all passes."""
    found = re.findall(rf"^{re.escape(model)}: (\d+) images of .* images/s\)$", err, flags=re.MULTILINE)
    return sum(map(int, found))


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(f.relative_to(folder)): (f.stat().st_size, f.stat().st_mtime_ns) for f in folder.rglob("*")}


MANY = ("--detectors", "msp,vim,gradnorm,odin,odin_mahalanobis,ash_s_map", "--ensemble", "mean_probability")


def test_a_dry_run_writes_nothing_and_the_run_does_what_it_said(bench: Bench, photos: Path, tmp_path: Path):
    arguments = words(photos, tmp_path, *MANY, models=("one", "two"))
    plan = planned(bench, *arguments)
    assert list(tmp_path.iterdir()) == []  # neither --out nor --cache
    run = bench(*arguments)
    assert run.code == 0, run.err
    for model in plan["models"]:
        assert (model["images"], model["stored"], model["again"]) == (640, 0, 640)  # odin_mahalanobis needs a second
        assert computed(run.err, model["model"]) == model["images"] + model["again"]
    taken = on_disk(tmp_path / "cache")
    assert plan["store_bytes"] == pytest.approx(taken, rel=0.05, abs=4096)
    assert sum(model["store_bytes"] for model in plan["models"]) == plan["store_bytes"]
    assert on_disk(tmp_path / "run") <= plan["out_bytes"]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert set(plan["parts"].values()) == set(facts["parts"].values())
    scored = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    alone = {row["method"] for row in scored if row["task"] != "calibration" and "ensemble" not in row["model"]}
    assert plan["detectors"] == len(alone) == 6
    assert [task[:2] for task in plan["scored"]] == [[t["kind"], t["dataset"]] for t in facts["tasks"]]


def test_after_the_run_everything_is_stored_and_takes_no_time(bench: Bench, photos: Path, tmp_path: Path):
    arguments = words(photos, tmp_path, "--detectors", "msp,odin")
    assert bench(*arguments).code == 0
    before = snapshot(tmp_path)
    plan = planned(bench, *arguments)
    assert snapshot(tmp_path) == before
    (model,) = plan["models"]
    assert (model["images"], model["stored"], model["store_bytes"], plan["seconds"]) == (0, 640, 0, 0.0)
    assert "everything is in the store" in plan["how"]
    more = planned(bench, *words(photos, tmp_path, "--detectors", "msp,odin,odin(eps=0.01)"))
    assert more["models"][0]["images"] == 640  # one more detector must run the model
    assert 0 < more["store_bytes"] < 640 * 8 + 4096


def test_a_tap_that_no_single_model_has_costs_no_pass_over_stored_images(bench: Bench, photos: Path, tmp_path: Path):
    assert bench(*words(photos, tmp_path, "--detectors", "msp")).code == 0
    arguments = words(photos, tmp_path, "--detectors", "one-pass,-weiper")
    plan = planned(bench, *arguments)
    (model,) = plan["models"]
    assert (model["images"], model["stored"], model["store_bytes"]) == (0, 640, 0)
    assert "needs the tap member_logits" in plan["left_out"]["expected_entropy"]
    run = bench(*arguments)
    assert run.code == 0, run.err
    assert computed(run.err, "test_plan:one") == 0
    assert "no forward pass" in run.err


def test_the_plan_has_no_empty_heading_and_counts_one_thing_as_one(bench: Bench, photos: Path, tmp_path: Path):
    arguments = [*words(photos, tmp_path, "--detectors", "msp"), "--dry-run"]
    arguments[arguments.index("temperature")] = "none"
    text = bench(*arguments).out
    assert "Fitted" not in text
    assert "Scored by 1 detector and 1 calibrator\n" in text


def test_ensembles_are_fitted_only_where_they_learn_and_there_is_something_to_pool(
    bench: Bench, photos: Path, tmp_path: Path
):
    pools = ("--detectors", "msp", "--ensemble", "mean_probability,stacked_probability")
    alone = planned(bench, *words(photos, tmp_path, *pools))
    both = planned(bench, *words(photos, tmp_path, *pools, models=("one", "two")))
    assert alone["fitted"] == {"calibration": ["temperature"]}
    assert both["fitted"] == {"calibration": ["temperature", "stacked_probability"]}


def test_of_several_ranks_the_first_alone_prints_the_plan(
    bench: Bench, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    printed = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        printed.append(bench(*words(photos, tmp_path, "--detectors", "msp"), "--dry-run"))
    assert [result.code for result in printed] == [0, 0]
    assert printed[0].out.startswith("Plan of folders")
    assert printed[1].out == ""


def test_what_an_interrupted_run_kept_is_not_planned_again(
    bench: Bench, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = words(photos, tmp_path, "--detectors", "msp", models=("stops",))
    monkeypatch.setattr(_Stops, "after", 560)
    assert bench(*arguments).code == 130
    monkeypatch.setattr(_Stops, "after", 10**9)
    plan = planned(bench, *arguments)
    (model,) = plan["models"]
    assert (model["images"], model["stored"]) == (88 + 40, 512)  # the second shard of the known, and the strange
    run = bench(*arguments)
    assert computed(run.err, "test_plan:stops") == 88 + 40


def test_the_time_is_that_of_the_model_on_these_images(
    bench: Bench, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ood_toolkit.benchmarks.plan.time", SimpleNamespace(perf_counter=lambda: _Slow.clock))
    plan = planned(bench, *words(photos, tmp_path, "--detectors", "msp", models=("slow",)))
    assert plan["seconds"] == pytest.approx(640 * 0.02)
    assert "ms each on cpu" in plan["how"]
    assert "fitting, scoring and intervals come on top" in plan["how"]


def test_the_bytes_to_read_are_those_of_the_files(bench: Bench, photos: Path, tmp_path: Path):
    plan = planned(bench, *words(photos, tmp_path, "--detectors", "msp"))
    sizes = {s["name"]: (s["images"], s["bytes"]) for s in plan["sets"]}
    assert sizes == {"id": (600, on_disk(photos / "known")), "strange": (40, on_disk(photos / "strange"))}


def test_a_set_has_the_same_bytes_as_folder_tar_part_and_union(tmp_path: Path):
    folder = FolderImages(imagenet_a(tmp_path))
    tar = TarImages(as_tar(tmp_path / "imagenet-a", tmp_path / "a.tar"))
    sizes = [(folder.root / name).stat().st_size for name in folder.ids]
    assert file_bytes(folder) == file_bytes(tar) == sum(sizes)
    assert file_bytes(SubsetImages(folder, [4, 1])) == sizes[4] + sizes[1]
    joined = JoinedImages([SubsetImages(folder, [2, 3], name="x"), tar], name="both")
    assert file_bytes(joined) == sizes[2] + sizes[3] + sum(sizes)
    assert file_bytes(joined, [1, 2, 10]) == sizes[3] + sizes[0] + sizes[8]


def test_the_plan_is_read_by_people(bench: Bench, photos: Path, tmp_path: Path):
    result = bench(*words(photos, tmp_path, "--detectors", "msp,vim"), "--dry-run")
    assert result.code == 0, result.err
    for line in (
        "Plan of folders (default); nothing was written.",
        "  test_plan:one: 640 images now, 0 are in the store",
        "  on fit: vim",
        "  on calibration: temperature",
        "  anomaly: strange, 340 images",
    ):
        assert line in result.out
    assert f"{tmp_path / 'run'}: up to" in result.out


def test_what_the_run_would_refuse_the_plan_refuses(bench: Bench, photos: Path, tmp_path: Path):
    refused = bench(*words(photos, tmp_path, "--detectors", "knn(k=400)"), "--dry-run")
    assert (refused.code, refused.out) == (2, "")
    assert "k=400 is more than the 180 training rows" in refused.err
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = bench(*words(photos, blocked, "--detectors", "msp"), "--dry-run")
    assert result.code == 2
    assert "is no folder" in result.err
    with pytest.raises(ValueError, match="choose --out DIR"):
        require_usable(blocked / "deeper" / "run", "--out")


def test_what_all_leaves_out_is_in_the_plan_with_the_reason(bench: Bench, photos: Path, tmp_path: Path):
    plan = planned(bench, *words(photos, tmp_path, "--detectors", "one-pass", "--fit-fraction", 0))
    assert plan["left_out"]["mahalanobis"].startswith("needs fit data, but this run has none")
    assert "fit" not in plan["fitted"]
    run = bench(*words(photos, tmp_path, "--detectors", "one-pass", "--fit-fraction", 0))
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    found = {r["method"] for r in records if r["task"] == "anomaly" and r["value"] is not None}
    assert run.code == 0
    assert plan["detectors"] == len(found)
