"""Progress bars on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ood_toolkit.extract import Progress


@contextmanager
def progress_bars(unit: str = "images/s") -> "Iterator[Progress]":
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
