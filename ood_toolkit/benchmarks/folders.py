"""The user's own images: folders in, a suite out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ood_toolkit.benchmarks.suite import Part, Suite, Task, Views
from ood_toolkit.datasets import ImageSet
from ood_toolkit.datasets.images import imagenet_class_index, labels_from_file, labels_from_folders
from ood_toolkit.datasets.sources import HUB, open_images
from ood_toolkit.outputs import UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Where the images of a `folders` suite are: folders, or any other place that `open_images` knows.

    Args:
        id: in-distribution images: one folder per class, or any place with `labels`, or one that states its labels.
        ood: out-of-distribution images, by name.
        fit: images for fitting detectors (class folders, or listed in `labels`); else a fraction of `id`.
        calibrate: images for fitting calibrators, likewise.
        labels: file of image path and class, for `id`; by default class folders.
        fit_fraction: share of `id` that detectors are fitted on, where `fit` is not given.
        calibrate_fraction: share of `id` for calibrators, where `calibrate` is not given.
        seed: of the split.
    """

    id: Path
    ood: Mapping[str, Path] = field(default_factory=dict)
    fit: Path | None = None
    calibrate: Path | None = None
    labels: Path | None = None
    fit_fraction: float = 0.3
    calibrate_fraction: float = 0.2
    seed: int = 0

    def require(self) -> None:
        """Raises ValueError for a folder that is missing or empty, before a model is loaded."""
        taken = sorted({"id", "fit", "calibration"} & set(self.ood))
        if taken:
            raise ValueError(
                f"an OOD set cannot be named {taken[0]!r}: that name is taken; choose another in --ood NAME=DIR"
            )
        for folder in (self.id, self.fit, self.calibrate, *self.ood.values()):
            if folder is not None and HUB not in str(folder):
                open_images(folder)
        if self.labels is not None and not self.labels.is_file():
            problem = "is no file" if self.labels.exists() else "does not exist"
            raise ValueError(f"labels file {str(self.labels)!r} {problem}")

    def suite(self, classes: int, class_names: tuple[str, ...] | None) -> Suite:
        """The suite, for a model with this many classes.

        Raises:
            ValueError: a folder is missing or empty, labels do not match, or fractions leave nothing to score.
        """
        index = self._class_index(classes, class_names)
        images = self._labelled(self.id, self.labels, index, classes, "id")
        fit_rows, calibrate_rows, test_rows = self._split(len(images))
        test = Part("id", images, test_rows, f"what the seeded split (seed {self.seed}) leaves")
        fit = self._learned(self.fit, "fit", images, fit_rows, self.fit_fraction, index, classes)
        calibration = self._learned(
            self.calibrate, "calibration", images, calibrate_rows, self.calibrate_fraction, index, classes
        )
        tasks = [Task("misclassification", "id", test)]
        tasks += [
            Task("anomaly", name, test, Part(name, open_images(path, name=name))) for name, path in self.ood.items()
        ]
        tasks.append(Task("calibration", "id", test))
        caption = (
            f"In-distribution images from {self.id.name}, out-of-distribution from {', '.join(self.ood) or 'none'}."
        )
        views = Views(names=class_names or (() if self.labels else _folder_names(images, classes)))
        return Suite(name="folders", caption=caption, tasks=tasks, fit=fit, calibration=calibration, views=views)

    def _split(self, total: int) -> tuple[Tensor, Tensor, Tensor]:
        """Disjoint row numbers for fit, calibration and test, each in ascending order."""
        shares = {"--fit-fraction": self.fit_fraction, "--calibrate-fraction": self.calibrate_fraction}
        for option, share in shares.items():
            if not 0 <= share < 1:
                raise ValueError(f"{option} must lie in [0, 1), got {share}")
        fit = 0 if self.fit else round(self.fit_fraction * total)
        calibrate = 0 if self.calibrate else round(self.calibrate_fraction * total)
        if fit + calibrate >= total:
            raise ValueError(
                f"of {total} ID images {fit} would go to fitting and {calibrate} to calibration, which leaves none to "
                "score; lower --fit-fraction or --calibrate-fraction, or give --fit and --calibrate folders"
            )
        order = torch.randperm(total, generator=torch.Generator().manual_seed(self.seed))
        parts = order.split([fit, calibrate, total - fit - calibrate])
        return tuple(part.sort().values for part in parts)  # pyright: ignore

    def _learned(
        self,
        folder: Path | None,
        name: str,
        images: ImageSet,
        rows: Tensor,
        share: float,
        index: Mapping[str, int],
        classes: int,
    ) -> Part | None:
        if folder is not None:
            return Part(name, self._labelled(folder, None, index, classes, name), None, f"all of {folder.name}")
        if not len(rows):
            return None
        return Part(name, images, rows, f"{share:.0%} of ID, seed {self.seed}, never scored")

    def _labelled(self, root: Path, labels: Path | None, index: Mapping[str, int], classes: int, name: str) -> ImageSet:
        images = open_images(root, name=name, class_index=index, classes=classes)
        found = _labels(images, labels, index, classes)
        outside = {file: label for file, label in found.items() if not 0 <= label < classes}
        if outside:
            file, label = next(iter(outside.items()))
            raise ValueError(
                f"{len(outside)} labels lie outside the model's {classes} classes, first {label} for {file!r}"
            )
        accepted: Tensor | None = getattr(images, "accepted", None)
        if accepted is not None and int(accepted.max()) >= classes:
            raise ValueError(f"a label of {str(root)!r} is {int(accepted.max())}, the model has {classes} classes")
        if accepted is not None and labels is not None:
            images.accepted = None  # pyright: ignore[reportAttributeAccessIssue]  # the file has the last word
        images.labels = torch.tensor([found.get(image, UNKNOWN) for image in images.ids], dtype=torch.int64)
        return images

    def _class_index(self, classes: int, class_names: tuple[str, ...] | None) -> dict[str, int]:
        names = class_names or ()
        index = {name.replace(" ", "_"): position for position, name in enumerate(names)}
        index |= {name: position for position, name in enumerate(names)}
        return {**imagenet_class_index(), **index} if classes == 1000 else index


def _labels(images: ImageSet, labels: Path | None, index: Mapping[str, int], classes: int) -> dict[str, int]:
    """Class by identifier: from the file, else as the place states it, else from class folders."""
    if labels is not None:
        return labels_from_file(labels, images, index)
    if bool((images.labels != UNKNOWN).any()):
        stated = zip(images.ids, images.labels.tolist(), strict=True)
        return {image: label for image, label in stated if label != UNKNOWN}
    return labels_from_folders(images, index, classes)


def _folder_names(images: ImageSet, classes: int) -> list[str]:
    """The class folders' names, by class index, "" for a class without one; [] where folders are no classes."""
    names = [""] * classes
    for image, label in zip(images.ids, images.labels.tolist(), strict=True):
        if label >= 0:
            names[label] = image.partition("/")[0]
    known = [name for name in names if name]
    return names if len(set(known)) == len(known) else []
