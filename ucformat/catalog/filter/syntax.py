"""The syntax tree of a filter, and its text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Characters of a filter, and parts of a key.
MAX_LENGTH = 10_000
MAX_PARTS = 32

#: The longest unit first.
AGE_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
SIZE_UNITS = {
    "TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3, "B": 1,
}  # fmt: skip

_KEYWORDS = {"and", "or", "not", "in", "like", "is", "null", "true", "false"}

Span = tuple[int, int]  # of the filter's text: the first character, and the one after the last


@dataclass(frozen=True)
class _Term:
    at: Span | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class KeyPath(_Term):
    """The left side of a comparison: `step`, or a path such as `config."a.b".c`."""

    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.parts) <= MAX_PARTS:
            raise UsageError(f"a key has 1 to {MAX_PARTS} parts, not {len(self.parts)}")
        for part in self.parts:
            _check_text(part)

    def __str__(self) -> str:
        return spell(self.parts)


@dataclass(frozen=True)
class Text(_Term):
    """Text in quotes, or a time."""

    value: str

    def __post_init__(self) -> None:
        _check_text(self.value)

    def __str__(self) -> str:
        return quoted(self.value)


@dataclass(frozen=True)
class Number(_Term):
    """An integer or a float, compared by value."""

    value: int | float

    def __post_init__(self) -> None:
        _check_number(self.value)

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Boolean(_Term):
    """`true` or `false`."""

    value: bool

    def __str__(self) -> str:
        return "true" if self.value else "false"


@dataclass(frozen=True)
class Age(_Term):
    """A span of time such as `7d`."""

    span: timedelta

    def __str__(self) -> str:
        micros = self.span // timedelta(microseconds=1)
        for unit, seconds in AGE_UNITS.items():
            if micros % (seconds * 10**6) == 0:
                return f"{micros // (seconds * 10**6)}{unit}"
        return f"{'-' * (micros < 0)}{abs(micros) // 10**6}.{abs(micros) % 10**6:06}s"


@dataclass(frozen=True)
class SizeLiteral(_Term):
    """A size such as `10GB`, in bytes."""

    nbytes: int

    def __post_init__(self) -> None:
        _check_number(self.nbytes)

    def __str__(self) -> str:
        unit = next(unit for unit, size in SIZE_UNITS.items() if self.nbytes % size == 0)
        return f"{self.nbytes // SIZE_UNITS[unit]}{unit}"


Value = Text | Number | Boolean | Age | SizeLiteral


def _check_text(text: str) -> None:
    if len(text) > MAX_LENGTH:
        raise UsageError(
            f"a text of {len(text)} characters is too long; a filter has at most {MAX_LENGTH}"
        )
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):  # PostgreSQL stores neither
        raise UsageError("a filter cannot contain U+0000 or an unpaired surrogate")


def _check_number(value: float) -> None:
    try:
        is_valid = math.isfinite(value) and not isinstance(value, bool)
    except OverflowError:
        is_valid = False
    if not is_valid:
        raise UsageError(
            "a filter cannot use this number", hint="numbers are finite and at most 1.7e308"
        )


def spell(parts: tuple[str, ...]) -> str:
    """The text of a key, with parts in quotes that the grammar would not read back."""
    return ".".join(
        part if _bare(part, i) else '"' + part.replace('"', '""') + '"'
        for i, part in enumerate(parts)
    )


def quoted(text: str) -> str:
    """A text in a filter."""
    return "'" + text.replace("'", "''") + "'"


def _bare(part: str, position: int) -> bool:
    if not part.isascii() or part.lower() in _KEYWORDS:
        return False
    return (part.replace("-", "_").isidentifier() and all(part.split("-"))) or (
        position > 0 and part.isdigit()
    )


#: How deep `and`, `or` and `not` may nest, and how many comparisons a filter may have: the stack of
#: SQLite's parser has 100 entries.
MAX_DEPTH = 32
MAX_COMPARISONS = 500
MAX_LIST_VALUES = 10_000  # values in a list
MAX_SORT_KEYS = 16  # keys of an order


@dataclass(frozen=True)
class Compare:
    """`key operator value`; the operator is one of `=`, `!=`, `<`, `<=`, `>` and `>=`."""

    key: KeyPath
    operator: str
    value: Value

    def __post_init__(self) -> None:
        if self.operator not in {"=", "!=", "<", "<=", ">", ">="}:
            raise UsageError(
                f"{self.operator!r} is not a comparison operator",
                hint="the operators are = != < <= > >=",
            )

    def __str__(self) -> str:
        return f"{self.key} {self.operator} {self.value}"


@dataclass(frozen=True)
class In:
    """`key in (value, …)`: it equals one of them."""

    key: KeyPath
    values: tuple[Value, ...]
    negated: bool = False

    def __post_init__(self) -> None:
        if not 0 < len(self.values) <= MAX_LIST_VALUES:
            raise UsageError(f"a list has 1 to {MAX_LIST_VALUES} values, not {len(self.values)}")

    def __str__(self) -> str:
        return f"{self.key} {'not ' * self.negated}in ({', '.join(map(str, self.values))})"


@dataclass(frozen=True)
class Like:
    r"""`key like 'pattern'`: `%` is any text, `_` any character, and a backslash escapes the next one."""

    key: KeyPath
    pattern: Text
    negated: bool = False

    def __post_init__(self) -> None:
        text = self.pattern.value
        if (len(text) - len(text.rstrip("\\"))) % 2:
            raise UsageError(
                "the pattern ends with an unfinished escape", hint=r"write a backslash as \\"
            )

    def __str__(self) -> str:
        return f"{self.key} {'not ' * self.negated}like {self.pattern}"


@dataclass(frozen=True)
class IsNull:
    """`key is null`: it has no value."""

    key: KeyPath
    negated: bool = False

    def __str__(self) -> str:
        return f"{self.key} is {'not ' * self.negated}null"


Atom = Compare | In | Like | IsNull


@dataclass(frozen=True)
class _Join:
    nodes: tuple[Node, ...]
    depth: int = field(init=False, compare=False, repr=False)
    count: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.nodes) < 2:
            raise UsageError(f"{self._word()} joins at least two conditions, not {len(self.nodes)}")
        _measure(self, self.nodes)

    @classmethod
    def _word(cls) -> str:
        return cls.__name__.lower()

    def __str__(self) -> str:
        return f" {self._word()} ".join(map(_enclosed, self.nodes))


@dataclass(frozen=True)
class And(_Join):
    """All operands are true; `depth` is how deep it nests, `count` how many comparisons it has."""


@dataclass(frozen=True)
class Or(_Join):
    """At least one operand is true; `depth` and `count` as in `And`."""


@dataclass(frozen=True)
class Not:
    """The operand is false; `depth` and `count` as in `And`."""

    node: Node
    depth: int = field(init=False, compare=False, repr=False)
    count: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _measure(self, (self.node,))

    def __str__(self) -> str:
        return f"not {_enclosed(self.node)}"


Node = And | Or | Not | Atom


@dataclass(frozen=True)
class SortKey:
    """A key to sort by, and its direction."""

    key: KeyPath
    descending: bool = False

    def __str__(self) -> str:
        return f"{'-' * self.descending}{self.key}"


@dataclass(frozen=True)
class Sort:
    """Keys to sort by, the most significant first."""

    keys: tuple[SortKey, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.keys) <= MAX_SORT_KEYS:
            raise UsageError(f"an order has 1 to {MAX_SORT_KEYS} keys, not {len(self.keys)}")

    def __str__(self) -> str:
        return ",".join(map(str, self.keys))


def unparse(node: Node | Sort) -> str:
    """The text of a filter or sort order; parsing it gives an equal tree."""
    return str(node)


def operands(node: Node) -> tuple[Node, ...]:
    """The filters of which a filter is the conjunction."""
    return node.nodes if isinstance(node, And) else (node,)


def atoms(node: Node) -> Iterator[Atom]:
    """The comparisons of a filter, from left to right."""
    todo = [node]
    while todo:
        match todo.pop():
            case And(nodes) | Or(nodes):
                todo.extend(reversed(nodes))
            case Not(inner):
                todo.append(inner)
            case atom:
                yield atom


def _measure(node: _Join | Not, below: tuple[Node, ...]) -> None:
    depth = 1 + max(getattr(n, "depth", 0) for n in below)
    count = sum(getattr(n, "count", 1) for n in below)
    if depth > MAX_DEPTH:
        raise UsageError(f"the filter nests more than {MAX_DEPTH} levels of and, or, not")
    if count > MAX_COMPARISONS:
        raise UsageError(
            f"the filter has more than {MAX_COMPARISONS} comparisons",
            hint="to compare with many values, use: in (…)",
        )
    object.__setattr__(node, "depth", depth)
    object.__setattr__(node, "count", count)


def _enclosed(node: Node) -> str:
    return f"({node})" if isinstance(node, _Join) else str(node)


def like_literal(text: str) -> str:
    """Escape text for a quoted pattern of `like`, which it then matches as it is."""
    for special in "\\%_":
        text = text.replace(special, f"\\{special}")
    return text.replace("'", "''")
