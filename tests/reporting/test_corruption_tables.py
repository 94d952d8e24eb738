"""Tables of corruption errors and flips, from made-up views, counted again with loops over the paper's formulas."""

from pathlib import Path
from typing import Any

import pytest

from ood_toolkit.corruptions import ALEXNET_ERRORS, ALEXNET_FLIPS, AVERAGED, CORRUPTIONS, PERTURBATIONS
from ood_toolkit.reporting.corruptions import corruption_tables
from ood_toolkit.reporting.formats import FORMATS
from ood_toolkit.reporting.grid import MISSING, Table
from ood_toolkit.reporting.options import TableOptions
from ood_toolkit.reporting.robustness import run_tables

GROUP = {name: group for group, names in CORRUPTIONS.items() for name in names}


def accuracy(corruption: str, severity: int, model: str = "m1") -> float:
    shift = 0.01 * (len(corruption) % 5) + (0.03 if model == "m2" else 0)
    return 0.8 - 0.12 * severity + shift


def views_of(
    corruptions: tuple[str, ...], model: str = "m1", *, severities: range = range(1, 6), own: bool = False
) -> dict[str, Any]:
    def row(dataset: str, value: float) -> dict[str, Any]:
        top1 = {"value": value, "low": None, "high": None}
        return {"model": model, "dataset": dataset, "mask": "", "images": 50_000, "top1": top1, "top5": top1}

    rows = [
        row(f"imagenet-c-{'own' if own else GROUP[name]}/{name}/{s}", accuracy(name, s, model))
        for name in corruptions
        for s in severities
    ]
    return {
        "suite": "imagenet-c",
        "protocol": "full-1000way",
        "transforms": {model: "centre"},
        "accuracy": [*rows, row("imagenet-1k", 0.81)],
    }


def rows_of(table: Table) -> dict[str, list[str]]:
    return {header.label: [c.text for c in cells] for header, cells in zip(table.rows, table.cells, strict=True)}


def test_runs_over_groups_make_one_table_whose_means_are_those_of_the_paper():
    runs = [views_of(names) for names in CORRUPTIONS.values()]  # one run for every group, the extra one too
    (table,) = corruption_tables(runs, options=TableOptions(precision=6))
    rows = rows_of(table)
    errors, ces, relatives = [], [], []
    for name in AVERAGED:
        own = [1 - accuracy(name, severity) for severity in range(1, 6)]
        alexnet = ALEXNET_ERRORS[name]
        errors.append(sum(own) / 5)
        ces.append(sum(own) / sum(alexnet))
        relatives.append(sum(e - 0.19 for e in own) / sum(e - 0.4345 for e in alexnet))
        assert rows[name] == [f"{value:.6f}" for value in (*own, errors[-1], ces[-1], relatives[-1])]
    means = [sum(values) / 15 for values in (errors, ces, relatives)]
    assert rows["of the fifteen"] == [*[""] * 5, *(f"{mean:.6f}" for mean in means)]
    assert rows["clean"][5] == "0.190000"
    assert len(rows) == 19 + 2  # the four extra ones have rows, and no part in the means
    assert {header.group for header in table.rows} >= {"extra, in no mean", "weather"}
    assert not table.notes


def test_what_is_missing_is_shown_as_missing_and_so_are_the_means_over_it():
    (table,) = corruption_tables([views_of(("fog",)), views_of(("snow",), severities=range(1, 5))])
    rows = rows_of(table)
    assert MISSING not in rows["fog"]
    assert rows["snow"][4:] == [MISSING] * 4
    assert rows["frost"] == [MISSING] * 8
    assert rows["of the fifteen"][5:] == [MISSING] * 3
    notes = dict(table.notes)
    marks = {header.label: cells for header, cells in zip(table.rows, table.cells, strict=True)}
    assert notes[marks["snow"][4].marks[0]] == "no run has this corruption at this severity"
    assert notes[marks["snow"][6].marks[0]] == "needs all five severities"
    assert notes[marks["of the fifteen"][6].marks[0]].startswith("needs all fifteen corruptions")
    assert "speckle_noise" not in rows


def test_without_a_clean_error_there_is_no_relative_one():
    views = views_of(AVERAGED)
    views["accuracy"] = views["accuracy"][:-1]
    (table,) = corruption_tables([views])
    assert rows_of(table)["fog"][7] == rows_of(table)["of the fifteen"][7] == MISSING
    assert MISSING not in rows_of(table)["fog"][:7]
    assert "same runs' images without corruption" in dict(table.notes)[table.cells[-1][7].marks[0]]


def test_runs_that_disagree_give_no_number():
    other = views_of(("fog",))
    other["accuracy"][0]["top1"] = {"value": 0.1, "low": None, "high": None}
    (table,) = corruption_tables([views_of(("fog",)), other])
    row = next(cells for header, cells in zip(table.rows, table.cells, strict=True) if header.label == "fog")
    assert row[0].text == MISSING != row[1].text
    assert dict(table.notes)[row[0].marks[0]] == "the runs give different numbers"


def test_ones_own_corruptions_stand_apart_and_say_that_they_compare_with_nothing():
    published, own = corruption_tables([views_of(AVERAGED), views_of(("fog",), own=True)])
    assert "not comparable with published numbers" in " ".join(own.caption)
    assert "not comparable" not in " ".join(published.caption)
    assert rows_of(own)["fog"] == rows_of(published)["fog"]
    assert rows_of(own)["snow"] == [MISSING] * 8


def test_several_models_have_the_papers_table_with_a_row_each():
    runs = [views_of(AVERAGED), views_of(AVERAGED, "m2"), views_of(("fog",), "ensemble[m1, m2] by mean_probability")]
    *_, over = corruption_tables(runs)
    assert [column.label for column in over.columns] == [
        *("clean", "mean", "mCE", "relative mCE"),
        *("gaussian", "shot", "impulse", "defocus", "glass", "motion", "zoom", "snow", "frost", "fog", "brightness"),
        *("contrast", "elastic", "pixelate", "jpeg"),
    ]
    rows = rows_of(over)
    expected = sum(
        sum(1 - accuracy(name, s, "m2") for s in range(1, 6)) / sum(ALEXNET_ERRORS[name]) for name in AVERAGED
    )
    assert rows["m2"][2] == f"{expected / 15:.3f}"
    assert rows["ensemble[m1, m2] by mean_probability"][2] == MISSING
    chosen = corruption_tables(runs, options=TableOptions(models=("ensemble[m1, m2]",)))
    assert [table.title for table in chosen] == [
        "Corruption errors on ImageNet-C, ensemble[m1, m2] by mean_probability"
    ]
    assert corruption_tables(runs, options=TableOptions(datasets=("imagenet-1k",))) == []


def flips(perturbations: tuple[str, ...], model: str = "m1") -> dict[str, Any]:
    rows = [
        {"model": model, "dataset": f"imagenet-p/{name}", "perturbation": name, "mask": "", "videos": 40, "left_out": 2,
         "with_first": "noise" in name, "flip": {"value": 0.01 * len(name), "low": None, "high": None},
         "top5_distance": {"value": 0.1 * len(name), "low": None, "high": None}}
        for name in perturbations
    ]  # fmt: skip
    return {"protocol": "full-1000way", "transforms": {model: "centre"}, "accuracy": [], "perturbations": rows}


def test_flip_rates_are_over_alexnets_and_their_mean_is_over_all_ten():
    (table,) = corruption_tables([flips(PERTURBATIONS[:4]), flips((*PERTURBATIONS[4:], "shear"))])
    rows = rows_of(table)
    rate = distance = flip = 0.0
    for name in PERTURBATIONS:
        own = 0.01 * len(name)
        assert rows[name] == [f"{own:.3f}", f"{own / ALEXNET_FLIPS[name]:.3f}", f"{0.1 * len(name):.3f}"]
        flip, rate, distance = flip + own, rate + own / ALEXNET_FLIPS[name], distance + 0.1 * len(name)
    assert rows["of the ten"] == [f"{flip / 10:.3f}", f"{rate / 10:.3f}", f"{distance / 10:.3f}"]
    assert rows["shear"][0] == "0.050"  # a validation perturbation has a row, and no part in the means
    assert "Up to 2 videos that lack a frame are left out" in table.caption
    (partial,) = corruption_tables([flips(("tilt", "gaussian_noise_2"))])
    rows = rows_of(partial)
    assert rows["of the ten"] == rows["rotate"] == [MISSING] * 3
    assert rows["gaussian_noise_2"][1] == MISSING != rows["gaussian_noise_2"][0]


def test_the_flips_of_several_models_stand_below_one_another():
    (table,) = corruption_tables([flips(PERTURBATIONS), flips(("tilt", "shear"), "m2")])
    assert [column.label for column in table.columns] == ["FP", "FR", "T5D"]
    places = [(row.group, row.label) for row in table.rows]
    eleven = [*PERTURBATIONS, "shear (in no mean)", "of the ten"]
    assert places == [(model, label) for model in ("m1", "m2") for label in eleven]
    cells = {place: [cell.text for cell in row] for place, row in zip(places, table.cells, strict=True)}
    assert cells["m1", "tilt"] == cells["m2", "tilt"] == ["0.040", f"{0.04 / ALEXNET_FLIPS['tilt']:.3f}", "0.400"]
    assert cells["m2", "of the ten"] == [MISSING] * 3 != cells["m1", "of the ten"]


def test_captions_say_how_many_images_an_error_stands_on():
    views = views_of(("fog",))
    (table,) = corruption_tables([views])
    assert "Corruption errors on ImageNet-C: 50,000 images at each severity, 50,000 clean ones" in table.caption
    views["accuracy"][0]["images"] = 49_999
    views["accuracy"].pop()  # the clean one
    (table,) = corruption_tables([views])
    assert "Corruption errors on ImageNet-C: 49,999 to 50,000 images at each severity" in table.caption


def test_every_format_prints_the_tables():
    found = corruption_tables([views_of(("fog",)), flips(("tilt",))])
    for render in FORMATS.values():
        text = render(found)
        assert f"{1 - accuracy('fog', 3):.3f}" in text
        assert "tilt" in text


def test_without_corrupted_sets_there_is_nothing_to_show(tmp_path: Path):
    assert corruption_tables([{}, {"accuracy": []}]) == []
    with pytest.raises(ValueError, match="no table of corruptions"):
        run_tables([tmp_path], "corruptions", needed=True)
