"""What `ood-bench data list|get|check` does: published sets, fetched, verified, and found again."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ood_toolkit.corruptions import CORRUPTIONS, SEVERITIES
from ood_toolkit.datasets.archives import common_folder
from ood_toolkit.datasets.catalogue import Archive, CatalogueEntry, catalogue
from ood_toolkit.datasets.catalogue import entry as catalogue_entry
from ood_toolkit.datasets.classes import class_list, folder_map
from ood_toolkit.datasets.download import Progress, allowed, fetch, silent, verify
from ood_toolkit.datasets.images import ImageSet
from ood_toolkit.datasets.locate import Found, find, how_to_get, open_set, sought
from ood_toolkit.datasets.unpack import unpack
from ood_toolkit.datasets.videos import VIDEO_SUFFIX

_AT_A_SEVERITY = 50_000
"""Images of ImageNet-C at one severity of one corruption: all validation images."""


@dataclass(frozen=True)
class Checked:
    """What lies below the data root of one set.

    Args:
        entry: the set.
        found: where it lies, or None.
        images: how many images it has there.
        problems: what is wrong with it; empty if all is well.
        what: what is counted.
    """

    entry: CatalogueEntry
    found: Found | None
    images: int
    problems: Sequence[str]
    what: str = "images"

    @property
    def text(self) -> str:
        """One line, and what to do where something is wrong."""
        if self.found is None:
            return f"{self.entry.name}: {'; '.join(self.problems)}"
        where = f"{self.entry.name}: {self.images:,} {self.what} in {self.found.path} ({self.found.layout})"
        return f"{where}, complete" if not self.problems else f"{where}: {'; '.join(self.problems)}"


def list_sets(root: Path | None) -> list[tuple[CatalogueEntry, Found | None]]:
    """Every known set, and where it lies below `root`; nothing is counted or opened."""
    return [(known, find(known, root) if root is not None else None) for known in catalogue().values()]


def terms(entry: CatalogueEntry) -> str:
    """What the user must know before a download: title, size, licence, known faults, source."""
    size = f"{entry.bytes / 1e9:.2f} GB" if entry.bytes is not None else "size unknown"
    count = f"{entry.images:,} images" if entry.images is not None else "number of images unknown"
    lines = [f"{entry.title}: {count}, {size}", f"  {entry.about}", f"  licence: {entry.licence or 'not stated'}"]
    lines += [f"  from: {archive.url}" for archive in entry.archives if archive.url]
    lines += [f"  known fault: {fault}" for fault in entry.faults]
    lines += [f"  note: {note}" for note in entry.notes]
    return "\n".join(lines)


def check(name: str | CatalogueEntry, root: Path) -> Checked:
    """Counts images and class folders of a set below `root` and compares them with what it should have.

    Never raises for a set that is missing or wrong: that is in `problems`, with what to do.
    """
    known = catalogue_entry(name) if isinstance(name, str) else name
    found = find(known, root)
    if known.labels == "unread":
        return Checked(known, None, 0, [f"described but not read by this toolkit. {how_to_get(known)}"])
    if found is None:
        return Checked(known, None, 0, [f"not below {root} ({sought(known, root)}). {how_to_get(known)}"])
    if known.labels == "frames":
        videos = sum(1 for _ in found.path.rglob(f"*{VIDEO_SUFFIX}"))
        return Checked(known, found, videos, [], what="videos")
    try:
        images = open_set(known, root, every_folder=True)
    except ValueError as error:
        return Checked(known, found, 0, [str(error)])
    problems = []
    if known.images is not None and len(images) != known.images:
        problems.append(f"{known.images:,} images are expected, {len(images):,} are there")
    problems += _class_problems(known, found, images)
    problems += _corruption_problems(known, images)
    return Checked(known, found, len(images), problems)


def _corruption_problems(known: CatalogueEntry, images: ImageSet) -> list[str]:
    """Which corruptions of a group of ImageNet-C lack a severity, or images at one."""
    group = known.name.removeprefix("imagenet-c-")
    if known.labels != "wnid-deep" or group not in CORRUPTIONS:
        return []
    there = Counter("/".join(image.split("/")[:2]) for image in images.ids)
    counts = {
        f"{name}/{severity}": there[f"{name}/{severity}"] for name in CORRUPTIONS[group] for severity in SEVERITIES
    }
    less = [place for place, count in counts.items() if count != _AT_A_SEVERITY]
    if not less:
        return []
    first = f"first {less[0]} with {counts[less[0]]:,}"
    return [f"{_AT_A_SEVERITY:,} images are expected at each severity, {len(less)} of {len(counts)} differ, {first}"]


def get(
    name: str | CatalogueEntry,
    root: Path,
    *,
    yes: bool = False,
    ask: Callable[[str], bool] = lambda text: False,
    unpacked: bool = True,
    keep_archive: bool = False,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
) -> Checked:
    """Downloads, verifies and unpacks a set below `root`. It appears there as a whole or not at all.

    An archive that the user has put into `root` is taken instead of a download, after its checksum is verified.

    Args:
        name: of the set, or the set.
        root: the data root.
        yes: the user agrees to the terms.
        ask: shown the terms where `yes` is not given; True is agreement.
        unpacked: False keeps a plain tar as it is, to be read without unpacking.
        keep_archive: keep the archive beside the unpacked set.
        say: told what happens, line by line.
        progress: told how far it is.

    Raises:
        ValueError: no agreement, no download (with what to do by hand), no room, a failed download, a wrong checksum,
            a damaged or dangerous archive, or contents that are not what they should be.
    """
    known = catalogue_entry(name) if isinstance(name, str) else name
    present = check(known, root)
    if present.found is not None:
        if present.problems:
            raise ValueError(f"{present.text}; move {present.found.path} away and get it again")
        say(present.text)
        return present
    local = [archive for archive in known.archives if (root / archive.file).is_file()]
    if not known.archives or any(a not in local and not _fetchable(a) for a in known.archives):
        raise ValueError(f"{known.title} cannot be downloaded by this tool. {known.login or ''}".strip())
    if len(local) < len(known.archives) and not yes and not ask(terms(known)):
        raise ValueError(f"nothing was downloaded: {known.title} needs your agreement (answer yes, or give --yes)")
    root.mkdir(parents=True, exist_ok=True)
    place = root / _place(known)
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise ValueError(f"{place} is there already but holds no {known.title}; move it away")
    _require_room(known, root)
    for archive in known.archives:
        _obtain(archive, root, say, progress)
    if not unpacked and all(archive.file.endswith(".tar") for archive in known.archives):
        return _complete(known, root)
    fetched = [root / archive.file for archive in known.archives if archive not in local]
    try:
        _install(known, root, progress)
    except ValueError:
        for path in fetched:
            path.unlink()  # it is of no use, and must not be taken for the set
        raise
    for path in [] if keep_archive else fetched:
        path.unlink()
    done = check(known, root)
    say(done.text)
    return done


def _fetchable(archive: Archive) -> bool:
    return archive.url is not None and allowed(archive.url)


def _obtain(archive: Archive, root: Path, say: Callable[[str], None], progress: Progress) -> None:
    path = root / archive.file
    expected = {"size": archive.bytes, "md5": archive.md5, "sha256": archive.sha256}
    if path.is_file():
        say(f"verifying {path}")
        verify(path, **expected)
        return
    assert archive.url is not None  # asked before
    say(f"downloading {archive.url}")
    fetch(archive.url, path, progress=progress, **expected)
    if not (archive.md5 or archive.sha256):
        say(f"no checksum of {archive.file} is known, so only its size was verified")


def _install(known: CatalogueEntry, root: Path, progress: Progress) -> None:
    """Unpacks beside the place it goes to, verifies, and only then moves it there."""
    place = _place(known)
    with tempfile.TemporaryDirectory(prefix=f".{known.name}-", dir=root) as folder:
        raw, staged = Path(folder, "raw"), Path(folder, "root")
        raw.mkdir()
        for archive in known.archives:
            unpack(root / archive.file, raw, progress=progress)
        top = common_folder([path.relative_to(raw).as_posix() for path in raw.rglob("*") if path.is_file()] or [""])
        (staged / place).parent.mkdir(parents=True)
        (raw / top).rename(staged / place)
        _complete(known, staged)
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (staged / place).rename(root / place)


def _place(known: CatalogueEntry) -> str:
    return known.places[0] if known.labels == "validation" else known.name


def _complete(known: CatalogueEntry, root: Path) -> Checked:
    done = check(known, root)
    if done.problems:
        raise ValueError(f"the archive does not hold {known.title} as it should: {'; '.join(done.problems)}")
    return done


def _require_room(known: CatalogueEntry, root: Path) -> None:
    needed = 2 * (known.bytes or 0)  # the archive, and what is in it
    free = shutil.disk_usage(root).free
    if free < needed:
        raise ValueError(f"{known.title} needs about {needed / 1e9:.1f} GB in {root}, but {free / 1e9:.1f} GB are free")


def _class_problems(known: CatalogueEntry, found: Found, images: ImageSet) -> list[str]:
    if found.layout in ("arrays", "parquet") or known.labels == "wnid-deep":
        return []
    if known.labels in ("mapped", "mapped-deep"):
        absent = sorted(set(folder_map(known.class_list or "")) - {Path(image).parent.name for image in images.ids})
        return [f"{len(absent)} class folders are missing, first {absent[0]}"] if absent else []
    if found.layout == "shards" or (known.labels == "validation" and "/" not in images.ids[0]):
        count = len(images.labels.unique())
        wrong = known.classes is not None and known.labels != "none" and count != known.classes
        return [f"{known.classes} classes are expected, labels name {count}"] if wrong else []
    folders = Counter(image.partition("/")[0] for image in images.ids)
    if known.class_list is None or known.labels == "index":
        wrong = known.classes is not None and len(folders) != known.classes
        return [f"{known.classes} class folders are expected, {len(folders)} are there"] if wrong else []
    classes = class_list(known.class_list)
    missing, strangers = [c for c in classes if c not in folders], [f for f in folders if f not in classes]
    problems = [f"{len(missing)} class folders are missing, first {missing[0]}"] if missing else []
    return problems + ([f"{len(strangers)} folders are none of its classes, first {strangers[0]}"] if strangers else [])
