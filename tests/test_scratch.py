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


def test_many_rows_lie_in_a_file_that_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("what lies in a file is read from /proc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_IN_MEMORY", 1 << 20)

    def places(rows: torch.Tensor) -> list[str]:
        """The lines about the memory where the first and the last number lie."""
        lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
        spans = [([int(end, 16) for end in line[0].split("-")], line[-1]) for line in lines]
        ends = (rows.data_ptr(), rows.data_ptr() + rows.nbytes - 1)
        return [name for end in ends for (start, stop), name in spans if start <= end < stop]

    rows = scratch.room_for(1_000, 1024, like=torch.empty(0))
    rows.fill_(2.0)
    assert float(rows[999].sum()) == 2048
    assert ["/ood-rows-" in name for name in places(rows)] == [True, True]
    assert not list(tmp_path.iterdir())
    few = scratch.room_for(100, 1024, like=torch.empty(0))
    assert not any("/ood-rows-" in name for name in places(few))


def test_rows_lie_in_memory_where_the_disk_is_full(monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(scratch, "_IN_MEMORY", 0)
    rows = scratch.room_for(3, 4, like=torch.empty(0, dtype=torch.float64))
    assert (rows.shape, rows.dtype) == ((3, 4), torch.float64)
    rows.copy_(torch.arange(12.0).view(3, 4))
    assert torch.equal(rows, torch.arange(12.0, dtype=torch.float64).view(3, 4))
