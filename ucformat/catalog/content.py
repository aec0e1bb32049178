"""The tensors of checkpoints: their structure, stored once for all checkpoints that share it, and their digests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.models import (
    BLOCK,
    CheckpointRow,
    Digest,
    Form,
    Location,
    TensorRow,
    TensorSet,
    storable_text,
)
from ucformat.catalog.rows import all_blocks, insert_if_absent, insert_rows, serial_of
from ucformat.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sqlalchemy import ColumnElement, Connection

    from ucformat.schema.manifest import Manifest
    from ucformat.schema.tensors import KindDoc, TensorTable

_COLUMNS = (
    "tensor_set_id",
    "position",
    "name",
    "state",
    "dtype",
    "shape",
    "chunk",
    "shard",
    "nbytes",
)
_STORED = attrgetter("state", "dtype", "shape", "chunk", "shard", "nbytes")
_LOGICAL = attrgetter("state", "dtype", "shape")
#: Fields of a manifest that `materialize` changes, besides the tensors; all others are independent
#: of the form.
_FORM = {
    "attempt",
    "grid",
    "producer",
    "objects",
    "per_rank",
    "assets",
    "minor",
    "requires",
    "bases",
    "sidecar",
    "verified",
    "writers",
    "digest",
}


def tensor_sets(connection: Connection, tables: Sequence[TensorTable]) -> list[int]:
    """Get or create the tensor sets of structures."""
    structures = [_structure_hash(tensors) for tensors in tables]
    ids: dict[str, int] = {}
    for structure, tensors in sorted(
        dict(zip(structures, tables, strict=True)).items(), key=itemgetter(0)
    ):
        existing = connection.scalar(sa.select(TensorSet.id).where(TensorSet.hash == structure))
        ids[structure] = (
            _insert_set(connection, structure, tensors) if existing is None else existing
        )
    return [ids[structure] for structure in structures]


def _insert_set(connection: Connection, structure: str, tensors: TensorTable) -> int:
    tensor_set = insert_if_absent(connection, TensorSet, {"hash": structure}, {}, TensorSet.id)
    if tensor_set is None:  # inserted concurrently
        return connection.execute(
            sa.select(TensorSet.id).where(TensorSet.hash == structure)
        ).scalar_one()
    rows = [
        (
            tensor_set,
            i,
            storable_text(t.name),
            storable_text(t.state),
            storable_text(t.dtype),
            _joined(t.shape),
            _joined(t.chunk),
            _joined(t.shard),
            t.nbytes,
        )
        for i, t in enumerate(tensors)
    ]
    insert_rows(connection, "tensor", _COLUMNS, rows)
    return tensor_set


def manifest_content(manifest: Manifest) -> str | None:
    """The SHA-256 of everything in a manifest that does not depend on the form of the checkpoint.

    Fields with their defaults are left out, so that later versions with more fields compute the
    same hash.

    Returns:
        The hash in hexadecimal; None if no file can hold the manifest because its text is not
        Unicode.
    """
    try:
        read = manifest.model_copy(update={"tensors": manifest.tensors.of(())}).as_read()
    except ValueError:
        return None
    return _sha256(
        [
            read.model_dump_json(exclude={*_FORM, "tensors"}, exclude_defaults=True),
            _columns(manifest.tensors, _LOGICAL),
        ]
    )


def _sha256(texts: Sequence[str]) -> str:
    return hashlib.sha256("\1".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def _structure_hash(tensors: TensorTable) -> str:
    """The SHA-256 of the names, states, dtypes, shapes and grids of tensors, which all steps of a run share."""
    return _sha256([_columns(tensors, _STORED)])


def _columns(tensors: TensorTable, attributes: Callable[[KindDoc], Any]) -> str:
    """Text of the names and attributes of tensors, which does not depend on the order of names and kinds in the table.

    Equal attributes are numbered, which is faster as layers repeat.
    """
    kinds: dict[Any, str] = {}
    numbers = [
        kinds.get(k) or kinds.setdefault(k, str(len(kinds))) for k in tensors.by_kind(attributes)
    ]
    names = map(tensors.names.__getitem__, tensors.name)
    return "\1".join(("\0".join(names), ",".join(numbers), repr(list(kinds))))


def _joined(numbers: Sequence[int] | None) -> str | None:
    return None if numbers is None else ",".join(map(str, numbers))


def digest_blocks(connection: Connection, tables: Iterable[TensorTable]) -> list[int]:
    """The blocks for digests of new checkpoints: the last one while it has room, then new ones."""
    last: int | None = connection.scalar(sa.select(sa.func.max(CheckpointRow.digest_block)))
    filled = 0
    if last is not None:
        inside = sa.select(sa.func.sum(CheckpointRow.tensors)).where(
            CheckpointRow.digest_block == last
        )
        filled = connection.execute(inside).scalar_one()
    block, blocks = last or 0, []
    for tensors in tables:
        if filled and filled + len(tensors) > BLOCK:
            block, filled = block + 1, 0
        filled += len(tensors)
        blocks.append(block)
    return blocks


def add_digests(connection: Connection, tables: Mapping[int, TensorTable]) -> None:
    """Insert the digests of checkpoints, sorted, since the index takes them faster in order."""
    _insert_digests(
        connection,
        [
            (d, serial, i)
            for serial, tensors in tables.items()
            for i, d in enumerate(tensors.content())
            if d
        ],
    )


def add_missing_digests(connection: Connection, serial: int, tensors: TensorTable) -> None:
    """Insert the digests of those tensors of a checkpoint that have none."""
    recorded = _digests(connection, serial)
    lacking = [(i, d) for i, d in enumerate(tensors.content()) if d and i not in recorded]
    _insert_digests(connection, [(d, serial, i) for i, d in lacking])


def _insert_digests(connection: Connection, digests: Sequence[tuple[str, int, int]]) -> None:
    """Insert digests, each with the serial of its checkpoint and the position of the tensor."""
    if not digests:
        return
    chosen = sa.select(CheckpointRow.serial, CheckpointRow.digest_block).where(
        CheckpointRow.serial.in_({serial for _, serial, _ in digests})
    )
    blocks: dict[int, int] = dict(connection.execute(chosen).all())
    rows = sorted((blocks[serial], digest, serial, i) for digest, serial, i in digests)
    insert_rows(connection, "digest", ("block", "digest", "checkpoint", "position"), rows)


def _digests(connection: Connection, serial: int) -> dict[int, str]:
    """The digests of a checkpoint's tensors that have one, by position in the structure."""
    rows = sa.select(Digest.position, Digest.digest).where(*_of_checkpoint(serial))
    return {row.position: row.digest for row in connection.execute(rows)}


def remove_digests(connection: Connection, serial: int) -> None:
    """Delete the digests of a checkpoint's tensors."""
    connection.execute(sa.delete(Digest).where(*_of_checkpoint(serial)))


def _of_checkpoint(serial: int) -> tuple[ColumnElement[bool], ...]:
    """The conditions of a checkpoint's digests: the block is what their index begins with."""
    block = sa.select(CheckpointRow.digest_block).where(CheckpointRow.serial == serial)
    return (Digest.block == block.scalar_subquery(), Digest.checkpoint == serial)


def check_same(
    connection: Connection, serial: int, url: str, content: str, manifest: Manifest
) -> None:
    """Check that a manifest with a recorded id is that checkpoint, in a form that one of its places has.

    Raises:
        Conflict: it is another checkpoint, or one in another form.
    """
    places, forms = _places_of(connection, serial), _forms_of(connection, serial)
    if manifest.digest in forms:
        return
    # `materialize` may change the form at a recorded place; a new place must have a known form, so
    # that it is refused in any case, and digests only decide with which error.
    elsewhere = places and url not in places and forms
    if _is_other(connection, serial, content, manifest, need_digests=not elsewhere):
        where = f"the one at {places[0]}" if places else "the one that was recorded"
        raise Conflict(
            f"{url} holds another checkpoint than {where}, with the same id {manifest.id}",
            hint="nothing was recorded; find out which one is genuine, and move the other away",
        )
    if elsewhere:
        raise Conflict(
            f"{url} holds the checkpoint {manifest.id} in another form than {places[0]}: its "
            "manifest differs",
            hint="nothing was recorded; `ucp copy` makes copies that are identical to the byte",
        )


def contradiction(connection: Connection, manifest: Manifest, url: str) -> str | None:
    """As `Catalog.contradiction`, in a transaction."""
    serial = serial_of(connection, manifest.id)
    if (
        serial is None
        or url not in _places_of(connection, serial)
        or manifest.digest in _forms_of(connection, serial)
    ):
        return None
    content = manifest_content(manifest)
    if content is not None and not _is_other(connection, serial, content, manifest):
        return None
    return f"the manifest at {url} is not the one that the catalog recorded there"


def _places_of(connection: Connection, serial: int) -> Sequence[str]:
    here = sa.select(Location.url).where(Location.checkpoint == serial).order_by(Location.id)
    return connection.scalars(here).all()


def _forms_of(connection: Connection, serial: int) -> Sequence[str]:
    """The digests of all manifests that were recorded for a checkpoint."""
    return connection.scalars(sa.select(Form.manifest).where(Form.checkpoint == serial)).all()


def _is_other(
    connection: Connection,
    serial: int,
    content: str,
    manifest: Manifest,
    *,
    need_digests: bool = True,
) -> bool:
    """Whether a manifest is of another checkpoint: its content or the digest of a tensor differs.

    With `need_digests`, a tensor whose recorded digest is missing from the manifest differs too;
    manifests of packed files have none.
    """
    if (
        connection.scalar(sa.select(CheckpointRow.content).where(CheckpointRow.serial == serial))
        != content
    ):
        return True
    digests = manifest.tensors.content()
    pairs = ((digests[n], digest) for n, digest in _digests(connection, serial).items())
    return any(
        listed != recorded for listed, recorded in pairs if need_digests or listed is not None
    )


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """One tensor of a checkpoint, as its manifest lists it."""

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...] | None
    shard: tuple[int, ...] | None
    nbytes: int
    digest: str | None


def load_tensors(connection: Connection, serial: int) -> list[ListedTensor]:
    """The tensors of a checkpoint, in the order of its manifest."""
    rows = connection.execute(
        sa.select(TensorRow.__table__)
        .join(CheckpointRow, CheckpointRow.tensor_set_id == TensorRow.tensor_set_id)
        .where(CheckpointRow.serial == serial)
        .order_by(TensorRow.position)
    ).all()
    digests = _digests(connection, serial)
    return [_tensor(r, digests.get(r.position)) for r in rows]


def find_digest(connection: Connection, digest: str) -> dict[int, list[ListedTensor]]:
    """The tensors with a content digest, by the serials of the checkpoints that contain them."""
    query = (
        sa.select(Digest.checkpoint, TensorRow.__table__, Digest.digest)
        .join(CheckpointRow, CheckpointRow.serial == Digest.checkpoint)
        .join(
            TensorRow,
            sa.and_(
                TensorRow.tensor_set_id == CheckpointRow.tensor_set_id,
                TensorRow.position == Digest.position,
            ),
        )
        # IN: for a join SQLite would scan all
        .where(Digest.block.in_(all_blocks()), Digest.digest == digest)
        .order_by(Digest.checkpoint, Digest.position)
    )
    tensors: dict[int, list[ListedTensor]] = {}
    for r in connection.execute(query):
        tensors.setdefault(r.checkpoint, []).append(_tensor(r, r.digest))
    return tensors


def _tensor(r: Any, digest: str | None) -> ListedTensor:
    return ListedTensor(
        r.name,
        r.state,
        r.dtype,
        _split(r.shape) or (),
        _split(r.chunk),
        _split(r.shard),
        r.nbytes,
        digest,
    )


def _split(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(map(int, text.split(","))) if text else ()
