"""Which classes a set shows: WordNet ids and their positions among the 1000 of ImageNet-1k."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

CLASS_LISTS = ("imagenet1k", "imagenet_a", "imagenet_o", "imagenet_r")
FOLDER_MAPS = ("objectnet", "domainnet")


@cache
def class_list(name: str) -> Mapping[str, int]:
    """WordNet id → ImageNet-1k index, in the order of the ids, which is the order of class folders and of the mask.

    >>> list(class_list("imagenet_a").items())[:2]
    [('n01498041', 6), ('n01531178', 11)]
    """
    if name not in CLASS_LISTS:
        raise ValueError(f"no class list is named {name!r}; known: {', '.join(CLASS_LISTS)}")
    lines = Path(__file__).with_name(f"{name}_classes.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return MappingProxyType({wnid: int(index) for wnid, index, _ in rows})


@cache
def folder_map(name: str) -> Mapping[str, tuple[int, ...]]:
    """Class folder → the ImageNet-1k indices that are right for its images; folders outside ImageNet are not in it.

    >>> folder_map("objectnet")["alarm_clock"]
    (409, 530)
    """
    if name not in FOLDER_MAPS:
        raise ValueError(f"no folder map is named {name!r}; known: {', '.join(FOLDER_MAPS)}")
    lines = Path(__file__).with_name(f"{name}_folders.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return MappingProxyType({folder: tuple(int(index) for index in known.split(",")) for folder, known in rows})


@cache
def class_indices(name: str) -> tuple[int, ...]:
    """The ImageNet-1k indices of a class list or folder map, ascending.

    >>> len(class_indices("objectnet"))
    125
    """
    if name in FOLDER_MAPS:
        return tuple(sorted({index for known in folder_map(name).values() for index in known}))
    return tuple(sorted(class_list(name).values()))


@cache
def imagenet_names() -> tuple[str, ...]:
    """A short name for each of the 1000 ImageNet-1k classes, by index: the first of its WordNet lemmas.

    >>> imagenet_names()[6]
    'stingray'
    """
    lines = Path(__file__).with_name("imagenet1k_classes.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return tuple(name.partition(",")[0] for _, _, name in rows)


@cache
def validation_labels() -> tuple[int, ...]:
    """ImageNet-1k indices of the 50,000 validation images: entry 0 belongs to ILSVRC2012_val_00000001.JPEG."""
    file = Path(__file__).with_name("imagenet1k_validation_labels.txt")
    lines = file.read_text(encoding="ascii").splitlines()
    return tuple(int(number) for line in lines if not line.startswith("#") for number in line.split())
