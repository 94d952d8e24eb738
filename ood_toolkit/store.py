"""The store on disk: one flat, memory-mapped file per column, filled shard by shard.

    <key>/store.json                what the store is of
    <key>/logits.bin …              (rows, …) numbers, row-major; a row that is not done yet is a hole in the file
    <key>/logits.json …             group, shape and dtype of that column
    <key>/notes/…json               what cannot be had of these rows, and why
    <key>/done/<group>-000007.json  shard 7 of a group of columns is whole: checksums, unreadable rows
    <key>/done/<group>.sealed       all shards are whole and on the disk

A shard counts once its journal file is there, which is renamed into place after the numbers are written: a killed run
leaves whole shards and holes. Against a power cut, `seal` syncs a finished group; a group that is not sealed is
checked against its checksums before it is believed.

Processes and machines may fill one store at once without locks: every small file is renamed into place whole, is
written once, and says the same whoever writes it; two that compute the same shard write the same bytes.
"""

import hashlib
import json
import os
import platform
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STORE_VERSION = 3
SHARD_ROWS = 512
_MOST_SHARDS = 1 << 15
"""More rows get longer shards instead: a folder of a million journals is slow everywhere."""

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


Description = Mapping[str, Any]
"""`group`, `shape` and `dtype` of a column."""


@dataclass(frozen=True)
class Shard:
    """A range of rows, `start` to `stop`."""

    number: int
    start: int
    stop: int

    @property
    def rows(self) -> range:
        """The row numbers."""
        return range(self.start, self.stop)


class Store:
    """Columns of numbers over the rows of one image set, on disk.

    Args:
        path: the store's own folder; made if missing.
        rows: N.
        identity: what the columns are of; a store that says otherwise is refused.

    Raises:
        ValueError: the folder holds a store of something else, or of another version.
    """

    def __init__(self, path: Path, rows: int, identity: Mapping[str, object]) -> None:
        self.path = path
        self.rows = rows
        self.shard_rows = SHARD_ROWS << max(0, -(-rows // (SHARD_ROWS * _MOST_SHARDS)) - 1).bit_length()
        self._declared: dict[str, Description] = {}
        for folder in ("done", "notes"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        wanted = {"version": STORE_VERSION, "rows": rows, "shard_rows": self.shard_rows, "identity": dict(identity)}
        header = path / "store.json"
        if not header.exists():
            replace_text(header, json.dumps(wanted, indent=1), durable=True)
        found = json.loads(header.read_text(encoding="utf-8"))
        for key, value in wanted.items():
            if found.get(key) != value:
                raise ValueError(f"store {path} has {key} {found.get(key)!r}, expected {value!r}; remove that folder")

    @property
    def shards(self) -> list[Shard]:
        """All shards, done or not."""
        starts = range(0, self.rows, self.shard_rows)
        return [Shard(i, start, min(start + self.shard_rows, self.rows)) for i, start in enumerate(starts)]

    @property
    def notes(self) -> dict[str, str]:
        """What is known not to be obtainable for these rows, with the reason."""
        files = sorted((self.path / "notes").glob("*.json"))
        return dict(json.loads(file.read_text(encoding="utf-8")) for file in files)

    def note(self, notes: Mapping[str, str]) -> None:
        """Remembers notes beside those there are."""
        for subject, why in notes.items():
            file = self.path / "notes" / f"{hashlib.sha256(subject.encode()).hexdigest()[:16]}.json"
            if not file.exists():
                replace_text(file, json.dumps([subject, why]), durable=True)

    def done(self, group: str) -> set[int]:
        """Numbers of the shards of `group` that are whole."""
        return {int(file.stem.rpartition("-")[2]) for file in (self.path / "done").glob(f"{group}-*.json")}

    def described(self) -> dict[str, Description]:
        """Group, shape and dtype of every column."""
        files = sorted(file for file in self.path.glob("*.json") if file.name != "store.json")
        return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}

    def columns(self, group: str, described: Mapping[str, Description] | None = None) -> dict[str, Tensor]:
        """The columns of `group` as memory-mapped tensors. Opening reads nothing.

        Args:
            group: of columns.
            described: what `described()` says, if it is known already.
        """
        return {
            name: self._map(name, tuple(column["shape"]), _DTYPES[column["dtype"]])
            for name, column in (self.described() if described is None else described).items()
            if column["group"] == group
        }

    def unreadable(self, group: str) -> dict[int, str]:
        """Rows whose image could not be read, with the reason."""
        found: dict[int, str] = {}
        for journal in self._journals(group):
            found |= {int(row): why for row, why in journal["unreadable"].items()}
        return found

    def write(self, group: str, shard: Shard, columns: Mapping[str, Tensor], unreadable: Mapping[int, str]) -> None:
        """Writes one whole shard: numbers, then journal."""
        self._declare(group, columns)
        sums = {}
        for name, values in columns.items():
            data = _bytes(values.detach().cpu())
            # for writing alone: opened for reading too, a network file system may write whole pages, and so over
            # the neighbouring shard of another machine
            with os.fdopen(os.open(self.path / f"{name}.bin", os.O_WRONLY), "wb") as file:
                file.seek(shard.start * (len(data) // len(shard.rows)))
                file.write(data)
            sums[name] = zlib.crc32(data)
        journal = {"rows": [shard.start, shard.stop], "crc32": sums, "unreadable": dict(unreadable)}
        replace_text(self._journal_file(group, shard), json.dumps(journal))

    def sealed(self, group: str) -> bool:
        """Whether every shard of `group` is whole and on the disk."""
        return (self.path / "done" / f"{group}.sealed").exists()

    def seal(self, group: str) -> None:
        """Syncs the columns of a finished group and remembers that."""
        for name in self.columns(group):
            with (self.path / f"{name}.bin").open("rb") as file:
                os.fsync(file.fileno())
        replace_text(self.path / "done" / f"{group}.sealed", "", durable=True)

    def verify(self, group: str) -> list[int]:
        """Reads every finished shard; forgets those whose numbers are not what was written, and returns them."""
        columns = self.columns(group)
        torn = []
        for shard in self.shards:
            file = self._journal_file(group, shard)
            if not file.exists():
                continue
            if not self._whole(file.read_text(encoding="utf-8"), shard, columns):
                file.unlink()
                torn.append(shard.number)
        return torn

    def _whole(self, text: str, shard: Shard, columns: Mapping[str, Tensor]) -> bool:
        try:
            journal = json.loads(text)
        except json.JSONDecodeError:  # the power went before the journal reached the disk
            return False
        nothing_readable = len(journal["unreadable"]) == len(shard.rows)
        return (nothing_readable or set(journal["crc32"]) == set(columns)) and all(
            name in columns and zlib.crc32(_bytes(columns[name][shard.start : shard.stop])) == crc
            for name, crc in journal["crc32"].items()
        )

    def _declare(self, group: str, columns: Mapping[str, Tensor]) -> None:
        new = {
            name: {"group": group, "shape": [self.rows, *values.shape[1:]], "dtype": str(values.dtype).split(".")[-1]}
            for name, values in columns.items()
        }
        if all(self._declared.get(name) == description for name, description in new.items()):
            return
        sizes = {name: self.rows * values[:1].numel() * values.element_size() for name, values in columns.items()}
        needed = sum(size for name, size in sizes.items() if not self._holds(name, size))
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise ValueError(
                f"store {self.path} needs {needed / 1e9:.1f} GB, but the disk has {free / 1e9:.1f} GB free"
            )
        for name, size in sizes.items():
            with (self.path / f"{name}.bin").open("ab") as file:
                file.truncate(size)
            replace_text(self.path / f"{name}.json", json.dumps(new[name]), durable=True)
        self._declared |= new

    def _holds(self, name: str, size: int) -> bool:
        file = self.path / f"{name}.bin"
        return file.exists() and file.stat().st_size == size

    def _map(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel()
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.from_file(str(self.path / f"{name}.bin"), shared=False, size=size, dtype=dtype).view(shape)

    def _journal_file(self, group: str, shard: Shard) -> Path:
        return self.path / "done" / f"{group}-{shard.number:06d}.json"

    def _journals(self, group: str) -> Iterator[dict]:
        for file in sorted((self.path / "done").glob(f"{group}-*.json")):
            yield json.loads(file.read_text(encoding="utf-8"))


def replace_text(file: Path, text: str, *, durable: bool = False) -> None:
    """Writes a text file so that readers see the old one or the new one, never a part.

    Args:
        file: the file.
        text: its new contents.
        durable: also survive a power cut, at the price of waiting for the disk.
    """
    temporary = file.with_name(f"{file.name}.{platform.node()}-{os.getpid()}.partial")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        if durable:
            os.fsync(handle.fileno())
    temporary.replace(file)


def _bytes(tensor: Tensor) -> bytes:
    # numpy has no bfloat16: its bits travel as int16
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().tobytes()
