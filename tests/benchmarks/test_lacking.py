"""What is said of calibrators and ensembles that cannot be fitted."""

from dataclasses import dataclass

import pytest
import torch

from ood_toolkit.benchmarks.lacking import LeftOut, require_calibration_data
from ood_toolkit.benchmarks.suite import Part, Suite
from ood_toolkit.calibrators import Calibrator, EnsemblePool
from ood_toolkit.outputs import UNKNOWN
from ood_toolkit.registry import build_calibrator, build_ensemble


def test_why_a_method_is_left_out_is_said_once_for_all_masks_and_models():
    lines: list[str] = []
    left_out = LeftOut(lines.append)
    assert [left_out("vector", "is flat"), left_out("vector", "is flat"), left_out("vector", "is empty")] == [
        "is flat",
        "is flat",
        "is empty",
    ]
    assert lines == ["vector left out: is flat", "vector left out: is empty"]


@dataclass
class Labelled:
    """An image set of which only names and labels are asked for."""

    labels: torch.Tensor
    name: str = "made-up"
    fingerprint: str = "made-up"

    @property
    def ids(self) -> list[str]:
        return [str(row) for row in range(len(self.labels))]

    def __len__(self) -> int:
        return len(self.labels)


def suite(labels: list[int] | None) -> Suite:
    part = None if labels is None else Part("calibration", Labelled(torch.tensor(labels)))  # pyright: ignore
    return Suite("made-up", "", [], calibration=part)


LEARNERS = [build_calibrator("temperature"), build_ensemble("pooled_temperature")]


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: learner.name)
@pytest.mark.parametrize(
    ("labels", "reason"),
    [(None, "needs calibration data"), ([UNKNOWN, UNKNOWN], "none of 'calibration' .2 images. has a label")],
)
def test_a_named_learner_without_labelled_rows_is_refused(
    learner: Calibrator | EnsemblePool, labels: list[int] | None, reason: str
):
    with pytest.raises(ValueError, match=f"{learner.name}: .*{reason}"):
        require_calibration_data([learner], {learner.spec}, suite(labels))
    require_calibration_data([learner], set(), suite(labels))  # it came with "all"
    require_calibration_data([learner], {learner.spec}, suite([UNKNOWN, 1]))


def test_what_learns_nothing_needs_no_rows():
    plain = [build_calibrator("none"), build_ensemble("mean_logit")]
    require_calibration_data(plain, {learner.spec for learner in plain}, suite(None))
