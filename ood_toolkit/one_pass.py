"""The pass itself: batches of several sets go through several models, and whole shards into their stores."""

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ood_toolkit.batch_size import BatchSize, is_out_of_memory
from ood_toolkit.batches import Batch, Loading, Stretch, Transform, deaths_seen_by_loader
from ood_toolkit.datasets import ImageSet
from ood_toolkit.detectors import LiveDetector
from ood_toolkit.models.shared import SharedPass
from ood_toolkit.outputs import NaNRows
from ood_toolkit.store import Shard, Store

if TYPE_CHECKING:
    from ood_toolkit.models import Classifier

Progress = Callable[[int, int, str], None]
"""Called with (images done, images to do, name of the set)."""

OUTPUTS = "outputs"
"""The group of columns that holds logits and features."""

_LITERALS = (int, float, complex, str, bytes, tuple, frozenset, type(None))
_SETTLED = sys.stdlib_module_names | {"torch", "numpy", "scipy", "sklearn", "jaxtyping"}
"""Packages whose code is not looked at where scores are told apart by the code that computes them."""

_Pieces = list[tuple[list[int], dict[str, Tensor]]]


@dataclass(frozen=True)
class Job:
    """One model, and what is wanted of it.

    Args:
        classifier: the model; its weights are part of the store's key.
        transform: PIL image → (3, H, W) tensor, uint8 or float in [0, 1].
        transform_name: says what the transform does; part of the store's key. Jobs with the same name share pixels.
        live: fitted live detectors.
        name: what people call the model; for listings of stores.
    """

    classifier: "Classifier"
    transform: Transform
    transform_name: str
    live: Sequence[LiveDetector] = ()
    name: str = ""


class Target:
    """A store of one model's outputs on one set, and what it lacks.

    Args:
        job: the model.
        images: the set.
        store: where its columns are kept.
        groups: all that is wanted: "" for logits and features, a tap's spec, or a live detector, by group of columns.
        pending: groups to compute, by shard number.
        dtype: how columns are kept; scores of live detectors stay in float64.
    """

    def __init__(
        self,
        job: Job,
        images: ImageSet,
        store: Store,
        groups: Mapping[str, str | LiveDetector],
        pending: Mapping[int, Sequence[str]],
        dtype: torch.dtype,
    ) -> None:
        self.job = job
        self.images = images
        self.store = store
        self.groups = groups
        self.pending = pending
        self.dtype = dtype
        self.seconds = 0.0
        """What the pass over the set took, together with the other models."""
        missing = {group for wanted in pending.values() for group in wanted}
        taps = [kind for group, kind in groups.items() if group in missing and isinstance(kind, str) and kind]
        self._model = job.classifier.with_taps(taps)
        self._plain = job.classifier.with_taps(())

    @property
    def computed(self) -> int:
        """How many images the pending shards hold."""
        return sum(len(shard.rows) for shard in self.store.shards if shard.number in self.pending)

    def columns(self, shard: Shard, rows: Sequence[int], pixels: Tensor) -> dict[str, dict[str, Tensor]]:
        """Columns of every group that the shard lacks, for one batch; a tap that the model cannot give has none."""
        wanted = {group: self.groups[group] for group in self.pending[shard.number]}
        live = {group: kind for group, kind in wanted.items() if isinstance(kind, LiveDetector)}
        shared = SharedPass(self._model, self._plain, pixels)
        try:
            found = {group: {group: detector(shared, pixels).double().cpu()} for group, detector in live.items()}
            if len(found) == len(wanted):
                return found
            outputs = shared.outputs()
        except NaNRows as error:
            names = [self.images.ids[rows[row]] for row in error.rows]
            raise ValueError(
                f"the model gives NaN {error.what} for {len(names)} images of {self.images.name!r}, "
                f"first {names[:3]}; check the weights, the normalisation and the AMP dtype"
            ) from None
        group_of = {kind: group for group, kind in self.groups.items() if isinstance(kind, str)}
        kept = {group_of[tap]: {group_of[tap]: value} for tap, value in outputs.taps.items()}
        kept[OUTPUTS] = {"logits": outputs.logits, "features": outputs.features}
        for group in wanted:
            if group in kept:
                found[group] = {name: column.to("cpu", self.dtype) for name, column in kept[group].items()}
        return found

    def write(self, shard: Shard, pieces: Mapping[str, _Pieces], unreadable: Mapping[int, str]) -> None:
        """Writes all that the pass has found for a shard."""
        self.store.note(self._model.tap_gaps)
        for group in self.pending[shard.number]:
            found = pieces.get(group, [])
            self.store.write(group, shard, _assemble(shard, found) if found else {}, unreadable)


def run_pass(targets: Sequence[Target], loading: Loading, progress: Progress) -> None:
    """Computes what the targets lack: every image is decoded once, and goes once through each model.

    Args:
        targets: stores to fill; those of one set stand side by side.
        loading: how images are decoded.
        progress: told how far the pass is.

    Raises:
        ValueError: a decoding process died, a model gives NaN, or memory does not hold a single image.
    """
    names = list(dict.fromkeys(target.job.transform_name for target in targets))
    transforms = [next(t.job.transform for t in targets if t.job.transform_name == name) for name in names]
    sets = list({id(target.images): target.images for target in targets}.values())
    work = list(_shards(targets))
    stretches = [
        Stretch(
            images=next(number for number, images in enumerate(sets) if images is sharing[0].images),
            rows=shard.rows,
            transforms=tuple(sorted({names.index(target.job.transform_name) for target in sharing})),
        )
        for shard, sharing in work
    ]
    totals = {id(images): sum(len(s.rows) for s, sharing in work if sharing[0].images is images) for images in sets}
    done = dict.fromkeys(totals, 0)
    device = targets[0].job.classifier.device
    size = BatchSize(loading.batch_size, device)
    batches = loading.batches(sets, transforms, stretches, device, size)
    with deaths_seen_by_loader():
        for shard, sharing in work:
            images = sharing[0].images

            def advance(count: int, images: ImageSet = images) -> None:
                done[id(images)] += count
                progress(done[id(images)], totals[id(images)], images.name)

            if not done[id(images)]:
                advance(0)
            started = time.perf_counter()
            _fill_shard(shard, sharing, _until(batches, len(shard.rows)), names, size, advance)
            for target in targets:
                target.seconds += time.perf_counter() - started if target.images is images else 0.0


def _shards(targets: Sequence[Target]) -> Iterator[tuple[Shard, list[Target]]]:
    """Every pending shard with the targets that lack it, set by set."""
    for images in {id(target.images): target.images for target in targets}.values():
        here = [target for target in targets if target.images is images]
        for shard in here[0].store.shards:
            sharing = [target for target in here if shard.number in target.pending]
            if sharing:
                yield shard, sharing


def _until(batches: Iterator[Batch], rows: int) -> Iterator[Batch]:
    """Batches that hold so many rows together."""
    while rows:
        batch = next(batches)
        rows -= len(batch)
        yield batch


def _fill_shard(
    shard: Shard,
    targets: Sequence[Target],
    batches: Iterable[Batch],
    transforms: Sequence[str],
    size: BatchSize,
    advance: Callable[[int], None],
) -> None:
    """One shard of one set, for all models that lack it."""
    pieces: list[dict[str, _Pieces]] = [{} for _ in targets]
    unreadable: dict[int, str] = {}
    for batch in batches:
        unreadable |= batch.unreadable
        started = time.perf_counter()
        for target, parts in zip(targets if batch.rows else (), pieces, strict=False):
            pixels = batch.pixels[transforms.index(target.job.transform_name)]
            size.saw(*pixels.shape[-2:])
            for rows, found in _within_memory(target, shard, batch.rows, pixels, size):
                for group, columns in found.items():
                    parts.setdefault(group, []).append((rows, columns))
        size.took(len(batch.rows), time.perf_counter() - started)
        advance(len(batch))
    for target, parts in zip(targets, pieces, strict=True):
        target.write(shard, parts, unreadable)


def _within_memory(
    target: Target, shard: Shard, rows: list[int], pixels: Tensor, size: BatchSize
) -> Iterator[tuple[list[int], dict[str, dict[str, Tensor]]]]:
    """Columns for a batch, in parts that fit: where memory runs out, the part is done again in halves."""
    start = 0
    while start < len(rows):
        part = slice(start, start + size.size)
        try:
            found = target.columns(shard, rows[part], pixels[part])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found = None
        if found is None:
            # outside of the except block, whose traceback holds the tensors of the failed pass
            size.too_big(len(rows[part]))
            if pixels.is_cuda:
                torch.cuda.empty_cache()
            continue
        yield rows[part], found
        start = part.stop


def _assemble(shard: Shard, pieces: _Pieces) -> dict[str, Tensor]:
    """Whole columns of a shard; rows of unreadable images stay 0."""
    rows = torch.tensor([row - shard.start for part, _ in pieces for row in part])
    columns = {}
    for name, sample in pieces[0][1].items():
        column = sample.new_zeros((len(shard.rows), *sample.shape[1:]))
        column[rows] = torch.cat([part[name] for _, part in pieces])
        columns[name] = column
    return columns


def tap_key(spec: str, classifier: "Classifier") -> str:
    """The group of columns that a tap is kept in: its words and, as for live detectors, its code.

    Args:
        spec: one of the classifier's taps.
        classifier: the model that gives it.
    """
    digest = hashlib.sha256(spec.encode())
    tap = classifier.built_taps.get(spec)
    if tap is not None:
        digest.update(_code_of(type(tap)))
    return f"tap_{digest.hexdigest()[:16]}"


def live_key(detector: LiveDetector) -> str:
    """The group of columns that the scores of a live detector are kept in: its parameters, what it learned, its code.

    Code, because whoever writes a detector changes it between two runs, and must not read the scores of the first.
    """
    digest = hashlib.sha256(repr(detector).encode())
    digest.update(_code_of(type(detector)))
    state: dict[str, Any] = detector.state_dict()
    for name in sorted(state):
        digest.update(name.encode() + state[name].detach().cpu().contiguous().numpy().tobytes())
    return f"live_{digest.hexdigest()[:16]}"


def _code_of(kind: type) -> bytes:
    """The bytecode and constants of a class, of its bases, and of all that they call outside torch and the like."""
    found: dict[str, str] = {}
    todo: list[tuple[str, Any]] = [("", kind)]
    while todo:
        name, value = todo.pop()
        value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if isinstance(value, _LITERALS):
            found[name] = _constant(value)
        if not isinstance(value, type | FunctionType) or value.__module__.partition(".")[0] in _SETTLED:
            continue
        where = f"{value.__module__}.{value.__qualname__}"
        if where in found:
            continue
        if isinstance(value, FunctionType):
            found[where] = _constant((value.__code__, value.__defaults__))
            used, known = value.__code__.co_names, value.__globals__
            todo += [(f"{where}:{each}", known[each]) for each in used if each in known]
            modules = [known[each] for each in used if isinstance(known.get(each), ModuleType)]
            todo += [(f"{where}:{each}", getattr(m, each)) for m in modules for each in used if hasattr(m, each)]
        else:
            found[where] = "class"
            todo += [(f"{where}.{part}", own) for part, own in vars(value).items() if not part.startswith("__")]
            todo += [("", base) for base in value.__bases__]
    return repr(sorted(found.items())).encode()


def _constant(value: Any) -> str:
    """The same text in every process, so without addresses."""
    if isinstance(value, CodeType):
        return f"{value.co_code!r} {value.co_names} {_constant(value.co_consts)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return repr(value) if isinstance(value, _LITERALS) else type(value).__qualname__
