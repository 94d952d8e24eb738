"""Images in a tar file, read at random without unpacking it."""

import gzip
import hashlib
import io
import re
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

import torch

from ood_toolkit.datasets.fingerprints import Fingerprinted
from ood_toolkit.datasets.images import IMAGE_SUFFIXES, as_rgb
from ood_toolkit.outputs import UNKNOWN

if TYPE_CHECKING:
    from PIL.Image import Image

_CLASS_FOLDER = re.compile(r"n\d{8}|\d+")
_CLASS_TAR = re.compile(r"(n\d{8})\.tar")


@dataclass(frozen=True)
class Member:
    """A file inside a tar.

    Args:
        name: its path there.
        offset: where its bytes start.
        size: how many they are.
    """

    name: str
    offset: int
    size: int


class TarImages(Fingerprinted):
    """The images in an uncompressed tar, in order of their path: the same rows as of the unpacked folder.

    The members are listed once; each image is then read by its offset from a file opened for that read alone, so
    any number of worker processes may do so at once. Links and devices in the tar are not followed.

    Args:
        path: the tar. A gzip stream cannot be read at random; unzip it once with `plain_tar`.
        name: how records call the set; the file's stem by default.
        labels: class index by identifier; other images have an unknown label.
        paths: identifiers to read, in this order; all images by default.
        members: where the images lie, by identifier, for a tar that was listed already (see `ClassTars`).

    Identifiers are paths without the one folder that holds everything, as if that folder were the root.

    Raises:
        ValueError: the file is missing, compressed, truncated or no tar, or holds no image.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        name: str = "",
        labels: Mapping[str, int] | None = None,
        paths: Sequence[str] | None = None,
        members: Mapping[str, Member] | None = None,
    ) -> None:
        self.path = Path(path)
        self.name = name or self.path.stem
        self._members = dict(members) if members is not None else _by_identifier(image_members(self.path))
        self.ids: Sequence[str] = sorted(self._members) if paths is None else list(paths)
        absent = [image for image in self.ids if image not in self._members]
        if absent:
            raise ValueError(f"tar {str(path)!r} does not hold {len(absent)} images, first {absent[:3]}")
        self.labels = torch.tensor([(labels or {}).get(i, UNKNOWN) for i in self.ids], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def _hash(self) -> str:
        """SHA-256 over the tar's size and time, and over names, sizes and offsets of the images."""
        status = self.path.stat()
        digest = hashlib.sha256(f"{status.st_size}\0{status.st_mtime_ns}\n".encode())
        for image in self.ids:
            member = self._members[image]
            digest.update(f"{image}\0{member.size}\0{member.offset}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def open(self, row: int) -> "Image":
        """The image in RGB, whatever its file holds (grey, palette, CMYK, alpha)."""
        return decode(read_member(self.path, self._members[self.ids[row]]))

    def member_size(self, row: int) -> int:
        """Bytes of the image in the tar."""
        return self._members[self.ids[row]].size


class ClassTars:
    """A tar of tars, one for each class, as ILSVRC2012_img_train.tar is: read at random without unpacking either.

    The outer tar is listed at once, an inner one only when its class is asked for.

    Args:
        path: the outer tar; its members are called `<WordNet id>.tar`.

    Raises:
        ValueError: see `TarImages`; or it holds no class tars.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = {m.name.removeprefix("./"): m for m in tar_members(path)}
        self._classes = {match[1]: m for name, m in found.items() if (match := _CLASS_TAR.fullmatch(name))}
        if not self._classes:
            raise ValueError(f"tar {str(path)!r} holds no class tars such as n01440764.tar")

    @property
    def classes(self) -> list[str]:
        """WordNet ids, sorted."""
        return sorted(self._classes)

    def members(self, wnid: str) -> dict[str, Member]:
        """The images of one class by identifier, `<WordNet id>/<file name>`; none where the class is absent.

        Raises:
            ValueError: the inner tar is truncated or no tar.
        """
        outer = self._classes.get(wnid)
        if outer is None:
            return {}
        try:
            with self.path.open("rb") as file:
                file.seek(outer.offset)
                members = _members(file)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{outer.name!r} in {str(self.path)!r} is truncated or no tar: {error}") from None
        if any(member.offset + member.size > outer.offset + outer.size for member in members):
            raise ValueError(f"{outer.name!r} in {str(self.path)!r} is truncated")
        images = [member for member in members if _is_image(PurePosixPath(member.name))]
        return {f"{wnid}/{PurePosixPath(member.name).name}": member for member in images}

    def images(self, name: str, wnids: Sequence[str] | None = None) -> TarImages:
        """All images of these classes, or of all, as one set in the order of an unpacked folder."""
        members = {i: m for wnid in wnids or self.classes for i, m in self.members(wnid).items()}
        return TarImages(self.path, name=name, members=members)


def holds_class_tars(path: Path) -> bool:
    """The first member of a tar is the tar of a class; only that one is looked at."""
    try:
        with tarfile.open(path, "r:") as tar:
            first = tar.next()
    except (tarfile.TarError, OSError):
        return False
    return first is not None and _CLASS_TAR.fullmatch(first.name.removeprefix("./")) is not None


def image_members(path: Path) -> list[Member]:
    """The regular image files in a tar, in its own order; hidden files and other files are skipped.

    Raises:
        ValueError: see `TarImages`.
    """
    found = [m for m in tar_members(path) if _is_image(PurePosixPath(m.name))]
    if not found:
        raise ValueError(f"tar {str(path)!r} holds no image (looked for {', '.join(sorted(IMAGE_SUFFIXES))})")
    return found


def tar_members(path: Path) -> list[Member]:
    """Every regular file in an uncompressed tar, each name once (the last one wins, as in unpacking).

    Raises:
        ValueError: the file is missing, compressed, truncated or no tar.
    """
    if not path.is_file():
        raise ValueError(f"tar {str(path)!r} does not exist")
    if is_gzip(path):
        raise ValueError(
            f"{str(path)!r} is compressed and cannot be read at random; unpack it, or unzip it to a plain tar once"
        )
    try:
        with path.open("rb") as file:
            members = {member.name: member for member in _members(file)}
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"tar {str(path)!r} is truncated or no tar: {error}") from None
    size = path.stat().st_size
    cut = [member.name for member in members.values() if member.offset + member.size > size]
    if cut:
        raise ValueError(f"tar {str(path)!r} is truncated: {cut[0]!r} reaches past its end")
    return list(members.values())


def read_member(path: Path, member: Member) -> bytes:
    """The bytes of one file in a tar."""
    with path.open("rb") as file:
        file.seek(member.offset)
        return file.read(member.size)


def decode(content: bytes) -> "Image":
    """The image in RGB, from the bytes of its file."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        return as_rgb(image)


def is_gzip(path: Path) -> bool:
    """The file starts like a gzip stream."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def plain_tar(path: Path, target: Path) -> Path:
    """Unzips a .tar.gz to `target` once, so that it can be read at random; what is there already is kept.

    Raises:
        ValueError: the stream is damaged or truncated; nothing is left at `target` then.
    """
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    try:
        with gzip.open(path, "rb") as stream, partial.open("wb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
        partial.replace(target)
    except (EOFError, gzip.BadGzipFile, OSError) as error:
        raise ValueError(f"{str(path)!r} cannot be unzipped: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return target


def common_folder(names: Sequence[str]) -> str:
    """The one folder that holds every name, with its slash, or ""; a class folder (WordNet id or number) stays.

    >>> common_folder(["imagenet-a/n01498041/a.jpg", "imagenet-a/n01531178/b.jpg"])
    'imagenet-a/'
    >>> common_folder(["./n01498041/a.jpg"])
    './'
    """
    dot = "./" if all(name.startswith("./") for name in names) else ""
    tops = {name.removeprefix(dot).partition("/")[0] for name in names}
    top = next(iter(tops))
    inside = all(name.startswith(f"{dot}{top}/") for name in names)
    return f"{dot}{top}/" if inside and not _CLASS_FOLDER.fullmatch(top) else dot


def _members(file: IO[bytes]) -> list[Member]:
    """The regular files of the tar that starts where the file stands.

    Raises:
        tarfile.TarError: a header is damaged; Python's own reader takes that for the end wherever it is not the first.
    """
    with tarfile.open(fileobj=file, mode="r:") as tar:
        members = [Member(m.name, m.offset_data, m.size) for m in tar if m.isreg() and not m.issparse()]
        file.seek(tar.offset)
    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise tarfile.ReadError(f"the header behind {members[-1].name!r} is damaged" if members else "no header")
    return members


def _by_identifier(images: Sequence[Member]) -> dict[str, Member]:
    top = common_folder([member.name for member in images])
    return {member.name.removeprefix(top): member for member in images}


def _is_image(path: PurePosixPath) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
