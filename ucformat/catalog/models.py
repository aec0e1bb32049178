"""The tables of the catalog (docs/catalog.md, "Tables").

`checkpoint.serial` is the number that other tables refer to, `checkpoint.id` the id that manifests and people use. What
a checkpoint's tensors are called and how they are cut is a *tensor set*, stored once for all checkpoints of that
structure; only their digests are rows of each checkpoint.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Text,
    TypeDecorator,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ucformat.catalog.plain import plain

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect

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
    "Verification",
]

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


class Base(DeclarativeBase):
    """What all tables share: names of constraints that migrations can rely on, and column types."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: PlainText,
        int: Integer,
        float: Float(53),
        bool: Boolean,
        datetime: UtcDateTime,
        dict[str, Any]: JSON().with_variant(JSONB(), "postgresql"),
        list[Any]: JSON().with_variant(JSONB(), "postgresql"),
    }


def _of_checkpoint(*, primary_key: bool = False) -> Mapped[int]:
    """A reference to a checkpoint; rows go with it."""
    return mapped_column(
        ForeignKey("checkpoint.serial", ondelete="CASCADE"), primary_key=primary_key, index=not primary_key
    )


class Identity(Base):
    """Which catalog this is: one row."""

    __tablename__ = "catalog"
    id: Mapped[str] = mapped_column(primary_key=True)
    created: Mapped[datetime]


class Run(Base):
    """A training run: what `run7@1000` begins with."""

    __tablename__ = "run"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created: Mapped[datetime]


class Config(Base):
    """A configuration, stored once for all checkpoints that have it; `hash` is that of its canonical JSON."""

    __tablename__ = "config"
    id: Mapped[int] = mapped_column(primary_key=True)
    hash: Mapped[str] = mapped_column(unique=True)
    document: Mapped[dict[str, Any]]


class TensorSet(Base):
    """The structure of a checkpoint: names, states, dtypes, shapes and grids; `hash` is that of all of them."""

    __tablename__ = "tensor_set"
    id: Mapped[int] = mapped_column(primary_key=True)
    hash: Mapped[str] = mapped_column(unique=True)


class Tensor(Base):
    """One tensor of a structure. `shape`, `chunk` and `shard` are written `4096,1024`; of a scalar they are empty."""

    __tablename__ = "tensor"
    __table_args__ = (Index(None, "name", "state"), {"sqlite_with_rowid": False})
    tensor_set_id: Mapped[int] = mapped_column(ForeignKey("tensor_set.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    state: Mapped[str]
    dtype: Mapped[str]
    shape: Mapped[str]
    chunk: Mapped[str | None]
    shard: Mapped[str | None]
    nbytes: Mapped[int] = mapped_column(BigInteger)


class Checkpoint(Base):
    """A checkpoint, whether it is still there or not (`state`: committed, deleted, purged or replaced).

    `deleted` ones are still in storage and can be restored; of `purged` and `replaced` ones only this row is left, with
    what lineage needs. A foreign one's extents lie in so many `files`, `files_nbytes` large. Digests are in the block
    `digest_block`. `document_revision` counts the changes that the document beside the checkpoint has to hold,
    `document_written` is the last that it does hold.
    """

    __tablename__ = "checkpoint"
    __table_args__ = (Index(None, "run_id", "step"), Index(None, "state", "created"))
    serial: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    state: Mapped[str]
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"))
    step: Mapped[int | None] = mapped_column(BigInteger)
    created: Mapped[datetime]
    recorded: Mapped[datetime]
    deleted: Mapped[datetime | None]
    purge_after: Mapped[datetime | None]
    tensors: Mapped[int]
    nbytes: Mapped[int] = mapped_column(BigInteger)
    files: Mapped[int | None]
    files_nbytes: Mapped[int | None] = mapped_column(BigInteger)
    format_version: Mapped[int | None]
    attempt: Mapped[str | None]
    engine: Mapped[str | None]
    producer: Mapped[dict[str, Any]]
    topology: Mapped[dict[str, Any]]
    config_id: Mapped[int | None] = mapped_column(ForeignKey("config.id"), index=True)
    tensor_set_id: Mapped[int] = mapped_column(ForeignKey("tensor_set.id"), index=True)
    digest_block: Mapped[int] = mapped_column(index=True)
    document_revision: Mapped[int]
    document_written: Mapped[int]


class Digest(Base):
    """The digest of one tensor of one checkpoint, at its position in the structure.

    No foreign keys: there are thousands of rows a checkpoint, written together with it, and removed with it by `purge`.
    """

    __tablename__ = "digest"
    __table_args__ = ({"sqlite_with_rowid": False},)
    block: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(Text().with_variant(Text(collation="C"), "postgresql"), primary_key=True)
    checkpoint: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Location(Base):
    """Where a checkpoint lies. A url holds one checkpoint at a time; a checkpoint may lie in several places."""

    __tablename__ = "location"
    id: Mapped[int] = mapped_column(primary_key=True)
    checkpoint: Mapped[int] = _of_checkpoint()
    url: Mapped[str] = mapped_column(unique=True)
    seen: Mapped[datetime]


class Metric(Base):
    """A measured number; without `value` it was not a number (NaN)."""

    __tablename__ = "metric"
    __table_args__ = (Index(None, "name", "value"),)
    checkpoint: Mapped[int] = _of_checkpoint(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    measured: Mapped[datetime]


class Edge(Base):
    """What a checkpoint was made from. `parent` is empty until the parent, known by id or url, is recorded itself.

    With `depends`, the child's bytes lie in the parent's files, which must then outlive it.
    """

    __tablename__ = "edge"
    __table_args__ = (Index(None, "child", "kind", "parent_url", unique=True),)
    id: Mapped[int] = mapped_column(primary_key=True)
    child: Mapped[int] = mapped_column(ForeignKey("checkpoint.serial", ondelete="CASCADE"))
    parent: Mapped[int | None] = mapped_column(ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True)
    parent_id: Mapped[str | None] = mapped_column(index=True)
    parent_url: Mapped[str] = mapped_column(index=True)
    kind: Mapped[str]
    depends: Mapped[bool]


class Alias(Base):
    """A name that points to one checkpoint, and can be moved; `version` grows by one with every move."""

    __tablename__ = "alias"
    name: Mapped[str] = mapped_column(primary_key=True)
    checkpoint: Mapped[int] = _of_checkpoint()
    version: Mapped[int]
    moved: Mapped[datetime]


class AliasMove(Base):
    """The history of an alias; without `target`, it was removed."""

    __tablename__ = "alias_move"
    __table_args__ = (Index(None, "name", "version", unique=True),)
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    version: Mapped[int]
    source: Mapped[int | None] = mapped_column(ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True)
    target: Mapped[int | None] = mapped_column(ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True)
    moved: Mapped[datetime]
    who: Mapped[str]


class Tag(Base):
    """A word on a checkpoint, for ever; several checkpoints may bear it."""

    __tablename__ = "tag"
    __table_args__ = (Index(None, "name"),)
    checkpoint: Mapped[int] = _of_checkpoint(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    created: Mapped[datetime]
    who: Mapped[str]


class Hold(Base):
    """Why a checkpoint must not be deleted, and until when (empty: until it is released)."""

    __tablename__ = "hold"
    id: Mapped[int] = mapped_column(primary_key=True)
    checkpoint: Mapped[int] = _of_checkpoint()
    reason: Mapped[str]
    until: Mapped[datetime | None]
    created: Mapped[datetime]
    who: Mapped[str]
    released: Mapped[datetime | None]


class Note(Base):
    """What somebody wrote about a checkpoint."""

    __tablename__ = "note"
    id: Mapped[int] = mapped_column(primary_key=True)
    checkpoint: Mapped[int] = _of_checkpoint()
    text: Mapped[str]
    created: Mapped[datetime]
    who: Mapped[str]


class Verification(Base):
    """What `verify` found; `problems` are the first of them, as text."""

    __tablename__ = "verification"
    id: Mapped[int] = mapped_column(primary_key=True)
    checkpoint: Mapped[int] = _of_checkpoint()
    url: Mapped[str]
    at: Mapped[datetime]
    ok: Mapped[bool]
    bytes_verified: Mapped[int] = mapped_column(BigInteger)
    bytes_unverified: Mapped[int] = mapped_column(BigInteger)
    problems: Mapped[list[Any]]
    tool: Mapped[str]


class Event(Base):
    """Who did what, when: only ever appended."""

    __tablename__ = "event"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    who: Mapped[str]
    action: Mapped[str]
    checkpoint: Mapped[int | None] = mapped_column(ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True)
    detail: Mapped[dict[str, Any]]
