"""The checkpoints from which plans of retention and purges are made, and which of them others need."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from os.path import commonprefix
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.launches import load_continuations
from ucformat.catalog.models import Alias, AliasClaim, Checkpoint, Edge, Hold, Location, Metric, Run, Tag
from ucformat.catalog.retention import RetentionHold, RetentionRow
from ucformat.catalog.rows import MAX_IN_LIST, starts_with, unindexed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import BindParameter, ColumnElement, Connection, Executable

#: States of checkpoints that were deleted and are still in storage; and of all that are in storage.
REMOVED = ("deleted", "purging")
LIVE = ("committed", *REMOVED)

_AFTER = "0"  # the character after the slash: texts that begin with `a/` are between `a/` and `a0`
_FEW = 100  # checkpoints and places whose edges are looked up by index
_SERIALS: BindParameter[Any] = sa.bindparam("serials", expanding=True)
_STATES: BindParameter[Any] = sa.bindparam("states", expanding=True)
_CHILD = Checkpoint.__table__.alias()
_EDGES = (  # no condition on the state, which SQLite would evaluate first although it selects nearly all rows
    sa.select(Edge.parent, Edge.parent_url, Edge.child, _CHILD.c.id, _CHILD.c.state, Edge.depends).join(
        _CHILD, _CHILD.c.serial == Edge.child
    )
)
_NEEDED = (
    Checkpoint.serial,
    Checkpoint.id,
    Checkpoint.kind,
    Checkpoint.state,
    Checkpoint.step,
    Checkpoint.commits,
    Checkpoint.created,
    Checkpoint.nbytes,
    Checkpoint.deleted,
    Checkpoint.purge_after,
    Checkpoint.deleted_clocks,
    Checkpoint.launch_id,
)
#: Reading all columns takes twice as long, because of their times.
_COLUMNS: dict[Any, tuple[Any, ...]] = {
    Alias: (Alias.name,),
    AliasClaim: (AliasClaim.name,),
    Hold: (Hold.reason, Hold.until),
    Location: (Location.url,),
    Metric: (Metric.name, Metric.value),
    Tag: (Tag.name,),
}


def retention_rows(
    connection: Connection,
    now: datetime,
    *,
    filters: Sequence[str] = (),
    metrics: Collection[str] = (),
    serials: Sequence[int] | None = None,
    scope: str | None = None,
    states: tuple[str, ...] = LIVE,
    needed: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[RetentionRow]:
    """Load checkpoints for retention, without those that are purged or replaced.

    Args:
        states: of the checkpoints (default: all that are not purged or replaced).
    """
    given: dict[str, Any] = {"states": states} | ({} if serials is None else {"serials": serials})
    scoped = () if scope is None else (_condition(connection, scope, now),)

    def query(table: Any) -> Executable:
        some = serials is not None
        return _rows(table, *scoped, *_these(some=some)) if scoped else _known_rows(table, some=some)

    def many(table: Any, value: Callable[..., Any] = lambda column: column, **more: Any) -> dict[int, list[Any]]:
        grouped: dict[int, list[Any]] = {}
        for serial, *columns in connection.execute(query(table), {**given, **more}):
            grouped.setdefault(serial, []).append(value(*columns))
        return grouped

    aliases, tags, claimed = many(Alias), many(Tag), many(AliasClaim)
    claims = {serial: sorted({*names}.difference(aliases.get(serial, ()))) for serial, names in claimed.items()}
    holds = many(Hold, RetentionHold)
    measured = many(Metric, lambda *pair: pair, metrics=sorted(metrics)) if metrics else {}
    matching = [sa.select(Checkpoint.serial).where(_condition(connection, text, now), *scoped) for text in filters]
    matches: dict[int, list[int]] = {}
    for i, found in enumerate(matching):
        for serial in connection.scalars(found):
            matches.setdefault(serial, []).append(i)
    rows = connection.execute(query(Checkpoint), given).all()
    launches = load_continuations(connection, {r.launch_id for r in rows})
    places = many(Location)
    owners = {url: serial for serial, urls in places.items() for url in urls}
    dependents = _dependents(connection, {r.serial for r in rows}, owners)
    for r in rows if needed else ():
        dependents.setdefault(r.serial, set()).update(needed.get(r.id, ()))
    return [  # columns by position: by name they take longer than everything else here
        RetentionRow(
            *(serial, name, kind, state, run, step, created, nbytes, commits),
            metrics=dict(measured.get(serial, ())),
            aliases=tuple(aliases.get(serial, ())),
            claims=tuple(claims.get(serial, ())),
            tags=tuple(tags.get(serial, ())),
            holds=tuple(holds.get(serial, ())),
            dependents=tuple(sorted(dependents.get(serial, ()))),
            matches=frozenset(matches.get(serial, ())),
            deleted=deleted,
            purge_after=purge_after,
            deleted_clocks=clocks or {},
            places=tuple(places.get(serial, ())),
            launch=launches[launch][0],
            continues=launches[launch][2],
        )
        for serial, name, kind, state, step, commits, created, nbytes, deleted, purge_after, clocks, launch, run in rows
    ]


@cache
def _known_rows(table: Any, *, some: bool) -> Executable:
    """The query for a table's rows of all checkpoints, or of those in `serials`; cached, as building is slow."""
    return _rows(table, *_these(some=some))


def _these(*, some: bool) -> tuple[ColumnElement[bool], ...]:
    return (Checkpoint.serial.in_(_SERIALS),) if some else ()


def _rows(table: Any, *these: ColumnElement[bool]) -> Executable:
    """The query for a table's rows of some checkpoints."""
    state: ColumnElement[str] = unindexed(Checkpoint.state) if these else Checkpoint.state
    chosen = sa.select(Checkpoint.serial).where(state.in_(_STATES), *these)
    if table is Checkpoint:
        with_run = sa.select(*_NEEDED, Run.name.label("run")).outerjoin(Run, Run.id == Checkpoint.run_id)
        return with_run.where(Checkpoint.serial.in_(chosen))
    found = sa.select(table.checkpoint, *_COLUMNS[table]).where(table.checkpoint.in_(chosen))
    if table is Hold:
        found = found.where(Hold.released.is_(None))
    if table is Metric:
        found = found.where(Metric.name.in_(sa.bindparam("metrics", expanding=True)))
    return found


def _condition(connection: Connection, text: str, now: datetime) -> ColumnElement[bool]:
    from ucformat.catalog.filter import parse
    from ucformat.catalog.filter.compile import check_names, compile_filter

    node = parse(text)
    check_names(connection, node, text)
    return compile_filter(node, now=now)


def _dependents(connection: Connection, serials: Collection[int], places: Mapping[str, int]) -> dict[int, set[str]]:
    """The ids of the checkpoints that need another's files, by its serial.

    An edge refers to its parent by serial, or by a folder that contains the parent's place or is inside it. There are a
    few queries, whatever the number of edges.
    """
    urls = sorted(places)
    common = commonprefix(urls)  # noqa: RUF071 - what touches one of these begins with it, or it with that
    if len(serials) + len(places) <= _FEW:
        edges = _EDGES.where(sa.or_(Edge.parent.in_(serials), *(near(url) for url in places)))
    else:
        edges = _EDGES.where(_touching_some(connection, serials, common))
    found: dict[int, set[str]] = {}
    touching: dict[str, list[int]] = {}
    for parent, parent_url, serial, name, state, depends in connection.execute(edges):
        if state not in LIVE or not depends:
            continue
        if parent in serials:
            found.setdefault(parent, set()).add(name)
        if not (parent_url.startswith(common) or common.startswith(parent_url)):
            continue
        if parent_url not in touching:
            touching[parent_url] = _touching(parent_url, places, urls)
        for other in touching[parent_url]:
            if other != serial:
                found.setdefault(other, set()).add(name)
    return found


def _touching_some(connection: Connection, serials: Collection[int], common: str) -> ColumnElement[bool]:
    """The edges to these checkpoints or to places that begin with the same text; or all by which files are needed.

    The latter if they are fewer than the checkpoints, or if very many places begin so.
    """
    most = 2 * len(serials)

    def many(edges: ColumnElement[bool]) -> bool:
        number = sa.select(sa.func.count()).select_from(sa.select(Edge.id).where(edges).limit(most + 1).subquery())
        return connection.execute(number).scalar_one() > most

    if not common or len(serials) > MAX_IN_LIST or not many(Edge.depends) or many(starts_with(Edge.parent_url, common)):
        return Edge.depends
    above = Edge.parent_url.in_([*_folders(common)])
    return sa.or_(Edge.parent.in_(serials), above, starts_with(Edge.parent_url, common))


def _touching(place: str, places: Mapping[str, int], urls: Sequence[str]) -> list[int]:
    """The checkpoints at a place, inside it, or in a folder above it; `urls` are the sorted keys of `places`."""
    inside = urls[bisect_left(urls, f"{place}/") : bisect_left(urls, f"{place}{_AFTER}")]
    return [places[url] for url in (*inside, *(url for url in _folders(place) if url in places))]


def _folders(place: str) -> Iterator[str]:
    """A place and all folders above it."""
    while place:
        yield place
        place = place.rpartition("/")[0]


def near(url: str) -> ColumnElement[bool]:
    """Whether an edge refers to a place, a folder above it, or something inside it."""
    return sa.or_(Edge.parent_url.in_([*_folders(url)]), starts_with(Edge.parent_url, f"{url}/"))
