"""Conditions on a value in a JSON document, never NULL, and sorting by it.

The names of the path are bound parameters, since SQLite's path syntax cannot express every key.
Values of different types are never equal. Integers beyond 64 bits are compared as floats, as SQLite
stores them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.filter.expressions import OPERATORS, by_code_point, by_engine, is_long, like
from ucformat.catalog.filter.syntax import Boolean, Number, SizeLiteral, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import ColumnElement, Select

    from ucformat.catalog.filter.syntax import Value

    Within = Callable[[ColumnElement[Any]], ColumnElement[Any]]
    Test = Callable[["DocumentValue"], ColumnElement[bool]]

_BEYOND = 2**63  # integers of at least this magnitude are compared as floats


def document_test(document: Any, path: Sequence[str], test: Test) -> ColumnElement[bool]:
    """Test the value at a path; false if there is none."""
    sqlite = _on_sqlite(document, path)
    return by_engine(sqlite.holds(test(sqlite)), test(_OnPostgres(document, path)))


def document_order(
    document: Any, path: Sequence[str], within: Within = lambda v: v
) -> list[ColumnElement[Any]]:
    """Sort by the value at a path: numbers, then text, then `false` and `true`; everything else is NULL."""
    first, *others = map(within, _OnPostgres(document, path).order())
    return [
        by_engine(within(_on_sqlite(document, path).order()), first),
        *(by_engine(sa.null(), o) for o in others),
    ]


class DocumentValue(ABC):
    """A value in a document, in the SQL of one database."""

    text: ColumnElement[Any]

    @abstractmethod
    def named(self) -> ColumnElement[bool]:
        """It exists, and may be null."""

    @abstractmethod
    def present(self) -> ColumnElement[bool]:
        """It exists and is not null."""

    @abstractmethod
    def _truth(self, *, wanted: bool) -> ColumnElement[bool]: ...

    @abstractmethod
    def _when_text(self, condition: ColumnElement[bool]) -> ColumnElement[bool]: ...

    @abstractmethod
    def _when_number(self, condition: ColumnElement[bool]) -> ColumnElement[bool]: ...

    @abstractmethod
    def _number(self, bounds: Sequence[float]) -> ColumnElement[Any]:
        """The value as a number, for comparison with these."""

    @abstractmethod
    def _bounds(self, bound: float) -> list[ColumnElement[Any]]:
        """The bound as SQL; the least and the greatest, if it has two representations."""

    def compare(self, operator: str, value: Value) -> ColumnElement[bool]:
        """It has the type of `value`, and the comparison is true."""
        compared = OPERATORS[operator]
        match value:
            case Text(text):
                return self._when_text(compared(by_code_point(self.text), _text(text)))
            case Number(number) | SizeLiteral(number):
                # of two representations, what is between them counts as equal
                bound = self._bounds(number)[0 if operator in {"<", ">="} else -1]
                return self._when_number(compared(self._number([number]), bound))
            case _:
                return self.among([value])

    def among(self, values: Sequence[Value]) -> ColumnElement[bool]:
        """It equals one of the values."""
        texts = [_text(v.value) for v in values if isinstance(v, Text)]
        numbers = [
            v.value if isinstance(v, Number) else v.nbytes
            for v in values
            if isinstance(v, Number | SizeLiteral)
        ]
        conditions = [
            self._truth(wanted=t)
            for t in sorted({v.value for v in values if isinstance(v, Boolean)})
        ]
        if texts:
            conditions.append(self._when_text(self.text.in_(texts)))
        if numbers:
            bounds = [bound for number in numbers for bound in self._bounds(number)]
            conditions.append(self._when_number(self._number(numbers).in_(bounds)))
        return sa.or_(sa.false(), *conditions)

    def like(self, pattern: str) -> ColumnElement[bool]:
        """It is text that matches a pattern."""
        return self._when_text(like(self.text, pattern))


class _OnSqlite(DocumentValue):
    """A value by its type and content; both are NULL if it does not exist."""

    def __init__(self, kind: ColumnElement[Any], value: ColumnElement[Any]) -> None:
        self._type = kind
        self.text = value

    def holds(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        """The condition, or false if there is no value."""
        return sa.func.coalesce(condition, sa.false())

    def order(self) -> ColumnElement[Any]:
        """One value of any type: SQLite sorts numbers before text, and text before blobs."""
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
        # parsed by SQLite, so that both numbers are rounded in the same way
        return [sa.func.json_extract(_text(repr(bound)), "$")]


class _Nested(_OnSqlite):
    """The last row of nested `json_each`, one for each part of a path, which can match any key."""

    def __init__(self, document: ColumnElement[Any], path: Sequence[str]) -> None:
        self._rows: list[Any] = []
        self._on: list[ColumnElement[bool]] = []
        inner: ColumnElement[Any] = document
        for part in path:
            row = sa.func.json_each(inner).table_valued(
                "key", "value", "type", "atom", joins_implicitly=True
            )
            self._rows.append(row)
            named = row.c.key == _text(part)
            if _is_index(part):
                # of a list
                named = sa.or_(named, row.c.key == sa.literal(int(part), sa.BigInteger))
            self._on.append(named)
            # a value that is text is no JSON document, on which json_each would fail
            inner = sa.case((row.c.type.in_(["object", "array"]), row.c.value), else_="[]")
        super().__init__(row.c.type, row.c.atom)

    def holds(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return self._select(sa.literal_column("1")).where(condition).exists()

    def order(self) -> ColumnElement[Any]:
        return self._select(super().order()).limit(1).scalar_subquery()

    def _select(self, column: ColumnElement[Any]) -> Select[Any]:
        return sa.select(column).select_from(*self._rows).where(*self._on)


def _on_sqlite(document: ColumnElement[Any], path: Sequence[str]) -> _OnSqlite:
    """Use a path in SQLite's syntax if that can express it, which is several times faster."""
    if not all(
        p and p.isascii() and p.isprintable() and not {*p} & {'"', "\\"} and not _is_index(p)
        for p in path
    ):
        return _Nested(document, path)
    written = _text("$" + "".join(f'."{part}"' for part in path))
    return _OnSqlite(sa.func.json_type(document, written), sa.func.json_extract(document, written))


class _OnPostgres(DocumentValue):
    """A value of type jsonb; NULL if it does not exist."""

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
            sa.case(
                (self._type == "number", 0),
                (self._type == "string", 1),
                (self._type == "boolean", 2),
            ),
            sa.case((self._type == "number", self._rounded()), else_=truth),
            sa.case((self._type == "string", by_code_point(self.text))),
        ]

    def _truth(self, *, wanted: bool) -> ColumnElement[bool]:
        return self._when(
            "boolean",
            self._value == sa.literal_column("'true'::jsonb" if wanted else "'false'::jsonb"),
        )

    def _when_text(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return self._when("string", condition)

    def _when_number(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return self._when("number", condition)

    def _when(self, kind: str, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return sa.case((self._type == kind, condition), else_=sa.false())

    def _number(self, bounds: Sequence[float]) -> ColumnElement[Any]:
        # a rounded number equals none of these bounds, and is on the same side of them
        return self._exact if all(abs(bound) < _BEYOND for bound in bounds) else self._rounded()

    def _bounds(self, bound: float) -> list[ColumnElement[Any]]:
        # jsonb stores a large float by its shortest digits, not by all the digits of its integer
        # value
        spelled = {Decimal(repr(float(bound) if abs(bound) >= _BEYOND else bound))}
        if isinstance(bound, float) and bound.is_integer() and abs(bound) < _BEYOND:
            spelled.add(Decimal(bound))
        return [sa.cast(_text(str(number)), sa.Numeric) for number in sorted(spelled)]

    def _rounded(self) -> ColumnElement[Any]:
        """The number; beyond 64 bits, as the nearest float or infinity."""
        # a cast to numeric alone would keep 15 of them
        digits = sa.cast(sa.cast(self._exact, sa.Double), sa.String)
        return sa.case(
            (sa.func.abs(self._exact) < sa.literal_column(str(_BEYOND)), self._exact),
            (
                sa.func.abs(self._exact) < sa.literal_column("1.7976931348623158e308"),
                sa.cast(digits, sa.Numeric),
            ),
            else_=sa.func.sign(self._exact) * sa.literal_column("1e400"),
        )


def _text(value: str) -> ColumnElement[str]:
    return sa.literal(value, sa.Text)


def _is_index(part: str) -> bool:
    """Whether it may be an index: the canonical decimal form of an integer."""
    return (
        part.isascii() and part.isdigit() and (part == "0" or part[0] != "0") and is_long(int(part))
    )
