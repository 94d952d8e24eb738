"""Outputs of models on sets of images, from the store; what it lacks is computed in one pass."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ood_toolkit.batches import Loading, Transform
from ood_toolkit.datasets import ImageSet
from ood_toolkit.detectors import LiveDetector
from ood_toolkit.one_pass import OUTPUTS, Job, Progress, Target, live_key, run_pass, tap_key
from ood_toolkit.outputs import Outputs
from ood_toolkit.store import STORE_VERSION, Store

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
        transform: Transform,
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
        job = Job(classifier, transform, transform_name, live)
        computed = self.fill([job], [images])
        store = self._store(job, images)
        taps = [tap for tap in classifier.taps if tap not in store.notes]
        unreadable = store.unreadable(OUTPUTS)
        for row, why in sorted(unreadable.items()):
            if self.strict:
                raise ValueError(f"image {images.ids[row]!r} cannot be read: {why}")
        kept = torch.tensor([row for row in range(len(images)) if row not in unreadable], dtype=torch.int64)
        if not len(kept):
            raise ValueError(f"none of the {len(images)} images of {images.name!r} can be read")
        columns = store.columns(OUTPUTS)
        outputs = Outputs.mapped(
            logits=columns["logits"],
            features=columns["features"],
            labels=images.labels,
            head=classifier.head.to("cpu"),
            taps={tap: store.columns(tap_key(tap))[tap_key(tap)] for tap in taps},
        )
        scores = {d.spec: store.columns(live_key(d))[live_key(d)] for d in live}
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

    def fill(self, jobs: Sequence[Job], sets: Sequence[ImageSet]) -> int:
        """Computes what the stores of all models on all sets lack, in one pass, so that `extract` only reads.

        Every image is decoded once for all models, and once transformed for those that share a transform.

        Returns:
            How many images went through models, each counted once per model.

        Raises:
            ValueError: a model gives NaN for some images.
        """
        targets = [self._target(job, images) for images in sets for job in jobs]
        lacking = [target for target in targets if target.pending]
        if lacking:
            run_pass(lacking, Loading(self.batch_size, self.workers), self.progress)
        for target in targets:
            for group in target.groups:
                if not target.store.sealed(group):
                    target.store.seal(group)
        return sum(target.computed for target in lacking)

    def _target(self, job: Job, images: ImageSet) -> Target:
        """The store of a model on a set, and what it lacks."""
        store = self._store(job, images)
        groups: dict[str, str | LiveDetector] = {OUTPUTS: ""}
        groups |= {tap_key(tap): tap for tap in job.classifier.taps if tap not in store.notes}
        groups |= {live_key(detector): detector for detector in job.live}
        for group in groups:
            # an earlier run was cut off: believe only what its checksums vouch for
            if not store.sealed(group):
                store.verify(group)
        done = {group: store.done(group) for group in groups}
        lacks = {shard.number: [g for g in groups if shard.number not in done[g]] for shard in store.shards}
        pending = {number: missing for number, missing in lacks.items() if missing}
        return Target(job, images, store, groups, pending, self.dtype)

    def _store(self, job: Job, images: ImageSet) -> Store:
        identity = {
            "weights": job.classifier.with_taps(()).fingerprint(),
            "transform": job.transform_name,
            "images": images.fingerprint,
            "dtype": str(self.dtype),
            "amp": str(getattr(job.classifier, "amp", None)),
        }
        key = hashlib.sha256(json.dumps([STORE_VERSION, identity], sort_keys=True).encode()).hexdigest()[:24]
        return Store(self.cache / key, len(images), identity)
