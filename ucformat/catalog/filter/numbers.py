"""Comparisons of columns with numbers that the column's type may not hold, without losing anything."""

from __future__ import annotations

import math
from operator import eq, ge, gt, le, lt
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Float, false, literal, true

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sqlalchemy import ColumnElement

__all__ = ["OPERATORS", "compare_float", "compare_integer", "float_in", "integer_in", "is_long"]

#: `!=` is not among them: it is the negation of `=`.
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"=": eq, "<": lt, "<=": le, ">": gt, ">=": ge}

_LEAST, _MOST = -(2**63), 2**63 - 1


def is_long(value: float) -> bool:
    """Whether it is an integer of 64 bits, which both engines hold exactly."""
    return isinstance(value, int) and _LEAST <= value <= _MOST


def compare_integer(column: ColumnElement[Any], operator: str, value: float) -> ColumnElement[bool]:
    """A column of integers compared with any number: 1.5 lies between two of them, 1e30 beyond all."""
    bound = math.floor(value)
    if bound != value:
        if operator == "=":
            return false()
        operator, bound = ("<=", bound) if operator in {"<", "<="} else (">=", bound + 1)
    if not is_long(bound):
        return true() if operator in ({"<", "<="} if bound > 0 else {">", ">="}) else false()
    compared: ColumnElement[bool] = OPERATORS[operator](column, literal(bound, BigInteger))
    return compared


def compare_float(column: ColumnElement[Any], operator: str, value: float) -> ColumnElement[bool]:
    """A column of floats compared with any number: integers beyond 2**53 may lie between two of them."""
    bound = float(value)
    if bound != value:  # Python compares them exactly
        if operator == "=":
            return false()
        if bound > value:
            operator = {"<=": "<", ">": ">="}.get(operator, operator)
        else:
            operator = {"<": "<=", ">=": ">"}.get(operator, operator)
    compared: ColumnElement[bool] = OPERATORS[operator](column, literal(bound, Float(53)))
    return compared


def integer_in(column: ColumnElement[Any], values: Iterable[float]) -> ColumnElement[bool]:
    """Whether a column of integers equals one of the numbers."""
    bounds = {math.floor(v) for v in values if math.floor(v) == v and is_long(math.floor(v))}
    return column.in_([literal(bound, BigInteger) for bound in sorted(bounds)]) if bounds else false()


def float_in(column: ColumnElement[Any], values: Iterable[float]) -> ColumnElement[bool]:
    """Whether a column of floats equals one of the numbers."""
    bounds = {float(v) for v in values if float(v) == v}
    return column.in_([literal(bound, Float(53)) for bound in sorted(bounds)]) if bounds else false()
