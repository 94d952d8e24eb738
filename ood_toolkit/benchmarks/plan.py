"""What a run would do, without doing it: what is read, computed, fitted, scored and written, and how long it takes."""

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ood_toolkit.benchmarks.lacking import require_calibration_data, require_fit_data
from ood_toolkit.benchmarks.masking import masks_of, seen_through, tap_under
from ood_toolkit.benchmarks.methods import MEMBER_TAP, PASS_TAPS
from ood_toolkit.benchmarks.recording import METRICS_OF
from ood_toolkit.benchmarks.runner import Settings
from ood_toolkit.benchmarks.shared_pass import wanted_of
from ood_toolkit.benchmarks.suite import Suite
from ood_toolkit.calibrators import EnsemblePool
from ood_toolkit.datasets import ImageSet
from ood_toolkit.datasets.combined import JoinedImages, SubsetImages
from ood_toolkit.datasets.sizes import file_bytes
from ood_toolkit.detectors import LiveDetector
from ood_toolkit.extract import Extractor, silent
from ood_toolkit.models import LoadedClassifier
from ood_toolkit.one_pass import Job
from ood_toolkit.store import Store

_FEW = 4
_MOST = 64
"""Images in the shorter and, at most, in the longer timing."""
_PATIENCE = 6.0
"""Seconds that the longer timing may take, where it can be helped."""
_JOURNAL_BYTES = 320
"""Of one shard of one group of columns."""
_RECORD_BYTES = 900
_COLUMN_BYTES = 8
"""Of one image in one column of the score file, at most."""


@dataclass(frozen=True, kw_only=True)
class SetPlan:
    """One set of images to read.

    Args:
        name: of the set.
        images: how many.
        bytes: of their files, or None where the set does not tell.
    """

    name: str
    images: int
    bytes: int | None


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """What one model has to do.

    Args:
        model: its spec.
        images: that go through it now.
        stored: images whose outputs are all in the store already.
        again: images that go through it a second time, for live detectors that are fitted on the first outputs.
        live: detectors that run the model themselves, in either pass.
        store_bytes: that the store will take for it, beside what is there.
    """

    model: str
    images: int
    stored: int
    again: int
    live: tuple[str, ...]
    store_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run would do.

    Args:
        suite: its name.
        protocol: the rules of evaluation.
        sets: image sets, each read once, and once more where a model sees it again.
        parts: description by role and name: "fit", "calibration", "tuning" or "scored".
        models: in the order of the tables, then members and the second opinion.
        fitted: specs by the part they learn from.
        left_out: why a detector that came with "all" will have no scores.
        scored: kind, data set, class mask and images of every task.
        detectors: how many are scored.
        calibrators: how many.
        cache: the store's folder.
        store_bytes: that the store will take, beside what is there.
        free_bytes: on the store's disk.
        out: the run folder.
        out_bytes: that it will take, at most.
        seconds: of the forward pass; 0 where everything is stored.
        how: how that was estimated.
    """

    suite: str
    protocol: str
    sets: tuple[SetPlan, ...]
    parts: Mapping[str, str]
    models: tuple[ModelPlan, ...]
    fitted: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, str]
    scored: tuple[tuple[str, str, str, int], ...]
    detectors: int
    calibrators: int
    cache: Path
    store_bytes: int
    free_bytes: int
    out: Path
    out_bytes: int
    seconds: float
    how: str

    def __str__(self) -> str:
        lines = [f"Plan of {self.suite} ({self.protocol}); nothing was written.", "", "Read"]
        lines += [
            f"  {s.name}: {_counted(s.images, 'image')}, {'in memory' if s.bytes == 0 else _bytes(s.bytes)}"
            for s in self.sets
        ]
        lines += ["", "Parts", *(f"  {role}: {text}" for role, text in self.parts.items())]
        lines += ["", "Forward pass", *(f"  {_model_line(model)}" for model in self.models)]
        if self.fitted:
            lines += ["", "Fitted", *(f"  on {part}: {', '.join(specs)}" for part, specs in self.fitted.items())]
        if self.left_out:
            lines += ["", "Left out", *(f"  {spec}: {why}" for spec, why in self.left_out.items())]
        counts = (_counted(self.detectors, "detector"), _counted(self.calibrators, "calibrator"))
        lines += ["", f"Scored by {' and '.join(counts)}"]
        lines += [
            f"  {kind}: {name}, {_counted(n, 'image')}{f', {mask}' if mask else ''}"
            for kind, name, mask, n in self.scored
        ]
        lines += [
            "",
            "Written",
            f"  {self.cache}: {_bytes(self.store_bytes)} more ({_bytes(self.free_bytes)} are free)",
        ]
        lines += [
            f"  {self.out}: up to {_bytes(self.out_bytes)}",
            "",
            "Time",
            f"  {_duration(self.seconds)}: {self.how}",
        ]
        return "\n".join(lines)


def make_plan(suite: Suite, settings: Settings, cache: Path, out: Path) -> Plan:
    """Looks up what is stored and times the models on a few images, in a temporary folder.

    Args:
        suite: what to score.
        settings: with what; its extractor's cache is the one that would be filled.
        cache: the same folder, as it is shown.
        out: the run folder.

    Raises:
        ValueError: the run itself would be refused for it.
    """
    classes = settings.models[0].classifier.head.weight.shape[0]
    lacking = require_fit_data(settings.methods, suite, masks_of(suite), classes)
    require_calibration_data((*settings.calibrators, *settings.pools), settings.named, suite)
    sets = list({part.images.fingerprint: part.images for part in suite.parts}.values())
    wanted = wanted_of(suite, settings)
    jobs = [Job(m.classifier, m.transform, m.preprocessing, live) for m, live in wanted]
    pending = [[settings.extractor.lacking(job, images) for images in sets] for job in jobs]
    again = {model.spec: _fitted_live(suite, settings, lacking) for model in settings.models}
    busy = [job for job, shards in zip(jobs, pending, strict=True) if any(shards)] or jobs[:1]
    todo = sum(max(sum(len(s.rows) for s in shards[i]) for shards in pending) for i in range(len(sets)))
    timing = _timed(settings.extractor, busy, sets, todo)
    left_out = {spec: why for (spec, _), why in lacking.items()} | _tapless(suite, settings, timing.gaps)
    models = []
    for (model, live), shards, job in zip(wanted, pending, jobs, strict=True):
        row_bytes = timing.row_bytes.get(id(job), {})
        size = sum(
            len(shard.rows) * row_bytes.get(group, 0) + _JOURNAL_BYTES
            for by_shard in shards
            for shard, groups in by_shard.items()
            for group in groups
        )
        second = again.get(model.spec, [])
        total = sum(map(len, sets))
        images = sum(len(shard.rows) for by_shard in shards for shard in by_shard)
        models.append(
            ModelPlan(
                model=model.spec,
                images=images,
                stored=total - images,
                again=total if second else 0,
                live=tuple(dict.fromkeys(detector.spec for detector in (*live, *second))),
                store_bytes=size + len(second) * total * 8,
            )
        )
    return Plan(
        suite=suite.name,
        protocol=suite.protocol,
        sets=tuple(SetPlan(name=s.name, images=len(s), bytes=file_bytes(s)) for s in sets),
        parts=_roles(suite),
        models=tuple(models),
        fitted=_fitted(suite, settings, left_out),
        left_out=left_out,
        scored=tuple(_task(suite, number) for number in range(len(suite.tasks))),
        detectors=sum(method.detector.spec not in left_out for method in settings.methods),
        calibrators=len(settings.calibrators),
        cache=cache,
        store_bytes=sum(model.store_bytes for model in models),
        free_bytes=shutil.disk_usage(_existing(cache)).free,
        out=out,
        out_bytes=_out_bytes(suite, settings),
        seconds=timing.seconds,
        how=timing.how + (_on_top(models) if todo else ""),
    )


def require_usable(folder: Path, option: str) -> None:
    """Raises ValueError where a folder could not be made or written to, without trying."""
    place = _existing(folder)
    if not place.is_dir() or not os.access(place, os.W_OK):
        problem = "is no folder" if not place.is_dir() else "cannot be written to"
        raise ValueError(f"cannot write into the folder {str(folder)!r}: {str(place)!r} {problem}; choose {option} DIR")


@dataclass(frozen=True)
class _Timing:
    """What a trial showed.

    Args:
        seconds: of the whole pass.
        how: they were found.
        row_bytes: by id of the job and group of columns.
        gaps: taps that none of the models gives, with the reason.
    """

    seconds: float
    how: str
    row_bytes: Mapping[int, Mapping[str, int]]
    gaps: Mapping[str, str]


def _timed(extractor: Extractor, jobs: Sequence[Job], sets: Sequence[ImageSet], todo: int) -> _Timing:
    total = sum(map(len, sets))
    with tempfile.TemporaryDirectory(prefix="ood-plan-") as scratch:
        trial = replace(extractor, cache=Path(scratch), progress=silent)

        def fill(count: int, folder: str) -> tuple[float, Extractor, JoinedImages]:
            images = _spread(sets, count)
            here = replace(trial, cache=Path(scratch) / folder)
            started = time.perf_counter()
            here.fill(jobs, [images])
            return time.perf_counter() - started, here, images

        few = min(_FEW, total)
        _, here, images = fill(few, "warm-up")
        row_bytes = {id(job): _row_bytes(here.seen(job, images)) for job in jobs}
        notes = [here.seen(job, images).notes for job in jobs if job.classifier.taps]
        gaps = {tap: why for tap, why in (notes[0] if notes else {}).items() if all(tap in found for found in notes)}
        if not todo:
            return _Timing(0.0, "everything is in the store, no forward pass", row_bytes, gaps)
        short, *_ = fill(few, "short")
        many = min(total, max(2 * few, min(_MOST, int(_PATIENCE * few / max(short, 1e-9)))))
        long, *_ = fill(many, "long") if many > few else (short, here, images)
    # the difference leaves out what does not grow: the start of decoding processes, opening stores
    each = (long - short) / (many - few) if many > few and long > short else long / many
    models = "1 model" if len(jobs) == 1 else f"{len(jobs)} models together"
    how = (
        f"the forward pass of {_counted(todo, 'image')}, by timing {models} on {many} of them now: "
        f"{each * 1e3:.1f} ms each on {jobs[0].classifier.device}"
    )
    return _Timing(max(short, short + each * (todo - few)), how, row_bytes, gaps)


def _spread(sets: Sequence[ImageSet], count: int) -> JoinedImages:
    """So many images, evenly from all sets."""
    places = [(number, row) for number, images in enumerate(sets) for row in range(len(images))]
    chosen = [places[int(i)] for i in torch.linspace(0, len(places) - 1, count).round().int()]
    members = []
    for number, images in enumerate(sets):
        rows = sorted({row for at, row in chosen if at == number})
        if rows:
            members.append(SubsetImages(images, rows, name=f"{number} {images.name}"))
    return JoinedImages(members, name="timing")


def _row_bytes(store: Store) -> dict[str, int]:
    found: dict[str, int] = {}
    for column in store.described().values():
        numbers = torch.Size(column["shape"][1:]).numel()
        width = getattr(torch, column["dtype"]).itemsize
        found[column["group"]] = found.get(column["group"], 0) + numbers * width
    return found


def _fitted_live(suite: Suite, settings: Settings, lacking: Mapping[tuple[str, str], str]) -> list[LiveDetector]:
    """Live detectors that need the outputs of a first pass."""
    return [
        seen_through(method.detector, mask)
        for method in settings.methods
        for mask in masks_of(suite)
        if isinstance(method.detector, LiveDetector)
        and method.detector.needs != "nothing"
        and (method.detector.spec, mask.description if mask else "") not in lacking
    ]


def _tapless(suite: Suite, settings: Settings, gaps: Mapping[str, str]) -> dict[str, str]:
    """Detectors that read what no model gives, nor the ensemble."""
    pooled = bool(settings.pools) and len(settings.models) + len(settings.members) > 1
    found = {}
    for method in settings.methods:
        for tap in method.detector.taps:
            under = [tap_under(tap, mask) for mask in masks_of(suite)]
            if all(name in gaps for name in under) and not (tap == MEMBER_TAP and pooled):
                found[method.detector.spec] = f"needs the tap {tap} ({gaps[under[0]]})"
    return found


def _fitted(suite: Suite, settings: Settings, out: Collection[str]) -> dict[str, tuple[str, ...]]:
    fitted: dict[str, list[str]] = {}
    for method in settings.methods:
        if method.detector.needs == "train" and method.detector.spec not in out:
            fitted.setdefault("calibration" if method.detector.held_out else "fit", []).append(method.spec)
    if suite.calibration is not None:
        learned = [c.spec for c in (*settings.calibrators, *_pools(settings)) if c.name != "none"]
        fitted.setdefault("calibration", []).extend(learned)
    heads = [m.spec for m in settings.methods if m.detector.needs == "head" and m.detector.spec not in out]
    return {part: tuple(specs) for part, specs in {**fitted, "the head alone": heads}.items() if specs}


def _pools(settings: Settings) -> Sequence[EnsemblePool]:
    """The ways to pool that learn, and have something to pool: several models, or a model's own further passes."""
    several = len(settings.models) + len(settings.members) > 1
    passes = any(tap.startswith(PASS_TAPS) for method in settings.methods for tap in method.detector.taps)
    pools = settings.pools if several else settings.pools[:1] if passes else ()
    return [pool for pool in pools if type(pool).fit is not EnsemblePool.fit]


def _roles(suite: Suite) -> dict[str, str]:
    learned = {"fit": suite.fit, "calibration": suite.calibration, "tuning": suite.tuning}
    roles = {role: part.description for role, part in learned.items() if part is not None}
    return roles | {f"scored as {part.name}": part.description for part in suite.scored}


def _task(suite: Suite, number: int) -> tuple[str, str, str, int]:
    task = suite.tasks[number]
    images = len(task.id) + (len(task.ood) if task.ood else 0)
    return task.kind, task.dataset, task.mask.description if task.mask else "", images


def _out_bytes(suite: Suite, settings: Settings) -> int:
    """At most: every method gets a column for every scored part under every mask, and a record for every metric."""
    scored = sum(map(len, suite.scored)) * len(masks_of(suite))
    rows: list[LoadedClassifier | None] = [
        *settings.models,
        *([None] if len(settings.models) > 1 or settings.members else []),
    ]
    columns = len(rows) * (len(settings.methods) + 2 * len(settings.calibrators) + len(settings.pools) * 2 + 12)
    names = sum(len(part.images.ids[int(row)].encode()) + 4 for part in suite.scored for row in part.indices)
    records = len(rows) * sum(
        len(METRICS_OF[task.kind])
        * (len(settings.calibrators) if task.kind == "calibration" else len(settings.methods))
        for task in suite.tasks
    )
    return scored * columns * _COLUMN_BYTES + 3 * names + 4 * records * _RECORD_BYTES + 1_000_000


def _on_top(models: Sequence[ModelPlan]) -> str:
    second = sum(model.again for model in models)
    more = f"a second pass of {second:,} images for detectors fitted on the first, " if second else ""
    return f"; {more}fitting, scoring and intervals come on top"


def _model_line(model: ModelPlan) -> str:
    parts = [f"{_counted(model.images, 'image')} now, {model.stored:,} {_are(model.stored)} in the store"]
    parts += [f"{model.again:,} once more for detectors that are fitted on the first outputs"] if model.again else []
    parts += [f"gradients or further passes for {_counted(len(model.live), 'detector')}"] if model.live else []
    return f"{model.model}: {'; '.join(parts)}; {_bytes(model.store_bytes)} more in the store"


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def _bytes(count: int | None) -> str:
    if count is None:
        return "bytes not known"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return _counted(count, "byte")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {seconds:.1f} s" if seconds < 10 else f"about {seconds:.0f} s"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h"
