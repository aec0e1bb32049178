"""The one sink of all commands: results to stdout for people, for scripts (`-q`) or as JSON; all else to stderr."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.progress import ProgressColumn

__all__ = [
    "INTERRUPTED",
    "Heading",
    "Output",
    "Tabbed",
    "clean",
    "print_error",
    "progress_bar",
    "showing_warnings",
    "terminal_width",
]

#: As a shell says of a process that Ctrl-C ended, and of one whose reader went away.
INTERRUPTED, SIGPIPE = 130, 141


class Heading(str):
    """A line that is bold on a terminal."""

    __slots__ = ()


class Tabbed(str):
    """A line of cells with tabs between them, which are kept."""

    __slots__ = ()


class Output:
    """Where a command puts what it has to say; `--json` wins over `-q`, which then only silences progress."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def result(
        self,
        people: Callable[[], Iterable[str]],
        data: Callable[[], dict[str, Any]],
        bare: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Print the result to stdout: as lines for people, as one JSON object, or as the bare lines of `-q`."""
        if self.as_json:
            _write(sys.stdout, dumps(data(), indent=_indent(sys.stdout)))
            return
        for line in (bare if self.quiet else people)():
            text = str(line) if isinstance(line, Tabbed) else clean(line, keep="")
            if isinstance(line, Heading) and use_color(sys.stdout):
                text = click.style(text, bold=True)
            _write(sys.stdout, text)

    def note(self, message: str) -> None:
        """Tell a person something besides the result; JSON has a key for it instead."""
        if not (self.quiet or self.as_json):
            _write(sys.stderr, f"note: {clean(message)}")

    def warn(self, message: str) -> None:
        """Tell of something that went wrong and did not stop the command."""
        if self.as_json:
            _write(sys.stderr, dumps({"warning": {"message": message}}, indent=_indent(sys.stderr)))
            return
        label = click.style("warning:", fg="yellow", bold=True) if use_color(sys.stderr) else "warning:"
        _write(sys.stderr, f"{label} {clean(message)}")

    @contextmanager
    def progress(self, what: str, unit: str = "bytes") -> Iterator[Callable[[int, int], None]]:
        """A bar on stderr, if a person watches it; gives what to call with how much is done and in all."""
        if self.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            yield lambda _done, _total: None
            return

        with progress_bar(what, unit) as update:
            yield update


def print_error(message: str, hint: str | None = None, *, as_json: bool, kind: str, code: int) -> None:
    """Say on stderr what went wrong and what to do next."""
    if as_json:
        error = {"type": kind, "message": message, "hint": hint, "exit_code": code}
        _write(sys.stderr, dumps({"error": error}, indent=_indent(sys.stderr)))
        return
    bold = use_color(sys.stderr)
    if code == INTERRUPTED:
        _write(sys.stderr, f"{chr(10) * sys.stderr.isatty()}{clean(message)}")  # the terminal shows ^C on this line
        return
    label = click.style("error:", fg="red", bold=True) if bold else "error:"
    _write(sys.stderr, f"{label} {clean(message)}")
    if hint:
        _write(sys.stderr, f"{click.style('hint:', bold=True) if bold else 'hint:'} {clean(hint)}")


def _indent(stream: Any) -> int | None:
    return 2 if stream.isatty() else None  # a program gets its object on one line


def dumps(data: dict[str, Any], indent: int | None = None) -> str:
    """As JSON; a number that JSON has no word for is `{"$float": "nan"}`, as in a checkpoint's objects."""
    from ucformat.schema import values

    return values.dumps(data, indent)


def clean(text: str, keep: str = "\n") -> str:
    """The text with control characters escaped: names come from files, and must not steer the terminal."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def use_color(stream: Any) -> bool:
    """Whether to use colours: on a terminal, unless NO_COLOR is set or the terminal has none."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width() -> int | None:
    """Columns that lines have to fit into; None where stdout is a pipe or a file, and nothing is to be shortened."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _write(stream: Any, text: str) -> None:
    try:
        click.echo(text, file=stream, color=True)
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - what is still buffered goes there at exit
            os.dup2(nowhere.fileno(), stream.fileno())
        raise click.exceptions.Exit(SIGPIPE) from None


_PATIENCE = 0.4  # seconds; what is done sooner needs no bar, which would only flicker


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that goes away when it is done; call it with how much is done, and how much in all."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

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


class _WarningHandler(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self.out = out

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning as a line."""
        self.out.warn(record.getMessage())


@contextmanager
def showing_warnings(out: Output) -> Iterator[None]:
    """In the block, what ucformat warns of is shown."""
    logger, handler = logging.getLogger("ucformat"), _WarningHandler(out)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
