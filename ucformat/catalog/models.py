"""The tables of the catalog (docs/catalog.md, "Tables").

`checkpoint.serial` is the number that other tables refer to, `checkpoint.id` the id that manifests and people use. What
a checkpoint's tensors are called and how they are cut is a *tensor set*, stored once for all checkpoints of that
structure; only their digests are rows of each checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Boolean, Float, ForeignKey, Index, Integer, Text, false

from ucformat.catalog.columns import Base, Json, PlainText, UtcDateTime, column

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

__all__ = [
    "BLOCK",
    "Alias",
    "AliasClaim",
    "AliasMove",
    "Base",
    "Checkpoint",
    "Config",
    "Digest",
    "Edge",
    "Event",
    "Form",
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

#: About so many digests share a block: what is inserted in turn stays on few pages, and a search looks into each block
#: once. Measured on SQLite with 10,000 digests a checkpoint: 45 ms to insert them under one index over all, 10 ms so.
BLOCK = 32_768


def _document_url() -> ColumnElement[str]:
    """The place whose document said it; empty where it was said to this catalog, or its documents were trusted."""
    return column(PlainText, nullable=True)


def _of_checkpoint(*, primary_key: bool = False) -> ColumnElement[int]:
    """A reference to a checkpoint; rows go with it."""
    key = ForeignKey("checkpoint.serial", ondelete="CASCADE")
    return column(Integer, key, primary_key=primary_key, index=not primary_key)


class Identity(Base):
    """Which catalog this is: one row."""

    __tablename__ = "catalog"
    id = column(PlainText, primary_key=True)
    created = column(UtcDateTime)


class Run(Base):
    """A training run: what `run7@1000` begins with."""

    __tablename__ = "run"
    id = column(Integer, primary_key=True)
    name = column(PlainText, unique=True)
    created = column(UtcDateTime)


class Config(Base):
    """A configuration, stored once for all checkpoints that have it; `hash` is that of its canonical JSON."""

    __tablename__ = "config"
    id = column(Integer, primary_key=True)
    hash = column(PlainText, unique=True)
    document = column(Json)


class TensorSet(Base):
    """The structure of a checkpoint: names, states, dtypes, shapes and grids; `hash` is that of all of them."""

    __tablename__ = "tensor_set"
    id = column(Integer, primary_key=True)
    hash = column(PlainText, unique=True)


class Tensor(Base):
    """One tensor of a structure. `shape`, `chunk` and `shard` are written `4096,1024`; of a scalar they are empty."""

    __tablename__ = "tensor"
    __table_args__ = (Index(None, "name", "state"), {"sqlite_with_rowid": False})
    tensor_set_id = column(Integer, ForeignKey("tensor_set.id", ondelete="CASCADE"), primary_key=True)
    position = column(Integer, primary_key=True)
    name = column(PlainText)
    state = column(PlainText)
    dtype = column(PlainText)
    shape = column(PlainText)
    chunk = column(PlainText, nullable=True)
    shard = column(PlainText, nullable=True)
    nbytes = column(BigInteger)


class Checkpoint(Base):
    """A checkpoint, whether it is still there or not (`state`: committed, deleted, purged or replaced).

    `deleted` ones are still in storage and can be restored; of `purged` and `replaced` ones only this row is left, with
    what lineage needs. `deleted_clocks` are what other clocks than the host's showed at the deletion. A foreign one's
    extents lie in so many `files`, `files_nbytes` large. Digests are in the block
    `digest_block`. `document_revision` counts the changes that the document beside the checkpoint has to hold,
    `document_written` is the last that it does hold. `content` is the hash of what every form of it says (see
    `manifest_content`), by which another checkpoint of the same id is told apart; empty of foreign ones.
    """

    __tablename__ = "checkpoint"
    __table_args__ = (Index(None, "run_id", "step"), Index(None, "state", "created"))
    serial = column(Integer, primary_key=True)
    id = column(PlainText, unique=True)
    kind = column(PlainText)
    state = column(PlainText)
    run_id = column(Integer, ForeignKey("run.id"), nullable=True)
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


class Digest(Base):
    """The digest of one tensor of one checkpoint, at its position in the structure.

    No foreign keys: there are thousands of rows a checkpoint, written together with it, and removed with it by `purge`.
    """

    __tablename__ = "digest"
    __table_args__ = ({"sqlite_with_rowid": False},)
    block = column(Integer, primary_key=True, autoincrement=False)
    digest = column(Text().with_variant(Text(collation="C"), "postgresql"), primary_key=True)
    checkpoint = column(Integer, primary_key=True, autoincrement=False)
    position = column(Integer, primary_key=True, autoincrement=False)


class Location(Base):
    """Where a checkpoint lies. A url holds one checkpoint at a time; a checkpoint may lie in several places.

    `listing` is the hash of what its files were when it was read there; empty where that cannot be trusted. `deleted`
    and `purge_after` are what the document there says: it is deleted as a whole when that is said of every place. One
    that came to light after the checkpoint was deleted is `spared`: nobody meant it.
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
    """The digest of a manifest that a checkpoint has had: what lies in a further place must have one of them."""

    __tablename__ = "form"
    checkpoint = _of_checkpoint(primary_key=True)
    manifest = column(PlainText, primary_key=True)


class Metric(Base):
    """A measured number; without `value` it was not a number (NaN)."""

    __tablename__ = "metric"
    __table_args__ = (Index(None, "name", "value"),)
    checkpoint = _of_checkpoint(primary_key=True)
    name = column(PlainText, primary_key=True)
    value = column(Float(53), nullable=True)
    measured = column(UtcDateTime)
    document_url = _document_url()


class Edge(Base):
    """What a checkpoint was made from. `parent` is empty until the parent, known by id or url, is recorded itself.

    With `depends`, the child's bytes lie in the parent's files, which must then outlive it.
    """

    __tablename__ = "edge"
    __table_args__ = (Index(None, "child", "kind", "parent_url", unique=True),)
    id = column(Integer, primary_key=True)
    child = column(Integer, ForeignKey("checkpoint.serial", ondelete="CASCADE"))
    parent = column(Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True)
    parent_id = column(PlainText, index=True, nullable=True)
    parent_url = column(PlainText, index=True)
    kind = column(PlainText)
    depends = column(Boolean)


class Alias(Base):
    """A name that points to one checkpoint, and can be moved; `version` grows by one with every move."""

    __tablename__ = "alias"
    name = column(PlainText, primary_key=True)
    checkpoint = _of_checkpoint()
    version = column(Integer)
    moved = column(UtcDateTime)
    document_url = _document_url()


class AliasClaim(Base):
    """A name that the document at a place gives the checkpoint, and that points elsewhere here: it protects it."""

    __tablename__ = "alias_claim"
    checkpoint = _of_checkpoint(primary_key=True)
    name = column(PlainText, primary_key=True)
    document_url = column(PlainText, primary_key=True)
    version = column(Integer)
    moved = column(UtcDateTime)


class AliasMove(Base):
    """The history of an alias; without `target`, it was removed."""

    __tablename__ = "alias_move"
    __table_args__ = (Index(None, "name", "version", unique=True),)
    id = column(Integer, primary_key=True)
    name = column(PlainText)
    version = column(Integer)
    source = column(Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True)
    target = column(Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True)
    moved = column(UtcDateTime)
    who = column(PlainText)


class Tag(Base):
    """A word on a checkpoint; several checkpoints may bear it. One that is `permanent` is not taken off."""

    __tablename__ = "tag"
    __table_args__ = (Index(None, "name"),)
    checkpoint = _of_checkpoint(primary_key=True)
    name = column(PlainText, primary_key=True)
    created = column(UtcDateTime)
    who = column(PlainText)
    permanent = column(Boolean, server_default=false())
    document_url = _document_url()


class Untag(Base):
    """A tag that was taken off a checkpoint, and why: a document that still has it does not bring it back."""

    __tablename__ = "untag"
    checkpoint = _of_checkpoint(primary_key=True)
    name = column(PlainText, primary_key=True)
    removed = column(UtcDateTime)
    who = column(PlainText)
    reason = column(PlainText)
    document_url = _document_url()


class Hold(Base):
    """Why a checkpoint must not be deleted, and until when (empty: until it is released)."""

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
    """What somebody wrote about a checkpoint."""

    __tablename__ = "note"
    id = column(Integer, primary_key=True)
    checkpoint = _of_checkpoint()
    text = column(PlainText)
    created = column(UtcDateTime)
    who = column(PlainText)
    document_url = _document_url()


class Verification(Base):
    """What `verify` found; `problems` are the first of them, as text."""

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


class Event(Base):
    """Who did what, when: only ever appended."""

    __tablename__ = "event"
    id = column(Integer, primary_key=True)
    at = column(UtcDateTime)
    who = column(PlainText)
    action = column(PlainText)
    checkpoint = column(Integer, ForeignKey("checkpoint.serial", ondelete="SET NULL"), index=True, nullable=True)
    detail = column(Json)
