"""The tables of the catalog (docs/catalog.md, "Tables").

Other tables refer to `checkpoint.serial`; manifests and users refer to `checkpoint.id`. The names,
dtypes, shapes and grids of a checkpoint's tensors are a *tensor set*, stored once for all
checkpoints with that structure; only the digests of tensors are rows of each checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Computed,
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

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.engine import Dialect
    from sqlalchemy.types import TypeEngine


# Column types that work the same on both databases, and the base class of the tables.


def storable_json(value: Any) -> Any:
    """Make a JSON value storable in both databases.

    Returns:
        A copy in which non-finite numbers are `{"$float": "nan"}` and text has passed
        `storable_text`.
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
    return (
        text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")
    )


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
        return dialect.type_descriptor(
            Text(collation="C") if dialect.name == "postgresql" else Text()
        )

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

    A subclass is a table: its columns are attributes, and wherever SQLAlchemy takes a table it
    takes the class. The ORM is not used: importing it takes longer than most commands.
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
        cls.__table__ = Table(
            cls.__tablename__, Base.metadata, *columns.values(), *items, **options
        )

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
    """A metric as it is stored: None for NaN, which SQLite does not have."""
    return None if math.isnan(value) else float(value)


def canonical_hash(value: Any) -> str:
    """The SHA-256 of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


#: The approximate number of digests in a block. Consecutive insertions touch few pages, and a
#: search looks into each block once: on SQLite, inserting 10,000 digests takes 10 ms instead of 45
#: ms under one index over all.
BLOCK = 32_768


def _document_url() -> ColumnElement[str]:
    """The place of the document that the row is from; NULL if it was recorded here, or the document was trusted."""
    return column(PlainText, nullable=True)


def _of_checkpoint(*, primary_key: bool = False) -> ColumnElement[int]:
    """A reference to a checkpoint; the rows are deleted with it."""
    key = ForeignKey("checkpoint.serial", ondelete="CASCADE")
    return column(Integer, key, primary_key=primary_key, index=not primary_key)


class Identity(Base):
    """The identity of this catalog: one row."""

    __tablename__ = "catalog"
    id = column(PlainText, primary_key=True)
    created = column(UtcDateTime)


class RunRow(Base):
    """A training run, such as `run7` in the reference `run7@1000`."""

    __tablename__ = "run"
    id = column(Integer, primary_key=True)
    name = column(PlainText, unique=True)
    created = column(UtcDateTime)


class Launch(Base):
    """A launch of a training, by its id, or a folder of checkpoints that record none, with a slash at its end.

    `family` is the same for launches that continue each other.
    """

    __tablename__ = "launch"
    id = column(Integer, primary_key=True)
    name = column(PlainText, unique=True)
    family = column(Integer, index=True, nullable=True)


class Continuation(Base):
    """A launch that a launch continues, up to a position: a count of commits, or a step in a folder."""

    __tablename__ = "continuation"
    launch = column(Integer, ForeignKey("launch.id", ondelete="CASCADE"), primary_key=True)
    continued = column(
        Integer, ForeignKey("launch.id", ondelete="CASCADE"), primary_key=True, index=True
    )
    position = column(BigInteger)


class Config(Base):
    """A configuration, stored once for all checkpoints that have it; `hash` is the hash of its canonical JSON."""

    __tablename__ = "config"
    id = column(Integer, primary_key=True)
    hash = column(PlainText, unique=True)
    document = column(Json)


class TensorSet(Base):
    """The structure of a checkpoint: names, states, dtypes, shapes and grids; `hash` is the hash of all of them."""

    __tablename__ = "tensor_set"
    id = column(Integer, primary_key=True)
    hash = column(PlainText, unique=True)


class TensorRow(Base):
    """One tensor of a structure. `shape`, `chunk` and `shard` are text such as `4096,1024`, empty for a scalar."""

    __tablename__ = "tensor"
    __table_args__ = (Index(None, "name", "state"), {"sqlite_with_rowid": False})
    tensor_set_id = column(
        Integer, ForeignKey("tensor_set.id", ondelete="CASCADE"), primary_key=True
    )
    position = column(Integer, primary_key=True)
    name = column(PlainText)
    state = column(PlainText)
    dtype = column(PlainText)
    shape = column(PlainText)
    chunk = column(PlainText, nullable=True)
    shard = column(PlainText, nullable=True)
    nbytes = column(BigInteger)


#: States of checkpoints that were deleted and are still in storage, of `thinned` ones only what others need; and of
#: all that are in storage.
REMOVED = ("deleted", "thinned", "purging")
LIVE = ("committed", *REMOVED)


class CheckpointRow(Base):
    """A checkpoint, whether it still exists or not (`state`: committed, deleted, thinned, purging, purged or replaced).

    `deleted` checkpoints are still in storage and can be restored; of `purged` and `replaced` ones
    only this row and the lineage are left. `deleted_clocks` are the times of other clocks than the
    host's at the deletion. `files` and `files_nbytes` are the number and bytes of a foreign
    checkpoint's files. Digests are in the block `digest_block`. `document_revision` is the revision
    that the document beside the checkpoint should have, `document_written` the one that it has,
    `document_due` the difference. `content` is the hash from `manifest_content`, by which another
    checkpoint with the same id is recognised; NULL for foreign ones.
    """

    __tablename__ = "checkpoint"
    __table_args__ = (
        Index(None, "run_id", "step"),
        Index(None, "run_id", "commits"),
        Index(None, "state", "created"),
        # all that a table of runs needs: a million rows of the index are 60 MB, of the table 700
        Index(None, "run_id", "state", "created", "step", "nbytes", "files_nbytes"),
    )
    serial = column(Integer, primary_key=True)
    id = column(PlainText, unique=True)
    kind = column(PlainText)
    state = column(PlainText)
    run_id = column(Integer, ForeignKey("run.id"), nullable=True)
    launch_id = column(Integer, ForeignKey("launch.id"), index=True, nullable=True)
    step = column(BigInteger, nullable=True)
    commits = column(BigInteger, nullable=True)
    created = column(UtcDateTime)
    recorded = column(UtcDateTime)
    deleted = column(UtcDateTime, nullable=True)
    purge_after = column(UtcDateTime, nullable=True)
    deleted_clocks = column(Json, nullable=True)
    tensors = column(Integer)
    nbytes = column(BigInteger)
    files = column(Integer, nullable=True)
    files_nbytes = column(BigInteger, nullable=True)
    format_version = column(Integer, nullable=True)
    content = column(PlainText, nullable=True)
    attempt = column(PlainText, nullable=True)
    engine = column(PlainText, nullable=True)
    producer = column(Json)
    topology = column(Json)
    config_id = column(Integer, ForeignKey("config.id"), index=True, nullable=True)
    tensor_set_id = column(Integer, ForeignKey("tensor_set.id"), index=True)
    digest_block = column(Integer, index=True)
    document_revision = column(Integer)
    document_written = column(Integer)
    document_due = column(
        Integer, Computed("document_revision - document_written", persisted=True), index=True
    )


class Digest(Base):
    """The digest of one tensor of one checkpoint, at its position in the structure.

    There are no foreign keys, for speed: a checkpoint has thousands of rows, written with it and
    removed when purged.
    """

    __tablename__ = "digest"
    __table_args__ = ({"sqlite_with_rowid": False},)
    block = column(Integer, primary_key=True, autoincrement=False)
    digest = column(Text().with_variant(Text(collation="C"), "postgresql"), primary_key=True)
    checkpoint = column(Integer, primary_key=True, autoincrement=False)
    position = column(Integer, primary_key=True, autoincrement=False)


class Location(Base):
    """A place of a checkpoint. A url holds one checkpoint at a time; a checkpoint may have several places.

    `listing` is the hash of its file listing when it was read there; NULL if that cannot be
    trusted. `deleted` and `purge_after` are from the document there: once they are set for every
    place, the checkpoint is deleted. A place that was found after the checkpoint was deleted is
    `spared`, since the deletion did not include it.
    """

    __tablename__ = "location"
    id = column(Integer, primary_key=True)
    checkpoint = _of_checkpoint()
    url = column(PlainText, unique=True)
    seen = column(UtcDateTime)
    listing = column(PlainText, nullable=True)
    deleted = column(UtcDateTime, nullable=True)
    purge_after = column(UtcDateTime, nullable=True)
    spared = column(Boolean, server_default=false())


class Form(Base):
    """The digest of a manifest that a checkpoint has had. A manifest at another place must have one of them."""

    __tablename__ = "form"
    checkpoint = _of_checkpoint(primary_key=True)
    manifest = column(PlainText, primary_key=True)


class Metric(Base):
    """A metric; NULL as `value` is NaN."""

    __tablename__ = "metric"
    __table_args__ = (Index(None, "name", "value"),)
    checkpoint = _of_checkpoint(primary_key=True)
    name = column(PlainText, primary_key=True)
    value = column(Float(53), nullable=True)
    measured = column(UtcDateTime)
    document_url = _document_url()


class Edge(Base):
    """An edge of the lineage. `parent` is NULL until the parent, known by id or url, is recorded itself.

    With `depends`, the child needs the parent's files, which must then be kept. `how` tells more of
    how it was made.
    """

    __tablename__ = "edge"
    __table_args__ = (Index(None, "child", "kind", "parent_url", unique=True),)
    id = column(Integer, primary_key=True)
    child = column(Integer, ForeignKey("checkpoint.serial", ondelete="CASCADE"))
    parent = column(
        Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True
    )
    parent_id = column(PlainText, index=True, nullable=True)
    parent_url = column(PlainText, index=True)
    kind = column(PlainText)
    depends = column(Boolean, index=True)
    how = column(Json, nullable=True)


class AliasRow(Base):
    """A name that points to one checkpoint, and can be moved; every move adds one to `version`."""

    __tablename__ = "alias"
    name = column(PlainText, primary_key=True)
    checkpoint = _of_checkpoint()
    version = column(Integer)
    moved = column(UtcDateTime)
    document_url = _document_url()


class AliasClaim(Base):
    """An alias in the document at a place that points elsewhere in this catalog; it protects the checkpoint."""

    __tablename__ = "alias_claim"
    checkpoint = _of_checkpoint(primary_key=True)
    name = column(PlainText, primary_key=True)
    document_url = column(PlainText, primary_key=True)
    version = column(Integer)
    moved = column(UtcDateTime)


class AliasMove(Base):
    """A move of an alias; NULL as `target` is its removal."""

    __tablename__ = "alias_move"
    __table_args__ = (Index(None, "name", "version", unique=True),)
    id = column(Integer, primary_key=True)
    name = column(PlainText)
    version = column(Integer)
    source = column(
        Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True
    )
    target = column(
        Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True
    )
    moved = column(UtcDateTime)
    who = column(PlainText)


class Tag(Base):
    """A tag of a checkpoint; several may have it. A `permanent` one cannot be removed."""

    __tablename__ = "tag"
    __table_args__ = (Index(None, "name"),)
    checkpoint = _of_checkpoint(primary_key=True)
    name = column(PlainText, primary_key=True)
    created = column(UtcDateTime)
    who = column(PlainText)
    permanent = column(Boolean, server_default=false())
    document_url = _document_url()


class Untag(Base):
    """The removal of a tag, so that a document that still has the tag does not add it again."""

    __tablename__ = "untag"
    checkpoint = _of_checkpoint(primary_key=True)
    name = column(PlainText, primary_key=True)
    removed = column(UtcDateTime)
    who = column(PlainText)
    reason = column(PlainText)
    document_url = _document_url()


class Hold(Base):
    """A hold: why a checkpoint must not be deleted, and until when (NULL: until it is released)."""

    __tablename__ = "hold"
    id = column(Integer, primary_key=True)
    checkpoint = _of_checkpoint()
    reason = column(PlainText)
    until = column(UtcDateTime, nullable=True)
    created = column(UtcDateTime)
    who = column(PlainText)
    released = column(UtcDateTime, nullable=True)
    document_url = _document_url()


class Note(Base):
    """A note on a checkpoint."""

    __tablename__ = "note"
    id = column(Integer, primary_key=True)
    checkpoint = _of_checkpoint()
    text = column(PlainText)
    created = column(UtcDateTime)
    who = column(PlainText)
    document_url = _document_url()


class Verification(Base):
    """A result of `verify`; `problems` has the first 100, as text."""

    __tablename__ = "verification"
    id = column(Integer, primary_key=True)
    checkpoint = _of_checkpoint()
    url = column(PlainText)
    at = column(UtcDateTime)
    ok = column(Boolean)
    bytes_verified = column(BigInteger)
    bytes_unverified = column(BigInteger)
    problems = column(Json)
    tool = column(PlainText)


class CertificateRow(Base):
    """What `ucformat.torch.certify` told of the state of a training; `document` is the certificate."""

    __tablename__ = "certificate"
    id = column(Integer, primary_key=True)
    checkpoint = _of_checkpoint()
    url = column(PlainText)
    at = column(UtcDateTime)
    ok = column(Boolean)
    document = column(Json)


class Event(Base):
    """An event of the audit log, which is only appended to."""

    __tablename__ = "event"
    id = column(Integer, primary_key=True)
    at = column(UtcDateTime)
    who = column(PlainText)
    action = column(PlainText)
    checkpoint = column(
        Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True
    )
    detail = column(Json)
