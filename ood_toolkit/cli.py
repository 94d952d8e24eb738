"""The command line: `ood-bench --detectors all`. Results go to stdout, everything else to stderr."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ood_toolkit.benchmarks.results import RunFolder
    from ood_toolkit.extract import Progress

# nothing heavy is imported here: --help must answer at once

# \b keeps the line breaks of the paragraph that follows
_EXAMPLES = """

\b
Every detector and calibrator on the embedded digits suite:
  ood-bench --detectors all

\b
Your own images; methods learn from a part of --id that is never scored:
  ood-bench --suite folders --model timm:resnet50 \\
      --id photos/known --ood strange=photos/strange

\b
Chosen methods, with parameters, on calibrated logits, of your own:
  ood-bench --detectors "energy(temperature=2),knn(k=50)"
  ood-bench --detectors temperature+msp --calibrators temperature
  ood-bench --detectors my_pkg:MyDetector

\b
What there is, and what to cite:
  ood-bench --list
  ood-bench cite energy vim
"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_SUITE = "What is scored"
_MODEL = "Models"
_RUN = "How it runs"


@app.callback(invoke_without_command=True, epilog=None, help="Scores detectors and calibrators together." + _EXAMPLES)
def bench(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Option(
            help="digits (embedded), folders (your images), natural-adversarial, imagenet-a, …", rich_help_panel=_SUITE
        ),
    ] = "",
    detectors: Annotated[
        str,
        typer.Option(help="Comma-separated specs; all; one-pass (no gradients, no inner layers); -NAME takes one out."),
    ] = "all",
    calibrators: Annotated[str, typer.Option(help="Comma-separated specs, or all.")] = "all",
    ensemble: Annotated[
        str, typer.Option(help="Ways to pool several models: comma-separated specs, all, or none.")
    ] = "all",
    model: Annotated[
        list[str] | None,
        typer.Option(help="timm:NAME, torchvision:NAME, demo:efficientnet_lite0, my_pkg:factory; repeatable."),
    ] = None,
    member: Annotated[
        list[str] | None, typer.Option(help="A further model that only joins the ensemble; repeatable.")
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(help="Weights for each --model and --member, in order: safetensors or a state dict."),
    ] = None,
    snapshots: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints of the first --model; each joins the ensemble.")
    ] = None,
    pretrained: Annotated[bool, typer.Option(help="Load published weights where no checkpoint is given.")] = True,
    transform: Annotated[
        str, typer.Option(help="own: each model's own; official: that of the ImageNet-A/O paper.")
    ] = "own",
    head: Annotated[str, typer.Option(help="Module name of the head, or logits; found by itself by default.")] = "",
    classes: Annotated[
        int | None, typer.Option(min=1, help="Classes of the checkpoint, where not the model's own number.")
    ] = None,
    id_: Annotated[Path | None, typer.Option("--id", help="In-distribution images, one folder per class.")] = None,
    ood: Annotated[list[str] | None, typer.Option(help="NAME=DIR of out-of-distribution images; repeatable.")] = None,
    labels: Annotated[
        Path | None, typer.Option(help="File of image path and class for --id, instead of folders.")
    ] = None,
    fit: Annotated[Path | None, typer.Option(help="Images that detectors learn from, one folder per class.")] = None,
    calibrate: Annotated[Path | None, typer.Option(help="Images that calibrators learn from.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; $OOD_DATA_ROOT by default.")] = None,
    protocol: Annotated[
        str, typer.Option(help="official, full-1000way, official+1000way or vim-1000way, for ImageNet suites.")
    ] = "official",
    learn: Annotated[
        str, typer.Option(help="What methods learn from on ImageNet suites: auto, train, v2, validation, none.")
    ] = "auto",
    fit_per_class: Annotated[int, typer.Option(min=1, help="Images per class from ImageNet train.")] = 50,
    fit_fraction: Annotated[float, typer.Option(help="Share of --id for fitting, where --fit is not given.")] = 0.3,
    calibrate_fraction: Annotated[
        float, typer.Option(help="Share of --id for calibration, where --calibrate is not given.")
    ] = 0.2,
    absent_classes: Annotated[
        str, typer.Option(help="Classes without a fit image: error, or skip (they get no prototype).")
    ] = "error",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto takes a GPU where there is one.")] = "auto",
    amp: Annotated[str, typer.Option(help="off, bfloat16 or float16; auto is bfloat16 on CUDA.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="How logits and features are kept: float32, bfloat16, float16.")
    ] = "float32",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 64,
    workers: Annotated[int, typer.Option(min=-1, help="Decoding processes; -1 chooses.")] = -1,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of splits, training and resampling.")] = 0,
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples per interval; 0 for none.")] = 1000,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/SUITE-TIME by default.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Store of outputs; $OOD_CACHE or ~/.cache/ood-toolkit.")] = None,
    strict: Annotated[bool, typer.Option(help="An unreadable image is an error.")] = False,
    intervals: Annotated[bool, typer.Option(help="Print 95% intervals in the tables.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print records as JSON lines instead of tables.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List detectors, calibrators and ensembles, and exit.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Runs a suite; see the module for the order of things."""
    if context.invoked_subcommand:
        return
    if version:
        from ood_toolkit import __version__

        typer.echo(f"ood-bench {__version__}")
        return
    if list_:
        from ood_toolkit.benchmarks.listing import listing

        typer.echo(listing(wide=sys.stdout.isatty()))
        return
    from ood_toolkit.benchmarks.command import Choices, default_cache, run

    folders = {"id": id_, "labels": labels, "fit": fit, "calibrate": calibrate}
    choices = Choices(
        suite=suite,
        detectors=detectors,
        calibrators=calibrators,
        ensemble=ensemble,
        models=tuple(model or ()),
        members=tuple(member or ()),
        checkpoints=tuple(checkpoint or ()),
        snapshots=snapshots,
        pretrained=pretrained,
        transform=transform,
        head=head,
        classes=classes,
        folders={name: path for name, path in folders.items() if path is not None},
        ood=tuple(ood or ()),
        data_root=data_root,
        protocol=protocol,
        learn=learn,
        fit_per_class=fit_per_class,
        fit_fraction=fit_fraction,
        calibrate_fraction=calibrate_fraction,
        absent_classes=absent_classes,
        device=device,
        amp=amp,
        dtype=dtype,
        batch_size=batch_size,
        workers=workers,
        seed=seed,
        resamples=resamples,
        out=out or Path("runs") / f"{(suite or 'run').replace('/', '-')}-{datetime.now():%Y%m%d-%H%M%S}",
        cache=cache or default_cache(),
        strict=strict,
    )
    with _progress() as progress:
        folder = run(choices, say=lambda text: typer.echo(text, err=True), progress=progress)
    _show(folder, intervals=intervals, as_json=json_)


_RUNS = Annotated[list[Path], typer.Argument(help="Run folders, or records.jsonl files.")]
_RUN_FOLDER = Annotated[Path, typer.Argument(help="A run folder.")]


@app.command()
def table(
    runs: _RUNS,
    format_: Annotated[
        str, typer.Option("--format", help="text, latex, markdown, csv, html or typst; aligned text by default.")
    ] = "",
    what: Annotated[str, typer.Option(help="detectors, calibrators or all.")] = "all",
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
    from ood_toolkit.reporting.runs import Run, merged_records
    from ood_toolkit.reporting.tables import TableOptions, print_terminal, render

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
    records = merged_records(runs)
    chosen = what  # pyright: ignore
    if format_:
        text = render(records, format=format_, what=chosen, options=options, siunitx=siunitx, standalone=standalone)  # pyright: ignore
        typer.echo(text, nl=not text.endswith("\n"))
    else:
        print_terminal(records, what=chosen, options=options)  # pyright: ignore


@app.command()
def figures(
    run_folder: _RUN_FOLDER,
    out: Annotated[Path | None, typer.Option(help="Where to; figures/ in the run folder by default.")] = None,
    formats: Annotated[str, typer.Option(help="Comma-separated: pdf, svg, png.")] = "pdf,svg,png",
    methods: Annotated[str, typer.Option(help="Comma-separated specs or patterns; all by default.")] = "",
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
        images=images,
    )
    for name, why in made.left_out:
        typer.echo(f"left out {name}: {why}", err=True)
    typer.echo(f"{len(made.pictures)} figures are in {out or run_folder / 'figures'}")


@app.command()
def report(
    run_folder: _RUN_FOLDER,
    out: Annotated[Path | None, typer.Option(help="The HTML file; report.html in the run folder by default.")] = None,
    images: Annotated[bool, typer.Option("--images", help="Thumbnails of failures; mind their licences.")] = False,
    draw: Annotated[bool, typer.Option(help="With figures.")] = True,
) -> None:
    """Writes one self-contained HTML page of a run."""
    from ood_toolkit.reporting.report import report as write

    typer.echo(f"the report is {write(run_folder, out or run_folder, images=images, draw=draw)}")


@app.command()
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


data = typer.Typer(help="Data sets: what there is, fetching, checking.", rich_markup_mode=None)
app.add_typer(data, name="data")
_ROOT = Annotated[Path | None, typer.Option(help="Where data sets lie; $OOD_DATA_ROOT by default.")]


@data.command("list")
def data_list(data_root: _ROOT = None) -> None:
    """Lists every known set with use, size, licence, and where it lies."""
    from ood_toolkit.datasets.commands import list_data

    rows = [("name", "use", "size", "licence", "where"), *list_data(data_root)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
        typer.echo("  ".join((*cells, row[4])))


@data.command("get")
def data_get(
    names: Annotated[list[str], typer.Argument(help="Sets, as data list has them.")],
    data_root: _ROOT = None,
    yes: Annotated[bool, typer.Option("--yes", help="Take licence and size as agreed.")] = False,
    keep_archive: Annotated[bool, typer.Option(help="Leave the archive after unpacking.")] = False,
    unpack: Annotated[bool, typer.Option(help="Unpack; archives of images can also be read as they are.")] = True,
) -> None:
    """Fetches sets, with resume, checksum and path checks; shows licence and size first."""
    from ood_toolkit.datasets.commands import get_data

    with _progress("bytes/s") as progress:
        get_data(
            names,
            data_root,
            yes=yes,
            ask=lambda text: typer.confirm(text, err=True),
            unpacked=unpack,
            keep_archive=keep_archive,
            say=lambda text: typer.echo(text, err=True),
            progress=progress,
        )


@data.command("check")
def data_check(
    names: Annotated[list[str] | None, typer.Argument(help="Sets; by default all that are there.")] = None,
    data_root: _ROOT = None,
) -> None:
    """Verifies counts and class folders of what is there; exit code 1 if something is wrong."""
    from ood_toolkit.datasets.commands import check_data

    lines, well = check_data(names or [], data_root)
    typer.echo("\n".join(lines))
    if not well:
        raise typer.Exit(1)


@app.command()
def cite(names: Annotated[list[str], typer.Argument(help="Detectors, calibrators or ensembles; or all.")]) -> None:
    """Prints BibTeX entries."""
    from ood_toolkit.citations import bibtex

    typer.echo(bibtex(names))


def _show(folder: "RunFolder", *, intervals: bool, as_json: bool) -> None:
    """Writes the tables into the run folder and prints them."""
    from ood_toolkit.reporting.tables import TableOptions, print_terminal, render

    files = {"table.md": "markdown", "table.csv": "csv", "table.tex": "latex"}
    folder.finish({name: render(folder.records, format=style) for name, style in files.items()})
    if as_json:
        typer.echo((folder.path / "records.jsonl").read_text(encoding="utf-8"), nl=False)
    else:
        print_terminal(folder.records, options=TableOptions(intervals="brackets" if intervals else "none"))
    typer.echo(f"results are in {folder.path}", err=True)


@contextmanager
def _progress(unit: str = "images/s") -> "Iterator[Progress]":
    """Progress bars on stderr, with rate and time left; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{{task.fields[rate]}} {unit}"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(done: int, total: int, name: str) -> None:
            if name not in tasks or done == 0:
                tasks[name] = bars.add_task(name, total=total or None, rate="–")
            speed = bars.tasks[tasks[name]].speed
            bars.update(tasks[name], completed=done, rate=f"{speed:.0f}" if speed else "–")

        yield advance


def main() -> None:
    """The `ood-bench` command: wrong input ends with one line on stderr and exit code 2, a fault of code with 1."""
    if "" not in sys.path:
        sys.path.append("")  # my_pkg:MyDetector may lie in the current folder; installed packages come first
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without arrows and dashes shows question marks
    try:
        app()
    except Exception as error:
        if os.environ.get("OOD_DEBUG"):
            raise
        text = " ".join(str(error).split())
        if isinstance(error, ValueError | OSError):
            typer.echo(f"ood-bench: {text}", err=True)
            raise SystemExit(2) from None
        typer.echo(f"ood-bench: {type(error).__name__}: {text} (OOD_DEBUG=1 shows where)", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
