"""What the calibrators of confidence share: they learn how often a prediction is right, and keep the prediction."""

from abc import abstractmethod
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ood_toolkit.calibrators.base import Calibrator, checked, rowwise
from ood_toolkit.stats import row_chunks

AHEAD = 1e-6
"""How far, relatively, the prediction stays ahead of every other class: enough to survive rounding to float32."""
_CERTAIN = 1 - 1e-9
"""The largest confidence: a wrong certainty then costs about 21 nats plus the share of its class, and not infinity."""


def top_label_log_odds(logits: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """`log(p / (1 - p))` of each row's largest softmax probability p, in float64, at most 700.

    Exact where p itself would round to 1. A row with one possible class has log-odds 700.
    """
    peak, top = logits.max(dim=-1, keepdim=True)
    others = logits.scatter(-1, top, -torch.inf)
    return (peak.squeeze(-1) - others.logsumexp(dim=-1)).clamp(max=700)


class TopLabelCalibrator(Calibrator):
    """A calibrator that maps the confidence of the predicted class and nothing else.

    A subclass learns from the log-odds of each prediction and whether it was right (`fit_confidence`), and gives the
    probability of being right (`confidence`). This class makes a distribution of it, by one rule:

    1. the predicted class gets exactly the calibrated confidence g, held between 1/K (K possible classes) and 1 - 1e-9;
    2. the others share 1 - g in proportion to their softmax probabilities;
    3. where that would put one of them ahead of the prediction, it stops just below g, and what it loses goes to the
       rest, again in proportion.

    So the prediction never changes, and its confidence is what the map says, which neither plain rescaling nor
    flooring g at the runner-up achieves.
    """

    preserves_argmax = True

    def fit(self, logits: Float[Tensor, "N C"], labels: Int[Tensor, " N"]) -> Self:
        """Learns how often predictions of a given confidence are right. Returns itself."""
        logits, labels = checked(logits, labels)
        chunks = row_chunks(len(logits), 4 * logits.shape[1])
        log_odds = torch.cat([top_label_log_odds(logits[i : i + chunks.step].double()) for i in chunks])
        self.fit_confidence(log_odds, (logits.argmax(dim=1) == labels).double())
        return self

    @abstractmethod
    def fit_confidence(self, log_odds: Float[Tensor, " N"], correct: Float[Tensor, " N"]) -> None:
        """Learns from float64 log-odds of the predicted class, and 1 where it is the true one, else 0."""

    @abstractmethod
    def confidence(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The probability that a prediction with these log-odds is right, in float64."""

    def forward(self, logits: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """(N, C) probabilities with the calibrated confidence on the predicted class."""
        return rowwise(lambda rows: with_top_confidence(rows, self.confidence(top_label_log_odds(rows))), logits)


def with_top_confidence(logits: Float[Tensor, "N C"], confidence: Float[Tensor, " N"]) -> Float[Tensor, "N C"]:
    """The softmax of `logits` with `confidence` on each row's largest entry, by the rule of `TopLabelCalibrator`."""
    top = logits.argmax(dim=-1, keepdim=True)
    # argmax takes a NaN for the largest: the row would pass for a prediction of that class
    confidence = confidence.masked_fill(logits.gather(-1, top).squeeze(-1).isnan(), torch.nan)
    possible = (~logits.isneginf()).scatter(-1, top, False)
    count = possible.sum(dim=-1, keepdim=True)
    # below this the others could not all stay behind
    least = (1 + 1e-9) / (1 + count.to(logits.dtype) / (1 + AHEAD))
    confidence = confidence.unsqueeze(-1).clamp(max=_CERTAIN).maximum(least)
    shares = logits.masked_fill(~possible, -torch.inf).softmax(dim=-1)
    shares = torch.where(possible, shares.clamp_min(1e-300), 0.0)  # also: no other class at all gives 0 / 0
    others = _capped(shares * (1 - confidence), confidence / (1 + AHEAD), 1 - confidence, count)
    return others.scatter(-1, top, torch.where(count > 0, confidence, 1.0))


def _capped(
    masses: Float[Tensor, "N C"], caps: Float[Tensor, "N 1"], totals: Float[Tensor, "N 1"], counts: Int[Tensor, "N 1"]
) -> Float[Tensor, "N C"]:
    """`masses` (changed in place) with every entry at most its row's cap and the same row sum.

    What a capped entry loses goes to those below the cap, in proportion.

    Args:
        masses: non-negative; `counts` of them in each row are positive.
        caps: largest entry allowed, with `caps * counts > totals`.
        totals: the sums of the rows.
        counts: how many entries of a row may hold mass.
    """
    high = (masses > caps).any(dim=-1)
    if torch.compiler.is_compiling():
        return torch.where(high.unsqueeze(-1), _levelled(masses, caps, totals, counts), masses)
    rows = high.nonzero().flatten()
    if len(rows):  # few, and only they are sorted
        masses[rows] = _levelled(masses[rows], caps[rows], totals[rows], counts[rows])
    return masses


def _levelled(
    masses: Float[Tensor, "N C"], caps: Float[Tensor, "N 1"], totals: Float[Tensor, "N 1"], counts: Int[Tensor, "N 1"]
) -> Float[Tensor, "N C"]:
    ranked = masses.sort(dim=-1, descending=True).values
    left = ranked.flip(-1).cumsum(dim=-1).flip(-1)  # mass of the k-th largest and all below it
    capped = torch.arange(masses.shape[-1], device=masses.device)
    scale = (totals - capped * caps) / left.clamp_min(1e-300)
    # the first k at which capping the k largest suffices; one entry short of all of them always does
    first = ((scale * ranked <= caps) | (capped >= counts - 1)).long().argmax(dim=-1, keepdim=True)
    return (masses * scale.gather(-1, first)).minimum(caps)
