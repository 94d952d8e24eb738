from pathlib import Path

import pytest

from ood_toolkit.benchmarks.imagenet import Learning
from ood_toolkit.benchmarks.imagenet_suites import imagenet_suite
from ood_toolkit.datasets.classes import validation_labels


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in [n for n, label in enumerate(validation_labels(), 1) if label < 3][:30]:
        touch(tmp_path / f"imagenet-1k/val/ILSVRC2012_val_{number:08d}.JPEG")
    for name in ("iNaturalist", "SUN", "Places"):
        for number in range(3):
            touch(tmp_path / name / "images" / f"{number}.jpg")
    for kind in ("banded", "bubbly"):
        touch(tmp_path / "dtd/images" / kind / "1.jpg")
    return tmp_path


def test_the_mos_table_has_its_four_sets_with_every_texture(root: Path):
    suite = imagenet_suite("mos_imagenet", root, learning=Learning(source="none"))
    sizes = {task.dataset: len(task.ood) for task in suite.tasks if task.ood}
    assert sizes == {"inaturalist": 3, "sun": 3, "places": 3, "textures": 2}  # bubbly stays
    assert all(task.mask is None and len(task.id) == 30 for task in suite.tasks)
    assert suite.protocol == "mos-like"
    assert "sun has 3 images here, 10,000 were published" in suite.caption
    assert "30 validation images are scored, 50,000 were" in suite.caption
    (root / "SUN").rename(root / "elsewhere")
    assert "sun left out, because not found" in imagenet_suite("mos-imagenet", root).caption


def test_the_authors_list_chooses_from_a_larger_set(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ood_toolkit.benchmarks.mos._SELECTED", 4)
    for name in ("b/badlands/sun_a", "c/canal/urban/sun_b", "c/canal/natural/sun_b", "w/wave/sun_c", "w/wave/sun_d"):
        touch(root / "SUN" / "SUN397" / f"{name}.jpg")
    lists = root / "data_lists"
    lists.mkdir()
    chosen = ["b/badlands/sun_a.jpg", "c/canal/urban/sun_b.jpg", "w/wave/sun_c.jpg"]
    (lists / "sun_selected_list.txt").write_text("".join(f"{path} 24\n" for path in chosen))
    suite = imagenet_suite("mos-imagenet", root)
    sun = next(task.ood for task in suite.tasks if task.dataset == "sun")
    assert sun is not None
    assert [image.partition("SUN397/")[2] for image in sun.images.ids] == chosen
    (lists / "sun_selected_list.txt").write_text("b/badlands/sun_a.jpg 24\nx/y/sun_z.jpg 3\n")
    with pytest.raises(ValueError, match=r"sun_selected_list.txt names 2 images of sun, 1 of them are there"):
        imagenet_suite("mos-imagenet", root)
