"""The command line: `ood-bench --detectors all`. Results go to stdout, everything else to stderr."""

import io
import os
import sys

import typer

from ood_toolkit.cli.bench import EXAMPLES, bench
from ood_toolkit.cli.cache import cache
from ood_toolkit.cli.data import data
from ood_toolkit.cli.interrupted import INTERRUPTED, Interrupted
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
app.add_typer(cache, name="cache")

# click's UsageError, or the one of the copy of click that newer versions of typer bring with them
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # pyright: ignore[reportAssignmentType]


def main() -> None:
    """The `ood-bench` command.

    Wrong input ends with one line on stderr and exit code 2, a fault of code with 1, Ctrl-C with 130. A method that the
    user named and that cannot learn from the data counts as wrong input; the run's other numbers are shown and kept.
    """
    if "" not in sys.path:
        sys.path.append("")  # my_pkg:MyDetector may lie in the current folder; installed packages come first
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without arrows and dashes shows question marks
    try:
        code = app(standalone_mode=False, prog_name="ood-bench")
        if code == INTERRUPTED:
            typer.echo("ood-bench: interrupted", err=True)
    except Exception as error:
        if os.environ.get("OOD_DEBUG"):
            raise
        line, code = _ending(error)
        typer.echo(f"ood-bench: {line}", err=True)
    if isinstance(code, int) and code:
        raise SystemExit(code)


def _ending(error: Exception) -> tuple[str, int]:
    """What is said of an error, on one line, and the exit code."""
    text = " ".join(str(error).split())
    if isinstance(error, Interrupted):
        return text, INTERRUPTED
    if isinstance(error, typer.Abort):
        return "aborted; --yes agrees without being asked", 1
    if isinstance(error, _UsageError):
        context = getattr(error, "ctx", None)
        message = " ".join(error.format_message().split()).rstrip(".")  # pyright: ignore[reportAttributeAccessIssue]
        command = context.command_path if context else "ood-bench"
        return f"{message[:1].lower()}{message[1:]}; see {command} --help", 2
    if isinstance(error, ValueError | OSError):
        return text, 2
    stage = "".join(f", {note}" for note in getattr(error, "__notes__", ())[:1])  # the innermost one
    return f"{type(error).__name__}: {text}{stage} (OOD_DEBUG=1 shows where)", 1


if __name__ == "__main__":
    main()
