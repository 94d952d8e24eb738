"""A method that was named and cannot learn from the data: the run's other numbers, the reason, exit code 2."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ood_toolkit.records import read_records
from tests.command_line import Bench
from tests.datasets.official import jpeg

DIGITS = ("--ensemble", "none", "--resamples", 0)
NO_TEMPERATURE = "temperature(bounds=(50.0, 60.0))"


def test_named_detectors_and_calibrators_that_cannot_be_fitted_are_missing_cells_with_a_reason_and_exit_code_2(
    bench: Bench, tmp_path: Path
):
    result = bench(*DIGITS, "--detectors", "msp,pca(dim=5000)", "--calibrators", NO_TEMPERATURE)
    assert result.code == 2
    last = result.err.splitlines()[-1]
    assert last.startswith("ood-bench: ")
    assert "pca(dim=5000) has no numbers: dim must lie between 1 and" in last
    assert f"{NO_TEMPERATURE} has no numbers: the best temperature is below the bounds" in last
    assert "dim must lie between 1 and" in result.out  # the footnote
    assert "best temperature is below the bounds" in result.out
    records = read_records(tmp_path / "run" / "records.jsonl")
    values = {r.method: r.value for r in records if r.metric in ("auroc", "nll")}
    assert values["msp"] is not None
    assert values["none"] is not None
    assert values["pca(dim=5000)"] is None
    assert values[NO_TEMPERATURE] is None
    assert set(json.loads((tmp_path / "run" / "run.json").read_text())["failed"]) == {"pca(dim=5000)", NO_TEMPERATURE}
    assert (tmp_path / "run" / "table.md").exists()


OWN = """
import torch
from torch import nn
from ood_toolkit.detectors import Detector
from ood_toolkit.models.reductions import Reduction


class Peaks(Reduction):
    name = "channel_peaks"

    def reduce(self, layer):
        return layer.flatten(2).amax(dim=2)


class PeakDetector(Detector):
    name = "peaks"
    taps = ("channel_peaks",)

    def score(self, outputs):
        return -outputs.taps["channel_peaks"].nan_to_num().amax(dim=1)


class Broken(Detector):
    name = "broken"

    def score(self, outputs):
        raise RuntimeError("no such thing")


def without(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def network():
    net = without(2)
    net.own_taps = {"channel_peaks": Peaks}
    return net
"""


@pytest.fixture
def own(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """The command where `own_parts` lies in the current folder, with twelve known images of two classes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_parts.py").write_text(OWN)
    for number in range(12):
        jpeg(tmp_path / "known" / f"class{number % 2}" / f"{number}.jpg", number)
        jpeg(tmp_path / "odd" / f"{number}.jpg", 100 + number)
    asked = ("--suite", "folders", "--id", "known", "--ood", "odd=odd", "--calibrators", "none", "--resamples", 0)
    yield lambda *more: bench(*asked, *more)
    sys.modules.pop("own_parts", None)


def test_a_detector_of_ones_own_that_raises_is_named(own: Bench):
    result = own("--model", "own_parts:network", "--detectors", "own_parts:Broken")
    assert result.code == 1
    last = result.err.splitlines()[-1]
    assert last == "ood-bench: RuntimeError: no such thing, in the stage 'detect broken' (OOD_DEBUG=1 shows where)"


def test_a_tap_that_only_some_models_have_is_said_to_be_missing_from_the_others(own: Bench):
    models = ("--model", "own_parts:network", "--model", "own_parts:without")
    result = own(*models, "--detectors", "own_parts:PeakDetector,msp", "--ensemble", "none")
    assert result.code == 0
    assert "own_parts:without: peaks left out: needs the tap channel_peaks (no tap of that name" in result.err
    assert "own_parts:network: peaks left out" not in result.err
