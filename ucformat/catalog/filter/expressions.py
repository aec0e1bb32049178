"""SQL expressions with the same meaning on SQLite and PostgreSQL, and exact comparisons with numbers of any size."""

from __future__ import annotations

import math
from operator import eq, ge, gt, le, lt
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Boolean, Float, Text, false, literal, true
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sqlalchemy import ColumnElement
    from sqlalchemy.sql.compiler import SQLCompiler


class _ByEngine(FunctionElement[Any]):
    """One expression written for SQLite and for PostgreSQL, in this order."""

    name = "by_engine"
    inherit_cache = True


class _ByCodePoint(FunctionElement[str]):
    """Text compared and ordered by code point, whatever the database's collation."""

    name = "by_code_point"
    type = Text()
    inherit_cache = True


class _Like(FunctionElement[bool]):
    """Whether text matches a pattern; the clauses are the text, the pattern of LIKE and the pattern of GLOB."""

    name = "like"
    type = Boolean()
    inherit_cache = True


def by_engine(sqlite: ColumnElement[Any], postgresql: ColumnElement[Any]) -> ColumnElement[Any]:
    """An expression that differs between the databases."""
    both = _ByEngine(sqlite, postgresql)
    both.type = sqlite.type
    return both


def by_code_point(text: ColumnElement[str]) -> ColumnElement[str]:
    """Text that `<` and ORDER BY compare by code point."""
    return _ByCodePoint(text)


def like(text: ColumnElement[str], pattern: str) -> ColumnElement[bool]:
    """Match text with a LIKE pattern, case-sensitively; on SQLite by GLOB, since its LIKE ignores case."""
    return _Like(text, literal(pattern, Text), literal(_glob(pattern), Text))


def _glob(pattern: str) -> str:
    parts = []
    rest = iter(pattern)
    for c in rest:
        taken = next(rest) if c == "\\" else None
        if taken is None and c in "%_":
            parts.append("*" if c == "%" else "?")
        else:
            plain = taken or c
            parts.append(f"[{plain}]" if plain in "*?[" else plain)
    return "".join(parts)


@compiles(_ByEngine)
def _by_engine(element: _ByEngine, compiler: SQLCompiler, **kw: Any) -> str:
    sqlite, postgresql = element.clauses
    return f"({compiler.process(postgresql if compiler.dialect.name == 'postgresql' else sqlite, **kw)})"


@compiles(_ByCodePoint)
def _by_code_point(element: _ByCodePoint, compiler: SQLCompiler, **kw: Any) -> str:
    collation = ' COLLATE "C"' if compiler.dialect.name == "postgresql" else ""
    return f"({compiler.process(element.clauses, **kw)}){collation}"


@compiles(_Like)
def _like(element: _Like, compiler: SQLCompiler, **kw: Any) -> str:
    text, pattern, glob = element.clauses
    spelled = compiler.process(text, **kw)
    if compiler.dialect.name == "postgresql":
        return f'(({spelled}) COLLATE "C" LIKE {compiler.process(pattern, **kw)})'
    return f"(({spelled}) GLOB {compiler.process(glob, **kw)})"


#: Without `!=`, which is compiled as the negation of `=`.
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"=": eq, "<": lt, "<=": le, ">": gt, ">=": ge}

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def is_long(value: float) -> bool:
    """Whether a number is an integer of 64 bits, which both databases store exactly."""
    return isinstance(value, int) and _INT64_MIN <= value <= _INT64_MAX


def compare_integer(column: ColumnElement[Any], operator: str, value: float) -> ColumnElement[bool]:
    """Compare a column of integers with any number, such as 1.5 or 1e30, exactly."""
    bound = math.floor(value)
    if bound != value:
        if operator == "=":
            return false()
        # below 1.5 is at most 1, above it at least 2
        operator, bound = ("<=", bound) if operator in {"<", "<="} else (">=", bound + 1)
    if not is_long(bound):
        return true() if operator in ({"<", "<="} if bound > 0 else {">", ">="}) else false()
    compared: ColumnElement[bool] = OPERATORS[operator](column, literal(bound, BigInteger))
    return compared


def compare_float(column: ColumnElement[Any], operator: str, value: float) -> ColumnElement[bool]:
    """Compare a column of floats with any number, such as an integer between two floats above 2**53, exactly."""
    bound = float(value)
    if bound != value:  # Python compares them exactly
        if operator == "=":
            return false()
        # no float is between the two
        if bound > value:
            operator = {"<=": "<", ">": ">="}.get(operator, operator)
        else:
            operator = {"<": "<=", ">=": ">"}.get(operator, operator)
    compared: ColumnElement[bool] = OPERATORS[operator](column, literal(bound, Float(53)))
    return compared


def integer_in(column: ColumnElement[Any], values: Iterable[float]) -> ColumnElement[bool]:
    """Test whether a column of integers equals one of several numbers."""
    bounds = {math.floor(v) for v in values if math.floor(v) == v and is_long(math.floor(v))}
    return (
        column.in_([literal(bound, BigInteger) for bound in sorted(bounds)]) if bounds else false()
    )


def float_in(column: ColumnElement[Any], values: Iterable[float]) -> ColumnElement[bool]:
    """Test whether a column of floats equals one of several numbers."""
    bounds = {float(v) for v in values if float(v) == v}
    return (
        column.in_([literal(bound, Float(53)) for bound in sorted(bounds)]) if bounds else false()
    )
