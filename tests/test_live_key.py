"""Live scores and taps are kept in the store under keys that change with the code that computes them."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from ood_toolkit.detectors import LiveDetector, ODINDetector
from ood_toolkit.models import Classifier
from ood_toolkit.models.reductions import Reduction
from ood_toolkit.one_pass import live_key, tap_key

MINE = """
import my_live_helpers
from ood_toolkit.detectors import LiveDetector

LIMIT = 3.0

class Mine(LiveDetector):
    name = "mine"
    sign = 1.0

    def score(self, classifier, images):
        return self.sign * my_live_helpers.size(classifier(images).logits.clamp(max=LIMIT))
"""
HELPERS = """
import torch

def size(logits, unused=object()):
    return logits.amax(dim=1)
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def detector(mine: str = MINE, helpers: str = HELPERS) -> LiveDetector:
        for name, source in (("my_live_helpers", helpers), ("my_live", mine)):
            module = ModuleType(name)
            sys.modules[name] = module
            exec(compile(source, f"{name}.py", "exec"), vars(module))
        return vars(sys.modules["my_live"])["Mine"]()

    yield detector
    for name in ("my_live", "my_live_helpers"):
        sys.modules.pop(name, None)


def test_the_same_code_has_the_same_key(imported):
    assert live_key(imported()) == live_key(imported())
    assert live_key(ODINDetector()) == live_key(ODINDetector())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return self.sign *", "return -self.sign *"),
        ("sign = 1.0", "sign = -1.0"),
        ("LIMIT = 3.0", "LIMIT = 2.0"),
        ("clamp(max=", "clamp(min="),
        (".amax(dim=1)", ".mean(dim=1)"),
    ],
)
def test_a_change_of_the_code_a_constant_or_a_helper_changes_the_key(imported, old: str, new: str):
    assert old in MINE + HELPERS
    before = live_key(imported())
    assert live_key(imported(MINE.replace(old, new), HELPERS.replace(old, new))) != before


class Peaks(Reduction):
    name = "peaks"

    def reduce(self, layer: Tensor) -> Tensor:
        return layer.flatten(2).amax(dim=2)


class Troughs(Peaks):
    def reduce(self, layer: Tensor) -> Tensor:
        return layer.flatten(2).amin(dim=2)


def network(kind: type[Reduction]) -> Classifier:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    net.own_taps = {"peaks": kind}  # pyright: ignore[reportArgumentType]
    return Classifier(net, taps=("peaks", "stage_means"))


def test_a_tap_whose_code_changes_has_another_key_than_before():
    assert tap_key("peaks", network(Peaks)) == tap_key("peaks", network(Peaks))
    assert tap_key("peaks", network(Peaks)) != tap_key("peaks", network(Troughs))
    assert tap_key("stage_means", network(Peaks)) == tap_key("stage_means", network(Troughs))
