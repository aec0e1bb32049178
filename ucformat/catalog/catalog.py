"""The catalog's public interface: each method is one transaction, and takes and returns frozen values."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import sqlalchemy as sa

from ucformat.catalog import (
    content,
    find_dependents,
    labels,
    loading,
    on_change,
    recording,
    refs,
    search,
    thinners,
)
from ucformat.catalog import stamp as stamps
from ucformat.catalog.database import Database
from ucformat.catalog.labels import ANY
from ucformat.catalog.launches import load_beginnings
from ucformat.catalog.loading import load_entries
from ucformat.catalog.models import CheckpointRow
from ucformat.catalog.recording import Found
from ucformat.catalog.refs import parse_ref, places_of, resolve, resolve_committed, same_url
from ucformat.catalog.rows import TOUCHED, load_events, pages, touch
from ucformat.catalog.searches import Searches
from ucformat.catalog.stamp import GRACE, Stamp, make_stamp
from ucformat.errors import PermissionDenied, UcformatError, first_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import Connection

    from ucformat.catalog.content import ListedTensor
    from ucformat.catalog.deletion import PurgePlan
    from ucformat.catalog.diff import Diff
    from ucformat.catalog.entries import AliasEntry, Entry, MoveEntry
    from ucformat.catalog.lineage import Lineage
    from ucformat.catalog.refs import LocationEntry
    from ucformat.catalog.retention import RetentionPlan
    from ucformat.catalog.rows import EventEntry
    from ucformat.catalog.sql import QueryResult
    from ucformat.catalog.tracked import TrackedValues
    from ucformat.schema.documents import CatalogDoc
    from ucformat.schema.manifest import Manifest
    from ucformat.schema.policy import Policy

__all__ = ["GRACE", "Catalog"]

T = TypeVar("T")

_log = logging.getLogger("ucformat")


class Catalog(Searches):
    """A catalog of checkpoints in SQLite or PostgreSQL.

    Every method is one atomic transaction. A `ref` is a place, `run@step`, `run@latest`,
    `alias:name`, an id or the beginning of one.

    Args:
        url: a file's path, `sqlite:///…` or `postgresql://…` (default: the catalog of the
            settings).
        read_only: do not write; the database enforces it (default: False).
        upgrade: upgrade tables of an older ucformat (default: raise UpgradeNeeded).
    """

    def __init__(
        self, url: str | None = None, *, read_only: bool = False, upgrade: bool = False
    ) -> None:
        if url is None:
            from ucformat.settings import load_settings

            url = load_settings().catalog_url()
            if url is None:
                raise PermissionDenied(
                    "the catalog is switched off", hint="set UCP_CATALOG or pass --catalog URL"
                )
        self._database = Database(url, read_only=read_only, upgrade=upgrade)

    @property
    def url(self) -> str:
        """Its url, without the password."""
        return self._database.url

    @property
    def database(self) -> Database:
        """The database, for internal use."""
        return self._database

    @property
    def who(self) -> str:
        """The user and host that the audit log records."""
        return make_stamp().who

    @property
    def empty(self) -> bool:
        """Whether no checkpoint was ever recorded."""
        with self._database.reading() as c:
            return search.is_empty(c)

    def _dependents(self, places: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
        """The others that need the files of checkpoints, by id, according to the records beside them."""
        dependents = find_dependents(places)
        ours = {self._database.identity} if dependents else set()  # our own rows are asked anyway
        return {c: others - ours for c, others in dependents.items() if others - ours}

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ucformat.Catalog {self.url}>"

    def get(self, ref: str) -> Entry:
        """Look up a checkpoint."""
        with self._database.reading() as c:
            return load_entries(c, [resolve(c, parse_ref(ref))], stamps.now())[0]

    def between(self, run: str, first: int, last: int) -> list[Entry]:
        """The committed checkpoints of a run at a range of steps, in order of steps."""
        with self._database.reading() as c:
            return load_entries(c, refs.resolve_between(c, run, first, last), stamps.now())

    def beginnings(self, run: str) -> dict[str | None, int]:
        """The counts of commits of the checkpoints of a run with which its launches began, by launch."""
        with self._database.reading() as c:
            return load_beginnings(c, run)

    def commits(self, run: str) -> int:
        """The greatest count of commits of a run's checkpoints, whether they still exist or not; 0 if none is known."""
        with self._database.reading() as c:
            return refs.greatest_commits(c, run)

    def places(self, root: str) -> list[LocationEntry]:
        """The recorded places of checkpoints at or below a root, sorted by url."""
        with self._database.reading() as c:
            return refs.locations(c, same_url(root))

    def listings(self, root: str) -> dict[str, tuple[str, str]]:
        """The recorded file listings of the checkpoints at or below a root.

        Returns:
            By url, the checkpoint's id and the hash of its file listing.
        """
        with self._database.reading() as c:
            return refs.listings(c, same_url(root))

    def tensors(self, ref: str) -> list[ListedTensor]:
        """The tensors of a checkpoint, in the order of its manifest."""
        with self._database.reading() as c:
            return content.load_tensors(c, resolve(c, parse_ref(ref)))

    def holding(self, digest: str) -> list[tuple[Entry, ListedTensor]]:
        """Find the checkpoints and tensors with a content digest."""
        with self._database.reading() as c:
            tensors_by_serial = content.find_digest(c, digest)
            loaded = dict(
                zip(
                    tensors_by_serial,
                    load_entries(c, list(tensors_by_serial), stamps.now()),
                    strict=True,
                )
            )
            return [(loaded[s], t) for s, tensors in tensors_by_serial.items() for t in tensors]

    def lineage(
        self, ref: str, direction: Literal["up", "down"] = "up", depth: int | None = None
    ) -> Lineage:
        """Follow the lineage of a checkpoint."""
        from ucformat.catalog.lineage import load_lineage

        with self._database.reading() as c:
            return load_lineage(c, resolve(c, parse_ref(ref)), direction, depth, stamps.now())

    def diff(self, a: str, b: str) -> Diff:
        """Compare configuration, tensors, topology and metrics of two checkpoints, without reading tensors."""
        from ucformat.catalog.diff import diff

        with self._database.reading() as c:
            return diff(c, resolve(c, parse_ref(a)), resolve(c, parse_ref(b)), stamps.now())

    def sql(
        self,
        statement: str,
        limit: int | None = None,
        *,
        timeout: float | None = 60,
        memory: int | None = None,
        trust_role: bool = False,
    ) -> QueryResult:
        """Run one read-only SQL query, which the database enforces.

        Args:
            limit: the maximum number of rows (default: all, up to 256 MiB).
            timeout: seconds until the query is cancelled; None for no limit (default: 60).
            memory: bytes that SQLite may allocate in this process from now on (default: no limit).
            trust_role: allow a PostgreSQL role that may do more than read tables (default: False).
        """
        from ucformat.catalog.sql import run_sql

        return run_sql(
            self._database, statement, limit, timeout=timeout, memory=memory, trust_role=trust_role
        )

    def excess_rights(self) -> str | None:
        """What else than reading tables the PostgreSQL role may do, for which `sql` refuses it; None if nothing."""
        from ucformat.catalog.sql import excess_rights

        return excess_rights(self._database)

    def events(self, ref: str | None = None, limit: int = 100) -> list[EventEntry]:
        """The last events of the audit log, newest first."""
        with self._database.reading() as c:
            return load_events(c, None if ref is None else resolve(c, parse_ref(ref)), limit)

    def aliases(self) -> list[AliasEntry]:
        """All aliases, sorted by name."""
        with self._database.reading() as c:
            return loading.load_aliases(c)

    def alias_history(self, name: str) -> list[MoveEntry]:
        """The moves of an alias, oldest first."""
        with self._database.reading() as c:
            return loading.load_alias_history(c, name)

    def protections(
        self, checkpoint: str, url: str, *, annotations: bool = True
    ) -> tuple[str, ...]:
        """List what protects a checkpoint at a place from deletion, in the catalog or not.

        Args:
            annotations: include its holds, tags and aliases (default: True), not only checkpoints
                that need its files.
        """
        from ucformat.catalog import deletion

        with self._database.reading() as c:
            return deletion.protections_at(
                c, checkpoint, same_url(url), stamps.now(), annotations=annotations
            )

    def contradiction(self, manifest: Manifest, url: str) -> str | None:
        """Whether the manifest at a place contradicts the checkpoint that is recorded there under the same id.

        Returns:
            The contradiction; None if it is the same checkpoint, perhaps in the form that
            `materialize` makes, or if the catalog does not have it there.
        """
        with self._database.reading() as c:
            return content.contradiction(c, manifest, same_url(url))

    def purgeable(self, grace: timedelta = GRACE) -> PurgePlan:
        """Plan which deleted checkpoints `gc` may remove from storage now.

        Args:
            grace: the grace period of those that have none of their own (default: 7 days).
        """
        from ucformat.catalog.deletion import plan_purge
        from ucformat.catalog.models import REMOVED
        from ucformat.catalog.retention import retention_rows

        with self._database.reading() as c:
            plan = plan_purge(
                retention_rows(c, stamps.now(), states=REMOVED),
                stamps.now(),
                grace,
                stamps.clocks(c),
            )
        needed = self._dependents({r.id: r.places for r in plan.purge})
        if not needed:
            return plan
        with self._database.reading() as c:
            rows = retention_rows(c, stamps.now(), states=REMOVED, needed=needed)
            return plan_purge(rows, stamps.now(), grace, stamps.clocks(c))

    def record(
        self,
        manifest: Manifest,
        url: str,
        *,
        kind: str = "ucformat",
        run: str | None = None,
        files: tuple[int, int] | None = None,
        replace_config: bool = False,
        listing: str | None = None,
    ) -> Entry:
        """Record a checkpoint at a place. If its id is known, only the place is added, and the run if given.

        Args:
            manifest: the manifest; of a foreign checkpoint, one that describes it, with an id.
            url: the place.
            kind: `ucformat`, or the engine that wrote it.
            run: its run (default: the manifest's, else the name of the parent folder).
            files: of a foreign checkpoint, the number of its files and their bytes.
            replace_config: of a foreign checkpoint, replace a recorded configuration (default:
                False).
            listing: a hash of the file listing, by which `register` recognises unchanged
                checkpoints.

        Returns:
            The checkpoint's entry.

        Raises:
            Conflict: another checkpoint has its id.
        """
        checkpoint = Found(manifest, same_url(url), kind, run, files, replace_config, listing)
        stamp = make_stamp()

        def work(c: Connection) -> Entry:
            return load_entries(c, recording.record_all(c, [checkpoint], stamp), stamp.now)[0]

        return self._write(work)

    def record_all(self, found: Iterable[Found]) -> None:
        """Record checkpoints, all of them or none: much faster than one at a time.

        Args:
            found: the checkpoints and their places, as for `record`.

        Raises:
            Conflict: another checkpoint has the id of one.
        """
        stamp, normal = make_stamp(), [replace(f, url=same_url(f.url)) for f in found]

        def work(c: Connection) -> None:
            for page in pages(normal):
                recording.record_all(c, page, stamp)

        self._write(work)

    def import_document(
        self, checkpoint: str, doc: CatalogDoc, url: str, *, trust: bool = False
    ) -> Entry:
        """Import the document beside a checkpoint, which another catalog or this one wrote; log warnings for refusals.

        Args:
            checkpoint: the id.
            doc: the document.
            url: the place.
            trust: apply all of it (default: move no alias, undo nothing recorded here, restart
                grace periods).

        Returns:
            The checkpoint's entry.
        """
        from ucformat.catalog.document import import_document

        stamp, url = make_stamp(), same_url(url)

        def work(c: Connection) -> tuple[Entry, list[str]]:
            serial = c.execute(
                sa.select(CheckpointRow.serial).where(CheckpointRow.id == checkpoint)
            ).scalar_one()
            refused = import_document(c, serial, doc, url, stamp, trust=trust)
            return load_entries(c, [serial], stamp.now)[0], refused

        entry, refused = self._database.write(work)
        for message in refused:
            _log.warning("%s; --trust-documents moves it", message)
        return entry

    def forget(self, places: Collection[LocationEntry]) -> list[str]:
        """Remove places where checkpoints no longer exist, unless one was seen there since.

        A checkpoint without a place becomes purged, and no longer protects the files that it
        needed.

        Args:
            places: the places, as `places` returned them.

        Returns:
            The urls that were removed.
        """
        stamp = make_stamp()
        return self._database.write(lambda c: recording.forget(c, places, stamp))

    def link(self, child: str, parent: str, kind: str) -> None:
        """Record that a checkpoint was made from another.

        Args:
            child: a reference.
            parent: a reference, or a place that is not in the catalog.
            kind: how, such as `finetune` or `convert`.

        Raises:
            UsageError: the kind is unknown, or the parent descends from the child.
        """
        from ucformat.catalog.lineage import add_link

        stamp = make_stamp()

        def work(c: Connection) -> None:
            serial = resolve(c, parse_ref(child))
            if add_link(c, serial, parent, kind, stamp):
                touch(c, [serial])

        self._write(work)

    def verified(
        self,
        ref: str,
        *,
        url: str,
        ok: bool,
        bytes_verified: int,
        bytes_unverified: int,
        problems: Sequence[str] = (),
        tool: str = "",
    ) -> None:
        """Record the result of a verification.

        Args:
            ref: the checkpoint.
            url: the place that was verified.
            ok: whether no problem was found.
            bytes_verified: bytes that were checked against checksums.
            bytes_unverified: bytes without checksums.
            problems: the problems; the first 100 are stored.
            tool: the program and its version.
        """
        stamp = make_stamp()
        values = {
            "ok": ok,
            "bytes_verified": bytes_verified,
            "bytes_unverified": bytes_unverified,
            "tool": tool,
        }

        def work(c: Connection) -> None:
            serial = resolve(c, parse_ref(ref))
            recording.add_verification(
                c, serial, same_url(url), problems=problems, stamp=stamp, **values
            )

        self._write(work)

    def certified(self, ref: str, *, url: str, ok: bool, document: Mapping[str, Any]) -> None:
        """Record what was found of the state of a training.

        Args:
            ref: the checkpoint that it was compared with.
            url: its place.
            ok: whether everything is equal.
            document: that of `ucformat.torch.Certificate`.
        """
        stamp = make_stamp()

        def work(c: Connection) -> None:
            serial = resolve(c, parse_ref(ref))
            recording.add_certificate(
                c, serial, same_url(url), ok=ok, document=document, stamp=stamp
            )

        self._write(work)

    def retain(
        self, policy: Policy, *, apply: str | None = None, thin_needed: bool = False
    ) -> RetentionPlan:
        """Plan what a policy keeps, thins and deletes, or apply such a plan.

        Args:
            policy: the policy.
            apply: the id of a plan to apply; the checkpoints that it deletes can be restored in
                their grace, the states that it drops cannot (default: only plan).
            thin_needed: delete also what is kept only because others need it; `gc` keeps its files
                until it may thin it to what they need (default: no).

        Returns:
            The plan.

        Raises:
            Conflict: the plan has changed; nothing was deleted or dropped.
            UcformatError: some checkpoints were not thinned; all others were, and what is to be
                deleted was.
        """
        from ucformat.catalog import deletion

        stamp = make_stamp()
        with self._database.reading() as c:
            first = deletion.plan(c, policy, stamp.now, thin_needed=thin_needed)
        changing = (*first.delete, *(thinned.row for thinned in first.thin))
        needed = self._dependents({r.id: r.places for r in changing})
        if apply is not None:
            plan = self._write(
                lambda c: deletion.apply_plan(
                    c, policy, apply, stamp, needed=needed, thin_needed=thin_needed
                )
            )
            self._thin(plan)
            return plan
        if not needed:
            return first
        with self._database.reading() as c:
            return deletion.plan(c, policy, stamp.now, needed=needed, thin_needed=thin_needed)

    def _thin(self, plan: RetentionPlan) -> None:
        """Drop the states that a plan drops."""
        failures = []
        for thinned in plan.thin:
            for url, thinner in product(thinned.row.places, thinners):
                try:
                    left = thinner(url, thinned.row.id, thinned.states, f"plan {plan.id}")
                    self.record(left, url)  # perhaps not the catalog of the settings
                except UcformatError as error:
                    failures.append(f"{thinned.row.name}: {error.message}")
        if failures:
            raise UcformatError(
                f"{len(failures)} of {len(plan.thin)} checkpoints were not thinned: "
                f"{first_names(failures, 3, '; ')}",
                hint="plan and apply again when that is resolved",
            )

    def delete(self, *refs: str, grace: timedelta = GRACE, thin_needed: bool = False) -> None:
        """Delete checkpoints, all of them or none. They can be restored until `gc` removes them.

        Args:
            refs: the checkpoints.
            grace: for how long `gc` must not remove them (default: 7 days).
            thin_needed: also those that others need, of which `gc` keeps the files until it may
                thin them to what these need (default: no).

        Raises:
            PermissionDenied: one has an alias, tag or hold, is needed by another, or was not
                written by ucformat.
        """
        from ucformat.catalog import deletion

        stamp = make_stamp()
        with self._database.reading() as c:
            serials = [resolve(c, parse_ref(r)) for r in refs]
            places = places_of(c, serials)
        needed = self._dependents(places)
        self._write(
            lambda c: deletion.delete(
                c, serials, grace, stamp, why={}, needed=needed, thin_needed=thin_needed
            )
        )

    def restore(self, *refs: str) -> None:
        """Restore deleted checkpoints, all of them or none.

        Args:
            refs: the checkpoints.

        Raises:
            PermissionDenied: one is not deleted, or is being purged.
        """
        from ucformat.catalog import deletion

        stamp = make_stamp()
        self._write(lambda c: deletion.restore(c, [resolve(c, parse_ref(r)) for r in refs], stamp))

    def alias(self, name: str, ref: str, *, expect: Any = ANY) -> None:
        """Point an alias to a checkpoint.

        Args:
            name: the alias.
            ref: the checkpoint.
            expect: where it must point now, a reference; None if it must not exist (default:
                anywhere).

        Raises:
            Conflict: it points elsewhere.
        """

        def move(c: Connection, stamp: Stamp, old: Any) -> Iterable[int]:
            return labels.move_alias(
                c, name, resolve_committed(c, ref, labels.alias_target(c, name)), old, stamp
            )

        self._move(move, expect)

    def unalias(self, name: str, *, expect: Any = ANY) -> None:
        """Remove an alias, and keep its history.

        Args:
            name: the alias.
            expect: where it must point now, a reference (default: anywhere).

        Raises:
            Conflict: it points elsewhere.
            NotFound: it does not exist.
        """
        self._move(lambda c, stamp, old: labels.remove_alias(c, name, old, stamp), expect)

    def _move(self, move: Callable[[Connection, Stamp, Any], Iterable[int]], expect: Any) -> None:
        stamp = make_stamp()

        def work(c: Connection) -> None:
            old = resolve(c, parse_ref(expect)) if isinstance(expect, str) else expect
            touch(c, move(c, stamp, old))

        self._write(work)

    def tag(self, ref: str, *tags: str, permanent: bool = False) -> None:
        """Add tags to a checkpoint, which protect it from deletion.

        Args:
            ref: the checkpoint.
            tags: their names.
            permanent: they cannot be removed (default: `untag` removes them).
        """
        self._annotate(
            ref,
            lambda c, serial, stamp: labels.add_tags(c, serial, tags, stamp, permanent=permanent),
        )

    def untag(self, ref: str, *tags: str, reason: str) -> None:
        """Remove tags from a checkpoint, all of them or none.

        Args:
            ref: the checkpoint.
            tags: their names.
            reason: why, for the audit log.

        Raises:
            NotFound: it does not have one of them.
            PermissionDenied: one is permanent.
            UsageError: the reason is empty.
        """
        self._annotate(
            ref,
            lambda c, serial, stamp: labels.remove_tags(c, serial, tags, reason, stamp),
            any_state=True,
        )

    def hold(self, ref: str, reason: str, until: datetime | timedelta | None = None) -> int:
        """Protect a checkpoint from deletion.

        Args:
            ref: the checkpoint.
            reason: why.
            until: a time or a duration from now (default: until it is released).

        Returns:
            The number of the hold.
        """
        return self._annotate(
            ref, lambda c, serial, stamp: labels.add_hold(c, serial, reason, until, stamp)
        )

    def release(self, ref: str, number: int | None = None) -> int:
        """Release holds on a checkpoint.

        Args:
            ref: the checkpoint.
            number: the number of the hold (default: all holds).

        Returns:
            How many were released.
        """
        return self._annotate(
            ref,
            lambda c, serial, stamp: labels.release_holds(c, serial, stamp, number),
            any_state=True,
        )

    def metric(self, ref: str, metrics: Mapping[str, float]) -> None:
        """Set metrics of a checkpoint, replacing those with the same names.

        Args:
            ref: the checkpoint.
            metrics: the values, by name.
        """
        self._annotate(ref, lambda c, serial, stamp: labels.add_metrics(c, serial, metrics, stamp))

    def add_tracked(
        self, tracker: str, values: Mapping[str, TrackedValues], *, replace: bool = False
    ) -> None:
        """Record what a tracker of experiments has of checkpoints, of all of them or of none.

        Args:
            tracker: its name, below which configurations get its part.
            values: metrics and that part, by the ids of checkpoints.
            replace: replace metrics with other values (default: they are kept).
        """
        from ucformat.catalog.tracked import add_tracked

        stamp = make_stamp()

        def work(c: Connection) -> None:
            serials = {id_: resolve_committed(c, id_) for id_ in values}
            touch(
                c,
                [
                    serial
                    for id_, serial in serials.items()
                    if add_tracked(c, serial, tracker, values[id_], stamp, replace=replace)
                ],
            )

        self._write(work)

    def note(self, ref: str, text: str) -> None:
        """Add a note to a checkpoint.

        Args:
            ref: the checkpoint.
            text: the note.
        """
        self._annotate(ref, lambda c, serial, stamp: labels.add_note(c, serial, text, stamp))

    def _annotate(
        self, ref: str, change: Callable[[Connection, int, Stamp], T], *, any_state: bool = False
    ) -> T:
        stamp = make_stamp()

        def work(c: Connection) -> T:
            serial = resolve(c, parse_ref(ref)) if any_state else resolve_committed(c, ref)
            result = change(c, serial, stamp)
            if result or result is None:
                touch(c, [serial])
            else:  # nothing changes, but an earlier process may have died before it wrote the document
                c.info[TOUCHED].add(serial)
            return result

        return self._write(work)

    def _write(self, work: Callable[[Connection], T]) -> T:
        def tracked(c: Connection) -> tuple[T, frozenset[int]]:
            c.info[TOUCHED] = set()
            return work(c), frozenset(c.info[TOUCHED])

        result, touched = self._database.write(tracked)
        for listener in on_change if touched else ():
            listener(self, touched)
        return result
