"""Record checkpoints from their manifests, their places, and results of verifications."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.columns import canonical_hash, storable_json, storable_text, stored_metric
from ucformat.catalog.content import (
    add_digests,
    check_same,
    digest_block,
    manifest_content,
    remove_digests,
    tensor_set,
)
from ucformat.catalog.models import Checkpoint, Config, Edge, Form, Location, Metric, Run, Verification
from ucformat.catalog.refs import same_url
from ucformat.catalog.rows import event, get_or_insert, insert_if_absent, lock, lock_names, touch
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from ucformat.catalog.refs import LocationEntry
    from ucformat.catalog.stamp import Stamp
    from ucformat.schema.manifest import Manifest

__all__ = ["add_verification", "forget", "insert_edge", "record", "record_location", "set_run"]


def record(
    connection: Connection,
    manifest: Manifest,
    url: str,
    *,
    kind: str,
    run: str | None,
    files: tuple[int, int] | None,
    stamp: Stamp,
    listing: str | None = None,
    replace_config: bool = False,
) -> int:
    """Record a checkpoint at a place. If its id is known, only the place is added, with two exceptions.

    A checkpoint that `materialize` converted gets the digests of its arrays. A foreign one gets the configuration and
    the metrics that it lacks.

    Args:
        connection: a transaction that writes.
        manifest: its manifest; of a foreign checkpoint, one that describes it, with an id.
        url: the place, normalized by `same_url`.
        kind: `ucformat`, or the engine that wrote it.
        run: the name of its run, if it is new (None: it has none).
        files: of a foreign checkpoint, the number of its files and their bytes.
        stamp: the user and time of the operation.
        listing: a hash of its file listing (None: it cannot be recognised as unchanged).
        replace_config: of a foreign checkpoint, replace a recorded configuration by the manifest's.

    Returns:
        The serial of the checkpoint.

    Raises:
        Conflict: another checkpoint has its id.
        UsageError: the manifest has no id, or the database cannot store it.
    """
    nbytes = manifest.tensors.nbytes
    _check(manifest, url, nbytes)
    lock_names(connection, manifest.id, url, *(p.id or _place(p.url) for p in manifest.lineage))
    content = manifest_content(manifest) if kind == "ucformat" else None
    serial = connection.scalar(sa.select(Checkpoint.serial).where(Checkpoint.id == manifest.id))
    if serial is not None and content is not None:
        check_same(connection, serial, url, content, manifest)
    elif serial is None:
        inserted = sa.insert(Checkpoint).values(
            {
                "id": manifest.id,
                "kind": kind,
                "state": "committed",
                "run_id": None
                if run is None
                else get_or_insert(connection, Run, {"name": run}, {"created": stamp.now}),
                "step": manifest.step,
                "commits": manifest.commits,
                "created": _created(manifest),
                "recorded": stamp.now,
                "tensors": len(manifest.tensors),
                "nbytes": nbytes,
                "files": None if files is None else files[0],
                "files_nbytes": None if files is None else files[1],
                "format_version": manifest.version if kind == "ucformat" else None,
                "content": content,
                "attempt": manifest.attempt or None,
                "engine": manifest.producer.get("engine.name"),
                "producer": storable_json(manifest.producer),
                "topology": storable_json(manifest.layout),
                "config_id": _config(connection, manifest.config) if manifest.config else None,
                "tensor_set_id": tensor_set(connection, manifest.tensors),
                "digest_block": digest_block(connection, len(manifest.tensors)),
                "document_revision": 0,
                "document_written": 0,
            }
        )
        serial = connection.execute(inserted.returning(Checkpoint.serial)).scalar_one()
        _add_details(connection, serial, manifest, url)
        event(connection, "record", stamp, serial, url=url, kind=kind)
    again = record_location(connection, serial, url, stamp, listing=listing)
    if kind == "ucformat" and manifest.digest is not None:
        insert_if_absent(connection, Form, {"checkpoint": serial, "manifest": manifest.digest}, {}, Form.manifest)
    if again or _materialised(connection, serial, manifest):
        remove_digests(connection, serial)
        add_digests(connection, serial, manifest.tensors)
    if kind != "ucformat":
        _update_foreign(connection, serial, manifest, replace_config=replace_config)
    _adopt_children(connection, serial, manifest.id, url)
    return serial


def _update_foreign(connection: Connection, serial: int, manifest: Manifest, *, replace_config: bool) -> None:
    """Add what is missing of a foreign checkpoint: its reader may find more than the version that recorded it."""
    if manifest.config:
        replaced = sa.true() if replace_config else Checkpoint.config_id.is_(None)
        update = sa.update(Checkpoint).where(Checkpoint.serial == serial, replaced)
        connection.execute(update.values(config_id=_config(connection, manifest.config)))
    for name, value in manifest.metrics.items():
        keys = {"checkpoint": serial, "name": storable_text(name)}
        values = {"value": stored_metric(value), "measured": _created(manifest)}
        insert_if_absent(connection, Metric, keys, values, Metric.name)


def _materialised(connection: Connection, serial: int, manifest: Manifest) -> bool:
    """If `materialize` converted a checkpoint since it was recorded, update its attempt and structure.

    Returns whether it did.
    """
    if manifest.sidecar is not None or not manifest.attempt:
        return False
    changed = connection.execute(
        sa.update(Checkpoint)
        .where(Checkpoint.serial == serial, Checkpoint.attempt != manifest.attempt)
        .values(attempt=manifest.attempt, tensor_set_id=tensor_set(connection, manifest.tensors))
    )
    if not changed.rowcount:
        return False
    connection.execute(sa.update(Edge).where(Edge.child == serial, Edge.depends).values(depends=False))
    return True


def _check(manifest: Manifest, url: str, nbytes: int) -> None:
    """UsageError if the database cannot store the place, id, step or size exactly; other text is converted."""
    if not manifest.id:
        raise UsageError(f"the checkpoint at {url} has no id to record it by", hint="give the manifest one")
    for name, text in (("place", url), ("id", manifest.id)):
        if storable_text(text) != text:
            raise UsageError(
                f"the checkpoint at {storable_text(url)} cannot be recorded: its {name} is not text: {text!r}"
            )
    if max(abs(manifest.step or 0), nbytes) >= 2**63:
        raise UsageError(f"the checkpoint at {url} cannot be recorded: its step or size does not fit into 64 bits")


def _created(manifest: Manifest) -> datetime:
    created = manifest.created
    return created if created.tzinfo is not None else created.replace(tzinfo=UTC)


def set_run(connection: Connection, serial: int, run: str, now: datetime) -> bool:
    """Set the run of a checkpoint.

    Args:
        connection: a transaction that writes.
        serial: the checkpoint.
        run: the name of the run, which is created if it is new.
        now: the current time.

    Returns:
        Whether it changed.
    """
    run_id = get_or_insert(connection, Run, {"name": run}, {"created": now})
    changed = connection.execute(
        sa.update(Checkpoint)
        .where(Checkpoint.serial == serial, Checkpoint.run_id.is_distinct_from(run_id))
        .values(run_id=run_id)
    )
    return changed.rowcount > 0


def record_location(connection: Connection, serial: int, url: str, stamp: Stamp, *, listing: str | None = None) -> bool:
    """Record that a checkpoint is at a place, where it replaces any other.

    At a new place, a deletion that is recorded only in the documents of its other places is undone, since they do not
    apply to this one. If it was deleted in this catalog, the place is `spared`, since the deletion did not include it.

    Args:
        connection: a transaction that writes, in which the caller has called `lock_names` for the url.
        serial: the checkpoint.
        url: the place, normalized by `same_url`.
        stamp: the user and time of the operation.
        listing: a hash of its file listing (None: it cannot be recognised as unchanged).

    Returns:
        Whether the checkpoint was recorded as purged or replaced until now.
    """
    before = connection.scalar(sa.select(Location.checkpoint).where(Location.url == url))
    lock(connection, {serial, serial if before is None else before})  # so that `forget` waits
    here: dict[str, Any] = {"checkpoint": serial, "seen": stamp.now, "listing": listing}
    if before != serial:
        _undo_documented_deletion(connection, serial)
        deleted = sa.exists().where(Checkpoint.serial == serial, Checkpoint.state.in_(("deleted", "purging")))
        here |= {"deleted": None, "purge_after": None, "spared": connection.scalar(sa.select(deleted))}
    if not connection.execute(sa.update(Location).where(Location.url == url).values(**here)).rowcount:
        connection.execute(sa.insert(Location).values(url=url, **here))
    elif before is not None and before != serial:
        elsewhere = sa.exists().where(Location.checkpoint == before)
        over = sa.update(Checkpoint).where(Checkpoint.serial == before, Checkpoint.state != "purged", ~elsewhere)
        if connection.execute(over.values(state="replaced")).rowcount:
            event(connection, "replaced", stamp, before, url=url)
    if before != serial:  # its annotations must be written beside it there, too
        annotated = sa.select(Checkpoint.serial).where(Checkpoint.serial == serial, Checkpoint.document_revision > 0)
        touch(connection, connection.scalars(annotated).all())
    gone = (Checkpoint.serial == serial, Checkpoint.state.in_(("replaced", "purged")))
    again = {"state": "committed", "deleted": None, "purge_after": None}
    found = connection.execute(sa.update(Checkpoint).where(*gone).values(**again)).rowcount > 0
    if found:
        event(connection, "found", stamp, serial, url=url)
    return found


def _undo_documented_deletion(connection: Connection, serial: int) -> None:
    """Undo a deletion that only the documents of all places record, when the checkpoint gets another place."""
    ours = sa.exists().where(Location.checkpoint == serial, Location.deleted.is_(None))
    documented = sa.exists().where(Location.checkpoint == serial, Location.deleted.is_not(None))
    where = (Checkpoint.serial == serial, Checkpoint.state == "deleted", documented, ~ours)
    again = {"state": "committed", "deleted": None, "purge_after": None}
    connection.execute(sa.update(Checkpoint).where(*where).values(**again))


def forget(connection: Connection, gone: Iterable[LocationEntry], stamp: Stamp) -> list[str]:
    """Remove places, except those where a checkpoint was recorded since; one without any place becomes purged.

    Args:
        connection: a transaction that writes.
        gone: the places, as `refs.locations` returned them.
        stamp: the user and time of the operation.

    Returns:
        The urls that were removed.
    """
    gone = list(gone)
    lock(connection, {place.checkpoint for place in gone})
    forgotten = []
    for place in gone:
        here = (Location.url == place.url, Location.checkpoint == place.checkpoint, Location.seen == place.seen)
        if not connection.execute(sa.delete(Location).where(*here)).rowcount:
            continue
        elsewhere = sa.exists().where(Location.checkpoint == place.checkpoint)
        lost = (Checkpoint.serial == place.checkpoint, Checkpoint.state != "replaced", ~elsewhere)
        connection.execute(sa.update(Checkpoint).where(*lost).values(state="purged"))
        event(connection, "missing", stamp, place.checkpoint, url=place.url)
        forgotten.append(place.url)
    return forgotten


def _add_details(connection: Connection, serial: int, manifest: Manifest, url: str) -> None:
    add_digests(connection, serial, manifest.tensors)
    if manifest.metrics:
        measured = _created(manifest)
        metrics = {storable_text(n): stored_metric(v) for n, v in manifest.metrics.items()}
        connection.execute(
            sa.insert(Metric),
            [{"checkpoint": serial, "name": n, "value": v, "measured": measured} for n, v in metrics.items()],
        )
    roots = () if manifest.sidecar is None else manifest.sidecar.roots
    outside = [r for r in map(_place, roots) if not _below(r, url)]
    parents = [(p, _place(p.url)) for p in manifest.lineage]
    for parent, place in parents:
        depends = any(_below(r, place) or _below(place, r) for r in outside)
        insert_edge(connection, serial, parent.kind, place, parent.id, depends=depends)
    for root in outside:
        if not any(_below(root, place) or _below(place, root) for _, place in parents):
            insert_edge(connection, serial, "convert", root, None, depends=True)


def insert_edge(
    connection: Connection, serial: int, kind: str, parent_url: str, parent_id: str | None, *, depends: bool
) -> bool:
    """Record an edge of the lineage, linked to the parent if that is recorded.

    Args:
        connection: a transaction that writes.
        serial: the child.
        kind: how the child was made.
        parent_url: the parent's place.
        parent_id: the parent's id (None: the parent is whatever checkpoint is at the place).
        depends: whether the child needs the parent's files.

    Returns:
        Whether the edge is new.
    """
    parent_url = _place(parent_url)
    lock_names(connection, parent_id or parent_url)
    parent = None
    if parent_id is not None:
        parent = connection.scalar(sa.select(Checkpoint.serial).where(Checkpoint.id == parent_id))
    else:
        parent = connection.scalar(sa.select(Location.checkpoint).where(Location.url == parent_url))
    values = {"parent": parent, "parent_id": parent_id, "depends": depends}
    keys = {"child": serial, "kind": kind, "parent_url": parent_url}
    return insert_if_absent(connection, Edge, keys, values, Edge.id) is not None


def _adopt_children(connection: Connection, serial: int, checkpoint_id: str, url: str) -> None:
    """Link the edges of children that were recorded before their parent."""
    by_id = Edge.parent_id == checkpoint_id
    by_url = sa.and_(Edge.parent_id.is_(None), Edge.parent_url == url)
    for which in (by_id, by_url):
        connection.execute(
            sa.update(Edge).where(which, Edge.parent.is_(None), Edge.child != serial).values(parent=serial)
        )


def _place(url: str) -> str:
    """A url in a document, normalized by `same_url`; a relative path is left as it is."""
    return same_url(url) if url.lower().startswith(("/", "file://")) else url.rstrip("/") or url


def _below(url: str, root: str) -> bool:
    """Whether a url is `root` or below it."""
    root = root.rstrip("/")
    return url.rstrip("/") == root or url.startswith(f"{root}/")


def _config(connection: Connection, config: Mapping[str, Any]) -> int:
    document = storable_json(config)
    return get_or_insert(connection, Config, {"hash": canonical_hash(document)}, {"document": document})


def add_verification(
    connection: Connection, serial: int, url: str, *, problems: Sequence[str], stamp: Stamp, **values: Any
) -> None:
    """Record the result of a verification.

    Args:
        connection: a transaction that writes.
        serial: the checkpoint.
        url: the place that was verified, normalized by `same_url`.
        problems: the problems; the first 100 are stored.
        stamp: the user and time of the operation.
        values: the other columns of `verification`.
    """
    stored = storable_json(problems[:100])
    row = {"checkpoint": serial, "url": url, "at": stamp.now, "problems": stored, **values}
    connection.execute(sa.insert(Verification).values(row))
    event(connection, "verify", stamp, serial, ok=values["ok"], problems=len(problems))
