"""The output of commands: results to stdout, for people, for scripts (`-q`) or as JSON; everything else to stderr."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any

import click

from ucformat.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.progress import ProgressColumn

#: The exit codes of a shell for a process that was ended by Ctrl-C, and by a closed pipe.
INTERRUPTED, SIGPIPE = 130, 141


_DELAY = 0.4  # seconds until a progress bar is shown: for a shorter activity it would only flicker


class Heading(str):
    """A line that is bold on a terminal."""

    __slots__ = ()


class Tabbed(str):
    """A line of cells that are separated by tabs."""

    __slots__ = ()


class Output:
    """The output of a command.

    Args:
        as_json: print JSON; with `quiet` too, that only suppresses progress.
    """

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def result(
        self,
        people: Callable[[], Iterable[str]],
        data: Callable[[], dict[str, Any]],
        bare: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Print the result to stdout."""
        if self.as_json:
            _write(sys.stdout, dumps(data(), indent=_indent(sys.stdout)))
            return
        for line in (bare if self.quiet else people)():
            text = str(line) if isinstance(line, Tabbed) else clean(line, keep="")
            if isinstance(line, Heading) and use_color(sys.stdout):
                text = click.style(text, bold=True)
            _write(sys.stdout, text)

    def note(self, message: str) -> None:
        """Print a note for people to stderr; JSON has a key for it instead."""
        if not (self.quiet or self.as_json):
            _write(sys.stderr, f"note: {clean(message)}")

    def warn(self, message: str) -> None:
        """Print a warning to stderr: something went wrong that does not stop the command."""
        if self.as_json:
            _write(sys.stderr, dumps({"warning": {"message": message}}, indent=_indent(sys.stderr)))
            return
        label = (
            click.style("warning:", fg="yellow", bold=True) if use_color(sys.stderr) else "warning:"
        )
        _write(sys.stderr, f"{label} {clean(message)}")

    @contextmanager
    def progress(self, title: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
        """Show a progress bar on stderr, if that is a terminal, until the end of the block.

        Yields:
            A function that is called with the amount done and the total.
        """
        if self.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            yield lambda _done, _total: None
            return

        from rich import progress as rich
        from rich.console import Console

        amount: list[ProgressColumn] = (
            [rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()]
            if unit == "bytes"
            else [rich.MofNCompleteColumn(), rich.TextColumn(unit)]
        )
        left = rich.TimeRemainingColumn(compact=True)
        columns = [rich.TextColumn("{task.description}"), rich.BarColumn(), *amount, left]
        progress = rich.Progress(*columns, console=Console(stderr=True), transient=True)
        task = progress.add_task(title, total=None)
        timer = Timer(_DELAY, progress.start)
        timer.daemon = True
        timer.start()
        try:
            yield lambda done, total: progress.update(task, completed=done, total=total)
        finally:
            timer.cancel()
            # else it could start the display after it was stopped
            timer.join()
            progress.stop()

    def confirm(self, question: str, *, yes: bool) -> bool:
        """Ask for confirmation at a terminal; elsewhere the option that asks for the work is enough.

        Returns:
            Whether to go on; if not, a note says that nothing was done.
        """
        if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return True
        if click.confirm(question, err=True):
            return True
        self.note("nothing was done")
        return False


def print_error(
    message: str, hint: str | None = None, *, as_json: bool, kind: str, code: int
) -> None:
    """Print an error to stderr."""
    if as_json:
        error = {"type": kind, "message": message, "hint": hint, "exit_code": code}
        _write(sys.stderr, dumps({"error": error}, indent=_indent(sys.stderr)))
        return
    bold = use_color(sys.stderr)
    if code == INTERRUPTED:
        # the terminal shows ^C on this line
        _write(sys.stderr, f"{chr(10) * sys.stderr.isatty()}{clean(message)}")
        return
    label = click.style("error:", fg="red", bold=True) if bold else "error:"
    _write(sys.stderr, f"{label} {clean(message)}")
    if hint:
        _write(sys.stderr, f"{click.style('hint:', bold=True) if bold else 'hint:'} {clean(hint)}")


def _indent(stream: Any) -> int | None:
    return 2 if stream.isatty() else None  # one line for programs


def dumps(data: dict[str, Any], indent: int | None = None) -> str:
    """Serialize as JSON, with non-finite numbers as `{"$float": "nan"}`, as in a checkpoint's objects."""
    from ucformat.schema import values

    return values.dumps(data, indent)


def use_color(stream: Any) -> bool:
    """Whether to use colours: on a terminal, unless NO_COLOR is set or the terminal is `dumb`."""
    return (
        bool(stream.isatty())
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


def terminal_width() -> int | None:
    """The width of the terminal in columns; None if stdout is a pipe or file, where nothing is shortened."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size

    return get_terminal_size().columns


def _write(stream: Any, text: str) -> None:
    try:
        click.echo(text, file=stream, color=True)
    except BrokenPipeError:
        with open(os.devnull, "w") as null:  # noqa: PTH123 - for the output that is flushed at exit
            os.dup2(null.fileno(), stream.fileno())
        raise click.exceptions.Exit(SIGPIPE) from None


class _WarningHandler(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self.out = out

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning as a line."""
        self.out.warn(record.getMessage())


@contextmanager
def showing_warnings(out: Output) -> Iterator[None]:
    """Print the warnings that ucformat logs in the block."""
    logger, handler = logging.getLogger("ucformat"), _WarningHandler(out)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
