"""A second opinion is paired with the main model's images one by one."""

from pathlib import Path

import torch

from ood_toolkit.benchmarks.measure import Bootstrap
from ood_toolkit.benchmarks.recording import Recorder, Row
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.benchmarks.second_opinion import beside, second_opinion
from ood_toolkit.benchmarks.suite import Part, Suite, Task
from ood_toolkit.datasets import ArrayImages
from ood_toolkit.metrics import auroc
from ood_toolkit.outputs import Head, Outputs


def test_scores_are_paired_by_image_and_missing_ones_are_nan():
    rows, others = torch.tensor([7, 2, 5, 0]), torch.tensor([5, 3, 7, 9, 2])
    paired = beside(torch.tensor([0.7, 0.2, 0.5, 0.0]), rows, others)
    by_image = dict(zip(rows.tolist(), [0.7, 0.2, 0.5, 0.0], strict=True))
    expected = torch.tensor([by_image.get(image, torch.nan) for image in others.tolist()])
    torch.testing.assert_close(paired, expected, equal_nan=True)
    assert beside(torch.empty(0), rows[:0], others).isnan().all()
    assert len(beside(torch.tensor([0.5]), rows[:1], others[:0])) == 0


def test_it_is_the_mcm_of_the_zero_shot_model():
    texts = torch.randn(4, 6)
    features = torch.randn(5, 6)
    unit = torch.nn.functional.normalize
    outputs = Outputs(
        logits=100 * unit(features) @ unit(texts).T,
        features=unit(features),
        labels=torch.zeros(5, dtype=torch.int64),
        head=Head(100 * unit(texts), torch.zeros(4)),
    )
    expected = 1 - (unit(features) @ unit(texts).T).softmax(dim=1).amax(dim=1)
    torch.testing.assert_close(second_opinion({"id": outputs})["id"], expected)


def test_an_image_without_a_score_counts_neither_as_right_nor_as_wrong_nor_as_ood(tmp_path: Path):
    known = ArrayImages(torch.zeros(6, 2, 2, dtype=torch.uint8).numpy(), name="id", labels=[0, 1, 0, 1, 0, 1])
    strange = ArrayImages(torch.ones(3, 2, 2, dtype=torch.uint8).numpy(), name="ood")
    id_part, ood_part = Part("id", known), Part("ood", strange)
    suite = Suite("s", "", [Task("misclassification", "id", id_part), Task("anomaly", "ood", id_part, ood_part)])
    folder = RunFolder(tmp_path / "run", {})
    folder.scores.ids |= {"id": known.ids, "ood": strange.ids}
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0], [2.0, 0.0]])  # R W R R W W
    parts = {"id": Outputs.from_logits(logits, known.labels), "ood": Outputs.from_logits(logits[:3])}
    nan = torch.nan
    scores = {"id": torch.tensor([0.1, nan, nan, 0.6, 0.5, 0.9]), "ood": torch.tensor([0.7, 0.8, nan])}
    Recorder(suite, folder, Bootstrap(resamples=0, seed=0), 0).detector(
        Row("model", "clip+mcm", "vision-language", ""), scores, parts, None
    )
    found = {record.task: record for record in folder.records if record.metric == "auroc"}
    wrong = found["misclassification"]
    assert (wrong.positives, wrong.negatives) == (2, 2)
    assert wrong.value == auroc(torch.tensor([0.1, 0.6]), torch.tensor([0.5, 0.9]))
    anomaly = found["anomaly"]
    assert (anomaly.positives, anomaly.negatives) == (2, 4)
    assert anomaly.value == auroc(torch.tensor([0.1, 0.6, 0.5, 0.9]), torch.tensor([0.7, 0.8]))
