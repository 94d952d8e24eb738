"""The far-OOD table of Huang & Li (MOS, CVPR 2021): iNaturalist, SUN, Places and Textures against ImageNet-1k."""

from collections.abc import Iterator
from pathlib import Path

import torch

from ood_toolkit.benchmarks.imagenet import CLASSES, Learning, imagenet_views, learned, validation
from ood_toolkit.benchmarks.suite import Part, Suite, Task
from ood_toolkit.datasets import ImageSet, SubsetImages
from ood_toolkit.datasets.catalogue import entry
from ood_toolkit.datasets.locate import find, how_to_get, open_set

MOS = "mos-imagenet"
MOS_SETS = ("inaturalist", "sun", "places", "textures")
_LISTS = "data_lists"
_SELECTED = 10_000
_VALIDATION = 50_000


def mos_suite(root: Path, *, learning: Learning | None = None) -> Suite:
    """iNaturalist, SUN, Places (10,000 images each) and all 47 classes of Textures against ImageNet validation.

    Unlike `openood-imagenet`, and like the paper, Textures keeps the four classes that overlap ImageNet, and every
    validation image counts. Where a whole SUN397 or Places365 lies in place of the selection, the authors' list in
    `data_lists/<set>_selected_list.txt` chooses the images.

    Args:
        root: the data root.
        learning: what methods learn from; with "none", ImageNet train or ImageNetV2 every validation image is scored.

    Raises:
        ValueError: no validation images, or none of the four sets.
    """
    known = validation(root, range(CLASSES))
    if known is None:
        raise ValueError(f"{MOS} needs ImageNet validation images. {how_to_get(entry('imagenet-1k'))}")
    there = [name for name in MOS_SETS if find(entry(name), root) is not None]
    absent = [name for name in MOS_SETS if name not in there]
    if not there:
        raise ValueError(f"none of {', '.join(absent)} lies below {str(root)!r}. {how_to_get(entry(absent[0]))}")
    chosen = learned(root, known, range(CLASSES), learning or Learning())
    rows = torch.arange(len(known.images))
    rows = rows[~torch.isin(rows, chosen.withheld)]
    source = "ImageNet validation" if known.official else "ImageNetV2 in place of validation"
    inside = Part("imagenet-1k", known.images, rows, source)
    outside = {name: _selected(root, name, open_set(entry(name), root, every_folder=True)) for name in there}
    deviations = [f"{', '.join(absent)} left out, because not found"] if absent else []
    deviations += [] if known.official else ["ImageNetV2 matched-frequency stands in for ImageNet validation"]
    if known.official and len(rows) != _VALIDATION:
        deviations.append(f"{len(rows):,} validation images are scored, {_VALIDATION:,} were")
    deviations += [
        f"{name} has {len(images):,} images here, {entry(name).images:,} were published"
        for name, images in outside.items()
        if len(images) != entry(name).images
    ]
    sizes = ", ".join(f"{name} {len(images):,}" for name, images in outside.items())
    caption = (
        f"ImageNet-1k against {sizes} as in the MOS paper; OOD is positive, all 1000 logits count; {len(rows):,} ID "
        "images. The paper squashes images to the model's size and gives AUROC, FPR at 95% of ID accepted (FPR95-ID) "
        "and AUPR by average precision."
    )
    if deviations:
        caption += f" Not the published protocol: {'; '.join(deviations)}."
    return Suite(
        name=MOS,
        caption=caption,
        tasks=[
            *(Task("anomaly", name, inside, Part(name, images)) for name, images in outside.items()),
            Task("misclassification", "imagenet-1k", inside),
            Task("calibration", "imagenet-1k", inside),
        ],
        fit=chosen.fit,
        calibration=chosen.calibration,
        protocol="mos-like" if deviations else "mos",
        notes=[f"{name}: {fault}" for name in there for fault in entry(name).faults],
        views=imagenet_views(),
    )


def _selected(root: Path, name: str, images: ImageSet) -> ImageSet:
    """The authors' 10,000 images, where more lie there and their list does too."""
    file = root / _LISTS / f"{name}_selected_list.txt"
    if len(images) <= _SELECTED or name == "textures" or not file.is_file():
        return images
    lines = file.read_text(encoding="utf-8").splitlines()
    wanted = {line.rpartition(" ")[0] for line in lines if line.strip()}
    rows = [row for row, image in enumerate(images.ids) if not wanted.isdisjoint(_tails(image))]
    if len(rows) != len(wanted):
        raise ValueError(f"{file} names {len(wanted):,} images of {name}, {len(rows):,} of them are there")
    return SubsetImages(images, rows)


def _tails(path: str) -> Iterator[str]:
    """The path, and what is left of it without its first folder, first two folders, and so on."""
    while path:
        yield path
        path = path.partition("/")[2]
