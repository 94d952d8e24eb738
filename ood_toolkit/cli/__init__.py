"""The command line: `ood-bench --detectors all`. Results go to stdout, everything else to stderr."""

import io
import os
import sys

import typer

from ood_toolkit.cli.bench import EXAMPLES, bench
from ood_toolkit.cli.data import data
from ood_toolkit.cli.results import results

# nothing heavy is imported here: --help must answer at once

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback(invoke_without_command=True, epilog=None, help="Scores detectors and calibrators together." + EXAMPLES)(
    bench
)
app.add_typer(results)
app.add_typer(data, name="data")


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
