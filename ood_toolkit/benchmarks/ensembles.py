"""The outputs of an ensemble: its members' logits, pooled into log-probabilities."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ood_toolkit.benchmarks.methods import MEMBER_TAP
from ood_toolkit.benchmarks.suite import ClassMask, Suite
from ood_toolkit.calibrators import EnsemblePool
from ood_toolkit.datasets.accepted import labels_for
from ood_toolkit.outputs import UNKNOWN, Outputs

Parts = Mapping[str, Outputs]


def fit_pool(pool: EnsemblePool, suite: Suite, parts: Parts, members: Mapping[str, Tensor]) -> None:
    """Fits the pool on the calibration part, where the suite has one.

    Args:
        pool: what pools.
        suite: with its calibration part.
        parts: outputs with the labels.
        members: (M, N, C) logits by part.
    """
    if suite.calibration is not None:
        name = suite.calibration.name
        known = parts[name].labels != UNKNOWN
        pool.fit(members[name][:, known], parts[name].labels[known])


def pooled(
    pool: EnsemblePool, suite: Suite, members: Sequence[Parts], mask: ClassMask | None, rows: Mapping[str, Tensor]
) -> Parts:
    """The ensemble's outputs: its log-probabilities as logits, its members as a tap.

    Args:
        pool: fitted here, where it learns.
        suite: whose parts are pooled.
        members: outputs by part of every member, under the mask.
        mask: the classes that count.
        rows: by part, the rows of its image set.

    Raises:
        ValueError: the members cannot be pooled, or the pool has nothing to learn from.
    """
    for part in suite.parts:
        if len({len(view[part.name]) for view in members}) > 1:
            raise ValueError(f"the members could read different numbers of images of {part.name!r}")
    stacked = {part.name: torch.stack([view[part.name].logits for view in members]) for part in suite.parts}
    fit_pool(pool, suite, members[0], stacked)
    found = {}
    for part in suite.parts:
        logits = stacked[part.name]
        plain = Outputs.from_logits(pool(logits))
        classes = mask.classes if mask else None
        plain = plain.with_labels(labels_for(part.images, rows[part.name], plain, classes))
        found[part.name] = plain.with_taps({MEMBER_TAP: logits.transpose(0, 1)})
    return found
