"""Frames of short videos, each an image of its own: the perturbation sequences of ImageNet-P."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ood_toolkit.datasets.fingerprints import Fingerprinted, stamp
from ood_toolkit.outputs import UNKNOWN

if TYPE_CHECKING:
    from PIL.Image import Image

VIDEO_SUFFIX = ".mp4"


class VideoFrames(Fingerprinted):
    """Every frame of the videos below a folder, video by video. Needs `pip install av`.

    Frames are called `<path of the video>#<number>`. A video is decoded as a whole and the last one is kept, so that
    reading in order decodes each once. Their pixels may differ in the last bit from those of another decoder.

    Args:
        root: what identifiers are relative to.
        within: folder below it; "" is all of it.
        name: how records call the set.

    Raises:
        ValueError: the package is missing, the folder holds no video, or a video is damaged.
    """

    def __init__(self, root: Path, *, within: str = "", name: str) -> None:
        self.root = root
        self.name = name
        videos = sorted(
            path.relative_to(root).as_posix()
            for path in (root / within).rglob(f"*{VIDEO_SUFFIX}")
            if path.is_file() and not path.name.startswith(".")
        )
        if not videos:
            raise ValueError(f"{str(root / within)!r} holds no {VIDEO_SUFFIX} video")
        self._frames = [(video, number) for video in videos for number in range(_count(root / video))]
        self._videos = videos
        self._kept: tuple[str, list[Image]] | None = None
        self.ids: Sequence[str] = [f"{video}#{number:02d}" for video, number in self._frames]
        self.labels = torch.full((len(self.ids),), UNKNOWN)

    def __len__(self) -> int:
        return len(self.ids)

    def _hash(self) -> str:
        """SHA-256 over the folder and the videos' paths, sizes and times."""
        digest = hashlib.sha256(f"{self.root.resolve()}\n".encode("utf-8", "surrogateescape"))
        for video in self._videos:
            digest.update(stamp(video, (self.root / video).stat()))
        return digest.hexdigest()

    def open(self, row: int) -> "Image":
        """The frame in RGB."""
        video, number = self._frames[row]
        if self._kept is None or self._kept[0] != video:
            self._kept = video, _decode(self.root / video)
        frames = self._kept[1]
        if number >= len(frames):
            raise ValueError(f"{video} has {len(frames)} frames, not the {number + 1} that it states")
        return frames[number]


def _count(path: Path) -> int:
    av, errors = _package(path)
    try:
        with av.open(str(path)) as container:
            stated = container.streams.video[0].frames
    except (errors, IndexError) as error:
        raise ValueError(f"video {str(path)!r} cannot be read: {error}") from None
    return stated or len(_decode(path))


def _decode(path: Path) -> "list[Image]":
    av, errors = _package(path)
    try:
        with av.open(str(path)) as container:
            return [frame.to_image() for frame in container.decode(video=0)]
    except errors as error:
        raise ValueError(f"video {str(path)!r} cannot be read: {error}") from None


def _package(path: Path) -> tuple[Any, Any]:
    try:
        import av  # pyright: ignore
        from av.error import FFmpegError  # pyright: ignore
    except ImportError:
        raise ValueError(f"reading {str(path)!r} needs the package av: pip install av") from None
    return av, FFmpegError
