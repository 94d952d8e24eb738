"""Many methods at once: heat map, critical differences, agreement of scores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ood_toolkit.records import METRICS
from ood_toolkit.reporting.grid import Table
from ood_toolkit.reporting.plots import style
from ood_toolkit.reporting.plots.style import Drawing
from ood_toolkit.reporting.runs import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy import ndarray


def heat_map(table: Table, name: str, metric: str) -> Drawing:
    """One metric of every method (rows) on every data set (columns), with its numbers in the cells.

    Args:
        table: of that metric alone.
        name: file name.
        metric: its key.
    """
    import numpy as np

    values = np.array([[np.nan if c.value is None else c.value for c in row] for row in table.cells], dtype=float)
    rows, columns = values.shape
    labels = max(len(style.short(header.label, 40)) for header in table.rows)
    heads = [style.plain(style.short(header.group, 30)) for header in table.columns]
    slant = 0.065 * max(map(len, heads))
    width = min(style.PAGE, 0.065 * labels + max(0.62 * columns + 0.5 * slant, slant) + 0.5)
    figure, axes = style.canvas(width, 0.17 * rows + 0.6 * slant + 0.5)
    ax = axes[0]
    shade = values if METRICS[metric].higher_is_better else -values
    ax.imshow(shade, cmap="cividis", aspect="auto", vmin=np.nanmin(shade), vmax=np.nanmax(shade))
    middle = (np.nanmin(shade) + np.nanmax(shade)) / 2
    for i in range(rows):
        for j in range(columns):
            cell = table.cells[i][j]
            colour = "white" if shade[i, j] < middle else "black"
            weight = "bold" if cell.place == 1 else "normal"
            ax.text(j, i, cell.text, ha="center", va="center", fontsize=6, color=colour, weight=weight)
    ax.set_xticks(range(columns), heads, rotation=35, ha="left", rotation_mode="anchor")
    ax.set_yticks(range(rows), [style.plain(style.short(header.label, 40)) for header in table.rows])
    ax.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0)
    ax.spines[:].set_visible(False)
    label = METRICS[metric].label
    about = (
        f"{label} of every detector (rows) on every set (columns): brighter is better, the best of a column is bold, "
        "a dash is a missing number."
    )
    return Drawing(name=name, title=f"{label} at a glance", about=about, figure=figure)


def critical_differences(methods: Sequence[str], values: "ndarray", name: str, metric: str) -> Drawing:
    """Mean ranks over data sets with Nemenyi's critical difference (Demšar 2006); a bar joins the inseparable.

    Args:
        methods: K names.
        values: (K, B) of the metric on B ≥ 2 data sets.
        name: file name.
        metric: its key.
    """
    import numpy as np

    ranks = mean_ranks(values, higher_is_better=METRICS[metric].higher_is_better)
    gap = critical_difference(*values.shape)
    order = np.argsort(ranks, kind="stable")
    count = len(methods)
    left = (count + 1) // 2
    bars = cliques(ranks[order], gap)
    figure, axes = style.canvas(style.PAGE, 0.9 + 0.16 * left + 0.09 * len(bars))
    _draw_ranks(
        axes[0],
        [style.plain(style.short(name, 36)) for name in np.array(methods)[order].tolist()],
        ranks[order],
        bars,
        gap,
    )
    label = METRICS[metric].label
    about = (
        f"Mean rank by {label} of {count} detectors over {values.shape[1]} sets, best on the left. A bar joins "
        f"detectors whose mean ranks differ by less than Nemenyi's critical difference ({gap:.2f} at 5%): it cannot "
        f"tell them apart. Friedman's test: p = {friedman(values):.2g}. Sets that share images are no independent "
        "repetitions, so read it as a summary, not as a proof."
    )
    return Drawing(name=name, title=f"Critical differences in {label}", about=about, figure=figure)


def _draw_ranks(
    ax: "Axes", names: Sequence[str], ranks: "ndarray", bars: Sequence[tuple[int, int]], gap: float
) -> None:
    """The rank axis on top, bars below it, names on both sides; everything is sorted by rank."""
    import numpy as np

    count = len(names)
    left, pad = (count + 1) // 2, 0.55 * (count - 1)
    below = -0.6 - 0.55 * len(bars)
    ax.set(xlim=(1 - pad, count + pad), ylim=(below - left, 2.6))
    ax.axis("off")
    ax.plot([1, count], [0, 0], color="black", linewidth=0.8)
    for tick in np.unique(np.linspace(1, count, min(count, 10)).round()):
        ax.plot([tick, tick], [0, 0.25], color="black", linewidth=0.8)
        ax.text(tick, 0.4, f"{tick:.0f}", ha="center", va="bottom", fontsize=7)
    ax.plot([1, 1 + gap], [1.7, 1.7], color="black", linewidth=1.5)
    ax.text(1, 1.85, f"critical difference {gap:.2f}", fontsize=7, va="bottom")
    for position, (first, last) in enumerate(bars):
        height = -0.5 - 0.55 * position
        ax.plot([ranks[first], ranks[last]], [height] * 2, color="black", linewidth=2.2)
    for position, (name, rank) in enumerate(zip(names, ranks, strict=True)):
        is_left = position < left
        height = below - 0.3 - (position if is_left else count - 1 - position)
        end = 1 - 0.02 * count if is_left else count + 0.02 * count
        ax.plot([rank, rank, end], [0, height, height], color="#606060", linewidth=0.5)
        text = f"{name}  {rank:.2f} " if is_left else f" {rank:.2f}  {name}"
        ax.text(end, height, text, ha="right" if is_left else "left", va="center", fontsize=6.5)


def mean_ranks(values: "ndarray", *, higher_is_better: bool) -> "ndarray":
    """(K,) mean ranks of (K, B) values over the B columns; 1 is best, ties share their mean rank."""
    from scipy.stats import rankdata

    return rankdata(-values if higher_is_better else values, axis=0).mean(axis=1)


def critical_difference(methods: int, blocks: int) -> float:
    """Nemenyi's critical difference of mean ranks at 5%: `q √(K (K + 1) / (6 B))`."""
    from scipy.stats import studentized_range

    q = float(studentized_range.ppf(0.95, methods, 1_000_000)) / 2**0.5
    return q * (methods * (methods + 1) / (6 * blocks)) ** 0.5


def friedman(values: "ndarray") -> float:
    """The p-value of Friedman's test that K ≥ 3 methods rank alike; 1 where they tie everywhere."""
    from scipy.stats import friedmanchisquare

    return 1.0 if (values == values[0]).all() else float(friedmanchisquare(*values).pvalue)


def cliques(ranks: "ndarray", gap: float) -> list[tuple[int, int]]:
    """Longest runs of sorted ranks that lie within `gap`, as (first, last) with last > first."""
    found: list[tuple[int, int]] = []
    for first in range(len(ranks)):
        last = max(i for i in range(first, len(ranks)) if ranks[i] - ranks[first] <= gap)
        if last > first and not (found and found[-1][1] >= last):
            found.append((first, last))
    return found


def score_agreement(samples: Sequence[Sample], name: str) -> Drawing:
    """Spearman's rank correlation of every two detectors' scores on all images of one task; alike ones adjoin.

    Args:
        samples: at least two detectors', over the same images.
        name: file name.
    """
    import numpy as np
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    rho = rank_correlation(np.stack([sample.both for sample in samples]))
    if len(samples) > 2:
        apart = squareform(np.clip(1 - rho, 0, 2), checks=False)
        order = leaves_list(linkage(apart, method="average", optimal_ordering=True))
        rho, samples = rho[np.ix_(order, order)], [samples[i] for i in order]
    count = len(samples)
    names = [style.plain(style.short(sample.method, 30)) for sample in samples]
    labels = 0.06 * max(map(len, names))
    grid = max(1.1, min(0.24 * count, style.PAGE - labels - 1.2))
    figure, axes = style.canvas(min(style.PAGE, labels + grid + 1.2), 0.75 * labels + grid + 0.4)
    ax = axes[0]
    image = ax.imshow(rho, cmap="cividis", aspect="auto", vmin=min(0.0, float(rho.min())), vmax=1)
    if count <= 24:
        for i in range(count):
            for j in range(count):
                colour = "white" if rho[i, j] < 0.5 else "black"
                ax.text(j, i, f"{rho[i, j]:.2f}".replace("0.", "."), ha="center", va="center", fontsize=5, color=colour)
    slant, size = (45, 6) if count <= 24 else (90, 5)
    ax.set_xticks(range(count), names, rotation=slant, ha="left", va="center", rotation_mode="anchor", fontsize=size)
    ax.set_yticks(range(count), names, fontsize=size)
    ax.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0)
    ax.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=ax, shrink=0.5, label="rank correlation")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    record = samples[0].record
    about = (
        f"Spearman's rank correlation of {count} detectors' scores over all images of {record.dataset} with "
        f"{record.model}; alike detectors adjoin. Near 1: the two say the same, and combining them gains little."
    )
    return Drawing(name=name, title=f"Agreement of scores on {record.dataset}", about=about, figure=figure)


def rank_correlation(scores: "ndarray") -> "ndarray":
    """(K, K) Spearman correlations of (K, N) scores; 0 beside a constant score."""
    import numpy as np
    from scipy.stats import rankdata

    ranks = rankdata(scores, axis=1)
    ranks -= ranks.mean(axis=1, keepdims=True)
    norms = np.sqrt((ranks**2).sum(axis=1))
    norms[norms == 0] = np.inf
    rho = (ranks / norms[:, None]) @ (ranks / norms[:, None]).T
    np.fill_diagonal(rho, 1.0)
    return rho
