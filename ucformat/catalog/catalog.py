"""The catalog's public interface: each method is one transaction, and takes and returns frozen values."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from ucformat.catalog import labels, on_change, recording
from ucformat.catalog.labels import ANY
from ucformat.catalog.loading import load_entries
from ucformat.catalog.models import CheckpointRow
from ucformat.catalog.reader import CatalogReader
from ucformat.catalog.recording import Found
from ucformat.catalog.refs import parse_ref, places_of, resolve, resolve_committed, same_url
from ucformat.catalog.rows import MAX_IN_LIST, TOUCHED, touch
from ucformat.catalog.stamp import GRACE, Stamp, make_stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import Connection

    from ucformat.catalog.entries import Entry
    from ucformat.catalog.refs import LocationEntry
    from ucformat.catalog.retention import RetentionPlan
    from ucformat.schema.documents import CatalogDoc
    from ucformat.schema.manifest import Manifest
    from ucformat.schema.policy import Policy

__all__ = ["GRACE", "Catalog"]

T = TypeVar("T")

_log = logging.getLogger("ucformat")


class Catalog(CatalogReader):
    """A catalog of checkpoints in SQLite or PostgreSQL.

    Every method is one atomic transaction. A `ref` is a place, `run@step`, `run@latest`,
    `alias:name`, an id or the beginning of one.

    Args:
        url: a file's path, `sqlite:///…` or `postgresql://…` (default: the catalog of the
            settings).
        read_only: do not write; the database enforces it (default: False).
        upgrade: upgrade tables of an older ucformat (default: raise UpgradeNeeded).
    """

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
        found = Found(manifest, same_url(url), kind, run, files, replace_config, listing)
        stamp = make_stamp()

        def work(c: Connection) -> Entry:
            return load_entries(c, recording.record_all(c, [found], stamp), stamp.now)[0]

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
            for at in range(0, len(normal), MAX_IN_LIST):
                recording.record_all(c, normal[at : at + MAX_IN_LIST], stamp)

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

    def retain(self, policy: Policy, *, apply: str | None = None) -> RetentionPlan:
        """Plan what a policy keeps and deletes, or apply such a plan.

        Args:
            policy: the policy.
            apply: the id of a plan to apply; its checkpoints can be restored in their grace
                (default: only plan).

        Returns:
            The plan.

        Raises:
            Conflict: the plan has changed; nothing was deleted.
        """
        from ucformat.catalog import deletion

        stamp = make_stamp()
        with self._database.reading() as c:
            first = deletion.plan(c, policy, stamp.now)
        needed = self._dependents({r.id: r.places for r in first.delete})
        if apply is not None:
            return self._write(
                lambda c: deletion.apply_plan(c, policy, apply, stamp, needed=needed)
            )
        if not needed:
            return first
        with self._database.reading() as c:
            return deletion.plan(c, policy, stamp.now, needed=needed)

    def delete(self, *refs: str, grace: timedelta = GRACE) -> None:
        """Delete checkpoints, all of them or none. They can be restored until `gc` removes them.

        Args:
            refs: the checkpoints.
            grace: for how long `gc` must not remove them (default: 7 days).

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
        self._write(lambda c: deletion.delete(c, serials, grace, stamp, why={}, needed=needed))

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
            found = change(c, serial, stamp)
            if found or found is None:
                touch(c, [serial])
            else:  # nothing changes, but an earlier process may have died before it wrote the document
                c.info[TOUCHED].add(serial)
            return found

        return self._write(work)

    def _write(self, work: Callable[[Connection], T]) -> T:
        def tracked(c: Connection) -> tuple[T, frozenset[int]]:
            c.info[TOUCHED] = set()
            return work(c), frozenset(c.info[TOUCHED])

        found, touched = self._database.write(tracked)
        for listener in on_change if touched else ():
            listener(self, touched)
        return found
