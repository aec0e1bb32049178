"""Options that commands share."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable

    _Type = click.ParamType[int]
else:
    _Type = click.ParamType  # generic only in newer versions of click

__all__ = ["SIZE", "SRC", "STATES", "command"]

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

SRC = click.argument("src", metavar="SRC")

STATES = click.option(
    "-s",
    "--state",
    "states",
    metavar="STATE",
    multiple=True,
    help="Only tensors in this state: weight, master, exp_avg, … Give it again for several.",
)


def command(function: Callable[..., None]) -> click.Command:
    """A command that is given an `Output` as `out`, by its options --json and --quiet."""

    @functools.wraps(function)
    def wrapped(*args: Any, as_json: bool, quiet: bool, **options: Any) -> None:
        function(*args, out=Output(as_json=as_json, quiet=quiet), **options)

    made = click.command(context_settings={"help_option_names": ["-h", "--help"]})(wrapped)
    made.params += [
        click.Option(["as_json", "--json"], is_flag=True, help="Print one JSON object; errors too, to stderr."),
        click.Option(["-q", "--quiet"], is_flag=True, help="Print the bare result for scripts; no progress, no notes."),
    ]
    return made
