import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ood_toolkit.store import SHARD_ROWS, Store

ROWS = 2 * SHARD_ROWS + 5


def filled(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Store, Tensor]:
    store = Store(path, ROWS, {"weights": "w"})
    numbers = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    for shard in store.shards:
        store.write("g", shard, {"x": numbers[shard.start : shard.stop]}, {})
    return store, numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_numbers_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype):
    _, numbers = filled(tmp_path, dtype)
    again = Store(tmp_path, ROWS, {"weights": "w"}).columns("g")["x"]
    assert again.dtype == dtype
    assert torch.equal(again, numbers)


def test_shards_cover_every_row_once(tmp_path: Path):
    shards = Store(tmp_path, ROWS, {}).shards
    assert [row for shard in shards for row in shard.rows] == list(range(ROWS))


def test_a_shard_counts_only_when_its_journal_is_there(tmp_path: Path):
    store, _ = filled(tmp_path)
    assert store.done("g") == {0, 1, 2}
    (tmp_path / "done" / "g-000001.json").unlink()
    assert store.done("g") == {0, 2}
    assert store.done("other") == set()


def test_a_torn_shard_is_found_and_forgotten_alone(tmp_path: Path):
    store, numbers = filled(tmp_path)
    with (tmp_path / "x.bin").open("r+b") as file:
        file.seek((SHARD_ROWS + 1) * 3 * 4)
        file.write(b"\xff")
    assert store.verify("g") == [1]
    assert store.done("g") == {0, 2}
    store.write("g", store.shards[1], {"x": numbers[SHARD_ROWS : 2 * SHARD_ROWS]}, {})
    assert store.verify("g") == []
    assert torch.equal(store.columns("g")["x"], numbers)


def test_a_store_of_something_else_is_refused(tmp_path: Path):
    filled(tmp_path)
    with pytest.raises(ValueError, match=r"identity .*'w'.*expected.*'other'"):
        Store(tmp_path, ROWS, {"weights": "other"})
    with pytest.raises(ValueError, match=f"has rows {ROWS}, expected 3"):
        Store(tmp_path, 3, {"weights": "w"})


def test_a_store_of_another_version_is_refused(tmp_path: Path):
    filled(tmp_path)
    header = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**header, "version": 0}))
    with pytest.raises(ValueError, match="has version 0"):
        Store(tmp_path, ROWS, {"weights": "w"})


def test_unreadable_rows_are_remembered_with_their_reason(tmp_path: Path):
    store = Store(tmp_path, 4, {})
    store.write("g", store.shards[0], {"x": torch.zeros(4, 2)}, {2: "truncated"})
    assert store.unreadable("g") == {2: "truncated"}
    assert store.verify("g") == []


def test_more_than_the_disk_holds_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # pyright: ignore
    store = Store(tmp_path, ROWS, {})
    with pytest.raises(ValueError, match=r"needs .* GB, but the disk has 0.0 GB free"):
        store.write("g", store.shards[0], {"x": torch.zeros(SHARD_ROWS, 3)}, {})
    assert store.done("g") == set()


def test_a_sealed_group_is_remembered(tmp_path: Path):
    store, _ = filled(tmp_path)
    assert not store.sealed("g")
    store.seal("g")
    assert Store(tmp_path, ROWS, {"weights": "w"}).sealed("g")
    assert not store.sealed("other")


def test_a_journal_that_the_power_cut_emptied_costs_its_shard_alone(tmp_path: Path):
    store, _ = filled(tmp_path)
    (tmp_path / "done" / "g-000002.json").write_text("")
    assert store.verify("g") == [2]
    assert store.done("g") == {0, 1}


def test_two_that_fill_one_store_at_once_lose_nothing_of_each_other(tmp_path: Path):
    # both open it empty, each declares another group first, and they share the shards of both
    one, other = Store(tmp_path, ROWS, {}), Store(tmp_path, ROWS, {})
    x, y = torch.randn(ROWS, 3), torch.randn(ROWS)
    plan = [(one, "x", x, 0), (other, "y", y, 0), (other, "x", x, 1), (one, "y", y, 1), (one, "x", x, 2)]
    for store, name, numbers, shard in [*plan, (other, "y", y, 2)]:
        rows = store.shards[shard]
        store.write(name, rows, {name: numbers[rows.start : rows.stop]}, {})
        store.note({f"tap of {name}": "none"})
    third = Store(tmp_path, ROWS, {})
    assert third.verify("x") == third.verify("y") == []
    assert torch.equal(third.columns("x")["x"], x)
    assert torch.equal(third.columns("y")["y"], y)
    assert third.notes == {"tap of x": "none", "tap of y": "none"}


def test_a_store_of_a_billion_rows_has_a_bounded_number_of_shards(tmp_path: Path):
    shards = Store(tmp_path, 10**9, {}).shards
    assert len(shards) <= 1 << 15
    assert (shards[0].start, shards[-1].stop) == (0, 10**9)
    assert all(one.stop == two.start for one, two in pairwise(shards))
