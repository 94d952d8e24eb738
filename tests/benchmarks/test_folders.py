from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ood_toolkit.benchmarks.folders import Folders
from ood_toolkit.benchmarks.suite import Part, Suite, Task


def photos(root: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / name)
    return root


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    known = photos(tmp_path / "known", [f"{kind}/{n}.png" for kind in ("ant", "bee") for n in range(20)])
    strange = photos(tmp_path / "strange", [f"{n}.png" for n in range(5)])
    return Folders(id=known, ood={"strange": strange})


def test_what_is_learned_from_is_never_scored(folders: Folders):
    suite = folders.suite(2, ("ant", "bee"))
    assert suite.fit is not None
    assert suite.calibration is not None
    test = next(part for part in suite.scored if part.name == "id")
    rows = [set(part.indices.tolist()) for part in (suite.fit, suite.calibration, test)]
    assert [len(part) for part in rows] == [12, 8, 20]
    assert set.union(*rows) == set(range(40))


def test_the_split_is_the_same_for_a_seed_and_another_for_another(folders: Folders):
    def description(seed: int) -> str:
        part = Folders(id=folders.id, seed=seed).suite(2, ("ant", "bee")).fit
        assert part is not None
        return part.description

    assert description(0) == description(0)
    assert description(0).split(", ")[-1] != description(1).split(", ")[-1]


def test_own_folders_for_fitting_leave_all_of_id_to_score(folders: Folders, tmp_path: Path):
    extra = photos(tmp_path / "extra", ["ant/x.png", "bee/y.png"])
    suite = Folders(id=folders.id, fit=extra, calibrate=extra).suite(2, ("ant", "bee"))
    assert suite.fit is not None
    assert suite.fit.labels.tolist() == [0, 1]
    assert len(suite.tasks[0].id) == 40


def test_a_suite_that_would_score_what_it_learns_from_is_refused(folders: Folders):
    images = folders.suite(2, ("ant", "bee")).tasks[0].id.images
    part = Part("all", images)
    with pytest.raises(ValueError, match="would score 40 images of 'all' that it learns from"):
        Suite(name="s", caption="", tasks=[Task("misclassification", "d", part)], fit=part)


def test_fractions_that_leave_nothing_to_score_are_refused(folders: Folders):
    with pytest.raises(ValueError, match="which leaves none to score; lower --fit-fraction"):
        Folders(id=folders.id, fit_fraction=0.6, calibrate_fraction=0.4).suite(2, ("ant", "bee"))
    with pytest.raises(ValueError, match=r"--fit-fraction must lie in \[0, 1\)"):
        Folders(id=folders.id, fit_fraction=1.5).suite(2, ("ant", "bee"))


def test_labels_outside_the_model_are_refused(folders: Folders, tmp_path: Path):
    file = tmp_path / "labels.csv"
    names = [f"{kind}/{n}.png" for kind in ("ant", "bee") for n in range(20)]
    file.write_text("".join(f"{name},{7 if name == 'bee/3.png' else 0}\n" for name in names))
    with pytest.raises(ValueError, match=r"1 labels lie outside the model's 2 classes, first 7 for 'bee/3.png'"):
        Folders(id=folders.id, labels=file).suite(2, ("ant", "bee"))


@pytest.mark.parametrize("field", ["id", "fit", "calibrate", "labels"])
def test_a_missing_path_is_an_error_before_any_model_is_loaded(folders: Folders, tmp_path: Path, field: str):
    fields: dict[str, Any] = {"id": folders.id, field: tmp_path / "nowhere"}
    with pytest.raises(ValueError, match=r"nowhere.*does not exist"):
        Folders(**fields).require()


@pytest.mark.parametrize("name", ["id", "fit", "calibration"])
def test_an_ood_set_cannot_take_the_name_of_another_part(folders: Folders, name: str):
    with pytest.raises(ValueError, match=f"an OOD set cannot be named '{name}'"):
        Folders(id=folders.id, ood={name: folders.ood["strange"]}).require()


def test_parts_of_one_name_are_refused(folders: Folders):
    test = folders.suite(2, ("ant", "bee")).tasks[0].id
    with pytest.raises(ValueError, match="two parts named 'id'"):
        Suite(name="s", caption="", tasks=[Task("anomaly", "x", test, Part("id", test.images))])


def test_folders_with_equal_names_sizes_and_times_are_different_sets(tmp_path: Path):
    import os

    from ood_toolkit.datasets import FolderImages

    sets = []
    for place, shade in (("a", 0), ("b", 255)):
        (tmp_path / place).mkdir()
        Image.new("RGB", (8, 8), (shade,) * 3).save(tmp_path / place / "x.bmp")
        os.utime(tmp_path / place / "x.bmp", ns=(0, 0))
        sets.append(FolderImages(tmp_path / place))
    assert sets[0].fingerprint != sets[1].fingerprint
    assert sets[0].content == sets[1].content
