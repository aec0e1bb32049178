"""The catalog's queries: each is one transaction, and returns frozen values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from ucformat.catalog import content, find_dependents, loading, refs, search, stamp
from ucformat.catalog.database import Database
from ucformat.catalog.entries import LineEntry
from ucformat.catalog.loading import load_entries
from ucformat.catalog.refs import parse_ref, resolve, same_url
from ucformat.catalog.rows import load_events
from ucformat.catalog.stamp import GRACE
from ucformat.errors import PermissionDenied

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta
    from types import TracebackType

    from ucformat.catalog.content import ListedTensor
    from ucformat.catalog.deletion import PurgePlan
    from ucformat.catalog.diff import Diff
    from ucformat.catalog.entries import AliasEntry, Entry, MoveEntry
    from ucformat.catalog.lineage import Lineage
    from ucformat.catalog.refs import LocationEntry
    from ucformat.catalog.rows import EventEntry
    from ucformat.catalog.sql import QueryResult
    from ucformat.schema.manifest import Manifest


class CatalogReader:
    """The queries of a catalog."""

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
        return stamp.make_stamp().who

    @property
    def empty(self) -> bool:
        """Whether no checkpoint was ever recorded."""
        with self._database.reading() as c:
            return search.is_empty(c)

    def _dependents(self, places: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
        """The others that need the files of checkpoints, by id, according to the records beside them."""
        found = find_dependents(places)
        ours = {self._database.identity} if found else set()  # our own rows are asked anyway
        return {c: others - ours for c, others in found.items() if others - ours}

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ucformat.Catalog {self.url}>"

    def find(
        self,
        where: str = "",
        *,
        sort: str = search.NEWEST,
        limit: int | None = None,
        offset: int = 0,
        deleted: bool = False,
    ) -> list[Entry]:
        """Find the checkpoints that match a filter (docs/filters.md).

        Args:
            deleted: include those that are no longer committed (default: only if the filter uses
                `state`).
        """
        with self._database.reading() as c:
            found = search.find_serials(
                c, where, stamp.now(), sort=sort, limit=limit, offset=offset, deleted=deleted
            )
            return load_entries(c, found, stamp.now())

    def count(self, where: str = "", *, deleted: bool = False) -> int:
        """Count the checkpoints that match a filter.

        Args:
            deleted: include those that are no longer committed (default: only if the filter uses
                `state`).
        """
        with self._database.reading() as c:
            return search.count_checkpoints(c, where, stamp.now(), deleted=deleted) or 0

    def count_few(self, where: str = "", *, deleted: bool = False) -> int | None:
        """As `count`, but None if more than 10,000 checkpoints would have to be tested."""
        with self._database.reading() as c:
            return search.count_checkpoints(c, where, stamp.now(), deleted=deleted, most=10_000)

    def lines(self, where: str = "") -> list[LineEntry]:
        """Find the lines of all runs (docs/catalog.md), by run."""
        with self._database.reading() as c:
            found = search.find_lines(c, where, stamp.now())
            heads = load_entries(c, [serial for _, serial, _, _ in found], stamp.now())
            return [
                LineEntry(run, head, number, nbytes)
                for (run, _, number, nbytes), head in zip(found, heads, strict=True)
            ]

    def get(self, ref: str) -> Entry:
        """Look up a checkpoint."""
        with self._database.reading() as c:
            return load_entries(c, [resolve(c, parse_ref(ref))], stamp.now())[0]

    def between(self, run: str, first: int, last: int) -> list[Entry]:
        """The committed checkpoints of a run at a range of steps, in order of steps."""
        with self._database.reading() as c:
            return load_entries(c, refs.resolve_between(c, run, first, last), stamp.now())

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
            found = content.find_digest(c, digest)
            loaded = dict(zip(found, load_entries(c, list(found), stamp.now()), strict=True))
            return [(loaded[s], t) for s, tensors in found.items() for t in tensors]

    def lineage(
        self, ref: str, direction: Literal["up", "down"] = "up", depth: int | None = None
    ) -> Lineage:
        """Follow the lineage of a checkpoint."""
        from ucformat.catalog.lineage import load_lineage

        with self._database.reading() as c:
            return load_lineage(c, resolve(c, parse_ref(ref)), direction, depth, stamp.now())

    def diff(self, a: str, b: str) -> Diff:
        """Compare configuration, tensors, topology and metrics of two checkpoints, without reading tensors."""
        from ucformat.catalog.diff import diff

        with self._database.reading() as c:
            return diff(c, resolve(c, parse_ref(a)), resolve(c, parse_ref(b)), stamp.now())

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
        """List what protects a checkpoint at a place from deletion, even if it is not in the catalog.

        Args:
            annotations: include its holds, tags and aliases (default: True), not only checkpoints
                that need its files.
        """
        from ucformat.catalog import deletion

        with self._database.reading() as c:
            return deletion.protections_at(
                c, checkpoint, same_url(url), stamp.now(), annotations=annotations
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
        from ucformat.catalog.retention import REMOVED, retention_rows

        with self._database.reading() as c:
            plan = plan_purge(
                retention_rows(c, stamp.now(), states=REMOVED), stamp.now(), grace, stamp.clocks(c)
            )
        needed = self._dependents({r.id: r.places for r in plan.purge})
        if not needed:
            return plan
        with self._database.reading() as c:
            rows = retention_rows(c, stamp.now(), states=REMOVED, needed=needed)
            return plan_purge(rows, stamp.now(), grace, stamp.clocks(c))
