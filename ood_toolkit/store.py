"""The store on disk: one flat, memory-mapped file per column, filled shard by shard.

    <key>/store.json                what the store is of
    <key>/about.json                the same in words: name of the set, spec of the model
    <key>/lease                     locked by whoever uses the store; its time is that of the last use
    <key>/logits.bin …              (rows, …) numbers, row-major; a row that is not done yet is a hole in the file
    <key>/logits.json …             group, shape and dtype of that column
    <key>/notes/…json               what cannot be had of these rows, and why
    <key>/done/<group>-000007.json  shard 7 of a group of columns is whole: checksums, unreadable rows
    <key>/done/<group>.sealed       all shards are whole and on the disk; sizes and times of their files

A shard counts once its journal file is there, which is renamed into place after the numbers are written: a killed run
leaves whole shards and holes. Against a power cut, `seal` syncs a finished group; a group that is not sealed, or whose
files have changed since, is checked against its checksums before it is believed.

Processes and machines may fill one store at once: every small file is renamed into place whole, is written once, and
says the same whoever writes it. Of two that compute the same shard the first one counts. That needs no lock to be
right within the rounding of two machines; where the file system has locks, not one byte of the second is written.
"""

import hashlib
import json
import mmap
import os
import platform
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ood_toolkit.lease import Lease, locked

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
        about: the same in words, for people; no part of the identity.

    Raises:
        ValueError: the folder holds a store of something else, or of another version.
    """

    def __init__(
        self, path: Path, rows: int, identity: Mapping[str, object], about: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.lease = Lease(path)  # released when nobody holds this store any more
        self.rows = rows
        self._declared: dict[str, Description] = {}
        for folder in ("done", "notes"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        wanted = {"version": STORE_VERSION, "rows": rows, "identity": dict(identity)}
        header = path / "store.json"
        if not header.exists():
            replace_text(header, json.dumps({**wanted, "shard_rows": _shard_rows(rows)}, indent=1), durable=True)
        found = json.loads(header.read_text(encoding="utf-8"))
        for key, value in wanted.items():
            if found.get(key) != value:
                raise ValueError(f"store {path} has {key} {found.get(key)!r}, expected {value!r}; remove that folder")
        self.shard_rows: int = found["shard_rows"]
        self._tell(dict(about or {}))

    def _tell(self, about: dict[str, str]) -> None:
        file = self.path / "about.json"
        told = read_json(file)
        if about and {**told, **about} != told:
            with suppress(OSError):  # a cache that is only read says less
                replace_text(file, json.dumps({**told, **about}, indent=1))

    @classmethod
    def found(cls, path: Path) -> "Store":
        """The store that lies in a folder, as its header has it.

        Raises:
            ValueError: there is none, or one of another version.
        """
        header = read_json(path / "store.json")
        if not isinstance(header.get("rows"), int) or not isinstance(header.get("identity"), dict):
            raise ValueError(f"{path} holds no store")
        return cls(path, header["rows"], header["identity"])

    @classmethod
    def seen(cls, path: Path, rows: int) -> "Store":
        """What lies in a folder, looked at without a lease and without making it; only for questions about it."""
        store = cls.__new__(cls)
        store.path, store.rows, store._declared = path, rows, {}
        store.shard_rows = read_json(path / "store.json").get("shard_rows", _shard_rows(rows))
        return store

    @property
    def groups(self) -> list[str]:
        """The groups of columns that were begun."""
        return sorted({column["group"] for column in self.described().values()})

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
        if self.sealed(group):
            return set(range(len(self.shards)))
        return {int(file.stem.rpartition("-")[2]) for file in (self.path / "done").glob(f"{group}-*.json")}

    def described(self) -> dict[str, Description]:
        """Group, shape and dtype of every column."""
        files = sorted(file for file in self.path.glob("*.json") if file.name not in ("store.json", "about.json"))
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
        if self.sealed(group):
            journals: Iterable[dict] = [read_json(self._seal_file(group))]
        else:
            journals = map(read_json, sorted((self.path / "done").glob(f"{group}-*.json")))
        return {int(row): why for journal in journals for row, why in journal["unreadable"].items()}

    def write(self, group: str, shard: Shard, columns: Mapping[str, Tensor], unreadable: Mapping[int, str]) -> None:
        """Writes one whole shard: numbers, then journal. One that is whole already stays as it is."""
        self._declare(group, columns)
        journal_file = self._journal_file(group, shard)
        with locked(self.path / "writing", shard.number):
            if journal_file.exists():
                return  # another process was faster
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
            replace_text(journal_file, json.dumps(journal))

    def sealed(self, group: str) -> bool:
        """Whether every shard of `group` is whole and on the disk, and nobody has touched its files since."""
        seal = read_json(self._seal_file(group))
        try:
            return "files" in seal and all(_stamp(self.path / name) == stamp for name, stamp in seal["files"].items())
        except FileNotFoundError:
            return False

    def seal(self, group: str) -> None:
        """Syncs the columns of a finished group and remembers that. A group that lacks a shard stays unsealed."""
        if len(self.done(group)) < len(self.shards):
            return
        unreadable = self.unreadable(group)
        names = [f"{name}.bin" for name, column in self.described().items() if column["group"] == group]
        for name in names:
            with (self.path / name).open("rb") as file:
                os.fsync(file.fileno())
        seal = {"files": {name: _stamp(self.path / name) for name in names}, "unreadable": unreadable}
        replace_text(self._seal_file(group), json.dumps(seal), durable=True)

    def verify(self, group: str) -> list[int]:
        """Reads every finished shard; forgets those whose numbers are not what was written, and returns them.

        A run that needs the group then computes those shards again, and no other.
        """
        described = {name: column for name, column in self.described().items() if column["group"] == group}
        was_finished = self._seal_file(group).exists()
        torn = []
        for shard in self.shards:
            file = self._journal_file(group, shard)
            if not file.exists() and not was_finished:
                continue
            if not self._whole(read_json(file), shard, described):
                file.unlink(missing_ok=True)
                self._seal_file(group).unlink(missing_ok=True)
                torn.append(shard.number)
        return torn

    def _whole(self, journal: dict, shard: Shard, described: Mapping[str, Description]) -> bool:
        if journal.get("rows") != [shard.start, shard.stop]:  # another's, or emptied by a power cut
            return False
        nothing_readable = len(journal["unreadable"]) == len(shard.rows)
        return (nothing_readable or set(journal["crc32"]) == set(described)) and all(
            name in described and self._checksum(name, shard, described[name]) == crc
            for name, crc in journal["crc32"].items()
        )

    def _checksum(self, name: str, shard: Shard, column: Description) -> int:
        """Of the shard's bytes in a column's file; of fewer where the file is cut short."""
        width = torch.Size(column["shape"][1:]).numel() * _DTYPES[column["dtype"]].itemsize
        try:
            with (self.path / f"{name}.bin").open("rb") as file:
                file.seek(shard.start * width)
                return zlib.crc32(file.read(len(shard.rows) * width))
        except FileNotFoundError:
            return -1

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
            if not self._holds(name, size):  # truncating touches the file's time
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
        return _map(self.path / f"{name}.bin", size, dtype).view(shape)

    def _journal_file(self, group: str, shard: Shard) -> Path:
        return self.path / "done" / f"{group}-{shard.number:06d}.json"

    def _seal_file(self, group: str) -> Path:
        return self.path / "done" / f"{group}.sealed"


def read_json(file: Path) -> dict:
    """The object in a file; empty where the file is missing, or was cut off."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _shard_rows(rows: int) -> int:
    return SHARD_ROWS << max(0, -(-rows // (SHARD_ROWS * _MOST_SHARDS)) - 1).bit_length()


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


def _map(file: Path, size: int, dtype: torch.dtype) -> Tensor:
    try:
        return torch.from_file(str(file), shared=False, size=size, dtype=dtype)
    except RuntimeError as error:
        if "Cannot allocate memory" not in str(error):
            raise
    # Linux refuses a private mapping larger than memory, unless it is told that nobody will write into all of it
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
    with file.open("rb") as handle:
        mapping = mmap.mmap(handle.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapping, dtype=dtype, count=size)


def _stamp(file: Path) -> list[int]:
    """Size and time of a file; opening it makes a network file system ask."""
    with file.open("rb") as handle:
        status = os.fstat(handle.fileno())
    return [status.st_size, status.st_mtime_ns]
