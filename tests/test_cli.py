"""The command as a user has it: what it prints, what it leaves behind, how it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from ood_toolkit.metrics import auroc
from ood_toolkit.records import read_records
from ood_toolkit.registry import calibrator_classes, detector_classes
from ood_toolkit.scorefile import Column, ScoreFile
from tests.command_line import Bench


def network() -> nn.Module:
    """A factory for `test_cli:network`: four classes, any image size."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


def headless() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def sick() -> nn.Module:
    model = network()
    model[4].bias.data[0] = torch.nan  # pyright: ignore
    return model


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """known/{a..d}/*.png, strange/*.png, and this module importable for its factories."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    generator = np.random.default_rng(0)
    for place, shift in [*((f"known/{c}/{n}.png", k * 30) for k, c in enumerate("abcd") for n in range(30)),
                         *((f"strange/{n}.png", 200) for n in range(20))]:  # fmt: skip
        file = tmp_path / "photos" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((generator.integers(0, 50, (12, 12, 3)) + shift).astype(np.uint8)).save(file)
    return tmp_path / "photos"


ANY_TEMPERATURE = "temperature(at_bound='accept')"
"""For a network whose labels are no likelier than chance, so that no temperature is best."""


def folders(photos: Path, *more: object) -> tuple[object, ...]:
    return ("--suite", "folders", "--model", "test_cli:network", "--id", photos / "known",
            "--ood", f"strange={photos / 'strange'}", "--detectors", "msp,energy", "--calibrators", ANY_TEMPERATURE,
            "--resamples", 20, *more)  # fmt: skip


def test_a_digits_run_prints_two_tables_and_leaves_the_whole_run_folder(bench: Bench, tmp_path: Path):
    result = bench("--detectors", "msp,mahalanobis,temperature+msp", "--calibrators", "temperature", "--resamples", 50)
    assert result.code == 0, result.err
    for word in ("msp", "mahalanobis", "temperature+msp", "AUROC", "ECE", "digits-o", "mean_probability"):
        assert word in result.out
    run = tmp_path / "run"
    names = {"records.jsonl", "scores.safetensors", "table.md", "table.csv", "table.tex", "run.json"}
    assert {file.name for file in run.iterdir()} == names
    facts = json.loads((run / "run.json").read_text())
    assert facts["choices"]["seed"] == 0
    assert {"extract digits-cnn:0", "detect msp", "total"} <= set(facts["stages"])
    assert facts["packages"]["torch"] == torch.__version__.partition("+")[0]


def test_anyone_can_recompute_a_record_from_the_per_image_scores(bench: Bench, tmp_path: Path):
    assert bench("--detectors", "energy", "--calibrators", "none", "--ensemble", "none", "--resamples", 0).code == 0
    scores = ScoreFile.load(tmp_path / "run" / "scores.safetensors")
    known = scores.columns[Column("score", "digits-cnn:0", "energy", "digits-test")]
    unseen = scores.columns[Column("score", "digits-cnn:0", "energy", "digits-o")]
    (record,) = [
        r for r in read_records(tmp_path / "run" / "records.jsonl") if (r.task, r.metric) == ("anomaly", "auroc")
    ]
    assert record.value == auroc(known, unseen)
    assert (record.positives, record.negatives) == (len(unseen), len(known))
    assert len(scores.ids["digits-o"]) == len(unseen)


def test_a_second_run_reads_the_store_and_gives_the_same_records(bench: Bench, photos: Path, tmp_path: Path):
    first = bench(*folders(photos))
    assert first.code == 0, first.err
    assert "120 images of id in" in first.err
    before = (tmp_path / "run" / "records.jsonl").read_text()
    second = bench(*folders(photos))
    assert "120 images of id read from the store, no forward pass" in second.err
    assert (tmp_path / "run" / "records.jsonl").read_text() == before


def test_results_go_to_stdout_and_everything_else_to_stderr(bench: Bench, photos: Path):
    result = bench(*folders(photos, "--json"))
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert {row["method"] for row in rows} == {"msp", "energy", "none", ANY_TEMPERATURE}
    assert "results are in" in result.err


def test_several_models_make_an_ensemble(bench: Bench, photos: Path, tmp_path: Path):
    files = [tmp_path / "early.safetensors", tmp_path / "late.safetensors"]
    state = network().state_dict()
    for file in files:
        save_file({name: torch.randn_like(value) for name, value in state.items()}, file)
    weights = [word for file in files for word in ("--checkpoint", file)]
    result = bench(*folders(photos, "--model", "test_cli:network", *weights))
    assert result.code == 0, result.err
    assert "ensemble[test_cli:network@early, test_cli:network@late]" in result.out


def test_a_folder_of_snapshots_makes_an_ensemble(bench: Bench, photos: Path, tmp_path: Path):
    (tmp_path / "snapshots").mkdir()
    state = network().state_dict()
    for epoch in (1, 2):
        snapshot = {name: torch.randn_like(value) for name, value in state.items()}
        save_file(snapshot, tmp_path / "snapshots" / f"epoch{epoch}.safetensors")
    result = bench(*folders(photos, "--snapshots", tmp_path / "snapshots"))
    assert result.code == 0, result.err
    assert "ensemble[test_cli:network, test_cli:network@epoch1, test_cli:network@epoch2]" in result.out
    empty = bench(*folders(photos, "--snapshots", tmp_path / "nowhere"))
    assert empty.code == 2
    assert "no checkpoint" in empty.err


def test_table_figures_report_and_compare_read_a_run(bench: Bench, tmp_path: Path):
    arguments = ("--detectors", "msp,energy", "--calibrators", "temperature", "--ensemble", "none", "--resamples", 20)
    one, two = tmp_path / "one", tmp_path / "two"
    assert bench(*arguments, "--out", one).code == 0
    assert bench(*arguments, "--out", two).code == 0
    table = bench("table", one, "--format", "csv", "--what", "detectors")
    assert table.code == 0, table.err
    (record,) = [r for r in read_records(one / "records.jsonl")
                 if (r.task, r.metric, r.method) == ("anomaly", "auroc", "energy")]  # fmt: skip
    assert f"{record.value:.3f}" in next(line for line in table.out.splitlines() if "energy" in line)
    same = bench("compare", one, two, "--fail-if-worse")
    assert same.code == 0, same.err
    drawn = bench("figures", one, "--formats", "svg", "--methods", "energy")
    assert drawn.code == 0, drawn.err
    assert list((one / "figures").glob("*.svg"))
    page = bench("report", one, "--no-draw")
    assert page.code == 0, page.err
    assert f"{record.value:.3f}" in (one / "report.html").read_text()


def test_truncated_images_are_named_and_counted_or_refused(bench: Bench, photos: Path, tmp_path: Path):
    (photos / "known" / "a" / "3.png").write_bytes((photos / "known" / "a" / "3.png").read_bytes()[:60])
    result = bench(*folders(photos))
    assert result.code == 0, result.err
    assert "skipped 1 unreadable images of id, first a/3.png" in result.err
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert list(facts["unreadable"]["id"]) == ["a/3.png"]
    strict = bench(*folders(photos, "--strict"))
    assert (strict.code, strict.err.count("\n")) == (2, 1)
    assert "image 'a/3.png' cannot be read" in strict.err


def test_a_class_without_fit_images_leaves_all_running_and_stops_a_named_detector(bench: Bench, photos: Path):
    for file in sorted((photos / "known" / "d").glob("*.png"))[1:]:
        file.unlink()
    named = bench(*folders(photos, "--detectors", "mahalanobis", "--fit-fraction", 0.05))
    assert named.code == 2
    assert "every class needs a training image, but 'fit' (5 images) has none of 'd' (class 3)" in named.err
    skipped = bench(*folders(photos, "--detectors", "mahalanobis(absent='skip')", "--fit-fraction", 0.05))
    assert skipped.code == 0, skipped.err


REFUSED = {
    "unknown detector": (["--detectors", "enrgy"], "did you mean 'energy'?"),
    "unknown calibrator": (["--calibrators", "temprature"], "did you mean 'temperature'?"),
    "unknown ensemble": (["--ensemble", "mean"], "no ensemble is named 'mean'"),
    "unknown suite": (["--suite", "imagenet"], "no suite is named 'imagenet'"),
    "no id": (["--suite", "folders", "--model", "test_cli:network"], "needs --id DIR"),
    "snapshots for digits": (["--suite", "digits", "--snapshots", "runs"], "brings its own images and networks"),
    "models for digits": (["--suite", "digits", "--model", "timm:resnet18"], "brings its own images and networks"),
    "a model without images": (["--model", "timm:resnet18"], "--model needs images to score"),
    "no data root": (["--suite", "imagenet-a", "--model", "demo:efficientnet_lite0"], "needs --data-root DIR"),
    "folders of another suite": (["--suite", "imagenet-a", "--id", "x"], "belong to --suite folders"),
    "unknown device": (["--device", "tpu9"], "device 'tpu9' cannot be used"),
    "unknown dtype": (["--dtype", "int8"], "--dtype must be one of float32"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_wrong_choice_is_one_line_and_exit_code_2(bench: Bench, case: str):
    arguments, message = REFUSED[case]
    result = bench(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert message in result.err
    assert result.err.count("\n") == 1


BROKEN = {
    "missing folder": (["--id", "nowhere"], "image folder 'nowhere' does not exist"),
    "missing ood": (["--ood", "x=nowhere"], "image folder 'nowhere' does not exist"),
    "ood without a name": (["--ood", "nowhere"], "write NAME=DIR"),
    "missing labels": (["--labels", "nowhere.csv"], "labels file 'nowhere.csv' does not exist"),
    "missing checkpoint": (["--checkpoint", "nowhere.pt"], "nowhere.pt"),
    "no head": (["--model", "test_cli:headless"], "no Linear is called"),
    "nan logits": (["--model", "test_cli:sick"], "NaN logits for"),
    "unknown factory": (["--model", "test_cli:nothing"], "nothing"),
    "unknown timm model": (["--model", "timm:resnet5"], "resnet5"),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_broken_input_is_one_line_and_exit_code_2(bench: Bench, photos: Path, case: str):
    arguments, message = BROKEN[case]
    own_model = ("--model", "test_cli:network") if "--model" in arguments else ()
    base = [argument for argument in folders(photos) if argument not in own_model]
    result = bench(*base, *arguments)
    assert result.code == 2
    assert message in result.err.splitlines()[-1]
    assert "Traceback" not in result.err


def test_a_checkpoint_of_another_architecture_names_what_differs(bench: Bench, photos: Path, tmp_path: Path):
    file = tmp_path / "other.safetensors"
    save_file({"0.weight": torch.zeros(6, 3, 5, 5), "layer.bias": torch.zeros(2)}, file)
    result = bench(*folders(photos, "--checkpoint", file))
    assert result.code == 2
    assert "0.weight" in result.err or "layer.bias" in result.err
    assert result.err.count("\n") == 1


def test_an_output_folder_that_cannot_be_written_is_refused_before_the_long_part(
    bench: Bench, photos: Path, tmp_path: Path
):
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = bench(*folders(photos), "--out", blocked / "run")
    assert result.code == 2
    assert "cannot write into the folder" in result.err
    assert not list((tmp_path / "cache").glob("*/done/*"))


def test_list_names_everything_with_family_needs_cost_and_paper(bench: Bench):
    result = bench("--list")
    lines = result.out.splitlines()
    for name, kind in detector_classes().items():
        (row,) = [line for line in lines if line.split() and line.split()[0] == name and kind.family in line][:1]
        assert ("held-out" if kind.held_out else kind.needs) in row
        assert kind.paper.partition(",")[0] in row
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in calibrator_classes())


def test_data_list_shows_size_and_licence(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OOD_DATA_ROOT", raising=False)
    result = bench("data", "list")
    (row,) = [line for line in result.out.splitlines() if line.startswith("imagenet-a ")]
    assert "0.69 GB" in row
    assert "ood-bench data get" in row


def test_data_check_fails_for_a_set_that_is_not_there(bench: Bench, tmp_path: Path):
    (tmp_path / "root").mkdir()
    result = bench("data", "check", "imagenet-o", "--data-root", tmp_path / "root")
    assert result.code == 1
    assert "imagenet-o" in result.out


def test_cite_prints_bibtex(bench: Bench):
    assert "@inproceedings{liu2020energy," in bench("cite", "energy").out


def test_help_has_examples(bench: Bench):
    result = bench("--help")
    assert result.code == 0
    assert "ood-bench --detectors my_pkg:MyDetector" in result.out


def test_version_is_the_package_version(bench: Bench):
    import ood_toolkit

    assert bench("--version").out == f"ood-bench {ood_toolkit.__version__}\n"


def test_a_tuned_detector_is_chosen_on_a_set_that_is_not_scored_and_its_rows_say_so(
    bench: Bench, photos: Path, tmp_path: Path
):
    odd = tmp_path / "odd"
    odd.mkdir()
    for number in range(12):
        Image.fromarray(np.full((12, 12, 3), 20 * number, np.uint8)).save(odd / f"{number}.png")
    words = folders(photos, "--tune-on", f"odd={odd}")
    result = bench(*(word if word != "msp,energy" else "energy,tuned+energy" for word in words))
    assert result.code == 0, result.err
    rows = [r for r in read_records(tmp_path / "run" / "records.jsonl") if r.metric == "auroc" and r.task == "anomaly"]
    assert [(row.method, row.tuned_on, row.dataset) for row in rows] == [
        ("energy", "", "strange"),
        ("tuned+energy", "odd", "strange"),
    ]
    assert "hyper-parameters were chosen on the OOD set odd" in result.out
    tried = json.loads((tmp_path / "run" / "run.json").read_text())["tuned"]["test_cli:network"]["tuned+energy"]
    best = max(tried["trials"], key=lambda trial: trial["auroc"])
    assert [trial["spec"] for trial in tried["trials"]] == ["energy"] + [
        f"energy(temperature={t})" for t in (10.0, 100.0, 1000.0)
    ]
    scores = ScoreFile.load(tmp_path / "run" / "scores.safetensors")
    assert not any(column.part == "odd" for column in scores.columns)
    plain, chosen = (
        scores.columns[Column("score", "test_cli:network", method, "strange")] for method in ("energy", "tuned+energy")
    )
    assert (best["spec"] == "energy") == bool((plain == chosen).all())


@pytest.mark.parametrize(
    ("detectors", "more", "words"),
    [
        ("tuned+energy", (), "needs --tune-on NAME=DIR"),
        ("energy", ("--tune-on", "odd=somewhere"), "has nothing to tune"),
        ("tuned+energy", ("--tune-on", "odd"), "cannot read --tune-on 'odd'; write NAME=DIR"),
    ],
)
def test_tuning_wants_both_a_set_and_something_to_tune(
    bench: Bench, photos: Path, detectors: str, more: tuple[str, ...], words: str
):
    given = (word if word != "msp,energy" else detectors for word in folders(photos, *more))
    result = bench(*given)
    assert result.code == 2
    assert words in result.err


def test_a_set_that_is_scored_cannot_choose_hyper_parameters(bench: Bench, photos: Path):
    words = folders(photos, "--tune-on", f"again={photos / 'strange'}")
    result = bench(*(word if word != "msp,energy" else "tuned+energy" for word in words))
    assert result.code == 2
    assert "would score 20 images of 'strange' that it learns from" in result.err
