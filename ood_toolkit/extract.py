"""Outputs of models on sets of images, from the store; what it lacks is computed in one pass."""

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ood_toolkit.batches import Loading, Transform
from ood_toolkit.datasets import ImageSet
from ood_toolkit.detectors import LiveDetector
from ood_toolkit.distributed import ALONE, World
from ood_toolkit.one_pass import OUTPUTS, Job, Progress, Target, live_key, run_pass, tap_key
from ood_toolkit.outputs import Outputs
from ood_toolkit.store import STORE_VERSION, Description, Shard, Store

if TYPE_CHECKING:
    from ood_toolkit.models import Classifier


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
class Filled:
    """What a pass has added to the store of one model on one set.

    Args:
        computed: how many images went through the model.
        seconds: what the set took, with all models that shared the pass.
    """

    computed: int
    seconds: float


@dataclass(frozen=True)
class Extractor:
    """How images go through a model, and where the results are kept.

    Args:
        cache: folder of all stores.
        batch_size: images per forward pass; 0 finds it, see `BatchSize`. Halved where memory runs out.
        workers: processes that decode images; 0 decodes in this one.
        dtype: how logits, features and taps are kept: float32, float16 or bfloat16.
        strict: an unreadable image is an error, instead of being named, skipped and counted.
        progress: told how far the pass is.
        world: the ranks that share the pass; all of them call the same methods with the same arguments.
    """

    cache: Path
    batch_size: int = 64
    workers: int = 0
    dtype: torch.dtype = torch.float32
    strict: bool = False
    progress: Progress = field(default=silent)
    world: World = ALONE

    def extract(
        self,
        classifier: "Classifier",
        transform: Transform,
        transform_name: str,
        images: ImageSet,
        live: Sequence[LiveDetector] = (),
        *,
        name: str = "",
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
            name: what people call the model; for listings of stores.

        Raises:
            ValueError: no image could be read; `strict` and one could not; the model gives NaN for some.
        """
        started = time.perf_counter()
        job = Job(classifier, transform, transform_name, live, name)
        (filled,) = self.fill([job], [images])
        store = self._store(job, images)
        # told by rank 0: another machine may see new files of a shared folder late
        kept = self.world.told(lambda: (store.described(), store.notes, store.unreadable(OUTPUTS)))
        return self.world.each(lambda: self._open(job, images, store, *kept, computed=filled.computed, started=started))

    def _open(
        self,
        job: Job,
        images: ImageSet,
        store: Store,
        described: Mapping[str, Description],
        notes: Mapping[str, str],
        unreadable: Mapping[int, str],
        *,
        computed: int,
        started: float,
    ) -> Extracted:
        """What the store holds after the pass."""
        taps = [tap for tap in job.classifier.taps if tap not in notes]
        for row, why in sorted(unreadable.items()):
            if self.strict:
                raise ValueError(f"image {images.ids[row]!r} cannot be read: {why}")
        readable = torch.ones(len(images), dtype=torch.bool)
        readable[list(unreadable)] = False
        kept = readable.nonzero().flatten()
        if not len(kept):
            raise ValueError(f"none of the {len(images)} images of {images.name!r} can be read")
        columns = store.columns(OUTPUTS, described)
        groups = {tap: tap_key(tap, job.classifier) for tap in taps}
        outputs = Outputs.mapped(
            logits=columns["logits"],
            features=columns["features"],
            labels=images.labels,
            head=job.classifier.head.to("cpu"),
            taps={tap: store.columns(group, described)[group] for tap, group in groups.items()},
            owner=store,
        )
        scores = {d.spec: store.columns(live_key(d), described)[live_key(d)] for d in job.live}
        if unreadable:
            outputs = outputs.rows(kept)
            scores = {spec: score[kept] for spec, score in scores.items()}
        return Extracted(
            outputs=outputs,
            rows=kept,
            live=scores,
            unreadable={images.ids[row]: why for row, why in unreadable.items()},
            gaps={tap: why for tap, why in notes.items() if tap in job.classifier.taps},
            computed=computed,
            seconds=time.perf_counter() - started,
        )

    def fill(self, jobs: Sequence[Job], sets: Sequence[ImageSet]) -> list[Filled]:
        """Computes what the stores of all models on all sets lack, in one pass, so that `extract` only reads.

        Every image is decoded once for all models, and once transformed for those that share a transform.

        Returns:
            What each model did on each set: all models on the first set, then all on the second.

        Raises:
            ValueError: a model gives NaN for some images.
        """
        pairs = [(job, images) for images in sets for job in jobs]
        stores = self.world.each(lambda: [self._store(job, images) for job, images in pairs])
        keys = self.world.gather([store.path.name for store in stores])
        self.world.told(lambda: _require_same(keys, [images.name for _, images in pairs]))
        lacking = self.world.told(
            lambda: [self._lacking(store, job) for store, (job, _) in zip(stores, pairs, strict=True)]
        )
        targets = [
            Target(job, images, store, _groups(job, notes), pending, self.dtype)
            for (job, images), store, (notes, pending) in zip(pairs, stores, lacking, strict=True)
        ]
        self.world.each(lambda: self._compute(targets))
        self.world.told(lambda: self._seal(targets))
        # as long as the slowest rank took
        seconds = map(max, zip(*self.world.gather([target.seconds for target in targets]), strict=True))
        return [Filled(target.computed, taken) for target, taken in zip(targets, seconds, strict=True)]

    def _lacking(self, store: Store, job: Job) -> tuple[dict[str, str], dict[int, list[str]]]:
        """What the store cannot give with the reason, and the groups it lacks by shard number."""
        store.note(job.classifier.tap_gaps)  # what the model is known not to give is worth no pass
        notes = store.notes
        groups = _groups(job, notes)
        for group in groups:
            # an earlier run was cut off: believe only what its checksums vouch for
            if not store.sealed(group):
                store.verify(group)
        return notes, _pending(store, groups)

    def lacking(self, job: Job, images: ImageSet) -> dict[Shard, list[str]]:
        """The groups of columns that a pass would compute, by shard; looked up without touching the store."""
        store = self.seen(job, images)
        pending = _pending(store, _groups(job, {**store.notes, **job.classifier.tap_gaps}))
        return {shard: pending[shard.number] for shard in store.shards if shard.number in pending}

    def _compute(self, targets: Sequence[Target]) -> None:
        """This rank's part of the pass: every `size`-th of all pending shards, whole."""
        work = list(dict.fromkeys((id(t.images), number) for t in targets for number in t.pending))
        mine = set(work[self.world.rank :: self.world.size])
        shares = [
            Target(
                t.job,
                t.images,
                t.store,
                t.groups,
                {n: g for n, g in t.pending.items() if (id(t.images), n) in mine},
                t.dtype,
            )
            for t in targets
        ]

        def progress(done: int, total: int, name: str) -> None:
            self.world.look()
            self.progress(done, total, name)

        shares = [share for share in shares if share.pending]
        if shares:
            run_pass(shares, Loading(self.batch_size, self.workers), progress)
        seconds = {id(share.images): share.seconds for share in shares}
        for target in targets:
            target.seconds = seconds.get(id(target.images), 0.0)

    def _seal(self, targets: Sequence[Target]) -> None:
        for target in targets:
            for group in target.groups:
                if target.store.sealed(group):
                    continue
                torn = target.store.verify(group) if self.world.size > 1 else []
                if torn:
                    raise ValueError(
                        f"{len(torn)} shards of {target.store.path} are not what their rank wrote, first {torn[:3]}; "
                        "is the cache on a disk that all machines see alike? Run again to compute those alone"
                    )
                target.store.seal(group)

    def seen(self, job: Job, images: ImageSet) -> Store:
        """The store of a model on a set, only to look at."""
        return Store.seen(self._place(job, images)[0], len(images))

    def _store(self, job: Job, images: ImageSet) -> Store:
        path, identity = self._place(job, images)
        about = {"images": images.name} | ({"model": job.name} if job.name else {})
        return Store(path, len(images), identity, about)

    def _place(self, job: Job, images: ImageSet) -> tuple[Path, dict[str, str]]:
        """The folder of a store, and what it is of."""
        identity = {
            "weights": job.classifier.with_taps(()).fingerprint(),
            "transform": job.transform_name,
            "images": images.fingerprint,
            "dtype": str(self.dtype),
            "amp": str(getattr(job.classifier, "amp", None)),
        }
        # batch size, workers, memory layout and ranks change the last bits of the pass only;
        # a compiler may also skip roundings of half precision
        if getattr(job.classifier, "compiled", False):
            identity["compiled"] = "True"
        key = hashlib.sha256(json.dumps([STORE_VERSION, identity], sort_keys=True).encode()).hexdigest()[:24]
        return self.cache / key, identity


def _require_same(keys: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    """All ranks must have the same models, transforms and images: the keys of their stores say so."""
    for rank, theirs in enumerate(keys):
        for name, expected, key in zip(names, keys[0], theirs, strict=True):
            if key != expected:
                raise ValueError(
                    f"rank {rank} has another model, transform or copy of {name!r} than rank 0; use one shared "
                    "folder, or copies with the same path and times (rsync -a), and weights from one file"
                )


def _groups(job: Job, notes: Mapping[str, str]) -> dict[str, str | LiveDetector]:
    """All that a job wants, by group of columns, without the taps that are known not to be there."""
    groups: dict[str, str | LiveDetector] = {OUTPUTS: ""}
    groups |= {tap_key(tap, job.classifier): tap for tap in job.classifier.taps if tap not in notes}
    return groups | {live_key(detector): detector for detector in job.live}


def _pending(store: Store, groups: Collection[str]) -> dict[int, list[str]]:
    """The groups that are not whole, by shard number."""
    done = {group: store.done(group) for group in groups}
    lacks = {shard.number: [g for g in groups if shard.number not in done[g]] for shard in store.shards}
    return {number: missing for number, missing in lacks.items() if missing}
