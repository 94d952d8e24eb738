"""ImageNet classes under another distribution: ImageNetV2, -R, -Sketch, -C, Stylized-ImageNet, one set at a time."""

from pathlib import Path

import torch

from ood_toolkit.benchmarks.imagenet import CLASSES, STAND_IN, Learning, imagenet_views, learned, validation
from ood_toolkit.benchmarks.suite import ClassMask, Part, Suite, Task
from ood_toolkit.datasets.catalogue import CatalogueEntry, catalogue, entry
from ood_toolkit.datasets.classes import class_list
from ood_toolkit.datasets.combined import below
from ood_toolkit.datasets.locate import open_set

_READ = ("wnid", "wnid-deep", "index")


def shift_suites() -> tuple[str, ...]:
    """The names that `shift_suite` knows."""
    return tuple(
        name
        for name, known in catalogue().items()
        if known.use == "shift" and known.labels in _READ and known.class_list is not None and name != "imagenet-a"
    )


def shift_suite(name: str, root: Path, *, masked: bool = True, learning: Learning | None = None) -> Suite:
    """Misclassification and calibration on one shifted set, beside the validation images of the same classes.

    Args:
        name: of the set; for ImageNet-C with corruption and severity, e.g. "imagenet-c-blur/defocus_blur/3".
        root: the data root.
        masked: cut the logits to the classes of the set, where it has fewer than 1000 (ImageNet-R: 200).
        learning: what methods learn from; from ImageNetV2 only where that is not itself scored.

    Raises:
        ValueError: unknown name, or data that is absent.
    """
    set_name, _, folder = name.partition("/")
    known = entry(set_name)
    if known.name not in shift_suites():
        raise ValueError(f"no suite is named {name!r}; known shifted sets: {', '.join(shift_suites())}")
    if known.labels == "wnid-deep" and not folder:
        raise ValueError(f"say which corruption and severity, e.g. {known.name}/<corruption>/3")
    images = open_set(known, root)
    images = below(images, folder) if folder else images
    shifted = Part(images.name, images, None, "")
    clean, fit, calibration = _clean(known, root, learning or Learning(), masked=masked)
    mask = _mask(known) if masked else None
    parts = [shifted, clean] if clean is not None else [shifted]
    tasks = [Task(kind, part.name, part, None, mask) for kind in ("misclassification", "calibration") for part in parts]
    sizes = " and ".join(f"{len(part):,} images of {part.name}" for part in parts)
    view = f"logits cut to its {len(mask.classes)} classes" if mask else "all 1000 logits count"
    faults = "".join(f" {fault}" for fault in known.faults)
    return Suite(
        name=images.name,
        caption=f"{known.title}: {known.about} {sizes}; {view}; a wrong prediction is positive.{faults}",
        tasks=tasks,
        fit=fit,
        calibration=calibration,
        protocol="masked" if mask else "full-1000way",
        notes=known.faults,
        views=imagenet_views("imagenet-1k", _mask(known)),
    )


def _clean(
    known: CatalogueEntry, root: Path, learning: Learning, *, masked: bool
) -> tuple[Part | None, Part | None, Part | None]:
    """Validation images of the same classes, and what is learned from; ImageNetV2 is neither where it is scored."""
    classes = set(class_list(known.class_list or "imagenet1k").values()) if masked else set(range(CLASSES))
    images = validation(root, classes)
    if images is not None and not images.official:
        images = None
    if known.name == STAND_IN and learning.source in ("auto", "v2"):
        learning = Learning(source="validation" if images else "none", seed=learning.seed)
    chosen = learned(root, images, classes, learning)
    if images is None:
        return None, chosen.fit, chosen.calibration
    rows = torch.arange(len(images.images))
    part = Part("imagenet-1k", images.images, rows[~torch.isin(rows, chosen.withheld)], f"{len(classes)} classes")
    return part, chosen.fit, chosen.calibration


def _mask(known: CatalogueEntry) -> ClassMask | None:
    classes = list(class_list(known.class_list or "imagenet1k").values())
    return ClassMask(known.name, torch.tensor(classes)) if len(classes) < CLASSES else None
