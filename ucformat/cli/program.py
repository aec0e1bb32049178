"""Groups that import a command when it is called, and the conversion of errors to messages and exit codes."""

from __future__ import annotations

import logging
import os
import re
import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.output import INTERRUPTED, print_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.registry import Registry


_log = logging.getLogger("ucformat")


class Interrupted(Exception):
    """Ctrl-C during a command, with a message on the state of its work."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """End the command with a message on the state of its work at Ctrl-C inside the block."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(message) from None


class LazyGroup(click.Group):
    """A group that imports a command when it is called.

    Args:
        lazy: the commands, or their modules and names, or None for those that are registered, and
            their lines in the help.
        sections: by the first command of each section of the help, the section's title.
        registered: the commands that packages register.
    """

    def __init__(
        self,
        name: str,
        lazy: Mapping[str, tuple[str | click.Command | None, str]],
        sections: Mapping[str, str] | None = None,
        registered: Registry[click.Command] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(name, **attributes)
        self.context_settings = {"help_option_names": ["-h", "--help"]}
        self.lazy = lazy
        self.sections = sections or {}
        self.registered = registered

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The names of the commands: those of the table in its order, then those that are registered."""
        registered = () if self.registered is None else self.registered.names()
        return list(dict.fromkeys((*self.lazy, *registered)))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        home, _ = self.lazy.get(cmd_name, (None, ""))
        if home is None:
            if self.registered is None or cmd_name not in self.registered:
                return None
            return self.registered[cmd_name]
        if isinstance(home, click.Command):
            return home
        module, _, attribute = home.partition(":")
        command = getattr(import_module(f"ucformat.cli.commands.{module}"), attribute)
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name."""
        # the table first: looking for what other packages register takes a while
        listed = args[0] in self.lazy or args[0].startswith("-")
        if not listed and args[0] not in (names := self.list_commands(ctx)):
            from difflib import get_close_matches

            near = get_close_matches(args[0], names, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            ctx.fail(f"no such command {args[0]!r}; {meant}the commands are {', '.join(names)}")
        return super().resolve_command(ctx, args)

    def lines(self) -> dict[str, list[tuple[str, str]]]:
        """The names of commands and their lines in the help, by section; imports only those that are not listed."""
        sections: dict[str, list[tuple[str, str]]] = {}
        title = "Commands"
        for name, (_, text) in self.lazy.items():
            title = self.sections.get(name, title)
            sections.setdefault(title, []).append((name, text))
        if self.registered is not None:
            own = {name for name, (home, _) in self.lazy.items() if home is not None}
            for name in own & {*self.registered.names()}:
                _log.warning(
                    "%s registers the command %r, which ucp has itself: that is used",
                    *(self.registered.package(name), name),
                )
            others = [name for name in self.registered.names() if name not in self.lazy]
            if rows := [
                (n, c.get_short_help_str(limit=80)) for n, c in self.registered.items(others)
            ]:
                sections["More commands"] = rows
        return sections

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands."""
        for title, rows in self.lines().items():
            with formatter.section(title):
                formatter.write_dl(rows)


class Program(LazyGroup):
    """The command line: a LazyGroup that ends the process with the exit code of the command or error."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        """Run a command and exit, with 0 or the exit code of an error, which is printed to stderr."""
        argv = sys.argv[1:] if args is None else list(args)
        as_json = "--json" in argv
        _hide_secrets(argv)
        # names from checkpoints may contain what the terminal cannot encode
        for stream in (sys.stdout, sys.stderr):
            if reconfigure := getattr(stream, "reconfigure", None):
                reconfigure(errors="backslashreplace")
        extra |= {"prog_name": self.name, "standalone_mode": False}
        try:
            code = super().main(argv, **extra)
        except click.exceptions.Abort:
            print_error("interrupted", as_json=as_json, kind="Interrupted", code=INTERRUPTED)
            code = INTERRUPTED
        except Interrupted as error:
            code = INTERRUPTED
            print_error(error.message, as_json=as_json, kind="Interrupted", code=code)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            code = error.exit_code
        except click.ClickException as error:
            code = error.exit_code
            print_error(
                _message(error), _hint(error), as_json=as_json, kind="UsageError", code=code
            )
        except Exception as error:  # noqa: BLE001 - unexpected ones are raised again
            code = _report(error, as_json=as_json)
        sys.exit(code if isinstance(code, int) else 0)


def _hide_secrets(argv: Sequence[str]) -> None:
    """Hide secrets, such as passwords in urls, in everything that the process prints from now on."""
    from ucformat.redacted import Hiding, learn_url

    for text in argv:
        learn_url(text)
    sys.stdout, sys.stderr = Hiding(sys.stdout), Hiding(sys.stderr)


def _report(error: Exception, *, as_json: bool) -> int:
    """Print an error and return its exit code; an unexpected one is raised again, for its traceback."""
    from ucformat.errors import NotFinished, UcformatError

    if isinstance(error, NotFinished):
        if "--quiet" not in sys.argv and "-q" not in sys.argv:
            click.echo(error.message, err=True)
        return error.exit_code
    if os.environ.get("UCP_DEBUG", "0") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    kind = type(error).__name__
    if isinstance(error, UcformatError):
        print_error(error.message, error.hint, as_json=as_json, kind=kind, code=error.exit_code)
        return error.exit_code
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        print_error(f"{where}{error.strerror or error}", as_json=as_json, kind=kind, code=1)
        return 1
    if isinstance(error, MemoryError):
        print_error(
            "out of memory", "read a slice, or fewer states", as_json=as_json, kind=kind, code=1
        )
        return 1
    raise error


def _message(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _hint(error: click.ClickException) -> str | None:
    ctx = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and re.match(r"-\d", error.option_name):
        return "put a slice that begins with a minus sign in brackets: '[-1]'"
    if not isinstance(ctx, click.Context):
        return None
    return (
        f"{' '.join(ctx.get_usage().split()).replace('Usage: ', 'usage: ')} (more: "
        f"{ctx.command_path} --help)"
    )
