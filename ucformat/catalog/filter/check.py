"""What a filter may compare with what."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ucformat.catalog.filter.keys import Kind, resolve
from ucformat.catalog.filter.pointing import pointing_error
from ucformat.catalog.filter.syntax import Compare, In, Like, Sort, atoms
from ucformat.catalog.filter.values import Age, Number, Size, Text, Truth

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.catalog.filter.keys import Target
    from ucformat.catalog.filter.syntax import Atom, Node
    from ucformat.catalog.filter.values import Key, Value

__all__ = ["check", "instant"]

_TAKES: dict[Kind, tuple[type, ...]] = {
    Kind.TEXT: (Text,),
    Kind.INTEGER: (Number,),
    Kind.SIZE: (Number, Size),
    Kind.FLOAT: (Number, Size),
    Kind.TIME: (Text,),
    Kind.AGE: (Age,),
    Kind.TRUTH: (Truth,),
    Kind.JSON: (Text, Number, Size, Truth),
}


def check(node: Node | Sort, text: str | None = None, *, more: Iterable[str] = ()) -> None:
    """UsageError where a key is unknown or compared with what it cannot be; it points into `text`.

    `more` are names of keys to offer besides those of the language.
    """
    if isinstance(node, Sort):
        for by in node.keys:
            _check_sort(by.key, resolve(by.key, text, more=more), text)
        return
    for atom in atoms(node):
        target = resolve(atom.key, text, more=more)
        if isinstance(atom, Like):
            if target.kind not in {Kind.TEXT, Kind.JSON}:
                raise pointing_error(f"{atom.key} is not text, which like is for", text, atom.key.at)
        else:
            for value in _values(atom):
                _check_value(atom, target.kind, value, text)


def instant(text: str) -> datetime:
    """A time as ISO 8601 writes it, in UTC; ValueError where it is none."""
    time = datetime.fromisoformat(text)
    try:
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except OverflowError:
        raise ValueError(text) from None


def _values(atom: Atom) -> tuple[Value, ...]:
    match atom:
        case Compare(_, _, value):
            return (value,)
        case In(_, values):
            return values
        case _:
            return ()


def _check_value(atom: Atom, kind: Kind, value: Value, text: str | None) -> None:
    if not isinstance(value, _TAKES[kind]):
        raise pointing_error(f"{atom.key} is not compared with {value}", text, value.at, hint=f"it takes {kind.value}")
    if isinstance(value, Truth) and isinstance(atom, Compare) and atom.operator not in {"=", "!="}:
        raise pointing_error("true and false have no order", text, value.at, hint="compare with = or !=")
    if kind is Kind.TIME and isinstance(value, Text):
        try:
            instant(value.value)
        except ValueError:
            raise pointing_error(f"{value} is not a time", text, value.at, hint=f"it takes {kind.value}") from None


def _check_sort(key: Key, target: Target, text: str | None) -> None:
    single = target.root != "tensor" and target.kind is not Kind.TRUTH
    if not single or target.root in {"tag", "alias", "url", "note"}:
        hint = "order by one of id, run, step, created, age, size, …, by metric.NAME or config.PATH"
        raise pointing_error(f"{key} gives no order", text, key.at, hint=hint)
