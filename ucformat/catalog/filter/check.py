"""The keys of the filter language, their types, and the check that a filter uses them correctly."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ucformat.catalog.entries import BY_NAME, Kind
from ucformat.catalog.filter.syntax import (
    Age,
    Boolean,
    Compare,
    In,
    Like,
    Number,
    SizeLiteral,
    Sort,
    Text,
    atoms,
    spell,
)
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ucformat.catalog.entries import EntryKey
    from ucformat.catalog.filter.syntax import Atom, KeyPath, Node, Span, Value

_MAX_MESSAGE = 400  # characters of a message, which may quote the filter
_BEFORE, _AFTER = 60, 40  # characters of a long filter that are shown before and after the place


def pointing_error(
    message: str, text: str | None, at: Span | None, *, hint: str | None = None
) -> UsageError:
    """An error that shows a place in a filter: the line, and carets under the place.

    Args:
        text: the filter's text (None: only the message is shown).
    """
    message = _short(message)
    hint = hint and _short(hint)
    if text is None or at is None:
        return UsageError(message, hint=hint)
    start, end = at
    whole = len(text) <= _BEFORE + _AFTER
    left = 0 if whole else max(0, start - _BEFORE)
    right = len(text) if whole else min(len(text), start + _AFTER)
    before = "…" * (left > 0) + _shown(text[left:start])
    marked = _shown(text[start : min(end, right)])
    after = _shown(text[min(max(start, end), right) : right]) + "…" * (right < len(text))
    carets = " " * _width(before) + "^" * max(1, _width(marked))
    return UsageError(f"{message}\n  {before}{marked}{after}\n  {carets}", hint=hint)


def _short(text: str) -> str:
    return _shown(text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}…")


def _shown(text: str) -> str:
    """On one line and without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def _width(text: str) -> int:
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in {"W", "F"} else 1
        for c in text
    )


_MAX_COMPARED = 100  # characters of a name that are compared for similarity


@dataclass(frozen=True)
class Names:
    """Names of metrics and paths of configurations, such as `("optimizer", "lr")`, that exist or that a filter uses."""

    metrics: frozenset[str] = frozenset()
    configs: frozenset[tuple[str, ...]] = frozenset()

    def spelled(self) -> list[str]:
        """The keys in the syntax of filters, sorted."""
        metrics = {spell(("metric", name)) for name in self.metrics}
        return sorted(metrics | {spell(("config", *path)) for path in self.configs})

    def has(self, key: KeyPath) -> bool:
        """Whether a metric or path exists; without any known names, all are accepted."""
        root, *rest = key.parts
        path = tuple(rest)
        if root == "metric":
            return not self.metrics or path[0] in self.metrics
        if (
            root != "config"
            or not self.configs
            or any(existing[: len(path)] == path for existing in self.configs)
        ):
            return True
        # into a list
        return any(path[:i] in self.configs and path[i].isdigit() for i in range(1, len(path)))


def used_names(node: Node | Sort) -> Names:
    """The metrics and configuration paths that a filter or sort order uses."""
    keys = [key.parts for key in _keys(node)]
    return Names(
        frozenset(parts[1] for parts in keys if parts[0] == "metric" and len(parts) == 2),
        frozenset(parts[1:] for parts in keys if parts[0] == "config" and len(parts) > 1),
    )


def check_known(node: Node | Sort, names: Names, text: str | None = None) -> None:
    """Check that a filter or order only uses known metrics and configuration paths."""
    for key in _keys(node):
        if not names.has(key):
            near = nearest(
                str(key), [name for name in names.spelled() if name.startswith(f"{key.parts[0]}.")]
            )
            what = "metric" if key.parts[0] == "metric" else "configuration"
            hint = near or f"no {what} in this catalog has a similar name"
            raise pointing_error(f"unknown key {key}", text, key.at, hint=hint)


def used_keys(node: Node | Sort) -> set[str]:
    """The keys that a filter or sort order uses, in the syntax of filters."""
    return set(map(str, _keys(node)))


def paths_of(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The paths of all leaves of a configuration, as in `Names.configs`."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), document)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict) and value:
            todo.extend(((*path, str(key)), below) for key, below in value.items())
        elif path:
            yield path


def nearest(name: str, options: Iterable[str]) -> str | None:
    """A hint that offers the options most similar to a name."""
    matches = get_close_matches(
        name[:_MAX_COMPARED], [option[:_MAX_COMPARED] for option in options], n=3
    )
    return _meant(matches) if matches else None


def _meant(names: Sequence[str]) -> str:
    return f"did you mean {' or '.join(names)}?"


def _keys(node: Node | Sort) -> list[KeyPath]:
    return (
        [by.key for by in node.keys]
        if isinstance(node, Sort)
        else [atom.key for atom in atoms(node)]
    )


@dataclass(frozen=True)
class KeyTarget:
    """A resolved key: `root` is its first part, `path` the rest."""

    root: str
    kind: Kind
    path: tuple[str, ...]
    key: EntryKey


def resolve(key: KeyPath, text: str | None = None, names: Callable[[], Names] = Names) -> KeyTarget:
    """Resolve a key; `names` returns those that exist, of which the error of an unknown key offers some."""
    root, *path = key.parts
    written = f"tensor.{path[0]}" if root == "tensor" and path else root
    entry_key = BY_NAME.get(written)

    def wrong(message: str, hint: str) -> UsageError:
        return pointing_error(message, text, key.at, hint=hint)

    if entry_key is not None and entry_key.kind is not None:
        kind = entry_key.kind
        if kind is Kind.JSON and not path:
            raise wrong(f"{root} needs a path", f"such as {root}.a.b")
        if root == "metric" and len(path) != 1:
            name = '"' + ".".join(path).replace('"', '""') + '"' if path else "val_loss"
            raise wrong("metric takes the name of one metric", f"such as metric.{name}")
        if entry_key.name == root and path:
            raise wrong(f"{root} takes no path", f"write {root} alone")
        if root != "tensor" or len(path) == 1:
            return KeyTarget(root, kind, tuple(path), entry_key)
    keys = {
        name: k.name
        for name, k in BY_NAME.items()
        if k.kind is not None and (k.root == root or root != "tensor")
    }
    existing = names().spelled()
    tails = [name for name in existing if name.endswith(f".{key}")]
    offered = _meant(tails[:3]) if tails else nearest(str(key), [*keys, *existing])
    raise wrong(f"unknown key {key}", offered or f"the keys are {', '.join(keys.values())}")


_TAKES: dict[Kind, tuple[type, ...]] = {
    Kind.TEXT: (Text,),
    Kind.INTEGER: (Number,),
    Kind.SIZE: (Number, SizeLiteral),
    Kind.FLOAT: (Number, SizeLiteral),
    Kind.TIME: (Text,),
    Kind.AGE: (Age,),
    Kind.BOOLEAN: (Boolean,),
    Kind.JSON: (Text, Number, SizeLiteral, Boolean),
}


def check(node: Node | Sort, text: str | None = None, names: Callable[[], Names] = Names) -> None:
    """Check the keys and types of a filter or order; `names` as for `resolve`."""
    if isinstance(node, Sort):
        for by in node.keys:
            _check_sort(by.key, resolve(by.key, text, names), text)
        return
    for atom in atoms(node):
        target = resolve(atom.key, text, names)
        if isinstance(atom, Like):
            if target.kind not in {Kind.TEXT, Kind.JSON}:
                raise pointing_error(f"like needs text, which {atom.key} is not", text, atom.key.at)
        else:
            for value in _values(atom):
                _check_value(atom, target.kind, value, text)


def instant(text: str) -> datetime:
    """Parse an ISO 8601 time."""
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
        raise pointing_error(
            f"{atom.key} cannot be compared with {value}",
            text,
            value.at,
            hint=f"it takes {kind.value}",
        )
    if (
        isinstance(value, Boolean)
        and isinstance(atom, Compare)
        and atom.operator not in {"=", "!="}
    ):
        raise pointing_error(
            "true and false have no order", text, value.at, hint="compare with = or !="
        )
    if kind is Kind.TIME and isinstance(value, Text):
        try:
            instant(value.value)
        except ValueError:
            raise pointing_error(
                f"{value} is not a time", text, value.at, hint=f"it takes {kind.value}"
            ) from None


def _check_sort(key: KeyPath, target: KeyTarget, text: str | None) -> None:
    if target.key.many or target.root == "tensor" or target.kind is Kind.BOOLEAN:
        hint = "sort by id, run, step, created, age, size, …, metric.NAME or config.PATH"
        raise pointing_error(f"{key} cannot be sorted by", text, key.at, hint=hint)
