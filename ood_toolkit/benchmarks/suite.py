"""What a benchmark is: parts of image sets, and tasks over them."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ood_toolkit.datasets import ImageSet


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of an image set, under a name of its own.

    Args:
        name: unique within the suite.
        images: the set.
        rows: (K,) row numbers, or None for all.
        about: how the rows were chosen, for captions.
    """

    name: str
    images: ImageSet
    rows: Tensor | None = None
    about: str = ""

    @property
    def indices(self) -> Tensor:
        """(K,) row numbers in the set."""
        return torch.arange(len(self.images)) if self.rows is None else self.rows

    @property
    def labels(self) -> Tensor:
        """(K,) class indices."""
        return self.images.labels[self.indices]

    def __len__(self) -> int:
        return len(self.images) if self.rows is None else len(self.rows)

    def same(self, other: "Part") -> bool:
        """Whether the other part has the same images in the same order."""
        return self.images.fingerprint == other.images.fingerprint and torch.equal(self.indices, other.indices)

    @property
    def description(self) -> str:
        """Name, size, choice, and a hash of the rows' identifiers and, where the set has it, of its content.

        The same text means the same images, on any machine.
        """
        names = "\n".join(self.images.ids[int(row)] for row in self.indices)
        content = getattr(self.images, "content", "")
        digest = hashlib.sha256(f"{content}\n{names}".encode("utf-8", "surrogateescape")).hexdigest()[:12]
        about = f", {self.about}" if self.about else ""
        return f"{self.name} ({len(self)} images{about}, {digest})"


@dataclass(frozen=True, eq=False)
class ClassMask:
    """A subset of the classes, applied to logits and head before anything else.

    Args:
        name: e.g. "imagenet-o".
        classes: (K,) class indices, in the order they get.
    """

    name: str
    classes: Tensor

    @property
    def description(self) -> str:
        """Name and size."""
        return f"{self.name}:{len(self.classes)}"


@dataclass(frozen=True, eq=False)
class Task:
    """One question put to every method.

    Args:
        kind: "anomaly" (is it OOD?), "misclassification" (is the prediction wrong?) or "calibration".
        dataset: the records' name of what is scored.
        id: in-distribution images, labelled.
        ood: out-of-distribution images, for "anomaly".
        mask: the classes that count, or None for all.
    """

    kind: str
    dataset: str
    id: Part
    ood: Part | None = None
    mask: ClassMask | None = None


@dataclass(frozen=True, eq=False)
class Views:
    """What `robustness` counts beside the tasks: accuracies, drops, transfer, wrong answers, classes.

    Args:
        clean: name of the part that the drop starts from, where there is one.
        mask: the class subset with and without which everything is counted; None for all classes only.
        names: class names by index, where the model has none.
        wnids: WordNet ids by class index, where classes have them.
        sequences: names of the parts whose images are frames of videos, which are counted video by video too.
    """

    clean: str = ""
    mask: ClassMask | None = None
    names: Sequence[str] = ()
    wnids: Sequence[str] = ()
    sequences: Collection[str] = ()


@dataclass(frozen=True, eq=False)
class Suite:
    """A named set of tasks with the images that methods may learn from; those are never scored.

    Args:
        name: as on the command line.
        caption: one or two sentences for the tables: what the images are, and what the numbers are good for.
        tasks: in the order of the table's columns.
        fit: what detectors are fitted on, or None.
        calibration: what calibrators and ensembles are fitted on, or None.
        tuning: the OOD set on which hyper-parameters are chosen, against the calibration part; or None.
        protocol: the rules of evaluation.
        notes: further facts for captions and run.json.
        views: what robustness views are made of it, or None.
    """

    name: str
    caption: str
    tasks: Sequence[Task]
    fit: Part | None = None
    calibration: Part | None = None
    tuning: Part | None = None
    protocol: str = "default"
    notes: Sequence[str] = field(default=())
    views: Views | None = None

    def __post_init__(self) -> None:
        named: dict[str, Part] = {}
        for part in (*self._learned(), *self._scored()):
            if not named.setdefault(part.name, part).same(part):
                raise ValueError(f"suite {self.name!r} has two parts named {part.name!r}; give each a name of its own")
        learned = {(part.images.fingerprint, row) for part in self._learned() for row in part.indices.tolist()}
        for part in self.scored:
            shared = sum((part.images.fingerprint, row) in learned for row in part.indices.tolist())
            if shared:
                raise ValueError(
                    f"suite {self.name!r} would score {shared} images of {part.name!r} that it learns from"
                )

    @property
    def scored(self) -> list[Part]:
        """Every part that some task scores, once."""
        return list({part.name: part for part in self._scored()}.values())

    def _scored(self) -> list[Part]:
        return [part for task in self.tasks for part in (task.id, task.ood) if part is not None]

    def _learned(self) -> list[Part]:
        return [part for part in (self.fit, self.calibration, self.tuning) if part is not None]

    @property
    def parts(self) -> list[Part]:
        """Every part, the learned ones first."""
        return self._learned() + self.scored
