"""`ood-bench` itself: scores detectors and calibrators together."""

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ood_toolkit.cli.allocation import keep_freed_memory
from ood_toolkit.cli.interrupted import interruptible
from ood_toolkit.cli.progress import progress_bars

if TYPE_CHECKING:
    from ood_toolkit.benchmarks.choices import Choices
    from ood_toolkit.benchmarks.results import RunFolder

# \b keeps the line breaks of the paragraph that follows
EXAMPLES = """

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

_SUITE = "What is scored"
_MODEL = "Models"
_RUN = "How it runs"


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
    tune_on: Annotated[
        str, typer.Option(metavar="NAME=DIR", help="OOD images on which tuned+NAME chooses its hyper-parameters.")
    ] = "",
    calibrators: Annotated[str, typer.Option(help="Comma-separated specs, or all; -NAME takes one out.")] = "all",
    ensemble: Annotated[
        str, typer.Option(help="Ways to pool several models: comma-separated specs, all, or none.")
    ] = "all",
    model: Annotated[
        list[str] | None,
        typer.Option(help="timm:NAME, torchvision:NAME, open_clip:ARCH/TAG, my_pkg:factory, …; repeatable."),
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
        str,
        typer.Option(
            help="own: each model's own; official: that of the ImageNet-A/O paper; squash: not cropped, as ViM."
        ),
    ] = "own",
    head: Annotated[str, typer.Option(help="Module name of the head, or logits; found by itself by default.")] = "",
    classes: Annotated[
        int | None, typer.Option(min=1, help="Classes of the checkpoint, where not the model's own number.")
    ] = None,
    prompts: Annotated[
        str,
        typer.Option(help="openai80 (default), best7, single, or a file: one prompt a line, {} for the class name."),
    ] = "",
    class_names: Annotated[
        Path | None, typer.Option(help="File with one class name a line; the 1000 of ImageNet by default.")
    ] = None,
    outlier_prompt: Annotated[
        list[str] | None, typer.Option(help="What should not come, in words, for outlier_prompts; repeatable.")
    ] = None,
    negatives: Annotated[
        str, typer.Option(help="Where neglabel's negative labels come from: wordnet, wordnet:first, or a place.")
    ] = "",
    negatives_share: Annotated[
        float | None, typer.Option(help="Share of the words that become negative labels; 0.15 by default.")
    ] = None,
    second_opinion: Annotated[
        str, typer.Option(help="open_clip:ARCH/TAG: its MCM score stands beside each model's detectors.")
    ] = "",
    id_: Annotated[
        Path | None,
        typer.Option("--id", help="In-distribution images: a folder of class folders, a tar, shards, hub:OWNER/NAME."),
    ] = None,
    ood: Annotated[
        list[str] | None, typer.Option(help="NAME=PLACE of out-of-distribution images, as for --id; repeatable.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="File of image path and class for --id, instead of folders.")
    ] = None,
    fit: Annotated[Path | None, typer.Option(help="Images that detectors learn from, one folder per class.")] = None,
    calibrate: Annotated[Path | None, typer.Option(help="Images that calibrators learn from.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; $OOD_DATA_ROOT by default.")] = None,
    protocol: Annotated[
        str, typer.Option(help="official, full-1000way, official+1000way, masked or vim-1000way, for ImageNet suites.")
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
    channels_last: Annotated[
        str, typer.Option(help="Memory layout of convolutions: on, off; auto takes the faster one.")
    ] = "auto",
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the model (torch.compile): pays from some ten thousand images.")
    ] = False,
    batch_size: Annotated[
        int, typer.Option(min=0, help="Images per forward pass; 0 finds it, and any is halved where memory runs out.")
    ] = 0,
    workers: Annotated[int, typer.Option(min=-1, help="Decoding processes; -1 chooses.")] = -1,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of splits, training and resampling.")] = 0,
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples per interval; 0 for none.")] = 1000,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/SUITE-TIME by default.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Store of outputs; $OOD_CACHE or ~/.cache/ood-toolkit.")] = None,
    strict: Annotated[bool, typer.Option(help="An unreadable image is an error.")] = False,
    intervals: Annotated[bool, typer.Option(help="Print 95% intervals in the tables.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print records as JSON lines instead of tables.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List detectors, calibrators and ensembles, and exit.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be read, computed, fitted and written; time and space.")
    ] = False,
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
    keep_freed_memory()
    from ood_toolkit.benchmarks.choices import Choices, default_cache
    from ood_toolkit.benchmarks.launch import launch

    folders = {"id": id_, "labels": labels, "fit": fit, "calibrate": calibrate}
    choices = Choices(
        suite=suite,
        detectors=detectors,
        tune_on=tune_on,
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
        prompts=prompts,
        class_names=class_names,
        outlier_prompts=tuple(outlier_prompt or ()),
        negatives=negatives,
        negatives_share=negatives_share,
        second_opinion=second_opinion,
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
        channels_last=channels_last,
        compile=compile_,
        batch_size=batch_size,
        workers=workers,
        seed=seed,
        resamples=resamples,
        out=out or Path("runs") / f"{(suite or 'run').replace('/', '-')}-{datetime.now():%Y%m%d-%H%M%S}",
        cache=cache or default_cache(),
        strict=strict,
    )
    if dry_run:
        _plan(choices, as_json=json_)
        return
    with interruptible(_kept(choices)):
        folder = launch(choices, say=lambda text: typer.echo(text, err=True), bars=progress_bars)
    if folder is not None:
        _show(folder, intervals=intervals, as_json=json_)
        failed = [f"{spec} has no numbers: {reason}" for spec, reason in folder.facts["failed"].items()]
        if failed:
            raise ValueError("; ".join(failed))


def _plan(choices: "Choices", *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from ood_toolkit.benchmarks.command import plan
    from ood_toolkit.distributed import launched

    if launched() and os.environ["RANK"] != "0":
        return  # all ranks would say the same
    made = plan(choices)
    typer.echo(json.dumps(asdict(made), default=str, ensure_ascii=False, indent=1) if as_json else str(made))


def _kept(choices: "Choices") -> str:
    """What Ctrl-C leaves, in words."""
    numbers = choices.out / "records.jsonl"
    return (
        f"the same command resumes: the forward pass goes on from its last whole shard of 512 images in "
        f"{str(choices.cache)!r}" + (f", and the numbers so far are in {str(numbers)!r}" if numbers.exists() else "")
    )


def _show(folder: "RunFolder", *, intervals: bool, as_json: bool) -> None:
    """Writes the tables into the run folder and prints them."""
    from ood_toolkit.reporting.formats import terminal
    from ood_toolkit.reporting.robustness import run_tables
    from ood_toolkit.reporting.tables import TableOptions, render, tables

    files = {"table.md": "markdown", "table.csv": "csv", "table.tex": "latex"}
    folder.finish({name: render(folder.records, format=style) for name, style in files.items()})
    if as_json:
        typer.echo((folder.path / "records.jsonl").read_text(encoding="utf-8"), nl=False)
    else:
        options = TableOptions(intervals="brackets" if intervals else "none")
        terminal.show(
            [*tables(folder.records, options=options), *run_tables([folder.path], "robustness", options=options)]
        )
    typer.echo(f"results are in {folder.path}", err=True)
