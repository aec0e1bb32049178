"""Options that commands share."""

from __future__ import annotations

import functools
import re
import shlex
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    _Type = click.ParamType[int]
    _TimeType = click.ParamType[timedelta]
else:
    _Type = _TimeType = click.ParamType  # generic only in newer versions of click

__all__ = ["CATALOG", "IGNORE", "REF", "SIZE", "SRC", "STATES", "TIME", "VIEW", "command", "ignore", "ref_argument"]

_REFERENCE = "a path or url, run@step, run@latest, alias:name, or an id or the beginning of one"

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


class _Size(_Type):
    """Bytes: `1048576`, `64MiB`, `1.5GiB`, `1GB` (a power of ten), `64M` (as 64MiB)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip(), re.ASCII | re.IGNORECASE)
        unit = None if found is None else {u.lower(): n for u, n in _UNITS.items()}.get(found[2].lower())
        if found is None or unit is None:
            self.fail(f"{value!r} is not a size: write bytes, or 64KiB, 1.5MiB, 2GiB, 1GB", param, ctx)
        size = float(found[1]) * unit if "." in found[1] else int(found[1]) * unit
        if size != int(size) or size < 1:
            self.fail(f"{value!r} is not a whole number of bytes, 1 or more", param, ctx)
        return int(size)


SIZE = _Size()


class _Time(_TimeType):
    """A span of time: `90s`, `15m`, `48h`, `7d`, `2w`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        from ucformat.schema.policy import parse_duration

        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TIME = _Time()


class _Ref(click.Argument):
    """An argument that takes a reference to a checkpoint; the help of its command says what that is."""


def ref_argument(name: str, metavar: str, *, many: bool = False, optional: bool = False) -> Callable[[Any], Any]:
    """An argument that takes a reference to a checkpoint, or with `many` one or more of them."""
    return click.argument(name, metavar=metavar, cls=_Ref, nargs=-1 if many else 1, required=not optional)


REF, SRC = ref_argument("ref", "REF"), ref_argument("src", "SRC")


def _use_catalog(ctx: click.Context, _: click.Parameter, url: str | None) -> None:
    from ucformat.settings import load_settings, using

    if url is not None:
        ctx.with_resource(using(catalog=url))
    load_settings()  # what cannot be used is told before any work is done, not when that is to be recorded


#: For every command that asks a catalog, or tells it something: as long as it runs, the settings name this one.
CATALOG = click.option(
    "--catalog",
    expose_value=False,
    callback=_use_catalog,
    metavar="URL",
    help="The catalog: a file's path, sqlite:///… or postgresql://….  [default: UCP_CATALOG, else the settings]",
)

STATES = click.option(
    "-s",
    "--state",
    "states",
    metavar="STATE",
    multiple=True,
    help="Only tensors in this state: weight, master, exp_avg, … Give it again for several.",
)


VIEW = click.option(
    "--view",
    metavar="FILE|PRESET",
    help="See SRC under other names, shapes and dtypes: the section `view` of a layout file, or a preset.",
)


#: For every command that is refused where others need the files.
IGNORE = click.option(
    "--ignore-dependent",
    "ignored",
    metavar="ID",
    multiple=True,
    help="Let go of files although this checkpoint is said to need them: it is gone, or may break. The log keeps it.",
)


def ignore(ignored: Sequence[str], urls: Sequence[str], out: Output, name: str) -> None:
    """Do what `--ignore-dependent` says.

    Args:
        ignored: the ids of dependents that were given.
        urls: the places beside which these may be said to need files.
        out: is told of ids that nothing is said of.
        name: the command, for the log.
    """
    if not ignored:
        return
    from ucformat.jobs.dependents import ignore_dependents

    found = {i for url in urls for i in ignore_dependents(url, ignored, command=name)}
    for unknown in [i for i in ignored if i not in found]:
        out.note(f"nothing says that {unknown} needs any of it")


def _spelling(of: click.Command) -> Callable[[str, str, str], str]:
    """How hints name an option of a source to who ran this command."""
    takes = any(p.name == "options" for p in of.params)

    def spell(name: str, _value: str, text: str) -> str:
        source = f"--source {shlex.quote(f'{name}={text}')}"
        return source if takes else f"`ucp convert SRC DST {source}`, and use what that makes"

    return spell


def command(function: Callable[..., None]) -> click.Command:
    """A command that is given an `Output` as `out`, by its options --json and --quiet."""

    @functools.wraps(function)
    def wrapped(*args: Any, as_json: bool, quiet: bool, **options: Any) -> None:
        from ucformat.cli.warned import hearing
        from ucformat.errors import spelling_options

        out = Output(as_json=as_json, quiet=quiet)
        with hearing(out), spelling_options(_spelling(made)):
            function(*args, out=out, **options)

    made = click.command(context_settings={"help_option_names": ["-h", "--help"]})(wrapped)
    made.params += [
        click.Option(["as_json", "--json"], is_flag=True, help="Print one JSON object; errors too, to stderr."),
        click.Option(["-q", "--quiet"], is_flag=True, help="Print the bare result for scripts; no progress, no notes."),
    ]
    if refs := [str(p.metavar).strip("[]…") for p in made.params if isinstance(p, _Ref)]:
        means = "is" if len(refs) == 1 else "are each"
        made.epilog = f"{' and '.join(refs)} {means} {_REFERENCE}."
    return made
