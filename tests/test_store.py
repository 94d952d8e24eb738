import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ood_toolkit import store as store_module
from ood_toolkit.store import SHARD_ROWS, Store, read_json

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


def test_a_seal_does_not_vouch_for_files_that_changed_since(tmp_path: Path):
    store, numbers = filled(tmp_path)
    store.seal("g")
    with (tmp_path / "x.bin").open("r+b") as file:
        file.seek((SHARD_ROWS + 1) * 3 * 4)
        file.write(b"\xff")
    again = Store(tmp_path, ROWS, {"weights": "w"})
    assert not again.sealed("g")
    assert again.verify("g") == [1]
    again.write("g", again.shards[1], {"x": numbers[SHARD_ROWS : 2 * SHARD_ROWS]}, {})
    again.seal("g")
    assert again.sealed("g")
    assert torch.equal(again.columns("g")["x"], numbers)


@pytest.mark.parametrize("left", [0, 3 * 4 * SHARD_ROWS, 3 * 4 * (SHARD_ROWS + 1)])
def test_a_file_that_was_cut_short_costs_the_shards_beyond_the_cut(tmp_path: Path, left: int):
    store, numbers = filled(tmp_path)
    store.seal("g")
    os.truncate(tmp_path / "x.bin", left)
    again = Store(tmp_path, ROWS, {"weights": "w"})
    torn = again.verify("g")
    assert torn == ([0, 1, 2] if left == 0 else [1, 2])
    for number in torn:
        shard = again.shards[number]
        again.write("g", shard, {"x": numbers[shard.start : shard.stop]}, {})
    assert torch.equal(again.columns("g")["x"], numbers)


def test_a_shard_of_another_store_is_foreign_here(tmp_path: Path):
    store, _ = filled(tmp_path / "one")
    filled(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "done" / "g-000000.json", tmp_path / "one" / "done" / "g-000002.json")
    assert store.verify("g") == [2]


def test_an_incomplete_group_is_not_sealed(tmp_path: Path):
    store, _ = filled(tmp_path)
    (tmp_path / "done" / "g-000001.json").unlink()
    store.seal("g")
    assert not store.sealed("g")
    assert store.done("g") == {0, 2}


def test_a_sealed_group_still_names_its_unreadable_rows(tmp_path: Path):
    store = Store(tmp_path, 4, {})
    store.write("g", store.shards[0], {"x": torch.zeros(4, 2)}, {2: "truncated"})
    store.seal("g")
    assert Store(tmp_path, 4, {}).unreadable("g") == {2: "truncated"}


def test_a_whole_shard_is_not_written_twice(tmp_path: Path):
    store, numbers = filled(tmp_path)
    store.write("g", store.shards[0], {"x": numbers[:SHARD_ROWS] + 1e-6}, {})
    assert store.verify("g") == []
    assert torch.equal(store.columns("g")["x"], numbers)


def test_what_a_store_is_about_may_change_without_making_it_another(tmp_path: Path):
    filled(tmp_path)
    Store(tmp_path, ROWS, {"weights": "w"}, {"images": "birds"})
    Store(tmp_path, ROWS, {"weights": "w"}, {"model": "timm:resnet50"})
    assert read_json(tmp_path / "about.json") == {"images": "birds", "model": "timm:resnet50"}
    assert Store.found(tmp_path).groups == ["g"]


def test_a_cache_that_is_only_read_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, numbers = filled(tmp_path)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(store_module, "replace_text", refuse)
    store = Store(tmp_path, ROWS, {"weights": "w"}, {"images": "birds"})
    assert torch.equal(store.columns("g")["x"], numbers)


FILL = """
import sys
from pathlib import Path
import torch
from ood_toolkit.store import Store
path, seed, rows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
store = Store(path, rows, {"weights": "w"})
for shard in store.shards:
    numbers = torch.arange(shard.start, shard.stop).view(-1, 1) % 97 + seed * torch.full((64,), 1000.0)
    store.write("g", shard, {"x": numbers}, {})
store.seal("g")
"""


def test_two_processes_that_fill_one_store_at_once_leave_whole_shards_of_the_one_or_the_other(tmp_path: Path):
    rows = 40 * SHARD_ROWS + 3
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FILL, str(tmp_path / "store"), str(seed), str(rows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(600) for process in processes] == [0, 0]
    for process in processes:
        process.communicate()
    store = Store(tmp_path / "store", rows, {"weights": "w"})
    assert store.sealed("g")
    assert store.verify("g") == []
    seeds = (store.columns("g")["x"] - torch.arange(rows).view(-1, 1) % 97) / 1000
    assert {float(seeds[shard.start, 0]) for shard in store.shards} <= {1.0, 2.0}
    for shard in store.shards:
        assert (seeds[shard.start : shard.stop] == seeds[shard.start, 0]).all()


def test_a_store_larger_than_memory_opens_and_gives_a_row_with_the_work_of_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 60, 0, 1 << 60))  # pyright: ignore
    width = 2048
    many = (memory + (1 << 30)) // (2 * width)
    calls = []
    for rows in (2 * SHARD_ROWS, many):
        path = tmp_path / str(rows)
        store = Store(path, rows, {})
        shard = store.shards[len(store.shards) // 2]
        numbers = torch.randn(len(shard.rows), width, generator=torch.Generator().manual_seed(0)).half()
        store.write("g", shard, {"x": numbers}, {})
        before = resident()
        with counted_calls() as count:
            row = Store(path, rows, {}).columns("g")["x"][shard.start + 7].clone()
        calls.append(len(count))
        assert torch.equal(row, numbers[7])
        assert resident() - before < memory // 10
    assert (tmp_path / str(many) / "x.bin").stat().st_size > memory
    assert calls[1] < 2 * calls[0]


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Every call of a function, Python's or C's, while this lasts."""
    calls: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def resident() -> int:
    """Bytes of this process that lie in memory, a mapped file's among them; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS")), 0)


def test_a_store_with_shards_of_another_length_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, numbers = filled(tmp_path)
    monkeypatch.setattr(store_module, "SHARD_ROWS", 64)
    again = Store(tmp_path, ROWS, {"weights": "w"})
    assert len(again.shards) == 3
    assert again.verify("g") == []
    assert torch.equal(again.columns("g")["x"], numbers)
