"""Sets whose images are packed: videos, parquet files, and a tar of tars."""

import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ood_toolkit.datasets import FolderImages
from ood_toolkit.datasets.accepted import labels_for
from ood_toolkit.datasets.archives import ClassTars, holds_class_tars
from ood_toolkit.datasets.catalogue import entry
from ood_toolkit.datasets.install import check
from ood_toolkit.datasets.locate import find, open_set
from ood_toolkit.datasets.parquet import ParquetImages
from ood_toolkit.datasets.videos import VideoFrames
from ood_toolkit.outputs import Outputs
from tests.datasets.official import as_tar, jpeg, train_tar

WNIDS = ("n01440764", "n02091032")


def train(root: Path) -> Path:
    """Class folders with two, and three, images, one of them grey and one CMYK."""
    for number, mode in enumerate(("RGB", "L", "CMYK", "RGB", "RGB")):
        wnid = WNIDS[number > 1]
        jpeg(root / wnid / f"{wnid}_{number + 9}.JPEG", number, mode)
    return root


def test_a_tar_of_class_tars_equals_the_class_folders(tmp_path: Path):
    folder = FolderImages(train(tmp_path / "folder"))
    packed = ClassTars(train_tar(tmp_path / "folder", tmp_path / "ILSVRC2012_img_train.tar"))
    images = pickle.loads(pickle.dumps(packed.images("train")))
    assert packed.classes == list(WNIDS)
    assert list(images.ids) == list(folder.ids)
    for row in range(5):
        assert np.array_equal(np.array(images.open(row)), np.array(folder.open(row)))
    assert list(packed.images("train", ["n02091032"]).ids) == list(folder.ids)[2:]
    assert packed.members("n00000000") == {}
    opened = open_set(entry("imagenet-1k-train"), tmp_path)
    assert opened.labels.tolist() == [0, 0, 171, 171, 171]  # by hand: tench, Italian greyhound
    assert find(entry("imagenet-1k"), tmp_path) is None


def test_a_damaged_or_plain_tar_is_no_tar_of_class_tars(tmp_path: Path):
    folder = train(tmp_path / "folder")
    whole = train_tar(folder, tmp_path / "whole.tar").read_bytes()
    assert holds_class_tars(tmp_path / "whole.tar")
    assert not holds_class_tars(as_tar(folder, tmp_path / "plain.tar"))
    with pytest.raises(ValueError, match=r"holds no class tars such as n01440764\.tar"):
        ClassTars(tmp_path / "plain.tar")
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut.tar' is truncated"):
        ClassTars(tmp_path / "cut.tar")
    second = ClassTars(tmp_path / "whole.tar").members("n02091032")["n02091032/n02091032_12.JPEG"]
    for start in (512, second.offset - 512):  # the first header of the first inner tar, and a later one
        broken = bytearray(whole)
        broken[start : start + 512] = b"x" * 512
        (tmp_path / "broken.tar").write_bytes(broken)
        with pytest.raises(ValueError, match=r"'n02091032.tar' in .*broken.tar' is truncated or no tar"):
            ClassTars(tmp_path / "broken.tar").members("n02091032")


def encoded(seed: int, mode: str = "RGB") -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(buffer, format="PNG")
    return buffer.getvalue()


def write_parquet(path: Path, rows: int, start: int = 0) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the optional package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    numbers = range(start, start + rows)
    table = arrow.table(
        {
            "id": list(numbers),
            "image": [{"bytes": encoded(n, "L" if n == 1 else "RGB"), "path": f"{n}.png"} for n in numbers],
            "label": [[n % 3, 7] if n % 2 else [n] for n in numbers],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=3)


def test_imagenet_hard_has_every_row_of_its_parquet_files_with_all_its_classes(tmp_path: Path):
    for number, (rows, start) in enumerate(((7, 0), (4, 7))):
        write_parquet(tmp_path / f"imagenet-hard/data/validation-{number:05d}-of-00002.parquet", rows, start)
    images = open_set(entry("imagenet-hard"), tmp_path)
    assert len(images) == 11
    assert images.ids[7] == "validation-00001-of-00002/000000"
    for row in (10, 0, 1, 6, 7, 3):
        with Image.open(io.BytesIO(encoded(row, "L" if row == 1 else "RGB"))) as expected:
            assert np.array_equal(np.array(images.open(row)), np.array(expected.convert("RGB")))
    logits = torch.zeros(11, 12)
    logits[:, 7] = 1
    chosen = labels_for(images, torch.arange(11), Outputs.from_logits(logits)).tolist()
    assert chosen == [7 if row % 2 else row for row in range(11)]
    assert "10,980 images are expected, 11 are there" in check("imagenet-hard", tmp_path).text


def test_parquet_files_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_parquet(tmp_path / "a.parquet", 2)
    with pytest.raises(ValueError, match="has no column 'class'; it has"):
        ParquetImages([tmp_path / "a.parquet"], name="a", label="class")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"b.parquet' is truncated or no parquet file"):
        ParquetImages([tmp_path / "b.parquet"], name="b")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        ParquetImages([tmp_path / "a.parquet"], name="a")


def film(path: Path, shades: list[int]) -> None:
    """A video of plain grey frames."""
    av = pytest.importorskip("av", reason="the optional package av is not installed")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for shade in shades:
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), shade, dtype=np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def test_every_frame_of_a_perturbation_is_an_image_of_its_class(tmp_path: Path):
    for number, wnid in enumerate(WNIDS):
        name = f"{wnid}/ILSVRC2012_val_0000029{number}.mp4"
        film(tmp_path / "imagenet-p/brightness" / name, [10 + 100 * number, 60 + 100 * number])
        film(tmp_path / "imagenet-p/tilt" / name, [0])
    images = open_set(entry("imagenet-p"), tmp_path, within="brightness")
    assert images.name == "imagenet-p/brightness"
    assert images.ids[1] == "brightness/n01440764/ILSVRC2012_val_00000290.mp4#01"
    assert images.labels.tolist() == [0, 0, 171, 171]
    again = pickle.loads(pickle.dumps(images))
    for row, shade in ((3, 160), (0, 10), (1, 60), (2, 110)):
        assert abs(int(np.array(again.open(row)).mean()) - shade) <= 3
    assert "4 videos in" in check("imagenet-p", tmp_path).text
    before = images.fingerprint
    film(tmp_path / "imagenet-p/brightness/n01440764/ILSVRC2012_val_00000290.mp4", [10, 60, 90])
    assert open_set(entry("imagenet-p"), tmp_path, within="brightness").fingerprint != before


def test_frames_that_were_extracted_are_read_as_images(tmp_path: Path):
    jpeg(tmp_path / "imagenet-p/tilt/n02091032/00_01.jpg", 0)
    images = open_set(entry("imagenet-p"), tmp_path, within="tilt")
    assert (list(images.ids), images.labels.tolist()) == (["n02091032/00_01.jpg"], [171])


def test_videos_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"holds no \.mp4 video"):
        VideoFrames(tmp_path, name="v")
    (tmp_path / "a.mp4").write_bytes(b"no video")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "av", None)
        with pytest.raises(ValueError, match="pip install av"):
            VideoFrames(tmp_path, name="v")
    pytest.importorskip("av", reason="the optional package av is not installed")
    with pytest.raises(ValueError, match=r"video '.*a.mp4' cannot be read"):
        VideoFrames(tmp_path, name="v")
