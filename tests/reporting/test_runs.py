import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up_runs import DETECTORS
from sklearn.metrics import roc_auc_score

from ood_toolkit.records import read_records, write_records
from ood_toolkit.reporting.runs import Run, merged_records

MakeFolder = Callable[..., Path]


def test_the_scores_of_every_row_give_back_its_recorded_auroc(make_folder: MakeFolder) -> None:
    run = Run.open(make_folder())
    checked = 0
    for task in ("misclassification", "anomaly"):
        for model, dataset in run.questions(task):
            samples = {s.record.method: s for s in run.samples(task, model, dataset)}
            for record in run.records:
                if (record.task, record.dataset, record.metric) == (task, dataset, "auroc"):
                    sample = samples[record.method]
                    truth = np.repeat([0, 1], [len(sample.negatives), len(sample.positives)])
                    assert record.value == pytest.approx(roc_auc_score(truth, sample.both), abs=1e-12)
                    assert (len(sample.positives), len(sample.negatives)) == (record.positives, record.negatives)
                    assert len(sample.positive_ids) == len(sample.positives)
                    checked += 1
    assert checked == 3 * len(DETECTORS)


def test_parts_named_in_run_json_win_over_a_guess_by_counts(make_folder: MakeFolder) -> None:
    path = make_folder()
    facts = json.loads((path / "run.json").read_text())
    facts["tasks"] = [{"kind": "anomaly", "dataset": "textures", "id": "val1300", "ood": "openimage_o"}]
    (path / "run.json").write_text(json.dumps(facts))
    sample = Run.open(path).samples("anomaly", "demo:efficientnet_lite0", "textures")[0]
    assert sample.positive_ids[0].startswith("openimage_o/")


def test_a_data_set_may_carry_a_suffix_after_the_name_of_its_part(make_folder: MakeFolder) -> None:
    path = make_folder()
    records = [replace(r, dataset=r.dataset + "-200way") for r in read_records(path / "records.jsonl")]
    write_records(path / "records.jsonl", records)
    sample = Run.open(path).samples("anomaly", "demo:efficientnet_lite0", "textures-200way")[0]
    assert sample.positive_ids[0].startswith("textures/")


def test_correctness_splits_the_images_as_the_model_does(make_folder: MakeFolder) -> None:
    run = Run.open(make_folder())
    (plain, *_) = run.confidences("demo:efficientnet_lite0", "val1300")
    sample = run.samples("misclassification", "demo:efficientnet_lite0", "val1300")[0]
    wrong = {f"val1300/val1300-{i:04}.jpg" for i in np.flatnonzero(~plain.correct)}
    assert set(sample.positive_ids) == wrong
    assert plain.record.method == "none"


def test_images_are_found_only_where_their_files_are(make_folder: MakeFolder, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "textures-0003.jpg").touch()
    run = Run.open(make_folder(images=tmp_path / "photos"))
    assert run.image("textures/textures-0003.jpg") == tmp_path / "photos" / "textures-0003.jpg"
    assert run.image("textures/textures-0004.jpg") is None
    assert Run.open(make_folder("other")).image("textures/textures-0003.jpg") is None


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no run folder: it has no records\.jsonl"):
        Run.open(tmp_path)
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(ValueError, match="holds no records"):
        Run.open(tmp_path)


def test_records_of_several_folders_and_files_are_read_in_order(make_folder: MakeFolder) -> None:
    one, other = make_folder("one"), make_folder("other", seed=1)
    merged = merged_records([one, other / "records.jsonl"])
    assert merged == [*read_records(one / "records.jsonl"), *read_records(other / "records.jsonl")]
    with pytest.raises(ValueError, match="neither a run folder nor a file"):
        merged_records([one / "nothing"])
