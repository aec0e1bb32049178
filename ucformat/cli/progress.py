"""The progress bar: the only use of rich, for a person at a terminal."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as TimeColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import ProgressColumn

__all__ = ["bar"]

_PATIENCE = 0.4  # seconds; what is done sooner needs no bar, which would only flicker


@contextmanager
def bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that goes away when it is done; call it with how much is done, and how much in all."""
    amount: list[ProgressColumn] = (
        [DownloadColumn(binary_units=True), SpeedColumn()]
        if unit == "bytes"
        else [MofNCompleteColumn(), TextColumn(unit)]
    )
    columns = [TextColumn("{task.description}"), BarColumn(), *amount, TimeColumn(compact=True)]
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=None)
    timer = Timer(_PATIENCE, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: progress.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
