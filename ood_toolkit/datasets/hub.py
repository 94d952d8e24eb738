"""Image sets of the Hugging Face hub, through its optional package `datasets`."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ood_toolkit.datasets.fingerprints import Fingerprinted
from ood_toolkit.outputs import UNKNOWN

if TYPE_CHECKING:
    from PIL.Image import Image


class HubImages(Fingerprinted):
    """One split of a set on the hub. Needs `pip install datasets`; gated sets need a login there first.

    Args:
        repository: e.g. "axiong/imagenet-r".
        split: e.g. "test".
        name: how records call the set; the repository's name by default.
        revision: a commit of the repository, so that the same images are read next year.
        image: the column with the images.
        label: the column with the classes, or "" where labels are unknown. A row with several classes counts as
            unlabelled.
        class_index: label by class name, where the column's classes have names (e.g. WordNet ids) that it knows.
        classes: of the model; a column with exactly so many classes, none of which `class_index` knows, is in order.

    Raises:
        ValueError: the package is missing, a column is missing, or a class name is unknown.
    """

    def __init__(
        self,
        repository: str,
        *,
        split: str,
        name: str = "",
        revision: str | None = None,
        image: str = "image",
        label: str = "label",
        class_index: Mapping[str, int] | None = None,
        classes: int = 0,
    ) -> None:
        self.name = name or repository.rpartition("/")[2]
        self.image = image
        self._rows = _load(repository, split, revision)
        missing = [column for column in (image, label) if column and column not in self._rows.column_names]
        if missing:
            raise ValueError(f"{repository!r} has no column {missing[0]!r}; it has {self._rows.column_names}")
        self._key = f"{repository}\0{split}\0{revision}\0{getattr(self._rows, '_fingerprint', '')}"
        self.ids: Sequence[str] = [f"{split}/{row:08d}" for row in range(len(self._rows))]
        self.labels = torch.tensor(self._labels(label, class_index, classes), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def _hash(self) -> str:
        """Hash of repository, split, revision and the package's own fingerprint."""
        return hashlib.sha256(self._key.encode()).hexdigest()

    def open(self, row: int) -> "Image":
        """The image in RGB."""
        return self._rows[row][self.image].convert("RGB")

    def _labels(self, column: str, class_index: Mapping[str, int] | None, classes: int) -> list[int]:
        if not column:
            return [UNKNOWN] * len(self)
        raw = [value if isinstance(value, int) else UNKNOWN for value in self._rows[column]]
        names = getattr(self._rows.features[column], "names", None)
        if not class_index or not names:
            return raw
        strangers = [name for name in names if name not in class_index]
        if len(strangers) == len(names) == classes:
            return raw
        if strangers:
            raise ValueError(f"{len(strangers)} classes of {self.name!r} are not known, first {strangers[0]!r}")
        return [class_index[names[value]] if value != UNKNOWN else UNKNOWN for value in raw]


def _load(repository: str, split: str, revision: str | None) -> Any:
    try:
        from datasets import load_dataset  # pyright: ignore
    except ImportError:
        raise ValueError(
            f"reading {repository!r} from the hub needs the package datasets: pip install datasets"
        ) from None
    return load_dataset(repository, split=split, revision=revision)
