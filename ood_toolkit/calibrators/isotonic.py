"""Isotonic regression: the best map that never decreases. One class against the rest, all at once, or of confidence."""

from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked, rowwise
from ood_toolkit.calibrators.top_label import AHEAD, TopLabelCalibrator
from ood_toolkit.stats import row_chunks

_OWN_SHARE = 1e-9
"""Weight of the uncalibrated probability, as in Mix-n-Match: it orders what the map ties, and no row sums to 0."""
_COLUMNS = 32


class Pools:
    """Isotonic regression of 0/1 targets on scores that come in parts, without sorting all of them.

    Between two positives lie only negatives, so a positive and the negatives up to the next positive always share one
    fitted value. It is enough to count, for every positive, the scores that follow it, and to keep the largest of
    them, where interpolation towards the next pool starts.

    Args:
        positives: every score with target 1, in any order.
    """

    def __init__(self, positives: Float[Tensor, " P"]) -> None:
        self.starts, self.hits = positives.unique(return_counts=True)
        self.counts = torch.zeros(len(self.starts) + 1, dtype=torch.float64, device=positives.device)
        self.ends = torch.full_like(self.counts, -torch.inf)

    def add(self, scores: Float[Tensor, " N"]) -> None:
        """Counts scores, those of the positives included."""
        pool = torch.bucketize(scores, self.starts, right=True)  # 0: below the first positive
        self.counts += torch.bincount(pool, minlength=len(self.counts))
        self.ends.scatter_reduce_(0, pool, scores, "amax")

    def knots(self) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
        """Positions and values between which the fitted map is linear, and beyond which it is constant."""
        from sklearn.isotonic import IsotonicRegression

        means = self.hits / self.counts[1:]
        fitted = IsotonicRegression().fit_transform(
            torch.arange(len(means)).numpy(), means.cpu().numpy(), sample_weight=self.counts[1:].cpu().numpy()
        )
        values = torch.as_tensor(fitted, dtype=torch.float64, device=self.starts.device)
        x = torch.stack([self.starts, self.ends[1:]], dim=1).flatten()
        y = values.repeat_interleave(2)
        if self.counts[0]:
            x, y = torch.cat([self.ends[:1], x]), torch.cat([y.new_zeros(1), y])
        changes = torch.ones(len(y), dtype=torch.bool, device=y.device)
        changes[1:-1] = (y[1:-1] != y[:-2]) | (y[1:-1] != y[2:])  # inner points of a level stretch say nothing
        return x[changes], y[changes]


def isotonic_knots(
    scores: Float[Tensor, " N"], targets: Bool[Tensor, " N"]
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """The knots of the isotonic regression of `targets` on `scores`; without a positive, the constant 0."""
    if not bool(targets.any()):
        return scores.new_zeros(1), scores.new_zeros(1)
    pools = Pools(scores[targets])
    pools.add(scores)
    return pools.knots()


def interpolate(
    x: Float[Tensor, "*shape"], positions: Float[Tensor, " K"], values: Float[Tensor, " K"]
) -> Float[Tensor, "*shape"]:
    """The piecewise linear function through the knots, constant beyond the outer ones."""
    if len(positions) == 1:
        return values.expand_as(x)
    right = torch.bucketize(x, positions).clamp(1, len(positions) - 1)
    low, high = positions[right - 1], positions[right]
    share = ((x - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
    return torch.lerp(values[right - 1], values[right], share)


class TopLabelIsotonicCalibrator(TopLabelCalibrator):
    """Isotonic regression of "the prediction is right" on its confidence.

    The map for thousands of held-out rows: no shape is assumed except that more confidence is never worse. It fits
    in milliseconds at any number of classes. Level stretches tie rows that the softmax ordered.
    """

    name = "top_label_isotonic"
    paper = (
        "Zadrozny and Elkan, Transforming Classifier Scores into Accurate Multiclass Probability Estimates, KDD 2002"
    )
    cite = "zadrozny2002transforming"
    equation = "g(p) = isotonic regression of [right] on p"
    family = "isotonic"
    positions: Float[Tensor, " K"]
    values: Float[Tensor, " K"]

    def fit_confidence(self, log_odds: Float[Tensor, " N"], correct: Float[Tensor, " N"]) -> None:
        """Learns the knots."""
        self.positions, self.values = isotonic_knots(log_odds.sigmoid(), correct > 0)

    def confidence(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The fitted map at the confidence."""
        return interpolate(log_odds.sigmoid(), self.positions.double(), self.values.double())


class IsotonicCalibrator(Calibrator):
    """One isotonic map per class, of its probability against all other classes; rows are then normalised.

    For few classes and many rows of each. At 1000 classes with 50 rows each it overfits: on synthetic data with
    temperature 2 the held-out NLL rose from 2.29 (temperature) to 3.5. It can change the prediction. A class without
    a held-out row keeps its own probability, before normalisation.

    Differs from the paper and from netcal by one billionth of the uncalibrated probability, which is added as
    Mix-n-Match does, so that ties keep an order and no row sums to 0.
    """

    name = "isotonic"
    paper = (
        "Zadrozny and Elkan, Transforming Classifier Scores into Accurate Multiclass Probability Estimates, KDD 2002"
    )
    cite = "zadrozny2002transforming"
    equation = "p′_c ∝ g_c(p_c), g_c the isotonic regression of [label = c] on p_c"
    family = "isotonic"
    positions: Float[Tensor, "C K"]
    """Every class's knots, ascending; a shorter row repeats its last."""
    values: Float[Tensor, "C K"]

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Learns every class's knots. Returns itself."""
        logits, labels = checked(logits, labels)
        normaliser = _normaliser(logits)
        knots = []
        for start in range(0, logits.shape[1], _COLUMNS):
            columns = (logits[:, start : start + _COLUMNS].double() - normaliser).exp().T.contiguous()
            for offset, scores in enumerate(columns):
                targets = labels == start + offset
                if bool(targets.any()):
                    knots.append(isotonic_knots(scores, targets))
                else:
                    knots.append((scores.new_tensor([0.0, 1.0]), scores.new_tensor([0.0, 1.0])))
        self.positions = _padded([x for x, _ in knots])
        self.values = _padded([y for _, y in knots])
        return self

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) mapped probabilities, each row divided by its sum."""
        return rowwise(self._mapped, logits)

    def _mapped(self, rows: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        columns = rows.softmax(dim=-1).T.contiguous()
        positions, values = self.positions.double(), self.values.double()
        right = torch.searchsorted(positions, columns).clamp(1, positions.shape[1] - 1)
        low, high = positions.gather(1, right - 1), positions.gather(1, right)
        share = ((columns - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
        mapped = torch.lerp(values.gather(1, right - 1), values.gather(1, right), share)
        mapped = mapped.add(columns, alpha=_OWN_SHARE)
        return (mapped / mapped.sum(dim=0)).T


class IRMCalibrator(Calibrator):
    """One isotonic map for the probabilities of all classes together; rows are then normalised.

    N · C pairs of probability and truth give one well-determined map, and since it never decreases it keeps the order
    of classes in every row: the accurate relative of `isotonic` for many classes. A billionth of the uncalibrated
    probability is added, as by the authors; the largest entry is raised by a millionth, which float32 can hold.

    Differs from the authors' code in that millionth and in normalising the rows.
    """

    name = "irm"
    paper = "Zhang et al., Mix-n-Match, ICML 2020, arXiv:2003.07329 (IRM)"
    cite = "zhang2020mix"
    equation = "p′_c ∝ g(p_c), g the isotonic regression of all pairs (p_c, [label = c]) together"
    family = "isotonic"
    preserves_argmax = True
    positions: Float[Tensor, " K"]
    values: Float[Tensor, " K"]

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Learns the knots of the one map. Returns itself."""
        logits, labels = checked(logits, labels)
        chunks = row_chunks(len(logits), 4 * logits.shape[1])
        blocks = [slice(start, start + chunks.step) for start in chunks]
        true = [logits[b].double().softmax(dim=1).gather(1, labels[b, None]).flatten() for b in blocks]
        pools = Pools(torch.cat(true))
        for block in blocks:
            pools.add(logits[block].double().softmax(dim=1).flatten())
        self.positions, self.values = pools.knots()
        return self

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) mapped probabilities, each row divided by its sum."""
        return rowwise(self._mapped, logits)

    def _mapped(self, rows: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        probabilities = rows.softmax(dim=-1)
        mapped = interpolate(probabilities, self.positions.double(), self.values.double())
        mapped = mapped.add(probabilities, alpha=_OWN_SHARE)
        top = probabilities.argmax(dim=-1, keepdim=True)
        mapped = mapped.scatter(-1, top, mapped.gather(-1, top) * (1 + AHEAD))
        return mapped / mapped.sum(dim=-1, keepdim=True)


def _padded(rows: list[Tensor]) -> Float[Tensor, "C K"]:
    """The rows under each other, the last number of each repeated; at least two columns."""
    width = max(2, *(len(row) for row in rows))
    return torch.stack([torch.cat([row, row[-1:].expand(width - len(row))]) for row in rows])


def _normaliser(logits: Float[Tensor, "N C"]) -> Float[Tensor, "N 1"]:
    """The log-sum-exp of every row in float64."""
    chunks = row_chunks(len(logits), 4 * logits.shape[1])
    return torch.cat([logits[i : i + chunks.step].double().logsumexp(dim=1, keepdim=True) for i in chunks])
