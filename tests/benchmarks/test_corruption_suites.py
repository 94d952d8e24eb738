"""Suites over all corruptions and perturbations, and what is counted along the videos of ImageNet-P."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ood_toolkit.benchmarks.imagenet_suites import imagenet_suite
from ood_toolkit.corruptions import AVERAGED, CORRUPTIONS
from ood_toolkit.datasets.classes import validation_labels
from tests.benchmarks.test_imagenet_shifted import measured, ranked
from tests.benchmarks.tiny import SPEC, photograph

WNIDS = ("n01440764", "n07753592")
INDICES = (0, 954)


def validation_images(root: Path) -> None:
    for index in INDICES:
        for number in [n for n, label in enumerate(validation_labels(), 1) if label == index][:3]:
            photograph(root / f"imagenet-1k/val/ILSVRC2012_val_{number:08d}.JPEG", number)


def corrupted_images(root: Path) -> None:
    """Two severities of fog and one of gaussian noise, two images each."""
    for place in ("imagenet-c/weather/fog/1", "imagenet-c/weather/fog/4", "imagenet-c/noise/gaussian_noise/2"):
        for number, wnid in enumerate(WNIDS):
            photograph(root / place / wnid / f"ILSVRC2012_val_{number:08d}.JPEG", 7 * number)


def test_the_whole_of_imagenet_c_has_a_part_for_every_corruption_and_severity_that_is_there(tmp_path: Path):
    validation_images(tmp_path)
    corrupted_images(tmp_path)
    suite = imagenet_suite("imagenet_c", tmp_path)
    names = ["imagenet-c-noise/gaussian_noise/2", "imagenet-c-weather/fog/1", "imagenet-c-weather/fog/4"]
    assert suite.name == "imagenet-c"
    assert [task.dataset for task in suite.tasks] == [*names, "imagenet-1k"] * 2
    assert suite.protocol == "full-1000way-like"
    assert "imagenet-c-weather/fog/4 has 2" in suite.caption
    absent = suite.caption.partition("Left out, because not found: ")[2].partition(".")[0].split(", ")
    everything = [f"{name}/{severity}" for name in AVERAGED for severity in range(1, 6)]
    assert absent == [place for place in everything if place not in ("gaussian_noise/2", "fog/1", "fog/4")]
    fog = imagenet_suite("imagenet-c-weather/fog", tmp_path)
    assert [task.dataset for task in fog.tasks[:2]] == names[1:]
    alone = imagenet_suite("imagenet-c-weather/fog/4", tmp_path)
    assert alone.tasks[0].id.images.fingerprint == fog.tasks[1].id.images.fingerprint  # one pass serves both runs
    with pytest.raises(ValueError, match="has no folder 'snow'"):
        imagenet_suite("imagenet-c-weather/snow", tmp_path)
    with pytest.raises(ValueError, match=r"named by its group, e\.g\. imagenet-c-weather/fog/3"):
        imagenet_suite("imagenet-c/fog/3", tmp_path)


def test_ones_own_imagenet_c_is_all_fifteen_one_group_or_one_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = types.ModuleType("corrupt_tta")
    package.corrupt, package.__version__ = lambda pixels, **_: 255 - pixels, "0"  # pyright: ignore
    monkeypatch.setitem(sys.modules, "corrupt_tta", package)
    validation_images(tmp_path)
    for name, corruptions in (("", AVERAGED), ("/extra", CORRUPTIONS["extra"]), ("/fog", ("fog",))):
        suite = imagenet_suite(f"imagenet-c-own{name}", tmp_path)
        expected = [f"imagenet-c-own/{corruption}/{n}" for corruption in corruptions for n in range(1, 6)]
        assert [task.dataset for task in suite.tasks] == [*expected, "imagenet-1k"] * 2
        assert suite.name == f"imagenet-c-own{name}"


def frames(root: Path, perturbation: str, lengths: tuple[int, ...]) -> dict[str, list[list[int]]]:
    """Frames of videos as images; the classes that the tiny model finds most likely, by arithmetic on the pixels."""
    orders: dict[str, list[list[int]]] = {}
    for video, length in enumerate(lengths):
        for number in range(length):
            path = root / f"imagenet-p/{perturbation}/{WNIDS[video % 2]}/val_{video}.mp4#{number:02d}.png"
            photograph(path, 3 * video + number // 2)
            with Image.open(path) as image:
                orders.setdefault(f"{video}", []).append(ranked(image)[:5])
    return orders


@pytest.mark.parametrize("perturbation", ["tilt", "gaussian_noise"])
def test_flips_and_distances_are_those_of_whole_videos_by_the_papers_rule(tmp_path: Path, perturbation: str):
    orders = frames(tmp_path, perturbation, (6, 6, 5, 6))
    flips: list[float] = []
    distances: list[float] = []
    for video in ("0", "1", "3"):  # the third one lacks a frame
        sequence = orders[video]
        changed = moved = 0
        for number in range(1, 6):
            earlier = sequence[0 if perturbation == "gaussian_noise" else number - 1]
            later = sequence[number]
            changed += earlier[0] != later[0]
            for i in range(1, 6):
                sigma = later.index(earlier[i - 1]) + 1 if earlier[i - 1] in later else 6
                moved += abs(i - sigma)
        flips.append(changed / 5)
        distances.append(moved / 5)
    folder = measured(f"imagenet-p/{perturbation}", tmp_path, tmp_path / "out", resamples=20)
    (found,) = steady(folder.path)
    assert (found["videos"], found["left_out"], found["model"]) == (3, 1, SPEC)
    assert found["flip"]["value"] == pytest.approx(sum(flips) / 3)
    assert found["top5_distance"]["value"] == pytest.approx(sum(distances) / 3)
    assert 0 < found["flip"]["value"] < 1
    assert found["flip"]["low"] <= found["flip"]["value"] <= found["flip"]["high"]


def test_frames_that_belong_to_no_video_give_no_flip_probability(tmp_path: Path):
    for number in range(3):
        photograph(tmp_path / f"imagenet-p/tilt/{WNIDS[0]}/frame_{number}.png", number)
    (found,) = steady(measured("imagenet-p/tilt", tmp_path, tmp_path / "out").path)
    assert found["videos"] == 0
    assert "<video>#<number>.<suffix>" in found["reason"]


def steady(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "robustness.json").read_text())["perturbations"]
