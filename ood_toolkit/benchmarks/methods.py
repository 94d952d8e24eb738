"""What the command line calls a method: a detector, maybe on calibrated logits, maybe with a rectifier before it."""

from dataclasses import dataclass, replace

from ood_toolkit.calibrators import Calibrator
from ood_toolkit.detectors import Detector, LiveDetector
from ood_toolkit.registry import (
    AnyDetector,
    build_calibrator,
    build_detector,
    calibrator_classes,
    detector_classes,
    parse,
    split_composition,
    split_specs,
)

MEMBER_TAP = "member_logits"
"""The tap that only an ensemble's outputs have: (N, M, C)."""

PASS_TAPS = ("dropout_logits", "augmented_logits")
"""How the taps begin that hold one model's further passes: (N, M, C)."""


@dataclass(frozen=True, eq=False)
class Method:
    """A detector to score, on plain or on calibrated logits.

    Args:
        detector: unfitted.
        calibrator: unfitted, or None for plain logits.
        chosen: the user named it, so that a failure is an error; otherwise it came with "all".
        tuned: its hyper-parameters are chosen on the OOD set that the user named for that.
    """

    detector: AnyDetector
    calibrator: Calibrator | None = None
    chosen: bool = True
    tuned: bool = False

    @property
    def spec(self) -> str:
        """As the command line takes it."""
        prefix = (f"{self.calibrator.spec}+" if self.calibrator else "") + ("tuned+" if self.tuned else "")
        return prefix + self.detector.spec


def parse_detectors(text: str) -> list[Method]:
    """Methods from a comma-separated list of specs; "all" stands for every registered detector.

    `-tta` takes one out of what stands before it.

    "one-pass" stands for those that read nothing but the one forward pass over the images: no gradients, no further
    passes, no inner layers.

    `tuned+knn` chooses its hyper-parameters on a validation OOD set; `tuned+all` does so for every detector that has a
    sweep.

    `temperature+msp` scores calibrated logits; `react+gen` gives a rectifier another head score than its paper's.

    Raises:
        ValueError: an unknown name, a wrong argument, or a composition that means nothing.
    """
    methods: dict[str, Method] = {}
    for spec in split_specs(text):
        if spec.startswith("-"):
            unwanted = build_detector(spec[1:]).spec
            if methods.pop(unwanted, None) is None:
                raise ValueError(f"{spec!r} takes out a detector that was not asked for before it")
            continue
        found = _group(spec) if spec in _GROUPS else [_one(spec)]
        for method in found:
            other = methods.get(method.spec)
            if other is not None and type(other.detector) is not type(method.detector):
                raise ValueError(f"two detectors call themselves {method.spec!r}; give yours another `name`")
            # a method that is named beside "all" counts as named
            if method.chosen or method.spec not in methods:
                methods[method.spec] = method
    return list(methods.values())


_TUNED = "tuned"
_GROUPS = ("all", "one-pass", f"{_TUNED}+all")


def _group(name: str) -> list[Method]:
    detectors = [build_detector(detector) for detector in detector_classes()]
    if name == "one-pass":
        detectors = [d for d in detectors if isinstance(d, Detector) and set(d.taps) <= {MEMBER_TAP}]
    tuned = name == f"{_TUNED}+all"
    if tuned:
        detectors = [d for d in detectors if isinstance(d, Detector) and d.sweep]
    return [Method(d, chosen=False, tuned=tuned) for d in detectors]


def parse_calibrators(text: str) -> list[Calibrator]:
    """Calibrators from a comma-separated list; "all" stands for every registered one. The plain softmax is first.

    `-bbq` takes one out of what stands before it; the plain softmax stays.

    Raises:
        ValueError: an unknown name or a wrong argument.
    """
    found: dict[str, Calibrator] = {"none": build_calibrator("none")}
    for spec in split_specs(text):
        if spec.startswith("-"):
            unwanted = build_calibrator(spec[1:]).spec
            if unwanted == "none" or found.pop(unwanted, None) is None:
                raise ValueError(f"{spec!r} takes out a calibrator that was not asked for before it, or the softmax")
            continue
        names = list(calibrator_classes()) if spec == "all" else [spec]
        for calibrator in map(build_calibrator, names):
            found.setdefault(calibrator.spec, calibrator)
    return list(found.values())


def _one(spec: str) -> Method:
    parts = split_composition(spec)
    if len(parts) == 1:
        return Method(build_detector(spec))
    first, rest = parts[0], "+".join(parts[1:])
    if not first or not rest:
        raise ValueError(f"{spec!r} lacks a name before or after its +")
    if first == _TUNED:
        method = _one(rest)
        if isinstance(method.detector, LiveDetector) or not method.detector.sweep:
            with_sweep = ", ".join(found.detector.name for found in _group(f"{_TUNED}+all"))
            raise ValueError(f"{spec!r}: {method.detector.name} has no sweep to choose from; these have: {with_sweep}")
        return replace(method, tuned=True)
    if parse(first)[0] in calibrator_classes() or first.startswith("netcal:") or _is_calibrator(first):
        method = _one(rest)
        if method.calibrator:
            raise ValueError(f"{spec!r} names two calibrators; one is enough")
        require_logits_only(method.detector, spec)
        return replace(method, calibrator=build_calibrator(first))
    rectifier = build_detector(first)
    parameter = getattr(rectifier, "head_score_parameter", "")
    if not parameter or len(parts) > 2:
        raise ValueError(
            f"{spec!r}: {first!r} is neither a calibrator nor a rectifier, so nothing can be composed with it"
        )
    changed = {**rectifier.hyperparameters, parameter: parts[1]}
    return Method(type(rectifier)(**changed))


def _is_calibrator(spec: str) -> bool:
    """Whether `my_pkg:Class` is a calibrator of the user's own."""
    if ":" not in spec:
        return False
    try:
        build_calibrator(spec)
    except ValueError:
        return False
    return True


def require_logits_only(detector: AnyDetector, spec: str) -> None:
    """Raises ValueError if calibrated log-probabilities would not reach the detector's score, or be all it has."""
    if isinstance(detector, LiveDetector) or detector.reads != frozenset({"logits"}) or detector.taps:
        fields = ", ".join(sorted(detector.reads | set(detector.taps)))
        raise ValueError(
            f"{spec!r}: {detector.spec} reads {fields}, which calibration does not change; "
            "compose calibrators with detectors that read only logits"
        )
    if detector.needs_offset:
        raise ValueError(
            f"{spec!r}: {detector.spec} reads the common offset of the logits, which calibrated log-probabilities have "
            "lost: it would score every row alike; for energy at another temperature write energy(temperature=…)"
        )


def scores_log_probabilities(detector: AnyDetector, taps: frozenset[str] = frozenset()) -> bool:
    """Whether a detector can score log-probabilities without a model behind them (an ensemble's), given these taps."""
    return (
        isinstance(detector, Detector)
        and detector.reads <= {"logits", *taps}
        and set(detector.taps) <= taps
        and not detector.needs_offset
    )
