import csv
import math
from pathlib import Path

import pytest

from ood_toolkit.benchmarks.choices import Choices
from ood_toolkit.benchmarks.command import run
from ood_toolkit.benchmarks.published import (
    OPENOOD_NAMES,
    _openood,
    compare_accuracy,
    published_accuracy,
    published_openood,
)
from ood_toolkit.registry import detector_classes
from tests.datasets.official import imagenet_a

PROTOCOL = Path(__file__).parents[2].parent / "shared" / "protocol"


@pytest.mark.parametrize(("name", "dataset"), [("imagenet_a", "imagenet-a"), ("imagenet_a_clean", "imagenet-a-clean")])
def test_every_number_of_timms_tables_is_there(name: str, dataset: str):
    if not PROTOCOL.is_dir():
        pytest.skip("../shared/protocol is not beside this checkout")
    with (PROTOCOL / f"timm_{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1556
    for row in rows:
        for top in (1, 5):
            found = published_accuracy(row["model"], dataset, image_size=int(row["img_size"]), top=top)  # pyright: ignore
            assert found == pytest.approx(float(row[f"top{top}"]) / 100, abs=1e-9)


def test_the_numbers_known_by_heart():
    assert published_accuracy("timm:tf_efficientnet_lite0.in1k", "imagenet-a") == 0.03053
    assert published_accuracy("tf_efficientnet_lite0.in1k", "imagenet-a-clean") == 0.911
    assert published_accuracy("resnet50.tv_in1k", "imagenet-a") is None  # the set was filtered with it
    assert published_accuracy("resnet50.tv_in1k", "imagenet-a-clean") == 0.9189
    assert published_accuracy("no such model", "imagenet-a") is None
    assert published_accuracy("resnet50.tv2_in1k", "imagenet-a", image_size=224) == 0.14387


def test_a_name_without_a_tag_means_what_timm_loads_by_default():
    timm = pytest.importorskip("timm")
    tag = timm.create_model("resnet18", pretrained=False).pretrained_cfg["tag"]
    assert published_accuracy("timm:resnet18", "imagenet-a") == published_accuracy(f"resnet18.{tag}", "imagenet-a")
    assert published_accuracy("timm:resnet18", "imagenet-a") is not None
    assert published_accuracy("timm:resnet18.tv_in1k", "imagenet-a") != published_accuracy(
        "timm:resnet18", "imagenet-a"
    )
    assert published_accuracy("torchvision:resnet18", "imagenet-a") is None


def test_a_warning_comes_beyond_the_sampling_error_and_not_within():
    expected = 0.03053
    error = 1.96 * math.sqrt(expected * (1 - expected) / 7500)
    for sign in (-1, 1):
        line, warning = compare_accuracy(
            "tf_efficientnet_lite0.in1k", "imagenet-a", expected + sign * 0.99 * error, 7500
        )
        assert line.startswith("timm reports 3.05% for tf_efficientnet_lite0.in1k on imagenet-a; measured ")
        assert warning == ""
        warning = compare_accuracy("tf_efficientnet_lite0.in1k", "imagenet-a", expected + sign * 1.01 * error, 7500)[1]
        assert "the sampling error is 0.39%" in warning
    assert compare_accuracy("no such model", "imagenet-a", 0.5, 7500) == ("", "")


def test_the_leaderboard_is_found_by_our_names_and_theirs():
    assert published_openood("torchvision:resnet50", "msp", "near-ood") == 0.7602
    assert published_openood("ResNet-50", "react(percentile=90)", "far-ood") == 0.9367
    assert published_openood("ViT-B/16", "RMDS++", "far-ood") == 0.9299
    assert published_openood("RegNet-Y-16GF", "nnguide", "far-ood") == 0.9717
    assert published_openood("ViT-B/16", "odin", "near-ood") is None


def test_every_name_of_the_map_is_a_detector_and_a_row():
    rows = {method for method, _ in _openood()}
    assert set(OPENOOD_NAMES.values()) <= rows
    assert set(OPENOOD_NAMES) <= set(detector_classes())


def test_weights_that_were_drawn_stand_beside_no_published_number(tmp_path: Path):
    pytest.importorskip("timm")
    imagenet_a(tmp_path)
    said: list[str] = []
    asked = Choices(
        suite="imagenet-a",
        models=["timm:resnet18"],
        pretrained=False,
        data_root=tmp_path,
        detectors="msp",
        calibrators="none",
        learn="none",
        out=tmp_path / "run",
        cache=tmp_path / "cache",
        resamples=0,
        workers=0,
        device="cpu",
    )
    folder = run(asked, say=said.append)
    assert folder.facts["references"] == []
    assert "--no-pretrained: the weights of timm:resnet18 are drawn at random, none are published ones" in said
    assert not any("timm reports" in line for line in said)
