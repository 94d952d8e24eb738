from pathlib import Path

import numpy as np
import pytest

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


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match=r"evaluate does not know \['colour'\]"):
        ood_toolkit.evaluate(colour="red")
