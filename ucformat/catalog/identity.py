"""Whether a manifest is of the checkpoint that the catalog knows by its id (docs/security.md, rules 1a and 12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from ucformat.catalog.content import manifest_content, tensor_digests
from ucformat.catalog.models import Checkpoint, Form, Location
from ucformat.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from ucformat.schema.manifest import Manifest

__all__ = ["contradiction", "must_be_same"]


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
