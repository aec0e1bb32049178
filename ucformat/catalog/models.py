"""The tables of the catalog (docs/catalog.md, "Tables").

`checkpoint.serial` is the number that other tables refer to, `checkpoint.id` the id that manifests and people use. What
a checkpoint's tensors are called and how they are cut is a *tensor set*, stored once for all checkpoints of that
structure; only their digests are rows of each checkpoint.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    false,
)

from ucformat.catalog.plain import plain

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Dialect
    from sqlalchemy.types import TypeEngine

__all__ = [
    "BLOCK",
    "Alias",
    "AliasMove",
    "Base",
    "Checkpoint",
    "Config",
    "Digest",
    "Edge",
    "Event",
    "Hold",
    "Identity",
    "Location",
    "Metric",
    "Note",
    "Run",
    "Tag",
    "Tensor",
    "TensorSet",
    "Untag",
    "Verification",
]

_T = TypeVar("_T")

#: About so many digests share a block: what is inserted in turn stays on few pages, and a search looks into each block
#: once. Measured on SQLite with 10,000 digests a checkpoint: 45 ms to insert them under one index over all, 10 ms so.
BLOCK = 32_768


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


def _column(
    kind: TypeEngine[_T] | type[TypeEngine[_T]], *args: Any, nullable: bool = False, **options: Any
) -> ColumnElement[_T]:
    """A column, which by default has to have a value."""
    return Column(kind, *args, nullable=nullable, **options)


def _of_checkpoint(*, primary_key: bool = False) -> ColumnElement[int]:
    """A reference to a checkpoint; rows go with it."""
    key = ForeignKey("checkpoint.serial", ondelete="CASCADE")
    return _column(Integer, key, primary_key=primary_key, index=not primary_key)


class Identity(Base):
    """Which catalog this is: one row."""

    __tablename__ = "catalog"
    id = _column(PlainText, primary_key=True)
    created = _column(UtcDateTime)


class Run(Base):
    """A training run: what `run7@1000` begins with."""

    __tablename__ = "run"
    id = _column(Integer, primary_key=True)
    name = _column(PlainText, unique=True)
    created = _column(UtcDateTime)


class Config(Base):
    """A configuration, stored once for all checkpoints that have it; `hash` is that of its canonical JSON."""

    __tablename__ = "config"
    id = _column(Integer, primary_key=True)
    hash = _column(PlainText, unique=True)
    document = _column(Json)


class TensorSet(Base):
    """The structure of a checkpoint: names, states, dtypes, shapes and grids; `hash` is that of all of them."""

    __tablename__ = "tensor_set"
    id = _column(Integer, primary_key=True)
    hash = _column(PlainText, unique=True)


class Tensor(Base):
    """One tensor of a structure. `shape`, `chunk` and `shard` are written `4096,1024`; of a scalar they are empty."""

    __tablename__ = "tensor"
    __table_args__ = (Index(None, "name", "state"), {"sqlite_with_rowid": False})
    tensor_set_id = _column(Integer, ForeignKey("tensor_set.id", ondelete="CASCADE"), primary_key=True)
    position = _column(Integer, primary_key=True)
    name = _column(PlainText)
    state = _column(PlainText)
    dtype = _column(PlainText)
    shape = _column(PlainText)
    chunk = _column(PlainText, nullable=True)
    shard = _column(PlainText, nullable=True)
    nbytes = _column(BigInteger)


class Checkpoint(Base):
    """A checkpoint, whether it is still there or not (`state`: committed, deleted, purged or replaced).

    `deleted` ones are still in storage and can be restored; of `purged` and `replaced` ones only this row is left, with
    what lineage needs. A foreign one's extents lie in so many `files`, `files_nbytes` large. Digests are in the block
    `digest_block`. `document_revision` counts the changes that the document beside the checkpoint has to hold,
    `document_written` is the last that it does hold.
    """

    __tablename__ = "checkpoint"
    __table_args__ = (Index(None, "run_id", "step"), Index(None, "state", "created"))
    serial = _column(Integer, primary_key=True)
    id = _column(PlainText, unique=True)
    kind = _column(PlainText)
    state = _column(PlainText)
    run_id = _column(Integer, ForeignKey("run.id"), nullable=True)
    step = _column(BigInteger, nullable=True)
    created = _column(UtcDateTime)
    recorded = _column(UtcDateTime)
    deleted = _column(UtcDateTime, nullable=True)
    purge_after = _column(UtcDateTime, nullable=True)
    tensors = _column(Integer)
    nbytes = _column(BigInteger)
    files = _column(Integer, nullable=True)
    files_nbytes = _column(BigInteger, nullable=True)
    format_version = _column(Integer, nullable=True)
    attempt = _column(PlainText, nullable=True)
    engine = _column(PlainText, nullable=True)
    producer = _column(Json)
    topology = _column(Json)
    config_id = _column(Integer, ForeignKey("config.id"), index=True, nullable=True)
    tensor_set_id = _column(Integer, ForeignKey("tensor_set.id"), index=True)
    digest_block = _column(Integer, index=True)
    document_revision = _column(Integer)
    document_written = _column(Integer)


class Digest(Base):
    """The digest of one tensor of one checkpoint, at its position in the structure.

    No foreign keys: there are thousands of rows a checkpoint, written together with it, and removed with it by `purge`.
    """

    __tablename__ = "digest"
    __table_args__ = ({"sqlite_with_rowid": False},)
    block = _column(Integer, primary_key=True, autoincrement=False)
    digest = _column(Text().with_variant(Text(collation="C"), "postgresql"), primary_key=True)
    checkpoint = _column(Integer, primary_key=True, autoincrement=False)
    position = _column(Integer, primary_key=True, autoincrement=False)


class Location(Base):
    """Where a checkpoint lies. A url holds one checkpoint at a time; a checkpoint may lie in several places.

    `listing` is the hash of what its files were when it was read there; empty where that cannot be trusted.
    """

    __tablename__ = "location"
    id = _column(Integer, primary_key=True)
    checkpoint = _of_checkpoint()
    url = _column(PlainText, unique=True)
    seen = _column(UtcDateTime)
    listing = _column(PlainText, nullable=True)


class Metric(Base):
    """A measured number; without `value` it was not a number (NaN)."""

    __tablename__ = "metric"
    __table_args__ = (Index(None, "name", "value"),)
    checkpoint = _of_checkpoint(primary_key=True)
    name = _column(PlainText, primary_key=True)
    value = _column(Float(53), nullable=True)
    measured = _column(UtcDateTime)


class Edge(Base):
    """What a checkpoint was made from. `parent` is empty until the parent, known by id or url, is recorded itself.

    With `depends`, the child's bytes lie in the parent's files, which must then outlive it.
    """

    __tablename__ = "edge"
    __table_args__ = (Index(None, "child", "kind", "parent_url", unique=True),)
    id = _column(Integer, primary_key=True)
    child = _column(Integer, ForeignKey("checkpoint.serial", ondelete="CASCADE"))
    parent = _column(Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True)
    parent_id = _column(PlainText, index=True, nullable=True)
    parent_url = _column(PlainText, index=True)
    kind = _column(PlainText)
    depends = _column(Boolean)


class Alias(Base):
    """A name that points to one checkpoint, and can be moved; `version` grows by one with every move."""

    __tablename__ = "alias"
    name = _column(PlainText, primary_key=True)
    checkpoint = _of_checkpoint()
    version = _column(Integer)
    moved = _column(UtcDateTime)


class AliasMove(Base):
    """The history of an alias; without `target`, it was removed."""

    __tablename__ = "alias_move"
    __table_args__ = (Index(None, "name", "version", unique=True),)
    id = _column(Integer, primary_key=True)
    name = _column(PlainText)
    version = _column(Integer)
    source = _column(Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True)
    target = _column(Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True)
    moved = _column(UtcDateTime)
    who = _column(PlainText)


class Tag(Base):
    """A word on a checkpoint; several checkpoints may bear it. One that is `permanent` is not taken off."""

    __tablename__ = "tag"
    __table_args__ = (Index(None, "name"),)
    checkpoint = _of_checkpoint(primary_key=True)
    name = _column(PlainText, primary_key=True)
    created = _column(UtcDateTime)
    who = _column(PlainText)
    permanent = _column(Boolean, server_default=false())


class Untag(Base):
    """A tag that was taken off a checkpoint, and why: a document that still has it does not bring it back."""

    __tablename__ = "untag"
    checkpoint = _of_checkpoint(primary_key=True)
    name = _column(PlainText, primary_key=True)
    removed = _column(UtcDateTime)
    who = _column(PlainText)
    reason = _column(PlainText)


class Hold(Base):
    """Why a checkpoint must not be deleted, and until when (empty: until it is released)."""

    __tablename__ = "hold"
    id = _column(Integer, primary_key=True)
    checkpoint = _of_checkpoint()
    reason = _column(PlainText)
    until = _column(UtcDateTime, nullable=True)
    created = _column(UtcDateTime)
    who = _column(PlainText)
    released = _column(UtcDateTime, nullable=True)


class Note(Base):
    """What somebody wrote about a checkpoint."""

    __tablename__ = "note"
    id = _column(Integer, primary_key=True)
    checkpoint = _of_checkpoint()
    text = _column(PlainText)
    created = _column(UtcDateTime)
    who = _column(PlainText)


class Verification(Base):
    """What `verify` found; `problems` are the first of them, as text."""

    __tablename__ = "verification"
    id = _column(Integer, primary_key=True)
    checkpoint = _of_checkpoint()
    url = _column(PlainText)
    at = _column(UtcDateTime)
    ok = _column(Boolean)
    bytes_verified = _column(BigInteger)
    bytes_unverified = _column(BigInteger)
    problems = _column(Json)
    tool = _column(PlainText)


class Event(Base):
    """Who did what, when: only ever appended."""

    __tablename__ = "event"
    id = _column(Integer, primary_key=True)
    at = _column(UtcDateTime)
    who = _column(PlainText)
    action = _column(PlainText)
    checkpoint = _column(Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True)
    detail = _column(Json)
