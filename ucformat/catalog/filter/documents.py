"""Conditions on a value within a JSON document, which are never NULL, and ordering by it.

The value is found by its path of names, which are parameters like all values: SQLite's own language of paths cannot
name every key. Text, numbers and truth values equal only their like. Numbers are compared exactly up to 64 bits;
integers beyond are taken as floats, which is what SQLite makes of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.filter.engines import by_code_point, by_engine, like
from ucformat.catalog.filter.numbers import OPERATORS, is_long
from ucformat.catalog.filter.values import Number, Size, Text, Truth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import ColumnElement, Select

    from ucformat.catalog.filter.values import Value

    Within = Callable[[ColumnElement[Any]], ColumnElement[Any]]
    Test = Callable[["Found"], ColumnElement[bool]]

__all__ = ["Found", "document_order", "document_test"]

_BEYOND = 2**63  # from here on, upwards and downwards, integers are taken as floats


def document_test(document: Any, path: Sequence[str], test: Test) -> ColumnElement[bool]:
    """Whether `test` holds of the value at a path; where there is none, it does not."""
    sqlite = _on_sqlite(document, path)
    return by_engine(sqlite.holds(test(sqlite)), test(_OnPostgres(document, path)))


def document_order(document: Any, path: Sequence[str], within: Within = lambda v: v) -> list[ColumnElement[Any]]:
    """What to order by, one after the other: numbers, then text, then `false`, `true`; NULL for anything else.

    `within` makes of a value in the document one of the row that is ordered.
    """
    first, *others = map(within, _OnPostgres(document, path).order())
    return [by_engine(within(_on_sqlite(document, path).order()), first), *(by_engine(sa.null(), o) for o in others)]


class Found(ABC):
    """A value in a document, on one of the engines."""

    text: ColumnElement[Any]

    @abstractmethod
    def named(self) -> ColumnElement[bool]:
        """It is there, be it null."""

    @abstractmethod
    def present(self) -> ColumnElement[bool]:
        """It is there, and not null."""

    @abstractmethod
    def _truth(self, *, wanted: bool) -> ColumnElement[bool]: ...

    @abstractmethod
    def _when_text(self, condition: ColumnElement[bool]) -> ColumnElement[bool]: ...

    @abstractmethod
    def _when_number(self, condition: ColumnElement[bool]) -> ColumnElement[bool]: ...

    @abstractmethod
    def _number(self, bounds: Sequence[float]) -> ColumnElement[Any]:
        """It as a number, to be compared with these."""

    @abstractmethod
    def _bounds(self, bound: float) -> list[ColumnElement[Any]]:
        """The number that it is compared with; the least and the greatest, if that has two spellings."""

    def compare(self, operator: str, value: Value) -> ColumnElement[bool]:
        """It is of the value's type, and compares so."""
        compared = OPERATORS[operator]
        match value:
            case Text(text):
                return self._when_text(compared(by_code_point(self.text), _text(text)))
            case Number(number) | Size(number):
                bound = self._bounds(number)[0 if operator in {"<", ">="} else -1]
                return self._when_number(compared(self._number([number]), bound))
            case _:
                return self.among([value])

    def among(self, values: Sequence[Value]) -> ColumnElement[bool]:
        """It equals one of the values."""
        texts = [_text(v.value) for v in values if isinstance(v, Text)]
        numbers = [v.value if isinstance(v, Number) else v.nbytes for v in values if isinstance(v, Number | Size)]
        found = [self._truth(wanted=t) for t in sorted({v.value for v in values if isinstance(v, Truth)})]
        if texts:
            found.append(self._when_text(self.text.in_(texts)))
        if numbers:
            bounds = [bound for number in numbers for bound in self._bounds(number)]
            found.append(self._when_number(self._number(numbers).in_(bounds)))
        return sa.or_(sa.false(), *found)

    def like(self, pattern: str) -> ColumnElement[bool]:
        """It is text of this pattern."""
        return self._when_text(like(self.text, pattern))


class _OnSqlite(Found):
    """A value by its type and itself; NULL where there is none."""

    def __init__(self, kind: ColumnElement[Any], value: ColumnElement[Any]) -> None:
        self._type = kind
        self.text = value

    def holds(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        """The condition, false where there is no value."""
        return sa.func.coalesce(condition, sa.false())

    def order(self) -> ColumnElement[Any]:
        """One value of any type: SQLite itself puts numbers before text, and text before blobs."""
        return sa.case(
            (self._type.in_(["integer", "real", "text"]), self.text),
            (self._type == "false", sa.literal_column("x'00'")),
            (self._type == "true", sa.literal_column("x'01'")),
        )

    def named(self) -> ColumnElement[bool]:
        return self._type.is_not(None)

    def present(self) -> ColumnElement[bool]:
        return self._type != "null"

    def _truth(self, *, wanted: bool) -> ColumnElement[bool]:
        return self._type == ("true" if wanted else "false")

    def _when_text(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return sa.and_(self._type == "text", condition)

    def _when_number(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return sa.and_(self._type.in_(["integer", "real"]), condition)

    def _number(self, bounds: Sequence[float]) -> ColumnElement[Any]:  # noqa: ARG002
        return self.text

    def _bounds(self, bound: float) -> list[ColumnElement[Any]]:
        # read by what reads the document, so that the digits of both are rounded alike
        return [sa.func.json_extract(_text(repr(bound)), "$")]


class _Nested(_OnSqlite):
    """The row of the last of nested `json_each`, one for each part of the path, which may name anything."""

    def __init__(self, document: ColumnElement[Any], path: Sequence[str]) -> None:
        self._rows: list[Any] = []
        self._on: list[ColumnElement[bool]] = []
        inner: ColumnElement[Any] = document
        for part in path:
            row = sa.func.json_each(inner).table_valued("key", "value", "type", "atom", joins_implicitly=True)
            self._rows.append(row)
            named = row.c.key == _text(part)
            if _is_index(part):
                named = sa.or_(named, row.c.key == sa.literal(int(part), sa.BigInteger))  # of a list
            self._on.append(named)
            inner = sa.case((row.c.type.in_(["object", "array"]), row.c.value), else_="[]")
        super().__init__(row.c.type, row.c.atom)

    def holds(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return self._select(sa.literal_column("1")).where(condition).exists()

    def order(self) -> ColumnElement[Any]:
        return self._select(super().order()).limit(1).scalar_subquery()

    def _select(self, column: ColumnElement[Any]) -> Select[Any]:
        return sa.select(column).select_from(*self._rows).where(*self._on)


def _on_sqlite(document: ColumnElement[Any], path: Sequence[str]) -> _OnSqlite:
    """By a path in SQLite's language where it has one, which is several times as fast."""
    if not all(p and p.isascii() and p.isprintable() and not {*p} & {'"', "\\"} and not _is_index(p) for p in path):
        return _Nested(document, path)
    written = _text("$" + "".join(f'."{part}"' for part in path))
    return _OnSqlite(sa.func.json_type(document, written), sa.func.json_extract(document, written))


class _OnPostgres(Found):
    """A value of the type jsonb; NULL where there is none."""

    def __init__(self, document: ColumnElement[Any], path: Sequence[str]) -> None:
        value: Any = document
        for part in path:
            step = sa.func.jsonb_extract_path if _is_index(part) else sa.func.jsonb_object_field
            value = step(value, _text(part))
        self._value = value
        self._type = sa.func.jsonb_typeof(value)
        self.text = value.op("#>>", return_type=sa.String())(sa.literal_column("'{}'::text[]"))
        self._exact = sa.cast(value, sa.Numeric)

    def named(self) -> ColumnElement[bool]:
        there: ColumnElement[bool] = self._value.is_not(None)
        return there

    def present(self) -> ColumnElement[bool]:
        return sa.func.coalesce(self._type != "null", sa.false())

    def order(self) -> list[ColumnElement[Any]]:
        """The type, the number and the text."""
        truth = sa.case((self._truth(wanted=True), 1), (self._truth(wanted=False), 0))
        return [
            sa.case((self._type == "number", 0), (self._type == "string", 1), (self._type == "boolean", 2)),
            sa.case((self._type == "number", self._rounded()), else_=truth),
            sa.case((self._type == "string", by_code_point(self.text))),
        ]

    def _truth(self, *, wanted: bool) -> ColumnElement[bool]:
        return self._when("boolean", self._value == sa.literal_column("'true'::jsonb" if wanted else "'false'::jsonb"))

    def _when_text(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return self._when("string", condition)

    def _when_number(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return self._when("number", condition)

    def _when(self, kind: str, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return sa.case((self._type == kind, condition), else_=sa.false())

    def _number(self, bounds: Sequence[float]) -> ColumnElement[Any]:
        # what is rounded equals nothing inside, and is on the same side of it
        return self._exact if all(abs(bound) < _BEYOND for bound in bounds) else self._rounded()

    def _bounds(self, bound: float) -> list[ColumnElement[Any]]:
        # jsonb keeps the digits of large floats, which are not all the digits of the integer they are
        spelled = {Decimal(repr(float(bound) if abs(bound) >= _BEYOND else bound))}
        if isinstance(bound, float) and bound.is_integer() and abs(bound) < _BEYOND:
            spelled.add(Decimal(bound))
        return [sa.cast(_text(str(number)), sa.Numeric) for number in sorted(spelled)]

    def _rounded(self) -> ColumnElement[Any]:
        """The number; as the nearest float, or as infinite, if it is beyond 64 bits."""
        digits = sa.cast(sa.cast(self._exact, sa.Double), sa.String)  # a cast to numeric alone would keep 15 of them
        return sa.case(
            (sa.func.abs(self._exact) < sa.literal_column(str(_BEYOND)), self._exact),
            (sa.func.abs(self._exact) < sa.literal_column("1.7976931348623158e308"), sa.cast(digits, sa.Numeric)),
            else_=sa.func.sign(self._exact) * sa.literal_column("1e400"),
        )


def _text(value: str) -> ColumnElement[str]:
    return sa.literal(value, sa.Text)


def _is_index(part: str) -> bool:
    """Whether it may name a place of a list: written as no other than the integer is."""
    return part.isascii() and part.isdigit() and (part == "0" or part[0] != "0") and is_long(int(part))
