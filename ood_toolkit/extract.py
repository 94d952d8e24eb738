"""THE loop over data: every image is decoded once and goes through the model once, into the store."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ood_toolkit.datasets import ImageSet
from ood_toolkit.detectors import LiveDetector
from ood_toolkit.outputs import NaNRows, Outputs
from ood_toolkit.store import STORE_VERSION, Shard, Store

if TYPE_CHECKING:
    from PIL.Image import Image

    from ood_toolkit.models import Classifier

Progress = Callable[[int, int, str], None]
"""Called with (images done, images to do, name of the set)."""

_OUTPUTS = "outputs"


def silent(done: int, total: int, name: str) -> None:
    """A progress callback that says nothing."""


@dataclass(frozen=True)
class Extracted:
    """What one pass over an image set left behind.

    Args:
        outputs: one row per readable image.
        rows: (N,) the image's row in its set, for each row of `outputs`.
        live: scores of the live detectors, by spec, in the order of `outputs`.
        unreadable: reason by image id, for the images that were left out.
        gaps: taps that the model cannot give, with the reason.
        computed: how many images went through the model now; 0 if all came from the store.
        seconds: what that took.
    """

    outputs: Outputs
    rows: Tensor
    live: Mapping[str, Tensor]
    unreadable: Mapping[str, str]
    gaps: Mapping[str, str]
    computed: int
    seconds: float


@dataclass(frozen=True)
class Extractor:
    """How images go through a model, and where the results are kept.

    Args:
        cache: folder of all stores.
        batch_size: images per forward pass.
        workers: processes that decode images; 0 decodes in this one.
        dtype: how logits, features and taps are kept: float32, float16 or bfloat16.
        strict: an unreadable image is an error, instead of being named, skipped and counted.
        progress: told how far the pass is.
    """

    cache: Path
    batch_size: int = 64
    workers: int = 0
    dtype: torch.dtype = torch.float32
    strict: bool = False
    progress: Progress = field(default=silent)

    def extract(
        self,
        classifier: "Classifier",
        transform: Callable[["Image"], Tensor],
        transform_name: str,
        images: ImageSet,
        live: Sequence[LiveDetector] = (),
    ) -> Extracted:
        """Outputs of `classifier` on all images, and the scores of live detectors, from the store where it has them.

        What is missing is computed in one pass: the image is decoded once, the model runs once forward, and once
        more forward and backward for each live detector. Taps are kept one by one: a run that asks for others
        computes those alone.

        Args:
            classifier: the model; its weights are part of the store's key.
            transform: PIL image → (3, H, W) tensor, uint8 or float in [0, 1].
            transform_name: says what the transform does; part of the store's key.
            images: what to run.
            live: fitted live detectors.

        Raises:
            ValueError: no image could be read; `strict` and one could not; the model gives NaN for some.
        """
        started = time.perf_counter()
        store = self._store(classifier, transform_name, images)
        taps = [tap for tap in classifier.taps if tap not in store.notes]
        groups: dict[str, str | LiveDetector] = {_OUTPUTS: ""}
        groups |= {_tap_key(tap): tap for tap in taps} | {_live_key(d): d for d in live}
        computed = self._fill(store, classifier, transform, images, groups)
        unreadable = store.unreadable(_OUTPUTS)
        for row, why in sorted(unreadable.items()):
            if self.strict:
                raise ValueError(f"image {images.ids[row]!r} cannot be read: {why}")
        kept = torch.tensor([row for row in range(len(images)) if row not in unreadable], dtype=torch.int64)
        if not len(kept):
            raise ValueError(f"none of the {len(images)} images of {images.name!r} can be read")
        columns = store.columns(_OUTPUTS)
        outputs = Outputs.mapped(
            logits=columns["logits"],
            features=columns["features"],
            labels=images.labels,
            head=classifier.head.to("cpu"),
            taps={tap: store.columns(_tap_key(tap))[_tap_key(tap)] for tap in taps if tap not in store.notes},
        )
        scores = {d.spec: store.columns(_live_key(d))[_live_key(d)] for d in live}
        if unreadable:
            outputs = outputs.rows(kept)
            scores = {spec: score[kept] for spec, score in scores.items()}
        return Extracted(
            outputs=outputs,
            rows=kept,
            live=scores,
            unreadable={images.ids[row]: why for row, why in unreadable.items()},
            gaps={tap: why for tap, why in store.notes.items() if tap in classifier.taps},
            computed=computed,
            seconds=time.perf_counter() - started,
        )

    def _store(self, classifier: "Classifier", transform_name: str, images: ImageSet) -> Store:
        identity = {
            "weights": classifier.with_taps(()).fingerprint(),
            "transform": transform_name,
            "images": images.fingerprint,
            "dtype": str(self.dtype),
            "amp": str(getattr(classifier, "amp", None)),
        }
        key = hashlib.sha256(json.dumps([STORE_VERSION, identity], sort_keys=True).encode()).hexdigest()[:24]
        return Store(self.cache / key, len(images), identity)

    def _fill(
        self,
        store: Store,
        classifier: "Classifier",
        transform: Callable[["Image"], Tensor],
        images: ImageSet,
        groups: Mapping[str, str | LiveDetector],
    ) -> int:
        """Computes what the store lacks; returns how many images that took."""
        for group in groups:
            # an earlier run was cut off: believe only what its checksums vouch for
            if not store.sealed(group):
                store.verify(group)
        pending = self._pending(store, groups)
        computed = self._compute(store, classifier, transform, images, groups, pending) if pending else 0
        for group in groups:
            if not store.sealed(group):
                store.seal(group)
        return computed

    def _compute(
        self,
        store: Store,
        classifier: "Classifier",
        transform: Callable[["Image"], Tensor],
        images: ImageSet,
        groups: Mapping[str, str | LiveDetector],
        pending: Mapping[int, Sequence[str]],
    ) -> int:
        """One pass over the images of the pending shards."""
        shards = [shard for shard in store.shards if shard.number in pending]
        total, done = sum(len(shard.rows) for shard in shards), 0
        missing = {group for wanted in pending.values() for group in wanted}
        model = classifier.with_taps([g for key, g in groups.items() if key in missing and isinstance(g, str) and g])
        plain = classifier.with_taps(())
        self.progress(0, total, images.name)
        for shard, batches in self._by_shard(shards, images, transform, classifier.device):
            wanted = {group: groups[group] for group in pending[shard.number]}
            parts: dict[str, list[tuple[list[int], dict[str, Tensor]]]] = {group: [] for group in wanted}
            unreadable: dict[int, str] = {}
            for batch in batches:
                unreadable |= batch.unreadable
                if batch.rows:
                    for group, columns in self._columns(wanted, model, plain, batch, images).items():
                        parts[group].append((batch.rows, columns))
                done += len(batch.rows) + len(batch.unreadable)
                self.progress(done, total, images.name)
            store.note(model.tap_gaps)
            for group, pieces in parts.items():
                store.write(group, shard, _assemble(shard, pieces) if pieces else {}, unreadable)
        return total

    def _pending(self, store: Store, groups: Mapping[str, object]) -> dict[int, list[str]]:
        """Groups that are not whole, by shard number."""
        done = {group: store.done(group) for group in groups}
        found = {shard.number: [g for g in groups if shard.number not in done[g]] for shard in store.shards}
        return {number: missing for number, missing in found.items() if missing}

    def _columns(
        self,
        wanted: Mapping[str, str | LiveDetector],
        model: "Classifier",
        plain: "Classifier",
        batch: "_Batch",
        images: ImageSet,
    ) -> dict[str, dict[str, Tensor]]:
        """Columns of every wanted group for one batch; a tap that the model cannot give has none."""
        found = {
            group: {group: kind(plain, batch.pixels).double().cpu()}
            for group, kind in wanted.items()
            if isinstance(kind, LiveDetector)
        }
        if len(found) == len(wanted):
            return found
        try:
            outputs = model(batch.pixels)
        except NaNRows as error:
            names = [images.ids[batch.rows[row]] for row in error.rows]
            raise ValueError(
                f"the model gives NaN {error.what} for {len(names)} images of {images.name!r}, first {names[:3]}; "
                "check the weights, the normalisation and the AMP dtype"
            ) from None
        kept = {_tap_key(tap): {_tap_key(tap): value} for tap, value in outputs.taps.items()}
        kept[_OUTPUTS] = {"logits": outputs.logits, "features": outputs.features}
        for group in wanted:
            if group in kept:
                found[group] = {name: column.to("cpu", self.dtype) for name, column in kept[group].items()}
        return found

    def _by_shard(
        self, shards: Sequence[Shard], images: ImageSet, transform: Callable[["Image"], Tensor], device: torch.device
    ) -> Iterator[tuple[Shard, Iterator["_Batch"]]]:
        plan = [
            (shard, list(shard.rows[start : start + self.batch_size]))
            for shard in shards
            for start in range(0, len(shard.rows), self.batch_size)
        ]
        loader = iter(
            torch.utils.data.DataLoader(
                _Decoded(images, transform),
                batch_sampler=[rows for _, rows in plan],  # pyright: ignore
                num_workers=self.workers,
                collate_fn=_collate,
                pin_memory=device.type == "cuda",
                prefetch_factor=4 if self.workers else None,
            )
        )
        for shard in shards:
            count = sum(1 for planned, _ in plan if planned is shard)
            yield shard, (replace(b, pixels=b.pixels.to(device, non_blocking=True)) for b in _take(loader, count))


@dataclass(frozen=True)
class _Batch:
    rows: list[int]
    pixels: Tensor
    unreadable: dict[int, str]

    def pin_memory(self) -> "_Batch":
        return replace(self, pixels=self.pixels.pin_memory())


class _Decoded(torch.utils.data.Dataset):
    """Decodes and transforms; a broken image becomes its reason instead of an exception."""

    def __init__(self, images: ImageSet, transform: Callable[["Image"], Tensor]) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[int, Tensor | str]:
        try:
            image = self.images.open(row)
        except Exception as error:  # Pillow's plugins raise whatever a broken file makes them stumble over
            return row, str(error) or type(error).__name__
        return row, self.transform(image)


def _collate(items: list[tuple[int, Tensor | str]]) -> _Batch:
    good = [(row, pixels) for row, pixels in items if isinstance(pixels, Tensor)]
    bad = {row: reason for row, reason in items if isinstance(reason, str)}
    pixels = torch.stack([pixels for _, pixels in good]) if good else torch.empty(0)
    return _Batch([row for row, _ in good], pixels, bad)


def _take(loader: Iterator[_Batch], count: int) -> Iterator[_Batch]:
    for _ in range(count):
        yield next(loader)


def _assemble(shard: Shard, pieces: list[tuple[list[int], dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Whole columns of a shard; rows of unreadable images stay 0."""
    rows = torch.tensor([row - shard.start for part, _ in pieces for row in part])
    columns = {}
    for name, sample in pieces[0][1].items():
        column = sample.new_zeros((len(shard.rows), *sample.shape[1:]))
        column[rows] = torch.cat([part[name] for _, part in pieces])
        columns[name] = column
    return columns


def _tap_key(spec: str) -> str:
    return f"tap_{hashlib.sha256(spec.encode()).hexdigest()[:16]}"


def _live_key(detector: LiveDetector) -> str:
    digest = hashlib.sha256(repr(detector).encode())
    state: dict[str, Any] = detector.state_dict()
    for name in sorted(state):
        digest.update(name.encode() + state[name].detach().cpu().contiguous().numpy().tobytes())
    return f"live_{digest.hexdigest()[:16]}"
