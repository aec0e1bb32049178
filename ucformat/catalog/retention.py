"""Retention policies: what to keep and delete, as a pure function of the policy, the checkpoints and the time.

The catalog provides the rows, and applies a plan if planning again gives one with the same id.
docs/retention.md describes policies for users.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from heapq import nlargest, nsmallest
from itertools import chain, islice
from os.path import commonprefix
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.launches import load_continuations
from ucformat.catalog.lines import contradictions, lines
from ucformat.catalog.models import (
    LIVE,
    AliasClaim,
    AliasRow,
    CheckpointRow,
    Edge,
    Hold,
    Location,
    Metric,
    RunRow,
    Tag,
    TensorRow,
)
from ucformat.catalog.rows import MAX_IN_LIST, pages, starts_with, unindexed
from ucformat.errors import UpgradeNeeded, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from datetime import datetime, timedelta

    from sqlalchemy import BindParameter, ColumnElement, Connection, Executable

    from ucformat.schema.policy import Best, Keep, Last, Policy


# The checkpoints from which plans of retention and purges are made, and which of them others need.


_AFTER = "0"  # the character after the slash: texts that begin with `a/` are between `a/` and `a0`
_FEW = 100  # checkpoints and places whose edges are looked up by index
_SERIALS: BindParameter[Any] = sa.bindparam("serials", expanding=True)
_STATES: BindParameter[Any] = sa.bindparam("states", expanding=True)
_CHILD = CheckpointRow.__table__.alias()
_EDGES = (  # no condition on the state, which SQLite would evaluate first although it selects nearly all rows
    sa.select(
        Edge.parent, Edge.parent_url, Edge.child, _CHILD.c.id, _CHILD.c.state, Edge.depends
    ).join(_CHILD, _CHILD.c.serial == Edge.child)
)
_NEEDED = (
    CheckpointRow.serial,
    CheckpointRow.id,
    CheckpointRow.kind,
    CheckpointRow.state,
    CheckpointRow.step,
    CheckpointRow.commits,
    CheckpointRow.created,
    CheckpointRow.nbytes,
    CheckpointRow.deleted,
    CheckpointRow.purge_after,
    CheckpointRow.deleted_clocks,
    CheckpointRow.launch_id,
)
#: Reading all columns takes twice as long, because of their times.
_COLUMNS: dict[Any, tuple[Any, ...]] = {
    AliasRow: (AliasRow.name,),
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
    policy: Policy | None = None,
    serials: Sequence[int] | None = None,
    states: tuple[str, ...] = LIVE,
    needed: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[RetentionRow]:
    """Load checkpoints in these states, with the metrics and the matches that the policy asks for.

    Args:
        needed: the ids of others that need files of a checkpoint, besides those in the catalog, by
            the id of that one.
    """
    filters = () if policy is None else policy.filters()
    metrics = () if policy is None else sorted(policy.metrics())
    scope = None if policy is None else policy.scope
    parameters: dict[str, Any] = {"states": states} | (
        {} if serials is None else {"serials": serials}
    )
    scoped = () if scope is None else (_condition(connection, scope, now),)

    def query(table: Any) -> Executable:
        by_serial = serials is not None
        return (
            _rows(table, *scoped, *_chosen(by_serial=by_serial))
            if scoped
            else _cached_query(table, by_serial=by_serial)
        )

    def many(
        table: Any, value: Callable[..., Any] = lambda column: column, **extra: Any
    ) -> dict[int, list[Any]]:
        grouped: dict[int, list[Any]] = {}
        for serial, *columns in connection.execute(query(table), {**parameters, **extra}):
            grouped.setdefault(serial, []).append(value(*columns))
        return grouped

    aliases, tags, claimed = many(AliasRow), many(Tag), many(AliasClaim)
    claims = {
        serial: sorted({*names}.difference(aliases.get(serial, ())))
        for serial, names in claimed.items()
    }
    holds = many(Hold, RetentionHold)
    measured = many(Metric, lambda *pair: pair, metrics=metrics) if metrics else {}
    matching = [
        sa.select(CheckpointRow.serial).where(_condition(connection, text, now), *scoped)
        for text in filters
    ]
    matches: dict[int, list[int]] = {}
    for i, serials_query in enumerate(matching):
        for serial in connection.scalars(serials_query):
            matches.setdefault(serial, []).append(i)
    rows = connection.execute(query(CheckpointRow), parameters).all()
    launches = load_continuations(connection, {r.launch_id for r in rows})
    places = many(Location)
    owners = {url: serial for serial, urls in places.items() for url in urls}
    sizes = _state_bytes(connection, states) if policy is not None and policy.thins else {}
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
            states=sizes.get(serial, {}),
            launch=launches[launch][0],
            continues=launches[launch][2],
        )
        for serial, name, kind, state, step, commits, created, nbytes, deleted, purge_after, clocks, launch, run in rows
    ]


def _state_bytes(connection: Connection, states: tuple[str, ...]) -> dict[int, dict[str, int]]:
    """The bytes of each state of a checkpoint, by serial; a master of which no weight is stored is the weight."""
    sets: dict[int, int] = dict(
        connection.execute(
            sa.select(CheckpointRow.serial, CheckpointRow.tensor_set_id).where(
                CheckpointRow.state.in_(states)
            )
        ).all()
    )
    weight = TensorRow.__table__.alias()
    alone = ~sa.exists().where(
        weight.c.name == TensorRow.name,
        weight.c.state == "weight",
        weight.c.tensor_set_id == TensorRow.tensor_set_id,
    )
    state = sa.case((sa.and_(TensorRow.state == "master", alone), "weight"), else_=TensorRow.state)
    amounts = sa.select(TensorRow.tensor_set_id, state, sa.func.sum(TensorRow.nbytes))
    by_set: dict[int, dict[str, int]] = defaultdict(dict)
    for page in pages(sorted({*sets.values()})):
        query = amounts.where(TensorRow.tensor_set_id.in_(page)).group_by(
            TensorRow.tensor_set_id, state
        )
        for number, name, nbytes in connection.execute(query):
            by_set[number][name] = int(nbytes)
    return {serial: by_set[number] for serial, number in sets.items()}


@cache
def _cached_query(table: Any, *, by_serial: bool) -> Executable:
    """The query for a table's rows of all checkpoints, or of those in `serials`; cached, as building is slow."""
    return _rows(table, *_chosen(by_serial=by_serial))


def _chosen(*, by_serial: bool) -> tuple[ColumnElement[bool], ...]:
    return (CheckpointRow.serial.in_(_SERIALS),) if by_serial else ()


def _rows(table: Any, *these: ColumnElement[bool]) -> Executable:
    """The query for a table's rows of some checkpoints."""
    state: ColumnElement[str] = unindexed(CheckpointRow.state) if these else CheckpointRow.state
    chosen = sa.select(CheckpointRow.serial).where(state.in_(_STATES), *these)
    if table is CheckpointRow:
        with_run = sa.select(*_NEEDED, RunRow.name.label("run")).outerjoin(
            RunRow, RunRow.id == CheckpointRow.run_id
        )
        return with_run.where(CheckpointRow.serial.in_(chosen))
    query = sa.select(table.checkpoint, *_COLUMNS[table]).where(table.checkpoint.in_(chosen))
    if table is Hold:
        query = query.where(Hold.released.is_(None))
    if table is Metric:
        query = query.where(Metric.name.in_(sa.bindparam("metrics", expanding=True)))
    return query


def _condition(connection: Connection, text: str, now: datetime) -> ColumnElement[bool]:
    from ucformat.catalog.filter.compile import compile_filter, read_filter

    return compile_filter(read_filter(connection, text), now=now)


def _dependents(
    connection: Connection, serials: Collection[int], places: Mapping[str, int]
) -> dict[int, set[str]]:
    """The ids of the checkpoints that need another's files, by its serial.

    An edge refers to its parent by serial, or by a folder that contains the parent's place or is
    inside it. There are a few queries, whatever the number of edges.
    """
    urls = sorted(places)
    common = commonprefix(urls)  # noqa: RUF071 - what touches one of these begins with it, or it with that
    if len(serials) + len(places) <= _FEW:
        edges = _EDGES.where(sa.or_(Edge.parent.in_(serials), *(near(url) for url in places)))
    else:
        edges = _EDGES.where(_touching_some(connection, serials, common))
    dependents: dict[int, set[str]] = {}
    touching: dict[str, list[int]] = {}
    for parent, parent_url, serial, name, state, depends in connection.execute(edges):
        if state not in LIVE or not depends:
            continue
        if parent in serials:
            dependents.setdefault(parent, set()).add(name)
        if not (parent_url.startswith(common) or common.startswith(parent_url)):
            continue
        if parent_url not in touching:
            touching[parent_url] = _touching(parent_url, places, urls)
        for other in touching[parent_url]:
            if other != serial:
                dependents.setdefault(other, set()).add(name)
    return dependents


def _touching_some(
    connection: Connection, serials: Collection[int], common: str
) -> ColumnElement[bool]:
    """The edges to these checkpoints or to places that begin with the same text; or all by which files are needed.

    The latter if they are fewer than the checkpoints, or if very many places begin so.
    """
    most = 2 * len(serials)

    def many(edges: ColumnElement[bool]) -> bool:
        number = sa.select(sa.func.count()).select_from(
            sa.select(Edge.id).where(edges).limit(most + 1).subquery()
        )
        return connection.execute(number).scalar_one() > most

    if (
        not common
        or len(serials) > MAX_IN_LIST
        or not many(Edge.depends)
        or many(starts_with(Edge.parent_url, common))
    ):
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


OWN_KIND = "ucformat"
_MAX_NAMED = 10  # checkpoints that need another, named in a reason


@dataclass(frozen=True, slots=True)
class RetentionHold:
    """A hold: why a checkpoint must not be deleted, and until when (None: until it is released)."""

    reason: str
    until: datetime | None = None

    @property
    def text(self) -> str:
        """As it is shown."""
        until = "" if self.until is None else f" until {self.until:%Y-%m-%d}"
        return f"held{until}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RetentionRow:
    """A checkpoint as retention sees it.

    `kind` is `ucformat`, or the engine that wrote it. `holds` have not been released. `dependents`
    are the ids of the checkpoints that need this one's files, unless they are purged. `claims` are
    aliases in the document beside it that point elsewhere in this catalog. `matches` are the
    indexes in `policy.filters()` of the filters that it matches; `metrics` has at least those in
    `policy.metrics()`. `deleted_clocks` are the seconds that clocks other than the host's showed
    when it was deleted. `places` are its urls. `states` are the bytes of each state, if the policy
    keeps only some, where a master of which no weight is stored counts as `weight`. `launch` and
    `continues` are as in `catalog.lines`.
    """

    serial: int
    id: str
    kind: str
    state: str
    run: str | None
    step: int | None
    created: datetime
    nbytes: int
    commits: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    holds: tuple[RetentionHold, ...] = ()
    dependents: tuple[str, ...] = ()
    matches: frozenset[int] = frozenset()
    deleted: datetime | None = None
    purge_after: datetime | None = None
    deleted_clocks: Mapping[str, float] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    states: Mapping[str, int] = field(default_factory=dict)
    launch: str | None = None
    continues: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its short name: `run7@1000`, else the beginning of its id."""
        return self.id[:12] if self.run is None or self.step is None else f"{self.run}@{self.step}"


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that is kept, and all the reasons why."""

    row: RetentionRow
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Thinned:
    """A checkpoint of which only some states are kept, and all the reasons why they are."""

    row: RetentionRow
    reasons: tuple[str, ...]
    states: tuple[str, ...]  # that are kept

    @property
    def bytes_kept(self) -> int:
        """The bytes of the states that are kept."""
        return sum(self.row.states[state] for state in self.states)

    @property
    def dropped(self) -> dict[str, int]:
        """The bytes of the states that are dropped."""
        return {s: nbytes for s, nbytes in self.row.states.items() if s not in self.states}


@dataclass(frozen=True, slots=True)
class RunBytes:
    """What becomes of the bytes of a run; those that are dropped are of checkpoints that are thinned."""

    run: str | None
    kept: int
    dropped: int
    deleted: int


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """The result of a policy: each row is in one of `keep`, `thin`, `delete` and `untouched`.

    Two plans have the same `id` if the same policy deletes the same checkpoints, and thins the same
    ones. `untouched` are outside of the policy, with the reason. `idle` are rules that keep
    nothing, perhaps by mistake; `contradictions` are warnings of wrong clocks.
    """

    id: str
    keep: tuple[Kept, ...]
    delete: tuple[RetentionRow, ...]
    untouched: tuple[Kept, ...]
    idle: tuple[str, ...]
    contradictions: tuple[str, ...]
    grace: timedelta
    thin: tuple[Thinned, ...] = ()

    @property
    def bytes_kept(self) -> int:
        """The bytes of the checkpoints that the policy keeps, and of the states that it keeps of others."""
        return sum(kept.row.nbytes for kept in self.keep) + sum(t.bytes_kept for t in self.thin)

    @property
    def bytes_dropped(self) -> int:
        """The bytes of the states that are dropped, which are freed at once."""
        return sum(sum(thinned.dropped.values()) for thinned in self.thin)

    @property
    def bytes_deleted(self) -> int:
        """The bytes of the deleted checkpoints, which are freed when they are purged."""
        return sum(row.nbytes for row in self.delete)

    @property
    def runs(self) -> tuple[RunBytes, ...]:
        """The bytes by run, in the order of the plan."""
        amounts: dict[str | None, list[int]] = {}
        parts = chain(
            ((kept.row, (kept.row.nbytes, 0, 0)) for kept in self.keep),
            ((t.row, (t.bytes_kept, sum(t.dropped.values()), 0)) for t in self.thin),
            ((row, (0, 0, row.nbytes)) for row in self.delete),
        )
        for row, part in parts:
            of_run = amounts.setdefault(row.run, [0, 0, 0])
            of_run[:] = map(sum, zip(of_run, part, strict=True))
        order = sorted(amounts, key=lambda run: (run is not None, run or ""))
        return tuple(RunBytes(run, *amounts[run]) for run in order)


def plan_retention(
    policy: Policy, rows: Iterable[RetentionRow], now: datetime, *, thin_needed: bool = False
) -> RetentionPlan:
    """Apply a policy to checkpoints, without deleting anything.

    Args:
        thin_needed: delete also what is kept only because others need it (default: no).
    """
    judged, untouched, delete = [], [], []
    keep: list[Kept] = []
    thin: list[Thinned] = []
    for row in sorted(rows, key=plan_order):
        why = _not_judged(policy, row)
        if why is None:
            judged.append(row)
        else:
            untouched.append(Kept(row, (why,)))
    rules = [
        (text, {row.serial for row in kept}, set_of_rules.states)
        for set_of_rules, text, kept in _rules(policy, judged, now)
    ]
    for row in judged:
        protected = protections(row, now)
        keepers = [(text, states) for text, serials, states in rules if row.serial in serials]
        reasons = (*protected, *(text for text, _ in keepers))
        only_needed = len(reasons) == len([*needed_by(row.dependents)])
        if not reasons or (thin_needed and only_needed):
            delete.append(row)
        elif protected or any(not states for _, states in keepers):
            keep.append(Kept(row, reasons))
        else:
            patterns = list(chain.from_iterable(states for _, states in keepers))
            part = _part(row, reasons, patterns)
            if isinstance(part, Thinned):
                thin.append(part)
            else:
                keep.append(part)
    idle = tuple(text for text, serials, _ in rules if not serials)
    action = policy.model_dump(mode="json")
    if thin:
        action["thin"] = sorted((t.row.id, *t.states) for t in thin)
    identity = plan_id(action, delete)
    wrong = tuple(contradictions(judged, lambda row: row.name))
    return RetentionPlan(
        *(identity, tuple(keep), tuple(delete), tuple(untouched), idle, wrong, policy.grace),
        tuple(thin),
    )


def _part(row: RetentionRow, reasons: tuple[str, ...], patterns: Sequence[str]) -> Kept | Thinned:
    """A checkpoint of which only the states that match are kept; whole if that is impossible, or drops nothing."""
    states = tuple(s for s in row.states if any(fnmatchcase(s, pattern) for pattern in patterns))
    if len(states) == len(row.states):
        return Kept(row, reasons)
    if not states:
        return Kept(row, (*reasons, f"whole: it stores none of {', '.join(patterns)}"))
    if len(row.places) > 1:
        return Kept(row, (*reasons, "whole: it has several locations"))
    return Thinned(row, reasons, states)


def plan_order(row: RetentionRow) -> tuple[object, ...]:
    """The sort key of plans: by run, then by step; checkpoints without either come first."""
    return (row.run is not None, row.run or "", *_by_step(row))


def protections(row: RetentionRow, now: datetime) -> tuple[str, ...]:
    """The reasons why a checkpoint must not be deleted, independent of any policy."""
    return (
        *(f"alias {name}" for name in sorted(row.aliases)),
        *(f"alias {name} in another catalog" for name in sorted(row.claims)),
        *(f"tag {name}" for name in sorted(row.tags)),
        *(hold.text for hold in row.holds if hold.until is None or hold.until > now),
        *needed_by(row.dependents),
    )


def needed_by(dependents: Sequence[str]) -> Iterator[str]:
    """The reasons for keeping a checkpoint that others need: the first ten by id, then the number of the others."""
    named = dependents if len(dependents) <= _MAX_NAMED else nsmallest(_MAX_NAMED, dependents)
    yield from (f"needed by {name}" for name in sorted(named))
    if len(dependents) > _MAX_NAMED:
        yield f"needed by {len(dependents) - _MAX_NAMED:,} more"


def plan_id(action: object, rows: Iterable[RetentionRow]) -> str:
    """The id of a plan: a hash of its action and its checkpoints."""
    text = json.dumps([action, sorted(row.id for row in rows)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _not_judged(policy: Policy, row: RetentionRow) -> str | None:
    if row.kind != OWN_KIND:
        return f"not ours: written by {row.kind}"
    if row.state != "committed":
        return f"already {row.state}"
    if policy.scope is not None and 0 not in row.matches:
        return "out of scope"
    return None


def _rules(
    policy: Policy, rows: Sequence[RetentionRow], now: datetime
) -> Iterator[tuple[Keep, str, Iterable[RetentionRow]]]:
    """Each rule with its set, its text, and the checkpoints that it keeps."""
    first = len(policy.filters()) - sum(len(keep.where) for keep in policy.keep)
    for keep in policy.keep:
        only = f": only {', '.join(keep.states)}" if keep.states else ""
        for text, kept in _rules_of(keep, rows, now, first):
            yield keep, f"{text}{only}", kept
        first += len(keep.where)


def _rules_of(
    keep: Keep, rows: Sequence[RetentionRow], now: datetime, first: int
) -> Iterator[tuple[str, Iterable[RetentionRow]]]:
    """The text of each rule of a set, and the checkpoints that it keeps; `first` is the number of its first filter."""
    for last in keep.last:
        yield f"{_counted('last', last.count)} of {_of(last)}", _last(last, rows)
    if keep.every is not None:
        every = keep.every
        yield (
            f"step divisible by {every}",
            [row for row in rows if row.step is not None and row.step % every == 0],
        )
    for best in keep.best:
        yield (
            f"{_counted('best', best.count)} of {_of(best)} by {best.mode} {best.metric}",
            _best(best, rows),
        )
    if keep.younger is not None:
        from ucformat.schema.policy import duration_text

        younger = keep.younger
        yield (
            f"younger than {duration_text(younger)}",
            [row for row in rows if now - row.created < younger],
        )
    for i, text in enumerate(keep.where, first):
        yield f"where {text}", [row for row in rows if i in row.matches]


def _counted(word: str, count: int) -> str:
    return word if count == 1 else f"{word} {count}"


def _of(rule: Last | Best) -> str:
    return "all" if rule.group == "all" else "its run"


def _groups(rule: Last | Best, rows: Sequence[RetentionRow]) -> Iterable[Sequence[RetentionRow]]:
    """The groups in which checkpoints compete: each line of a run, and each checkpoint without a run."""
    if rule.group == "all":
        return [rows]
    return _lines(rows)


def _lines(rows: Iterable[RetentionRow]) -> list[list[RetentionRow]]:
    """The lines of all runs, newest first; each checkpoint without a run is one of its own."""
    runs: dict[object, list[RetentionRow]] = defaultdict(list)
    for row in rows:
        runs[row.serial if row.run is None else row.run].append(row)
    return [line for run in runs.values() for _, line in lines(run)]


def _last(rule: Last, rows: Sequence[RetentionRow]) -> Iterator[RetentionRow]:
    """The head of each line, and the last by count of commits and by step, which after a rollback are others.

    Of checkpoints without a count, also the last by time. Lines are compared by time alone, and as
    many checkpoints of each line are kept by count as by time.
    """
    for group in _groups(rule, rows):
        if rule.group == "run":
            yield group[0]
            yield from islice((row for row in group if row.commits is not None), rule.count)
            yield from nlargest(
                rule.count, [row for row in group if row.commits is None], key=_by_time
            )
            yield from nlargest(
                rule.count, [row for row in group if row.step is not None], key=_by_step
            )
            continue
        newest = nlargest(rule.count, group, key=_by_time)
        yield from newest
        chosen = {row.serial for row in newest}
        for line in _lines(row for row in group if row.run is not None):
            many = sum(row.serial in chosen for row in line)
            yield from islice((row for row in line if row.commits is not None), many)


def _by_time(row: RetentionRow) -> tuple[object, ...]:
    return (row.created, -1 if row.step is None else row.step, row.serial)


def _by_step(row: RetentionRow) -> tuple[object, ...]:
    return (-1 if row.step is None else row.step, row.created, row.serial)


def _best(rule: Best, rows: Sequence[RetentionRow]) -> Iterator[RetentionRow]:
    """The k best and all that tie with the k-th. Values that are not finite are never the best."""
    sign = 1 if rule.mode == "max" else -1
    for group in _groups(rule, rows):
        scores = [
            (sign * value, row)
            for row in group
            if (value := _finite(row.metrics.get(rule.metric))) is not None
        ]
        top = nlargest(rule.count, (score for score, _ in scores))
        yield from (row for score, row in scores if score >= top[-1])


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def read_policy(text: str, most: int) -> Policy:
    """Read and validate a retention policy that is given as YAML or JSON.

    Args:
        most: values that aliases of YAML may expand to.
    """
    from ucformat.config_files import read_config_text

    document = read_config_text(text, "policy", most=most)
    if not isinstance(document, Mapping):
        raise UsageError(
            "a policy is a mapping", hint="such as {version: 1, keep: {last: 5}}; docs/retention.md"
        )
    return load_policy(document)


def load_policy(source: Path | str | Mapping[str, Any]) -> Policy:
    """Read and validate a retention policy."""
    from ucformat.config_files import read_config_file
    from ucformat.schema import policy as schema
    from ucformat.schema.layout import Faults, checked

    document = (
        source if isinstance(source, Mapping) else read_config_file(Path(source), "policy file")
    )
    version = document.get("version") if isinstance(document, Mapping) else None
    if isinstance(version, int) and version > schema.VERSION:
        raise UpgradeNeeded(
            f"the policy has version {version}; this ucformat reads up to {schema.VERSION}",
            hint="upgrade ucformat",
        )
    try:
        return checked(schema.Policy, document)
    except Faults as e:
        hint = "`keep` lists what to keep, such as `last: 5`; docs/retention.md describes the file"
        text = str(e)
        if not isinstance(document, Mapping) or not isinstance(document.get("keep"), list | tuple):
            text = text.replace("keep[0]", "keep")  # as the file spells it
        raise UsageError(f"not a policy:\n{text}", hint=hint) from e
