"""What the tensors of a checkpoint are, stored once for all of that structure, and what they hold, by digests."""

from __future__ import annotations

import hashlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.columns import storable_text
from ucformat.catalog.models import BLOCK, Checkpoint, Digest, Form, Location, TensorSet
from ucformat.catalog.rows import insert_if_absent, insert_rows
from ucformat.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection

    from ucformat.schema.manifest import Manifest, TensorDoc

__all__ = [
    "add_digests",
    "contradiction",
    "digest_block",
    "manifest_content",
    "must_be_same",
    "remove_digests",
    "tensor_digests",
    "tensor_set",
]

_COLUMNS = ("tensor_set_id", "position", "name", "state", "dtype", "shape", "chunk", "shard", "nbytes")
_NAME = attrgetter("name")
_KIND = attrgetter("state", "dtype", "shape", "chunk", "shard", "nbytes")
_WHAT = attrgetter("state", "dtype", "shape")
#: What `materialize` changes of a manifest, besides its tensors: all else is of the checkpoint, whatever its form.
_FORM = {"attempt", "grid", "producer", "objects", "assets", "sidecar", "verified", "writers", "digest"}


def tensor_set(connection: Connection, tensors: Sequence[TensorDoc]) -> int:
    """The id of this structure; its tensors are written if nobody has it yet."""
    structure = _structure_hash(tensors)
    found = connection.scalar(sa.select(TensorSet.id).where(TensorSet.hash == structure))
    if found is not None:
        return found
    made = insert_if_absent(connection, TensorSet, {"hash": structure}, {}, TensorSet.id)
    if made is None:
        return connection.execute(sa.select(TensorSet.id).where(TensorSet.hash == structure)).scalar_one()
    rows = [
        (
            made,
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
    return made


def manifest_content(manifest: Manifest) -> str | None:
    """The SHA-256 of what is the same in every form of a checkpoint, of the manifest as it is read from its file.

    What has its default is left out, so that a later version that knows more fields comes to the same. None of one that
    no file can hold, for its text is not Unicode.
    """
    try:
        read = manifest.model_copy(update={"tensors": ()}).as_read()
    except ValueError:
        return None
    return _sha256([read.model_dump_json(exclude=_FORM, exclude_defaults=True), _columns(manifest.tensors, _WHAT)])


def _sha256(texts: Sequence[str]) -> str:
    return hashlib.sha256("\1".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def _structure_hash(tensors: Sequence[TensorDoc]) -> str:
    """The SHA-256 of all that is the same in the steps of a run."""
    return _sha256([_columns(tensors, _KIND)])


def _columns(tensors: Sequence[TensorDoc], of: Callable[[TensorDoc], Any]) -> str:
    """What is said of tensors: their names, and of each one of few kinds, for layers repeat, which is faster."""
    kinds: dict[Any, str] = {}
    marks = [kinds.get(k) or kinds.setdefault(k, str(len(kinds))) for k in map(of, tensors)]
    return "\1".join(("\0".join(map(_NAME, tensors)), ",".join(marks), repr(list(kinds))))


def _joined(numbers: Sequence[int] | None) -> str | None:
    return None if numbers is None else ",".join(map(str, numbers))


def digest_block(connection: Connection, tensors: int) -> int:
    """The block that takes the digests of a checkpoint with so many tensors: the last one, if it has room for them."""
    last: int | None = connection.scalar(sa.select(sa.func.max(Checkpoint.digest_block)))
    if last is None:
        return 0
    filled: int = connection.execute(
        sa.select(sa.func.sum(Checkpoint.tensors)).where(Checkpoint.digest_block == last)
    ).scalar_one()
    return last if filled + tensors <= BLOCK else last + 1


def add_digests(connection: Connection, serial: int, tensors: Sequence[TensorDoc]) -> None:
    """Insert the digests of a checkpoint that is recorded, in order, which the index takes faster."""
    digests = [t.digest or "" for t in tensors]
    order = sorted(range(len(digests)), key=digests.__getitem__)
    block = connection.scalar(sa.select(Checkpoint.digest_block).where(Checkpoint.serial == serial))
    rows = [(block, digests[i], serial, i) for i in order if digests[i]]
    insert_rows(connection, "digest", ("block", "digest", "checkpoint", "position"), rows)


def tensor_digests(connection: Connection, serial: int) -> dict[int, str]:
    """The digests of a checkpoint's tensors that have one.

    Args:
        connection: of the transaction.
        serial: the checkpoint.

    Returns:
        the digests, by the tensors' positions in the structure.
    """
    block = sa.select(Checkpoint.digest_block).where(Checkpoint.serial == serial).scalar_subquery()
    rows = sa.select(Digest.position, Digest.digest).where(Digest.block == block, Digest.checkpoint == serial)
    return {row.position: row.digest for row in connection.execute(rows)}


def remove_digests(connection: Connection, serial: int) -> None:
    """Forget what the tensors of a checkpoint hold."""
    block = sa.select(Checkpoint.digest_block).where(Checkpoint.serial == serial).scalar_subquery()
    connection.execute(sa.delete(Digest).where(Digest.block == block, Digest.checkpoint == serial))


def must_be_same(connection: Connection, serial: int, url: str, content: str, manifest: Manifest) -> None:
    """Refuse what bears a known id and is another checkpoint, or one in a form that no known place has.

    Args:
        connection: of the transaction.
        serial: the checkpoint that is known by the manifest's id.
        url: the place, as the catalog holds it.
        content: `manifest_content` of the manifest.
        manifest: what was found at the place.

    Raises:
        Conflict: it is not the one that is known.
    """
    places, forms = _places_of(connection, serial), _forms_of(connection, serial)
    if manifest.digest in forms:
        return
    elsewhere = places and url not in places and forms
    if _is_other(connection, serial, content, manifest, untold=not elsewhere):
        where = f"the one at {places[0]}" if places else "one that the catalog knew"
        raise Conflict(
            f"{url} holds another checkpoint than {where}, and has its id {manifest.id}",
            hint="nothing was recorded; see which of them is the true one, and move the other away",
        )
    if elsewhere:
        raise Conflict(
            f"{url} holds the checkpoint {manifest.id} in another form than {places[0]}: its manifest differs",
            hint="nothing was recorded; `ucp copy` makes a copy that is the same to the byte",
        )


def contradiction(connection: Connection, manifest: Manifest, url: str) -> str | None:
    """As `Catalog.contradiction`, in a transaction.

    Args:
        connection: of the transaction.
        manifest: as there.
        url: the place, as the catalog holds it.
    """
    serial = connection.scalar(sa.select(Checkpoint.serial).where(Checkpoint.id == manifest.id))
    if serial is None or url not in _places_of(connection, serial) or manifest.digest in _forms_of(connection, serial):
        return None
    content = manifest_content(manifest)
    if content is not None and not _is_other(connection, serial, content, manifest):
        return None
    return f"the manifest at {url} is not the one that the catalog recorded there"


def _places_of(connection: Connection, serial: int) -> Sequence[str]:
    here = sa.select(Location.url).where(Location.checkpoint == serial).order_by(Location.id)
    return connection.scalars(here).all()


def _forms_of(connection: Connection, serial: int) -> Sequence[str]:
    """The digests of the manifests that a checkpoint has had."""
    return connection.scalars(sa.select(Form.manifest).where(Form.checkpoint == serial)).all()


def _is_other(connection: Connection, serial: int, content: str, manifest: Manifest, *, untold: bool = True) -> bool:
    """Whether a manifest is of another checkpoint: it says other things, or that an array holds other bytes.

    With `untold` also where it no longer says what an array holds; a packed file never does.
    """
    known = connection.scalar(sa.select(Checkpoint.content).where(Checkpoint.serial == serial))
    if known != content:
        return True
    digests = tensor_digests(connection, serial)
    said = ((manifest.tensors[n].digest, digest) for n, digest in digests.items())
    return any(one != digest for one, digest in said if untold or one is not None)
