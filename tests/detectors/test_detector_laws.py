"""Every registered detector keeps every law; the excuses are listed here with their reasons."""

import pytest

from ood_toolkit.detectors import Detector, LiveDetector
from ood_toolkit.registry import build_detector, detector_classes
from ood_toolkit.testing import DETECTOR_LAWS, LIVE_LAWS, check_detector

# detector → law → why the method itself cannot keep it
EXEMPT: dict[str, dict[str, str]] = {}

CASES = [
    pytest.param(kind, law, id=f"{name}-{law}")
    for name, kind in detector_classes().items()
    for law in (LIVE_LAWS if issubclass(kind, LiveDetector) else DETECTOR_LAWS)
]


@pytest.mark.parametrize(("kind", "law"), CASES)
def test_every_detector_keeps_the_law(kind: type[Detector] | type[LiveDetector], law: str) -> None:
    excuses = EXEMPT.get(kind.name, {})
    check_detector(kind, law=law, exempt={law: excuses[law]} if law in excuses else {})


@pytest.mark.parametrize("kind", detector_classes().values(), ids=lambda kind: kind.name)
def test_the_registry_builds_it_back_from_its_spec(kind: type[Detector] | type[LiveDetector]) -> None:
    assert repr(build_detector(kind().spec)) == repr(kind())


@pytest.mark.parametrize("kind", detector_classes().values(), ids=lambda kind: kind.name)
def test_it_states_its_facts(kind: type[Detector] | type[LiveDetector]) -> None:
    assert kind.paper
    assert kind.cite
    assert kind.cost
    assert kind.__doc__


def test_exemptions_name_known_detectors() -> None:
    assert set(EXEMPT) <= set(detector_classes())
