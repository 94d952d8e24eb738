from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ood_toolkit.records import METRICS, Record
from ood_toolkit.reporting.assembly import places_of
from ood_toolkit.reporting.captions import transforms
from ood_toolkit.reporting.grid import MISSING, Table
from ood_toolkit.reporting.options import TableOptions
from ood_toolkit.reporting.tables import render, tables

MakeRun = Callable[..., list[Record]]


def looked_up(records: list[Record], table: Table) -> dict[tuple[str, str], str]:
    """(row label, column) -> text, read off the finished table."""
    return {
        (row.label, column.full): cell.text
        for row, cells in zip(table.rows, table.cells, strict=True)
        for column, cell in zip(table.columns, cells, strict=True)
    }


def test_every_cell_holds_the_record_of_its_row_and_column(make_run: MakeRun) -> None:
    records = make_run()
    detectors, calibrators = tables(records)
    shown = looked_up(records, detectors) | looked_up(records, calibrators)
    words = {"anomaly": "OOD", "misclassification": "Errors", "calibration": "Calibration"}
    for r in records:
        metric = METRICS[r.metric]
        column = f"{words[r.task]}: {r.dataset} {metric.label} {'↑' if metric.higher_is_better else '↓'}"
        assert shown.pop((r.method, column)) == (MISSING if r.value is None else f"{r.value:.3f}")
    assert all("mean of 2" in column for _, column in shown)  # nothing but the averages is left


def test_an_average_stands_only_where_every_set_has_a_number(make_run: MakeRun) -> None:
    records = make_run()
    (table,) = tables(records, what="detectors")
    shown = looked_up(records, table)
    for method in {r.method for r in records if r.task == "anomaly"}:
        values = [r.value for r in records if (r.task, r.method, r.metric) == ("anomaly", method, "auroc")]
        known = [v for v in values if v is not None]
        expected = f"{sum(known) / 2:.3f}" if len(known) == 2 else MISSING
        assert shown[method, "OOD: mean of 2 AUROC ↑"] == expected


def test_an_average_is_missing_where_a_single_set_is(make_run: MakeRun) -> None:
    records = [
        replace(r, value=None, low=None, high=None, reason="interrupted")
        if (r.method, r.dataset, r.metric) == ("vim", "textures", "auroc")
        else r
        for r in make_run()
    ]
    (table,) = tables(records, what="detectors")
    shown = looked_up(records, table)
    assert shown["vim", "OOD: mean of 2 AUROC ↑"] == MISSING
    assert shown["vim", "OOD: mean of 2 AUPR ↑"] != MISSING


def test_a_missing_cell_says_why(make_run: MakeRun) -> None:
    (table,) = tables(make_run(), what="detectors")
    notes = dict(table.notes)
    reasons = {notes[mark] for row in table.cells for cell in row if cell.value is None for mark in cell.marks}
    assert reasons == {
        "every class needs a training row, but classes [3, 17] have none",
        "an average is given only where every OOD set has a number",
    }


def test_a_cell_without_a_record_is_missing_too(make_run: MakeRun) -> None:
    records = [r for r in make_run() if (r.method, r.metric) != ("vim", "aurc")]
    (table,) = tables(records, what="detectors")
    assert looked_up(records, table)["vim", "Errors: val1300 AURC ↓"] == MISSING
    assert "not in the records" in dict(table.notes).values()


numbers = st.lists(st.one_of(st.just(""), st.integers(0, 20).map(lambda n: f"{n / 20:.2f}")), min_size=1, max_size=8)


@given(numbers, st.sampled_from(["auroc", "fpr95"]))
def test_the_best_is_the_extreme_of_its_column_and_equal_print_ranks_equal(texts: list[str], metric: str) -> None:
    places = places_of(texts, metric, [""] * len(texts))
    known = sorted({float(t) for t in texts if t}, reverse=METRICS[metric].higher_is_better)
    for text, place in zip(texts, places, strict=True):
        if not text or len(known) < 2:
            assert place == 0
        else:
            assert place == {known[0]: 1, known[1]: 2}.get(float(text), 0)


def test_the_best_is_sought_within_each_model_where_there_are_several(make_run: MakeRun) -> None:
    records = make_run() + make_run(model="timm:resnet50")
    (table,) = tables(records, what="calibrators")
    ece = next(j for j, column in enumerate(table.columns) if column.label == "ECE")
    assert [group for group, _ in table.row_groups()] == ["demo:efficientnet_lite0", "timm:resnet50"]
    assert [sum(table.cells[i][ece].place == 1 for i in rows) for _, rows in table.row_groups()] == [1, 1]
    assert table.legend.endswith("within each model")


def test_intervals_are_those_of_the_records(make_run: MakeRun) -> None:
    records = make_run()
    record = next(r for r in records if (r.method, r.task, r.metric) == ("msp", "misclassification", "auroc"))
    for style, text in {
        "brackets": f"{record.value:.3f} [{record.low:.3f}, {record.high:.3f}]",
        "plusminus": f"{record.value:.3f} ± 0.013",
    }.items():
        (table,) = tables(records, what="detectors", options=TableOptions(intervals=style))  # pyright: ignore
        assert looked_up(records, table)["msp", "Errors: val1300 AUROC ↑"] == text
        assert any("95% bootstrap intervals" in part for part in table.conventions)


def test_percent_scales_shares_and_leaves_the_rest(make_run: MakeRun) -> None:
    records = make_run()
    (table,) = tables(records, what="calibrators", options=TableOptions(scale="percent"))
    shown = looked_up(records, table)
    value = {r.metric: r.value for r in records if r.method == "none"}
    assert shown["none", "Calibration: val1300 ECE ↓"] == f"{100 * value['ece']:.1f}"  # pyright: ignore
    assert shown["none", "Calibration: val1300 NLL ↓"] == f"{value['nll']:.3f}"
    assert "Values in percent, except NLL and Brier" in table.conventions


def test_no_number_is_minus_nought() -> None:
    assert TableOptions().number(-0.0001, "e_aurc") == "0.000"
    assert TableOptions().number(-0.01, "e_aurc") == "-0.010"


def test_rows_columns_and_order_follow_the_choice(make_run: MakeRun) -> None:
    options = TableOptions(
        metrics=("fpr95", "auroc"), datasets=("textures",), methods=("vim", "knn*"), group_by="none", precision=2
    )
    (table,) = tables(make_run(), options=options)
    assert [row.label for row in table.rows] == ["vim", "knn(k=50, metric='cosine')"]
    assert [column.full for column in table.columns] == ["OOD: textures FPR95 ↓", "OOD: textures AUROC ↑"]
    assert {len(cell.text) for row in table.cells for cell in row} == {4}


def test_transposing_twice_changes_no_cell(make_run: MakeRun) -> None:
    for table in tables(make_run()):
        assert table.transposed().transposed().cells == table.cells
        assert table.transposed().cells[2][1] == table.cells[1][2]


def test_grouped_by_data_set_there_is_a_table_for_each_task(make_run: MakeRun) -> None:
    found = tables(make_run(), what="detectors", options=TableOptions(group_by="dataset"))
    assert [[group for group, _ in table.row_groups()] for table in found] == [["val1300"], ["textures", "openimage_o"]]
    assert len({table.label for table in found}) == 2


def test_suites_never_share_a_table(make_run: MakeRun) -> None:
    found = tables(make_run() + make_run(suite="imagenet-o"), what="detectors")
    assert [table.title for table in found] == ["Detectors, folders", "Detectors, imagenet-o"]


def test_a_tuned_method_is_footnoted_and_tuning_on_a_tested_set_is_called_optimistic(make_run: MakeRun) -> None:
    for chosen, optimistic in (("ninco", False), ("textures", True)):
        records = [replace(r, tuned_on=chosen) if r.method.startswith("odin") else r for r in make_run()]
        (table,) = tables(records, what="detectors")
        notes = [text for _, text in table.notes if chosen in text]
        marked = [row.label for row in table.rows if row.marks]
        assert marked == ["odin(temperature=1000, epsilon=0.0014)"]
        assert len(notes) == 1
        assert ("optimistic" in notes[0]) == optimistic


def test_a_row_of_other_seeds_than_the_first_is_footnoted(make_run: MakeRun) -> None:
    records = make_run(seed=0) + make_run(seed=1, model="timm:resnet50")
    (table,) = tables(records, what="calibrators")
    assert {row.group for row in table.rows if row.marks} == {"timm:resnet50"}
    assert "measured with seed 1" in dict(table.notes).values()


def test_cells_that_a_test_cannot_tell_from_the_best_are_marked(make_run: MakeRun) -> None:
    tied = frozenset({("demo:efficientnet_lite0", "vim", "misclassification", "val1300", "auroc")})
    (table,) = tables(make_run(), what="detectors", options=TableOptions(tied=tied))
    marked = [
        (row.label, column.label)
        for row, cells in zip(table.rows, table.cells, strict=True)
        for column, cell in zip(table.columns, cells, strict=True)
        if "≈" in cell.marks
    ]
    assert marked == [("vim", "AUROC")]


def test_the_caption_states_sets_sizes_chance_and_settings(make_run: MakeRun) -> None:
    (table,) = tables(make_run(mask="imagenet-o:200", protocol="official"), what="detectors")
    text = ". ".join(table.caption)
    for words in (
        "suite folders, protocol official, model demo:efficientnet_lite0, seed 0",
        "217 wrong against 1083 right rows (AUPR by chance: 0.167)",
        "1000 OOD against 1300 ID rows (AUPR by chance: 0.435)",
        "fitted on val1300/fit, 650 rows, 1f2e3d4c",
        "Transform: resize 256 bicubic, crop 224",
        "masked before the softmax: imagenet-o:200",
    ):
        assert words in text
    assert "FPR95: Share of ID (right) rows flagged when 95% of OOD (wrong) rows are" in table.conventions


def test_the_sizes_of_many_sets_are_one_sentence(make_run: MakeRun) -> None:
    names = [f"set{number}" for number in range(7)]
    (detectors,) = tables(make_run(ood=names), what="detectors")
    caption = ". ".join(detectors.caption)
    assert "Anomaly detection on 7 sets from set0 to set6: 1000 OOD against 1300 ID rows (AUPR by chance" in caption
    assert "Misclassification detection on val1300: " in caption


@pytest.mark.parametrize(
    ("of_models", "text"),
    [
        ([("a", "x"), ("b", "y"), ("ensemble[a, b]", "x; y")], "Each model has its own transform: a: x; b: y"),
        ([("a", "x"), ("b", "x"), ("ensemble[a, b]", "x")], "Transform: x"),
        ([("ensemble[a, b]", "x; y")], "Transforms of the ensemble's members: x; y"),
        ([("ensemble[a, b]", "x")], "Transform: x"),
        ([("a", "x"), ("ensemble[a, b]", "x; y")], "Transform: x. Transforms of the ensemble's other members: y"),
        ([("a", "")], ""),
    ],
)
def test_the_transforms_of_an_ensemble_are_its_members(of_models: list[tuple[str, str]], text: str) -> None:
    assert transforms(of_models) == text


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (("a",), "model a, seed"),
        (("a", "b"), "2 models, seed"),
        (("a", "ensemble[a, b, c]"), "model a and the ensemble of a, b, c, seed"),
        (("a", "b", "ensemble[a, b]", "ensemble[a, c]"), "2 models and 2 ensembles, seed"),
        (("ensemble[a, b]",), "the ensemble of a, b, seed"),
    ],
)
def test_the_caption_counts_models_and_names_the_ensemble_apart(
    make_run: MakeRun, models: tuple[str, ...], words: str
) -> None:
    records = [replace(record, model=model) for record in make_run() for model in models]
    (table,) = tables(records, what="detectors")
    assert words in table.caption[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ("auroq",)}, r"no metrics \['auroq'\]; they have accuracy"),
        ({"datasets": ("texture",)}, r"no datasets \['texture'\]; they have"),
        ({"methods": ("knm*",)}, r"no method matches \['knm\*'\]; the records have"),
        ({"metrics": ("ece",), "datasets": ("textures",)}, "none of .* records is left after choosing all, metrics"),
    ],
)
def test_a_choice_that_finds_nothing_is_refused_with_what_there_is(
    make_run: MakeRun, options: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tables(make_run(), options=TableOptions(**options))  # pyright: ignore


def test_unknown_formats_options_and_tables_are_refused(make_run: MakeRun) -> None:
    with pytest.raises(ValueError, match="no format is named 'docx'; known: text, markdown, latex"):
        render(make_run(), format="docx")
    with pytest.raises(ValueError, match="scale cannot be 'promille'"):
        TableOptions(scale="promille")  # pyright: ignore
    with pytest.raises(ValueError, match="shape LaTeX only, not html"):
        render(make_run(), format="html", siunitx=True)
    with pytest.raises(ValueError, match="there are no records"):
        tables([])


def test_a_notebook_and_a_print_show_the_same_table(make_run: MakeRun) -> None:
    (table,) = tables(make_run(), what="calibrators")
    assert table._repr_html_() == render(make_run(), format="html", what="calibrators")
    assert str(table) == render(make_run(), format="text", what="calibrators")


def test_an_average_does_not_count_means_of_groups_again(make_run: MakeRun) -> None:
    records = make_run()
    near = [
        replace(r, dataset="near-ood", value=None if r.value is None else 0.0) for r in records if r.task == "anomaly"
    ]
    (alone,) = tables(records, what="detectors")
    (table,) = tables([*records, *near], what="detectors")
    column = "OOD: mean of 2 AUROC ↑"
    shown, expected = looked_up([*records, *near], table), looked_up(records, alone)
    assert {k: v for k, v in shown.items() if k[1] == column} == {k: v for k, v in expected.items() if k[1] == column}
    assert "OOD: near-ood AUROC ↑" in {label for _, label in shown}


def again_under_all_classes(records: list[Record]) -> list[Record]:
    return [
        replace(r, dataset=f"{r.dataset} 1000-way", value=None if r.value is None else 0.0)
        for r in records
        if r.dataset in ("textures", "val1300")
    ]


def test_a_set_that_is_scored_again_under_all_classes_stands_in_a_table_of_its_own(make_run: MakeRun) -> None:
    records = make_run()
    found = tables([*records, *again_under_all_classes(records)])
    assert [table.title for table in found] == [
        "Detectors", "Detectors, 1000-way", "Calibrators", "Calibrators, 1000-way",
    ]  # fmt: skip
    for plain, expected in zip((found[0], found[2]), tables(records), strict=True):
        assert looked_up(records, plain) == looked_up(records, expected)  # no average counts the set again
    assert {column.group for column in found[1].columns} == {"Errors: val1300 1000-way", "OOD: textures 1000-way"}
    assert {column.group for column in found[3].columns} == {"Calibration: val1300 1000-way"}


def test_grouped_by_data_set_every_task_under_every_protocol_has_a_table(make_run: MakeRun) -> None:
    records = make_run()
    found = tables(
        [*records, *again_under_all_classes(records)], what="detectors", options=TableOptions(group_by="dataset")
    )
    assert [table.title for table in found] == [
        "Detectors, misclassification", "Detectors, anomaly",
        "Detectors, 1000-way, misclassification", "Detectors, 1000-way, anomaly",
    ]  # fmt: skip


@pytest.mark.parametrize(("sets", "below"), [(11, False), (12, True)])  # and the in-distribution one
def test_many_data_sets_stand_below_one_another(make_run: MakeRun, sets: int, below: bool) -> None:
    records = make_run(ood=[f"set {number}" for number in range(sets)])
    found = tables(records, what="detectors")
    if not below:
        assert [table.title for table in found] == ["Detectors"]
        return
    assert [table.title for table in found] == ["Detectors, misclassification", "Detectors, anomaly"]
    assert {row.group for row in found[1].rows} == {f"set {number}" for number in range(sets)}
    assert [column.label for column in found[1].columns] == ["AUROC", "AUPR", "FPR95"]
    assert len(tables(records, what="detectors", options=TableOptions(group_by="family"))) == 1


def test_a_run_under_all_classes_alone_has_one_table_of_each_kind(make_run: MakeRun) -> None:
    assert [table.title for table in tables(again_under_all_classes(make_run()))] == ["Detectors", "Calibrators"]


@pytest.mark.parametrize(
    ("protocol", "said"), [("official-like", True), ("official-standin", True), ("official", False)]
)
def test_a_caption_says_that_the_run_is_not_the_published_protocol(
    make_run: MakeRun, protocol: str, said: bool
) -> None:
    for table in tables([replace(r, protocol=protocol) for r in make_run()]):
        sentences = [s for s in table.caption if s.startswith("Not the published protocol")]
        assert len(sentences) == said
        assert not said or "run.json" in sentences[0]


def test_an_unknown_table_is_refused_with_all_that_there_are(make_run: MakeRun) -> None:
    with pytest.raises(ValueError, match="known: detectors, calibrators, robustness, classes, corruptions, all"):
        tables(make_run(), what="nope")  # pyright: ignore[reportArgumentType]
