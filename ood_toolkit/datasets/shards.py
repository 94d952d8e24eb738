"""Images in webdataset shards: tar files whose members belong together by name."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ood_toolkit.datasets.archives import Member, decode, read_member, tar_members
from ood_toolkit.datasets.fingerprints import Fingerprinted, stamp
from ood_toolkit.outputs import UNKNOWN

if TYPE_CHECKING:
    from PIL.Image import Image

_IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "img")
_LABEL_KEYS = ("label", "cls", "class")
_PATH_KEYS = ("path", "filename", "file_name")


@dataclass(frozen=True)
class _Sample:
    id: str
    label: int
    shard: Path
    member: Member


class ShardImages(Fingerprinted):
    """The samples of webdataset shards, in order of their identifiers.

    Members whose names agree up to the first dot of the file name are one sample: an image (jpg, jpeg, png, webp,
    bmp, ppm, img) with its class in `cls` (a number) or in `json` (under "label", "cls" or "class"). A sample's
    identifier is the path that its json states, else the shard's stem and the key. Shards are read at random by
    offset, by any number of processes at once.

    Args:
        shards: tar files; see `shard_paths`.
        name: how records call the set.
        classes: maps the shards' class numbers to the labels that count, e.g. the ImageNet-1k indices of a set of
            200 classes; as they are by default.
        labels: label by identifier, instead of what the shards say.

    Raises:
        ValueError: no shards or no images, a damaged shard, two images in a sample, or a class out of range.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        *,
        name: str,
        classes: Sequence[int] | None = None,
        labels: Mapping[str, int] | None = None,
    ) -> None:
        if not shards:
            raise ValueError(f"webdataset {name!r} has no shards")
        self.shards = list(shards)
        self.name = name
        samples = sorted((s for shard in shards for s in _samples(shard, classes)), key=lambda sample: sample.id)
        if not samples:
            raise ValueError(f"the {len(shards)} shards of {name!r} hold no image")
        self._samples = samples
        self.ids: Sequence[str] = [sample.id for sample in samples]
        if len(set(self.ids)) < len(samples):
            twice = next(a for a, b in zip(self.ids, self.ids[1:], strict=False) if a == b)
            raise ValueError(f"the shards of {name!r} hold two samples called {twice!r}")
        known = [sample.label if labels is None else labels.get(sample.id, UNKNOWN) for sample in samples]
        self.labels = torch.tensor(known, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._samples)

    def _hash(self) -> str:
        """SHA-256 over the shards' names, sizes and times."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(stamp(shard.name, shard.stat()))
        return digest.hexdigest()

    def open(self, row: int) -> "Image":
        """The image in RGB."""
        sample = self._samples[row]
        return decode(read_member(sample.shard, sample.member))


def shard_paths(pattern: Path | str) -> list[Path]:
    """The shards that a folder holds, or that a pattern with one number range `{0..3}` or `{000..127}` means.

    Raises:
        ValueError: the folder holds no .tar, or a shard of the range is missing.
    """
    text = str(pattern)
    span = re.search(r"\{(\d+)\.\.(\d+)\}", text)
    if span:
        first, last = span.groups()
        numbers = range(int(first), int(last) + 1)
        paths = [Path(text[: span.start()] + str(n).zfill(len(first)) + text[span.end() :]) for n in numbers]
    else:
        paths = sorted(Path(text).glob("*.tar"), key=_by_number) if Path(text).is_dir() else [Path(text)]
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        raise ValueError(f"shards {text!r}: {f'{str(missing[0])!r} does not exist' if missing else 'no .tar file'}")
    return paths


def is_shard(path: Path) -> bool:
    """The tar is a webdataset shard: some image in it has a `cls` or `json` beside it."""
    fields = _grouped(path).values()
    return any({"cls", "json"} & set(group) and set(_IMAGE_FIELDS) & set(group) for group in fields)


def _by_number(path: Path) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", path.stem)], path.name


def _grouped(shard: Path) -> dict[str, dict[str, Member]]:
    groups: dict[str, dict[str, Member]] = {}
    for member in tar_members(shard):
        folder, slash, file = member.name.rpartition("/")
        key, _, field = file.partition(".")
        if key and field:
            groups.setdefault(folder + slash + key, {})[field.lower()] = member
    return groups


def _samples(shard: Path, classes: Sequence[int] | None) -> list[_Sample]:
    samples = []
    for key, fields in _grouped(shard).items():
        images = [fields[field] for field in _IMAGE_FIELDS if field in fields]
        if len(images) > 1:
            raise ValueError(f"shard {str(shard)!r}: sample {key!r} has {len(images)} images; which one counts?")
        if images:
            about = _about(shard, key, fields)
            label = _label(shard, key, fields, about)
            if classes is not None and label != UNKNOWN:
                if not 0 <= label < len(classes):
                    raise ValueError(f"shard {str(shard)!r}: class {label} of {key!r} is not below {len(classes)}")
                label = classes[label]
            path = next((about[name] for name in _PATH_KEYS if isinstance(about.get(name), str)), None)
            samples.append(_Sample(path or f"{shard.stem}/{key}", label, shard, images[0]))
    return samples


def _about(shard: Path, key: str, fields: Mapping[str, Member]) -> dict[str, Any]:
    if "json" not in fields:
        return {}
    try:
        about = json.loads(read_member(shard, fields["json"]))
    except ValueError as error:
        raise ValueError(f"shard {str(shard)!r}: the json of {key!r} cannot be read: {error}") from None
    return about if isinstance(about, dict) else {}


def _label(shard: Path, key: str, fields: Mapping[str, Member], about: Mapping[str, Any]) -> int:
    text: Any = next((about[name] for name in _LABEL_KEYS if name in about), None)
    if "cls" in fields:
        text = read_member(shard, fields["cls"]).decode("ascii", "replace").strip()
    if text is None:
        return UNKNOWN
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ValueError(f"shard {str(shard)!r}: the class of {key!r} is {text!r}, not a number") from None
