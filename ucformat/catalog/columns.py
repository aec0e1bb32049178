"""The columns in which checkpoints are listed: the keys of `catalog.entries`, with paths into their values."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ucformat.catalog.entries import BY_NAME, KEYS, Kind
from ucformat.texts import ago, bytes_text, count, moment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.catalog.entries import Entry, EntryKey

ID_LENGTH = 12  # characters of an id that are shown to people

_PART = re.compile(r'"(?:[^"]|"")*+"|[^.,"]++')
_KEY = re.compile(rf"\s*+((?:{_PART.pattern})(?:\.(?:{_PART.pattern}))*+)\s*+(?:,|$)")


class Column:
    """A column of the table.

    Args:
        text: the key as it was given.
        key: the key that it is, or begins with.
        path: where its value is in that of the key.
    """

    def __init__(self, text: str, key: EntryKey, path: Sequence[str] = ()) -> None:
        self.text = text
        self.path = path
        self._key = key

    def value(self, entry: Entry) -> Any:
        """The value of a checkpoint; None if it has none."""
        return _reach(self._key.value(entry), self.path)

    @property
    def shrinks(self) -> bool:
        """Whether its cells may be shortened."""
        return not (self._key.whole or self._key.kind in _FORMATS)

    def right(self, entries: Sequence[Entry]) -> bool:
        """Whether it is aligned right, as it has only numbers."""
        values = [v for e in entries if (v := self.value(e)) is not None]
        return self._key.kind in (Kind.INTEGER, Kind.SIZE, Kind.AGE) or bool(
            values and all(isinstance(v, int | float) for v in values)
        )

    def empty(self, entries: Sequence[Entry]) -> bool:
        """Whether no checkpoint has a value."""
        return not any(self.value(e) not in (None, (), []) for e in entries)

    def cell(self, entry: Entry, *, short: bool) -> str:
        """Format the value of a checkpoint."""
        value = self.value(entry)
        if value is None:
            return "-"
        match self._key.name:
            case "id" if short:
                return str(value)[:ID_LENGTH]
            case "launch" if short:
                from ucformat.catalog.lines import launch_label

                return launch_label(value)
            case "verified":
                return "ok" if value else "damaged"
        return _FORMATS[self._key.kind](value) if self._key.kind in _FORMATS else _text(value)


_FORMATS: dict[Kind | None, Callable[[Any], str]] = {
    Kind.INTEGER: count,
    Kind.SIZE: bytes_text,
    Kind.AGE: ago,
    Kind.TIME: moment,
}


def _text(value: Any) -> str:
    match value:
        case str():
            return value
        case float():
            return f"{value:.6g}"
        case list() | tuple() if all(isinstance(v, str) for v in value):
            return ", ".join(value) or "-"
    return json.dumps(value, ensure_ascii=False)


def parse_columns(text: str) -> list[Column]:
    """Parse the option --columns."""
    from ucformat.errors import UsageError

    columns, at = [], 0
    while at < len(text):
        match = _KEY.match(text, at)
        if match is None:
            raise UsageError(
                f"{text[at:]!r} is not a list of columns",
                hint='write keys as: run,step,config."a.b".c',
            )
        columns.append(_column(match[1]))
        at = match.end()
    return columns or parse_columns("name,id")


def _column(key: str) -> Column:
    from difflib import get_close_matches

    from ucformat.errors import UsageError

    root, *path = [_plain(part) for part in _PART.findall(key)]
    entry_key = BY_NAME.get(root)
    if entry_key is not None and (entry_key.name != root) is bool(path):
        return Column(key, entry_key, path)
    names = [k.name for k in KEYS if k.root != "tensor"]
    near = get_close_matches(key, names, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"the columns are {', '.join(names)}"
    raise UsageError(f"there is no column {key!r}", hint=hint)


def _plain(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def _reach(value: Any, path: Sequence[str]) -> Any:
    """The value at a path; None if there is none."""
    for part in path:
        if isinstance(value, list):
            # no list has an index of more digits, which Python may refuse to convert
            index = int(part) if part.isdecimal() and len(part) < 20 else len(value)
            value = value[index] if index < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value
