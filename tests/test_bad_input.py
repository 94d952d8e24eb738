"""What a newcomer gets wrong in Python is told what it is and what to write instead."""

from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ood_toolkit.calibrators import MeanProbabilityEnsemble, TemperatureCalibrator, VectorCalibrator
from ood_toolkit.detectors import Detector, EnergyDetector, KNNDetector, MahalanobisDetector, MCMDetector, ODINDetector
from ood_toolkit.models import Classifier
from ood_toolkit.outputs import Head, Outputs
from ood_toolkit.registry import build_detector
from ood_toolkit.testing import SyntheticClassifier, synthetic_images, synthetic_outputs
from ood_toolkit.testing.calibrators import overconfident_logits

DATA: Any = synthetic_outputs(fit_rows=120, rows=20)
LOGITS: Any
LABELS: Any
LOGITS, LABELS = overconfident_logits(300)
LAYER: Any = nn.Linear(3, 2)
NOTHING: Any = None


class Forgetful(Detector):
    name = "forgetful"
    needs = "train"
    means: Float[Tensor, "C D"]

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def fit(self, train: Outputs) -> "Forgetful":
        self.means = train.head.weight
        return self

    def score(self, outputs: Outputs) -> Tensor:
        return -outputs.logits.amax(dim=1)


class Hoarding(Detector):
    name = "hoarding"

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        self.exponent = power

    def score(self, outputs: Outputs) -> Tensor:
        return -outputs.logits.amax(dim=1)


def with_head(**changes: Any) -> Outputs:
    """Four rows of three features under a head of two classes, with some fields changed."""
    fields: dict[str, Any] = {
        "features": torch.ones(4, 3),
        "logits": torch.zeros(4, 2),
        "labels": torch.zeros(4, dtype=torch.int64),
        "head": Head(torch.zeros(2, 3), torch.zeros(2)),
    }
    return Outputs(**fields | changes)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: EnergyDetector()(DATA.id.logits),
            r"EnergyDetector takes Outputs, got a tensor \(20, 6\); .*from_logits",
        ),
        (lambda: KNNDetector().fit(DATA.train.features), r"KNNDetector\.fit takes Outputs, got a tensor"),
        (lambda: EnergyDetector().fit(NOTHING), r"EnergyDetector\.fit takes Outputs, got NoneType"),
        (lambda: EnergyDetector().score(DATA.id.logits.numpy()), r"EnergyDetector\.score takes Outputs, got ndarray"),
        (
            lambda: TemperatureCalibrator().fit(DATA.train, DATA.train.labels),
            r"\.fit takes logits, got Outputs; write .*outputs\.labels",
        ),
        (lambda: TemperatureCalibrator().fit(LOGITS, LABELS)(DATA.id), r"write calibrator\(outputs\.logits\)"),
        (lambda: TemperatureCalibrator().fit(LOGITS, LABELS)(LOGITS.numpy()), "must be a torch tensor, got ndarray"),
        (lambda: MeanProbabilityEnsemble()([LOGITS, LOGITS]), r"got list; torch\.stack"),
        (lambda: ODINDetector()(SyntheticClassifier().model, synthetic_images("id")[0]), r"write Classifier\(model\)"),
        (lambda: ODINDetector()(SyntheticClassifier(), DATA.id), r"takes images as a tensor \(N, 3, H, W\)"),
        (lambda: with_head(logits=[[0.0, 1.0]]), "logits must be a torch tensor, got list; torch.as_tensor"),
        (lambda: with_head(labels=[0, 1]), "labels must be a torch tensor, got list"),
        (lambda: with_head(head=LAYER), r"head must be Head\(weight, bias\), got Linear"),
        (lambda: Head(LAYER, torch.zeros(2)), r"got Linear; of a layer: Head\(layer\.weight, layer\.bias\)"),
        (lambda: Head(torch.zeros(2, 3), NOTHING), r"got NoneType; for a layer without one: torch\.zeros\(classes\)"),
        (lambda: Classifier(NOTHING), "Classifier takes a torch module, got None; load_classifier takes names"),
        (lambda: Classifier(LAYER)(LOGITS.numpy()), "images must be a torch tensor, got ndarray"),
        (lambda: build_detector(NOTHING), r"a spec is text such as 'knn\(k=50\)', got None"),
        (lambda: EnergyDetector().wrap(NOTHING), "takes a torch module, got None"),
        (lambda: EnergyDetector().wrap(LAYER, calibrator="temperature"), r"one such as TemperatureCalibrator\(\)"),
        (lambda: DATA.id.with_taps({"depth": [1.0]}), "tap 'depth' must be a torch tensor, got list"),
        (lambda: Outputs.from_logits(LOGITS.numpy()), "logits must be a torch tensor, got ndarray"),
    ],
)
def test_a_thing_of_another_kind_is_refused_by_what_it_is_and_what_to_write(act: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        act()


def narrower() -> Outputs:
    head = Head(DATA.id.head.weight[:, :20], DATA.id.head.bias)
    features = DATA.id.features[:, :20]
    return Outputs(logits=head(features), features=features, labels=DATA.id.labels, head=head)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: KNNDetector(k=3).fit(DATA.train)(narrower()), "fitted on outputs with 32 features, but these have 20"),
        (lambda: MahalanobisDetector().fit(DATA.train)(narrower()), "32 features, but these have 20; fit it"),
        (
            lambda: MCMDetector().fit(DATA.train)(DATA.id.select_classes(torch.arange(4))),
            "fitted on outputs with 6 classes, but these have 4; fit it on outputs of the same model and class mask",
        ),
        (
            lambda: VectorCalibrator().fit(LOGITS, LABELS)(LOGITS[:, :3]),
            r"VectorCalibrator\(prior='data'\) was fitted on logits of 5 classes, but these have 3; fit it",
        ),
        (lambda: TemperatureCalibrator().fit(LOGITS, LABELS)(LOGITS[0]), r"floating-point \(N, C\), got .* \(5,\)"),
        (
            lambda: Outputs.from_logits(LOGITS[0]),
            r"logits must be \(N, classes\), got \(5,\); one row is logits\[None\]",
        ),
        (lambda: DATA.id.select_classes(torch.tensor([0, 9])), r"mask must lie in \[0, 6\), but spans \[0, 9\]"),
        (lambda: Head(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2)), "must be floating-point, got torch.int64"),
        (lambda: Outputs.from_logits(torch.zeros(6, 4, dtype=torch.int64)), "logits must be floating-point, got torch"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_both_sizes(act: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


def test_logits_features_and_head_come_to_the_widest_dtype() -> None:
    for name in ("logits", "features", "head"):
        fields = {name: getattr(with_head(), name).to(torch.float64)}
        outputs = with_head(**fields)
        assert {outputs.logits.dtype, outputs.features.dtype, outputs.head.weight.dtype} == {torch.float64}
    assert Head(torch.zeros(2, 3), torch.zeros(2).double()).weight.dtype == torch.float64


def test_outputs_of_two_dtypes_are_concatenated_in_the_wider() -> None:
    both = Outputs.cat([DATA.id, DATA.ood.to(torch.float64)])
    assert {both.logits.dtype, both.features.dtype, both.head.weight.dtype} == {torch.float64}


def test_a_fitted_detector_moved_to_another_dtype_computes_in_it() -> None:
    detector = MahalanobisDetector().fit(DATA.train)
    double = MahalanobisDetector().fit(DATA.train.to(torch.float64))
    scores = double(DATA.id)
    torch.testing.assert_close(scores, detector(DATA.id), rtol=1e-4, atol=1e-4)
    loaded = MahalanobisDetector()
    loaded.load_state_dict(double.state_dict())
    assert torch.equal(loaded(DATA.id), scores)
    assert loaded.fitted_like.dtype == torch.float64
    assert loaded.float()(DATA.id.to(torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("use", [lambda d: d(DATA.id), lambda d: d.fit(DATA.train), lambda d: d.state_dict()])
def test_a_forgotten_super_init_is_named(use: Any) -> None:
    with pytest.raises(AttributeError, match=r"Forgetful\.__init__ has not called super\(\)\.__init__\(\)"):
        use(Forgetful())


def test_a_forgotten_super_init_is_wrong_input_on_the_command_line() -> None:
    with pytest.raises(ValueError, match=r"Forgetful\.__init__ has not called super\(\)"):
        build_detector(f"{__name__}:Forgetful")


def test_a_hyperparameter_kept_under_another_name_is_named() -> None:
    with pytest.raises(TypeError, match=r"Hoarding\.__init__ does not store its parameter 'power'; add self\.power"):
        _ = Hoarding().spec
