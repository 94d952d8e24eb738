from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ood_toolkit
from ood_toolkit.metrics import auroc
from ood_toolkit.reporting.runs import Run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("notebook")
    said: list[str] = []
    found = ood_toolkit.evaluate(
        detectors="msp,energy",
        calibrators="temperature",
        out=folder / "run",
        cache=folder / "cache",
        resamples=20,
        say=said.append,
    )
    assert any("images of digits" in line for line in said)
    return found


def test_results_show_themselves_as_tables(results):
    html = results._repr_html_()
    assert "energy" in html
    assert "temperature" in html
    assert "AUROC" in str(results.table())
    assert "ECE" in str(results.table("calibrators"))


def test_pandas_has_every_record(results):
    frame = results.to_pandas()
    assert len(frame) == len(results.records)
    row = frame[(frame.method == "energy") & (frame.task == "anomaly") & (frame.metric == "auroc")].iloc[0]
    (sample,) = [s for s in Run.open(results.path).samples("anomaly", row.model, row.dataset) if s.method == "energy"]
    assert row.value == auroc(sample.negatives, sample.positives)


def test_the_roc_figure_holds_the_curve_of_the_scores(results):
    figure = results.plot_roc("energy")
    curve = figure.axes[0].lines[0]
    x, y = np.asarray(curve.get_xdata()), np.asarray(curve.get_ydata())
    (value,) = [r.value for r in results.records if (r.method, r.task, r.metric) == ("energy", "anomaly", "auroc")]
    assert np.trapezoid(y, x) == pytest.approx(value, abs=1e-9)
    with pytest.raises(ValueError, match="no anomaly scores of knn"):
        results.plot_roc("knn")


def test_an_earlier_run_opens_again(results):
    again = ood_toolkit.Results.open(Path(results.path))
    assert list(again.records) == list(results.records)


def network(classes: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes)
    )


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for place in [*(f"known/{c}/{n}.png" for c in "xyz" for n in range(8)), *(f"strange/{n}.png" for n in range(5))]:
        file = tmp_path / "photos" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(file)
    return tmp_path / "photos"


def _pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def run(place: Path, *model: Any, **choices: Any) -> ood_toolkit.Results:
    settings = {"detectors": "msp", "calibrators": "none", "resamples": 0, "workers": 0, **choices}
    return ood_toolkit.evaluate(*model, out=place / "run", cache=place / "cache", say=lambda text: None, **settings)


def test_a_module_of_the_users_own_is_scored_and_left_as_it_was(photos: Path, tmp_path: Path):
    model = network().train()
    model[1].eval()  # pyright: ignore[reportIndexIssue]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = run(tmp_path, (model, _pixels), folders={"id": str(photos / "known")}, ood={"strange": photos / "strange"})
    sample = Run.open(found.path).samples("anomaly", "ood_toolkit.notebook:Sequential", "strange")[0]
    assert [part.training for part in model.modules()] == [True, True, False, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    for identifier, score in zip(sample.positive_ids, sample.positives, strict=True):
        with Image.open(photos / identifier) as image, torch.no_grad():
            probabilities = model(_pixels(image)[None].float() / 255).double().softmax(dim=1)
        assert score == pytest.approx(1 - float(probabilities.max()), abs=1e-6)


def test_several_modules_are_told_apart_by_name(photos: Path, tmp_path: Path):
    folders = {"id": photos / "known"}
    named = run(tmp_path, {"mine": network(), "yours": (network(), _pixels)}, folders=folders)
    assert [record.model for record in named.records if record.metric == "accuracy"] == [
        "ood_toolkit.notebook:mine",
        "ood_toolkit.notebook:yours",
    ]
    listed = run(tmp_path, [network(), network()], folders=folders)
    assert {record.model.rpartition(":")[2] for record in listed.records} == {"Sequential", "Sequential_2"}
    one = network()
    with pytest.raises(ValueError, match="Sequential is given 2 times: it would be ensembled with itself"):
        run(tmp_path, [one, one], folders=folders)
    rows = listed.table("robustness")
    assert rows.title == "Robustness"
    assert "Acc@5" in rows._repr_html_()


def test_methods_may_be_lists_and_objects(tmp_path: Path):
    found = run(
        tmp_path,
        detectors=["msp", ood_toolkit.KNNDetector(k=7)],
        calibrators=[ood_toolkit.TemperatureCalibrator()],
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    assert {record.method for record in found.records} == {"msp", "knn(k=7)", "none", "temperature"}


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such model": ({"model": 3}, TypeError, "model must be a spec such as 'timm:resnet50', a torch module"),
    "model as models": ({"models": ["timm:resnet18"]}, ValueError, "models is the first argument: evaluate("),
    "typo": ({"detector": "msp"}, ValueError, "does not know 'detector'; did you mean 'detectors'?"),
    "unknown": ({"colour": "red"}, ValueError, "evaluate does not know 'colour'; Known: suite, detectors"),
    "detectors": ({"detectors": 3}, TypeError, "detectors must be 'all', specs such as"),
    "calibrators": ({"calibrators": None}, TypeError, "or 'none' for none; got None, a NoneType"),
    "ensemble": ({"ensemble": True}, TypeError, "ensemble must be 'all'"),
    "folders text": ({"folders": "photos"}, TypeError, "folders must be a mapping such as {'id': 'photos/known'}"),
    "folders key": ({"folders": {"ID": "x"}}, ValueError, "folders does not know 'ID'; its keys are id, labels"),
    "folders value": ({"folders": {"id": 3}}, TypeError, "folders['id'] must be a path; got 3, a int"),
    "ood text": ({"ood": "photos"}, TypeError, "ood must be a mapping such as {'strange': 'photos/strange'}"),
    "batch size": ({"batch_size": "64"}, TypeError, "batch_size must be a whole number; got '64', a str"),
    "seed": ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
    "resamples": ({"resamples": -5}, ValueError, "resamples must be at least 0, got -5"),
    "strict": ({"strict": "yes"}, TypeError, "strict must be True or False; got 'yes', a str"),
    "fraction": ({"fit_fraction": "a third"}, TypeError, "fit_fraction must be a number"),
    "data root": ({"data_root": 3}, TypeError, "data_root must be a path"),
    "no images": ({"model": "timm:resnet18"}, ValueError, "needs images to score: folders={'id': DIR} with yours"),
    "folders of digits": ({"folders": {"id": "x"}}, ValueError, "for yours, use suite='folders'"),
    "not enough": ({"detectors": "knn(k=5000)"}, ValueError, "k=5000 is more than the 360 training rows"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_a_wrong_value_is_named_with_what_to_write(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OOD_DATA_ROOT", raising=False)
    given, kind, message = WRONG[case]
    choices = {name: value for name, value in given.items() if name != "model"}
    with pytest.raises(kind) as caught:
        run(tmp_path, given.get("model", ()), **choices)
    assert message in str(caught.value)
    assert "--" not in str(caught.value)


def test_what_is_no_run_and_no_table_is_said(results, tmp_path: Path):
    with pytest.raises(ValueError, match=r"is no run folder: it has no records\.jsonl"):
        ood_toolkit.Results.open(tmp_path)
    with pytest.raises(ValueError, match="no table is named 'detector'; known: detectors, calibrators, robustness"):
        results.table("detector")
    with pytest.raises(ValueError, match="there is no table of robustness"):
        results.table("robustness")
    with pytest.raises(ValueError, match="no anomaly scores of knn; it has those of msp, energy"):
        results.plot_roc("knn")
