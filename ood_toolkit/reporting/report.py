"""The report of a run: one self-contained HTML file, readable without a network and without JavaScript."""

import base64
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from ood_toolkit.records import METRICS, Record
from ood_toolkit.reporting.classes import class_table
from ood_toolkit.reporting.corruptions import corruption_tables
from ood_toolkit.reporting.figures import figures
from ood_toolkit.reporting.formats import html
from ood_toolkit.reporting.grid import Table
from ood_toolkit.reporting.merging import method_of
from ood_toolkit.reporting.options import DEFAULTS, MAIN_METRICS, TableOptions
from ood_toolkit.reporting.page import Section, page, plain_table, scrolling
from ood_toolkit.reporting.plots.style import Picture
from ood_toolkit.reporting.robustness import read_views, robustness_tables
from ood_toolkit.reporting.runs import Run
from ood_toolkit.reporting.tables import tables

_LARGEST_SVG = 400_000
"""Bytes above which a figure goes in as PNG."""
_PIXELS_PER_INCH = 128
_STAGES = 12
"""Stages shown at once, the longest first."""
_QUESTIONS = {
    "misclassification": ("auroc", "Finding its errors"),
    "anomaly": ("auroc", "Finding OOD images"),
    "calibration": ("ece", "Calibration"),
}

_SETS_ON_A_PAGE = 12
"""A run on more sets, such as all of ImageNet-C, would make a page of 50 MB and more."""


def report(
    run_dir: Path,
    out: Path,
    *,
    options: TableOptions = DEFAULTS,
    draw: bool = True,
    images: bool = False,
    papers: Mapping[str, str] | None = None,
) -> Path:
    """Writes the report of a run folder and returns its path.

    Args:
        run_dir: a folder that `ood-bench` wrote.
        out: the HTML file, or a folder that gets a `report.html`.
        options: how the tables are shown.
        draw: with figures.
        images: with thumbnails of failures, which copy images of the data sets: mind their licences.
        papers: what to cite for each method; by default what run.json says under "papers".
    """
    run = Run.open(run_dir)
    pictures, left_out = _pictures(run, images) if draw else ([], ())
    sections = [
        Section("summary", "In short", _summary(run)),
        Section("tables", "Tables", _tables(run, options)),
        Section("robustness", "Robustness", _robustness(run)),
        Section("figures", "Figures", _figures(pictures, left_out)),
        Section("classes", "Class by class", _classes(run)),
        Section("glossary", "What the numbers mean", _glossary(run)),
        Section("rerun", "What was run, and how to rerun it", _rerun(run)),
        Section("environment", "Environment and timings", _environment(run)),
        Section("citations", "What to cite", _citations(papers or run.facts.get("papers", {}))),
    ]
    file = out / "report.html" if out.is_dir() or not out.suffix else out
    file.parent.mkdir(parents=True, exist_ok=True)
    title = f"{run.records[0].suite}: {_and(run.models())}"
    file.write_text(page(title, _lead(run), sections), encoding="utf-8")
    return file


def _lead(run: Run) -> str:
    caption = f"<p>{escape(run.facts['caption'])}</p>" if run.facts.get("caption") else ""
    first = run.records[0]
    words = [f"run {run.name}", f"protocol {first.protocol}", f"seed {first.seed}"]
    words += [str(run.facts[key]).replace("T", " ") for key in ("started",) if key in run.facts]
    return f'{caption}<p class="soft">{escape(", ".join(words))}</p>'


def _summary(run: Run) -> str:
    """The best of every question over all models, with its interval."""
    cards = []
    for task, (metric, words) in _QUESTIONS.items():
        for dataset in dict.fromkeys(dataset for _, dataset in run.questions(task)):
            found = [
                r
                for r in run.records
                if (r.task, r.dataset, r.metric) == (task, dataset, metric) and r.value is not None
            ]
            if found:
                best = (max if METRICS[metric].higher_is_better else min)(found, key=lambda r: r.value or 0.0)
                cards.append(_card(best, words, len(found)))
    return f'<ul class="cards">{"".join(cards)}</ul>' if cards else ""


def _card(record: Record, words: str, count: int) -> str:
    interval = "" if record.low is None or record.high is None else f" [{record.low:.3f}, {record.high:.3f}]"
    model = escape(record.model)
    return (
        f'<li><span class="soft">{words}: {escape(record.dataset)}</span><b>{escape(method_of(record))}</b>'
        f"{METRICS[record.metric].label} {record.value:.3f}{interval}, best of {count}"
        f'<br><span class="soft">{model}</span></li>'
    )


def _tables(run: Run, options: TableOptions) -> str:
    plain = [_framed(table) for table in tables(run.records, options=options)]
    wide = replace(options, intervals="brackets", label="intervals")
    detailed = [_framed(replace(t, title=f"{t.title}, with intervals")) for t in tables(run.records, options=wide)]
    has_intervals = any(r.low is not None for r in run.records)
    more = f"<details><summary>The same with intervals</summary>{''.join(detailed)}</details>" if has_intervals else ""
    hint = (
        '<p class="soft">With JavaScript, a click on a column head sorts by it; a third click restores the order.</p>'
    )
    return hint + "".join(plain) + more


def _robustness(run: Run) -> str:
    views = read_views(run.path)
    wide = replace(DEFAULTS, intervals="brackets", label="views")
    found = [*robustness_tables(views, options=wide), *corruption_tables([views], options=wide)]
    return "".join(map(_framed, found))


def _framed(table: Table) -> str:
    text = html.render([table])
    start, end = text.index("<table"), text.index("</table>") + len("</table>")
    inner = text[start:end].replace("<table", '<table class="sortable"', 1)
    caption = inner[inner.index("<caption>") : inner.index("</caption>") + len("</caption>")]
    below = f'<p class="notes">{caption.removeprefix("<caption>").removesuffix("</caption>")}</p>'
    # the caption stands outside the scrolling frame, where it wraps to the page and not to the table
    named = inner.replace(caption, f"<caption hidden>{escape(table.title)}</caption>")
    return f"<h3>{escape(table.title)}</h3>{text[:start]}{scrolling(named, table.title)}{below}{text[end:]}"


def _pictures(run: Run, images: bool) -> tuple[list[tuple[Picture, str]], tuple[tuple[str, str], ...]]:
    """Every figure with its data URI, and what could not be drawn."""
    with tempfile.TemporaryDirectory() as folder:
        drawn, others = _drawn_sets(run)
        gallery = figures(run.path, Path(folder), formats=("svg", "png"), datasets=drawn, images=images)
        why = f"too many for one page; ood-bench figures {run.name} --datasets draws those that it names"
        left_out = ((f"curves and histograms of {len(others)} sets, first {others[0]}", why),) if others else ()
        return [(picture, _data_uri(picture)) for picture in gallery.pictures], (*left_out, *gallery.left_out)


def _drawn_sets(run: Run) -> tuple[list[str], list[str]]:
    """The sets with curves and histograms on the page, and those without where there are too many for one page."""
    names = list(dict.fromkeys(record.dataset for record in run.records))
    if len(names) <= _SETS_ON_A_PAGE:
        return names, []
    whole = [name for name in names if "/" not in name][:_SETS_ON_A_PAGE] or names[:1]  # no parts of ImageNet-C
    return whole, [name for name in names if name not in whole]


def _data_uri(picture: Picture) -> str:
    svg, png = picture.files
    is_sheet = "sheet" in picture.name or "missed" in picture.name
    small = svg.stat().st_size <= _LARGEST_SVG and not is_sheet
    file, kind = (svg, "svg+xml") if small else (png, "png")
    return f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode('ascii')}"


def _figures(pictures: Sequence[tuple[Picture, str]], left_out: Sequence[tuple[str, str]]) -> str:
    parts = []
    for number, model in enumerate(dict.fromkeys(picture.model for picture, _ in pictures)):
        shown = "".join(_figure(picture, uri) for picture, uri in pictures if picture.model == model)
        is_open = " open" * (number == 0)
        parts.append(f"<details{is_open}><summary>Figures of {escape(model)}</summary>{shown}</details>")
    reasons = "".join(f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in left_out)
    if reasons:
        parts.append(f"<details><summary>Not drawn</summary><ul>{reasons}</ul></details>")
    return "".join(parts)


def _figure(picture: Picture, uri: str) -> str:
    about, width = escape(picture.about), picture.width * _PIXELS_PER_INCH
    return (
        f"<figure><h3>{escape(picture.title)}</h3>"
        f'<img src="{uri}" alt="{about}" style="width:{width:.0f}px" loading="lazy">'
        f"<figcaption>{about}</figcaption></figure>"
    )


def _classes(run: Run) -> str:
    names = run.facts.get("class_names", ())
    drawn, _ = _drawn_sets(run)
    questions = [(model, dataset) for model, dataset in run.questions("calibration") if dataset in drawn]
    made = (class_table(run, model, dataset, names=names) for model, dataset in questions)
    return "".join(
        f"<details{' open' * (number == 0)}><summary>{escape(table.title)}</summary>{_framed(table)}</details>"
        for number, table in enumerate(t for t in made if t is not None)
    )


def _glossary(run: Run) -> str:
    shown = [key for keys in MAIN_METRICS.values() for key in keys]
    present = {record.metric for record in run.records}
    keys = [key for key in dict.fromkeys([*shown, *METRICS]) if key in present]
    ways = {True: "↑ higher is better", False: "↓ lower is better"}
    items = "".join(
        f"<dt>{metric.label} {ways[metric.higher_is_better]}</dt><dd>{escape(metric.about)}</dd>"
        for metric in (METRICS[key] for key in keys if key in METRICS)
    )
    return (
        "<p>Every detector gives each image one score: higher means more out-of-distribution, or more likely wrong. "
        "OOD (out-of-distribution) images show nothing that the model knows; ID (in-distribution) images do.</p>"
        f"<dl>{items}</dl>"
    )


def _rerun(run: Run) -> str:
    facts, parts = run.facts, []
    if facts.get("command"):
        parts.append(f"<p>Command:</p><pre>{escape(shlex.join(map(str, facts['command'])))}</pre>")
    rows = [
        (words, _listing(facts[key]))
        for key, words in (
            ("parts", "Images"),
            ("models", "Models"),
            ("second_opinion", "Second opinion"),
            ("zero_shot", "What zero-shot models were told"),
            ("detectors", "Detectors"),
            ("calibrators", "Calibrators"),
            ("left_out", "Left out"),
            ("unreadable", "Unreadable images"),
        )
        if facts.get(key)
    ]
    parts += [f"<details><summary>{words}</summary>{text}</details>" for words, text in rows]
    reasons = dict.fromkeys((r.model, method_of(r), r.reason) for r in run.records if r.value is None)
    lacking = "".join(f"<li>{escape(method)} ({escape(model)}): {escape(why)}</li>" for model, method, why in reasons)
    if lacking:
        parts.append(f"<details><summary>Numbers that are missing, and why</summary><ul>{lacking}</ul></details>")
    return "".join(parts)


def _listing(value: Any) -> str:
    """Nested facts as nested lists."""
    if isinstance(value, Mapping):
        items = "".join(f"<li><b>{escape(str(key))}</b>: {_listing(inner)}</li>" for key, inner in value.items())
        return f"<ul>{items}</ul>"
    if isinstance(value, list):
        return f"<ul>{''.join(f'<li>{_listing(inner)}</li>' for inner in value)}</ul>"
    return f"<code>{escape(str(value))}</code>"


def _environment(run: Run) -> str:
    facts = run.facts
    known = {"parts", "models", "detectors", "calibrators", "left_out", "unreadable", "stages", "command", "caption"}
    known |= {"papers", "class_names", "masks", "tasks", "choices", "second_opinion", "zero_shot", "failed"}
    rows = [[escape(key), escape(_plain(value))] for key, value in facts.items() if key not in known]
    made = plain_table(("Fact", "Value"), rows, "Environment") if rows else ""
    stages = {key: float(value) for key, value in facts.get("stages", {}).items()}
    if not stages:
        return made
    longest = max(stages.values()) or 1.0
    bars = [
        [escape(name), f"{seconds:.1f} s", f'<span class="bar" style="width:{8 * seconds / longest:.2f}rem"></span>']
        for name, seconds in sorted(stages.items(), key=lambda pair: -pair[1])
    ]
    heads = ("Stage", "Wall time", "Share")
    times = plain_table(heads, bars[:_STAGES], "Wall time of the longest stages")
    if len(bars) > _STAGES:
        rest = plain_table(heads, bars[_STAGES:], "Wall time of the other stages")
        times += f"<details><summary>{len(bars) - _STAGES} shorter stages</summary>{rest}</details>"
    return f"{made}<h3>Wall time</h3>{times}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _citations(papers: Mapping[str, str]) -> str:
    by_paper: dict[str, list[str]] = {}
    for method, paper in papers.items():
        if paper:
            by_paper.setdefault(paper, []).append(method)
    items = "".join(
        f"<li>{escape(paper)} <span class='soft'>({escape(', '.join(methods))})</span></li>"
        for paper, methods in by_paper.items()
    )
    return f"<ul>{items}</ul>" if items else ""


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
