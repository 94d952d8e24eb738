"""Which classes a set shows: WordNet ids and their positions among the 1000 of ImageNet-1k."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

CLASS_LISTS = ("imagenet1k", "imagenet_a", "imagenet_o", "imagenet_r")


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
def validation_labels() -> tuple[int, ...]:
    """ImageNet-1k indices of the 50,000 validation images: entry 0 belongs to ILSVRC2012_val_00000001.JPEG."""
    file = Path(__file__).with_name("imagenet1k_validation_labels.txt")
    lines = file.read_text(encoding="ascii").splitlines()
    return tuple(int(number) for line in lines if not line.startswith("#") for number in line.split())
