"""Record checkpoints from their manifests, their places, and results of verifications."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.content import (
    add_digests,
    add_missing_digests,
    check_same,
    digest_blocks,
    manifest_content,
    remove_digests,
    tensor_sets,
)
from ucformat.catalog.entries import KEYS
from ucformat.catalog.launches import link_launches, record_continued
from ucformat.catalog.lineage import insert_edges, parent_names
from ucformat.catalog.lines import folder_launch
from ucformat.catalog.models import (
    REMOVED,
    CertificateRow,
    CheckpointRow,
    Config,
    Edge,
    Form,
    Launch,
    Location,
    Metric,
    Note,
    RunRow,
    Verification,
    canonical_hash,
    storable_json,
    storable_text,
    stored_metric,
)
from ucformat.catalog.refs import parent_name, same_place
from ucformat.catalog.rows import (
    COMMITTED_AGAIN,
    event,
    events,
    exists,
    get_or_insert,
    insert_if_absent,
    lock,
    lock_names,
    serial_at,
    serial_of,
    touch,
    unindexed,
    update_checkpoints,
)
from ucformat.catalog.stamp import GRACE, clocks
from ucformat.errors import Conflict, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from ucformat.catalog.refs import LocationEntry
    from ucformat.catalog.stamp import Stamp
    from ucformat.schema.manifest import Manifest


#: How columns are made from the manifest.
_FROM_MANIFEST = {key.place[1]: key.recorded for key in KEYS if key.recorded is not None}


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint to record at a place.

    Args:
        run: its run (default: if it is new, the manifest's, else the name of the parent folder).
        files: of a foreign checkpoint, the number of its files and their bytes.
        replace_config: of a foreign checkpoint, replace a recorded configuration (default: False).
        listing: a hash of the file listing, by which `register` recognises unchanged checkpoints.
        replace_step: of a foreign checkpoint, replace a recorded step (default: False).
    """

    manifest: Manifest
    url: str
    kind: str = "ucformat"
    run: str | None = None
    files: tuple[int, int] | None = None
    replace_config: bool = False
    listing: str | None = None
    replace_step: bool = False


def record_all(connection: Connection, checkpoints: Sequence[Found], stamp: Stamp) -> list[int]:
    """Record checkpoints at places. If the id of one is known, only the place is added, with two exceptions.

    A checkpoint that `materialize` converted gets the digests of its arrays. A foreign one gets the
    configuration, the metrics and the fingerprints that it lacks. New checkpoints are inserted together: a few
    statements, whatever their number.

    Raises:
        Conflict: another checkpoint has the id of one.
    """
    for checkpoint in checkpoints:
        _check(checkpoint.manifest, checkpoint.url)
    lock_names(
        connection,
        *(name for f in checkpoints for name in (f.manifest.id, f.url, *parent_names(f.manifest))),
    )
    urls = Counter(f.url for f in checkpoints)
    recorded = sa.select(CheckpointRow.id, CheckpointRow.serial).where(
        CheckpointRow.id.in_({f.manifest.id for f in checkpoints})
    )
    serials: dict[str, int] = dict(connection.execute(recorded).all())
    taken = set(connection.scalars(sa.select(Location.url).where(Location.url.in_(urls))))
    new: dict[str, Found] = {}
    for checkpoint in checkpoints:
        if checkpoint.manifest.id not in serials:
            new.setdefault(checkpoint.manifest.id, checkpoint)
    serials |= _insert(connection, new, stamp)
    # Most places are new and named once: one statement for all of them. At the others, a checkpoint
    # replaces another.
    free = [f for f in new.values() if f.url not in taken and urls[f.url] == 1]
    if free:
        rows = [
            {"checkpoint": serials[f.manifest.id], "url": f.url, "listing": f.listing} for f in free
        ]
        connection.execute(sa.insert(Location).values(seen=stamp.now), rows)
    deleted = [serials[i] for i, f in new.items() if f.manifest.is_remnant]
    if deleted:  # by another catalog, or one that is lost
        times = {"deleted": stamp.now, "purge_after": stamp.now + GRACE}
        read = clocks(connection)
        update_checkpoints(connection, deleted, state="thinned", **times, deleted_clocks=read)
    for checkpoint in new.values():
        _inherit(connection, serials[checkpoint.manifest.id], checkpoint, stamp)
    for checkpoint in checkpoints:
        serial = serials[checkpoint.manifest.id]
        if new.get(checkpoint.manifest.id) is not checkpoint:
            _record_known(connection, serial, checkpoint, stamp)
        elif checkpoint.url in taken or urls[checkpoint.url] > 1:
            record_location(connection, serial, checkpoint.url, stamp, listing=checkpoint.listing)
    _adopt_children(connection, serials, {f.url: serials[f.manifest.id] for f in checkpoints})
    return [serials[f.manifest.id] for f in checkpoints]


def _insert(connection: Connection, new: Mapping[str, Found], stamp: Stamp) -> dict[str, int]:
    """Insert the rows of new checkpoints, without their places; returns their serials, by id."""
    if not new:
        return {}
    names = {i: f.run or f.manifest.run or parent_name(f.url) for i, f in new.items()}
    runs = {
        n: _run(connection, n, stamp.now)
        for n in sorted({n for n in names.values() if n is not None})
    }
    configs = config_rows(connection, [f.manifest.config for f in new.values()])
    tables = [f.manifest.tensors for f in new.values()]
    launches = _launches(connection, new)
    structures, blocks = tensor_sets(connection, tables), digest_blocks(connection, tables)
    rows = [
        {
            "id": i,
            "kind": f.kind,
            "state": "committed",
            "run_id": runs.get(names[i] or ""),
            "launch_id": launches[i],
            **{column: recorded(f.manifest) for column, recorded in _FROM_MANIFEST.items()},
            "commits": f.manifest.commits,
            "created": _created(f.manifest),
            "recorded": stamp.now,
            "files": None if f.files is None else f.files[0],
            "files_nbytes": None if f.files is None else f.files[1],
            "format_version": f.manifest.version if f.kind == "ucformat" else None,
            "content": manifest_content(f.manifest) if f.kind == "ucformat" else None,
            "attempt": f.manifest.attempt or None,
            "producer": storable_json(f.manifest.producer),
            "topology": storable_json(f.manifest.layout),
            "config_id": config,
            "tensor_set_id": structure,
            "digest_block": block,
            "document_revision": 0,
            "document_written": 0,
        }
        for (i, f), config, structure, block in zip(
            new.items(), configs, structures, blocks, strict=True
        )
    ]
    insert = sa.insert(CheckpointRow).returning(CheckpointRow.id, CheckpointRow.serial)
    serials: dict[str, int] = dict(connection.execute(insert, rows).all())
    add_digests(connection, {serials[i]: f.manifest.tensors for i, f in new.items()})
    forms = [
        (serials[i], f.manifest.digest)
        for i, f in new.items()
        if f.kind == "ucformat" and f.manifest.digest
    ]
    if forms:
        connection.execute(
            sa.insert(Form), [{"checkpoint": s, "manifest": digest} for s, digest in forms]
        )
    metrics = [
        {
            "checkpoint": serials[i],
            "name": name,
            "value": stored_metric(value),
            "measured": _created(f.manifest),
        }
        for i, f in new.items()
        for name, value in {storable_text(n): v for n, v in f.manifest.metrics.items()}.items()
    ]
    if metrics:
        connection.execute(sa.insert(Metric), metrics)
    for i, f in new.items():
        insert_edges(connection, serials[i], f.manifest, f.url)
    record_continued(connection, {i: f.manifest for i, f in new.items()}, serials.values())
    events(
        connection,
        "record",
        stamp,
        {serials[i]: {"url": f.url, "kind": f.kind} for i, f in new.items()},
    )
    return serials


def _inherit(connection: Connection, serial: int, checkpoint: Found, stamp: Stamp) -> None:
    """Copy the run, the metrics and the notes of the checkpoint of which a new one is what `thin` has left."""
    edge = checkpoint.manifest.lineage[-1] if checkpoint.manifest.lineage else None
    if edge is None or edge.kind != "thin":
        return
    before = serial_at(connection, checkpoint.url)
    if before is None or before != serial_of(connection, edge.id or ""):
        return  # it was not recorded here before it was thinned
    run = sa.select(CheckpointRow.run_id).where(CheckpointRow.serial == before)
    row = sa.update(CheckpointRow).where(CheckpointRow.serial == serial)
    connection.execute(row.values(run_id=run.scalar_subquery()))
    connection.execute(sa.delete(Metric).where(Metric.checkpoint == serial))  # of the manifest
    for table, names in (
        (Metric, ("name", "value", "measured", "document_url")),
        (Note, ("text", "created", "who", "document_url")),
    ):
        columns = [table.__table__.c[name] for name in names]
        rows = sa.select(sa.literal(serial), *columns).where(table.checkpoint == before)
        connection.execute(sa.insert(table).from_select(["checkpoint", *names], rows))
    event(connection, "thin", stamp, serial, url=checkpoint.url, before=edge.id)
    annotated = sa.select(CheckpointRow.serial).where(
        CheckpointRow.serial == before, CheckpointRow.document_revision > 0
    )
    touch(connection, [serial for _ in connection.scalars(annotated)])


def _run(connection: Connection, name: str, now: datetime) -> int:
    return get_or_insert(connection, RunRow, {"name": name}, {"created": now})


def _launches(connection: Connection, new: Mapping[str, Found]) -> dict[str, int]:
    """Get or create the launches of new checkpoints, by id of the checkpoint."""
    launches = {i: _launch(connection, f.manifest, f.url) for i, f in new.items()}
    names = sorted({launch for launch in launches.values() if isinstance(launch, str)})
    numbers = {name: get_or_insert(connection, Launch, {"name": name}, {}) for name in names}
    return {
        i: numbers[launch] if isinstance(launch, str) else launch for i, launch in launches.items()
    }


def _launch(connection: Connection, manifest: Manifest, url: str) -> str | int:
    """The name of the launch of a new checkpoint; of a conversion, the number of its source's, if that is known."""
    if manifest.launch is not None:
        return manifest.launch.id
    for edge in manifest.lineage:
        if edge.kind in ("convert", "quantize", "thin"):
            place = same_place(edge.url)
            parent = CheckpointRow.id == edge.id
            if edge.id is None:
                parent = CheckpointRow.serial.in_(
                    sa.select(Location.checkpoint).where(Location.url == place)
                )
            number = connection.scalar(sa.select(CheckpointRow.launch_id).where(parent))
            return folder_launch(place) if number is None else number
    return folder_launch(url)


def config_rows(connection: Connection, configs: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """Get or create the rows of configurations; an empty one has none."""
    documents = [storable_json(c) if c else None for c in configs]
    hashes = [None if d is None else canonical_hash(d) for d in documents]
    by_hash = dict(zip(hashes, documents, strict=True))
    ids: dict[str | None, int | None] = {None: None}
    for key in sorted(h for h in by_hash if h is not None):
        ids[key] = get_or_insert(connection, Config, {"hash": key}, {"document": by_hash[key]})
    return [ids[h] for h in hashes]


def _record_known(connection: Connection, serial: int, checkpoint: Found, stamp: Stamp) -> None:
    """Record a place of a checkpoint whose id is known, and what its record lacks."""
    manifest = checkpoint.manifest
    if manifest.is_remnant:
        _record_remnant(connection, serial, checkpoint)
        return
    content = manifest_content(manifest) if checkpoint.kind == "ucformat" else None
    if content is not None:
        check_same(connection, serial, checkpoint.url, content, manifest)
    again = record_location(connection, serial, checkpoint.url, stamp, listing=checkpoint.listing)
    if checkpoint.kind == "ucformat" and manifest.digest is not None:
        insert_if_absent(
            connection, Form, {"checkpoint": serial, "manifest": manifest.digest}, {}, Form.manifest
        )
    # a purge has removed the digests, and packed files have none
    if again or _materialised(connection, serial, manifest):
        remove_digests(connection, serial)
        add_digests(connection, {serial: manifest.tensors})
    if checkpoint.kind != "ucformat":
        _update_foreign(connection, serial, checkpoint, stamp)
    if checkpoint.run is not None and set_run(connection, serial, checkpoint.run, stamp):
        touch(connection, [serial])


def _record_remnant(connection: Connection, serial: int, checkpoint: Found) -> None:
    """Record the form of what this catalog has left of a checkpoint at a place; its record stays that of the whole."""
    state = lock(connection, [serial])[serial]
    if state not in REMOVED or serial_at(connection, checkpoint.url) != serial:
        raise Conflict(
            f"{checkpoint.url} has only what others need of the deleted checkpoint "
            f"{checkpoint.manifest.id}",
            hint="nothing was recorded; the catalog in which it was deleted removes it when "
            "nothing needs it",
        )
    form = {"checkpoint": serial, "manifest": checkpoint.manifest.digest}
    insert_if_absent(connection, Form, form, {}, Form.manifest)


def _update_foreign(connection: Connection, serial: int, checkpoint: Found, stamp: Stamp) -> None:
    """Add what is missing of a foreign checkpoint: its reader may find more than the version that recorded it."""
    manifest = checkpoint.manifest
    if manifest.config:
        replaced = sa.true() if checkpoint.replace_config else CheckpointRow.config_id.is_(None)
        update = sa.update(CheckpointRow).where(CheckpointRow.serial == serial, replaced)
        [config] = config_rows(connection, [manifest.config])
        connection.execute(update.values(config_id=config))
    if manifest.step is not None:
        replaced = sa.true() if checkpoint.replace_step else CheckpointRow.step.is_(None)
        other = CheckpointRow.step.is_distinct_from(manifest.step)
        update = sa.update(CheckpointRow).where(CheckpointRow.serial == serial, replaced, other)
        if connection.execute(update.values(step=manifest.step)).rowcount:
            event(connection, "step", stamp, serial, step=manifest.step)
    for name, value in manifest.metrics.items():
        keys = {"checkpoint": serial, "name": storable_text(name)}
        values = {"value": stored_metric(value), "measured": _created(manifest)}
        insert_if_absent(connection, Metric, keys, values, Metric.name)
    if manifest.tensors.fingerprint:
        [structure] = tensor_sets(connection, [manifest.tensors])
        update = sa.update(CheckpointRow).where(
            CheckpointRow.serial == serial, CheckpointRow.tensor_set_id != structure
        )
        if connection.execute(update.values(tensor_set_id=structure)).rowcount:
            remove_digests(connection, serial)  # they are of tensors at other positions
        add_missing_digests(connection, serial, manifest.tensors)


def _materialised(connection: Connection, serial: int, manifest: Manifest) -> bool:
    """If `materialize` converted a checkpoint since it was recorded, update its attempt and structure.

    Returns whether it did.
    """
    if manifest.sidecar is not None or not manifest.attempt:
        return False
    changed = connection.execute(
        sa.update(CheckpointRow)
        .where(CheckpointRow.serial == serial, CheckpointRow.attempt != manifest.attempt)
        .values(
            attempt=manifest.attempt, tensor_set_id=tensor_sets(connection, [manifest.tensors])[0]
        )
    )
    if not changed.rowcount:
        return False
    connection.execute(
        sa.update(Edge).where(Edge.child == serial, Edge.depends).values(depends=False)
    )
    return True


def _check(manifest: Manifest, url: str) -> None:
    """UsageError if the database cannot store the place, id, step or size exactly; other text is converted."""
    if not manifest.id:
        raise UsageError(
            f"the checkpoint at {url} has no id to record it by", hint="give the manifest one"
        )
    for name, text in (("place", url), ("id", manifest.id)):
        if storable_text(text) != text:
            raise UsageError(
                f"the checkpoint at {storable_text(url)} cannot be recorded: its {name} is not "
                f"text: {text!r}"
            )
    if max(abs(manifest.step or 0), manifest.tensors.nbytes) >= 2**63:
        raise UsageError(
            f"the checkpoint at {url} cannot be recorded: its step or size does not fit into 64 "
            "bits"
        )


def _created(manifest: Manifest) -> datetime:
    created = manifest.created
    return created if created.tzinfo is not None else created.replace(tzinfo=UTC)


def set_run(connection: Connection, serial: int, run: str, stamp: Stamp) -> bool:
    """Set the run of a checkpoint."""
    run_id = _run(connection, run, stamp.now)
    before = connection.scalar(
        sa.select(RunRow.name)
        .join(CheckpointRow, CheckpointRow.run_id == RunRow.id)
        .where(CheckpointRow.serial == serial)
    )
    changed = connection.execute(
        sa.update(CheckpointRow)
        .where(CheckpointRow.serial == serial, CheckpointRow.run_id.is_distinct_from(run_id))
        .values(run_id=run_id)
    )
    if changed.rowcount:
        event(connection, "run", stamp, serial, run=run, before=before)
    return changed.rowcount > 0


def record_location(
    connection: Connection, serial: int, url: str, stamp: Stamp, *, listing: str | None = None
) -> bool:
    """Record that a checkpoint is at a place, where it replaces any other.

    At a new place, a deletion that is recorded only in the documents of its other places is undone,
    since they do not apply to this one. If it was deleted in this catalog, the place is `spared`,
    since the deletion did not include it.

    Args:
        connection: a transaction that writes, in which the caller has called `lock_names` for the
            url.
        listing: a hash of its file listing (None: it cannot be recognised as unchanged).

    Returns:
        Whether the checkpoint was recorded as purged or replaced until now.
    """
    before = serial_at(connection, url)
    lock(connection, {serial, serial if before is None else before})  # so that `forget` waits
    here: dict[str, Any] = {"checkpoint": serial, "seen": stamp.now, "listing": listing}
    if before != serial:
        _undo_documented_deletion(connection, serial, url, stamp)
        removed = (CheckpointRow.serial == serial, CheckpointRow.state.in_(REMOVED))
        spared = exists(connection, *removed)
        here |= {"deleted": None, "purge_after": None, "spared": spared}
    if not connection.execute(
        sa.update(Location).where(Location.url == url).values(**here)
    ).rowcount:
        connection.execute(sa.insert(Location).values(url=url, **here))
    elif before is not None and before != serial:
        elsewhere = sa.exists().where(Location.checkpoint == before)
        over = sa.update(CheckpointRow).where(
            CheckpointRow.serial == before, CheckpointRow.state != "purged", ~elsewhere
        )
        if connection.execute(over.values(state="replaced")).rowcount:
            event(connection, "replaced", stamp, before, url=url)
    if before != serial:  # its annotations must be written beside it there, too
        annotated = sa.select(CheckpointRow.serial).where(
            CheckpointRow.serial == serial, CheckpointRow.document_revision > 0
        )
        touch(connection, connection.scalars(annotated).all())
    gone = (CheckpointRow.serial == serial, CheckpointRow.state.in_(("replaced", "purged")))
    again = sa.update(CheckpointRow).where(*gone).values(**COMMITTED_AGAIN)
    reappeared = connection.execute(again).rowcount > 0
    if reappeared:
        event(connection, "found", stamp, serial, url=url)
    return reappeared


def _undo_documented_deletion(connection: Connection, serial: int, url: str, stamp: Stamp) -> None:
    """Undo a deletion that only the documents of all places record, when the checkpoint gets another place."""
    ours = sa.exists().where(Location.checkpoint == serial, Location.deleted.is_(None))
    documented = sa.exists().where(Location.checkpoint == serial, Location.deleted.is_not(None))
    where = (CheckpointRow.serial == serial, CheckpointRow.state == "deleted", documented, ~ours)
    again = sa.update(CheckpointRow).where(*where).values(**COMMITTED_AGAIN)
    if connection.execute(again).rowcount:
        event(connection, "found", stamp, serial, url=url)


def forget(connection: Connection, gone: Iterable[LocationEntry], stamp: Stamp) -> list[str]:
    """Remove places, except those where a checkpoint was recorded since; one without any place becomes purged."""
    gone = list(gone)
    lock(connection, {place.checkpoint for place in gone})
    forgotten = []
    for place in gone:
        here = (
            Location.url == place.url,
            Location.checkpoint == place.checkpoint,
            Location.seen == place.seen,
        )
        if not connection.execute(sa.delete(Location).where(*here)).rowcount:
            continue
        elsewhere = sa.exists().where(Location.checkpoint == place.checkpoint)
        lost = (
            CheckpointRow.serial == place.checkpoint,
            CheckpointRow.state != "replaced",
            ~elsewhere,
        )
        connection.execute(sa.update(CheckpointRow).where(*lost).values(state="purged"))
        event(connection, "missing", stamp, place.checkpoint, url=place.url)
        forgotten.append(place.url)
    return forgotten


def _adopt_children(
    connection: Connection, ids: Mapping[str, int], urls: Mapping[str, int]
) -> None:
    """Link the edges of children that were recorded before their parents."""
    by_id = Edge.parent_id.in_(ids)
    by_url = sa.and_(Edge.parent_id.is_(None), Edge.parent_url.in_(urls))
    adopted = []
    for which in (by_id, by_url):
        orphans = sa.select(Edge.id, Edge.child, Edge.parent_id, Edge.parent_url)
        for edge in connection.execute(
            orphans.where(which, unindexed(Edge.parent).is_(None))
        ).all():
            parent = urls[edge.parent_url] if edge.parent_id is None else ids[edge.parent_id]
            if parent != edge.child:
                values: dict[str, Any] = {"parent": parent}
                connection.execute(sa.update(Edge).where(Edge.id == edge.id).values(values))
                adopted.append(edge.id)
    if adopted:
        link_launches(connection, Edge.id.in_(adopted))


def add_verification(
    connection: Connection,
    serial: int,
    url: str,
    *,
    problems: Sequence[str],
    stamp: Stamp,
    **values: Any,
) -> None:
    """Record the result of a verification."""
    stored = storable_json(problems[:100])
    row = {"checkpoint": serial, "url": url, "at": stamp.now, "problems": stored, **values}
    connection.execute(sa.insert(Verification).values(row))
    event(connection, "verify", stamp, serial, ok=values["ok"], problems=len(problems))


def add_certificate(
    connection: Connection,
    serial: int,
    url: str,
    *,
    ok: bool,
    document: Mapping[str, Any],
    stamp: Stamp,
) -> None:
    """Record what was found of the state of a training."""
    stored = storable_json(dict(document))
    row = {"checkpoint": serial, "url": url, "at": stamp.now, "ok": ok, "document": stored}
    connection.execute(sa.insert(CertificateRow).values(row))
    event(connection, "certify", stamp, serial, ok=ok, **_summary_of(stored))


def _summary_of(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """What the log tells of a certificate: the layout, and how many entries of each kind it has."""
    counts = {kind: n for kind, n in certificate["counts"].items() if n}
    return {"layout": certificate["layout"], **counts}
