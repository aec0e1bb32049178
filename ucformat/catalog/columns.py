"""What the tables of the catalog are made of: types of columns that both databases have, and the base of all tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sqlalchemy import JSON, Column, DateTime, MetaData, Table, Text, TypeDecorator

from ucformat.catalog.plain import plain

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Dialect
    from sqlalchemy.types import TypeEngine

__all__ = ["Base", "Json", "PlainText", "UtcDateTime", "column"]

_T = TypeVar("_T")


class UtcDateTime(TypeDecorator[datetime]):
    """An instant; stored in UTC, always given back with its zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """To UTC; a time without a zone is a mistake of the caller."""
        if value is None:
            return None
        assert value.tzinfo is not None, "a time without a zone"  # noqa: S101
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """With its zone, which SQLite does not keep."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class PlainText(TypeDecorator[str]):
    """Text of any length, without what one of the databases does not take (see `plain`)."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """As it can be stored, and so found again."""
        return None if value is None else plain(value)


class Json(TypeDecorator[Any]):
    """A JSON document: JSONB on PostgreSQL, whose dialect is imported only there."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """The type of this database."""
        if dialect.name != "postgresql":
            return dialect.type_descriptor(JSON())
        from sqlalchemy.dialects.postgresql import JSONB

        return dialect.type_descriptor(JSONB())


class Base:
    """What all tables share: names of constraints that migrations can rely on.

    A subclass is a table: its columns are attributes, and wherever SQLAlchemy takes a table it takes the class. The
    ORM is not used: a session would be of no use here, and importing it takes longer than most commands.
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
    """A column, which by default has to have a value."""
    return Column(kind, *args, nullable=nullable, **options)
