"""`--source KEY=VALUE`: what a foreign checkpoint's files do not say, as a command's option."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ucformat.errors import UcformatError, UsageError
from ucformat.settings import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint

__all__ = ["SOURCE", "open_any"]


def _parse(_ctx: click.Context, _param: click.Parameter, given: Sequence[str]) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--source {text}: write KEY=VALUE", hint="for one: --source layout=tp2.yaml")
        if key in found:
            raise UsageError(f"--source {key} is given twice")
        found[key] = _value(key, value)
    return found or None


def _value(key: str, text: str) -> Any:
    """The value of an option as its source takes it; that of an unknown one as text, which opening refuses."""
    from ucformat.sources import SOURCES
    from ucformat.sources.base import options_of

    known = {name: field.metadata["how"] for source in SOURCES for name, field in options_of(source).items()}
    return _READERS[known[key]](key, text) if key in known else text


def _layout(_key: str, text: str) -> Any:
    """A layout out of a file, or the name of a preset."""
    from ucformat.geometry.layout import Layout

    path = local_path(text, absolute=False)
    return Layout.load(path) if path.suffix or os.path.exists(path) else text  # noqa: PTH110 - never fails


def _document(key: str, text: str) -> Any:
    from ucformat.written import read_written

    return read_written(local_path(text, absolute=False), f"file of {key}")


def _flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise UsageError(f"--source {key}={text}: write {key}=true or {key}=false")
    return text == "true"


def _number(key: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"--source {key}={text}: write a number, for one {key}=50257")
    return int(text)


def _cuts(_key: str, text: str) -> dict[str, str]:
    """PATTERN=HOW, several with commas between."""
    found: dict[str, str] = {}
    for item in text.split(","):
        pattern, equals, how = item.rpartition("=")
        if not equals or not pattern or not how:
            raise UsageError(
                f"--source cuts={text}: write cuts=PATTERN=HOW,…", hint="for one: --source 'cuts=*position*=replicate'"
            )
        found[pattern] = how
    return found


#: How the text of an option is read, by `how` in its source's options.
_READERS: dict[str, Callable[[str, str], Any]] = {
    "cuts": _cuts,
    "document": _document,
    "flag": _flag,
    "layout": _layout,
    "names": lambda _key, text: text.split(","),
    "number": _number,
}


def open_any(ref: str, options: Mapping[str, Any] | None) -> Checkpoint:
    """Open one of several checkpoints; a universal one says all itself, and these options are of the others."""
    import ucformat

    if options:
        with suppress(UcformatError):
            found = ucformat.open(ref)
            if found.kind == "ucformat":
                return found
    return ucformat.open(ref, options=options)


SOURCE = click.option(
    "--source",
    "options",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_parse,
    help="What the files of a foreign SRC do not say: layout=FILE, groups=FILE, …; docs/sources lists each kind's.",
)
