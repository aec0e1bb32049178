"""From the tree of a filter to SQL: a condition on `models.Checkpoint`, true or false but never NULL.

Comparisons first find what they compare on its own, small or indexed table, and then the checkpoints that refer to it.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, false, not_, or_, true

from ucformat.catalog.filter.check import check, instant
from ucformat.catalog.filter.documents import document_test
from ucformat.catalog.filter.engines import by_code_point, like
from ucformat.catalog.filter.keys import Kind, resolve
from ucformat.catalog.filter.numbers import OPERATORS, compare_float, compare_integer, float_in, integer_in
from ucformat.catalog.filter.sources import document_of, holding, source_of
from ucformat.catalog.filter.syntax import And, Compare, In, IsNull, Like, Not, Or
from ucformat.catalog.filter.values import Age, Number, Size, Text, Truth
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement

    from ucformat.catalog.filter.documents import Found
    from ucformat.catalog.filter.syntax import Atom, Node
    from ucformat.catalog.filter.values import Value

__all__ = ["compile_filter"]

_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def compile_filter(node: Node, *, now: datetime) -> ColumnElement[bool]:
    """The condition that a filter is, for `select(Checkpoint).where(…)`; ages and holds are as of `now`."""
    if now.tzinfo is None:
        raise UsageError("the time of a filter needs a zone", hint="such as datetime.now(UTC)")
    check(node)
    return _condition(node, now, negated=False)


def _condition(node: Node, now: datetime, *, negated: bool) -> ColumnElement[bool]:
    """Without `NOT (…)`, and what nests deepest first: the parser of SQLite has a stack of a hundred places."""
    match node:
        case Not(inner):
            return _condition(inner, now, negated=not negated)
        case And(nodes) | Or(nodes):
            join = and_ if isinstance(node, And) is not negated else or_
            deepest_first = sorted(nodes, key=lambda n: getattr(n, "depth", 0), reverse=True)
            return join(*(_condition(n, now, negated=negated) for n in deepest_first))
        case _:
            holds = _atom(node, now)
            return not_(holds) if _is_opposite(node) is not negated else holds


def _is_opposite(atom: Atom) -> bool:
    match atom:
        case Compare(_, operator):
            return operator == "!="
        case IsNull(_, negated):
            return not negated
        case In(negated=negated) | Like(negated=negated):
            return negated


def _atom(atom: Atom, now: datetime) -> ColumnElement[bool]:
    """Whether there is a value as the comparison asks for, where it asks for the opposite without that."""
    target = resolve(atom.key)
    if target.root == "hold":
        return _truth(holding(now), atom)
    if target.kind is Kind.JSON:
        source = document_of(target.root)
        return source.lift(document_test(source.column, target.path, lambda found: _in_document(found, atom)))
    source = source_of(target)
    return source.lift(_on_column(source.column, target.kind, atom, now))


def _truth(held: ColumnElement[bool], atom: Atom) -> ColumnElement[bool]:
    match atom:
        case Compare(_, _, value):
            wanted = {value}
        case In(_, values):
            wanted = set(values)
        case _:
            return true()
    return or_(held if Truth(True) in wanted else false(), not_(held) if Truth(False) in wanted else false())


def _in_document(found: Found, atom: Atom) -> ColumnElement[bool]:
    match atom:
        case Compare(_, "=" | "!=", value):
            return found.among([value])
        case Compare(_, operator, value):
            return found.compare(operator, value)
        case In(_, values):
            return found.among(values)
        case Like(_, pattern):
            return found.like(pattern.value)
        case IsNull():
            return found.present()


def _on_column(column: Any, kind: Kind, atom: Atom, now: datetime) -> ColumnElement[bool]:
    match atom:
        case Compare(_, "=" | "!=", value):
            return _among(column, kind, [value], now)
        case Compare(_, operator, value):
            return _ordered(column, kind, operator, value, now)
        case In(_, values):
            return _among(column, kind, values, now)
        case Like(_, pattern):
            return like(column, pattern.value)
        case IsNull():
            there: ColumnElement[bool] = column.is_not(None)
            return there


def _among(column: Any, kind: Kind, values: Sequence[Value], now: datetime) -> ColumnElement[bool]:
    bounds = [_bound(kind, value, now) for value in values]
    if kind in {Kind.INTEGER, Kind.SIZE}:
        return integer_in(column, bounds)
    if kind is Kind.FLOAT:
        return float_in(column, bounds)
    equal: ColumnElement[bool] = column == bounds[0] if len(bounds) == 1 else column.in_(bounds)
    return equal


def _ordered(column: Any, kind: Kind, operator: str, value: Value, now: datetime) -> ColumnElement[bool]:
    bound = _bound(kind, value, now)
    if kind in {Kind.INTEGER, Kind.SIZE}:
        return compare_integer(column, operator, bound)
    if kind is Kind.FLOAT:
        return compare_float(column, operator, bound)
    if kind is Kind.AGE:
        operator = _MIRRORED[operator]  # the older, the earlier
    compared: ColumnElement[bool] = OPERATORS[operator](by_code_point(column) if kind is Kind.TEXT else column, bound)
    return compared


def _bound(kind: Kind, value: Value, now: datetime) -> Any:
    """The value as the column is compared with it."""
    match value:
        case Age(span):
            return _ago(now, span)
        case Size(nbytes):
            return nbytes
        case Text(text):
            return instant(text) if kind is Kind.TIME else text
        case Number() | Truth():
            return value.value


def _ago(now: datetime, span: timedelta) -> datetime:
    try:
        return now.astimezone(UTC) - span
    except OverflowError:
        return _FIRST if span > timedelta(0) else _LAST
