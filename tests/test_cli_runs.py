"""How a run ends early: interrupted, refused before the long part, or only planned."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from tests.command_line import Bench

HERE = Path(__file__)


def network() -> nn.Module:
    """Four classes, any image size."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


def twin() -> nn.Module:
    """The same weights under another name."""
    return network()


class _Waiting(nn.Module):
    """Waits for Ctrl-C once a shard is whole, where the environment says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if "WAITING" in os.environ and list(Path("cache").glob("*/done/*")):
            time.sleep(600)
        return self.inner(images)


def waiting() -> nn.Module:
    return _Waiting()


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """known/{ant,bee,cow,doe}/*.png, strange/*.png, and this module importable for its factories."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    generator = np.random.default_rng(0)
    for place, shift in [
        *((f"known/{c}/{n}.png", k * 30) for k, c in enumerate(("ant", "bee", "cow", "doe")) for n in range(30)),
        *((f"strange/{n}.png", 200) for n in range(20)),
    ]:
        file = tmp_path / "photos" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((generator.integers(0, 50, (12, 12, 3)) + shift).astype(np.uint8)).save(file)
    return tmp_path / "photos"


def folders(photos: Path, *more: object, model: str = "test_cli_runs:network") -> tuple[object, ...]:
    return ("--suite", "folders", "--model", model, "--id", photos / "known", "--ood", f"strange={photos / 'strange'}",
            "--calibrators", "temperature", "--ensemble", "none", "--resamples", 0, "--out", photos.parent / "run",
            *more)  # fmt: skip


PLAIN = ("--calibrators", "none")  # this network's labels are no likelier than chance: no temperature is best

USAGE = {
    "unknown option": (["--detector", "msp"], "no such option: --detector", "see ood-bench --help"),
    "not a number": (["--seed", "x"], "invalid value for '--seed'", "see ood-bench --help"),
    "out of range": (["--batch-size", "-1"], "invalid value for '--batch-size'", "see ood-bench --help"),
    "unknown command": (["tables"], "no such command 'tables'", "see ood-bench --help"),
    "missing argument": (["table"], "missing argument 'runs'", "see ood-bench table --help"),
    "unknown data command": (["data", "fetch"], "no such command 'fetch'", "see ood-bench data --help"),
}


@pytest.mark.parametrize("case", list(USAGE))
def test_a_usage_error_is_one_line_and_exit_code_2(bench: Bench, case: str):
    words, message, hint = USAGE[case]
    result = bench(*words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"ood-bench: {message}")
    assert hint in result.err


def _hear_interrupts() -> None:
    """A shell's background jobs, the test run maybe among them, are started deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_is_one_line_that_says_what_is_kept_and_the_same_command_resumes(photos: Path, tmp_path: Path):
    for number in range(900):  # more than one shard
        (photos / "strange" / f"more{number}.png").write_bytes((photos / "strange" / "0.png").read_bytes())
    words = folders(photos, "--detectors", "msp", "--cache", tmp_path / "cache", "--batch-size", 8, "--workers", 0,
                    *PLAIN, model="test_cli_runs:waiting")  # fmt: skip
    command = [sys.executable, "-m", "ood_toolkit", *map(str, words)]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, HERE.parents[:2])), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env={**where, "WAITING": "yes"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=_hear_interrupts,
    )
    while process.poll() is None and not list((tmp_path / "cache").glob("*/done/*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = (text.decode() for text in process.communicate(timeout=600))
    assert process.returncode == 130
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("ood-bench: interrupted; the same command resumes")
    assert str(tmp_path / "cache") in last
    assert "numbers so far" not in last  # there are none yet
    assert "Traceback" not in err
    again = subprocess.run(command, env=where, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stderr
    assert computed(again.stderr) < 120 + 920  # a whole shard came from the store


def computed(err: str) -> int:
    """How many images the run says it put through the model."""
    lines = [line.split(": ", 1)[-1] for line in err.splitlines() if " images of " in line and " images/s)" in line]
    return sum(int(line.split(" ")[0]) for line in lines)


def test_ctrl_c_outside_a_run_is_one_line_too(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    def stop(text: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ood_toolkit.citations.bibtex", stop)
    result = bench("cite", "energy")
    assert (result.code, result.err) == (130, "ood-bench: interrupted\n")


def test_a_model_given_twice_is_refused_before_it_is_loaded(bench: Bench, photos: Path):
    result = bench(*folders(photos, "--model", "test_cli_runs:network"))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "test_cli_runs:network is given 2 times: it would be ensembled with itself" in result.err
    member = bench(*folders(photos, "--member", "test_cli_runs:network"))
    assert "ensembled with itself" in member.err


def test_the_same_weights_under_two_names_are_refused(bench: Bench, photos: Path):
    result = bench(*folders(photos, "--model", "test_cli_runs:twin"))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "test_cli_runs:network and test_cli_runs:twin have the same weights and preprocessing" in result.err


def test_one_architecture_with_two_checkpoints_is_told_apart_by_their_names(bench: Bench, photos: Path, tmp_path: Path):
    state = network().state_dict()
    files = [tmp_path / "a" / "last.safetensors", tmp_path / "b" / "last.safetensors"]
    for number, file in enumerate(files):
        file.parent.mkdir()
        save_file({name: value + number for name, value in state.items()}, file)
    weights = [word for file in files for word in ("--checkpoint", file)]
    result = bench(*folders(photos, "--model", "test_cli_runs:network", "--detectors", "msp", *PLAIN, *weights))
    assert result.code == 0, result.err
    models = json.loads((tmp_path / "run" / "run.json").read_text())["models"]
    assert list(models) == [f"test_cli_runs:network@{file.with_suffix('')}" for file in files]
    same = bench(*folders(photos, "--model", "test_cli_runs:network", *weights[:2], *weights[:2]))
    assert f"2 times with the checkpoint '{files[0]}'" in same.err


def test_a_named_detector_without_a_class_is_refused_by_the_class_name_before_the_first_image(
    bench: Bench, photos: Path, tmp_path: Path
):
    for file in sorted((photos / "known" / "doe").glob("*.png"))[1:]:
        file.unlink()
    scarce = ("--fit-fraction", 0.05, "--calibrate-fraction", 0.2)
    for spec in ("mahalanobis", "msp,she(absent='error')", "gmm", "openmax"):
        named = bench(*folders(photos, "--detectors", spec, *scarce))
        assert (named.code, named.err.count("\n")) == (2, 1), named.err
        assert "every class needs a training image, but 'fit' (5 images) has none of 'doe' (class 3)" in named.err
        remedy = "she(absent='mean')" if "she" in spec else "--absent-classes skip"
        assert remedy in named.err
        assert not list((tmp_path / "cache").glob("*"))  # nothing went through the model
    mended = bench(*folders(photos, "--detectors", "mahalanobis", "--absent-classes", "skip", *scarce))
    assert mended.code == 0, mended.err
    free = bench(*folders(photos, "--detectors", "she,cadref,knn(k=2)", *scarce))  # their rule needs no class
    assert free.code == 0, free.err


def test_all_detectors_leave_out_what_lacks_a_class_and_say_so(bench: Bench, photos: Path, tmp_path: Path):
    for file in sorted((photos / "known" / "doe").glob("*.png"))[1:]:
        file.unlink()
    result = bench(*folders(photos, "--detectors", "one-pass", "--fit-fraction", 0.05))
    assert result.code == 0, result.err
    assert (
        "mahalanobis left out: every class needs a training image, but 'fit' (5 images) has none of 'doe'" in result.err
    )
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    (row,) = [r for r in records if (r["method"], r["task"], r["metric"]) == ("mahalanobis", "anomaly", "auroc")]
    assert row["value"] is None
    assert "'doe' (class 3)" in row["reason"]
    assert any(r["method"] == "energy" and r["value"] is not None for r in records)


def test_too_few_rows_are_refused_before_the_first_image(bench: Bench, photos: Path, tmp_path: Path):
    for spec, most in (("knn(k=37)", 36), ("nnguide(k=5,alpha=0.1)", 3), ("ssd(clusters=40)", 36)):
        result = bench(*folders(photos, "--detectors", spec))
        assert (result.code, result.err.count("\n")) == (2, 1), result.err
        assert f"more than the {most} training rows that 'fit' (36 images) gives it" in result.err
    assert not list((tmp_path / "cache").glob("*"))
    enough = bench(*folders(photos, "--detectors", "knn(k=36),nnguide(k=3,alpha=0.1),ssd(clusters=1)", *PLAIN))
    assert enough.code == 0, enough.err


def test_missing_fit_or_calibration_images_are_refused_before_the_first_image(
    bench: Bench, photos: Path, tmp_path: Path
):
    fit = bench(*folders(photos, "--detectors", "vim", "--fit-fraction", 0))
    assert "vim: needs fit data, but this run has none; give --fit DIR or a --fit-fraction above 0" in fit.err
    held_out = bench(*folders(photos, "--detectors", "rel_u", "--calibrate-fraction", 0))
    assert "rel_u: needs calibration data, but this run has none; give --calibrate DIR" in held_out.err
    assert (fit.code, held_out.code) == (2, 2)
    assert not list((tmp_path / "cache").glob("*"))


def other_weights() -> nn.Module:
    model = network()
    torch.nn.init.ones_(next(iter(model.parameters())))
    return model


def test_without_calibration_images_what_learns_from_them_says_which_option_gives_some(bench: Bench, photos: Path):
    two = folders(photos, "--model", "test_cli_runs:other_weights", "--detectors", "msp", "--calibrate-fraction", 0)
    result = bench(*two, "--calibrators", "all", "--ensemble", "all")
    assert result.code == 0, result.err
    remedy = (
        "needs calibration data, but this run has none; give --calibrate DIR or a --calibrate-fraction above 0 "
        "(folders), or another --learn, or more images of each class to hold out (ImageNet suites)"
    )
    assert result.err.count(f"pooled_temperature left out: {remedy}") == 1
    assert result.out.count(remedy) == 1  # one footnote, of the calibrator and of the ensemble
    assert "call fit" not in result.err + result.out


def test_calibrators_and_ensembles_that_are_named_are_refused_before_the_first_image_without_calibration_images(
    bench: Bench, photos: Path, tmp_path: Path
):
    two = folders(photos, "--model", "test_cli_runs:other_weights", "--detectors", "msp", "--calibrate-fraction", 0)
    for more in ((), ("--dry-run",)):
        calibrator = bench(*two, "--calibrators", "temperature", "--ensemble", "none", *more)
        pool = bench(*two, "--calibrators", "all", "--ensemble", "mean_logit,pooled_temperature", *more)
        for result, name in ((calibrator, "temperature"), (pool, "pooled_temperature")):
            assert result.code == 2
            assert f"{name}: needs calibration data, but this run has none; give --calibrate DIR" in result.err
    assert not list((tmp_path / "cache").glob("*"))
    assert bench(*two, "--calibrators", "none", "--ensemble", "mean_logit").code == 0  # neither learns
