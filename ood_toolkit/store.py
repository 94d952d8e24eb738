"""The store on disk: one flat, memory-mapped file per column, filled shard by shard.

    <key>/store.json            what the store is of, and its columns
    <key>/logits.bin …          (rows, …) numbers, row-major; a row that is not done yet is a hole in the file
    <key>/done/<group>-00007.json   shard 7 of a group of columns is whole: checksums, unreadable rows

A shard counts once its journal file is there, which is renamed into place after the numbers are written: a killed run
leaves whole shards and holes. Against a power cut, `seal` syncs a finished group and says so in the header; a group
that is not sealed is checked against its checksums before it is believed.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

STORE_VERSION = 2
SHARD_ROWS = 512

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


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
        self._header_file = path / "store.json"
        (path / "done").mkdir(parents=True, exist_ok=True)
        wanted = {"version": STORE_VERSION, "rows": rows, "shard_rows": SHARD_ROWS, "identity": dict(identity)}
        if self._header_file.exists():
            self._header = json.loads(self._header_file.read_text(encoding="utf-8"))
            for key, value in wanted.items():
                if self._header.get(key) != value:
                    raise ValueError(
                        f"store {path} has {key} {self._header.get(key)!r}, expected {value!r}; remove that folder"
                    )
        else:
            self._header = {**wanted, "columns": {}, "notes": {}, "sealed": []}
            self._write_header()

    def _write_header(self) -> None:
        replace_text(self._header_file, json.dumps(self._header, indent=1), durable=True)

    @property
    def shards(self) -> list[Shard]:
        """All shards, done or not."""
        starts = range(0, self.rows, SHARD_ROWS)
        return [Shard(i, start, min(start + SHARD_ROWS, self.rows)) for i, start in enumerate(starts)]

    @property
    def notes(self) -> dict[str, str]:
        """What is known not to be obtainable for these rows, with the reason."""
        return dict(self._header["notes"])

    def note(self, notes: Mapping[str, str]) -> None:
        """Remembers notes beside those there are."""
        if set(notes) - set(self._header["notes"]):
            self._header["notes"] |= notes
            self._write_header()

    def done(self, group: str) -> set[int]:
        """Numbers of the shards of `group` that are whole."""
        return {int(file.stem.rpartition("-")[2]) for file in (self.path / "done").glob(f"{group}-*.json")}

    def columns(self, group: str) -> dict[str, Tensor]:
        """The columns of `group` as memory-mapped tensors. Opening reads nothing."""
        described = {name: c for name, c in self._header["columns"].items() if c["group"] == group}
        return {name: self._map(name, tuple(c["shape"]), _DTYPES[c["dtype"]]) for name, c in described.items()}

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
            described = self._header["columns"][name]
            data = _bytes(values.detach().cpu().to(_DTYPES[described["dtype"]]))
            with (self.path / f"{name}.bin").open("r+b") as file:
                file.seek(shard.start * (len(data) // len(shard.rows)))
                file.write(data)
            sums[name] = zlib.crc32(data)
        journal = {"rows": [shard.start, shard.stop], "crc32": sums, "unreadable": dict(unreadable)}
        replace_text(self._journal_file(group, shard), json.dumps(journal))

    def sealed(self, group: str) -> bool:
        """Whether every shard of `group` is whole and on the disk."""
        return group in self._header["sealed"]

    def seal(self, group: str) -> None:
        """Syncs the columns of a finished group and remembers that."""
        for name in self.columns(group):
            with (self.path / f"{name}.bin").open("rb") as file:
                os.fsync(file.fileno())
        self._header["sealed"].append(group)
        self._write_header()

    def verify(self, group: str) -> list[int]:
        """Reads every finished shard; forgets those whose numbers are not what was written, and returns them."""
        columns = self.columns(group)
        torn = []
        for shard in self.shards:
            file = self._journal_file(group, shard)
            if not file.exists():
                continue
            journal = json.loads(file.read_text(encoding="utf-8"))
            nothing_readable = len(journal["unreadable"]) == len(shard.rows)
            whole = (nothing_readable or set(journal["crc32"]) == set(columns)) and all(
                zlib.crc32(_bytes(columns[name][shard.start : shard.stop])) == crc
                for name, crc in journal["crc32"].items()
            )
            if not whole:
                file.unlink()
                torn.append(shard.number)
        return torn

    def _declare(self, group: str, columns: Mapping[str, Tensor]) -> None:
        new = {
            name: {"group": group, "shape": [self.rows, *values.shape[1:]], "dtype": str(values.dtype).split(".")[-1]}
            for name, values in columns.items()
        }
        if all(self._header["columns"].get(name) == description for name, description in new.items()):
            return
        needed = sum(self.rows * values[:1].numel() * values.element_size() for values in columns.values())
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise ValueError(
                f"store {self.path} needs {needed / 1e9:.1f} GB, but the disk has {free / 1e9:.1f} GB free"
            )
        for name, values in columns.items():
            with (self.path / f"{name}.bin").open("ab") as file:
                file.truncate(self.rows * values[:1].numel() * values.element_size())
        self._header["columns"] |= new
        self._write_header()

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
    temporary = file.with_name(f"{file.name}.{os.getpid()}.partial")
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
