"""Column types that work the same on both databases, and the base class of the tables."""

from __future__ import annotations

import hashlib
import json
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sqlalchemy import JSON, Column, DateTime, MetaData, Table, Text, TypeDecorator

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Dialect
    from sqlalchemy.types import TypeEngine


def storable_json(value: Any) -> Any:
    """Make a JSON value storable in both databases.

    Returns:
        A copy in which non-finite numbers are `{"$float": "nan"}` and text has passed `storable_text`.
    """
    match value:
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
        case str():
            return storable_text(value)
        case dict():
            return {storable_json(str(k)): storable_json(v) for k, v in value.items()}
        case list() | tuple():
            return [storable_json(v) for v in value]
    return value


def storable_text(text: str) -> str:
    """Make text storable in both databases.

    Returns:
        The text with U+FFFD in place of NUL and of unpaired surrogates.
    """
    if text.isascii():
        return text.replace("\0", "\ufffd")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")


_T = TypeVar("_T")


class UtcDateTime(TypeDecorator[datetime]):
    """A time with its zone, stored in UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Convert a value of a statement to UTC."""
        if value is None:
            return None
        assert value.tzinfo is not None, "a time without a zone"  # noqa: S101
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Add the zone to a value of a row, which SQLite does not store."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class PlainText(TypeDecorator[str]):
    """Text of any length that both databases can store (see `storable_text`), ordered by code point."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """The type in one database: PostgreSQL's indexes find text by its beginning only in the collation "C"."""
        return dialect.type_descriptor(Text(collation="C") if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Convert a value of a statement to the stored form, also when searching."""
        return None if value is None else storable_text(value)


class Json(TypeDecorator[Any]):
    """A JSON document: JSONB on PostgreSQL, whose dialect is imported only there."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """The type in one database."""
        if dialect.name != "postgresql":
            return dialect.type_descriptor(JSON())
        from sqlalchemy.dialects.postgresql import JSONB

        return dialect.type_descriptor(JSONB())


class Base:
    """The base class of the tables, with fixed names of constraints, which migrations rely on.

    A subclass is a table: its columns are attributes, and wherever SQLAlchemy takes a table it takes the class. The
    ORM is not used: importing it takes longer than most commands.
    """

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    __tablename__: ClassVar[str]
    __table_args__: ClassVar[tuple[Any, ...]] = ()
    __table__: ClassVar[Table]

    def __init_subclass__(cls) -> None:
        """Make the table."""
        columns = {k: v for k, v in vars(cls).items() if isinstance(v, Column)}
        for name, column in columns.items():
            column.name = column.key = name
        items = [a for a in cls.__table_args__ if not isinstance(a, dict)]
        options = {k: v for a in cls.__table_args__ if isinstance(a, dict) for k, v in a.items()}
        cls.__table__ = Table(cls.__tablename__, Base.metadata, *columns.values(), *items, **options)

    @classmethod
    def __clause_element__(cls) -> Table:
        """The table, for SQLAlchemy."""
        return cls.__table__


def column(
    kind: TypeEngine[_T] | type[TypeEngine[_T]], *args: Any, nullable: bool = False, **options: Any
) -> ColumnElement[_T]:
    """Declare a column."""
    return Column(kind, *args, nullable=nullable, **options)


def stored_metric(value: float) -> float | None:
    """A metric as it is stored.

    Returns:
        The number; None for NaN, which SQLite does not have.
    """
    return None if math.isnan(value) else float(value)


def canonical_hash(value: Any) -> str:
    """The SHA-256 of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
