"""What is done with finished runs: `ood-bench table | figures | report | compare`, and `cite`."""

from pathlib import Path
from typing import Annotated, Any

import typer

results = typer.Typer()

_RUNS = Annotated[list[Path], typer.Argument(help="Run folders, or records.jsonl files.")]
_RUN_FOLDER = Annotated[Path, typer.Argument(help="A run folder.")]


@results.command()
def table(
    runs: _RUNS,
    format_: Annotated[
        str, typer.Option("--format", help="text, latex, markdown, csv, html or typst; aligned text by default.")
    ] = "",
    what: Annotated[str, typer.Option(help="detectors, calibrators, robustness, classes, corruptions or all.")] = "all",
    metrics: Annotated[str, typer.Option(help="Comma-separated metric keys, in the columns' order.")] = "",
    datasets: Annotated[str, typer.Option(help="Comma-separated data sets.")] = "",
    methods: Annotated[str, typer.Option(help="Comma-separated specs or patterns such as knn*.")] = "",
    models: Annotated[str, typer.Option(help="Comma-separated model specs.")] = "",
    group_by: Annotated[str, typer.Option(help="auto, none, family, model or dataset.")] = "auto",
    precision: Annotated[int | None, typer.Option(help="Digits after the point.")] = None,
    percent: Annotated[bool, typer.Option("--percent", help="Shares in percent.")] = False,
    intervals: Annotated[str, typer.Option(help="none, brackets or plusminus.")] = "none",
    transposed: Annotated[bool, typer.Option("--transposed", help="Methods as columns.")] = False,
    allow: Annotated[str, typer.Option(help="Settings that may differ between runs, as footnotes.")] = "",
    significance: Annotated[
        bool, typer.Option("--significance", help="Mark what no test tells from the best.")
    ] = False,
    siunitx: Annotated[bool, typer.Option("--siunitx", help="LaTeX: align with siunitx.")] = False,
    standalone: Annotated[bool, typer.Option("--standalone", help="LaTeX: a whole document.")] = False,
) -> None:
    """Renders the tables of runs, merged where their settings agree."""
    from ood_toolkit.registry import split_specs
    from ood_toolkit.reporting.formats import terminal
    from ood_toolkit.reporting.robustness import run_tables
    from ood_toolkit.reporting.runs import Run, merged_records
    from ood_toolkit.reporting.tables import TableOptions, render_tables, require_format, tables

    tied: frozenset[tuple[str, str, str, str, str]] = frozenset()
    if significance:
        from ood_toolkit.reporting import significance as tests

        tied = frozenset().union(*(tests.tied(Run.open(run), _paired_test) for run in runs))
    options = TableOptions(
        metrics=tuple(split_specs(metrics)),
        datasets=tuple(split_specs(datasets)),
        methods=tuple(split_specs(methods)),
        models=tuple(split_specs(models)),
        group_by=group_by,  # pyright: ignore[reportArgumentType]  # checked there
        precision=precision,
        scale="percent" if percent else "unit",
        intervals=intervals,  # pyright: ignore[reportArgumentType]  # checked there
        transposed=transposed,
        allow=tuple(split_specs(allow)),
        tied=tied,
    )
    require_format(format_ or "text")
    records = merged_records(runs)
    of_views = what in ("robustness", "classes", "corruptions")
    found = [] if of_views else tables(records, what=what, options=options)  # pyright: ignore[reportArgumentType]  # checked there
    if of_views or (what == "all" and not (options.metrics or options.methods)):
        found += run_tables(runs, "robustness" if what == "all" else what, options=options, needed=of_views)
    if format_:
        text = render_tables(found, format=format_, siunitx=siunitx, standalone=standalone)
        typer.echo(text, nl=not text.endswith("\n"))
    else:
        terminal.show(found)


@results.command()
def figures(
    run_folder: _RUN_FOLDER,
    out: Annotated[Path | None, typer.Option(help="Where to; figures/ in the run folder by default.")] = None,
    formats: Annotated[str, typer.Option(help="Comma-separated: pdf, svg, png.")] = "pdf,svg,png",
    methods: Annotated[str, typer.Option(help="Comma-separated specs or patterns; all by default.")] = "",
    datasets: Annotated[str, typer.Option(help="Comma-separated data sets; all by default.")] = "",
    images: Annotated[bool, typer.Option("--images", help="Contact sheets too; mind the images' licences.")] = False,
) -> None:
    """Draws the figures of a run."""
    from ood_toolkit.registry import split_specs
    from ood_toolkit.reporting.figures import figures as draw

    made = draw(
        run_folder,
        out or run_folder / "figures",
        formats=split_specs(formats),
        methods=split_specs(methods),
        datasets=split_specs(datasets),
        images=images,
    )
    for name, why in made.left_out:
        typer.echo(f"left out {name}: {why}", err=True)
    typer.echo(f"{len(made.pictures)} figures are in {out or run_folder / 'figures'}")


@results.command()
def report(
    run_folder: _RUN_FOLDER,
    out: Annotated[Path | None, typer.Option(help="The HTML file; report.html in the run folder by default.")] = None,
    images: Annotated[bool, typer.Option("--images", help="Thumbnails of failures; mind their licences.")] = False,
    draw: Annotated[bool, typer.Option(help="With figures.")] = True,
) -> None:
    """Writes one self-contained HTML page of a run."""
    from ood_toolkit.reporting.report import report as write

    typer.echo(f"the report is {write(run_folder, out or run_folder, images=images, draw=draw)}")


@results.command()
def compare(
    run_a: _RUN_FOLDER,
    run_b: _RUN_FOLDER,
    format_: Annotated[str, typer.Option("--format", help="text, markdown, latex, csv, html or typst.")] = "text",
    everything: Annotated[bool, typer.Option("--everything", help="Also what stayed the same.")] = False,
    fail_if_worse: Annotated[bool, typer.Option("--fail-if-worse", help="Exit code 1 if something got worse.")] = False,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Loss that is let pass, in unit scale.")] = 0.0,
) -> None:
    """Shows what changed from one run to another, with paired tests where per-image scores are there."""
    from ood_toolkit.reporting.compare import compare as changes
    from ood_toolkit.reporting.compare import render_comparison, worse

    found = changes(run_a, run_b, test=_paired_test)
    text = render_comparison(found, format=format_, everything=everything)
    typer.echo(text, nl=not text.endswith("\n"))
    losses = worse(found, tolerance=tolerance) if fail_if_worse else []
    if losses:
        typer.echo(f"{len(losses)} cells got worse", err=True)
        raise typer.Exit(1)


def _paired_test(metric: str, first: Any, second: Any) -> float:
    """The p-value that two detectors' scores of the same images have the same AUROC (DeLong)."""
    from ood_toolkit.metrics import delong_test

    if metric != "auroc":
        raise ValueError(f"there is no paired test for {metric!r} here")
    return delong_test(first, second).p_value


@results.command()
def cite(names: Annotated[list[str], typer.Argument(help="Detectors, calibrators or ensembles; or all.")]) -> None:
    """Prints BibTeX entries."""
    from ood_toolkit.citations import bibtex

    typer.echo(bibtex(names))
