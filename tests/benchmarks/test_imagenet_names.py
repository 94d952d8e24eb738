from dataclasses import replace
from pathlib import Path

import pytest

from ood_toolkit.benchmarks import shifted
from ood_toolkit.benchmarks.imagenet import Learning
from ood_toolkit.benchmarks.imagenet_suites import (
    canonical_name,
    default_suite,
    imagenet_suite,
    imagenet_suites,
    reference_lines,
    require_classes,
)
from ood_toolkit.datasets.catalogue import entry
from ood_toolkit.datasets.classes import class_list, validation_labels
from ood_toolkit.records import Record

RENDERED = list(class_list("imagenet_r"))[:2]


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for wnid in RENDERED:
        index = class_list("imagenet1k")[wnid]
        numbers = [number for number, label in enumerate(validation_labels(), 1) if label == index][:10]
        for number in numbers:
            touch(tmp_path / f"imagenet-1k/val/ILSVRC2012_val_{number:08d}.JPEG")
        touch(tmp_path / f"imagenet-r/{wnid}/art_0.jpg")
        touch(tmp_path / f"imagenet-c/blur/defocus_blur/3/{wnid}/a.JPEG")
        touch(tmp_path / f"imagenet-c/blur/defocus_blur/4/{wnid}/a.JPEG")
        touch(tmp_path / f"imagenet-v2-matched-frequency/{index}/a.jpeg")
    return tmp_path


def test_a_shifted_set_is_scored_beside_validation_images_of_its_classes(root: Path):
    suite = imagenet_suite("imagenet_r", root, learning=Learning(source="validation"))
    assert [(task.kind, task.dataset, len(task.id)) for task in suite.tasks] == [
        ("misclassification", "imagenet-r", 2),
        ("misclassification", "imagenet-1k", 14),
        ("calibration", "imagenet-r", 2),
        ("calibration", "imagenet-1k", 14),
    ]
    assert all(task.mask is not None and len(task.mask.classes) == 200 for task in suite.tasks)
    assert suite.protocol == "masked-like"
    assert "Not the published set: 2 images are here, 30,000 were published." in suite.caption
    whole = imagenet_suite("imagenet-r", root, protocol="full-1000way")
    assert all(task.mask is None for task in whole.tasks)


def test_a_corruption_that_lacks_images_is_marked(root: Path):
    alone = imagenet_suite("imagenet-c-blur/defocus_blur/3", root)
    assert "Not the published set: 2 images are here, 50,000 were published." in alone.caption
    group = imagenet_suite("imagenet-c-blur/defocus_blur", root)
    assert "Not the published sets of 50,000 images each: imagenet-c-blur/defocus_blur/3 has 2, " in group.caption
    assert "Left out, because not found: defocus_blur/1, defocus_blur/2, defocus_blur/5." in group.caption
    assert {alone.protocol, group.protocol} == {"full-1000way-like"}


def test_many_corruptions_that_lack_images_are_counted_together(root: Path):
    for severity in (1, 2, 5):
        for number in range(3):
            touch(root / f"imagenet-c/blur/defocus_blur/{severity}/{RENDERED[0]}/{number}.JPEG")
    for severity in (1, 2, 5):
        touch(root / f"imagenet-c/blur/zoom_blur/{severity}/{RENDERED[0]}/a.JPEG")
        touch(root / f"imagenet-c/blur/zoom_blur/{severity}/{RENDERED[1]}/a.JPEG")
    caption = imagenet_suite("imagenet-c-blur", root).caption
    assert "5 from imagenet-c-blur/defocus_blur/3 to imagenet-c-blur/zoom_blur/5 have 2 each" in caption
    assert "imagenet-c-blur/defocus_blur/1 has 3, imagenet-c-blur/defocus_blur/2 has 3, " in caption


@pytest.mark.parametrize("within", ["defocus_blurr", "fog", "fog/3"])
def test_a_corruption_that_its_group_has_not_is_refused_with_those_that_it_has(root: Path, within: str):
    name = within.partition("/")[0]
    with pytest.raises(ValueError, match=rf"imagenet-c-blur has no corruption '{name}'; known: defocus_blur, glass_"):
        imagenet_suite(f"imagenet-c-blur/{within}", root)
    with pytest.raises(ValueError, match=r"a severity is one of \(1, 2, 3, 4, 5\), .* got '6'"):
        imagenet_suite("imagenet-c-blur/defocus_blur/6", root)


def test_missing_validation_images_are_marked_and_those_held_out_are_not_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        shifted, "entry", lambda name: replace(entry(name), images=2)
    )  # as if the shifted set were whole
    for source in ("validation", "none"):
        suite = imagenet_suite("imagenet-r", root, learning=Learning(source=source))
        assert suite.protocol == "masked-like"
        assert "Not the published validation images of these classes: 20 images are here, 10,000" in suite.caption
        assert "published set" not in suite.caption
    monkeypatch.setattr(shifted, "VALIDATION_PER_CLASS", 0.1)  # 20 images of 200 classes
    for source in ("validation", "none"):
        suite = imagenet_suite("imagenet-r", root, learning=Learning(source=source))
        assert suite.protocol == "masked"
        assert "Not the published" not in suite.caption


def test_a_set_of_unknown_size_is_said_to_be_unchecked(root: Path):
    touch(root / f"stylized-imagenet/val/{RENDERED[0]}/a.jpg")
    sentence = "How many images it has is not known here"
    assert sentence in imagenet_suite("stylized-imagenet", root).caption
    assert sentence not in imagenet_suite("imagenet-r", root).caption


def test_one_corruption_at_one_severity_is_a_suite(root: Path):
    suite = imagenet_suite("imagenet-c-blur/defocus_blur/3", root)
    assert suite.name == "imagenet-c-blur/defocus_blur/3"
    assert len(suite.tasks[0].id) == 2
    names = [task.dataset for task in imagenet_suite("imagenet-c-blur", root).tasks if task.kind == "calibration"]
    assert names == ["imagenet-c-blur/defocus_blur/3", "imagenet-c-blur/defocus_blur/4", "imagenet-1k"]


def test_imagenetv2_is_not_learned_from_where_it_is_scored(root: Path):
    suite = imagenet_suite("imagenet-v2-matched-frequency", root)
    assert suite.fit is not None
    assert suite.fit.images.name == "imagenet-1k"


def test_every_suite_has_one_name_and_a_near_miss_is_answered(root: Path, tmp_path: Path):
    assert len(set(imagenet_suites())) == len(imagenet_suites())
    assert canonical_name("imagenet_a_clean") == "imagenet-a+clean"
    assert canonical_name("natural_adversarial") == "natural-adversarial"
    with pytest.raises(ValueError, match=r"no suite is named 'openood-imagnet'; did you mean 'openood-imagenet'\?"):
        canonical_name("openood-imagnet")
    with pytest.raises(ValueError, match=r"no suite is named 'mos'; did you mean 'mos-imagenet'\?"):
        canonical_name("mos")  # too short to look like it, but its beginning
    with pytest.raises(ValueError, match=r"needs --data-root DIR \(or \$OOD_DATA_ROOT\)"):
        imagenet_suite("imagenet-a", None)
    with pytest.raises(ValueError, match="is about ImageNet-A and ImageNet-O, not 'imagenet-r'"):
        imagenet_suite("imagenet-r", root, protocol="vim-1000way")
    with pytest.raises(ValueError, match="is no folder"):
        imagenet_suite("imagenet-r", tmp_path / "nowhere")


def test_the_default_is_the_real_benchmark_as_soon_as_its_data_is_there(root: Path):
    assert default_suite(None)[0] == "digits"
    name, line = default_suite(root)
    assert name == "digits"
    assert "ood-bench data get imagenet-a imagenet-o" in line
    for name in ("imagenet-a", "imagenet-o"):
        wnid = next(iter(class_list(name.replace("-", "_"))))
        touch(root / name / wnid / "a.jpg")
    assert default_suite(root) == ("natural-adversarial", "")


def test_a_model_of_other_classes_is_refused():
    require_classes("imagenet-a", "m", 1000)
    require_classes("openood-cifar10", "m", 10)
    with pytest.raises(ValueError, match="m has 10 classes; the ImageNet suites need the 1000"):
        require_classes("imagenet-a", "m", 10)
    with pytest.raises(ValueError, match="m has 1000 classes; openood-cifar10 needs 10, in this order: airplane, auto"):
        require_classes("openood-cifar10", "m", 1000)


def accuracy(dataset: str, value: float, **changes: str) -> Record:
    facts = {"protocol": "official", "mask": "imagenet-a:200", "suite": "natural-adversarial", "metric": "accuracy"}
    return Record(
        task="calibration",
        dataset=dataset,
        model="timm:tf_efficientnet_lite0.in1k",
        method="none",
        value=value,
        positives=7500,
        **{**facts, **changes},  # pyright: ignore
    )


def test_published_numbers_stand_beside_measured_ones_where_they_mean_the_same():
    lines, warnings = reference_lines([accuracy("imagenet-a", 0.0305), accuracy("imagenet-a-clean", 0.95)])
    assert lines[0] == "timm reports 3.05% for tf_efficientnet_lite0.in1k on imagenet-a; measured 3.05%"
    assert len(lines) == 2
    assert len(warnings) == 1
    assert "imagenet-a-clean" in warnings[0]
    others = [
        accuracy("imagenet-a-clean", 0.5, protocol="official-standin"),
        accuracy("imagenet-a", 0.5, mask=""),
        accuracy("imagenet-a+clean", 0.5),
        accuracy("imagenet-a", 0.5, metric="ece"),
    ]
    assert reference_lines(others) == ([], [])
    near = Record(
        suite="openood-imagenet",
        task="anomaly",
        dataset="near-ood",
        model="torchvision:resnet50",
        method="msp",
        metric="auroc",
        value=0.75,
    )
    assert reference_lines([near])[0] == ["OpenOOD 1.5 reports 76.02% for msp on near-ood; measured 75.00%"]
