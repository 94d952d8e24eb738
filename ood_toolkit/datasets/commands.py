"""`ood-bench data list|get|check`, with plain arguments and text as the answer."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ood_toolkit.datasets.catalogue import catalogue, entry
from ood_toolkit.datasets.download import Progress, silent
from ood_toolkit.datasets.install import check, get, list_sets
from ood_toolkit.datasets.locate import ROOT_VARIABLE, data_root


def list_data(root: Path | None = None) -> list[tuple[str, str, str, str, str, str]]:
    """One row per known set: name, use, size of the download, licence, where it lies or how to get it, and notes.

    Args:
        root: the data root; $OOD_DATA_ROOT by default, and nothing is looked for without either.
    """
    rows = []
    for known, found in list_sets(data_root(root)):
        size = f"{known.bytes / 1e9:.2f} GB" if known.bytes is not None else "unknown"
        how = "ood-bench data get" if known.fetchable else "by hand, see data check"
        place = str(found.path) if found else how
        rows.append((known.name, known.use, size, known.licence or "not stated", place, " ".join(known.notes)))
    return rows


def get_data(
    names: Sequence[str],
    root: Path | None = None,
    *,
    yes: bool = False,
    ask: Callable[[str], bool] = lambda text: False,
    unpacked: bool = True,
    keep_archive: bool = False,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
) -> None:
    """Fetches sets one after another; see `install.get` for the arguments.

    Raises:
        ValueError: no name, an unknown name (before anything is fetched), no data root, or a set that fails.
    """
    for known in [entry(name) for name in _named(names)]:
        get(
            known,
            _required(root),
            yes=yes,
            ask=ask,
            unpacked=unpacked,
            keep_archive=keep_archive,
            say=say,
            progress=progress,
        )


def check_data(names: Sequence[str], root: Path | None = None) -> tuple[list[str], bool]:
    """One line per set, and whether all is well; without names, every set that is there.

    Raises:
        ValueError: an unknown name, or no data root.
    """
    where = _required(root)
    chosen = [entry(name) for name in names] or [known for known, found in list_sets(where) if found is not None]
    checked = [check(known, where) for known in chosen]
    lines = [one.text for one in checked] or [f"none of the {len(catalogue())} known sets lies below {where}"]
    return lines, all(not one.problems for one in checked)


def _named(names: Sequence[str]) -> Sequence[str]:
    if not names:
        raise ValueError("say which data sets, e.g. ood-bench data get imagenet-a imagenet-o; see: ood-bench data list")
    return names


def _required(root: Path | None) -> Path:
    found = data_root(root)
    if found is None:
        raise ValueError(f"say where data sets lie, with --data-root DIR or ${ROOT_VARIABLE}")
    return found
