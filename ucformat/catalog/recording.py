"""How a checkpoint comes into the catalog: from its manifest, in one transaction, any number of times."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.columns import storable_json, storable_text
from ucformat.catalog.content import (
    add_digests,
    digest_block,
    manifest_content,
    must_be_same,
    remove_digests,
    tensor_set,
)
from ucformat.catalog.models import Checkpoint, Config, Edge, Form, Location, Metric, Run
from ucformat.catalog.refs import same_url
from ucformat.catalog.rows import event, insert_if_absent, lock, one_id, starts_with, take_turns, touch
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from sqlalchemy import Connection

    from ucformat.schema.manifest import Manifest

__all__ = [
    "LocationEntry",
    "canonical_hash",
    "forget",
    "insert_edge",
    "listings",
    "places",
    "record",
    "record_location",
    "set_run",
    "stored_metric",
]


@dataclass(frozen=True, slots=True)
class LocationEntry:
    """A place where a checkpoint lies, by its serial, and when it was last seen there."""

    url: str
    checkpoint: int
    seen: datetime


def record(
    connection: Connection,
    manifest: Manifest,
    url: str,
    *,
    kind: str,
    run: str | None,
    files: tuple[int, int] | None,
    now: datetime,
    who: str,
    listing: str | None = None,
    said: bool = False,
) -> int:
    """Record a checkpoint that lies at `url`, unless it is known; then only where it lies is noted. Its serial.

    One that was packed when it was recorded, and was made arrays since, gets their digests. A foreign one gets the
    configuration and metrics that it has none of; where somebody `said` the configuration, also in place of another.

    Raises:
        Conflict: another checkpoint is known by its id.
    """
    nbytes = sum(t.nbytes for t in manifest.tensors)
    _check(manifest, url, nbytes)
    take_turns(connection, manifest.id, url, *(p.id or _place(p.url) for p in manifest.lineage))
    content = manifest_content(manifest) if kind == "ucformat" else None
    serial = connection.scalar(sa.select(Checkpoint.serial).where(Checkpoint.id == manifest.id))
    if serial is not None and content is not None:
        must_be_same(connection, serial, url, content, manifest)
    elif serial is None:
        made = sa.insert(Checkpoint).values(
            {
                "id": manifest.id,
                "kind": kind,
                "state": "committed",
                "run_id": None if run is None else one_id(connection, Run, {"name": run}, {"created": now}),
                "step": manifest.step,
                "commits": manifest.commits,
                "created": _created(manifest),
                "recorded": now,
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
        serial = connection.execute(made.returning(Checkpoint.serial)).scalar_one()
        _add_details(connection, serial, manifest, url)
        event(connection, "record", who, now, serial, url=url, kind=kind)
    again = record_location(connection, serial, url, now=now, who=who, listing=listing)
    if kind == "ucformat" and manifest.digest is not None:
        insert_if_absent(connection, Form, {"checkpoint": serial, "manifest": manifest.digest}, {}, Form.manifest)
    if again or _materialised(connection, serial, manifest):
        remove_digests(connection, serial)
        add_digests(connection, serial, manifest.tensors)
    if kind != "ucformat":
        _told(connection, serial, manifest, said=said)
    _adopt_children(connection, serial, manifest.id, url)
    return serial


def _told(connection: Connection, serial: int, manifest: Manifest, *, said: bool) -> None:
    """What the files of a foreign checkpoint tell by now: their reader may know more than the one that recorded it."""
    if manifest.config:
        none = sa.true() if said else Checkpoint.config_id.is_(None)
        here = sa.update(Checkpoint).where(Checkpoint.serial == serial, none)
        connection.execute(here.values(config_id=_config(connection, manifest.config)))
    for name, value in manifest.metrics.items():
        keys = {"checkpoint": serial, "name": storable_text(name)}
        values = {"value": stored_metric(value), "measured": _created(manifest)}
        insert_if_absent(connection, Metric, keys, values, Metric.name)


def _materialised(connection: Connection, serial: int, manifest: Manifest) -> bool:
    """Note the attempt and the structure of a checkpoint that was made arrays since it was recorded; whether it was."""
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
    """Refuse what no database can hold; text that it cannot is changed, except where it must be found again."""
    if not manifest.id:
        raise UsageError(f"the checkpoint at {url} has no id to record it by", hint="give the manifest one")
    for what, text in (("place", url), ("id", manifest.id)):
        if storable_text(text) != text:
            raise UsageError(
                f"the checkpoint at {storable_text(url)} cannot be recorded: its {what} is not text: {text!r}"
            )
    if max(abs(manifest.step or 0), nbytes) >= 2**63:
        raise UsageError(f"the checkpoint at {url} cannot be recorded: its step or its size is beyond any bound")


def _created(manifest: Manifest) -> datetime:
    created = manifest.created
    return created if created.tzinfo is not None else created.replace(tzinfo=UTC)


def set_run(connection: Connection, serial: int, run: str, now: datetime) -> bool:
    """Say to which run a checkpoint belongs; whether that is new."""
    run_id = one_id(connection, Run, {"name": run}, {"created": now})
    changed = connection.execute(
        sa.update(Checkpoint)
        .where(Checkpoint.serial == serial, Checkpoint.run_id.is_distinct_from(run_id))
        .values(run_id=run_id)
    )
    return changed.rowcount > 0


def record_location(
    connection: Connection,
    serial: int,
    url: str,
    *,
    now: datetime,
    who: str,
    listing: str | None = None,
) -> bool:
    """Note that a checkpoint lies at `url`; what was recorded there before has been replaced by it.

    Whoever calls has the turn of the url. Whether the checkpoint was believed to be gone. One that is deleted only for
    the documents of its other places said so is not: they do not speak for this one. Who deleted it here did not mean
    this place either, and it is spared.
    """
    before = connection.scalar(sa.select(Location.checkpoint).where(Location.url == url))
    lock(connection, {serial, serial if before is None else before})  # so that nobody forgets a place meanwhile
    here: dict[str, Any] = {"checkpoint": serial, "seen": now, "listing": listing}
    if before != serial:
        _unsay_deletion(connection, serial)
        going = sa.exists().where(Checkpoint.serial == serial, Checkpoint.state.in_(("deleted", "purging")))
        here |= {"deleted": None, "purge_after": None, "spared": connection.scalar(sa.select(going))}
    if not connection.execute(sa.update(Location).where(Location.url == url).values(**here)).rowcount:
        connection.execute(sa.insert(Location).values(url=url, **here))
    elif before is not None and before != serial:
        elsewhere = sa.exists().where(Location.checkpoint == before)
        over = sa.update(Checkpoint).where(Checkpoint.serial == before, Checkpoint.state != "purged", ~elsewhere)
        if connection.execute(over.values(state="replaced")).rowcount:
            event(connection, "replaced", who, now, before, url=url)
    if before != serial:  # what people said of it has to be beside it there, too
        said = sa.select(Checkpoint.serial).where(Checkpoint.serial == serial, Checkpoint.document_revision > 0)
        touch(connection, connection.scalars(said).all())
    gone = (Checkpoint.serial == serial, Checkpoint.state.in_(("replaced", "purged")))
    again = {"state": "committed", "deleted": None, "purge_after": None}
    found = connection.execute(sa.update(Checkpoint).where(*gone).values(**again)).rowcount > 0
    if found:
        event(connection, "found", who, now, serial, url=url)
    return found


def _unsay_deletion(connection: Connection, serial: int) -> None:
    """Take back a deletion that only documents said, each for its own place, as the checkpoint lies in one more."""
    ours = sa.exists().where(Location.checkpoint == serial, Location.deleted.is_(None))
    theirs = sa.exists().where(Location.checkpoint == serial, Location.deleted.is_not(None))
    said = (Checkpoint.serial == serial, Checkpoint.state == "deleted", theirs, ~ours)
    again = {"state": "committed", "deleted": None, "purge_after": None}
    connection.execute(sa.update(Checkpoint).where(*said).values(**again))


def places(connection: Connection, root: str) -> list[LocationEntry]:
    """The places at or below `root` where checkpoints lie, as far as is known."""
    root = root.rstrip("/")
    below = sa.or_(Location.url == root, starts_with(Location.url, f"{root}/"))
    found = sa.select(Location.url, Location.checkpoint, Location.seen).where(below).order_by(Location.url)
    return [LocationEntry(*row) for row in connection.execute(found)]


def listings(connection: Connection, root: str) -> dict[str, tuple[str, str]]:
    """Of the places at or below `root` that were read: the checkpoint's id, and the hash of what its files were."""
    root = root.rstrip("/")
    below = sa.or_(Location.url == root, starts_with(Location.url, f"{root}/"))
    found = (
        sa.select(Location.url, Checkpoint.id, Location.listing)
        .join(Checkpoint, Checkpoint.serial == Location.checkpoint)
        .where(below, Location.listing.is_not(None), Checkpoint.state.in_(("committed", "deleted")))
    )
    return {url: (checkpoint, str(listing)) for url, checkpoint, listing in connection.execute(found)}


def forget(connection: Connection, gone: Iterable[LocationEntry], *, now: datetime, who: str) -> list[str]:
    """Forget these places, but none where something was seen since; a checkpoint without any left is purged."""
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
        event(connection, "missing", who, now, place.checkpoint, url=place.url)
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
    """Note an edge, linked to the parent if that is recorded; whether it is new."""
    parent_url = _place(parent_url)
    take_turns(connection, parent_id or parent_url)
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
    """A place as documents name it, as the catalog does: a path that is not absolute stays as it is."""
    return same_url(url) if url.lower().startswith(("/", "file://")) else url.rstrip("/") or url


def _below(url: str, root: str) -> bool:
    """Whether a url is that root, or below it."""
    root = root.rstrip("/")
    return url.rstrip("/") == root or url.startswith(f"{root}/")


def stored_metric(value: float) -> float | None:
    """A metric as the table holds it: SQLite has no NaN."""
    return None if math.isnan(value) else float(value)


def _config(connection: Connection, config: Mapping[str, Any]) -> int:
    document = storable_json(config)
    return one_id(connection, Config, {"hash": canonical_hash(document)}, {"document": document})


def canonical_hash(value: Any) -> str:
    """The SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
