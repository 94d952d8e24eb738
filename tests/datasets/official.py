"""Small sets with the folder and file names of the published ones, and the same images in other layouts."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

A_CLASSES = ("n01498041", "n01531178", "n07753592")
NAMES = (
    "0.000116_digital clock _ digital clock_0.865662.jpg",
    "0.041_manhole cover ¦ l'œuf (ü) #7_0.5.jpg",
    "0.9_a, b & c=d;e%20_0.1.jpg",
)


def jpeg(path: Path, seed: int, mode: str = "RGB") -> None:
    """10 × 12 pixels of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (12, 10, 4), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.frombytes("CMYK", (10, 12), noise.tobytes()) if mode == "CMYK" else Image.fromarray(noise[:, :, :3])
    image.convert(mode).save(path, format="JPEG")


def imagenet_a(root: Path) -> Path:
    """`imagenet-a` with three classes, three images each, one grey and one CMYK."""
    folder = root / "imagenet-a"
    modes = iter(("RGB", "L", "CMYK") + ("RGB",) * 6)
    for number, (wnid, name) in enumerate((w, n) for w in A_CLASSES for n in NAMES):
        jpeg(folder / wnid / name, number, next(modes))
    (folder / "README.txt").write_text("This is ImageNet-A\n")
    (folder / A_CLASSES[0] / "._hidden.jpg").write_bytes(b"no image")
    return folder


def as_tar(folder: Path, target: Path, *, mode: str = "w", top: str | None = None) -> Path:
    """The folder in a tar, as `tar cf set.tar set/` makes it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, mode) as tar:  # pyright: ignore
        tar.add(folder, arcname=folder.name if top is None else top)
    return target


def as_shards(folder: Path, target: Path, labels: Mapping[str, int], *, per_shard: int, field: str) -> list[Path]:
    """Webdataset shards: keys s0000000, …, the class in `cls` or `json`, the original path in `json`."""
    target.mkdir(parents=True)
    files = sorted(labels)
    shards = []
    for start in range(0, len(files), per_shard):
        shard = target / f"{start // per_shard}.tar"
        shards.append(shard)
        with tarfile.open(shard, "w") as tar:
            for number, name in enumerate(files[start : start + per_shard], start):
                about = {"path": name} | ({"label": labels[name]} if field == "json" else {})
                _add(tar, f"s{number:07d}.jpg", (folder / name).read_bytes())
                _add(tar, f"s{number:07d}.json", json.dumps(about).encode())
                if field == "cls":
                    _add(tar, f"s{number:07d}.cls", str(labels[name]).encode())
    return shards


def train_tar(folder: Path, target: Path) -> Path:
    """As ILSVRC2012_img_train.tar: a tar of each class, whose images have no folder; in an order of its own."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w") as outer:
        for known in sorted(folder.iterdir(), reverse=True):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as inner:
                for path in sorted(known.iterdir(), reverse=True):
                    inner.add(path, arcname=path.name)
            _add(outer, f"{known.name}.tar", buffer.getvalue())
    return target


def tar_of(target: Path, members: Sequence[tuple[str | tarfile.TarInfo, bytes]], mode: str = "w") -> Path:
    """A tar with exactly these members, whatever their names and kinds."""
    with tarfile.open(target, mode) as tar:  # pyright: ignore
        for member, content in members:
            _add(tar, member, content)
    return target


def _add(tar: tarfile.TarFile, member: str | tarfile.TarInfo, content: bytes) -> None:
    info = tarfile.TarInfo(member) if isinstance(member, str) else member
    info.size = len(content) if info.isreg() else 0
    tar.addfile(info, io.BytesIO(content))
