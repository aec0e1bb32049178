"""Where the values of a key are stored, and how a condition on them becomes one on checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, not_, or_, select

from ucformat.catalog.models import (
    Alias,
    Checkpoint,
    Config,
    Digest,
    Hold,
    Location,
    Metric,
    Note,
    Run,
    Tag,
    Tensor,
    Verification,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import ColumnElement

    from ucformat.catalog.filter.keys import Target

    Lift = Callable[[ColumnElement[bool]], ColumnElement[bool]]

__all__ = ["Source", "document_of", "holding", "source_of"]


@dataclass(frozen=True)
class Source:
    """A column, and `lift`, which makes of a condition on it that a checkpoint has such a value: true or false."""

    column: Any
    lift: Lift


_COLUMNS: dict[str, Any] = {
    "id": Checkpoint.id,
    "kind": Checkpoint.kind,
    "state": Checkpoint.state,
    "step": Checkpoint.step,
    "created": Checkpoint.created,
    "recorded": Checkpoint.recorded,
    "deleted": Checkpoint.deleted,
    "age": Checkpoint.created,
    "size": Checkpoint.nbytes,
    "tensors": Checkpoint.tensors,
    "format_version": Checkpoint.format_version,
    "engine": Checkpoint.engine,
}
_MANY: dict[str, tuple[Any, Any]] = {
    "tag": (Tag.name, Tag.checkpoint),
    "alias": (Alias.name, Alias.checkpoint),
    "url": (Location.url, Location.checkpoint),
    "note": (Note.text, Note.checkpoint),
}
_TENSOR: dict[str, Any] = {
    "name": Tensor.name,
    "state": Tensor.state,
    "dtype": Tensor.dtype,
    "shape": Tensor.shape,
    "size": Tensor.nbytes,
}


def source_of(target: Target) -> Source:
    """Where the values of a key are; not of `hold`, nor of what lies in a document."""
    match target.root:
        case "run":
            return Source(
                Run.name, lambda c: _and_there(Checkpoint.run_id, Checkpoint.run_id.in_(select(Run.id).where(c)))
            )
        case "metric":
            named = Metric.name == target.path[0]
            return Source(Metric.value, lambda c: Checkpoint.serial.in_(select(Metric.checkpoint).where(named, c)))
        case "verified":
            return Source(Verification.ok, _last_verified)
        case "tensor" if target.path == ("digest",):
            return Source(Digest.digest, _with_digest)
        case "tensor":
            column = _TENSOR[target.path[0]]
            return Source(column, lambda c: Checkpoint.tensor_set_id.in_(select(Tensor.tensor_set_id).where(c)))
        case root if root in _MANY:
            column, owner = _MANY[root]
            return Source(column, lambda c: Checkpoint.serial.in_(select(owner).where(c)))
        case root:
            column = _COLUMNS[root]
            return Source(column, lambda c: _and_there(column, c))


def document_of(root: str) -> Source:
    """The document that a key of this root leads into."""
    if root == "config":
        found = Checkpoint.config_id
        return Source(Config.document, lambda c: _and_there(found, found.in_(select(Config.id).where(c))))
    return Source(Checkpoint.topology if root == "topology" else Checkpoint.producer, lambda c: c)


def holding(now: datetime) -> ColumnElement[bool]:
    """Whether a checkpoint has a hold that is neither released nor past."""
    active = Hold.released.is_(None), or_(Hold.until.is_(None), Hold.until > now)
    return Checkpoint.serial.in_(select(Hold.checkpoint).where(*active))


def _and_there(column: Any, condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """False, and not NULL, where the column is empty."""
    return and_(column.is_not(None), condition)


def _last_verified(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    later = Verification.__table__.alias().c
    after = or_(later.at > Verification.at, and_(later.at == Verification.at, later.id > Verification.id))
    superseded = select(later.id).where(later.checkpoint == Verification.checkpoint, after).exists()
    return Checkpoint.serial.in_(select(Verification.checkpoint).where(condition, not_(superseded)))


def _with_digest(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """By one look into each block, where the condition names the digest."""
    blocks = select(Checkpoint.__table__.alias().c.digest_block)
    return Checkpoint.serial.in_(select(Digest.checkpoint).where(Digest.block.in_(blocks), condition))
