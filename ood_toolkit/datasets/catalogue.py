"""What is known about published image sets: where they come from, how they lie on disk, what is wrong with them."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

LabelRule = Literal[
    "wnid",
    "wnid-deep",
    "index",
    "validation",
    "mapped",
    "mapped-deep",
    "frames",
    "parquet",
    "none",
    "cifar-binary",
    "cifar-npy",
    "cifar-npz",
    "cifar-train",
    "cifar-100",
    "svhn-mat",
    "mnist-idx",
    "unread",
]
"""Where labels come from: "wnid" and "index" are the top folder's name (a WordNet id, or an integer); "wnid-deep" the
folder right above the image; "validation" is "wnid", or the number in ILSVRC2012_val_<number>; "mapped" is that folder
looked up in `datasets.classes.folder_map`, and "mapped-deep" the same in a set of several domains; "frames" is the
folder right above a video; "parquet" a column of a parquet file; "none" leaves every label unknown; "cifar-…",
"svhn-mat" and "mnist-idx" are arrays; "unread" sets are described but not opened."""


@dataclass(frozen=True, kw_only=True)
class Archive:
    """One file to download. What is not known is None.

    Args:
        url: https address, or None where only a browser or a login gets it.
        file: its name.
        bytes: its size.
        md5: hexadecimal digest.
        sha256: hexadecimal digest.
    """

    url: str | None
    file: str
    bytes: int | None
    md5: str | None
    sha256: str | None

    @property
    def fetchable(self) -> bool:
        """Can be downloaded without a browser, and not over plain http."""
        return self.url is not None and self.url.startswith("https://")


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """The facts about one set. What is not known is None, or empty.

    Args:
        name: as on the command line.
        title: as in tables.
        use: "id" in-distribution, "shift" known classes under another distribution, "ood" unknown classes.
        about: what the images are.
        revision: which state of the set the other facts describe.
        licence: of the images, its name with the condition, as far as stated anywhere.
        images: how many.
        classes: number of class folders.
        class_list: the classes among ImageNet-1k's: a class list or a folder map of `datasets.classes`.
        labels: where labels come from.
        layout: folders and files, in words.
        places: where the set is looked for below the data root, in this order.
        archives: files to download.
        login: what to do by hand where no download is possible.
        drop_folders: class folders that are not read.
        border: pixels on each side of every image that are not part of it.
        hub: copies on hubs, with what is known about them.
        faults: known faults, to be printed beside numbers.
        notes: remarks that move no number, such as who states the licence.
        cite: the paper.
        source: who vouches for sizes, checksums and layout.
    """

    name: str
    title: str
    use: Literal["id", "shift", "ood"]
    about: str
    revision: str | None
    licence: str | None
    images: int | None
    classes: int | None
    class_list: str | None
    labels: LabelRule
    layout: str | None
    places: tuple[str, ...]
    archives: tuple[Archive, ...]
    login: str | None
    drop_folders: tuple[str, ...]
    border: int
    hub: tuple[str, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    cite: str | None
    source: str | None

    @property
    def bytes(self) -> int | None:
        """Size of the whole download, or None where some of it is unknown."""
        sizes = [archive.bytes for archive in self.archives]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and len(known) == len(sizes) else None

    @property
    def fetchable(self) -> bool:
        """`get` can download it."""
        return bool(self.archives) and all(archive.fetchable for archive in self.archives)


@cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Every set, by name in alphabetical order."""
    files = sorted((Path(__file__).parent / "catalogue").glob("*.json"), key=lambda file: file.stem)
    return MappingProxyType({file.stem: _read(file) for file in files})


def entry(name: str) -> CatalogueEntry:
    """The entry of that name; underscores stand for hyphens.

    Raises:
        ValueError: there is none.
    """
    known = catalogue()
    found = known.get(name) or known.get(name.replace("_", "-"))
    if found is None:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no data set is named {name!r};{hint} Known: {', '.join(known)}")
    return found


def _read(file: Path) -> CatalogueEntry:
    facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    expected = {f.name for f in fields(CatalogueEntry)}
    if set(facts) != expected or facts["name"] != file.stem or facts["labels"] not in get_args(LabelRule):
        raise ValueError(f"{file} is no catalogue entry: wrong fields {sorted(set(facts) ^ expected)}, name or labels")
    facts["archives"] = [Archive(**archive) for archive in facts["archives"]]
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in facts.items()}
    return CatalogueEntry(**values)
