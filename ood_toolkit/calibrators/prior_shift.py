"""Prior correction: the same classifier where classes are more or less common than in the calibration data."""

from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked, from_spec
from ood_toolkit.stats import row_chunks


class PriorShiftCalibrator(Calibrator):
    """Calibrates, then moves probabilities from the held-out class frequencies to others: `p'(y) ∝ p(y) q(y) / π(y)`.

    For label shift: p(x | y) stays, p(y) changes from π (counted in the held-out labels, one pseudo-row per class) to
    q. Either give q as `target`, or call `adapt` with unlabelled logits from the new place, which finds the q of
    highest likelihood by EM (Saerens et al.; with calibrated inputs as in Alexandari et al.). EM is only as
    good as the calibration of its input, hence `base`.

    Args:
        target: q: "uniform", "same" (no correction until `adapt`), or C probabilities.
        base: spec of the calibrator whose probabilities are corrected.
    """

    name = "prior_shift"
    paper = (
        "Saerens et al., Adjusting the Outputs of a Classifier to New a Priori Probabilities, Neural Computation 2002, "
        "Alexandari et al., ICML 2020, arXiv:1901.06852"
    )
    cite = "saerens2002adjusting"
    equation = "p′_c ∝ p_c q_c / π_c"
    family = "prior"
    source_prior: Float[Tensor, " C"]
    target_prior: Float[Tensor, " C"]

    def __init__(self, target: str | tuple[float, ...] = "uniform", base: str = "temperature") -> None:
        super().__init__()
        if isinstance(target, str) and target not in ("uniform", "same"):
            raise ValueError(f"target must be 'uniform', 'same' or a tuple of probabilities, got {target!r}")
        self.target = target
        self.base = base
        self.calibrator = from_spec(base, Calibrator)

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Fits the base calibrator and counts the classes. Returns itself."""
        logits, labels = checked(logits, labels)
        classes = logits.shape[1]
        self.calibrator.fit(logits, labels)
        counts = torch.bincount(labels, minlength=classes).double() + 1
        self.source_prior = counts / counts.sum()
        if self.target == "uniform":
            target = torch.full_like(counts, 1 / classes)
        elif self.target == "same":
            target = self.source_prior
        else:
            target = counts.new_tensor(self.target)
            if target.shape != counts.shape or bool((target < 0).any()) or float(target.sum()) <= 0:
                raise ValueError(f"target must be {classes} non-negative numbers, got {self.target}")
        self.target_prior = target / target.sum()
        return self

    def adapt(self, logits: Float[Tensor, "N C"]) -> Self:
        """Sets the target prior to the one under which these unlabelled logits are most likely. Returns itself."""
        self.target_prior = estimate_prior(self.calibrator.log_probabilities(logits), self.source_prior)
        return self

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) corrected probabilities."""
        return self.log_probabilities(logits).exp()

    def log_probabilities(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) corrected log-probabilities."""
        log_p = self.calibrator.log_probabilities(logits)
        return (log_p + (self.target_prior / self.source_prior).log().to(log_p.dtype)).log_softmax(dim=-1)


def estimate_prior(
    log_probabilities: Float[Tensor, "N C"], source: Float[Tensor, " C"], *, tolerance: float = 1e-9, most: int = 10_000
) -> Float[Tensor, " C"]:
    """The class frequencies q that maximise `Σ_i log Σ_c p_ic q_c / π_c`, by EM from π.

    Args:
        log_probabilities: (N, C) of unlabelled rows, calibrated where the classes follow `source`.
        source: (C,) π, positive, sums to 1.
        tolerance: stops when no frequency moves by more.
        most: iterations at most; the likelihood rises in each.
    """
    rows, classes = log_probabilities.shape
    if rows == 0:
        raise ValueError("estimating class frequencies needs rows, but there are none")
    chunks = row_chunks(rows, 4 * classes)
    prior = source.double()
    for _ in range(most):
        shift = (prior / source).log()
        total = torch.zeros_like(prior)
        for start in chunks:
            total += (log_probabilities[start : start + chunks.step].double() + shift).softmax(dim=1).sum(dim=0)
        moved = float((total / rows - prior).abs().max())
        prior = total / rows
        if moved < tolerance:
            break
    return prior
