import sys
import types

import pytest

from ood_toolkit import registry
from ood_toolkit.detectors import Detector, EnergyDetector, MSPDetector
from ood_toolkit.outputs import Outputs


@pytest.mark.parametrize("name", list(registry.detector_classes()))
def test_every_detector_comes_back_from_its_spec(name: str):
    detector = registry.build_detector(name)
    assert detector.spec == name
    again = registry.build_detector(detector.spec)
    assert repr(again) == repr(detector)


@pytest.mark.parametrize("name", list(registry.calibrator_classes()))
def test_every_calibrator_comes_back_from_its_spec(name: str):
    calibrator = registry.build_calibrator(name)
    assert repr(registry.build_calibrator(calibrator.spec)) == repr(calibrator)


def test_arguments_arrive():
    detector = registry.build_detector("energy(temperature=2.5)")
    assert isinstance(detector, EnergyDetector)
    assert detector.temperature == 2.5
    assert registry.build_detector(detector.spec).hyperparameters == {"temperature": 2.5}


def test_a_hyphen_will_do_for_an_underscore():
    assert type(registry.build_detector("kl-matching")) is type(registry.build_detector("kl_matching"))


def test_a_misspelt_name_gets_the_nearest_one():
    with pytest.raises(ValueError, match=r"no detector is named 'enrgy'; did you mean 'energy'\? Known: "):
        registry.build_detector("enrgy")


def test_a_wrong_argument_names_the_right_ones():
    with pytest.raises(ValueError, match=r"energy\(temp=2\).*EnergyDetector takes temperature"):
        registry.build_detector("energy(temp=2)")


@pytest.mark.parametrize("spec", ["energy(", "energy(2)", "energy(temperature=open('x'))", "energy(temperature=)"])
def test_a_spec_holds_literals_only(spec: str):
    with pytest.raises(ValueError, match="cannot read"):
        registry.build_detector(spec)


def test_a_detector_of_ones_own_needs_no_registration(monkeypatch: pytest.MonkeyPatch):
    class Own(Detector):
        name = "own"

        def __init__(self, shift: float = 0.0) -> None:
            super().__init__()
            self.shift = shift

        def score(self, outputs: Outputs):
            return outputs.logits[:, 0] + self.shift

    module = types.ModuleType("a_module_of_ones_own")
    module.Own = Own  # pyright: ignore[reportAttributeAccessIssue]
    module.number = 3  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    built = registry.build_detector("a_module_of_ones_own:Own(shift=1.5)")
    assert isinstance(built, Own)
    assert built.shift == 1.5
    with pytest.raises(ValueError, match="not a subclass of Detector or LiveDetector"):
        registry.build_detector("a_module_of_ones_own:number")
    with pytest.raises(ValueError, match="cannot be imported"):
        registry.build_detector("a_module_of_ones_own:Nothing")
    with pytest.raises(ValueError, match="cannot be imported"):
        registry.build_detector("no_such_module_at_all:Own")


def test_lists_split_at_the_outer_commas_only():
    assert registry.split_specs("energy(temperature=2), react(score='a,b'),, msp") == [
        "energy(temperature=2)",
        "react(score='a,b')",
        "msp",
    ]
    assert registry.split_composition("temperature+energy(temperature=1e+2)") == [
        "temperature",
        "energy(temperature=1e+2)",
    ]


def test_bases_are_not_members():
    assert Detector not in registry.detector_classes().values()
    assert registry.detector_classes()["msp"] is MSPDetector


@pytest.mark.parametrize("spec", ["energy(temperature='a')", "energy(temperature=None)", "knn(k=2.5)", "knn(k=True)"])
def test_an_argument_of_another_kind_is_named(spec: str):
    with pytest.raises(ValueError, match=r"(temperature must be float|k must be int), got "):
        registry.build_detector(spec)


def test_a_parameter_that_is_a_pair_takes_a_pair():
    built = registry.build_calibrator("temperature(bounds=(0.5, 4.0), at_bound='accept')")
    assert repr(built) == "TemperatureCalibrator(bounds=(0.5, 4.0), at_bound='accept')"


def test_upper_case_still_finds_the_nearest_name():
    with pytest.raises(ValueError, match=r"did you mean 'msp'\?"):
        registry.build_detector("MSP")


def test_a_detector_of_ones_own_needs_a_name_that_nobody_has(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("names_of_ones_own")

    class Clash(EnergyDetector):
        name = "msp"

    class Nameless(EnergyDetector):
        pass

    module.Clash, module.Nameless = Clash, Nameless  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ValueError, match="calls itself 'msp', which is a registered detector"):
        registry.build_detector("names_of_ones_own:Clash")
    with pytest.raises(ValueError, match="has no `name` of its own"):
        registry.build_detector("names_of_ones_own:Nameless")
