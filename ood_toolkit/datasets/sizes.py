"""How many bytes the files of a set have, for plans."""

from collections.abc import Sequence
from pathlib import Path

from ood_toolkit.datasets.archives import TarImages
from ood_toolkit.datasets.combined import JoinedImages, SubsetImages
from ood_toolkit.datasets.images import ArrayImages, FolderImages, ImageSet


def file_bytes(images: ImageSet, rows: Sequence[int] | None = None) -> int | None:
    """Bytes of the images' files, as they are compressed; 0 for images in memory; None where the set does not tell.

    Args:
        images: the set.
        rows: row numbers; all by default.
    """
    chosen = range(len(images)) if rows is None else rows
    if isinstance(images, ArrayImages):
        return 0
    if isinstance(images, FolderImages):
        return sum(_size(images.root / images.ids[row]) for row in chosen)
    if isinstance(images, TarImages):
        return sum(images.member_size(row) for row in chosen)
    if isinstance(images, SubsetImages):
        return file_bytes(images.images, [images.rows[row] for row in chosen])
    if isinstance(images, JoinedImages):
        return _joined(images, chosen)
    inner = getattr(images, "images", None)  # a set that shows another one's files in another way
    return None if inner is None or len(inner) != len(images) else file_bytes(inner, rows)


def _joined(images: JoinedImages, rows: Sequence[int]) -> int | None:
    start, wanted, total = 0, sorted(rows), 0
    for member in images.members:
        own = [row - start for row in wanted if start <= row < start + len(member)]
        size = file_bytes(member, own)
        if size is None:
            return None
        total += size
        start += len(member)
    return total


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
