"""Columns of `ucp ls`: what keys of the filter language say of a checkpoint, as text."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ucformat.cli.text import ago, bytes_text, count, moment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.catalog.entries import Entry

__all__ = ["KEYS", "Column", "parse_columns"]

_ID = 12  # so much of an id is shown to people

#: Key -> what it says of a checkpoint. Besides these there are metric.NAME, and paths into config, topology, producer.
KEYS: dict[str, Callable[[Entry], Any]] = {
    "name": lambda e: e.name,
    "id": lambda e: e.id,
    "run": lambda e: e.run,
    "step": lambda e: e.step,
    "kind": lambda e: e.kind,
    "engine": lambda e: e.engine,
    "state": lambda e: e.state,
    "size": lambda e: e.nbytes,
    "tensors": lambda e: e.tensors,
    "age": lambda e: e.created,
    "created": lambda e: e.created,
    "recorded": lambda e: e.recorded,
    "deleted": lambda e: e.deleted,
    "format_version": lambda e: e.format_version,
    "url": lambda e: e.url,
    "alias": lambda e: e.aliases,
    "tag": lambda e: e.tags,
    "hold": lambda e: [h.reason for h in e.holds],
    "note": lambda e: [n.text for n in e.notes],
    "verified": lambda e: None if e.verified is None else e.verified.ok,
}

_MAPPINGS: dict[str, Callable[[Entry], Mapping[str, Any]]] = {
    "metric": lambda e: e.metrics,
    "config": lambda e: e.config,
    "topology": lambda e: e.topology,
    "producer": lambda e: e.producer,
}

_PART = re.compile(r'"(?:[^"]|"")*"|[^.,"]+')
_KEY = re.compile(rf"\s*((?:{_PART.pattern})(?:\.(?:{_PART.pattern}))*)\s*(?:,|$)")

_RIGHT = ("step", "size", "tensors", "age")
_WHOLE = ("id", "kind", "state", "created", "recorded", "deleted", "verified")  # short, or useless when shortened


class Column:
    """A column: a heading, and a text for each checkpoint."""

    def __init__(self, key: str, value: Callable[[Entry], Any]) -> None:
        self.key = key
        self._value = value

    @property
    def path(self) -> bool:
        """Whether it is a path into what checkpoints may have, and not a key of all."""
        return self.key not in KEYS

    @property
    def shrinks(self) -> bool:
        """Whether its texts may be shortened."""
        return self.key not in (*_WHOLE, *_RIGHT)

    def right(self, entries: Sequence[Entry]) -> bool:
        """Whether it stands to the right: it holds nothing but numbers."""
        values = [v for e in entries if (v := self._value(e)) is not None]
        return self.key in _RIGHT or bool(values and all(isinstance(v, int | float) for v in values))

    def empty(self, entries: Sequence[Entry]) -> bool:
        """Whether nobody has anything for it."""
        return not any(self._value(e) not in (None, (), []) for e in entries)

    def text(self, entry: Entry, *, short: bool) -> str:
        """What it says of a checkpoint; `short` for people, who know an id by its beginning."""
        value = self._value(entry)
        match self.key:
            case _ if value is None:
                return "-"
            case "id" if short:
                return str(value)[:_ID]
            case "size":
                return bytes_text(value)
            case "step" | "tensors":
                return count(value)
            case "age":
                return ago(value)
            case "created" | "recorded" | "deleted":
                return moment(value)
            case "verified":
                return "ok" if value else "damaged"
        return _text(value)


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
    """The columns that the option --columns names; UsageError for a key that nobody has."""
    from ucformat.errors import UsageError

    columns, at = [], 0
    while at < len(text):
        found = _KEY.match(text, at)
        if found is None:
            raise UsageError(f"{text[at:]!r} is not a list of columns", hint='write keys as: run,step,config."a.b".c')
        columns.append(_column(found[1]))
        at = found.end()
    return columns or parse_columns("name,id")


def _column(key: str) -> Column:
    from difflib import get_close_matches

    from ucformat.errors import UsageError

    if key in KEYS:
        return Column(key, KEYS[key])
    root, *path = [_plain(part) for part in _PART.findall(key)]
    if root in _MAPPINGS and path:
        return Column(key, lambda e: _reach(_MAPPINGS[root](e), path))
    near = get_close_matches(key, KEYS, 1, 0.5)
    known = ", ".join([*KEYS, "metric.NAME", *(f"{m}.KEY.KEY" for m in _MAPPINGS if m != "metric")])
    raise UsageError(f"there is no column {key!r}", hint=f"did you mean {near[0]}?" if near else f"there are: {known}")


def _plain(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def _reach(value: Any, path: Sequence[str]) -> Any:
    """What lies at a path; None if nothing does."""
    for part in path:
        if isinstance(value, list):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value
