import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from ood_toolkit.records import METRICS, read_records, write_records
from ood_toolkit.reporting.classes import class_table
from ood_toolkit.reporting.report import report
from ood_toolkit.reporting.runs import Run
from ood_toolkit.reporting.tables import tables
from ood_toolkit.scorefile import Column, ScoreFile

MakeFolder = Callable[..., Path]
VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """Checks nesting and collects what a page loads, its anchors and its identifiers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [found[key] or "" for key in ("src", "srcset", "data") if key in found]
        if tag == "link":
            self.loads.append(found["href"] or "")
        if tag == "a":
            self.links.append(found["href"] or "")
        if "id" in found:
            self.ids.append(found["id"] or "")
        if tag == "img":
            self.images.append(found)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def folder(make_folder: MakeFolder) -> Path:
    return make_folder(detectors=(("msp", "logits"), ("vim('<b>&\"')", "features")), ood=("textures",), rows=60)


def test_the_page_is_well_formed_and_loads_nothing(folder: Path, tmp_path: Path) -> None:
    text = report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert all(url.startswith("data:") for url in page.loads)
    assert not re.search(r"url\(|@import|https?://", text.replace("http://www.w3.org", ""))
    assert "default-src 'none'" in text
    assert len(page.images) > 5
    assert all(image["alt"] for image in page.images)
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "<b>&" not in text


def test_the_page_holds_every_number_of_the_tables(folder: Path, tmp_path: Path) -> None:
    text = report(folder, tmp_path, draw=False).read_text(encoding="utf-8")
    for table in tables(read_records(folder / "records.jsonl")):
        for row in table.cells:
            assert all(f">{cell.text}<" in text for cell in row)
        assert all(part.replace("'", "&#x27;") in text for part in table.caption)


def test_the_page_says_how_to_rerun_what_was_left_out_and_how_long_it_took(folder: Path, tmp_path: Path) -> None:
    text = report(folder, tmp_path, draw=False, papers={"msp": "Hendrycks & Gimpel 2017"}).read_text(encoding="utf-8")
    for words in (
        "ood-bench --ood &#x27;textures=my textures&#x27; --seed 0",
        "needs tap layer3",
        "broken.jpg",
        "12.5 s",
        "Hendrycks &amp; Gimpel 2017",
        METRICS["fpr95"].about,
        "↓ lower is better",
    ):
        assert words in text


def test_thumbnails_are_off_by_default(make_folder: MakeFolder, tmp_path: Path) -> None:
    from PIL import Image

    photos = tmp_path / "photos"
    photos.mkdir()
    for part in ("val1300", "textures"):
        for i in range(40):
            Image.new("RGB", (9, 9)).save(photos / f"{part}-{i:04}.jpg")
    folder = make_folder(detectors=(("msp", "logits"),), ood=("textures",), rows=40, images=photos)
    for images in (False, True):
        text = report(folder, tmp_path / "page.html", images=images).read_text(encoding="utf-8")
        assert ("Most surely missed" in text) == images


def test_a_report_needs_nothing_but_records(folder: Path, tmp_path: Path) -> None:
    for name in ("scores.safetensors", "run.json"):
        (folder / name).unlink()
    assert "AUROC" in report(folder, tmp_path / "page.html").read_text(encoding="utf-8")


def test_every_class_has_its_accuracy_and_confidence(folder: Path) -> None:
    file = ScoreFile.load(folder / "scores.safetensors")
    labels = torch.arange(60) % 3
    file.add(Column("label", "", "", "val1300"), labels)
    file.add(Column("prediction", "demo:efficientnet_lite0", "", "textures"), torch.arange(60) % 2)
    file.save(folder / "scores.safetensors")
    run = Run.open(folder)
    table = class_table(run, "demo:efficientnet_lite0", "val1300", names=("cat", "dog", "bird"))
    assert table is not None
    (plain, *_) = run.confidences("demo:efficientnet_lite0", "val1300")
    shown = {row.label: [cell.value for cell in cells] for row, cells in zip(table.rows, table.cells, strict=True)}
    for index, name in enumerate(("cat", "dog", "bird")):
        of_class = np.arange(60) % 3 == index
        accuracy, confidence = plain.correct[of_class].mean(), plain.confidence[of_class].mean()
        called = 30 if index < 2 else 0
        assert shown[name] == pytest.approx([20, accuracy, confidence, confidence - accuracy, called])
    accuracies = [cells[1].value for cells in table.cells]
    assert accuracies == sorted(accuracies)  # pyright: ignore


def test_without_labels_a_class_is_the_folder_of_its_images(folder: Path) -> None:
    file = ScoreFile.load(folder / "scores.safetensors")
    file.ids["val1300"] = [f"{'cat' if i < 20 else 'dog'}/{i}.jpg" for i in range(60)]
    file.save(folder / "scores.safetensors")
    table = class_table(Run.open(folder), "demo:efficientnet_lite0", "val1300")
    assert table is not None
    assert {row.label: cells[0].value for row, cells in zip(table.rows, table.cells, strict=True)} == {
        "cat": 20,
        "dog": 40,
    }


def test_a_run_that_mixes_settings_is_refused(folder: Path, tmp_path: Path) -> None:
    records = list(read_records(folder / "records.jsonl"))
    from dataclasses import replace

    write_records(folder / "records.jsonl", [replace(records[0], protocol="other"), *records[1:]])
    with pytest.raises(ValueError, match="cannot share a table: the protocol differs"):
        report(folder, tmp_path)


def test_of_many_sets_those_that_are_no_parts_are_drawn_and_the_rest_is_named(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    parts = [f"c/fog/{number}" for number in range(12)]
    folder = make_folder(detectors=(("msp", "logits"),), ood=("textures", *parts), rows=40)
    text = report(folder, tmp_path / "report.html").read_text()
    titles = re.findall(r"<figure><h3>(.*?)</h3>", text)
    assert any("textures" in title for title in titles)
    assert not any("fog" in title for title in titles)
    reason = "curves and histograms of 12 sets, first c/fog/0: too many for one page; ood-bench figures"
    assert f"{reason} {folder.name} --datasets draws those that it names" in text
