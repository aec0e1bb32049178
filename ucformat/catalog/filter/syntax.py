"""What a filter says, as a tree, and the text of such a tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.filter.values import Key, Text, Value

__all__ = ["And", "Atom", "By", "Compare", "In", "IsNull", "Like", "Node", "Not", "Or", "Sort", "atoms", "unparse"]

#: So deep may `and`, `or` and `not` nest, and so many comparisons a filter may have: the parser of SQLite has a stack
#: of a hundred places for everything, and Python its own to keep within.
DEEPEST = 32
MOST = 500
LIST = 10_000  # values in a list
SORTS = 16  # keys of an order


@dataclass(frozen=True)
class Compare:
    """`key operator value`; the operator is one of `=`, `!=`, `<`, `<=`, `>` and `>=`."""

    key: Key
    operator: str
    value: Value

    def __post_init__(self) -> None:
        if self.operator not in {"=", "!=", "<", "<=", ">", ">="}:
            raise UsageError(f"{self.operator!r} compares nothing", hint="the operators are = != < <= > >=")

    def __str__(self) -> str:
        return f"{self.key} {self.operator} {self.value}"


@dataclass(frozen=True)
class In:
    """`key in (value, …)`: it equals one of them."""

    key: Key
    values: tuple[Value, ...]
    negated: bool = False

    def __post_init__(self) -> None:
        if not 0 < len(self.values) <= LIST:
            raise UsageError(f"a list has 1 to {LIST} values, and not {len(self.values)}")

    def __str__(self) -> str:
        return f"{self.key} {'not ' * self.negated}in ({', '.join(map(str, self.values))})"


@dataclass(frozen=True)
class Like:
    r"""`key like 'pattern'`: `%` is any text, `_` any character, and a backslash takes the next one as it stands."""

    key: Key
    pattern: Text
    negated: bool = False

    def __post_init__(self) -> None:
        text = self.pattern.value
        if (len(text) - len(text.rstrip("\\"))) % 2:
            raise UsageError("the pattern ends with an escape of nothing", hint=r"a backslash itself is written \\")

    def __str__(self) -> str:
        return f"{self.key} {'not ' * self.negated}like {self.pattern}"


@dataclass(frozen=True)
class IsNull:
    """`key is null`: it has no value."""

    key: Key
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
            raise UsageError(f"{self._word()} joins two or more, and not {len(self.nodes)}")
        _measure(self, self.nodes)

    @classmethod
    def _word(cls) -> str:
        return cls.__name__.lower()

    def __str__(self) -> str:
        return f" {self._word()} ".join(map(_enclosed, self.nodes))


@dataclass(frozen=True)
class And(_Join):
    """All of two or more are true; `depth` and `count` are how deep it nests, and how many comparisons it has."""


@dataclass(frozen=True)
class Or(_Join):
    """At least one of two or more is true; `depth` and `count` as of `And`."""


@dataclass(frozen=True)
class Not:
    """It is not true; `depth` and `count` as of `And`."""

    node: Node
    depth: int = field(init=False, compare=False, repr=False)
    count: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _measure(self, (self.node,))

    def __str__(self) -> str:
        return f"not {_enclosed(self.node)}"


Node = And | Or | Not | Atom


@dataclass(frozen=True)
class By:
    """A key to order by, and which way round."""

    key: Key
    descending: bool = False

    def __str__(self) -> str:
        return f"{'-' * self.descending}{self.key}"


@dataclass(frozen=True)
class Sort:
    """What to order by, and what then among those that are equal."""

    keys: tuple[By, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.keys) <= SORTS:
            raise UsageError(f"an order has 1 to {SORTS} keys, and not {len(self.keys)}")

    def __str__(self) -> str:
        return ",".join(map(str, self.keys))


def unparse(node: Node | Sort) -> str:
    """The text of a filter or of an order; parsing it gives an equal tree."""
    return str(node)


def atoms(node: Node) -> Iterator[Atom]:
    """The comparisons of a filter, from left to right."""
    left = [node]
    while left:
        match left.pop():
            case And(nodes) | Or(nodes):
                left.extend(reversed(nodes))
            case Not(inner):
                left.append(inner)
            case atom:
                yield atom


def _measure(node: _Join | Not, below: tuple[Node, ...]) -> None:
    depth = 1 + max(getattr(n, "depth", 0) for n in below)
    count = sum(getattr(n, "count", 1) for n in below)
    if depth > DEEPEST:
        raise UsageError(f"the filter nests more than {DEEPEST} levels of and, or, not")
    if count > MOST:
        raise UsageError(f"the filter has more than {MOST} comparisons", hint="compare with many values by: in (…)")
    object.__setattr__(node, "depth", depth)
    object.__setattr__(node, "count", count)


def _enclosed(node: Node) -> str:
    return f"({node})" if isinstance(node, _Join) else str(node)
