"""The user's own images, wherever they lie: a folder, a tar, webdataset shards, parquet files, or the hub."""

import re
from collections.abc import Mapping
from pathlib import Path

from ood_toolkit.datasets.archives import TarImages
from ood_toolkit.datasets.corrupted import CorruptedImages
from ood_toolkit.datasets.hub import HubImages
from ood_toolkit.datasets.images import FolderImages, ImageSet
from ood_toolkit.datasets.parquet import ParquetImages, parquet_files
from ood_toolkit.datasets.shards import ShardImages, is_shard, shard_paths

HUB = "hub:"
_HUB = re.compile(r"hub:(?P<id>[^@:]+)(@(?P<revision>[^:]+))?(:(?P<split>.+))?")
_CORRUPT = re.compile(r"corrupt:(?P<corruption>\w+)/(?P<severity>\d):(?P<place>.+)")


def open_images(
    place: Path | str, *, name: str = "", class_index: Mapping[str, int] | None = None, classes: int = 0
) -> ImageSet:
    """The images of a place, with labels where the place itself states them (shards, parquet, hub).

    Args:
        place: a folder; a tar, or a folder of tars, or a pattern such as `shards/{000..127}.tar`, plain or webdataset;
            a folder of parquet files; `hub:OWNER/NAME[@REVISION][:SPLIT]`, the split "test" by default; or
            `corrupt:CORRUPTION/SEVERITY:PLACE`, another place under a corruption of ImageNet-C.
        name: how records call the set; the place's last part by default.
        class_index: label by class name, for classes that have names on the hub.
        classes: how many the model has; see `HubImages`.

    Raises:
        ValueError: it does not exist, holds no image, or needs a package that is missing.
    """
    text = str(place)
    corrupt = _CORRUPT.fullmatch(text)
    if corrupt:
        clean = open_images(corrupt["place"], name=name, class_index=class_index, classes=classes)
        return CorruptedImages(clean, corrupt["corruption"], int(corrupt["severity"]), name=name)
    if text.startswith("corrupt:"):
        raise ValueError(f"cannot read {text!r}; write corrupt:CORRUPTION/SEVERITY:PLACE, e.g. corrupt:fog/3:photos")
    if text.startswith(HUB):
        return _on_the_hub(text, name, class_index, classes)
    path = Path(text)
    called = name or re.sub(r"\W*\{.*\}", "", path.stem)
    if path.suffix == ".tar":
        if "{" in text or (path.is_file() and is_shard(path)):
            return ShardImages(shard_paths(text), name=called)
        return TarImages(path, name=called)
    if path.is_dir():
        tars = sorted(path.glob("*.tar"))
        if tars and is_shard(tars[0]):
            return ShardImages(shard_paths(path), name=called)
        if parquet_files(path):
            return ParquetImages(parquet_files(path), name=called)
    return FolderImages(path, name=name)


def _on_the_hub(text: str, name: str, class_index: Mapping[str, int] | None, classes: int) -> HubImages:
    found = _HUB.fullmatch(text)
    if found is None:
        raise ValueError(f"cannot read {text!r}; write hub:OWNER/NAME, hub:OWNER/NAME:SPLIT or hub:OWNER/NAME@REVISION")
    split, revision = found["split"] or "test", found["revision"]
    return HubImages(found["id"], split=split, revision=revision, name=name, class_index=class_index, classes=classes)
