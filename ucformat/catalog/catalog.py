"""The face of the catalog: frozen values in and out, one transaction a call."""

from __future__ import annotations

import getpass
import socket
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import sqlalchemy as sa

from ucformat.catalog import deletion, names, query, recording
from ucformat.catalog.document import absorb
from ucformat.catalog.engine import Database
from ucformat.catalog.entries import load
from ucformat.catalog.models import Checkpoint, Verification
from ucformat.catalog.names import ANY, Stamp
from ucformat.catalog.purge import plan_purge
from ucformat.catalog.refs import parse_ref, resolve, same_url
from ucformat.catalog.retention import plan_retention
from ucformat.errors import Conflict, Refused, UsageError
from ucformat.schema.manifest import LineageDoc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from types import TracebackType

    from sqlalchemy import Connection

    from ucformat.catalog.diff import Diff
    from ucformat.catalog.entries import Entry
    from ucformat.catalog.lineage import Lineage
    from ucformat.catalog.names import AliasEntry, MoveEntry
    from ucformat.catalog.purge import PurgePlan
    from ucformat.catalog.query import EventEntry, TensorEntry
    from ucformat.catalog.retention import RetentionPlan
    from ucformat.catalog.sql import Table
    from ucformat.schema.catalog_document import CatalogDoc
    from ucformat.schema.manifest import Manifest
    from ucformat.schema.policy import Policy

__all__ = ["GRACE", "Catalog", "on_change"]

T = TypeVar("T")

#: How long a deleted checkpoint can be restored, where nobody says.
GRACE = timedelta(days=7)

_PROBLEMS = 100  # of a damaged checkpoint so many are kept

#: Called after every change that the documents beside checkpoints have to hold (who writes them listens here).
on_change: list[Callable[[Catalog], object]] = []


class Catalog:
    """A catalog of checkpoints in SQLite or PostgreSQL.

    Every method is one transaction: it happens as a whole or not at all, whoever else works on the catalog. A `ref` is
    a place, `run@step`, `run@latest`, `alias:name`, an id or the beginning of one.

    Args:
        url: a file's path, `sqlite:///…` or `postgresql://…`; None for the one that the settings name.
        read_only: never write, and let the database see to it.
        upgrade: bring tables of an older ucformat up to date; without it, they are UpgradeNeeded.
    """

    def __init__(self, url: str | None = None, *, read_only: bool = False, upgrade: bool = False) -> None:
        if url is None:
            from ucformat.settings import load_settings

            url = load_settings().catalog_url()
            if url is None:
                raise Refused("the catalog is switched off", hint="set UCP_CATALOG, or give --catalog URL")
        self._database = Database(url, read_only=read_only, upgrade=upgrade)

    @property
    def url(self) -> str:
        """Where it is, without a password."""
        return self._database.url

    @property
    def database(self) -> Database:
        """The database: for the rooms above, not for users."""
        return self._database

    @property
    def who(self) -> str:
        """What the audit log calls us."""
        return _stamp().who

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ucformat.Catalog {self.url}>"

    # What there is

    def find(
        self,
        where: str = "",
        *,
        sort: str = "-created",
        limit: int | None = None,
        offset: int = 0,
        deleted: bool = False,
    ) -> list[Entry]:
        """The checkpoints that a filter takes, in order; with `deleted` also those that are no longer committed.

        A filter that speaks of `state` itself sees them all. The language is in docs/filters.md.

        Raises:
            UsageError: the filter or the sort cannot be read, or names a key that nobody has.
        """
        with self._database.reading() as c:
            found = query.find(c, where, _now(), sort=sort, limit=limit, offset=offset, deleted=deleted)
            return load(c, found, _now())

    def count(self, where: str = "", *, deleted: bool = False) -> int:
        """How many checkpoints a filter takes."""
        with self._database.reading() as c:
            return query.count(c, where, _now(), deleted=deleted)

    def get(self, ref: str) -> Entry:
        """The checkpoint that a reference means.

        Raises:
            NotFound: there is none.
            UsageError: the reference means several.
        """
        with self._database.reading() as c:
            return load(c, [resolve(c, parse_ref(ref))], _now())[0]

    def tensors(self, ref: str) -> list[TensorEntry]:
        """The tensors of a checkpoint, as its manifest lists them."""
        with self._database.reading() as c:
            return query.tensors(c, resolve(c, parse_ref(ref)))

    def holding(self, digest: str) -> list[tuple[Entry, TensorEntry]]:
        """The checkpoints that hold a tensor with this very content, and that tensor."""
        with self._database.reading() as c:
            found = query.holding(c, digest)
            entries = dict(zip(found, load(c, list(found), _now()), strict=True))
            return [(entries[s], t) for s, tensors in found.items() for t in tensors]

    def lineage(self, ref: str, direction: Literal["up", "down"] = "up", depth: int | None = None) -> Lineage:
        """What a checkpoint was made from (`up`), or what was made from it (`down`), so many steps far."""
        from ucformat.catalog.lineage import lineage

        with self._database.reading() as c:
            return lineage(c, resolve(c, parse_ref(ref)), direction, depth, _now())

    def diff(self, a: str, b: str) -> Diff:
        """In what two checkpoints differ: configuration, tensors, topology, metrics; reads no tensor."""
        from ucformat.catalog.diff import diff

        with self._database.reading() as c:
            return diff(c, resolve(c, parse_ref(a)), resolve(c, parse_ref(b)), _now())

    def sql(self, statement: str, limit: int | None = None) -> Table:
        """The rows of one SQL statement, which the database does not let write."""
        from ucformat.catalog.sql import run_sql

        return run_sql(self._database, statement, limit)

    def events(self, ref: str | None = None, limit: int = 100) -> list[EventEntry]:
        """The audit log, the newest first: of one checkpoint, or of all."""
        with self._database.reading() as c:
            return query.events(c, None if ref is None else resolve(c, parse_ref(ref)), limit)

    # What happens to it

    def record(
        self,
        manifest: Manifest,
        url: str,
        *,
        kind: str = "ucformat",
        run: str | None = None,
        files: tuple[int, int] | None = None,
    ) -> Entry:
        """Record a checkpoint that lies at `url`; one whose id is known only gets the place, and the run if given.

        Args:
            manifest: what it holds; of a foreign one, the manifest that describes it, with an id.
            url: where it lies.
            kind: `ucformat`, or the engine that wrote it.
            run: its run; by default the manifest's, else the name of the folder that the checkpoint's folder is in.
            files: of a foreign one, in how many files its extents lie, and how large these are.
        """
        stamp, url = _stamp(), same_url(url)

        def work(c: Connection) -> Entry:
            given = run or manifest.run
            serial = recording.record(
                c, manifest, url, kind=kind, run=given or _folder(url), files=files, now=stamp.now, who=stamp.who
            )
            if run is not None and recording.set_run(c, serial, run, stamp.now):
                names.touch(c, [serial])
            return load(c, [serial], stamp.now)[0]

        return self._write(work)

    def absorb(self, checkpoint: str, doc: CatalogDoc) -> Entry:
        """Take in what another catalog, or this one before it was lost, wrote beside the checkpoint of this id."""
        stamp = _stamp()

        def work(c: Connection) -> Entry:
            serial = c.execute(sa.select(Checkpoint.serial).where(Checkpoint.id == checkpoint)).scalar_one()
            absorb(c, serial, doc, stamp)
            return load(c, [serial], stamp.now)[0]

        return self._database.write(work)

    def forget_places(self, root: str, present: Collection[str]) -> list[str]:
        """Forget the places at or below `root` where nothing is any more, all but those `present`; gives them."""
        stamp = _stamp()
        return self._database.write(
            lambda c: recording.forget_places(c, same_url(root), present, now=stamp.now, who=stamp.who)
        )

    def link(self, child: str, parent: str, kind: str) -> None:
        """Say from what a checkpoint was made; `parent` may be a place that the catalog does not know.

        Raises:
            UsageError: an unknown kind of edge, or the parent descends from the child.
        """
        stamp = _stamp()
        known = LineageDoc.model_fields["kind"].annotation.__args__  # type: ignore[union-attr]
        if kind not in known:
            raise UsageError(f"{kind!r} is not a kind of lineage", hint=f"there are: {', '.join(known)}")

        def work(c: Connection) -> None:
            from ucformat.catalog.lineage import add_link

            serial = resolve(c, parse_ref(child))
            if add_link(c, serial, parent, kind, stamp):
                names.touch(c, [serial])

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
        stamp = _stamp()
        values = {"ok": ok, "bytes_verified": bytes_verified, "bytes_unverified": bytes_unverified, "tool": tool}

        def work(c: Connection) -> None:
            serial = resolve(c, parse_ref(ref))
            c.execute(
                sa.insert(Verification).values(
                    checkpoint=serial, url=same_url(url), at=stamp.now, problems=list(problems)[:_PROBLEMS], **values
                )
            )
            recording.event(c, "verify", stamp.who, stamp.now, serial, ok=ok, problems=len(problems))

        self._write(work)

    # What may go

    def retain(self, policy: Policy, *, apply: str | None = None) -> RetentionPlan:
        """What a policy keeps and deletes; with `apply`, the id of a plan that was looked at, it is deleted, softly.

        Raises:
            Conflict: the plan is another one by now; nothing was deleted.
        """
        stamp = _stamp()

        def plan(c: Connection) -> RetentionPlan:
            rows = deletion.retention_rows(c, stamp.now, filters=policy.filters(), metrics=policy.metrics())
            return plan_retention(policy, rows, stamp.now)

        if apply is None:
            with self._database.reading() as c:
                return plan(c)

        def work(c: Connection) -> RetentionPlan:
            deletion.lock(c, [r.serial for r in plan(c).delete])
            found = plan(c)
            if found.id != apply:
                raise Conflict(
                    "the checkpoints have changed since the plan was made, and so has the plan: nothing was deleted",
                    hint="look at the new plan, and apply that",
                )
            deletion.delete(c, [r.serial for r in found.delete], found.grace, stamp, why={"plan": found.id})
            return found

        return self._write(work)

    def delete(self, *refs: str, grace: timedelta = GRACE) -> None:
        """Delete checkpoints softly: all of them or none. They can be restored until `gc` finds the grace over.

        Raises:
            Refused: one is aliased, tagged, held, needed by another, or not written by ucformat.
        """
        stamp = _stamp()
        self._write(lambda c: deletion.delete(c, [resolve(c, parse_ref(r)) for r in refs], grace, stamp, why={}))

    def restore(self, *refs: str) -> None:
        """Take deletions back: all of them or none."""
        stamp = _stamp()
        self._write(lambda c: deletion.restore(c, [resolve(c, parse_ref(r)) for r in refs], stamp))

    def purgeable(self, grace: timedelta = GRACE) -> PurgePlan:
        """Which deleted checkpoints `gc` may remove from storage now; `grace` is for those without one of their own."""
        with self._database.reading() as c:
            return plan_purge(deletion.retention_rows(c, _now()), _now(), grace)

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
        self._move(lambda c, stamp, old: names.move_alias(c, name, _alive(c, ref), old, stamp), expect)

    def unalias(self, name: str, *, expect: Any = ANY) -> None:
        """Remove an alias; its history stays."""
        self._move(lambda c, stamp, old: names.remove_alias(c, name, old, stamp), expect)

    def _move(self, move: Callable[[Connection, Stamp, Any], Iterable[int]], expect: Any) -> None:
        stamp = _stamp()

        def work(c: Connection) -> None:
            old = resolve(c, parse_ref(expect)) if isinstance(expect, str) else expect
            names.touch(c, move(c, stamp, old))

        self._write(work)

    def aliases(self) -> list[AliasEntry]:
        """All aliases, by name."""
        with self._database.reading() as c:
            return names.aliases(c)

    def alias_history(self, name: str) -> list[MoveEntry]:
        """Where an alias pointed to, the first first."""
        with self._database.reading() as c:
            return names.alias_history(c, name)

    def tag(self, ref: str, *tags: str) -> None:
        """Put tags on a checkpoint. A tag stays for ever, and keeps the checkpoint from being deleted."""
        self._say(ref, lambda c, serial, stamp: names.add_tags(c, serial, tags, stamp))

    def hold(self, ref: str, reason: str, until: datetime | timedelta | None = None) -> int:
        """Keep a checkpoint from being deleted, until a time or until it is released; the number of the hold."""
        return self._say(
            ref,
            lambda c, serial, stamp: names.add_hold(
                c, serial, reason, stamp.now + until if isinstance(until, timedelta) else until, stamp
            ),
        )

    def release(self, ref: str, number: int | None = None) -> int:
        """End the holds on a checkpoint, or the one of this number; how many there were."""
        return self._say(ref, lambda c, serial, stamp: names.release_holds(c, serial, stamp, number), alive=False)

    def metric(self, ref: str, metrics: Mapping[str, float]) -> None:
        """Write metrics of a checkpoint, in place of older ones of the same names."""
        self._say(ref, lambda c, serial, stamp: names.add_metrics(c, serial, metrics, stamp))

    def note(self, ref: str, text: str) -> None:
        """Write something about a checkpoint."""
        self._say(ref, lambda c, serial, stamp: names.add_note(c, serial, text, stamp))

    def _say(self, ref: str, say: Callable[[Connection, int, Stamp], T], *, alive: bool = True) -> T:
        stamp = _stamp()

        def work(c: Connection) -> T:
            serial = _alive(c, ref) if alive else resolve(c, parse_ref(ref))
            found = say(c, serial, stamp)
            if found or found is None:
                names.touch(c, [serial])
            return found

        return self._write(work)

    def _write(self, work: Callable[[Connection], T]) -> T:
        found = self._database.write(work)
        for listener in on_change:
            listener(self)
        return found


def _alive(connection: Connection, ref: str) -> int:
    """The serial of a checkpoint that is not purged or replaced; else Refused: nothing more can be said of it."""
    serial = resolve(connection, parse_ref(ref))
    state = deletion.lock(connection, [serial])[serial]
    if state != "committed":
        hint = "`ucp restore` brings it back" if state == "deleted" else "its bytes are gone"
        raise Refused(f"the checkpoint {ref} is {state}", hint=hint)
    return serial


def _folder(url: str) -> str | None:
    """The name of the folder that a checkpoint's folder is in."""
    parts = [p for p in url.partition("://")[2].split("/") if p] if "://" in url else [p for p in url.split("/") if p]
    return parts[-2] if len(parts) > 1 else None


def _now() -> datetime:
    return datetime.now(UTC)


def _stamp() -> Stamp:
    user = "unknown"
    with suppress(OSError, KeyError):  # a user id without a name, as in many containers
        user = getpass.getuser()
    return Stamp(f"{user}@{socket.gethostname()}", _now())
