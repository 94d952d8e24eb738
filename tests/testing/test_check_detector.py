"""The law suites find planted faults, and pass what is sound."""

from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators import Calibrator, Identity
from ood_toolkit.calibrators.base import checked
from ood_toolkit.detectors import Detector, LiveDetector, MSPDetector
from ood_toolkit.detectors.base import Differentiable
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing import (
    BrokenLaw,
    SyntheticClassifier,
    check_calibrator,
    check_detector,
    synthetic_images,
    synthetic_outputs,
)


class Nearest(Detector):
    """A sound outsider: distance to the nearest class mean."""

    name = "nearest"
    paper = "nobody"
    needs = "train"
    means: Float[Tensor, "C D"]

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        self.power = power

    def fit(self, train: Outputs) -> "Nearest":
        parts = [(batch.features, batch.labels) for batch in train.batches()]
        features, labels = torch.cat([f for f, _ in parts]), torch.cat([y for _, y in parts])
        self.means = torch.stack([features[labels == c].mean(dim=0) for c in range(train.classes)])
        return self

    def score(self, outputs: Outputs) -> Tensor:
        distances = (outputs.features.unsqueeze(1) - self.means).square().sum(dim=2)
        return distances.amin(dim=1) ** self.power


class WrongSign(Nearest):
    def score(self, outputs: Outputs) -> Tensor:
        return -super().score(outputs)


class BatchDependent(Nearest):
    def score(self, outputs: Outputs) -> Tensor:
        scores = super().score(outputs)
        return scores - scores.mean()


class Undeclared(Nearest):
    def fit(self, train: Outputs) -> "Undeclared":
        super().fit(train)
        self.width = train.features.abs().max()
        return self

    def score(self, outputs: Outputs) -> Tensor:
        return super().score(outputs) / self.width


class Accumulating(Nearest):
    def fit(self, train: Outputs) -> "Accumulating":
        old = self.means if "means" in self._buffers else 0
        super().fit(train)
        self.means = self.means + old
        return self


class Writing(Nearest):
    def score(self, outputs: Outputs) -> Tensor:
        scores = super().score(outputs)
        outputs.features.clamp_(max=1.0)
        return scores


class LabelReading(Nearest):
    def score(self, outputs: Outputs) -> Tensor:
        return super().score(outputs) + outputs.labels


class SinglePrecision(Nearest):
    def score(self, outputs: Outputs) -> Tensor:
        return super().score(outputs).float()


class Both(WrongSign, SinglePrecision):
    pass


class Saturating(MSPDetector):
    def score(self, outputs: Outputs) -> Tensor:
        return 1 - outputs.logits.softmax(dim=1).amax(dim=1)


class NotANumber(Nearest):
    def score(self, outputs: Outputs) -> Tensor:
        norm = outputs.features.norm(dim=1)
        return super().score(outputs) * norm / norm


class Renaming(Nearest):
    def __init__(self, power: float = 1.0) -> None:
        super().__init__(power)
        self.power = power + 1


class HungryForRows(Nearest):
    needs = "head"


class StoreReading(Nearest):
    def fit(self, train: Outputs) -> "StoreReading":
        one_hot = torch.nn.functional.one_hot(train.labels, train.classes).to(train.features.dtype)
        self.means = (one_hot / one_hot.sum(dim=0)).T @ train.features
        return self


class LogitReading(Nearest):
    reads = frozenset({"features"})

    def score(self, outputs: Outputs) -> Tensor:
        return super().score(outputs) - outputs.logits.amax(dim=1)


class KeepsRows(Nearest):
    def fit(self, train: Outputs) -> "KeepsRows":
        super().fit(train)
        self._kept = train
        return self


class NothingDeclared(Undeclared):
    def score(self, outputs: Outputs) -> Tensor:
        return outputs.features.sum(dim=1) / -self.width


class Nameless(Detector):
    paper = "nobody"
    reads = frozenset({"logits"})

    def score(self, outputs: Outputs) -> Tensor:
        return -outputs.logits.amax(dim=1)


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        (WrongSign, "ranks_ood_above_id"),
        (LogitReading, "what_is_read_is_declared: .*logits change scores"),
        (KeepsRows, "a_state_dict_restores_an_unfitted_copy: fit keeps _kept"),
        (Nameless, "spec_and_repr_round_trip: Nameless has no `name`"),
        (StoreReading, r"`train.batches\(\)`"),
        (Undeclared, "a_state_dict_restores_an_unfitted_copy: fit keeps width .*declare"),
        (NothingDeclared, "unfitted_use_raises_not_fitted: it reads what no fit has learned .*'width'"),
        (BatchDependent, "a_row_scores_the_same_alone_or_in_a_batch"),
        (Undeclared, "a_state_dict_restores_an_unfitted_copy"),
        (Accumulating, "fitting_again_forgets_the_first_fit"),
        (Writing, "inputs_stay_as_they_were"),
        (LabelReading, "what_is_read_is_declared"),
        (SinglePrecision, "float64_gives_float64_close_to_float32"),
        (Saturating, "saturated_rows_do_not_tie"),
        (NotANumber, "extreme_rows_score_finite"),
        (Renaming, "spec_and_repr_round_trip"),
        (HungryForRows, "only_the_head_is_needed"),
        (StoreReading, "fits_on_a_mapped_half_precision_store"),
    ],
)
def test_a_planted_fault_breaks_its_law(fault: type[Detector], law: str) -> None:
    with pytest.raises(BrokenLaw, match=law):
        check_detector(fault)


class NoReturn(Nearest):
    def fit(self, train: Outputs) -> "NoReturn":
        super().fit(train)
        return None  # pyright: ignore[reportReturnType]


def test_what_breaks_many_laws_alike_is_said_once() -> None:
    with pytest.raises(BrokenLaw) as found:
        check_detector(NoReturn)
    assert str(found.value).count("fit should return the detector itself") == 1


class Depth(Detector):
    """A sound outsider with a tap of its own."""

    name = "depth"
    paper = "nobody"
    reads = frozenset({"taps"})
    taps = ("depth",)

    def score(self, outputs: Outputs) -> Tensor:
        return outputs.taps["depth"].norm(dim=1)


def test_a_detector_with_a_tap_of_its_own_is_checked_with_its_maker() -> None:
    check_detector(Depth, makers={"depth": lambda features, head, generator: features[:, -8:]})
    with pytest.raises(ValueError, match="makers="):
        check_detector(Depth)


def test_a_sound_outsider_passes() -> None:
    check_detector(Nearest)
    check_detector(Nearest(power=0.5))


def test_all_broken_laws_are_reported_at_once() -> None:
    with pytest.raises(BrokenLaw, match=r"(?s)2 law\(s\).*ranks_ood.*float64_gives"):
        check_detector(Both)


def test_an_exemption_needs_a_reason_a_known_law_and_a_fault() -> None:
    check_detector(WrongSign, exempt={"ranks_ood_above_id": "planted"})
    with pytest.raises(ValueError, match="reason"):
        check_detector(WrongSign, exempt={"ranks_ood_above_id": ""})
    with pytest.raises(ValueError, match="no law is named"):
        check_detector(WrongSign, exempt={"ranks": "planted"})
    with pytest.raises(BrokenLaw, match="drop the exemption"):
        check_detector(Nearest, exempt={"ranks_ood_above_id": "stale"})


def test_an_unknown_tap_asks_for_a_maker() -> None:
    with pytest.raises(ValueError, match="'depth'"):
        synthetic_outputs(["depth"])
    made = synthetic_outputs(["depth"], makers={"depth": lambda features, head, generator: features[:, :2]})
    assert torch.equal(made.ood.taps["depth"], made.ood.features[:, :2])


def test_the_synthetic_model_is_right_most_of_the_time_and_wrong_sometimes() -> None:
    data = synthetic_outputs()
    assert 0.9 < float(data.id.correct.float().mean()) < 1
    images, labels = synthetic_images("id")
    assert float((SyntheticClassifier()(images).predictions == labels).float().mean()) > 0.95


class LiveMSP(LiveDetector):
    """A sound live detector: MSP after one step along the gradient of the energy."""

    name = "live_msp"
    paper = "nobody"

    def score(self, classifier: Differentiable, images: Tensor) -> Tensor:
        images = images.detach().clone().requires_grad_(True)
        with torch.enable_grad():
            loss = classifier.differentiate(images).logits.logsumexp(dim=1).sum()
            (gradient,) = torch.autograd.grad(loss, images)
        return 1 - classifier((images + 0.001 * gradient.sign()).detach()).logits.softmax(dim=1).amax(dim=1)


class LeavesGradients(LiveMSP):
    def score(self, classifier: Differentiable, images: Tensor) -> Tensor:
        with torch.enable_grad():
            classifier.differentiate(images).logits.sum().backward()
        return super().score(classifier, images)


class LeavesAHook(LiveMSP):
    def score(self, classifier: Any, images: Tensor) -> Tensor:
        handle = classifier.model[0].register_forward_hook(lambda *_: None)
        scores = super().score(classifier, images)
        handle.remove()
        return scores


class SwitchesGradientsOff(LiveMSP):
    def score(self, classifier: Differentiable, images: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        scores = super().score(classifier, images)
        torch.set_grad_enabled(True)
        return scores


class LiveBatchMean(LiveMSP):
    def score(self, classifier: Differentiable, images: Tensor) -> Tensor:
        scores = super().score(classifier, images)
        return scores - scores.mean()


def test_a_sound_live_detector_passes() -> None:
    check_detector(LiveMSP)


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        (LeavesGradients, "the_model_is_left_as_it_was: .*grad"),
        (LeavesAHook, "after_an_exception: .*hooks"),
        (SwitchesGradientsOff, "gradient"),
        (LiveBatchMean, "a_row_scores_the_same_alone_or_in_a_batch"),
    ],
)
def test_a_planted_live_fault_is_found(fault: type[LiveDetector], law: str) -> None:
    with torch.enable_grad(), pytest.raises(BrokenLaw, match=law):
        check_detector(fault)


class Platt(Calibrator):
    """A sound calibrator: one temperature from a grid."""

    name = "platt"
    preserves_argmax = True
    temperature: Float[Tensor, ""]

    def fit(self, logits: Tensor, labels: Tensor) -> "Platt":
        logits, labels = checked(logits, labels)
        grid = torch.linspace(0.5, 5, 46, dtype=logits.dtype, device=logits.device)
        losses = torch.stack([torch.nn.functional.cross_entropy(logits / t, labels) for t in grid])
        self.temperature = grid[losses.argmin()]
        return self

    def forward(self, logits: Tensor) -> Tensor:
        return (logits / self.temperature).softmax(dim=1)


class Unnormalised(Platt):
    def forward(self, logits: Tensor) -> Tensor:
        return super().forward(logits) * 0.9


class Flips(Platt):
    def forward(self, logits: Tensor) -> Tensor:
        return super().forward(-logits)


class Uniform(Platt):
    def forward(self, logits: Tensor) -> Tensor:
        return 0.99 * super().forward(logits) + 0.01 / logits.shape[1]


class HidesNaN(Platt):
    def forward(self, logits: Tensor) -> Tensor:
        return super().forward(logits.nan_to_num(nan=0.0, neginf=-torch.inf))


class TakesAnything(Platt):
    def fit(self, logits: Tensor, labels: Tensor) -> "TakesAnything":
        self.temperature = logits.new_tensor(3.0)
        return self


def test_a_sound_calibrator_passes() -> None:
    check_calibrator(Platt)
    check_calibrator(Identity, exempt={"helps_overconfident_logits": "it is the uncalibrated softmax"})


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        (Unnormalised, "rows_are_distributions"),
        (Flips, "the_most_likely_class_stays"),
        (Uniform, "the class that cannot be has probability 0.002"),
        (HidesNaN, "nan_is_not_hidden: a row with a NaN"),
        (TakesAnything, "data_without_an_answer_are_refused: fit accepts a NaN logit"),
    ],
)
def test_a_planted_calibrator_fault_is_found(fault: type[Calibrator], law: str) -> None:
    with pytest.raises(BrokenLaw, match=law):
        check_calibrator(fault)
