"""Finding checkpoints by a filter, in an order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa

from ucformat.catalog.entries import BestEntry, RunEntry
from ucformat.catalog.launches import before, load_continuations, select_newest_first
from ucformat.catalog.lines import lines
from ucformat.catalog.models import CheckpointRow, Metric, RunRow, Tag
from ucformat.catalog.rows import pages, unindexed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, Select

    from ucformat.catalog.filter.syntax import Node, Sort

#: The default order (`catalog.lines`).
NEWEST = "newest"


def find_serials(
    connection: Connection,
    where: str | Node,
    now: datetime,
    *,
    sort: str | Sort,
    limit: int | None,
    offset: int,
    deleted: bool,
) -> list[int]:
    """Find the checkpoints that match a filter."""
    conditions = _where(connection, where, now, deleted=deleted)
    if sort == NEWEST:
        chosen = _newest_first(
            connection, conditions, None if limit is None else max(1, offset + limit)
        )
    else:
        by, order = _order(connection, sort)
        criteria: Sequence[ColumnElement[bool]] | None = None
        for walked in _WALKED if limit is not None and _metric(by) is not None else ():
            if (criteria := conditions.few(connection, walked)) is not None:
                break
            best = (
                _first_by_metric(connection, conditions.each, by, order, walked)
                .limit(limit)
                .offset(offset)
            )
            if len(first := list(connection.scalars(best))) == limit:
                return first
        chosen = (
            sa.select(CheckpointRow.serial)
            .where(*(criteria or conditions.all(connection)))
            .order_by(*order)
        )
    return list(connection.scalars(chosen.limit(limit).offset(offset)))


#: Of how many checkpoints, in the order of an index, a filter is tested before all that match are
#: looked for; unless no more meet one of its conditions.
_WALKED = (1_000, 5_000, 20_000)


def _newest_first(
    connection: Connection, conditions: _Conditions, count: int | None
) -> Select[Any]:
    """The query for at least so many of the newest checkpoints that match, in order."""
    columns: Any = sa.select(
        CheckpointRow.serial, CheckpointRow.run_id, CheckpointRow.step, CheckpointRow.commits
    )
    for walked in _WALKED if count is not None and conditions.committed else ():
        # the newest lie side by side
        if (criteria := conditions.few(connection, walked // 4)) is not None:
            return select_newest_first(*criteria)
        committed = CheckpointRow.state == "committed"
        start = _created(connection, walked, committed)
        later = () if start is None else (CheckpointRow.created > start,)
        since = _created(connection, (count or 1) - 1, committed, *later, *conditions.each)
        if since is not None:
            last = columns.where(CheckpointRow.created >= since, committed, *conditions.each)
            return select_newest_first(*conditions.each, before(connection, last))
    criteria = conditions.all(connection)
    since = (
        None
        if count is None
        else _created(connection, count - 1, CheckpointRow.serial.in_(_all(criteria)))
    )
    if since is None:
        return select_newest_first(*criteria)
    last = columns.where(CheckpointRow.created >= since, *criteria)
    return select_newest_first(*conditions.each, before(connection, last))


def _all(criteria: Sequence[ColumnElement[bool]]) -> Select[Any]:
    """The serials of checkpoints, found before they are sorted: PostgreSQL would go through all others in the order."""
    serials = sa.select(CheckpointRow.serial).where(*criteria).cte()
    return sa.select(serials.prefix_with("MATERIALIZED", dialect="postgresql"))


def _created(connection: Connection, number: int, *where: ColumnElement[bool]) -> datetime | None:
    """When the checkpoint was created that comes after so many others which were created later; None if none does."""
    chosen = sa.select(CheckpointRow.created).where(*where).order_by(CheckpointRow.created.desc())
    return connection.scalar(chosen.offset(number).limit(1))


def _order(connection: Connection, sort: str | Sort) -> tuple[Sort, list[ColumnElement[Any]]]:
    from ucformat.catalog.filter.compile import compile_sort, read_sort

    by = read_sort(connection, sort) if isinstance(sort, str) else sort
    return by, compile_sort(by)


def _metric(by: Sort) -> str | None:
    """The metric with which an order begins."""
    from ucformat.catalog.filter.check import resolve

    target = resolve(by.keys[0].key)
    return target.path[0] if target.root == "metric" else None


def _first_by_metric(
    connection: Connection,
    each: Sequence[ColumnElement[bool]],
    by: Sort,
    order: Sequence[ColumnElement[Any]],
    walked: int,
) -> Select[Any]:
    """The first checkpoints in an order that begins with a metric: of those with the best values, so many.

    These are found by the index of the metric, whereas sorting reads it of every checkpoint.
    """
    name, down = _metric(by), by.keys[0].descending
    value = Metric.value.desc() if down else Metric.value.asc()
    values = sa.select(Metric.checkpoint, Metric.value).where(
        Metric.name == name, Metric.value.is_not(None)
    )
    best = values.order_by(value).limit(walked).subquery()
    last = connection.scalar(
        sa.select(values.order_by(value).offset(walked).limit(1).subquery().c.value)
    )
    chosen = (
        sa.select(CheckpointRow.serial)
        .join(best, best.c.checkpoint == CheckpointRow.serial)
        .where(*each)
    )
    if last is not None:  # of equal values, others may come first
        chosen = chosen.where(best.c.value > last if down else best.c.value < last)
    return chosen.order_by(*order)


def count_checkpoints(
    connection: Connection,
    where: str | Node,
    now: datetime,
    *,
    deleted: bool,
    most: int | None = None,
) -> int | None:
    """Count the checkpoints that match; None if more than `most` would have to be tested."""
    conditions = _where(connection, where, now, deleted=deleted)
    criteria: Sequence[ColumnElement[bool]] | None
    if most is None:
        criteria = conditions.all(connection)
    else:
        criteria = conditions.few(connection, most)
        everything = sa.select(sa.func.count()).select_from(
            sa.select(CheckpointRow.serial).limit(most + 1).subquery()
        )
        if criteria is None and connection.execute(everything).scalar_one() > most:
            return None
        criteria = criteria or conditions.each
    if len(criteria) == 1 and criteria[0] is _COMMITTED:
        criteria = (CheckpointRow.state == "committed",)  # whose index has all that is counted
    return connection.execute(
        sa.select(sa.func.count()).select_from(CheckpointRow).where(*criteria)
    ).scalar_one()


_FACETS: tuple[tuple[str, Any, Any], ...] = (
    (
        "run",
        RunRow.name,
        sa.select(RunRow.name, sa.func.count())
        .select_from(CheckpointRow)
        .join(RunRow, RunRow.id == CheckpointRow.run_id),
    ),
    ("kind", CheckpointRow.kind, sa.select(CheckpointRow.kind, sa.func.count())),
    (
        "tag",
        Tag.name,
        sa.select(Tag.name, sa.func.count())
        .select_from(CheckpointRow)
        .join(Tag, Tag.checkpoint == CheckpointRow.serial),
    ),
)


def count_values(connection: Connection, serials: Sequence[int]) -> dict[str, dict[str, int]]:
    """How many of these checkpoints have each run, kind and tag, the most frequent first."""
    counted: dict[str, dict[str, int]] = {}
    for name, column, query in _FACETS:
        numbers: dict[str, int] = {}
        for page in pages(serials):
            rows = connection.execute(query.where(CheckpointRow.serial.in_(page)).group_by(column))
            for value, number in rows:
                numbers[value] = numbers.get(value, 0) + number
        counted[name] = dict(sorted(numbers.items(), key=lambda item: (-item[1], item[0])))
    return counted


def find_series(
    connection: Connection,
    metrics: Mapping[str, str],
    where: str | Node,
    now: datetime,
    *,
    most: int,
) -> dict[str, list[tuple[int, float]]]:
    """As `Catalog.series`: one query, which reads the last steps of each run by an index."""
    if not metrics:
        return {}
    each = _where(connection, where, now, deleted=False).each
    parts = [
        sa.select(
            sa.select(
                sa.literal(run).label("run"),
                CheckpointRow.step.label("step"),
                Metric.value.label("value"),
            )
            .join(Metric, sa.and_(Metric.checkpoint == CheckpointRow.serial, Metric.name == metric))
            .where(
                CheckpointRow.run_id
                == sa.select(RunRow.id).where(RunRow.name == run).scalar_subquery(),
                CheckpointRow.step.is_not(None),
                Metric.value.is_not(None),
                *each,
            )
            .order_by(CheckpointRow.step.desc())
            .limit(most)
            .subquery()
        )
        for run, metric in metrics.items()
    ]
    series: dict[str, list[tuple[int, float]]] = {run: [] for run in metrics}
    for run, step, value in connection.execute(sa.union_all(*parts)):
        series[run].append((step, value))
    return {run: sorted(points) for run, points in series.items()}


@dataclass(frozen=True, slots=True)
class _Row:
    """A checkpoint as `catalog.lines` sees it."""

    serial: int
    id: str
    run: str
    step: int | None
    commits: int | None
    created: datetime
    nbytes: int
    launch: str | None
    continues: Mapping[str, int]


def find_lines(
    connection: Connection, where: str | Node, now: datetime
) -> list[tuple[str, int, int, int]]:
    """Find the lines of all runs, by run and then the newest first.

    Returns:
        Of each line the run, the serial of the head, the number of checkpoints, and their bytes.
    """
    conditions = _where(connection, where, now, deleted=False)
    chosen = sa.select(CheckpointRow.serial).where(*conditions.all(connection))
    columns = (
        CheckpointRow.serial,
        CheckpointRow.id,
        RunRow.name,
        CheckpointRow.step,
        CheckpointRow.commits,
        CheckpointRow.created,
    )
    query = sa.select(*columns, CheckpointRow.nbytes, CheckpointRow.launch_id).join(
        RunRow, RunRow.id == CheckpointRow.run_id
    )
    rows = connection.execute(query.where(CheckpointRow.serial.in_(chosen))).all()
    launches = load_continuations(connection, {row.launch_id for row in rows})
    runs: dict[str, list[_Row]] = {}
    for serial, name, run, step, commits, created, nbytes, number in rows:
        launch, _, continues = launches[number]
        row = _Row(serial, name, run, step, commits, created, nbytes, launch, continues)
        runs.setdefault(run, []).append(row)
    return [
        (run, head.serial, len(line), sum(row.nbytes for row in line))
        for run in sorted(runs)
        for head, line in sorted(lines(runs[run]), key=lambda pair: pair[0].created, reverse=True)
    ]


def find_runs(
    connection: Connection,
    where: str,
    now: datetime,
    *,
    metric: str | None,
    mode: Literal["min", "max"],
    limit: int | None,
    offset: int,
) -> list[RunEntry]:
    """Find runs, those that were saved last first; of their checkpoints, those that match a filter."""
    row = CheckpointRow
    if metric is not None:
        from ucformat.catalog.filter.compile import read_filter
        from ucformat.catalog.filter.syntax import spell

        # an unknown name is an error
        read_filter(connection, f"{spell(('metric', metric))} is not null")
    latest = sa.func.max(row.created)
    matches: ColumnElement[bool]
    if where.strip():
        matches = row.serial.in_(
            _all(_where(connection, where, now, deleted=False).all(connection))
        )
        newest = (
            sa.select(row.run_id, latest.label("at")).where(matches).group_by(row.run_id).subquery()
        )
        saved = sa.select(RunRow.id, RunRow.name, newest.c.at).join(
            newest, newest.c.run_id == RunRow.id
        )
    else:  # of each run one row of the index that has all that is asked for
        matches = row.state == "committed"
        one = sa.select(latest).where(row.run_id == RunRow.id, matches).scalar_subquery()
        saved = sa.select(RunRow.id, RunRow.name, one.label("at"))
    at = saved.subquery()
    query = sa.select(at.c.id, at.c.name).where(at.c.at.is_not(None))
    query = query.order_by(at.c.at.desc(), at.c.name).limit(limit).offset(offset)
    names = {number: str(name) for number, name in connection.execute(query)}
    listed: dict[int, RunEntry] = {}
    best: dict[int, BestEntry] = {}
    for page in pages(list(names)):
        members = (row.run_id.in_(page), matches)
        columns = (sa.func.count(), sa.func.min(row.step), sa.func.max(row.step))
        sizes = (row.nbytes, sa.func.coalesce(row.files_nbytes, row.nbytes))
        totals = [sa.cast(sa.func.sum(size), sa.BigInteger) for size in sizes]
        times = (sa.func.min(row.created), sa.func.max(row.created))
        grouped = sa.select(row.run_id, *columns, *totals, *times).where(*members)
        rows = connection.execute(grouped.group_by(row.run_id))
        listed |= {number: RunEntry(names[number], *rest) for number, *rest in rows}
        if metric is not None:
            best |= _best(connection, members, metric, mode)
    return [replace(listed[number], best=best.get(number)) for number in names]


def _best(
    connection: Connection,
    members: Sequence[ColumnElement[bool]],
    metric: str,
    mode: Literal["min", "max"],
) -> dict[int, BestEntry]:
    """The best value of a metric in each run; a NaN is none."""
    row = CheckpointRow
    # by the checkpoint: SQLite would go through all values of the metric
    value = (
        sa.select(Metric.value)
        .where(Metric.checkpoint == row.serial, Metric.name == metric)
        .scalar_subquery()
    )
    valued = (
        sa.select(row.run_id, row.serial, row.step, value.label("value")).where(*members).subquery()
    )
    order = valued.c.value.asc() if mode == "min" else valued.c.value.desc()
    place = sa.func.row_number().over(
        partition_by=valued.c.run_id, order_by=(order, valued.c.step, valued.c.serial)
    )
    ranked = sa.select(valued, place.label("place")).where(valued.c.value.is_not(None)).subquery()
    first = (
        sa.select(ranked.c.run_id, ranked.c.value, row.id, row.step)
        .join(row.__table__, row.serial == ranked.c.serial)
        .where(ranked.c.place == 1)
    )
    return {number: BestEntry(*rest) for number, *rest in connection.execute(first)}


def is_empty(connection: Connection) -> bool:
    """Whether there is no checkpoint at all."""
    return connection.scalar(sa.select(CheckpointRow.serial).limit(1)) is None


@dataclass(frozen=True)
class _Conditions:
    """The conditions of a search, all of which a checkpoint meets.

    `each` tests them on a few checkpoints. `parts` has each in the form that finds checkpoints by
    an index, and a query for these if there is an index. `committed` says whether one is that the
    checkpoint is committed.
    """

    each: tuple[ColumnElement[bool], ...]
    parts: tuple[tuple[ColumnElement[bool], Select[Any] | None], ...]
    committed: bool

    def few(self, connection: Connection, most: int) -> Sequence[ColumnElement[bool]] | None:
        """The conditions by which to find checkpoints, if one of them is met by at most so many."""
        for i, (condition, rows) in enumerate(self.parts) if len(self.parts) > 1 else ():
            if rows is None:
                continue
            number = sa.select(sa.func.count()).select_from(rows.limit(most + 1).subquery())
            if connection.execute(number).scalar_one() <= most:
                return condition, *(test for j, test in enumerate(self.each) if j != i)
        return None

    def all(self, connection: Connection) -> Sequence[ColumnElement[bool]]:
        """The conditions by which to find checkpoints, by the one that fewest meet."""
        few = (self.few(connection, most) for most in _WALKED)
        return next((f for f in few if f is not None), [condition for condition, _ in self.parts])


_COMMITTED = unindexed(CheckpointRow.state) == "committed"


def _where(
    connection: Connection, where: str | Node, now: datetime, *, deleted: bool
) -> _Conditions:
    """The conditions of a filter; the names in one that was parsed before are not checked."""
    each: list[ColumnElement[bool]] = []
    parts: list[tuple[ColumnElement[bool], Select[Any] | None]] = []
    keys: set[str] = set()
    if not isinstance(where, str) or where.strip():
        from ucformat.catalog.filter.check import used_keys
        from ucformat.catalog.filter.compile import compile_filter, compile_rows, read_filter
        from ucformat.catalog.filter.syntax import operands

        node = read_filter(connection, where) if isinstance(where, str) else where
        for operand in operands(node):
            each.append(compile_filter(operand, now=now, each=True))
            parts.append((compile_filter(operand, now=now), compile_rows(operand, now=now)))
        keys = used_keys(node)
    committed = not deleted and "state" not in keys
    if committed:
        each.append(_COMMITTED)
        parts.append((_COMMITTED, None))
    return _Conditions(tuple(each), tuple(parts), committed)
