"""Choosing hyper-parameters on an OOD set that the user named for it, and that no task scores."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from ood_toolkit.detectors import Detector
from ood_toolkit.metrics import auroc
from ood_toolkit.outputs import Outputs


@dataclass(frozen=True)
class Trial:
    """One setting that was tried.

    Args:
        spec: the detector with this setting.
        auroc: how well it told the validation OOD set from held-out ID rows, or None.
        reason: why there is no number.
    """

    spec: str
    auroc: float | None
    reason: str = ""


def candidates(detector: Detector) -> Iterator[Detector]:
    """Unfitted copies with every combination of the detector's `sweep`, the given setting first.

    A hyper-parameter that the user changed from its default is left alone, and so is a combination that the detector
    refuses.
    """
    yield detector.clone()
    usual = type(detector)().hyperparameters
    given = detector.hyperparameters
    free = {name: values for name, values in detector.sweep.items() if given[name] == usual[name]}
    for setting in product(*free.values()):
        changed = {**given, **dict(zip(free, setting, strict=True))}
        if changed == given:
            continue
        try:
            yield type(detector)(**changed)
        except ValueError:
            continue


def tune(detector: Detector, train: Outputs, known: Outputs, unknown: Outputs) -> tuple[Detector, list[Trial]]:
    """The detector, fitted, with the setting that tells `unknown` from `known` best; and all that was tried.

    Args:
        detector: unfitted, with a `sweep`.
        train: what every candidate is fitted on.
        known: in-distribution rows that are neither fitted on nor scored.
        unknown: out-of-distribution rows that are not scored.

    Raises:
        ValueError: no candidate could be fitted and scored.

    Of equally good settings the first wins, so the detector's own defaults are kept where nothing beats them. The
    criterion is AUROC, as in OpenOOD's automatic search.
    """
    best: Detector | None = None
    highest = -1.0
    trials = []
    for candidate in candidates(detector):
        try:
            with torch.no_grad():
                candidate.fit(train)
                value = auroc(candidate(known), candidate(unknown))
        except ValueError as error:
            trials.append(Trial(candidate.spec, None, str(error)))
            continue
        trials.append(Trial(candidate.spec, value))
        if value > highest:
            best, highest = candidate, value
    if best is None:
        raise ValueError(
            f"none of {len(trials)} settings of {detector.name} can be used; the first: {trials[0].reason}"
        )
    return best, trials
