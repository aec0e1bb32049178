"""The questions that a catalog answers: frozen values out, one transaction each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from ucformat.catalog import content, entries, find_dependents, labels, recording, stamp
from ucformat.catalog.database import Database
from ucformat.catalog.entries import load_entries
from ucformat.catalog.refs import parse_ref, resolve, same_url
from ucformat.catalog.stamp import GRACE
from ucformat.errors import PermissionDenied

if TYPE_CHECKING:
    from datetime import timedelta
    from types import TracebackType

    from ucformat.catalog.diff import Diff
    from ucformat.catalog.entries import Entry, EventEntry, TensorEntry
    from ucformat.catalog.labels import AliasEntry, MoveEntry
    from ucformat.catalog.lineage import Lineage
    from ucformat.catalog.purge import PurgePlan
    from ucformat.catalog.recording import LocationEntry
    from ucformat.catalog.sql import Table
    from ucformat.schema.manifest import Manifest

__all__ = ["CatalogReader"]


class CatalogReader:
    """What can be asked of a catalog."""

    def __init__(self, url: str | None = None, *, read_only: bool = False, upgrade: bool = False) -> None:
        if url is None:
            from ucformat.settings import load_settings

            url = load_settings().catalog_url()
            if url is None:
                raise PermissionDenied("the catalog is switched off", hint="set UCP_CATALOG, or give --catalog URL")
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
        return stamp.make_stamp().who

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

    def find(
        self,
        where: str = "",
        *,
        sort: str = entries.NEWEST,
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
            found = entries.find_serials(c, where, stamp.now(), sort=sort, limit=limit, offset=offset, deleted=deleted)
            return load_entries(c, found, stamp.now())

    def count(self, where: str = "", *, deleted: bool = False) -> int:
        """How many checkpoints a filter takes."""
        with self._database.reading() as c:
            return entries.count_checkpoints(c, where, stamp.now(), deleted=deleted)

    def get(self, ref: str) -> Entry:
        """The checkpoint that a reference means.

        Raises:
            NotFound: there is none.
            UsageError: the reference means several.
        """
        with self._database.reading() as c:
            return load_entries(c, [resolve(c, parse_ref(ref))], stamp.now())[0]

    def places(self, root: str) -> list[LocationEntry]:
        """The places at or below `root` where checkpoints lie, as far as the catalog knows."""
        with self._database.reading() as c:
            return recording.places(c, same_url(root))

    def listings(self, root: str) -> dict[str, tuple[str, str]]:
        """Of the places at or below `root` that were read: the checkpoint's id, and the hash of what its files were."""
        with self._database.reading() as c:
            return recording.listings(c, same_url(root))

    def tensors(self, ref: str) -> list[TensorEntry]:
        """The tensors of a checkpoint, as its manifest lists them."""
        with self._database.reading() as c:
            return entries.load_tensors(c, resolve(c, parse_ref(ref)))

    def holding(self, digest: str) -> list[tuple[Entry, TensorEntry]]:
        """The checkpoints that hold a tensor with this very content, and that tensor."""
        with self._database.reading() as c:
            found = entries.find_digest(c, digest)
            loaded = dict(zip(found, load_entries(c, list(found), stamp.now()), strict=True))
            return [(loaded[s], t) for s, tensors in found.items() for t in tensors]

    def lineage(self, ref: str, direction: Literal["up", "down"] = "up", depth: int | None = None) -> Lineage:
        """What a checkpoint was made from (`up`), or what was made from it (`down`), so many steps far."""
        from ucformat.catalog.lineage import load_lineage

        with self._database.reading() as c:
            return load_lineage(c, resolve(c, parse_ref(ref)), direction, depth, stamp.now())

    def diff(self, a: str, b: str) -> Diff:
        """In what two checkpoints differ: configuration, tensors, topology, metrics; reads no tensor."""
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
    ) -> Table:
        """The rows of one SQL query, which the database does not let write.

        Args:
            statement: One SELECT, VALUES or WITH.
            limit: The most rows; None for all.
            timeout: Seconds until the query is ended; None for no limit.
            memory: Bytes that SQLite may take in this process, for good; None for no limit.
            trust_role: Whether to ask PostgreSQL under a role that may do more than read tables.
        """
        from ucformat.catalog.sql import run_sql

        return run_sql(self._database, statement, limit, timeout=timeout, memory=memory, trust_role=trust_role)

    def events(self, ref: str | None = None, limit: int = 100) -> list[EventEntry]:
        """The audit log, the newest first: of one checkpoint, or of all."""
        with self._database.reading() as c:
            return entries.load_events(c, None if ref is None else resolve(c, parse_ref(ref)), limit)

    def aliases(self) -> list[AliasEntry]:
        """All aliases, by name."""
        with self._database.reading() as c:
            return labels.aliases(c)

    def alias_history(self, name: str) -> list[MoveEntry]:
        """Where an alias pointed to, the first first."""
        with self._database.reading() as c:
            return labels.alias_history(c, name)

    def protections(self, checkpoint: str, url: str, *, said: bool = True) -> tuple[str, ...]:
        """Why a checkpoint at a place must stay, even if the catalog does not know it: others may need its files.

        Args:
            checkpoint: its id.
            url: the place.
            said: also what is said of it: holds, tags, aliases (default); otherwise only who needs its files.
        """
        from ucformat.catalog import deletion

        with self._database.reading() as c:
            return deletion.protections_at(c, checkpoint, same_url(url), stamp.now(), said=said)

    def contradiction(self, manifest: Manifest, url: str) -> str | None:
        """Why what lies at a place, by its manifest, is not the checkpoint that is recorded there under its id.

        Args:
            manifest: what was read there.
            url: the place.

        Returns:
            the reason; None where nothing says so: the catalog does not know it, or not there, or it is that one,
            perhaps in another form, as `materialize` makes it.
        """
        with self._database.reading() as c:
            return content.contradiction(c, manifest, same_url(url))

    def purgeable(self, grace: timedelta = GRACE) -> PurgePlan:
        """Which deleted checkpoints `gc` may remove from storage now; `grace` is for those without one of their own."""
        from ucformat.catalog import deletion
        from ucformat.catalog.purge import plan_purge

        with self._database.reading() as c:
            plan = plan_purge(deletion.retention_rows(c, stamp.now()), stamp.now(), grace, stamp.clocks(c))
            places = deletion.places_of(c, [r.serial for r in plan.purge])
        needed = find_dependents(places)
        if not needed:
            return plan
        with self._database.reading() as c:
            rows = deletion.retention_rows(c, stamp.now(), needed=needed)
            return plan_purge(rows, stamp.now(), grace, stamp.clocks(c))
