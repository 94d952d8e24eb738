"""The script that measures time and memory against the number of rows still runs, on few rows and few images."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "scaling.py"


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_detector_gets_a_time_and_a_peak_for_every_number_of_rows(tmp_path: Path):
    out = tmp_path / "record.md"
    words = ["--rows", "2000,4000", "--width", "16", "--classes", "4", "--only", "vim,knn(k=3)", "--scored", "100"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--folder", str(tmp_path), "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    times, peaks = out.read_text(encoding="utf-8").split("## Peak")
    for spec in ("vim", "knn(k=3)"):
        row = rf"\| {re.escape(spec)} \|"
        assert re.search(rf"{row} \d+\.\d\d \+ \d+\.\d\d \| \d+\.\d\d \+ \d+\.\d\d \| ", times)
        assert re.search(rf"{row} \d+ \| \d+ \| ", peaks)
    assert "--scored 100" in times


def test_the_made_up_store_holds_its_rows_with_the_logits_of_its_head(scaling, tmp_path: Path):
    scaling.make_store(tmp_path / "store", 600, 16, 4)
    outputs = scaling.open_store(tmp_path / "store", 550)
    assert len(outputs) == 550
    assert outputs.labels.tolist() == [row % 4 for row in range(550)]
    # features are made positive after the logits are taken, so only most of a logit is the head's
    (block,) = outputs.batches(600)
    assert float((outputs.head(block.features) - block.logits).abs().median()) < 0.1


def test_a_limited_folder_links_the_first_images_and_its_labels_are_theirs(scaling, tmp_path: Path):
    for name in ("b/2.png", "a/1.png", "c/3.png"):
        (tmp_path / "all" / name).parent.mkdir(parents=True)
        (tmp_path / "all" / name).write_bytes(name.encode())
    labels = tmp_path / "labels.tsv"
    labels.write_text("# file\tclass\na/1.png\tn01\nb/2.png\tn02\nc/3.png\tn03\n")
    few = scaling.limited(tmp_path / "all", tmp_path / "few", 2)
    assert {str(file.relative_to(few)): file.read_bytes() for file in few.rglob("*.png")} == {
        "a/1.png": b"a/1.png",
        "b/2.png": b"b/2.png",
    }
    (tmp_path / "kept").mkdir()
    kept = scaling.labels_of(few, labels, tmp_path / "kept")
    assert kept.read_text() == "# file\tclass\na/1.png\tn01\nb/2.png\tn02\n"
    assert scaling.limited(tmp_path / "all", tmp_path / "none", None) == tmp_path / "all"
