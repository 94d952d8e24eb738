from pathlib import Path

import pytest

from ood_toolkit.datasets.commands import check_data, get_data, list_data
from tests.datasets.official import imagenet_a


def test_the_list_says_what_each_set_costs_and_where_it_is(data: Path):
    imagenet_a(data)
    rows = {row[0]: row for row in list_data(data)}
    assert rows["imagenet-a"][1:3] == ("shift", "0.69 GB")
    assert rows["imagenet-a"][4] == str(data / "imagenet-a")
    assert rows["imagenet-r"][4] == "ood-bench data get"
    assert rows["objectnet"][4] == "by hand, see data check"
    assert rows["sun"][3] == rows["imagenet-a"][3] == "not stated"
    assert rows["imagenet-c-blur"][3] == "CC-BY-4.0"
    assert "MIT licence is that of its code" in rows["imagenet-a"][5]


def test_a_check_without_names_is_about_what_is_there(data: Path):
    assert check_data([], data) == ([f"none of the 35 known sets lies below {data}"], True)
    imagenet_a(data)
    lines, fine = check_data([], data)
    assert not fine
    assert lines[0].startswith(f"imagenet-a: 9 images in {data / 'imagenet-a'} (folder): 7,500 images are expected, 9")
    assert "197 class folders are missing" in lines[0]


def test_nothing_is_fetched_before_every_name_is_known(data: Path):
    with pytest.raises(ValueError, match="no data set is named 'imagenet-b'"):
        get_data(["imagenet-a", "imagenet-b"], data, yes=True)
    with pytest.raises(ValueError, match="say which data sets"):
        get_data([], data)
    with pytest.raises(ValueError, match="needs your agreement"):
        get_data(["imagenet-a"], data)
    assert list(data.iterdir()) == []


def test_without_a_data_root_the_error_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OOD_DATA_ROOT", raising=False)
    with pytest.raises(ValueError, match=r"--data-root DIR or \$OOD_DATA_ROOT"):
        check_data(["imagenet-a"])
