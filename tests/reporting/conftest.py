from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import build_folder, build_run

from ood_toolkit.records import Record

MakeRun = Callable[..., list[Record]]


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    """Builds the records of one run: six detectors on two tasks, three calibrators; mahalanobis lacks anomaly rows."""
    return build_run


MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Writes a run folder with per-image scores, whose records are what scikit-learn computes from them."""

    def make(name: str = "run", **settings: Any) -> Path:
        return build_folder(tmp_path / name, **settings)

    return make
