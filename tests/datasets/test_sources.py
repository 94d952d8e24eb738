import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ood_toolkit.benchmarks.folders import Folders
from ood_toolkit.datasets import HubImages
from ood_toolkit.datasets.corrupted import CorruptedImages
from ood_toolkit.datasets.sources import open_images
from tests.datasets.official import as_shards, as_tar

KINDS = ("ant", "bee")
FILES = [f"{kind}/{number}.jpg" for kind in KINDS for number in range(6)]
LABELS = {file: KINDS.index(file.partition("/")[0]) for file in FILES}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """The same twelve images in every layout without an optional package."""
    folder = tmp_path / "photos"
    for number, file in enumerate(FILES):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / file)
    as_tar(folder, tmp_path / "photos.tar")
    as_shards(folder, tmp_path / "cls", LABELS, per_shard=5, field="cls")
    as_shards(folder, tmp_path / "json", LABELS, per_shard=12, field="json")
    return {
        "folder": str(folder),
        "tar": str(tmp_path / "photos.tar"),
        "shards": str(tmp_path / "cls"),
        "range": str(tmp_path / "cls" / "{0..2}.tar"),
        "shard": str(tmp_path / "json" / "0.tar"),
    }


def test_a_place_of_any_layout_holds_the_same_images(places: dict[str, str]):
    first = open_images(places["folder"])
    for place in places.values():
        images = open_images(place, name="mine")
        assert (list(images.ids), images.name) == (sorted(FILES), "mine")
        for row in (0, 7):
            assert np.array_equal(np.array(images.open(row)), np.array(first.open(row)))
    assert [open_images(places[kind]).name for kind in ("folder", "tar", "shards")] == ["photos", "photos", "cls"]


def test_the_users_own_images_give_the_same_suite_from_any_layout(places: dict[str, str]):
    suites = [Folders(id=Path(place)).suite(2, KINDS) for place in places.values()]
    for suite in suites:
        for ours, first in zip(suite.parts, suites[0].parts, strict=True):
            assert torch.equal(ours.indices, first.indices)
            assert torch.equal(ours.labels, first.labels)
    Folders(id=Path(places["tar"])).require()


def test_labels_that_a_place_states_count_before_its_folders_and_after_a_file(places: dict[str, str], tmp_path: Path):
    stated = Folders(id=Path(places["shards"]), fit_fraction=0, calibrate_fraction=0)
    assert stated.suite(2, ("bee", "ant")).tasks[0].id.labels.tolist() == [0] * 6 + [1] * 6
    named = Folders(id=Path(places["tar"]), fit_fraction=0, calibrate_fraction=0)
    assert named.suite(2, ("bee", "ant")).tasks[0].id.labels.tolist() == [1] * 6 + [0] * 6
    file = tmp_path / "labels.csv"
    file.write_text("".join(f"{image},{number % 2}\n" for number, image in enumerate(sorted(FILES))))
    listed = Folders(id=Path(places["shards"]), labels=file, fit_fraction=0, calibrate_fraction=0)
    assert listed.suite(2, KINDS).tasks[0].id.labels.tolist() == [0, 1] * 6


def test_parquet_files_in_a_folder_are_a_place_too(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow", reason="the optional package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.png").touch()
    Image.new("RGB", (3, 2), "red").save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").unlink()
    parquet.write_table(arrow.table({"image": [content] * 4, "label": [0, 1, 1, 5]}), tmp_path / "a.parquet")
    suite = Folders(id=tmp_path, fit_fraction=0, calibrate_fraction=0).suite(6, None)
    assert suite.tasks[0].id.labels.tolist() == [0, 1, 1, 5]
    assert suite.tasks[0].id.images.open(3).size == (3, 2)
    with pytest.raises(ValueError, match="1 labels lie outside the model's 3 classes"):
        Folders(id=tmp_path).suite(3, None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The package `datasets` with one set of two classes that have names."""
    asked: list[tuple[Any, ...]] = []

    class Rows:
        column_names = ["image", "label"]
        features = {"label": types.SimpleNamespace(names=["bee", "ant"])}

        def __len__(self) -> int:
            return 4

        def __getitem__(self, key: int | str) -> Any:
            return [0, 1, 1, 0] if key == "label" else {"image": Image.new("RGB", (4, 4))}

    package = types.ModuleType("datasets")
    package.load_dataset = lambda name, split, revision: asked.append((name, split, revision)) or Rows()  # pyright: ignore
    monkeypatch.setitem(sys.modules, "datasets", package)
    return asked


def test_a_set_on_the_hub_is_named_with_its_split_and_revision(hub: list[tuple[Any, ...]]):
    assert isinstance(open_images("hub:who/set"), HubImages)
    open_images(Path("hub:who/set@abc:train[:10%]"))
    assert hub == [("who/set", "test", None), ("who/set", "train[:10%]", "abc")]
    with pytest.raises(ValueError, match="write hub:OWNER/NAME"):
        open_images("hub::test")


def test_classes_of_the_hub_are_found_by_name_or_taken_in_order(hub: list[tuple[Any, ...]]):
    folders = Folders(id=Path("hub:who/set:test"), fit_fraction=0, calibrate_fraction=0)
    folders.require()
    assert hub == []  # nothing is fetched before a model is loaded
    assert folders.suite(2, ("ant", "bee")).tasks[0].id.labels.tolist() == [1, 0, 0, 1]
    assert folders.suite(2, ("wasp", "fly")).tasks[0].id.labels.tolist() == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="1 classes of 'id' are not known, first 'ant'"):
        folders.suite(2, ("wasp", "bee"))


def test_a_place_can_be_seen_under_a_corruption(places: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    package = types.ModuleType("corrupt_tta")
    package.corrupt = lambda pixels, severity, corruption_name: 255 - pixels  # pyright: ignore
    package.__version__ = "0"  # pyright: ignore
    monkeypatch.setitem(sys.modules, "corrupt_tta", package)
    place = f"corrupt:fog/3:{places['tar']}"
    images = open_images(place, name="foggy")
    assert isinstance(images, CorruptedImages)
    assert (images.name, images.severity, images.open(0).size) == ("foggy", 3, (224, 224))
    suite = Folders(id=Path(place), fit_fraction=0, calibrate_fraction=0).suite(2, KINDS)
    assert suite.tasks[0].id.labels.tolist() == [0] * 6 + [1] * 6
    with pytest.raises(ValueError, match="write corrupt:CORRUPTION/SEVERITY:PLACE"):
        open_images("corrupt:fog:photos")
    with pytest.raises(ValueError, match="does not exist"):
        open_images("corrupt:fog/3:nowhere")
