import json
from pathlib import Path

import pytest

from ood_toolkit.datasets.catalogue import catalogue, entry
from ood_toolkit.datasets.classes import class_list, validation_labels

PROTOCOL = Path(__file__).parents[2].parent / "shared" / "protocol"
NAMES = {
    "imagenet-1k val": "imagenet-1k",
    "imagenet-a": "imagenet-a",
    "imagenet-o": "imagenet-o",
    "imagenet-r": "imagenet-r",
    "imagenet-sketch": "imagenet-sketch",
    "imagenet-v2 matched-frequency": "imagenet-v2-matched-frequency",
    "imagenet-v2 threshold0.7": "imagenet-v2-threshold0.7",
    "imagenet-v2 top-images": "imagenet-v2-top-images",
    "imagenet-c blur": "imagenet-c-blur",
    "imagenet-c digital": "imagenet-c-digital",
    "imagenet-c extra": "imagenet-c-extra",
    "imagenet-c noise": "imagenet-c-noise",
    "imagenet-c weather": "imagenet-c-weather",
    "openimage-o": "openimage-o",
    "ninco": "ninco",
    "inaturalist (MOS subset)": "inaturalist",
    "sun (MOS subset)": "sun",
    "places (MOS subset)": "places",
    "textures/DTD r1.0.1": "textures",
}


@pytest.fixture(scope="module")
def facts() -> Path:
    if not PROTOCOL.is_dir():
        pytest.skip("../shared/protocol is not beside this checkout")
    return PROTOCOL


def test_checksums_sizes_and_addresses_are_those_of_the_collected_facts(facts: Path):
    for fact in json.loads((facts / "datasets.json").read_text()):
        if fact["name"] not in NAMES:
            continue
        known = entry(NAMES[fact["name"]])
        (archive,) = known.archives
        assert archive.md5 == fact.get("md5"), known.name
        if known.name != "imagenet-o":  # there they are another file's, see its faults
            assert (archive.bytes, archive.sha256) == (fact.get("bytes"), fact.get("sha256")), known.name
        assert archive.url in (fact["url"], None), known.name
        if isinstance(fact["images"], int):
            assert known.images == fact["images"], known.name


def test_class_lists_and_validation_labels_are_those_of_the_collected_facts(facts: Path):
    for name in ("imagenet1k", "imagenet_a", "imagenet_o", "imagenet_r"):
        rows = [line.split("\t") for line in (facts / f"{name}_classes.txt").read_text().splitlines()]
        assert dict(class_list(name)) == {row[0]: int(row[1]) for row in rows if not row[0].startswith("#")}
    rows = [line.split("\t") for line in (facts / "ilsvrc2012_val_labels.tsv").read_text().splitlines()]
    assert list(validation_labels()) == [int(row[2]) for row in rows if not row[0].startswith("#")]


def test_class_lists_have_their_size_and_order():
    whole = class_list("imagenet1k")
    assert len(set(class_list("imagenet_a")) & set(class_list("imagenet_o"))) == 59
    for name in ("imagenet_a", "imagenet_o", "imagenet_r"):
        classes = class_list(name)
        assert (len(classes), list(classes)) == (200, sorted(classes))
        assert all(whole[wnid] == index for wnid, index in classes.items())
    assert all(validation_labels().count(index) == 50 for index in range(1000))


def test_every_set_of_the_benchmark_is_described():
    names = set(catalogue())
    assert {*NAMES.values(), "imagenet-p", "imagenet-hard", "objectnet", "stylized-imagenet", "domainnet"} <= names
    assert {"cifar-10", "cifar-10.1", "cifar-10.2", "ssb-hard", "cifar-100", "svhn", "mnist"} <= names


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_a_set_can_be_fetched_or_says_what_to_do(name: str):
    known = catalogue()[name]
    assert known.fetchable or known.login
    assert known.cite
    assert known.places or known.labels == "unread"
    for archive in known.archives:
        assert len(archive.md5 or "0" * 32) == 32
        assert len(archive.sha256 or "0" * 64) == 64
        assert archive.url is None or archive.url.endswith(archive.file)
        assert archive.md5 or archive.sha256


def test_the_page_on_data_has_a_row_for_every_set_with_its_number_of_images():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    rows = {cells[1]: cells for line in page.splitlines() if len(cells := [c.strip() for c in line.split("|")]) == 7}
    for name, known in catalogue().items():
        assert rows[name][2] == known.use, name
        assert known.images is None or rows[name][3] == f"{known.images:,}", name
        assert ("`data get`" in rows[name][4]) == known.fetchable, name


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_a_licence_is_a_name_with_a_short_condition_and_remarks_are_notes(name: str):
    licence = catalogue()[name].licence
    assert licence is None or len(licence) < 90
    for remark in ("card", "repo", "pytorch", ".py", "None", "(", "verify"):
        assert remark not in (licence or ""), licence


def test_the_faults_that_move_numbers_are_named():
    assert "one in five" in " ".join(entry("imagenet-o").faults)
    assert "bubbly and cobwebbed" in " ".join(entry("textures").faults)


def test_underscores_will_do_and_a_near_miss_is_answered():
    assert entry("imagenet_a") is entry("imagenet-a")
    with pytest.raises(
        ValueError, match=r"no data set is named 'imagnet-a'; did you mean 'imagenet-a'\? Known: cifar-10,"
    ):
        entry("imagnet-a")


def test_checksums_of_the_small_sets_are_those_that_torchvision_enforces():
    from torchvision.datasets import MNIST, SVHN, Places365

    known = {name: entry(name).login or "" for name in ("svhn", "mnist", "places365")}
    assert SVHN.split_list["test"][2] in known["svhn"]
    assert all(md5 in known["mnist"] for file, md5 in MNIST.resources if "images" in file)
    assert dict(Places365._IMAGES_META.values())["val_256.tar"] in known["places365"]
