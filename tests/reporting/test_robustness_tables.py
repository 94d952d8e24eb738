"""The tables of the robustness views, from made-up views whose numbers are known."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from ood_toolkit.reporting.formats import FORMATS
from ood_toolkit.reporting.grid import MISSING, Table
from ood_toolkit.reporting.options import TableOptions
from ood_toolkit.reporting.report import report
from ood_toolkit.reporting.robustness import (
    class_accuracies,
    human_line,
    read_views,
    robustness_tables,
    run_tables,
)

MASK = "imagenet-a:200"


def share(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.02, "high": value + 0.02}


def made_up(models: tuple[str, ...] = ("m1", "m2"), *, mixed: bool = False) -> dict[str, Any]:
    """Accuracy 0.1 × model + 0.01 × part + 0.001 × view, top-5 0.5 above it."""
    parts = ["imagenet-a+clean", "imagenet-a-clean"] if mixed else ["imagenet-a", "imagenet-a-clean"]
    adversarial = "imagenet-a+clean without imagenet-a-clean" if mixed else "imagenet-a"
    places = [(number, part, view) for number in range(len(models)) for part in range(2) for view in range(2)]

    def value(number: int, part: int, view: int) -> float:
        return 0.1 * (number + 1) + 0.01 * (part + 1) + 0.001 * (view + 1)

    def place(number: int, part: int, view: int) -> dict[str, Any]:
        return {"model": models[number], "dataset": parts[part], "mask": (MASK, "")[view]}

    shares: list[list[Any]] = [[share(0.3 + a / 10 + b / 100) for b in range(len(models))] for a in range(len(models))]
    shares[0][0] = None  # as for a model without an error
    return {
        "level": 0.95,
        "human": {"dataset": "imagenet-a", "accuracy": 0.9, "about": "humans are near 90%", "source": "a paper"},
        "accuracy": [
            {**place(*at), "images": 1000 + at[1], "top1": share(value(*at)), "top5": share(0.5 + value(*at))}
            for at in places
        ],
        "drop": [
            {"model": model, "clean": "imagenet-a-clean", "adversarial": adversarial, "mask": mask, "drop": share(d)}
            for model, d in zip(models, (0.61, 0.62), strict=False)
            for mask in (MASK, "")
        ],
        "wrong_confidence": [
            {**place(*at), "wrong": 0, "reason": "all are right"}
            if at == (0, 1, 0)
            else {**place(*at), "wrong": 5, "mean": share(0.4), "median": 0.4, "at_least": {"0.9": share(0.2)}}
            for at in places
        ],
        "transfer": [
            {"dataset": part, "mask": mask, "images": 50, "models": list(models), "wrong": [0, 40],
             "shares": shares, "error_rates": [share(0.7), share(0.8)]}
            for part in parts for mask in (MASK, "")
        ] if len(models) > 1 else [],
        "classes": [
            {**place(0, 0, 0), "class": index, "name": name, "wnid": wnid, "images": 40, "top1": share(accuracy),
             "top5": share(0.9), "confidence": 0.45}
            for index, name, wnid, accuracy in ((6, "stingray", "n01498041", 0.3), (11, "", "", 0.1))
        ],
    }  # fmt: skip


def texts(table: Table) -> dict[str, list[str]]:
    return {
        f"{header.group}/{header.label}": [cell.text for cell in row]
        for header, row in zip(table.rows, table.cells, strict=True)
    }


def test_every_set_of_every_model_has_a_row_with_both_views():
    table = robustness_tables(made_up())[0]
    assert [column.full for column in table.columns] == [
        "200 classes Acc@1 ↑",
        "200 classes Acc@5 ↑",
        "all classes Acc@1 ↑",
        "all classes Acc@5 ↑",
        "Loss from imagenet-a-clean, 200 classes drop ↓",
        "Confidence when wrong, 200 classes mean ↓",
        "Confidence when wrong, 200 classes ≥ 0.9 ↓",
    ]
    rows = texts(table)
    assert rows["m1/imagenet-a"] == ["0.111", "0.611", "0.112", "0.612", "0.610", "0.400", "0.200"]
    assert rows["m2/imagenet-a"] == ["0.211", "0.711", "0.212", "0.712", "0.620", "0.400", "0.200"]
    # nothing is lost from clean to clean, and a model without a wrong answer has no confidence in one
    assert rows["m1/imagenet-a-clean"] == ["0.121", "0.621", "0.122", "0.622", MISSING, MISSING, MISSING]


def test_humans_stand_below_with_their_source():
    table = robustness_tables(made_up())[0]
    assert texts(table)["Reference/imagenet-a: humans"] == ["≈ 0.900", *[MISSING] * 6]
    assert table.rows[-1].marks == ("a",)  # the first letter, as nothing else is marked
    assert dict(table.notes) == {"a": human_line(made_up())}
    assert "source: a paper" in human_line(made_up())
    clean = robustness_tables(made_up(), options=TableOptions(datasets=("imagenet-a-clean",)))[0]
    assert not any("humans" in header.label for header in clean.rows)
    assert human_line({"human": None}) == ""


def test_the_drop_of_a_mixture_says_that_it_is_of_its_other_images():
    table = robustness_tables(made_up(("m1",), mixed=True))[0]
    mixed, clean = table.cells
    assert (mixed[4].text, mixed[4].marks, clean[4].text) == ("0.610", ("a",), MISSING)
    assert dict(table.notes) == {"a": "of its images that are not imagenet-a-clean's"}


def test_without_a_clean_set_there_is_no_drop_to_show():
    views = {**made_up(("m1",)), "drop": [], "human": None}
    table = robustness_tables(views)[0]
    assert [column.label for column in table.columns] == ["Acc@1", "Acc@5", "Acc@1", "Acc@5", "mean", "≥ 0.9"]
    assert not any("Drop" in text for text in table.conventions)


def test_the_matrix_has_the_base_rate_below_and_nothing_where_there_is_no_error():
    matrices = robustness_tables(made_up())[1:]
    assert [table.title for table in matrices] == [  # those without the mask are in the file alone
        "Transfer of errors on imagenet-a, 200 classes",
        "Transfer of errors on imagenet-a-clean, 200 classes",
    ]
    assert texts(matrices[0]) == {
        "/m1 (0 wrong)": [MISSING, "0.310"],
        "/m2 (40 wrong)": ["0.400", "0.410"],
        "/all 50 images": ["0.700", "0.800"],
    }
    assert robustness_tables(made_up(("m1",)))[1:] == []
    chosen = robustness_tables(made_up(), options=TableOptions(models=("m2",), datasets=("imagenet-a",)))
    assert texts(chosen[1]) == {"/m2 (40 wrong)": ["0.410"], "/all 50 images": ["0.800"]}


def test_every_caption_names_suite_protocol_deviation_transform_and_what_is_not_counted():
    views = {
        **made_up(),
        "suite": "natural-adversarial",
        "protocol": "official-like",
        "transforms": {"m1": "squash 224", "m2": "crop 96"},
        "without": ["ensemble[m1, m2]"],
    }
    tables = [*robustness_tables(views), *class_accuracies(views)]
    assert len(tables) == 4
    for table in tables:
        text = ". ".join(table.caption)
        assert "suite natural-adversarial, protocol official-like" in text
        assert "Not the published protocol (official-like)" in text
        assert "squash 224" in text
        assert ("crop 96" in text) == (table.name != "classes")  # the classes of m1 alone
        assert "Not counted here: ensemble[m1, m2]" in text
    latex = FORMATS["latex"](tables)
    assert latex.count("protocol official-like") == 4


def test_of_many_sets_captions_count_alike_ones_together_and_matrices_come_by_name():
    views = made_up()
    for key in ("accuracy", "wrong_confidence", "transfer"):
        first = [row for row in views[key] if row["dataset"] == "imagenet-a"]
        views[key] += [row | {"dataset": f"c/fog/{s}"} for s in range(12) for row in first]
    (table,) = robustness_tables(views)
    caption = ". ".join(table.caption)
    assert "1,000 images of each of 13 sets from imagenet-a to c/fog/11, 1,001 images of imagenet-a-clean." in caption
    assert "How errors transfer between models is shown of sets that --datasets names" in caption
    chosen = robustness_tables(views, options=TableOptions(datasets=("c/fog/3",)))
    assert [table.title for table in chosen[1:]] == ["Transfer of errors on c/fog/3, 200 classes"]
    assert "--datasets" not in ". ".join(chosen[0].caption)


def test_the_confidence_of_an_ensemble_is_said_to_be_its_pools():
    pooled = robustness_tables(made_up(("m1", "ensemble[m1, m2] by mean_probability")))[0]
    assert "Confidence when wrong: of the plain softmax, of an ensemble that of its pool" in pooled.conventions
    assert "Confidence when wrong: of the plain softmax" in robustness_tables(made_up())[0].conventions


def test_intervals_percent_and_digits_are_those_asked_for():
    first = robustness_tables(made_up(), options=TableOptions(intervals="brackets", scale="percent"))[0].cells[0][0]
    assert (first.text, first.bounds, first.value) == ("11.1 [9.1, 13.1]", ("9.1", "13.1"), pytest.approx(0.111))
    half = robustness_tables(made_up(), options=TableOptions(intervals="plusminus", precision=2))[0].cells[0][0]
    assert half.text == "0.11 ± 0.02"


def test_classes_come_with_the_least_accurate_first():
    (table,) = class_accuracies(made_up())
    assert texts(table) == {
        "/class 11": ["40", "0.100", "0.900", "0.450"],
        "/stingray (n01498041)": ["40", "0.300", "0.900", "0.450"],
    }
    assert class_accuracies(made_up(), options=TableOptions(models=("m2",))) == []


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_shows_every_number(name: str):
    found = robustness_tables(made_up())
    text = FORMATS[name](found)
    for table in found:
        for row in table.cells:
            for cell in row:
                assert (
                    cell.text.replace("≈ ", "") in text.replace("~", "-").replace("--", MISSING) or cell.text == MISSING
                )
    if name == "csv":
        assert any("0.612" in row for row in csv.reader(io.StringIO(text)))


def test_runs_have_their_tables_and_a_run_without_views_has_none(tmp_path: Path):
    one, two, bare = (tmp_path / name for name in ("one", "two", "bare"))
    for folder in (one, two, bare):
        folder.mkdir()
    for folder in (one, two):
        (folder / "robustness.json").write_text(json.dumps(made_up(("m1",))))
    assert read_views(bare) == {}
    assert run_tables([bare], "robustness") == []
    assert [table.title for table in run_tables([one, bare, two], "robustness")] == [
        "Robustness (one)",
        "Robustness (two)",
    ]
    assert [table.name for table in run_tables([one], "classes")] == ["classes"]
    with pytest.raises(ValueError, match="there is no table of classes"):
        run_tables([bare], "classes", needed=True)
    (bare / "robustness.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_views(bare)


def test_the_report_has_the_views_with_intervals(make_folder: Any, tmp_path: Path):
    folder = make_folder()
    (folder / "robustness.json").write_text(json.dumps(made_up()))
    text = report(folder, tmp_path / "page.html", draw=False).read_text()
    section = text[text.index('<section id="robustness"') : text.index("</section>", text.index('id="robustness"'))]
    assert "0.111 [0.091, 0.131]" in section
    assert "Transfer of errors on imagenet-a, 200 classes" in section


def test_an_ensemble_is_a_row_of_its_own_and_is_chosen_by_its_name_in_records():
    views = made_up(("m1", "ensemble[m1, m2] by mean_probability"))
    rows = texts(robustness_tables(views, options=TableOptions(models=("ensemble[m1, m2]",)))[0])
    assert rows == {
        "/imagenet-a": ["0.211", "0.711", "0.212", "0.712", "0.620", "0.400", "0.200"],
        "/imagenet-a-clean": ["0.221", "0.721", "0.222", "0.722", MISSING, "0.400", "0.200"],
        "/imagenet-a: humans": ["≈ 0.900", *[MISSING] * 6],
    }
