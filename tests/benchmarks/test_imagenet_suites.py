from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ood_toolkit.benchmarks import openood
from ood_toolkit.benchmarks.imagenet import Learning, held_out, train_part
from ood_toolkit.benchmarks.natural_adversarial import available, class_mask, natural_adversarial_suite, suite_name
from ood_toolkit.benchmarks.openood import near_far, openood_suite
from ood_toolkit.benchmarks.suite import Part, Suite
from ood_toolkit.datasets import FolderImages
from ood_toolkit.datasets.classes import class_list, validation_labels
from ood_toolkit.records import Record
from tests.datasets.official import as_shards, jpeg, train_tar

A_LIST, O_LIST = class_list("imagenet_a"), class_list("imagenet_o")
ONLY_A = [wnid for wnid in A_LIST if wnid not in O_LIST][:2]
BOTH = [wnid for wnid in A_LIST if wnid in O_LIST][:2]
ONLY_O = [wnid for wnid in O_LIST if wnid not in A_LIST][:2]
PER_CLASS = 10


def touch(path: Path) -> None:
    """Suites open no image, so an empty file will do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Both sets, and ten validation images of each of their classes and of tench, which is in neither."""
    for wnid in ONLY_A + BOTH:
        for number in range(3):
            touch(tmp_path / f"imagenet-a/{wnid}/{number}_a _ b_0.5.jpg")
    for wnid in BOTH + ONLY_O:
        touch(tmp_path / f"imagenet-o/{wnid}/benthos_0.99.JPEG")
    for wnid in ["n01440764", *ONLY_A, *BOTH, *ONLY_O]:
        for number in numbers(wnid)[:PER_CLASS]:
            touch(tmp_path / f"imagenet-1k/val/{wnid}/ILSVRC2012_val_{number:08d}.JPEG")
    return tmp_path


def numbers(wnid: str) -> list[int]:
    index = class_list("imagenet1k")[wnid]
    return [number for number, label in enumerate(validation_labels(), 1) if label == index]


def second(root: Path) -> None:
    for wnid in ["n01440764", *ONLY_A, *BOTH, *ONLY_O]:
        for number in range(10):
            touch(root / f"imagenet-v2-matched-frequency/{class_list('imagenet1k')[wnid]}/{number}.jpeg")


def train(root: Path, per_class: int = 7) -> None:
    for wnid in class_list("imagenet1k"):
        for number in range(per_class):
            touch(root / f"imagenet-1k/train/{wnid}/{wnid}_{number}.JPEG")


def ids(part: Part | None) -> set[str]:
    assert part is not None
    return {part.images.ids[int(row)] for row in part.indices}


def named(suite: Suite, name: str) -> Part:
    return next(part for part in suite.scored if part.name == name)


def test_the_parts_are_those_of_the_protocol(root: Path):
    suite = natural_adversarial_suite("natural-adversarial", root, learning=Learning(source="none"))
    assert [(task.kind, task.dataset) for task in suite.tasks] == [
        ("misclassification", "imagenet-a"),
        ("calibration", "imagenet-a"),
        ("misclassification", "imagenet-a+clean"),
        ("calibration", "imagenet-a+clean"),
        ("calibration", "imagenet-a-clean"),
        ("anomaly", "imagenet-o"),
    ]
    assert len(named(suite, "imagenet-a")) == 12
    assert len(named(suite, "imagenet-a-clean")) == 40
    assert len(named(suite, "imagenet-a+clean")) == 52
    assert len(named(suite, "imagenet-o")) == 4
    assert len(named(suite, "imagenet-o-id")) == 40
    assert set(named(suite, "imagenet-a+clean").labels.tolist()) == {A_LIST[wnid] for wnid in ONLY_A + BOTH}
    assert set(named(suite, "imagenet-o-id").labels.tolist()) == {O_LIST[wnid] for wnid in BOTH + ONLY_O}
    assert named(suite, "imagenet-o").labels.tolist() == [-1] * 4
    assert not any("n01440764" in image for part in suite.parts for image in part.images.ids)  # tench is not even run
    masks = {task.dataset: task.mask.classes.tolist() for task in suite.tasks if task.mask}
    assert masks["imagenet-a"] == masks["imagenet-a+clean"] == sorted(A_LIST.values())
    assert masks["imagenet-o"] == sorted(O_LIST.values())


def test_one_pass_serves_every_part(root: Path):
    suite = natural_adversarial_suite("natural-adversarial", root)
    assert len({part.images.fingerprint for part in suite.parts}) == 1


def test_imagenet_a_alone_passes_validation_only_where_something_is_learned_from_it(root: Path):
    alone = natural_adversarial_suite("imagenet-a", root, learning=Learning(source="none"))
    (rows,) = {len(part.images) for part in alone.parts}
    assert rows == len(named(alone, "imagenet-a"))
    learning = natural_adversarial_suite("imagenet-a", root, learning=Learning(source="validation"))
    assert len(learning.parts[0].images) > rows


def test_what_is_learned_from_validation_is_never_scored_and_said_to_be_missing(root: Path):
    suite = natural_adversarial_suite("natural-adversarial", root)
    learned = ids(suite.fit) | ids(suite.calibration)
    assert (len(ids(suite.fit)), len(ids(suite.calibration))) == (12, 6)  # 20% and 10% of 10 images of 6 classes
    assert not learned & {image for part in suite.scored for image in ids(part)}
    assert len(named(suite, "imagenet-o-id")) == 28
    assert suite.protocol == "official-like"
    assert "18 validation images are held out for learning" in suite.caption


def test_imagenetv2_is_learned_from_so_that_all_of_validation_is_scored(root: Path):
    second(root)
    suite = natural_adversarial_suite("natural-adversarial", root)
    assert len(named(suite, "imagenet-o-id")) == 40
    assert suite.fit is not None
    assert suite.calibration is not None
    assert suite.fit.images.name == suite.calibration.images.name == "imagenet-v2-matched-frequency"
    assert len(suite.fit.images) == 60  # tench is not run through the model
    assert (len(suite.fit), len(suite.calibration)) == (42, 18)  # 7 and 3 of 10 images of each of the 6 classes
    assert not ids(suite.fit) & ids(suite.calibration)
    assert "held out" not in suite.caption


def test_train_gives_a_class_balanced_sample_for_detectors_alone(root: Path):
    train(root)
    suite = natural_adversarial_suite("imagenet-o", root, learning=Learning(per_class=3))
    assert suite.fit is not None
    assert suite.calibration is not None
    assert torch.equal(suite.fit.labels.unique(), torch.tensor(sorted(O_LIST.values())))
    assert set(suite.fit.labels.bincount()[sorted(O_LIST.values())].tolist()) == {3}
    assert "imagenet-a" not in suite.caption.lower()
    assert all("val" in image for image in ids(suite.calibration))
    assert len(named(suite, "imagenet-o-id")) == 36  # one of ten is held out for calibrators
    again = natural_adversarial_suite("imagenet-o", root, learning=Learning(per_class=3))
    assert again.fit is not None
    assert again.fit.description == suite.fit.description
    other = natural_adversarial_suite("imagenet-o", root, learning=Learning(per_class=3, seed=1))
    assert ids(other.fit) != ids(suite.fit)


def test_the_same_training_images_are_chosen_from_folders_class_tars_and_shards(tmp_path: Path):
    wnids = ("n01440764", "n02091032")
    classes = {0, 171}
    for wnid in wnids:
        for number in range(9):
            jpeg(tmp_path / f"folders/imagenet-1k/train/{wnid}/{wnid}_{number}.JPEG", number + len(wnid))
    folder = tmp_path / "folders/imagenet-1k/train"
    train_tar(folder, tmp_path / "tars/imagenet-1k/ILSVRC2012_img_train.tar")
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.JPEG")]
    index = class_list("imagenet1k")
    labels = {file: index[file[:9]] for file in files}
    as_shards(folder, tmp_path / "shards/imagenet-1k/train", labels, per_shard=5, field="cls")
    found = []
    for layout in ("folders", "tars", "shards"):
        part = train_part(tmp_path / layout, classes, Learning(per_class=4, seed=3))
        assert part is not None
        assert part.labels.tolist() == [0] * 4 + [171] * 4
        pixels = [np.array(part.images.open(row)) for row in range(8)]
        found.append((list(part.images.ids), pixels))
    for names, pixels in found[1:]:
        assert names == found[0][0]
        assert all(np.array_equal(ours, first) for ours, first in zip(pixels, found[0][1], strict=True))
    assert train_part(tmp_path, classes, Learning()) is None
    with pytest.raises(ValueError, match=r"ILSVRC2012_img_train.tar' has no image of class n01443537"):
        train_part(tmp_path / "tars", {1}, Learning())


def test_without_validation_imagenetv2_stands_in_and_the_caption_says_so(root: Path):
    second(root)
    (root / "imagenet-1k").rename(root / "elsewhere")
    suite = natural_adversarial_suite("natural-adversarial", root)
    assert suite.protocol == "official-standin"
    assert "ImageNetV2 matched-frequency stands in for ImageNet validation" in suite.caption
    assert len(named(suite, "imagenet-o-id")) == 28
    assert not (ids(suite.fit) | ids(suite.calibration)) & ids(named(suite, "imagenet-o-id"))


def test_imagenet_a_alone_needs_no_other_images(root: Path):
    (root / "imagenet-1k").rename(root / "elsewhere")
    suite = natural_adversarial_suite("imagenet_a", root)
    assert (suite.fit, suite.calibration) == (None, None)
    assert [part.name for part in suite.scored] == ["imagenet-a"]
    with pytest.raises(ValueError, match=r"needs ImageNet validation images.*Register at https://image-net.org"):
        natural_adversarial_suite("natural-adversarial", root)
    assert not available(root)


def test_the_split_does_not_depend_on_the_layout(root: Path):
    deep = FolderImages(root / "imagenet-1k/val")
    for row, image in enumerate(deep.ids):
        deep.labels[row] = class_list("imagenet1k")[image.partition("/")[0]]
        touch(root / "flat" / image.partition("/")[2])
    flat = FolderImages(root / "flat")
    flat.labels[:] = torch.tensor([validation_labels()[int(image[15:23]) - 1] for image in flat.ids])
    splits = [held_out(images, range(1000), [0.3, 0.2], 5) for images in (deep, flat)]
    by_name = [
        [{images.ids[int(row)].rpartition("/")[2] for row in rows} for rows in split]
        for images, split in zip((deep, flat), splits, strict=True)
    ]
    assert by_name[0] == by_name[1]
    assert [len(names) for names in by_name[0]] == [21, 14]
    assert not by_name[0][0] & by_name[0][1]


def test_the_caption_is_official_only_at_the_published_sizes(root: Path):
    caption = natural_adversarial_suite("natural-adversarial", root, learning=Learning(source="none")).caption
    assert "imagenet-a has 12 images here, 7,500 were published" in caption
    assert "imagenet-o has 4 images here, 2,000 were published" in caption
    assert "One in five" in caption or "one in five" in caption
    assert "chance 9.1%" in caption  # 4 of 44
    for wnid in O_LIST:
        for number in numbers(wnid):
            touch(root / f"imagenet-1k/val/{wnid}/ILSVRC2012_val_{number:08d}.JPEG")
        for number in range(10):
            touch(root / f"imagenet-o/{wnid}/benthos{number}_0.99.JPEG")
    for path in (root / "imagenet-o").glob("*/benthos_0.99.JPEG"):
        path.unlink()
    suite = natural_adversarial_suite("imagenet-o", root, learning=Learning(source="none"))
    assert suite.protocol == "official"
    assert "2,000 OOD images (positive) against 10,000 of ImageNet validation" in suite.caption
    assert "chance 16.7%" in suite.caption
    assert "Not the published protocol" not in suite.caption


def test_protocols_and_suites_that_do_not_exist_are_named(root: Path):
    with pytest.raises(ValueError, match="no suite is named 'imagenet-b'; known: imagenet-a,"):
        natural_adversarial_suite("imagenet-b", root)
    with pytest.raises(ValueError, match="no protocol is named 'mine'"):
        natural_adversarial_suite("imagenet-a", root, protocol="mine")  # pyright: ignore
    with pytest.raises(ValueError, match="vim-1000way is about imagenet-o alone"):
        natural_adversarial_suite("natural-adversarial", root, protocol="vim-1000way")
    with pytest.raises(ValueError, match="no ImageNet train below"):
        natural_adversarial_suite("imagenet-o", root, learning=Learning(source="train"))
    with pytest.raises(ValueError, match="shares must lie in"):
        Learning(fit_share=0.6, calibration_share=0.4)


def test_names_may_be_written_as_the_command_line_likes():
    assert [suite_name(name) for name in ("imagenet_a_clean", "imagenet-a+clean", "natural_adversarial")] == [
        "imagenet-a+clean",
        "imagenet-a+clean",
        "natural-adversarial",
    ]
    assert len(class_mask("imagenet-o").classes) == 200


def test_the_full_view_stands_beside_the_masked_one(root: Path):
    suite = natural_adversarial_suite("natural-adversarial", root, protocol="official+1000way")
    masks = {task.dataset: task.mask for task in suite.tasks}
    assert masks["imagenet-o"] is not None
    assert masks["imagenet-o 1000-way"] is None
    assert masks["imagenet-a 1000-way"] is None
    whole = natural_adversarial_suite("imagenet-o", root, protocol="vim-1000way", learning=Learning(source="none"))
    assert len(named(whole, "imagenet-o-id")) == 70  # tench counts here


def far_and_near(root: Path) -> None:
    for name in ("ssb-hard", "ninco", "inaturalist"):
        touch(root / name / "a" / "1.jpg")
    for kind in ("banded", "bubbly"):
        touch(root / "textures/images" / kind / "1.jpg")
    for number in range(4):
        touch(root / f"openimage-o/{number}.jpg")


def test_the_openood_suite_pits_each_set_against_validation(root: Path):
    far_and_near(root)
    suite = openood_suite(root)
    sizes = {task.dataset: len(task.ood) for task in suite.tasks if task.ood}
    assert sizes == {"ssb-hard": 1, "ninco": 1, "inaturalist": 1, "textures": 1, "openimage-o": 4}
    assert len(named(suite, "imagenet-1k")) == 49  # 70 less 20% and 10%
    assert all(task.mask is None for task in suite.tasks)
    assert suite.protocol == "openood-1.5-like"
    assert "OpenOOD's lists are absent" in suite.caption


def test_openoods_own_lists_are_used_where_they_are_there(root: Path, monkeypatch: pytest.MonkeyPatch):
    far_and_near(root)
    images = sorted((root / "imagenet-1k/val").rglob("*.JPEG"))
    lists = root / "benchmark_imglist/imagenet"
    lists.mkdir(parents=True)
    lines = [f"imagenet_1k/val/{path.name} 0\n" for path in images]
    (lists / "test_imagenet.txt").write_text("".join(lines[10:]))
    (lists / "val_imagenet.txt").write_text("".join(lines[:10]))
    (lists / "test_openimage_o.txt").write_text("openimage_o/1.jpg -1\nopenimage_o/3.jpg -1\n")
    suite = openood_suite(root)
    assert suite.protocol == "openood-1.5-like"
    assert "Not the published protocol: ssb-hard has 1 images here, OpenOOD scores 49,000; ninco" in suite.caption
    whole = {"ssb-hard": 1, "ninco": 1, "inaturalist": 1, "textures": 1, "openimage-o": 2}
    monkeypatch.setattr(openood, "SCORED", whole)
    suite = openood_suite(root)
    assert suite.protocol == "openood-1.5"
    assert ids(named(suite, "openimage-o")) == {"1.jpg", "3.jpg"}
    assert {image.rpartition("/")[2] for image in ids(named(suite, "imagenet-1k"))} == {p.name for p in images[10:]}
    learned = ids(suite.fit) | ids(suite.calibration)
    assert {image.rpartition("/")[2] for image in learned} == {path.name for path in images[:10]}


def test_absent_sets_are_left_out_and_named(root: Path):
    touch(root / "ninco/a/1.jpg")
    suite = openood_suite(root)
    assert [task.dataset for task in suite.tasks if task.ood] == ["ninco"]
    assert "ssb-hard, inaturalist, textures, openimage-o left out, because not found" in suite.caption
    (root / "ninco").rename(root / "x")
    with pytest.raises(ValueError, match="none of ssb-hard, ninco"):
        openood_suite(root)


def test_near_and_far_are_means_over_their_sets():
    def record(dataset: str, value: float | None) -> Record:
        return Record(
            suite="openood-imagenet",
            task="anomaly",
            dataset=dataset,
            model="m",
            method="msp",
            metric="auroc",
            value=value,
            low=0.1,
            reason="" if value else "why",
        )

    values = {"ssb-hard": 0.7, "ninco": 0.8, "inaturalist": 0.9, "textures": 0.6, "openimage-o": 0.9}
    records = [record(name, value) for name, value in values.items()]
    near, far = near_far(records)
    assert (near.dataset, near.value, near.low) == ("near-ood", pytest.approx(0.75), None)
    assert (far.dataset, far.value) == ("far-ood", pytest.approx(0.8))
    assert [r.dataset for r in near_far(records[:3])] == ["near-ood"]
    assert near_far([replace(records[0], suite="digits"), records[1]]) == []
    assert near_far([record("ssb-hard", None), records[1]])[0].reason == "why"
