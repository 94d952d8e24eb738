"""All stores under one folder: what they hold, which are sound, and removing some."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ood_toolkit.lease import exclusive
from ood_toolkit.store import STORE_VERSION, Store, read_json

TEXTS = "texts"
"""The folder of text embeddings, beside the stores."""

_KEY = re.compile(r"[0-9a-f]{24}")
_OURS = re.compile(r"(store|about)\.json|lease|writing|[a-z_0-9]+\.(bin|json)|.*\.partial")
_OURS_WITHIN = {
    "done": re.compile(r"[a-z_0-9]+-\d+\.json|[a-z_0-9]+\.sealed|.*\.partial"),
    "notes": re.compile(r"[0-9a-f]+\.json|.*\.partial"),
}
_TEXT = re.compile(r"text-[0-9a-f]{24}\.safetensors")


@dataclass(frozen=True)
class Entry:
    """One store, or the folder of text embeddings.

    Args:
        path: its folder.
        images: name of the image set; the start of its fingerprint where no run has said the name.
        rows: images.
        model: spec of the model; the start of the weights' fingerprint where no run has said it.
        identity: all that decides what the store holds.
        groups: shards that are whole, and shards in all, by group of columns.
        sizes: bytes on disk by group; "" is what belongs to none.
        used: seconds since 1970 of the last use.
        outdated: of an older layout, which nothing reads any more.
    """

    path: Path
    images: str
    rows: int
    model: str
    identity: Mapping[str, str]
    groups: Mapping[str, tuple[int, int]]
    sizes: Mapping[str, int]
    used: float
    outdated: bool = False

    @property
    def size(self) -> int:
        """Bytes on disk; holes of a file that is not full yet do not count."""
        return sum(self.sizes.values())

    @property
    def complete(self) -> bool:
        """Whether every group that was begun is whole."""
        return bool(self.groups) and all(done == shards for done, shards in self.groups.values())


@dataclass(frozen=True)
class Fault:
    """Something that is not as it was written.

    Args:
        entry: where.
        group: of columns, or the name of a text file.
        shards: numbers of the shards; the next run that needs them computes them again, and no others.
    """

    entry: Entry
    group: str
    shards: Sequence[int]


def entries(cache: Path) -> list[Entry]:
    """Every store in the folder and the text embeddings. Links and folders of other kinds are left out."""
    if not cache.is_dir():
        return []
    found = [_store(path) for path in sorted(cache.iterdir()) if _is_store(path)]
    return [*found, *_texts(cache / TEXTS)]


def verify(entry: Entry) -> list[Fault]:
    """Reads all of a store, and forgets the shards that are not what was written; the last use stays what it was."""
    if entry.path.name == TEXTS:
        return _verify_texts(entry)
    if entry.outdated:
        return []
    store = Store.found(entry.path)
    try:
        torn = {group: store.verify(group) for group in store.groups}
    finally:
        store.lease.touch(entry.used)
    return [Fault(entry, group, shards) for group, shards in torn.items() if shards]


def chosen(
    everything: Sequence[Entry],
    *,
    older_than: float | None = None,
    keys: Sequence[str] = (),
    incomplete: bool = False,
    max_size: int | None = None,
) -> list[Entry]:
    """The entries that meet all conditions, longest unused first.

    Args:
        everything: all entries of a cache.
        older_than: seconds since the last use.
        keys: beginnings of store keys.
        incomplete: only stores that lack shards, or of a layout that nothing reads any more.
        max_size: bytes that the cache may keep: no more is chosen than brings it there.
    """
    found = sorted(everything, key=lambda entry: entry.used)
    if older_than is not None:
        found = [entry for entry in found if time.time() - entry.used > older_than]
    if keys:
        found = [entry for entry in found if entry.path.name.startswith(tuple(keys))]
    if incomplete:
        found = [entry for entry in found if entry.outdated or not entry.complete]
    if max_size is not None:
        surplus = sum(entry.size for entry in everything) - max_size
        found = list(_first_bytes(found, surplus))
    return found


def remove(entry: Entry) -> str:
    """Removes a store, or the text embeddings. Returns "", or why it stays.

    A store stays where a process uses it: it holds a lock on the store's lease. Where the file system has no locks,
    a store counts as used for a day after it was opened. One with a foreign file or a link in it stays whole.
    """
    if entry.path.name == TEXTS:
        for file in _text_files(entry.path):
            file.unlink(missing_ok=True)
        return ""
    if not _is_store(entry.path):
        return "is no store"
    foreign = [path for path in _contents(entry.path) if not _ours(path, entry.path)]
    if foreign:
        return f"holds {foreign[0].relative_to(entry.path)}, which is not the store's"
    with exclusive(entry.path) as alone:
        if not alone:
            return "is in use"
        # out of the way at once: whoever opens the key from here on begins a new store
        doomed = entry.path.rename(entry.path.with_name(f".removed-{entry.path.name}-{time.time_ns()}"))
        for path in sorted(_contents(doomed), reverse=True):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        doomed.rmdir()
    return ""


def _is_store(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir() or not _KEY.fullmatch(path.name):
        return False
    header = path / "store.json"
    found = read_json(header)
    return not header.is_symlink() and isinstance(found.get("rows"), int) and isinstance(found.get("identity"), dict)


def _store(path: Path) -> Entry:
    header, about = read_json(path / "store.json"), read_json(path / "about.json")
    identity = {key: str(value) for key, value in header["identity"].items()}
    columns = {file.stem: read_json(file) for file in path.glob("*.json") if file.stem not in ("store", "about")}
    sizes = {"": 0}
    for file in _contents(path):
        group = columns.get(file.stem, {}).get("group", "") if file.suffix == ".bin" else ""
        sizes[group] = sizes.get(group, 0) + _allocated(file)
    return Entry(
        path=path,
        images=about.get("images") or identity.get("images", "")[:8],
        rows=header["rows"],
        model=about.get("model") or identity.get("weights", "")[:8],
        identity=identity,
        groups=_groups(path, header, {column["group"] for column in columns.values() if "group" in column}),
        sizes=sizes,
        used=_used(path),
        outdated=header.get("version") != STORE_VERSION,
    )


def _groups(path: Path, header: Mapping[str, int], begun: set[str]) -> dict[str, tuple[int, int]]:
    shards = -(-header["rows"] // max(1, int(header.get("shard_rows", 1))))
    done = dict.fromkeys(begun, 0)
    for file in (path / "done").glob("*-*.json"):
        group = file.stem.rpartition("-")[0]
        done[group] = done.get(group, 0) + 1
    return {group: (count, shards) for group, count in sorted(done.items())}


def _used(path: Path) -> float:
    times = [file.stat().st_mtime for file in (path / "lease", path / "store.json", path / "done") if file.exists()]
    return times[0] if (path / "lease").exists() else max(times, default=0.0)


def _texts(path: Path) -> list[Entry]:
    files = _text_files(path)
    if not files:
        return []
    sizes = {"texts": sum(_allocated(file) for file in files)}
    # a text file is not touched when it is read: many file systems keep the time of reading
    used = max(max(file.stat().st_mtime, file.stat().st_atime) for file in files)
    return [Entry(path, "", len(files), "", {}, {"texts": (len(files), len(files))}, sizes, used)]


def _text_files(path: Path) -> list[Path]:
    if path.is_symlink() or not path.is_dir():
        return []
    return sorted(
        file for file in path.iterdir() if _TEXT.fullmatch(file.name) and file.is_file() and not file.is_symlink()
    )


def _verify_texts(entry: Entry) -> list[Fault]:
    from safetensors import SafetensorError, safe_open

    faults = []
    for file in _text_files(entry.path):
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.get_tensor("texts")
        except (SafetensorError, OSError):
            file.unlink()
            faults.append(Fault(entry, file.name, ()))
    return faults


def _contents(path: Path) -> Iterator[Path]:
    """All that lies in a folder, however deep; links are not followed."""
    for inner in path.iterdir():
        yield inner
        if inner.is_dir() and not inner.is_symlink():
            yield from _contents(inner)


def _ours(path: Path, store: Path) -> bool:
    if path.is_symlink():
        return False
    if path.parent == store:
        return path.name in _OURS_WITHIN if path.is_dir() else bool(_OURS.fullmatch(path.name))
    within = _OURS_WITHIN.get(path.parent.name)
    return path.parent.parent == store and within is not None and path.is_file() and bool(within.fullmatch(path.name))


def _allocated(file: Path) -> int:
    status = file.lstat()
    return 512 * status.st_blocks if hasattr(status, "st_blocks") else status.st_size


def _first_bytes(found: Sequence[Entry], surplus: int) -> Iterator[Entry]:
    for entry in found:
        if surplus <= 0:
            return
        yield entry
        surplus -= entry.size
