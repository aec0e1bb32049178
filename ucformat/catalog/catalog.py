"""The face of the catalog: frozen values in and out, one transaction a call."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from ucformat.catalog import find_dependents, labels, on_change, recording
from ucformat.catalog.columns import storable_json
from ucformat.catalog.entries import load_entries
from ucformat.catalog.labels import ANY
from ucformat.catalog.models import Checkpoint, Verification
from ucformat.catalog.reader import CatalogReader
from ucformat.catalog.refs import parse_ref, resolve, same_url
from ucformat.catalog.rows import TOUCHED, event, lock, touch
from ucformat.catalog.stamp import GRACE, Stamp, make_stamp
from ucformat.errors import Conflict, PermissionDenied, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from sqlalchemy import Connection

    from ucformat.catalog.entries import Entry
    from ucformat.catalog.recording import LocationEntry
    from ucformat.catalog.retention import RetentionPlan
    from ucformat.schema.documents import CatalogDoc
    from ucformat.schema.manifest import Manifest
    from ucformat.schema.policy import Policy

__all__ = ["GRACE", "Catalog"]

T = TypeVar("T")

_log = logging.getLogger("ucformat")

_PROBLEMS = 100  # of a damaged checkpoint so many are kept


class Catalog(CatalogReader):
    """A catalog of checkpoints in SQLite or PostgreSQL.

    Every method is one transaction: it happens as a whole or not at all, whoever else works on the catalog. A `ref` is
    a place, `run@step`, `run@latest`, `alias:name`, an id or the beginning of one.

    Args:
        url: a file's path, `sqlite:///…` or `postgresql://…`; None for the one that the settings name.
        read_only: never write, and let the database see to it.
        upgrade: bring tables of an older ucformat up to date; without it, they are UpgradeNeeded.
    """

    # What happens to it

    def record(
        self,
        manifest: Manifest,
        url: str,
        *,
        kind: str = "ucformat",
        run: str | None = None,
        files: tuple[int, int] | None = None,
        said: bool = False,
        listing: str | None = None,
    ) -> Entry:
        """Record a checkpoint that lies at `url`; one whose id is known only gets the place, and the run if given.

        Args:
            manifest: what it holds; of a foreign one, the manifest that describes it, with an id.
            url: where it lies.
            kind: `ucformat`, or the engine that wrote it.
            run: its run; by default the manifest's, else the name of the folder that the checkpoint's folder is in.
            files: of a foreign one, in how many files its extents lie, and how large these are.
            listing: the hash of what its files are, by which `register` knows it again without reading it.
            said: of a foreign one, that somebody said the manifest's configuration: it also replaces a known one.

        Raises:
            Conflict: another checkpoint is known by its id.
        """
        stamp, url = make_stamp(), same_url(url)

        def work(c: Connection) -> Entry:
            given = run or manifest.run
            where = given or _folder(url)
            about: dict[str, Any] = {"kind": kind, "run": where, "files": files, "said": said, "listing": listing}
            serial = recording.record(c, manifest, url, now=stamp.now, who=stamp.who, **about)
            if run is not None and recording.set_run(c, serial, run, stamp.now):
                touch(c, [serial])
            return load_entries(c, [serial], stamp.now)[0]

        return self._write(work)

    def absorb(self, checkpoint: str, doc: CatalogDoc, url: str, *, trust: bool = False) -> Entry:
        """Take in what another catalog, or this one before it was lost, wrote beside the checkpoint of this id.

        What is refused is a warning.

        Args:
            checkpoint: the id.
            doc: what lies beside it.
            url: the place where it does, for which alone it speaks.
            trust: believe it as if all had been said here; otherwise it moves no name, takes back nothing that was said
                here, and what it says to be deleted gets a new grace.
        """
        from ucformat.catalog.document import absorb

        stamp, url = make_stamp(), same_url(url)

        def work(c: Connection) -> tuple[Entry, list[str]]:
            serial = c.execute(sa.select(Checkpoint.serial).where(Checkpoint.id == checkpoint)).scalar_one()
            refused = absorb(c, serial, doc, url, stamp, trust=trust)
            return load_entries(c, [serial], stamp.now)[0], refused

        entry, refused = self._database.write(work)
        for what in refused:
            _log.warning("%s; --trust-documents believes it", what)
        return entry

    def forget(self, places: Collection[LocationEntry]) -> list[str]:
        """Forget that checkpoints lie in these places, if none was seen there since; the urls that were forgotten.

        A checkpoint that lies nowhere any more is purged, and no longer protects what its bytes lay in.
        """
        stamp = make_stamp()
        return self._database.write(lambda c: recording.forget(c, places, now=stamp.now, who=stamp.who))

    def link(self, child: str, parent: str, kind: str) -> None:
        """Say from what a checkpoint was made; `parent` may be a place that the catalog does not know.

        Raises:
            UsageError: an unknown kind of edge, or the parent descends from the child.
        """
        stamp = make_stamp()
        from ucformat.schema.manifest import LineageDoc

        known = LineageDoc.model_fields["kind"].annotation.__args__  # type: ignore[union-attr]
        if kind not in known:
            raise UsageError(f"{kind!r} is not a kind of lineage", hint=f"there are: {', '.join(known)}")

        def work(c: Connection) -> None:
            from ucformat.catalog.lineage import add_link

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
        """Note what a verification of a checkpoint found, in one of the places where it lies."""
        stamp = make_stamp()
        values = {"ok": ok, "bytes_verified": bytes_verified, "bytes_unverified": bytes_unverified, "tool": tool}

        def work(c: Connection) -> None:
            serial = resolve(c, parse_ref(ref))
            c.execute(
                sa.insert(Verification).values(
                    checkpoint=serial,
                    url=same_url(url),
                    at=stamp.now,
                    problems=storable_json(problems[:_PROBLEMS]),
                    **values,
                )
            )
            event(c, "verify", stamp.who, stamp.now, serial, ok=ok, problems=len(problems))

        self._write(work)

    # What may go

    def retain(self, policy: Policy, *, apply: str | None = None) -> RetentionPlan:
        """What a policy keeps and deletes; with `apply`, the id of a plan that was looked at, it is deleted, softly.

        Raises:
            Conflict: the plan is another one by now; nothing was deleted.
        """
        from ucformat.catalog import deletion
        from ucformat.catalog.retention import plan_retention

        stamp = make_stamp()

        needed: dict[str, frozenset[str]] = {}

        def plan(c: Connection) -> RetentionPlan:
            about: dict[str, Any] = {"filters": policy.filters(), "metrics": policy.metrics(), "needed": needed}
            return plan_retention(policy, deletion.retention_rows(c, stamp.now, **about), stamp.now)

        with self._database.reading() as c:
            first = plan(c)
            places = deletion.places_of(c, [r.serial for r in first.delete])
        needed = find_dependents(places)
        if apply is None:
            if not needed:
                return first
            with self._database.reading() as c:
                return plan(c)

        def work(c: Connection) -> RetentionPlan:
            lock(c, [r.serial for r in plan(c).delete])
            found = plan(c)
            if found.id != apply:
                raise Conflict(
                    "the checkpoints have changed since the plan was made, and so has the plan: nothing was deleted",
                    hint="look at the new plan, and apply that",
                )
            serials = [r.serial for r in found.delete]
            deletion.delete(c, serials, found.grace, stamp, why={"plan": found.id}, needed=needed)
            return found

        return self._write(work)

    def delete(self, *refs: str, grace: timedelta = GRACE) -> None:
        """Delete checkpoints softly: all of them or none. They can be restored until `gc` finds the grace over.

        Raises:
            PermissionDenied: one is aliased, tagged, held, needed by another, or not written by ucformat.
        """
        from ucformat.catalog import deletion

        stamp = make_stamp()
        with self._database.reading() as c:
            serials = [resolve(c, parse_ref(r)) for r in refs]
            places = deletion.places_of(c, serials)
        needed = find_dependents(places)
        self._write(lambda c: deletion.delete(c, serials, grace, stamp, why={}, needed=needed))

    def restore(self, *refs: str) -> None:
        """Take deletions back: all of them or none."""
        from ucformat.catalog import deletion

        stamp = make_stamp()
        self._write(lambda c: deletion.restore(c, [resolve(c, parse_ref(r)) for r in refs], stamp))

    # What people say of it

    def alias(self, name: str, ref: str, *, expect: Any = ANY) -> None:
        """Point an alias to a checkpoint.

        Args:
            name: the alias.
            ref: the checkpoint.
            expect: to what it must point now, a reference; None if there must be none.

        Raises:
            Conflict: it points to something else.
        """

        def move(c: Connection, stamp: Stamp, old: Any) -> Iterable[int]:
            return labels.move_alias(c, name, _alive(c, ref, labels.alias_target(c, name)), old, stamp)

        self._move(move, expect)

    def unalias(self, name: str, *, expect: Any = ANY) -> None:
        """Remove an alias; its history stays."""
        self._move(lambda c, stamp, old: labels.remove_alias(c, name, old, stamp), expect)

    def _move(self, move: Callable[[Connection, Stamp, Any], Iterable[int]], expect: Any) -> None:
        stamp = make_stamp()

        def work(c: Connection) -> None:
            old = resolve(c, parse_ref(expect)) if isinstance(expect, str) else expect
            touch(c, move(c, stamp, old))

        self._write(work)

    def tag(self, ref: str, *tags: str, permanent: bool = False) -> None:
        """Put tags on a checkpoint, which keep it from being deleted.

        Args:
            ref: the checkpoint.
            tags: their names.
            permanent: they are never taken off again (default: `untag` takes them off).
        """
        self._say(ref, lambda c, serial, stamp: labels.add_tags(c, serial, tags, stamp, permanent=permanent))

    def untag(self, ref: str, *tags: str, reason: str) -> None:
        """Take tags off a checkpoint, all of them or none.

        Args:
            ref: the checkpoint.
            tags: their names.
            reason: why, for the log.

        Raises:
            NotFound: it does not bear one of them.
            PermissionDenied: one is permanent.
            UsageError: there is no reason.
        """
        self._say(ref, lambda c, serial, stamp: labels.remove_tags(c, serial, tags, reason, stamp), alive=False)

    def hold(self, ref: str, reason: str, until: datetime | timedelta | None = None) -> int:
        """Keep a checkpoint from being deleted, until a time or until it is released; the number of the hold."""
        return self._say(
            ref,
            lambda c, serial, stamp: labels.add_hold(
                c, serial, reason, stamp.now + until if isinstance(until, timedelta) else until, stamp
            ),
        )

    def release(self, ref: str, number: int | None = None) -> int:
        """End the holds on a checkpoint, or the one of this number; how many there were."""
        return self._say(ref, lambda c, serial, stamp: labels.release_holds(c, serial, stamp, number), alive=False)

    def metric(self, ref: str, metrics: Mapping[str, float]) -> None:
        """Write metrics of a checkpoint, in place of older ones of the same names."""
        self._say(ref, lambda c, serial, stamp: labels.add_metrics(c, serial, metrics, stamp))

    def note(self, ref: str, text: str) -> None:
        """Write something about a checkpoint."""
        self._say(ref, lambda c, serial, stamp: labels.add_note(c, serial, text, stamp))

    def _say(self, ref: str, say: Callable[[Connection, int, Stamp], T], *, alive: bool = True) -> T:
        stamp = make_stamp()

        def work(c: Connection) -> T:
            serial = _alive(c, ref) if alive else resolve(c, parse_ref(ref))
            found = say(c, serial, stamp)
            if found or found is None:
                touch(c, [serial])
            else:  # nothing changes, but whoever said it before may have been killed before it was in the document
                c.info[TOUCHED].add(serial)
            return found

        return self._write(work)

    def _write(self, work: Callable[[Connection], T]) -> T:
        def noting(c: Connection) -> tuple[T, frozenset[int]]:
            c.info[TOUCHED] = set()
            return work(c), frozenset(c.info[TOUCHED])

        found, touched = self._database.write(noting)
        for listener in on_change if touched else ():
            listener(self, touched)
        return found


def _alive(connection: Connection, ref: str, *others: int | None) -> int:
    """The serial of a checkpoint that is not purged or replaced; else PermissionDenied: nothing more can be said of it.

    It is locked, and `others` are along with it: one at a time, two transactions could wait for each other.
    """
    serial = resolve(connection, parse_ref(ref))
    state = lock(connection, {serial, *(o for o in others if o is not None)})[serial]
    if state != "committed":
        hint = "`ucp restore` brings it back" if state == "deleted" else "its bytes are gone"
        raise PermissionDenied(f"the checkpoint {ref} is {state}", hint=hint)
    return serial


def _folder(url: str) -> str | None:
    """The name of the folder that a checkpoint's folder is in."""
    parts = [p for p in url.partition("://")[2].split("/") if p] if "://" in url else [p for p in url.split("/") if p]
    return parts[-2] if len(parts) > 1 else None
