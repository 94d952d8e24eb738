"""Images in parquet files, as image sets lie in repositories of the Hugging Face hub."""

import bisect
import hashlib
import io
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ood_toolkit.datasets.fingerprints import Fingerprinted, stamp
from ood_toolkit.datasets.images import as_rgb
from ood_toolkit.outputs import UNKNOWN

if TYPE_CHECKING:
    from PIL.Image import Image


class ParquetImages(Fingerprinted):
    """The rows of parquet files, in the order of the files. Needs `pip install pyarrow`.

    A row group is read as a whole and the last one is kept, so reading in order is fast and memory is that of a group.

    Args:
        files: parquet files; see `parquet_files`.
        name: how records call the set.
        image: column with the encoded image: bytes, or the hub's struct of bytes and path.
        label: column with the class, or with a list of classes of which any is right; "" where labels are unknown.

    Raises:
        ValueError: the package is missing, a file is damaged, or a column is missing.
    """

    def __init__(self, files: Sequence[Path], *, name: str, image: str = "image", label: str = "label") -> None:
        self.files = list(files)
        self.name = name
        self.image = image
        groups: list[tuple[int, int]] = []
        sizes: list[int] = []
        ids: list[str] = []
        classes: list[list[int]] = []
        for number, path in enumerate(self.files):
            file = _open(path)
            missing = [column for column in (image, label) if column and column not in file.schema_arrow.names]
            if missing:
                raise ValueError(f"{str(path)!r} has no column {missing[0]!r}; it has {file.schema_arrow.names}")
            counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            groups += [(number, group) for group in range(len(counts))]
            sizes += counts
            ids += [f"{path.stem}/{row:06d}" for row in range(sum(counts))]
            column = file.read(columns=[label]).column(label).to_pylist() if label else [None] * sum(counts)
            classes += [
                list(value) if isinstance(value, list) else [] if value is None else [value] for value in column
            ]
        self._groups = groups
        self._ends = list(accumulate(sizes))
        self._kept: tuple[int, list[Any]] | None = None
        self.ids: Sequence[str] = ids
        width = max([1, *map(len, classes)])
        padded = [[*values, *[UNKNOWN] * (width - len(values))] for values in classes]
        self.accepted = torch.tensor(padded, dtype=torch.int64).reshape(-1, width)
        """(N, A) the classes that are right for each image, padded with `UNKNOWN`."""
        self.labels = self.accepted[:, 0].clone()

    def __len__(self) -> int:
        return len(self.ids)

    def _hash(self) -> str:
        """SHA-256 over the files' names, sizes and times."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(stamp(str(path.resolve()), path.stat()))
        return digest.hexdigest()

    def open(self, row: int) -> "Image":
        """The image in RGB."""
        from PIL import Image

        position = bisect.bisect_right(self._ends, row)
        if self._kept is None or self._kept[0] != position:
            number, group = self._groups[position]
            column = _open(self.files[number]).read_row_group(group, columns=[self.image]).column(self.image)
            self._kept = position, column.to_pylist()
        value = self._kept[1][row - (self._ends[position - 1] if position else 0)]
        content = value["bytes"] if isinstance(value, dict) else value
        if not content:
            raise ValueError(f"{self.ids[row]} holds no image")
        with Image.open(io.BytesIO(content)) as image:
            return as_rgb(image)


def parquet_files(folder: Path) -> list[Path]:
    """The parquet files in a folder, or in its `data` as in a copy of a hub repository; [] where there is none."""
    return sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))


def _open(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid  # pyright: ignore
        from pyarrow.parquet import ParquetFile  # pyright: ignore
    except ImportError:
        raise ValueError(f"reading {str(path)!r} needs the package pyarrow: pip install pyarrow") from None
    try:
        return ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{str(path)!r} is truncated or no parquet file: {error}") from None
