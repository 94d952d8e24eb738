"""Scores of a live detector are kept in the store under a key that changes with the code that computes them."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from ood_toolkit.detectors import LiveDetector, ODINDetector
from ood_toolkit.one_pass import live_key

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
