"""Histogram binning: how often predictions of this confidence were right."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.calibrators.top_label import TopLabelCalibrator

Binning = Literal["width", "mass"]


def bin_edges(values: Float[Tensor, " N"], bins: int, equal: Binning) -> Float[Tensor, " B-1"]:
    """Inner edges of at most `bins` bins of [0, 1]. A value on an edge belongs to the bin below it: bins are (a, b].

    Args:
        values: in [0, 1].
        bins: how many, ≥ 1. Ties can leave fewer of equal mass: a run of equal values is never cut.
        equal: "width" for edges at 1/B, 2/B, …; "mass" for as equally many values as ties allow, with edges half-way
            between neighbours.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    if equal == "width":
        return torch.linspace(0, 1, bins + 1, dtype=values.dtype, device=values.device)[1:-1]
    if equal != "mass":
        raise ValueError(f"equal must be 'width' or 'mass', got {equal!r}")
    ranked = values.sort().values
    cuts = (torch.arange(1, bins, device=values.device) * len(values)) // bins  # rows below each edge
    cuts = cuts[(cuts > 0) & (cuts < len(values))]
    # the end of the run of ties a cut falls into
    cuts = torch.searchsorted(ranked, ranked[cuts - 1].contiguous(), right=True).unique()
    cuts = cuts[cuts < len(values)]
    return (ranked[cuts - 1] + ranked[cuts]) / 2


def bin_means(
    values: Float[Tensor, " N"], targets: Float[Tensor, " N"], edges: Float[Tensor, " B-1"]
) -> Float[Tensor, " B"]:
    """The mean target in each bin; the bin's middle where it is empty."""
    index = torch.bucketize(values, edges)
    counts = torch.bincount(index, minlength=len(edges) + 1)
    sums = torch.bincount(index, weights=targets, minlength=len(edges) + 1)
    bounds = torch.cat([edges.new_zeros(1), edges, edges.new_ones(1)])
    return torch.where(counts > 0, sums / counts.clamp_min(1), (bounds[:-1] + bounds[1:]) / 2)


class HistogramCalibrator(TopLabelCalibrator):
    """The accuracy of the held-out predictions in the bin that a confidence falls into.

    Makes no assumption about the shape of the map, but gives only `bins` different confidences: it ranks no two rows
    of one bin, so selective prediction suffers. Bins are (a, b]; an empty one gives its middle.

    Args:
        bins: at most this many, ≥ 1.
        equal: "width" for equally wide bins, "mass" for equally full ones; runs of equal confidence are never cut.

    Differs from the paper in working on the predicted class's confidence (top label), not on each class against the
    rest.
    """

    name = "histogram"
    paper = (
        "Zadrozny and Elkan, Obtaining Calibrated Probability Estimates from Decision Trees and Naive Bayesian "
        "Classifiers, ICML 2001"
    )
    cite = "zadrozny2001obtaining"
    equation = "g(p) = share of right rows in the bin of p"
    family = "binning"
    edges: Float[Tensor, " B-1"]
    values: Float[Tensor, " B"]

    allowed = {"bins": "[1, inf)"}

    def __init__(self, bins: int = 15, equal: Binning = "width") -> None:
        super().__init__()
        self.bins = bins
        self.equal: Binning = equal

    def fit_confidence(self, log_odds: Float[Tensor, " N"], correct: Float[Tensor, " N"]) -> None:
        """Learns the edges and the accuracy in each bin."""
        confidence = log_odds.sigmoid()
        self.edges = bin_edges(confidence, self.bins, self.equal)
        self.values = bin_means(confidence, correct, self.edges)

    def confidence(self, log_odds: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The accuracy of the bin."""
        return self.values.double()[torch.bucketize(log_odds.sigmoid(), self.edges.double())]
