"""A bad hyper-parameter is refused where it is given, by its name."""

import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from ood_toolkit.calibrators import Calibrator, EnsemblePool
from ood_toolkit.detectors import Detector, GENDetector, KNNDetector, LiveDetector
from ood_toolkit.fitted import Fitted
from ood_toolkit.hyperparameters import require_allowed
from ood_toolkit.registry import build_detector, calibrator_classes, detector_classes, ensemble_classes
from ood_toolkit.testing import SYNTHETIC_TAPS, SyntheticClassifier, synthetic_images, synthetic_outputs
from ood_toolkit.testing.calibrators import overconfident_logits

METHODS: dict[str, type[Fitted]] = {**detector_classes(), **calibrator_classes(), **ensemble_classes()}


def parameters(kind: type[Fitted]) -> Iterator[tuple[str, inspect.Parameter]]:
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name != "self":
            yield name, parameter


def is_number(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (int, float, int | None, float | None)


PLAIN = [
    pytest.param(kind, name, id=f"{kind.name}-{name}")
    for kind in METHODS.values()
    for name, parameter in parameters(kind)
    if is_number(parameter) or parameter.annotation in (str, bool)
]
NUMBERS = [
    pytest.param(kind, name, id=f"{kind.name}-{name}")
    for kind in METHODS.values()
    for name, parameter in parameters(kind)
    if is_number(parameter)
]


@pytest.mark.parametrize(("kind", "name"), PLAIN)
def test_a_value_of_another_kind_is_refused_at_construction_by_name(kind: Any, name: str) -> None:
    wrong = 7.5 if inspect.signature(kind.__init__).parameters[name].annotation in (str, bool) else "seven"
    with pytest.raises(TypeError, match=rf"{kind.__name__}: {name} must be .*got"):
        kind(**{name: wrong})


@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_nan_is_refused_at_construction_by_name(kind: Any, name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        kind(**{name: math.nan})


def accepted(kind: Any, name: str) -> Iterator[Fitted]:
    for value in (0, -1, -0.5, 0.5, math.inf):
        try:
            yield kind(**{name: value})
        except (TypeError, ValueError) as error:
            if name not in str(error):
                pytest.fail(f"{value}: {error} does not name {name}")


def used(method: Any) -> Tensor:
    if isinstance(method, Detector):
        makers = {tap: SYNTHETIC_TAPS[tap.partition("(")[0]] for tap in method.taps}
        data = synthetic_outputs(method.taps, makers=makers, fit_rows=120, rows=20)
        return method.fit(data.train)(data.id)
    if isinstance(method, LiveDetector):
        classifier = SyntheticClassifier()
        images, labels = synthetic_images("train")
        return method.fit(replace(classifier(images), labels=labels))(classifier, synthetic_images("id", rows=8)[0])
    logits, labels = overconfident_logits(300)
    if isinstance(method, EnsemblePool):
        members = torch.stack([logits, 1.1 * logits])
        return method.fit(members, labels)(members).exp()
    assert isinstance(method, Calibrator)
    return method.fit(logits, labels)(logits)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_a_number_that_is_accepted_gives_finite_scores_or_a_reason_with_its_name(kind: Any, name: str) -> None:
    for method in accepted(kind, name):
        try:
            scores = used(method)
        except ValueError as error:
            if name not in str(error):
                pytest.fail(f"{method!r}: {error} does not name {name}")
            continue
        assert scores.isfinite().all(), f"{method!r} gives {scores[~scores.isfinite()][:3].tolist()}"


class Choosy(Detector):
    name = "choosy"
    allowed = {"power": "(0, 2]", "mode": ("a", "b")}

    def __init__(self, power: float = 1.0, mode: str = "a", norm: Literal[1, 2] = 1) -> None:
        super().__init__()
        self.power = power
        self.mode = mode
        self.norm = norm

    def score(self, outputs: Any) -> Tensor:
        return outputs.logits.amax(dim=1) * self.power


class Choosier(Choosy):
    name = "choosier"
    allowed = {"power": "[1, inf)"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Choosy(power=0), r"Choosy: power must lie in \(0, 2\], got 0"),
        (lambda: Choosy(3), r"Choosy: power must lie in \(0, 2\], got 3"),
        (lambda: Choosy(mode="c"), r"Choosy: mode must be 'a' or 'b', got 'c'"),
        (lambda: Choosy(norm=3), r"Choosy: norm must be 1 or 2, got 3"),  # pyright: ignore[reportArgumentType]
        (lambda: Choosier(power=0.5), r"Choosier: power must be at least 1 and finite, got 0.5"),
        (lambda: Choosier(mode="c"), r"Choosier: mode must be 'a' or 'b'"),
        (lambda: KNNDetector(k=0), r"KNNDetector: k must be at least 1 and finite, got 0"),
        (lambda: build_detector("knn(k=0)"), r"^knn\(k=0\): k must be at least 1"),
        (lambda: build_detector("knn(k=2.5)"), r"^knn\(k=2.5\): k must be int, got 2.5"),
        (lambda: build_detector("knn(n=2)"), r"^knn\(n=2\): there is no 'n'; KNNDetector takes k, normalise"),
        (lambda: GENDetector(gamma=-1.0), "gamma must be above 0 and finite, got -1.0"),
    ],
)
def test_the_message_says_which_parameter_what_is_allowed_and_what_came(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_of_numpy_and_torch_become_plain_ones() -> None:
    for seven in (np.int64(7), torch.tensor(7)):
        detector = KNNDetector(k=seven)  # pyright: ignore[reportArgumentType]
        assert (detector.spec, type(detector.k)) == ("knn(k=7)", int)
    assert Choosy(power=np.float32(0.5)).spec == "choosy(power=0.5)"  # pyright: ignore[reportArgumentType]


def test_every_number_of_a_tuple_is_looked_at() -> None:
    with pytest.raises(ValueError, match=r"weights must lie in \[0, 1\], got \(0.5, 2\)"):
        require_allowed("weights", (0.5, 2), "[0, 1]")


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_what_is_allowed_names_parameters_and_allows_the_defaults(kind: type[Fitted]) -> None:
    known = dict(parameters(kind))
    assert set(vars(kind).get("allowed", {})) <= set(known)
    for name, parameter in known.items():
        require_allowed(name, parameter.default, kind.allowed.get(name))


def test_a_list_becomes_a_tuple_and_a_single_word_for_it_is_refused() -> None:
    assert build_detector("gram(layers=['a', 'b'])").spec == "gram(layers=('a', 'b'))"
    with pytest.raises(TypeError, match="GramDetector: layers must be a tuple or None, got 'a'"):
        METHODS["gram"](layers="a")  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="bounds must be a tuple of 2, got \\(1,\\)"):
        METHODS["temperature"](bounds=(1,))  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"every one of .*bounds must be float, got 'a'"):
        METHODS["temperature"](bounds=("a", "b"))  # pyright: ignore[reportCallIssue]
