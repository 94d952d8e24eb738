import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from ood_toolkit.metrics import aurc, nemenyi_test
from ood_toolkit.records import Record
from ood_toolkit.reporting.figures import figures
from ood_toolkit.reporting.plots import overview, ranking, reliability, sheets
from ood_toolkit.reporting.runs import Run, Sample

MakeFolder = Callable[..., Path]

RECORD = Record(suite="s", task="misclassification", dataset="d", model="m", method="msp", metric="auroc", value=0.5)


def sample(negatives: list[float], positives: list[float]) -> Sample:
    return Sample(record=RECORD, negatives=np.array(negatives), positives=np.array(positives))


scores = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=30)


@given(scores, scores)
def test_the_risk_coverage_curve_has_the_area_that_the_metrics_room_computes(
    right: list[float], wrong: list[float]
) -> None:
    _, risk = ranking.risk_coverage(sample(right, wrong))
    assert risk.mean() == pytest.approx(aurc(np.array(right), np.array(wrong), convention="expected"), abs=1e-12)
    assert risk[-1] == pytest.approx(len(wrong) / (len(right) + len(wrong)))


@given(scores, scores)
def test_the_auroc_in_the_legend_is_scikit_learns(negatives: list[float], positives: list[float]) -> None:
    truth = [0] * len(negatives) + [1] * len(positives)
    assert ranking.auroc(sample(negatives, positives)) == pytest.approx(roc_auc_score(truth, negatives + positives))


def test_ranks_and_critical_difference_are_those_of_the_metrics_room() -> None:
    values = np.random.default_rng(0).random((5, 7)).round(1)
    theirs = nemenyi_test(values.T)
    assert overview.mean_ranks(values, higher_is_better=True) == pytest.approx(theirs.mean_ranks)
    assert overview.critical_difference(5, 7) == pytest.approx(theirs.critical_difference, rel=1e-4)


def test_the_critical_difference_is_that_of_demsars_example() -> None:
    # Demšar 2006, section 3.2.2: four classifiers on 14 data sets, q = 2.569 at 5%
    assert overview.critical_difference(4, 14) == pytest.approx(2.569 * (4 * 5 / (6 * 14)) ** 0.5, abs=2e-3)


@given(st.lists(st.floats(1, 9), min_size=1, max_size=9), st.floats(0.1, 5))
def test_a_bar_joins_exactly_the_ranks_within_the_gap(ranks: list[float], gap: float) -> None:
    ranks = sorted(ranks)
    bars = overview.cliques(np.array(ranks), gap)
    for i in range(len(ranks)):
        for j in range(i + 1, len(ranks)):
            joined = any(first <= i and j <= last for first, last in bars)
            assert joined == (ranks[j] - ranks[i] <= gap)
    assert not any(a != b and a[0] <= b[0] and b[1] <= a[1] for a in bars for b in bars)


def test_rank_correlation_is_scipys() -> None:
    values = np.random.default_rng(1).integers(0, 9, (4, 60)).astype(float)
    assert overview.rank_correlation(values) == pytest.approx(spearmanr(values, axis=1)[0])  # pyright: ignore
    constant = overview.rank_correlation(np.stack([values[0], np.zeros(60)]))
    assert constant.tolist() == [[pytest.approx(1.0), 0.0], [0.0, 1.0]]


@settings(max_examples=10)
@given(st.integers(0, 100))
def test_the_consistency_band_holds_the_quantiles_of_the_exact_distribution(seed: int) -> None:
    confidence = np.random.default_rng(seed).uniform(0.81, 0.86, 200)
    index = reliability.bin_of(confidence)
    low, high = reliability.consistency_band(confidence, index)
    assert set(index) == {12}
    chances = np.array([1.0])  # of 0, 1, … right answers: a Poisson binomial distribution, one image at a time
    for p in confidence:
        chances = np.convolve(chances, [1 - p, p])
    cumulated = np.cumsum(chances)
    assert low[12] == pytest.approx(np.searchsorted(cumulated, 0.05) / 200, abs=0.01)
    assert high[12] == pytest.approx(np.searchsorted(cumulated, 0.95) / 200, abs=0.01)


@given(st.floats(0, 1))
def test_every_confidence_lies_in_its_bin(confidence: float) -> None:
    index = int(reliability.bin_of(np.array([confidence]))[0])
    assert index / 15 - 1e-12 <= confidence <= (index + 1) / 15 + 1e-12


def test_the_most_confidently_wrong_and_most_surely_missed_are_the_extremes(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    images = tmp_path / "photos"
    images.mkdir()
    for part in ("val1300", "textures", "openimage_o"):
        for i in range(400):
            (images / f"{part}-{i:04}.jpg").touch()
    run = Run.open(make_folder(images=images))
    (plain, *_) = run.confidences("demo:efficientnet_lite0", "val1300")
    exhibits = sheets.most_confidently_wrong(run, plain, count=5)
    wrong = sorted((c for c, right in zip(plain.confidence, plain.correct, strict=True) if not right), reverse=True)
    assert [e.text for e in exhibits] == [f"{c:.3f}" for c in wrong[:5]]
    found = run.samples("anomaly", "demo:efficientnet_lite0", "textures")[0]
    missed = sheets.most_surely_missed(run, found, count=3)
    lowest = [found.positive_ids[i] for i in np.argsort(found.positives)[:3]]
    assert [e.identifier for e in missed] == lowest


@pytest.mark.slow
def test_every_figure_is_drawn_in_every_format_with_embedded_fonts(make_folder: MakeFolder, tmp_path: Path) -> None:
    from PIL import Image

    images = tmp_path / "photos"
    images.mkdir()
    for part in ("val1300", "textures", "openimage_o", "ninco"):
        for i in range(60):
            Image.new("RGB", (30, 20), (i, 2 * i, 90)).save(images / f"{part}-{i:04}.jpg")
    detectors = (("msp", "logits"), ("my$odd_one(a='%')", "features"), ("vim", "features"))
    folder = make_folder(detectors=detectors, ood=("textures", "openimage_o", "ninco"), rows=60, images=images)
    gallery = figures(folder, tmp_path / "out", images=True)
    kinds = {re.sub(r"-(val1300|textures|openimage-o|ninco)$", "", picture.name) for picture in gallery.pictures}
    assert kinds == {
        "heat-map",
        "critical-difference-anomaly",
        "errors-scores",
        "errors-roc",
        "errors-risk-coverage",
        "errors-agreement",
        "errors-sheet",
        "ood-scores",
        "ood-roc",
        "ood-agreement",
        "ood-missed",
        "reliability",
        "wrong-confidence",
    }
    for picture in gallery.pictures:
        pdf, svg, png = (file.read_bytes() for file in picture.files)
        assert b"/Type3" not in pdf
        assert b"/FontFile2" in pdf
        assert b"<text" not in svg  # outlines: nothing to be missing
        assert png.startswith(b"\x89PNG")
        inches = float(re.search(rb'width="([\d.]+)pt"', svg)[1]) / 72  # pyright: ignore
        assert inches <= 6.76
        assert len(picture.about) > 60
    assert [name for name, _ in gallery.left_out] == [
        "critical differences of misclassification with demo:efficientnet_lite0"
    ]


def test_a_figure_drawn_twice_is_the_same_file(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder(detectors=(("msp", "logits"),), ood=("textures",), rows=40)
    for name in ("one", "other"):
        figures(folder, tmp_path / name, formats=("svg", "pdf"))
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()


def test_a_run_without_scores_says_what_cannot_be_drawn(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder()
    (folder / "scores.safetensors").unlink()
    gallery = figures(folder, tmp_path / "out", formats=("svg",))
    assert [picture.name for picture in gallery.pictures] == ["heat-map"]
    assert ("curves and histograms", "the run folder has no scores.safetensors") in gallery.left_out


def test_an_unknown_format_is_refused(make_folder: MakeFolder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be written as \['gif'\]; known: pdf, svg, png"):
        figures(make_folder(), tmp_path, formats=("gif",))


def test_only_the_data_sets_that_were_named_have_curves(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder(detectors=(("msp", "logits"),), ood=("textures", "noise"), rows=40)
    gallery = figures(folder, tmp_path / "out", formats=("svg",), datasets=("noise",))
    names = [picture.name for picture in gallery.pictures]
    assert any("noise" in name for name in names)
    assert not any("textures" in name for name in names)
    with pytest.raises(ValueError, match=r"the run has no data sets \['nose'\]; it has .*textures"):
        figures(folder, tmp_path / "out", datasets=("nose",))
