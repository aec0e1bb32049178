"""What a catalog finds, counts and lists: the questions about many checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ucformat.catalog import changes, search
from ucformat.catalog import stamp as stamps
from ucformat.catalog.entries import LineEntry, PageEntry
from ucformat.catalog.loading import load_entries
from ucformat.catalog.models import storable_text
from ucformat.catalog.rows import serial_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucformat.catalog.database import Database
    from ucformat.catalog.entries import CurvesEntry, Entry, RunEntry
    from ucformat.catalog.filter.syntax import Node, Sort


class Searches:
    """The part of `Catalog` that asks about many checkpoints."""

    _database: Database

    def find(
        self,
        where: str | Node = "",
        *,
        sort: str | Sort = search.NEWEST,
        limit: int | None = None,
        offset: int = 0,
        deleted: bool = False,
    ) -> list[Entry]:
        """Find the checkpoints that match a filter (docs/filters.md).

        Args:
            where: the filter; no checkpoint need have the metrics and configuration paths in one
                that is parsed already, nor those in such an order.
            deleted: include those that are no longer committed (default: only if the filter uses
                `state`).
        """
        with self._database.reading() as c:
            serials = search.find_serials(
                c, where, stamps.now(), sort=sort, limit=limit, offset=offset, deleted=deleted
            )
            return load_entries(c, serials, stamps.now())

    def with_ids(self, ids: Iterable[str]) -> list[Entry]:
        """The checkpoints that have these ids, in whatever state; ids that none has are left out."""
        with self._database.reading() as c:
            # no text that cannot be stored is an id
            serials = [serial_of(c, id_) for id_ in ids if storable_text(id_) == id_]
            return load_entries(c, [s for s in serials if s is not None], stamps.now())

    def count(self, where: str | Node = "", *, deleted: bool = False) -> int:
        """Count the checkpoints that match a filter.

        Args:
            deleted: include those that are no longer committed (default: only if the filter uses
                `state`).
        """
        with self._database.reading() as c:
            return search.count_checkpoints(c, where, stamps.now(), deleted=deleted) or 0

    def count_few(self, where: str | Node = "", *, deleted: bool = False) -> int | None:
        """As `count`, but None if more than 10,000 checkpoints would have to be tested."""
        with self._database.reading() as c:
            return search.count_checkpoints(c, where, stamps.now(), deleted=deleted, most=10_000)

    def page(
        self,
        where: str | Node = "",
        *,
        sort: str | Sort = search.NEWEST,
        limit: int = 50,
        offset: int = 0,
        counted: int = 1000,
    ) -> PageEntry:
        """Find a page of the checkpoints that match a filter, with what there is to choose among.

        Args:
            where: as `find`.
            counted: of how many of the first that match the values are counted (default: 1000).
        """
        with self._database.reading() as c:
            now = stamps.now()
            serials, first, total = search.find_page(
                c, where, now, sort=sort, limit=limit, offset=offset, counted=counted
            )
            return PageEntry(load_entries(c, serials, now), search.count_values(c, first), total)

    def curves(
        self, run: str, where: str | Node = "", *, most: int = 250, drawn: int = 24
    ) -> CurvesEntry:
        """The metrics of a run along its steps, of a long run at some of them.

        Args:
            where: only of checkpoints that match this filter.
            most: of how many checkpoints at most (default: 250).
            drawn: of how many metrics (default: 24).
        """
        with self._database.reading() as c:
            return search.find_curves(c, run, where, stamps.now(), most=most, drawn=drawn)

    def series(
        self, metrics: Mapping[str, str], where: str | Node = "", *, most: int = 40
    ) -> dict[str, list[tuple[int, float]]]:
        """The values of one metric of each run, at its last steps.

        Args:
            metrics: the name of the metric, by run.
            where: only of checkpoints that match this filter.
            most: of how many steps (default: 40).

        Returns:
            By run, pairs of a step and a value, in order of steps; values that are no numbers are
            left out.
        """
        with self._database.reading() as c:
            return search.find_series(c, metrics, where, stamps.now(), most=most)

    def settled(self, log: changes.SettledLog) -> int:
        """The position in the audit log up to which no entry will appear any more."""
        with self._database.reading() as c:
            return log.read(c)

    def changes(self, after: int, until: int, *, most: int = 256) -> changes.Changes:
        """Find out which aliases and runs entries of the audit log may have moved.

        Args:
            after: a position in the log, exclusive.
            until: a position up to which it is settled, inclusive.
            most: so many entries at most.
        """
        with self._database.reading() as c:
            return changes.load_changes(c, after, until, most)

    def lines(self, where: str | Node = "") -> list[LineEntry]:
        """Find the lines of all runs (docs/catalog.md), by run."""
        with self._database.reading() as c:
            lines = search.find_lines(c, where, stamps.now())
            heads = load_entries(c, [serial for _, serial, _, _ in lines], stamps.now())
            return [
                LineEntry(run, head, number, nbytes)
                for (run, _, number, nbytes), head in zip(lines, heads, strict=True)
            ]

    def runs(
        self,
        where: str = "",
        *,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
        limit: int | None = None,
        offset: int = 0,
    ) -> list[RunEntry]:
        """List the runs, those that were saved last first, with numbers of the checkpoints that match a filter.

        Args:
            metric: a metric whose best value in each run is looked up.
            mode: whether less or more of it is better.
        """
        with self._database.reading() as c:
            return search.find_runs(
                c, where, stamps.now(), metric=metric, mode=mode, limit=limit, offset=offset
            )
