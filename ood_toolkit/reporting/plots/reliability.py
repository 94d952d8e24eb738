"""How far probabilities can be taken at their word: reliability diagrams, and the confidence of wrong answers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ood_toolkit.reporting.plots import style
from ood_toolkit.reporting.plots.style import Drawing
from ood_toolkit.reporting.runs import Confidences

if TYPE_CHECKING:
    from numpy import ndarray

BINS = 15
_RESAMPLES = 1000
_BLOCK = 1 << 22
"""Random numbers drawn at once."""


def reliability_diagrams(found: Sequence[Confidences], name: str) -> Drawing:
    """A tile per calibrator, the plain softmax first: accuracy by confidence, with consistency bands.

    The bands (Bröcker and Smith 2007) hold 90% of the accuracies that each bin would show if every confidence were
    right: a point outside them is more than sampling noise.

    Args:
        found: one set's calibrators.
        name: file name.
    """
    import numpy as np

    figure, axes = style.tiles(len(found), 4, 1.9, sharex=True, sharey=True)
    edges = np.linspace(0, 1, BINS + 1)
    for number, (ax, one) in enumerate(zip(axes, found, strict=True)):
        index = bin_of(one.confidence)
        counts = np.bincount(index, minlength=BINS)
        filled = counts > 0
        with np.errstate(invalid="ignore"):
            accuracy = np.bincount(index, weights=one.correct, minlength=BINS) / counts
            confidence = np.bincount(index, weights=one.confidence, minlength=BINS) / counts
        low, high = consistency_band(one.confidence, index)
        ax.plot([0, 1], [0, 1], color=style.GREY, linewidth=0.7, linestyle=":")
        ax.fill_between(confidence[filled], low[filled], high[filled], color="#D9D9D9", linewidth=0)
        ax.plot(confidence[filled], accuracy[filled], color=style.COLOURS[1], marker="o", markersize=2.5, linewidth=1)
        ax.stairs(0.22 * counts / counts.max(), edges, fill=True, color=style.OOD_COLOUR, alpha=0.35)
        gap = float(np.sum(counts[filled] * np.abs(accuracy - confidence)[filled]) / counts.sum())
        ax.text(0.04, 0.97, f"ECE {gap:.3f}", va="top", fontsize=6.5, transform=ax.transAxes)
        title = one.record.method if one.record.method != "none" else "none (plain softmax)"
        ax.set_title(style.plain(style.short(title, 24)))
        ax.set(xlim=(0, 1), ylim=(0, 1), box_aspect=1, xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
        if number % 4 == 0:
            ax.set_ylabel("accuracy")
        ax.set_xlabel("confidence")
        ax.tick_params(labelbottom=True)
    record = found[0].record
    about = (
        f"Accuracy by confidence in {BINS} equal bins, a tile per calibrator, on {record.dataset} with {record.model}. "
        "On the dotted line confidence is right; grey band: where 90% of perfectly calibrated forecasts would fall; "
        "red bars: how many images have that confidence. Points below the line are overconfident."
    )
    return Drawing(name=name, title=f"Reliability on {record.dataset}", about=about, figure=figure)


def bin_of(confidence: "ndarray") -> "ndarray":
    """(N,) index of the equal-width bin (lower, upper] of each confidence."""
    import numpy as np

    return np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)


def consistency_band(confidence: "ndarray", index: "ndarray") -> "tuple[ndarray, ndarray]":
    """5% and 95% quantiles of every bin's accuracy if each image were right with exactly its confidence.

    Args:
        confidence: (N,) in [0, 1].
        index: (N,) bin of each image.
    """
    import numpy as np

    draw = np.random.default_rng(0)
    counts = np.bincount(index, minlength=BINS)
    totals = []
    rows = max(1, _BLOCK // len(confidence))
    for start in range(0, _RESAMPLES, rows):
        size = min(rows, _RESAMPLES - start)
        right = draw.random((size, len(confidence))) < confidence
        cells = (np.arange(size)[:, None] * BINS + index).ravel()
        totals.append(np.bincount(cells, weights=right.ravel(), minlength=size * BINS).reshape(size, BINS))
    with np.errstate(invalid="ignore"):
        accuracies = np.concatenate(totals) / counts
    low, high = np.full(BINS, np.nan), np.full(BINS, np.nan)
    filled = counts > 0
    low[filled], high[filled] = np.quantile(accuracies[:, filled], [0.05, 0.95], axis=0)
    return low, high


def wrong_confidence(found: Sequence[Confidences], name: str, recorded: Mapping[str, float]) -> Drawing:
    """How sure the model is when it is wrong: share of wrong answers above each confidence, a line per calibrator.

    Where there are more calibrators than lines can be told apart, those of the lowest NLL are drawn.

    Args:
        found: one set's calibrators, the plain softmax first, each with at least one wrong answer.
        name: file name.
        recorded: NLL by method, as in the tables.
    """
    import numpy as np

    figure, axes = style.canvas(style.COLUMN, 2.6)
    ax = axes[0]
    others = sorted(found[1:], key=lambda one: recorded.get(one.record.method, float("inf")))
    for number, one in enumerate([found[0], *others[: len(style.COLOURS) - 1]]):
        wrong = np.sort(one.confidence[~one.correct])
        share = 1 - np.arange(len(wrong) + 1) / len(wrong)
        label = style.plain(style.short(one.record.method, 24))
        steps = np.concatenate([[0.0], wrong, [1.0]])
        ax.plot(steps, np.append(share, share[-1]), **style.line(number), drawstyle="steps-post", label=label)
    ax.set(xlabel="confidence", ylabel="share of wrong answers above it", xlim=(0, 1), ylim=(0, 1.02))
    ax.legend(loc="lower left")
    record = found[0].record
    about = (
        f"Share of wrong answers that are given with more than the confidence on the axis, a line per calibrator (the "
        f"plain softmax and those of lowest NLL), on "
        f"{record.dataset} with {record.model}. Lower on the right is better: fewer confident mistakes."
    )
    return Drawing(name=name, title=f"Confidence of wrong answers on {record.dataset}", about=about, figure=figure)
