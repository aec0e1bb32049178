"""What filters and orders mean, said once more in plain Python, over `Row`s."""

from __future__ import annotations

import operator
import re
from datetime import UTC, datetime, timedelta
from functools import cmp_to_key
from typing import TYPE_CHECKING, Any

from tests.catalog.filter.world import NOW, Row
from ucformat.catalog.filter.syntax import (
    Age,
    And,
    Boolean,
    Compare,
    In,
    IsNull,
    KeyPath,
    Like,
    Node,
    Not,
    Number,
    Or,
    SizeLiteral,
    Sort,
    Text,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENTS = {"config", "topology", "producer"}
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def matches(row: Row, node: Node) -> bool:
    """Whether a checkpoint is what the filter asks for."""
    match node:
        case And(nodes):
            return all(matches(row, n) for n in nodes)
        case Or(nodes):
            return any(matches(row, n) for n in nodes)
        case Not(inner):
            return not matches(row, inner)
        case IsNull(key, negated):
            return bool(values(row, key)) is negated
        case Compare(key, "!=", value):
            return not any(holds(key, v, "=", value) for v in values(row, key))
        case Compare(key, op, value):
            return any(holds(key, v, op, value) for v in values(row, key))
        case In(key, several, negated):
            return (
                any(holds(key, v, "=", value) for v in values(row, key) for value in several)
                is not negated
            )
        case Like(key, pattern, negated):
            found = (v for v in values(row, key) if isinstance(v, str))
            return any(regex(pattern.value).fullmatch(v) for v in found) is not negated


def values(row: Row, key: KeyPath) -> list[Any]:
    """All values that a checkpoint has for a key."""
    root, *path = key.parts
    if root in DOCUMENTS:
        return reach(row.documents[root], path)
    if root == "metric":
        found = row.metrics.get(path[0])
    elif root == "tensor":
        return (
            list(row.digests)
            if path[0] == "digest"
            else [t[path[0]] for t in row.structure.tensors]
        )
    elif root in {"tag", "alias", "url", "note"}:
        return list(getattr(row, root))
    elif root == "hold":
        found = any(
            released is None and (until is None or until > NOW) for until, released in row.holds
        )
    elif root == "verified":
        last = max(enumerate(row.verifications), key=lambda v: (v[1][0], v[0]), default=None)
        found = None if last is None else last[1][1]
    else:
        found = row.scalars[root]
    return [] if found is None else [found]


def reach(value: Any, path: list[str]) -> list[Any]:
    """The value at a path of a document, if there is one."""
    for part in path:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part in map(str, range(len(value))):
            value = value[int(part)]
        else:
            return []
    return [] if value is None else [value]


def holds(key: KeyPath, value: Any, op: str, literal: Value) -> bool:
    """Whether a value of a key compares so; of another type than the literal, it does not."""
    bound: Any
    match literal:
        case Text(text) if isinstance(value, datetime):
            bound = datetime.fromisoformat(text)
            bound = bound if bound.tzinfo else bound.replace(tzinfo=UTC)
        case Text(bound):
            if not isinstance(value, str):
                return False
        case Boolean(bound):
            if not isinstance(value, bool):
                return False
        case Age(bound):
            assert isinstance(value, timedelta)
        case Number(bound) | SizeLiteral(bound):
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
            if key.parts[0] in DOCUMENTS:
                value, bound = rounded(value), rounded(bound)
    return OPERATORS[op](value, bound)


def rounded(number: int | float) -> int | float:  # noqa: PYI041
    """An integer beyond 64 bits in a document is the float next to it."""
    return number if isinstance(number, float) or -(2**63) <= number < 2**63 else float(number)


def regex(pattern: str) -> re.Pattern[str]:
    """What LIKE asks for, as a regular expression."""
    parts = re.findall(r"\\.|.", pattern, re.DOTALL)
    plain = (
        re.escape(p[-1]) if len(p) == 2 else {"%": ".*", "_": "."}.get(p, re.escape(p))
        for p in parts
    )
    return re.compile("".join(plain), re.DOTALL)


def ordered(rows: list[Row], sort: Sort) -> list[int]:
    """The serials of checkpoints in order."""

    def compare(a: Row, b: Row) -> int:
        for by in sort.keys:
            x, y = rank(a, by.key), rank(b, by.key)
            if x != y:
                if x is None or y is None:
                    return 1 if x is None else -1
                return -1 if (x < y) is not by.descending else 1
        return b.serial - a.serial

    return [row.serial for row in sorted(rows, key=cmp_to_key(compare))]


def rank(row: Row, key: KeyPath) -> tuple[int, Any] | None:
    """What is compared to order: numbers before text, text before false and true, nothing else has an order."""
    match values(row, key):
        case [bool() as truth]:
            return 2, truth
        case [str() as text]:
            return 1, text
        case [int() | float() as number]:
            return 0, rounded(number)
        case [datetime() | timedelta() as time]:
            return 0, time
        case _:
            return None
