"""Groups that load a command when it is called, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.output import INTERRUPTED, print_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Interrupted", "LazyGroup", "Program"]


class Interrupted(Exception):
    """Ctrl-C came, and the command knows what that means for its work."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class LazyGroup(click.Group):
    """A group that knows its commands by name and one line of help, and imports one when it is called.

    `lazy` maps each name to the command (`module:attribute` in `ucformat.cli.commands`, or a command itself) and its
    line of help; `sections` maps the first command of each section of the help to the section's title.
    """

    def __init__(
        self,
        name: str,
        lazy: Mapping[str, tuple[str | click.Command, str]],
        sections: Mapping[str, str] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(name, **attributes)
        self.context_settings = {"help_option_names": ["-h", "--help"]}
        self.lazy = lazy
        self.sections = sections or {}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The names, in the order in which they were given."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of this name, imported now."""
        if cmd_name not in self.lazy:
            return None
        home = self.lazy[cmd_name][0]
        if isinstance(home, click.Command):
            return home
        module, _, attribute = home.partition(":")
        command = getattr(import_module(f"ucformat.cli.commands.{module}"), attribute)
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments name; UsageError that lists those there are."""
        if args[0] not in self.lazy and not args[0].startswith("-"):
            ctx.fail(f"no such command {args[0]!r}; there are: {', '.join(self.lazy)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        parts: dict[str, list[tuple[str, str]]] = {}
        title = "Commands"
        for name, (_, text) in self.lazy.items():
            title = self.sections.get(name, title)
            parts.setdefault(title, []).append((name, text))
        for title, rows in parts.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class Program(LazyGroup):
    """The whole command line: a LazyGroup that ends the process with the exit code of what happened."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        """Run, and exit: 0, or the code of the error, which is printed to stderr."""
        argv = sys.argv[1:] if args is None else list(args)
        as_json = "--json" in argv
        _hide_secrets(argv)
        for stream in (sys.stdout, sys.stderr):  # a name from a checkpoint may hold what the terminal cannot show
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
            print_error(_message(error), _hint(error), as_json=as_json, kind="UsageError", code=code)
        except Exception as error:  # noqa: BLE001 - told below which are expected
            code = _explain(error, as_json=as_json)
        sys.exit(code if isinstance(code, int) else 0)


def _hide_secrets(argv: Sequence[str]) -> None:
    """Show no secret from here on, of these arguments or any other, whoever writes: tracebacks and warnings too."""
    from ucformat.redacted import Hiding, learn_url

    for text in argv:
        learn_url(text)
    sys.stdout, sys.stderr = Hiding(sys.stdout), Hiding(sys.stderr)


def _explain(error: Exception, *, as_json: bool) -> int:
    """Print an error for people and give its exit code; what nobody expected is raised on, with its traceback."""
    from ucformat.errors import UcformatError

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
        print_error("out of memory", "take a slice, or fewer states", as_json=as_json, kind=kind, code=1)
        return 1
    raise error


def _message(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _hint(error: click.ClickException) -> str | None:
    ctx = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and re.match(r"-\d", error.option_name):
        return "write a slice that begins with a minus sign in brackets: '[-1]'"
    if not isinstance(ctx, click.Context):
        return None
    return f"{' '.join(ctx.get_usage().split()).replace('Usage: ', 'usage: ')} (more: {ctx.command_path} --help)"
