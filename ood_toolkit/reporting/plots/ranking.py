"""How well scores rank: histograms, ROC, precision-recall, risk-coverage."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ood_toolkit.reporting.plots import style
from ood_toolkit.reporting.plots.style import Drawing
from ood_toolkit.reporting.runs import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy import ndarray

SHOWN = 5
"""Methods drawn with a line of their own; the others are grey."""
_BASELINE = "msp"


def score_histograms(samples: Sequence[Sample], name: str, words: tuple[str, str]) -> Drawing:
    """A tile per method: where negatives and positives lie on its score.

    Args:
        samples: one task's.
        name: file name.
        words: what negatives and positives are, e.g. ("ID", "OOD").
    """
    import numpy as np

    figure, axes = style.tiles(len(samples), 4, 1.15)
    for ax, sample in zip(axes, samples, strict=True):
        low, high = np.percentile(sample.both, [0.5, 99.5])
        if not high > low:
            low, high = low - 0.5, high + 0.5
        edges = np.linspace(low, high, 31)
        for values, number in ((sample.negatives, 0), (sample.positives, 1)):
            heights, _ = np.histogram(np.clip(values, low, high), edges)
            share = heights / max(1, len(values))
            if number == 0:
                ax.stairs(share, edges, fill=True, color=style.ID_COLOUR, label=words[0])
            else:
                ax.stairs(
                    share, edges, fill=True, color="none", hatch="//////", edgecolor=style.OOD_COLOUR, linewidth=0
                )
                ax.stairs(share, edges, color=style.OOD_COLOUR, linewidth=1.0, label=words[1])
        ax.set_title(style.plain(style.short(sample.method)))
        ax.set_yticks([])
        ax.set_ylim(0, 1.4 * ax.get_ylim()[1])  # room for the number
        ax.spines.left.set_visible(False)
        ax.locator_params(axis="x", nbins=4)
        ax.text(0.98, 0.97, f"AUROC {auroc(sample):.3f}", ha="right", va="top", fontsize=6.5, transform=ax.transAxes)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    record = samples[0].record
    about = (
        f"Share of {words[0]} (filled) and {words[1]} images (hatched outline) by score, a tile per detector, on "
        f"{record.dataset} with {record.model}. Higher scores mean more {_meaning(record.task)}. The outermost "
        "half percent on either side is drawn in the last bin."
    )
    return Drawing(name=name, title=f"Scores on {record.dataset}", about=about, figure=figure)


def ranking_curves(samples: Sequence[Sample], name: str, words: tuple[str, str]) -> Drawing:
    """ROC and precision-recall side by side: the best few methods and the baseline in line, the others grey.

    Args:
        samples: one task's.
        name: file name.
        words: what negatives and positives are.
    """
    from sklearn.metrics import precision_recall_curve, roc_curve

    figure, (roc, pr) = style.canvas(style.PAGE, 3.3, 1, 2)
    order = sorted(samples, key=auroc, reverse=True)
    leading = _leading(order)
    for sample in [*(s for s in order if s not in leading), *leading]:
        truth = _truth(sample)
        false_alarms, hits, _ = roc_curve(truth, sample.both)
        precision, recall, _ = precision_recall_curve(truth, sample.both)
        if sample in leading:
            look = style.line(leading.index(sample))
            roc.plot(
                false_alarms, hits, **look, label=f"{style.plain(style.short(sample.method, 34))}  {auroc(sample):.3f}"
            )
            pr.plot(recall, precision, **look, drawstyle="steps-pre")
        else:
            roc.plot(false_alarms, hits, color=style.GREY, linewidth=0.6, zorder=1)
            pr.plot(recall, precision, color=style.GREY, linewidth=0.6, zorder=1, drawstyle="steps-pre")
    roc.plot([0, 1], [0, 1], color=style.GREY, linewidth=0.6, linestyle=":")
    roc.axhline(0.95, color=style.GREY, linewidth=0.5)
    roc.text(0.0, 0.955, "95% of positives", va="bottom", fontsize=6, color="#606060")
    first = samples[0]
    chance = len(first.positives) / len(first.both)
    pr.axhline(chance, color=style.GREY, linewidth=0.6, linestyle=":")
    pr.text(0.0, chance, f"by chance {chance:.3f}", va="bottom", fontsize=6, color="#606060")
    roc.set(xlabel=f"share of {words[0]} flagged", ylabel=f"share of {words[1]} flagged")
    pr.set(xlabel=f"recall of {words[1]}", ylabel="precision")
    for ax in (roc, pr):
        ax.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02), box_aspect=1)
    title = "AUROC" if len(leading) == len(samples) else f"AUROC, best of {len(samples)}"
    roc.legend(loc="lower right", title=title, frameon=True, framealpha=0.9, edgecolor="none")
    record = first.record
    about = (
        f"ROC (left) and precision-recall (right) of {len(samples)} detectors on {record.dataset} with {record.model}; "
        f"{words[1]} is the positive class. Named: the {len(leading)} with the highest AUROC and the baseline. "
        f"Best: {order[0].method}, AUROC {auroc(order[0]):.3f}."
    )
    return Drawing(name=name, title=f"ROC and precision-recall on {record.dataset}", about=about, figure=figure)


def risk_coverage_curves(samples: Sequence[Sample], name: str, recorded: Mapping[str, float]) -> Drawing:
    """Error rate among the images kept, by the share of images kept, for misclassification detection.

    Args:
        samples: one set's; right images are the negatives, wrong ones the positives.
        name: file name.
        recorded: AURC by method, as in the tables, for order and legend.
    """
    import numpy as np

    figure, axes = style.canvas(style.COLUMN, 2.8)
    ax: Axes = axes[0]
    curves = {id(sample): risk_coverage(sample) for sample in samples}
    order = sorted(samples, key=lambda s: recorded.get(s.method, float("inf")))
    leading = _leading(order)
    for sample in [*(s for s in order if s not in leading), *leading]:
        coverage, risk = curves[id(sample)]
        if sample in leading:
            aurc = f"  {recorded[sample.method]:.3f}" if sample.method in recorded else ""
            label = style.plain(style.short(sample.method)) + aurc
            ax.plot(coverage, risk, **style.line(leading.index(sample)), label=label)
        else:
            ax.plot(coverage, risk, color=style.GREY, linewidth=0.6, zorder=1)
    first = samples[0]
    rate = len(first.positives) / len(first.both)
    ax.axhline(rate, color=style.GREY, linewidth=0.6, linestyle=":")
    kept = np.linspace(0.001, 1, 500)
    ax.fill_between(kept, 0, np.maximum(0, 1 - (1 - rate) / kept), color="#E6E6E6", linewidth=0)
    tallest = max(float(curves[id(s)][1][len(curves[id(s)][1]) // 10 :].max()) for s in leading)
    ax.set(
        xlabel="share of images kept", ylabel="error rate among them", xlim=(0, 1), ylim=(0, max(rate, tallest) * 1.1)
    )
    ax.legend(loc="upper left", title="AURC", frameon=True, framealpha=0.9, edgecolor="none")
    record = first.record
    about = (
        f"Error rate among the images kept, by the share kept, when the most suspicious are set aside first: "
        f"{len(samples)} detectors on {record.dataset} with {record.model}. Dotted: keeping at random. Grey area: "
        f"better than any ranking. Lower is better; best: {order[0].method}."
    )
    return Drawing(name=name, title=f"Risk and coverage on {record.dataset}", about=about, figure=figure)


def risk_coverage(sample: Sample) -> "tuple[ndarray, ndarray]":
    """(N,) coverages k/N and (N,) expected error rates among the k least suspicious images.

    Within a group of equal scores every order is as likely, so errors come at the group's mean rate.
    """
    import numpy as np

    scores, wrong = sample.both, _truth(sample).astype(float)
    order = np.argsort(scores, kind="stable")
    _, group, sizes = np.unique(scores[order], return_inverse=True, return_counts=True)
    rate = np.bincount(group, weights=wrong[order]) / sizes
    kept = np.arange(1, len(scores) + 1)
    return kept / len(scores), np.cumsum(rate[group]) / kept


def _leading(order: Sequence[Sample]) -> list[Sample]:
    """The best few, and the baseline where it is not among them."""
    chosen = list(order[:SHOWN])
    return chosen + [s for s in order[SHOWN:] if s.method == _BASELINE]


def _truth(sample: Sample) -> "ndarray":
    import numpy as np

    return np.concatenate([np.zeros(len(sample.negatives)), np.ones(len(sample.positives))])


def auroc(sample: Sample) -> float:
    """Area under the ROC curve; positives score high."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(_truth(sample), sample.both))


def _meaning(task: str) -> str:
    return "out-of-distribution" if task == "anomaly" else "likely wrong"
