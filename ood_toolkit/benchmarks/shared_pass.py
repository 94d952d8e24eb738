"""The one pass of a run: every image is decoded once and goes through all models, before any of them is scored."""

from typing import TYPE_CHECKING

from ood_toolkit.benchmarks.masking import masks_of, seen_through
from ood_toolkit.benchmarks.results import RunFolder
from ood_toolkit.benchmarks.suite import Suite
from ood_toolkit.detectors import LiveDetector
from ood_toolkit.extract import Filled
from ood_toolkit.one_pass import Job

if TYPE_CHECKING:
    from ood_toolkit.benchmarks.runner import Settings
    from ood_toolkit.models import LoadedClassifier

Done = dict[tuple[str, str], Filled]
"""What the pass has computed, by the spec of the model and the fingerprint of the image set."""


def shared_pass(suite: Suite, settings: "Settings", folder: RunFolder) -> Done:
    """Fills the stores of all models of a run on all its image sets.

    Live detectors that need no fitting share the batches; the others need the outputs first.

    Raises:
        ValueError: a model gives NaN, or a decoding process died; what was computed before is kept.
    """
    wanted = wanted_of(suite, settings)
    sets = list({part.images.fingerprint: part.images for part in suite.parts}.values())
    jobs = [Job(m.classifier, m.transform, m.preprocessing, live, name=m.spec) for m, live in wanted]
    with folder.stage(f"extract {', '.join(model.spec for model, _ in wanted)}"):
        settings.crew.tell_fill([(model.spec, live) for model, live in wanted])
        filled = settings.extractor.fill(jobs, sets)
    pairs = [(model.spec, images.fingerprint) for images in sets for model, _ in wanted]
    return dict(zip(pairs, filled, strict=True))


def wanted_of(suite: Suite, settings: "Settings") -> list[tuple["LoadedClassifier", list[LiveDetector]]]:
    """Every model of a run with the live detectors that share its first pass."""
    ready = [
        seen_through(method.detector, mask)
        for method in settings.methods
        for mask in masks_of(suite)
        if isinstance(method.detector, LiveDetector) and method.detector.needs == "nothing"
    ]
    others = [*(settings.members if settings.pools else ()), *([settings.second] if settings.second else ())]
    return [*((model, ready) for model in settings.models), *((model, []) for model in others)]
