from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ood_toolkit.datasets import ArrayImages, FolderImages
from ood_toolkit.datasets.images import imagenet_class_index, labels_from_file, labels_from_folders


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for name in ("cat/b.JPEG", "cat/a ü.png", "dog/x.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 5), "red").save(root / name, format="PNG")
    (root / "README.txt").write_text("not an image")
    (root / "cat" / ".hidden.png").write_bytes(b"")
    return root


def test_images_come_in_order_of_their_path_and_other_files_do_not_count(tree: Path):
    assert FolderImages(tree).ids == ["cat/a ü.png", "cat/b.JPEG", "dog/x.jpg"]


@pytest.mark.parametrize(
    ("mode", "suffix"), [("L", "png"), ("P", "png"), ("RGBA", "png"), ("CMYK", "jpg"), ("1", "png")]
)
def test_every_kind_of_image_opens_in_rgb(tmp_path: Path, mode: str, suffix: str):
    Image.new(mode, (4, 3)).save(tmp_path / f"a.{suffix}")
    image = FolderImages(tmp_path).open(0)
    assert (image.mode, image.size) == ("RGB", (4, 3))


def test_a_missing_or_empty_folder_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="does not exist"):
        FolderImages(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        FolderImages(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no image \(looked for .*\.jpeg"):
        FolderImages(tmp_path / "empty")


def test_the_fingerprint_follows_names_and_files_not_labels(tree: Path):
    before = FolderImages(tree).fingerprint
    assert FolderImages(tree, labels={"dog/x.jpg": 1}).fingerprint == before
    Image.new("RGB", (60, 50), "blue").save(tree / "dog" / "x.jpg", format="PNG")
    changed = FolderImages(tree).fingerprint
    assert changed != before
    (tree / "dog" / "x.jpg").rename(tree / "dog" / "y.jpg")
    assert FolderImages(tree).fingerprint not in (before, changed)


def test_arrays_have_a_fingerprint_of_their_pixels():
    pixels = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)
    images = ArrayImages(pixels, name="a", labels=[0, 1, -1])
    assert images.fingerprint == ArrayImages(pixels.copy(), name="b").fingerprint
    assert images.fingerprint != ArrayImages(pixels[::-1], name="a").fingerprint
    assert np.array_equal(np.array(images.open(1)), pixels[1])
    assert images.labels.tolist() == [0, 1, -1]


def test_class_folders_are_found_by_name_or_stand_for_all_classes_in_order(tree: Path):
    named = labels_from_folders(FolderImages(tree), {"cat": 7, "dog": 3}, classes=10)
    assert named == {"cat/a ü.png": 7, "cat/b.JPEG": 7, "dog/x.jpg": 3}
    assert labels_from_folders(FolderImages(tree), {}, classes=2) == {"cat/a ü.png": 0, "cat/b.JPEG": 0, "dog/x.jpg": 1}


def test_folders_that_are_no_class_are_named(tree: Path):
    with pytest.raises(ValueError, match=r"1 of 2 folders .* name no class of the model \(first 'dog'\)"):
        labels_from_folders(FolderImages(tree), {"cat": 0}, classes=10)
    (tree / "loose.png").write_bytes((tree / "cat/b.JPEG").read_bytes())
    with pytest.raises(ValueError, match=r"1 images lie in .* itself.*first 'loose.png'"):
        labels_from_folders(FolderImages(tree), {"cat": 0, "dog": 1}, classes=2)


@pytest.mark.parametrize(
    "text",
    [
        "cat/a ü.png,0\ncat/b.JPEG,dog\ndog/x.jpg,2\n",
        "# file\tother\tindex\ncat/a ü.png\t9\t0\ncat/b.JPEG\t9\t1\n\ndog/x.jpg\t9\t2\n",
        "image,wnid\ncat/a ü.png,cat\ncat/b.JPEG,1\ndog/x.jpg,2\n",
    ],
)
def test_a_labels_file_may_be_comma_or_tab_separated_with_or_without_a_head(tree: Path, text: str):
    file = tree.parent / "labels"
    file.write_text(text, encoding="utf-8")
    assert labels_from_file(file, FolderImages(tree), {"cat": 0, "dog": 1}) == {
        "cat/a ü.png": 0,
        "cat/b.JPEG": 1,
        "dog/x.jpg": 2,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat/a ü.png,0\ncat/b.JPEG,0\ndog/x.jpg,1\nbird/z.png,2\n", r"names 1 images that are not in .*bird/z.png"),
        ("cat/a ü.png,0\ncat/b.JPEG,0\n", r"gives no label for 1 images, first \['dog/x.jpg'\]"),
        ("cat/a ü.png,horse\n", "line 1: no class in"),
        ("cat/a ü.png\n", "line 1: no class in"),
        ("\n", "is empty"),
    ],
)
def test_a_labels_file_that_does_not_match_says_how(tree: Path, text: str, message: str):
    file = tree.parent / "labels"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        labels_from_file(file, FolderImages(tree), {"cat": 0})


def test_the_imagenet_classes_are_sorted_by_wordnet_id():
    index = imagenet_class_index()
    assert len(index) == 1000
    assert list(index) == sorted(index)
    assert list(index.values()) == list(range(1000))
    assert index["n01440764"] == 0  # tench
    assert index["n15075141"] == 999  # toilet tissue


def test_labels_arrive_in_the_order_of_the_images(tree: Path):
    images = FolderImages(tree, labels={"dog/x.jpg": 4, "cat/b.JPEG": 2})
    assert torch.equal(images.labels, torch.tensor([-1, 2, 4]))


def test_sixteen_bit_grey_keeps_its_shades(tmp_path: Path):
    shades = np.array([[0, 1 << 8, 1 << 15, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(shades).save(tmp_path / "a.png")
    assert np.array(FolderImages(tmp_path).open(0))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_floating_point_pixels_are_refused(tmp_path: Path):
    Image.fromarray(np.ones((2, 2), dtype=np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match="no known range"):
        FolderImages(tmp_path).open(0)


def test_a_labels_file_of_a_spreadsheet_is_read_and_contradictions_are_not(tree: Path):
    file = tree.parent / "labels"
    file.write_text("﻿file,label\ncat/a ü.png,0\ncat/b.JPEG,0\ndog/x.jpg,1\n", encoding="utf-8")
    assert labels_from_file(file, FolderImages(tree), {})["dog/x.jpg"] == 1
    file.write_text("cat/a ü.png,0\ncat/a ü.png,1\ncat/b.JPEG,0\ndog/x.jpg,1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2: 'cat/a ü.png' already has class 0"):
        labels_from_file(file, FolderImages(tree), {})
