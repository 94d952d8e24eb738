import gzip
import io
import pickle
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ood_toolkit.datasets import FolderImages, HubImages, ImageSet, JoinedImages, ShardImages, SubsetImages, TarImages
from ood_toolkit.datasets.archives import plain_tar
from ood_toolkit.datasets.catalogue import entry
from ood_toolkit.datasets.classes import class_list, validation_labels
from ood_toolkit.datasets.combined import below
from ood_toolkit.datasets.locate import data_root, find, open_set
from ood_toolkit.datasets.shards import shard_paths
from ood_toolkit.extract import Extractor
from ood_toolkit.models import Classifier
from tests.datasets.official import A_CLASSES, NAMES, as_shards, as_tar, imagenet_a, jpeg, tar_of

SHARED = Path(__file__).parents[2].parent / "shared"
LOCAL = {wnid: number for number, wnid in enumerate(class_list("imagenet_a"))}


def layouts(root: Path) -> dict[str, ImageSet]:
    """The same ImageNet-A as folder, tar, and shards of both kinds, each below a data root of its own."""
    folder = imagenet_a(root / "folder")
    as_tar(folder, root / "tar" / "imagenet-a.tar")
    files = [f"{wnid}/{name}" for wnid in A_CLASSES for name in NAMES]
    labels = {file: LOCAL[file.partition("/")[0]] for file in files}
    as_shards(folder, root / "cls" / "imagenet-a", labels, per_shard=4, field="cls")
    as_shards(folder, root / "json" / "imagenet-a" / "test", labels, per_shard=2, field="json")
    return {name: open_set(entry("imagenet-a"), root / name) for name in ("folder", "tar", "cls", "json")}


def arrays(images: ImageSet) -> list[np.ndarray]:
    return [np.array(images.open(row)) for row in range(len(images))]


def test_the_same_images_are_the_same_in_every_layout(tmp_path: Path):
    sets = layouts(tmp_path)
    first = sets.pop("folder")
    assert len(first) == 9
    assert first.labels.tolist() == [6] * 3 + [11] * 3 + [954] * 3  # by hand: stingray, goldfinch, banana
    kinds = []
    for image in first.ids[:3]:
        with Image.open(tmp_path / "folder" / "imagenet-a" / image) as file:
            kinds.append(file.mode)
    assert sorted(kinds) == ["CMYK", "L", "RGB"]
    for images in sets.values():
        assert list(images.ids) == list(first.ids)
        assert torch.equal(images.labels, first.labels)
        for ours, theirs in zip(arrays(images), arrays(first), strict=True):
            assert ours.shape == (12, 10, 3)
            assert np.array_equal(ours, theirs)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.adaptive_avg_pool2d(images, 2).flatten(1))


def pixels(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_every_layout_gives_the_same_logits_also_from_worker_processes(tmp_path: Path):
    classifier = Classifier(Small().eval())
    found = []
    for number, images in enumerate(layouts(tmp_path / "sets").values()):
        images.labels = images.labels.clamp(max=6)
        extractor = Extractor(cache=tmp_path / "cache", batch_size=2, workers=2 if number == 1 else 0)
        found.append(extractor.extract(classifier, pixels, "pixels", images).outputs.logits)
    assert all(torch.equal(logits, found[0]) for logits in found[1:])


def test_a_tar_of_real_validation_images_equals_their_folder(tmp_path: Path):
    real = SHARED / "data" / "imagenet_val1300"
    if not real.is_dir():
        pytest.skip("../shared/data/imagenet_val1300 is not beside this checkout")
    names = sorted(path.name for path in real.iterdir())[::100]
    (tmp_path / "imagenet-1k").mkdir()
    with tarfile.open(tmp_path / "imagenet-1k" / "ILSVRC2012_img_val.tar", "w") as tar:
        for name in reversed(names):
            tar.add(real / name, arcname=name)
    images = open_set(entry("imagenet-1k"), tmp_path)
    lines = (SHARED / "data/imagenet_val1300_labels.tsv").read_text().splitlines()
    table = dict(line.split("\t")[:3:2] for line in lines)
    assert isinstance(images, TarImages)
    assert images.labels.tolist() == [int(table[name]) for name in names]
    for ours, theirs in zip(arrays(images), arrays(FolderImages(real, paths=names)), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_tar_may_be_pickled_and_read_by_many(tmp_path: Path):
    images = TarImages(as_tar(imagenet_a(tmp_path), tmp_path / "a.tar"))
    again = pickle.loads(pickle.dumps(images))
    assert all(np.array_equal(a, b) for a, b in zip(arrays(images), arrays(again), strict=True))
    assert images.fingerprint == again.fingerprint


def test_a_tar_has_another_fingerprint_once_its_images_change(tmp_path: Path):
    folder = imagenet_a(tmp_path)
    before = TarImages(as_tar(folder, tmp_path / "a.tar")).fingerprint
    jpeg(folder / A_CLASSES[0] / NAMES[0], 99)
    assert TarImages(as_tar(folder, tmp_path / "a.tar")).fingerprint != before


def test_links_and_broken_images_in_a_tar_do_no_harm(tmp_path: Path):
    link = tarfile.TarInfo("s/link.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(buffer, format="JPEG")
    images = TarImages(tar_of(tmp_path / "s.tar", [(link, b""), ("s/a.jpg", buffer.getvalue()), ("s/b.jpg", b"no")]))
    assert images.ids == ["a.jpg", "b.jpg"]
    assert images.open(0).size == (3, 2)
    with pytest.raises(OSError, match="cannot identify"):
        images.open(1)


def test_a_truncated_compressed_or_empty_tar_is_named(tmp_path: Path):
    folder = imagenet_a(tmp_path)
    whole = as_tar(folder, tmp_path / "whole.tar")
    for cut in (1500, whole.stat().st_size // 2):
        (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[:cut])
        with pytest.raises(ValueError, match=r"cut.tar' is truncated"):
            TarImages(tmp_path / "cut.tar")
    damaged = bytearray(whole.read_bytes())
    header = TarImages(whole)._members[f"{A_CLASSES[1]}/{NAMES[0]}"].offset - 512
    damaged[header : header + 512] = b"x" * 512
    (tmp_path / "damaged.tar").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"damaged.tar' is truncated or no tar: .*header"):
        TarImages(tmp_path / "damaged.tar")
    with pytest.raises(ValueError, match="compressed and cannot be read at random"):
        TarImages(as_tar(folder, tmp_path / "a.tar.gz", mode="w:gz"))
    with pytest.raises(ValueError, match="holds no image"):
        TarImages(tar_of(tmp_path / "none.tar", [("README.txt", b"text")]))
    with pytest.raises(ValueError, match="does not exist"):
        TarImages(tmp_path / "nowhere.tar")


def test_a_compressed_tar_is_unzipped_once_or_not_at_all(tmp_path: Path):
    zipped = as_tar(imagenet_a(tmp_path), tmp_path / "a.tar.gz", mode="w:gz")
    plain = plain_tar(zipped, tmp_path / "cache" / "a.tar")
    assert len(TarImages(plain)) == 9
    (tmp_path / "cut.tar.gz").write_bytes(zipped.read_bytes()[:-200])
    with pytest.raises(ValueError, match="cannot be unzipped"):
        plain_tar(tmp_path / "cut.tar.gz", tmp_path / "cache" / "cut.tar")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["a.tar"]


def test_validation_images_have_the_same_labels_flat_and_in_class_folders(tmp_path: Path):
    by_index = {index: wnid for wnid, index in class_list("imagenet1k").items()}
    numbers = [1, 2, 17, 50000]
    for number in numbers:
        name = f"ILSVRC2012_val_{number:08d}.JPEG"
        jpeg(tmp_path / "flat/imagenet-1k/val" / name, number)
        jpeg(tmp_path / "deep/imagenet-1k/val" / by_index[validation_labels()[number - 1]] / name, number)
    flat, deep = (open_set(entry("imagenet-1k"), tmp_path / kind) for kind in ("flat", "deep"))
    assert flat.labels.tolist() == [validation_labels()[number - 1] for number in numbers]
    assert flat.labels.tolist()[:2] == [65, 970]  # by hand, from the devkit's ground truth
    by_name = dict(zip((i.rpartition("/")[2] for i in deep.ids), deep.labels.tolist(), strict=True))
    assert [by_name[name] for name in flat.ids] == flat.labels.tolist()


def test_training_images_are_never_taken_for_validation_images(tmp_path: Path):
    jpeg(tmp_path / "imagenet-1k/train/n01440764/n01440764_10026.JPEG", 0)
    assert find(entry("imagenet-1k"), tmp_path) is None


def test_folders_named_by_number_are_read_as_numbers(tmp_path: Path):
    for number in (0, 2, 10, 999):
        jpeg(tmp_path / f"imagenetv2-matched-frequency-format-val/{number}/{number}f.jpeg", number)
    images = open_set(entry("imagenet-v2-matched-frequency"), tmp_path)
    assert dict(zip(images.ids, images.labels.tolist(), strict=True)) == {
        "0/0f.jpeg": 0,
        "10/10f.jpeg": 10,
        "2/2f.jpeg": 2,
        "999/999f.jpeg": 999,
    }


def test_the_folders_of_imagenet_o_are_no_labels(tmp_path: Path):
    jpeg(tmp_path / "imagenet-o/n01443537/benthos_0.9994893.JPEG", 0)
    assert open_set(entry("imagenet-o"), tmp_path).labels.tolist() == [-1]


def test_textures_that_are_imagenet_classes_are_left_out(tmp_path: Path):
    for kind in ("banded", "bubbly", "cobwebbed", "honeycombed", "spiralled"):
        jpeg(tmp_path / f"textures/images/{kind}/{kind}_0001.jpg", 0)
    assert list(open_set(entry("textures"), tmp_path).ids) == ["banded/banded_0001.jpg"]
    assert len(open_set(entry("textures"), tmp_path, every_folder=True)) == 5


def test_one_corruption_and_severity_is_a_set_of_its_own(tmp_path: Path):
    for severity in (1, 2):
        jpeg(tmp_path / f"imagenet-c/blur/defocus_blur/{severity}/n01440764/ILSVRC2012_val_00000293.JPEG", severity)
    images = below(open_set(entry("imagenet-c-blur"), tmp_path), "defocus_blur/2")
    assert (len(images), images.labels.tolist(), images.name) == (1, [0], "imagenet-c-blur/defocus_blur/2")
    with pytest.raises(ValueError, match="has no folder 'fog/1'"):
        below(images, "fog/1")


def test_a_folder_that_is_no_class_of_the_set_is_named(tmp_path: Path):
    imagenet_a(tmp_path)
    jpeg(tmp_path / "imagenet-a/n01440764/a.jpg", 0)  # tench is none of the 200
    with pytest.raises(ValueError, match=r"folder 'n01440764' of 'n01440764/a.jpg' is none of its 200 classes"):
        open_set(entry("imagenet-a"), tmp_path)


def test_shards_are_named_by_a_range_or_their_folder(tmp_path: Path):
    for number in (0, 1, 2, 10):
        (tmp_path / f"{number}.tar").write_bytes(b"")
    assert [path.name for path in shard_paths(tmp_path)] == ["0.tar", "1.tar", "2.tar", "10.tar"]
    assert [path.name for path in shard_paths(str(tmp_path / "{0..2}.tar"))] == ["0.tar", "1.tar", "2.tar"]
    with pytest.raises(ValueError, match=r"3.tar' does not exist"):
        shard_paths(str(tmp_path / "{0..3}.tar"))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b""), ("a.png", b"")], "sample 'a' has 2 images"),
        ([("a.jpg", b""), ("a.cls", b"x")], "class of 'a' is 'x', not a number"),
        ([("a.jpg", b""), ("a.cls", b"3")], "class 3 of 'a' is not below 3"),
        ([("a.jpg", b""), ("a.json", b"{")], "json of 'a' cannot be read"),
        ([("a.cls", b"1")], "hold no image"),
        ([("a.jpg", b""), ("a.json", b'{"path": "p"}'), ("b.jpg", b""), ("b.json", b'{"path": "p"}')], "two samples"),
    ],
)
def test_shards_that_do_not_say_what_they_hold_are_refused(
    tmp_path: Path, members: list[tuple[str | tarfile.TarInfo, bytes]], message: str
):
    with pytest.raises(ValueError, match=message):
        ShardImages([tar_of(tmp_path / "0.tar", members)], name="s", classes=[5, 6, 7])


def test_joined_and_cut_sets_keep_every_image_with_its_label(tmp_path: Path):
    folder = imagenet_a(tmp_path)
    images = FolderImages(folder, name="a", labels={f"{A_CLASSES[2]}/{NAMES[0]}": 4})
    cut = SubsetImages(images, [8, 6, 0], name="cut")
    joined = JoinedImages([images, cut], name="both")
    assert joined.rows("cut").tolist() == [9, 10, 11]
    assert joined.ids[10] == f"cut/{images.ids[6]}"
    assert joined.labels.tolist() == [-1] * 6 + [4, -1, -1] + [-1, 4, -1]
    assert np.array_equal(np.array(joined.open(10)), np.array(images.open(6)))
    assert (
        len({images.fingerprint, cut.fingerprint, joined.fingerprint, SubsetImages(images, [6, 8, 0]).fingerprint}) == 4
    )
    with pytest.raises(ValueError, match="different names"):
        JoinedImages([images, images], name="twice")


def test_the_data_root_comes_from_the_option_then_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("OOD_DATA_ROOT", raising=False)
    assert data_root(None) is None
    monkeypatch.setenv("OOD_DATA_ROOT", str(tmp_path))
    assert data_root(None) == tmp_path
    assert data_root(tmp_path / "other") == tmp_path / "other"


class Rows:
    """What `datasets.load_dataset` gives, as far as it is used."""

    column_names = ["image", "label"]
    _fingerprint = "f"

    def __init__(self) -> None:
        self.features = {"label": types.SimpleNamespace(names=list(A_CLASSES))}
        self.images = [Image.new("L", (4, 3), 7 * row) for row in range(3)]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: int | str) -> Any:
        return [2, [0, 1], 1] if key == "label" else {"image": self.images[int(key)]}


def test_a_set_on_the_hub_has_rgb_images_and_labels_by_class_name(monkeypatch: pytest.MonkeyPatch):
    asked = []
    package = types.ModuleType("datasets")
    package.load_dataset = lambda *args, **kwargs: asked.append((args, kwargs)) or Rows()  # pyright: ignore
    monkeypatch.setitem(sys.modules, "datasets", package)
    images = HubImages("who/set", split="test", revision="abc", class_index=class_list("imagenet1k"))
    assert asked == [(("who/set",), {"split": "test", "revision": "abc"})]
    assert images.labels.tolist() == [954, -1, 11]  # a row with two classes counts as unlabelled
    assert (images.open(1).mode, images.open(1).getpixel((0, 0))) == ("RGB", (7, 7, 7))
    with pytest.raises(ValueError, match="no column 'jpg'"):
        HubImages("who/set", split="test", image="jpg")


def test_without_the_hub_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        HubImages("who/set", split="test")


def test_cifar_test_images_are_read_plane_by_plane_and_from_arrays(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    record = b"".join(
        bytes([label]) + b"".join(pixels[row, :, :, channel].tobytes() for channel in range(3))
        for row, label in enumerate((3, 8))
    )
    (tmp_path / "cifar-10/cifar-10-batches-bin").mkdir(parents=True)
    (tmp_path / "cifar-10/cifar-10-batches-bin/test_batch.bin").write_bytes(record)
    (tmp_path / "cifar-10.1").mkdir()
    np.save(tmp_path / "cifar-10.1/cifar10.1_v6_data.npy", pixels)
    np.save(tmp_path / "cifar-10.1/cifar10.1_v6_labels.npy", np.array([3, 8], dtype=np.int32))
    (tmp_path / "cifar-10.2").mkdir()
    np.savez(tmp_path / "cifar-10.2/cifar102_test.npz", images=pixels, labels=np.array([3, 8]))
    for name in ("cifar-10", "cifar-10.1", "cifar-10.2"):
        images = open_set(entry(name), tmp_path)
        assert images.labels.tolist() == [3, 8]
        assert all(np.array_equal(a, b) for a, b in zip(arrays(images), pixels, strict=True))
    (tmp_path / "cifar-10/cifar-10-batches-bin/test_batch.bin").write_bytes(record[:-1])
    with pytest.raises(ValueError, match="no whole number of 3073-byte records"):
        open_set(entry("cifar-10"), tmp_path)


def test_sets_held_against_cifar_are_read_from_their_own_files_and_have_no_labels(tmp_path: Path):
    savemat = pytest.importorskip("scipy.io").savemat
    draw = np.random.default_rng(1)
    pixels = draw.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    planes = [pixels[row].transpose(2, 0, 1).tobytes() for row in range(3)]
    (tmp_path / "cifar-100/cifar-100-binary").mkdir(parents=True)
    (tmp_path / "cifar-100/cifar-100-binary/test.bin").write_bytes(b"".join(bytes([1, 9]) + p for p in planes))
    (tmp_path / "svhn").mkdir()
    savemat(tmp_path / "svhn/test_32x32.mat", {"X": pixels.transpose(1, 2, 3, 0), "y": np.array([[1], [2], [10]])})
    for name in ("cifar-100", "svhn"):
        images = open_set(entry(name), tmp_path)
        assert images.labels.tolist() == [-1] * 3
        assert all(np.array_equal(a, b) for a, b in zip(arrays(images), pixels, strict=True))
    digits = draw.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    for part, (file, compress) in zip(
        (digits[:3], digits[3:]), (("train-images-idx3-ubyte", False), ("t10k-images-idx3-ubyte.gz", True)), strict=True
    ):
        content = b"".join(n.to_bytes(4, "big") for n in (2051, len(part), 28, 28)) + part.tobytes()
        (tmp_path / "MNIST/raw" / file).write_bytes(gzip.compress(content) if compress else content)
    images = open_set(entry("mnist"), tmp_path)
    assert np.array_equal(np.stack(list(arrays(images))), digits)
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte").write_bytes(b"\0" * 40)
    with pytest.raises(ValueError, match="train-images-idx3-ubyte is no whole file of images in the IDX format"):
        open_set(entry("mnist"), tmp_path)


def test_training_images_of_cifar_are_five_files_one_after_another(tmp_path: Path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    assert find(entry("cifar-10-train"), tmp_path) is None
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(bytes([number]) + bytes([10 * number]) * 3072)
    images = open_set(entry("cifar-10-train"), tmp_path)
    assert images.labels.tolist() == [1, 2, 3, 4, 5]
    assert [int(array.flat[0]) for array in arrays(images)] == [10, 20, 30, 40, 50]
    assert find(entry("cifar-10"), tmp_path) is None  # the same folder without the test images


def test_a_fingerprint_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images = JoinedImages([SubsetImages(TarImages(as_tar(imagenet_a(tmp_path), tmp_path / "a.tar")), [0, 1])], name="j")
    before = images.fingerprint
    monkeypatch.setattr(Path, "stat", lambda self: pytest.fail("looked at the file again"))
    assert images.fingerprint == before
