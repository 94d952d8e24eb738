"""Per-image numbers of a run, so that anyone can recompute its tables: one safetensors file, described by itself.

Tensors are named `0`, `1`, …; the file's metadata hold two JSON texts: `index` says what each tensor is, `ids` lists
the image identifiers of every part, in row order.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

Kind = Literal["score", "confidence", "correct", "correct5", "label", "prediction", "ranking"]


@dataclass(frozen=True)
class Column:
    """What one tensor holds.

    Args:
        kind: "score" (higher = more OOD, or more likely wrong), "confidence" (probability of the predicted class),
            "correct" (0 or 1), "correct5" (0 or 1: the label is among the five most likely), "label" or
            "prediction" (class indices), "ranking" (the five most likely classes, the most likely first).
        model: model spec, or the ensemble's name; "" for labels.
        method: detector spec for scores, calibrator or ensemble spec for what comes from probabilities; "" otherwise.
        part: which images: a key of `ScoreFile.ids`.
        mask: class mask, as in records.
    """

    kind: Kind
    model: str
    method: str
    part: str
    mask: str = ""


@dataclass
class ScoreFile:
    """All columns of a run, in memory; `save` and `load` move them to and from a file.

    Args:
        columns: (N,) tensors by what they hold, (N, 5) for rankings.
        ids: image identifiers by part.
        roots: folder of a part's images, where they are files: `root / id` is the image.
    """

    columns: dict[Column, Tensor] = field(default_factory=dict)
    ids: dict[str, Sequence[str]] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)

    def add(self, column: Column, values: Tensor) -> None:
        """Adds or replaces a column; its part must have as many identifiers."""
        if len(values) != len(self.ids[column.part]):
            raise ValueError(f"{column} has {len(values)} rows, its part {len(self.ids[column.part])}")
        self.columns[column] = values.detach().cpu().contiguous()

    def select(self, kind: Kind) -> Iterator[tuple[Column, Tensor]]:
        """Columns of one kind."""
        return ((column, values) for column, values in self.columns.items() if column.kind == kind)

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        from safetensors.torch import save_file

        index = {str(number): asdict(column) for number, column in enumerate(self.columns)}
        metadata = {
            "index": json.dumps(index),
            "ids": json.dumps({part: list(names) for part, names in self.ids.items()}),
            "roots": json.dumps(self.roots),
        }
        temporary = path.with_name(path.name + ".partial")
        save_file({str(n): v for n, v in enumerate(self.columns.values())}, temporary, metadata=metadata)
        temporary.chmod(0o644)  # safetensors makes private files; the others of a run are not
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> "ScoreFile":
        """Reads a file back.

        Raises:
            ValueError: it is not a score file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                index = json.loads(metadata["index"])
                columns = {Column(**about): file.get_tensor(number) for number, about in index.items()}
                return ScoreFile(columns, json.loads(metadata["ids"]), json.loads(metadata.get("roots", "{}")))
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a score file of ood-bench ({error})") from error
