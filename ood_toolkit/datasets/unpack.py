"""Unpacks tar and zip files that nobody vouches for: plain files and folders only, all inside the target."""

import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

Progress = Callable[[int, int, str], None]
"""Called with (files done, 0, archive name)."""

_BLOCK = 1 << 20
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError)


def unpack(archive: Path, target: Path, *, progress: Progress = lambda done, total, name: None) -> int:
    """Writes the files of a tar (plain, gzip, bzip2, xz) or zip below `target`; returns how many.

    Owners, modes and times are not taken over. On an error `target` holds what came before it: give a folder that
    you throw away then.

    Raises:
        ValueError: the archive is damaged or truncated, or holds an absolute path, `..`, a link, a device, or a name
            twice; whichever, the name is in the message.
    """
    count = 0
    try:
        for name, stream in _files(archive):
            path = target / _safe(archive, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                while block := stream.read(_BLOCK):
                    file.write(block)
            count += 1
            if count % 100 == 0:
                progress(count, 0, archive.name)
    except FileExistsError as error:
        raise ValueError(f"{archive.name} holds {error.filename!r} twice, or as file and folder") from None
    except _DAMAGED as error:
        raise ValueError(f"{archive.name} is truncated or damaged: {error or type(error).__name__}") from None
    progress(count, 0, archive.name)
    return count


def _files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if zipfile.is_zipfile(archive):
        yield from _zipped(archive)
        return
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            _safe(archive, member.name)
            if member.isdir():
                continue
            if not member.isreg():
                kind = "a link" if member.islnk() or member.issym() else "neither file nor folder"
                raise ValueError(f"{archive.name} holds {member.name!r}, which is {kind}; nothing was installed")
            stream = tar.extractfile(member)
            assert stream is not None  # it is a regular file
            yield member.name, stream


def _zipped(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            _safe(archive, info.filename)
            mode = stat.S_IFMT(info.external_attr >> 16)
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise ValueError(f"{archive.name} holds {info.filename!r}, which is a link or device")
            if not info.is_dir():
                with zipped.open(info) as stream:
                    yield info.filename, stream


def _safe(archive: Path, name: str) -> str:
    """The name, if it stays below the folder it is joined to, on every system."""
    parts = re.split(r"[\\/]", name)
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:[\\/]", name) or ".." in parts or "\0" in name:
        raise ValueError(f"{archive.name} holds {name!r}, which leads outside its folder; nothing was installed")
    return name
