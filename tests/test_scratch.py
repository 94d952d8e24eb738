import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ood_toolkit import scratch
from ood_toolkit.registry import build_detector
from ood_toolkit.testing.synthetic import synthetic_outputs


@pytest.mark.parametrize("spec", ["knn(k=5)", "nnguide(k=5)", "relation", "grood"])
def test_rows_in_a_file_give_the_scores_of_rows_in_memory(spec: str, monkeypatch: pytest.MonkeyPatch):
    data = synthetic_outputs()
    expected = build_detector(spec).fit(data.train)(data.ood)
    monkeypatch.setattr(scratch, "_IN_MEMORY", 0)
    fitted = build_detector(spec).fit(data.train)
    assert torch.equal(fitted(data.ood), expected)
    again = build_detector(spec)
    again.load_state_dict(fitted.state_dict())
    assert torch.equal(again(data.ood), expected)


def test_many_rows_take_no_memory_of_their_own_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("memory is read from /proc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def anonymous() -> int:
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if "RssAnon" in line)

    before = anonymous()
    rows = scratch.room_for(70_000, 1024, like=torch.empty(0))
    rows.fill_(2.0)
    assert float(rows[69_999].sum()) == 2048
    assert anonymous() - before < 16 << 20
    assert not list(tmp_path.iterdir())


def test_rows_lie_in_memory_where_the_disk_is_full(monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(scratch, "_IN_MEMORY", 0)
    rows = scratch.room_for(3, 4, like=torch.empty(0, dtype=torch.float64))
    assert (rows.shape, rows.dtype) == ((3, 4), torch.float64)
