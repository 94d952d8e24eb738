"""`ood-bench data …`."""

from pathlib import Path
from typing import Annotated

import typer

from ood_toolkit.cli.interrupted import interruptible
from ood_toolkit.cli.progress import progress_bars

data = typer.Typer(help="Data sets: what there is, fetching, checking.", rich_markup_mode=None)
_ROOT = Annotated[Path | None, typer.Option(help="Where data sets lie; $OOD_DATA_ROOT by default.")]


@data.command("list")
def data_list(
    data_root: _ROOT = None,
    notes: Annotated[bool, typer.Option("--notes", help="Also remarks, such as who states the licence.")] = False,
) -> None:
    """Lists every known set with use, size, licence, and where it lies."""
    from ood_toolkit.datasets.commands import list_data

    rows = [("name", "use", "size", "licence", "where", "notes"), *list_data(data_root)]
    shown = [row if notes else row[:-1] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]) - 1)]
    for row in shown:
        cells = [cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)]
        typer.echo("  ".join(cells).rstrip())


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

    with interruptible("the same command resumes where the download stopped"), progress_bars("bytes/s") as progress:
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
