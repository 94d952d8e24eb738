"""Ranks of one launch at work on a run: rank 0 leads and gives orders, the others carry out their share.

A rank that only follows holds the models and the stores, but makes no decision, writes no record and prints nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from ood_toolkit import stats
from ood_toolkit.benchmarks.masking import masked
from ood_toolkit.benchmarks.suite import Part, Suite
from ood_toolkit.datasets.accepted import labels_for
from ood_toolkit.detectors import Detector, LiveDetector
from ood_toolkit.distributed import ALONE, FailedElsewhere, Packed, PeerLost, Sums, World, packed, sharing, unpacked
from ood_toolkit.extract import Extracted, Extractor
from ood_toolkit.models import LoadedClassifier
from ood_toolkit.one_pass import Job
from ood_toolkit.outputs import UNKNOWN, Outputs

_ROWS_WORTH_SHARING = 4096
"""Fewer rows are done before the others have been told."""

_SMALL_STATE = 1 << 28
"""Bytes of a detector that are sent to all ranks for scoring, however few the rows."""

_LARGEST_STATE = 1 << 29
"""The same where the rows weigh more than the detector; beyond (a bank of many neighbours), rank 0 scores alone."""


@dataclass(frozen=True)
class Origin:
    """Where outputs are from, in words that every rank understands.

    Args:
        model: spec of the model.
        mask: name of the class mask, or "".
        part: name of the part; "" while it is open.
        labelled: only the rows whose label is known, as methods learn from them.
    """

    model: str
    mask: str = ""
    part: str = ""
    labelled: bool = False


class Order(Protocol):
    """What a rank that follows is told to do."""

    def carry_out(self, follower: "Follower", /) -> object:
        """Does this rank's share, with the same exchanges as rank 0."""
        ...


class Crew:
    """All ranks of a run as rank 0 sees them. Used as a context: at its end the others are dismissed.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World = ALONE) -> None:
        self.world = world

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.world.told(lambda: None)
        elif issubclass(kind, Exception) and not issubclass(kind, PeerLost):
            with suppress(PeerLost):  # the first error is the one to show
                self.world.told(lambda: None)

    def tell(self, order: Order) -> None:
        """Gives an order; rank 0 then does the same itself."""
        if self.world.size > 1:
            self.world.told(lambda: order)

    def tell_pass(self, model: str, images: str, live: Sequence[LiveDetector]) -> None:
        """Orders the pass of a model over the image set of this fingerprint, which rank 0 is about to make.

        Raises:
            ValueError: a live detector cannot be sent to the others.
        """
        if self.world.size > 1:
            self.tell(Pass(model, images, _packed_live(live)))

    def tell_fill(self, wanted: Sequence[tuple[str, Sequence[LiveDetector]]]) -> None:
        """Orders the pass of all models, each with its live detectors, over all image sets of the suite.

        Raises:
            ValueError: a live detector cannot be sent to the others.
        """
        if self.world.size > 1:
            self.tell(Fill(tuple((model, _packed_live(live)) for model, live in wanted)))

    @contextmanager
    def sharing_sums(self, train: Outputs, origin: Origin | None) -> Iterator[None]:
        """Within the block, sums over these rows are shared, if others can find them."""

        def total(sums: Sums) -> list[Tensor]:
            data = packed(sums)
            if data is None:
                return sums(train.batches())
            assert origin is not None
            self.tell(Sum(data, origin))
            return _shared_sums(self.world, sums, train)

        shared = self._worth_sharing(train, origin)
        with sharing(train, total) if shared else nullcontext():
            yield

    def scores(self, detector: Detector, outputs: Outputs, origin: Origin | None) -> Tensor:
        """(N,) scores of a fitted detector, in memory; the same on any number of ranks."""
        step = detector.block_rows or stats.block_length(outputs)
        if self._worth_sharing(outputs, origin) and step < len(outputs) and _worth_sending(detector, outputs):
            data = packed(detector)
            if data is not None:
                assert origin is not None
                self.tell(Score(data, origin, step))
                return _shared_scores(self.world, detector, outputs, step)
        return detector(outputs).cpu()

    def _worth_sharing(self, outputs: Outputs, origin: Origin | None) -> bool:
        return self.world.size > 1 and origin is not None and len(outputs) >= _ROWS_WORTH_SHARING


@dataclass(frozen=True)
class Pass:
    """One model over one image set, with live detectors."""

    model: str
    images: str
    live: Packed

    def carry_out(self, follower: "Follower") -> None:
        """Extracts, and remembers what there is."""
        model, images = follower.models[self.model], follower.images[self.images]
        live = unpacked(self.live, follower.device)
        done = follower.extractor.extract(
            model.classifier, model.transform, model.preprocessing, images, live, name=model.spec
        )
        follower.done[self.model, self.images] = replace(done, live={})


@dataclass(frozen=True)
class Fill:
    """All models over all image sets of the suite, each model with its live detectors."""

    wanted: tuple[tuple[str, Packed], ...]

    def carry_out(self, follower: "Follower") -> None:
        """Computes this rank's shards."""
        jobs = []
        for spec, live in self.wanted:
            model = follower.models[spec]
            detectors = unpacked(live, follower.device)
            jobs.append(Job(model.classifier, model.transform, model.preprocessing, detectors, name=spec))
        follower.extractor.fill(jobs, list(follower.images.values()))


def _packed_live(live: Sequence[LiveDetector]) -> Packed:
    data = packed(list(live))
    if data is None:
        raise ValueError(
            f"{', '.join(d.spec for d in live)}: cannot be pickled for the other ranks; run in one process"
        )
    return data


@dataclass(frozen=True)
class Sum:
    """Sums over the rows of some outputs."""

    sums: Packed
    origin: Origin

    def carry_out(self, follower: "Follower") -> None:
        """Adds this rank's rows."""
        found = follower.find(self.origin)
        _shared_sums(follower.world, lambda batches: unpacked(self.sums, follower.device)(batches), found)


@dataclass(frozen=True)
class Score:
    """Scores of some outputs by a fitted detector, each rank whole blocks of `step` rows."""

    detector: Packed
    origin: Origin
    step: int

    def carry_out(self, follower: "Follower") -> None:
        """Scores this rank's rows."""
        found = follower.find(self.origin)
        _shared_scores(follower.world, lambda rows: unpacked(self.detector, follower.device)(rows), found, self.step)


class Follower:
    """A rank that does what rank 0 says.

    Args:
        suite: the same on all ranks.
        models: all models and members.
        extractor: with the world.
        device: where this rank computes.
    """

    def __init__(self, suite: Suite, models: Sequence[LoadedClassifier], extractor: Extractor, device: str) -> None:
        self.world = extractor.world
        self.extractor = extractor
        self.device = device
        self.models = {model.spec: model for model in models}
        self.parts = {part.name: part for part in suite.parts}
        self.images = {part.images.fingerprint: part.images for part in suite.parts}
        self.masks = {task.mask.name: task.mask for task in suite.tasks if task.mask}
        self.done: dict[tuple[str, str], Extracted] = {}
        self._found: tuple[Origin, Outputs] | None = None

    def serve(self) -> None:
        """Carries out orders until rank 0 has no more."""
        while (order := self.world.told()) is not None:
            try:
                order.carry_out(self)
            except FailedElsewhere:
                continue  # rank 0 has the error, and decides

    def find(self, origin: Origin) -> Outputs:
        """The outputs that rank 0 means."""
        if self._found is None or self._found[0] != origin:
            part = self.parts[origin.part]
            seen, _ = outputs_of(part, self.done[origin.model, part.images.fingerprint])
            seen = masked(seen, self.masks[origin.mask] if origin.mask else None)
            self._found = origin, (labelled(seen) if origin.labelled else seen).to(self.device)
        return self._found[1]


def outputs_of(part: Part, done: Extracted) -> tuple[Outputs, Tensor]:
    """A part of what a pass has left behind, and its rows in there. A whole set stays memory-mapped."""
    position = torch.full((len(part.images),), -1, dtype=torch.int64)
    position[done.rows] = torch.arange(len(done.rows))
    rows = part.indices[position[part.indices] >= 0]
    whole = part.rows is None or len(rows) == len(done.outputs)
    seen = done.outputs if whole else done.outputs.rows(position[rows])
    return seen.with_labels(labels_for(part.images, rows, seen)), position[rows]


def labelled(outputs: Outputs) -> Outputs:
    """The rows whose label is known: what methods learn from."""
    known = outputs.labels != UNKNOWN
    return outputs if bool(known.all()) else outputs.rows(known)


def _shared_sums(world: World, sums: Sums, rows: Outputs) -> list[Tensor]:
    return world.sum(world.each(lambda: sums(rows.rows(world.share(len(rows))).batches())))


def _worth_sending(detector: Detector, rows: Outputs) -> bool:
    """Whether the detector is no heavier than what other ranks then read of the rows."""
    state = sum(value.numel() * value.element_size() for value in detector.state_dict().values())
    weight = len(rows) * (rows.classes + rows.width) * rows.head.weight.element_size()
    return state <= max(_SMALL_STATE, min(weight, _LARGEST_STATE))


def _shared_scores(world: World, score: Callable[[Outputs], Tensor], rows: Outputs, step: int) -> Tensor:
    def mine() -> Tensor:
        with torch.no_grad():
            return score(rows.rows(world.share(len(rows), step))).cpu()

    return torch.cat(world.gather(world.each(mine)))
