"""netcal's own metrics, for comparison with papers that used them; ours are exact on ties and faster."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ood_toolkit.metrics.arrays import as_top_label


def netcal_metric(name: str, confidence: ArrayLike, correct: ArrayLike, *, bins: int = 15, **options: Any) -> float:
    """A metric of `netcal.metrics` on top-label confidences, in float64.

    The faults of that package are kept out: float32 is widened, the task is not guessed from the labels (a confidence
    and whether it was right are always binary there), and its refusal of tied quantile edges comes in plain words.

    Args:
        name: "ECE", "MCE", "ACE" or "MMCE".
        confidence: (N,) in [0, 1].
        correct: (N,) booleans.
        bins: how many; MMCE has none.
        options: further arguments of netcal's constructor, e.g. `equal_intervals=False`.

    Raises:
        ValueError: netcal has no such metric, cannot cut equal-mass bins because confidences tie, or would need an
            N × N matrix (MMCE) beyond 10,000 rows.
    """
    import netcal.metrics as room

    if name not in ("ECE", "MCE", "ACE", "MMCE"):
        raise ValueError(f"netcal has no calibration metric {name!r}; known: ECE, MCE, ACE, MMCE")
    certain, right = as_top_label(confidence, correct)
    if name == "MMCE" and len(certain) > 10_000:
        raise ValueError(f"netcal's MMCE needs an N x N matrix, too large for {len(certain)} rows; at most 10,000")
    metric = getattr(room, name)(**options) if name == "MMCE" else getattr(room, name)(bins, **options)
    try:
        return float(metric.measure(certain.astype(np.float64), right.astype(np.int64)))
    except ValueError as error:
        if "edge difference" in str(error):
            raise ValueError(
                f"netcal's {name} cannot cut equal-mass bins where confidences tie; use ece(scheme='equal-mass')"
            ) from None
        raise
