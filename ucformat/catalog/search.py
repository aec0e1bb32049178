"""Finding checkpoints by a filter, in an order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa

from ucformat.catalog.entries import BestEntry, CurvesEntry, RunEntry
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
    return _find(connection, conditions, sort, limit, offset)


def find_page(
    connection: Connection,
    where: str | Node,
    now: datetime,
    *,
    sort: str | Sort,
    limit: int,
    offset: int,
    counted: int,
) -> tuple[list[int], list[int], int | None]:
    """As `Catalog.page`: the checkpoints of the page, those whose values are counted, and how many match."""
    conditions = _where(connection, where, now, deleted=False)
    if offset + limit <= counted:  # one search is for both
        first = _find(connection, conditions, sort, counted, 0)
        serials = first[offset : offset + limit]
    else:
        serials = _find(connection, conditions, sort, limit, offset)
        first = _find(connection, conditions, sort, counted, 0)
    if len(first) < counted:
        return serials, first, len(first)
    return serials, first, _count(connection, conditions, _COUNTED)


def _find(
    connection: Connection,
    conditions: _Conditions,
    sort: str | Sort,
    limit: int | None,
    offset: int,
) -> list[int]:
    """As `find_serials`, by conditions."""
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
_COUNTED = 10_000  # checkpoints at most that are tested to say how many match


def _newest_first(
    connection: Connection, conditions: _Conditions, count: int | None
) -> Select[Any]:
    """The query for at least so many of the newest checkpoints that match, in order."""
    columns: Any = sa.select(
        CheckpointRow.serial, CheckpointRow.run_id, CheckpointRow.step, CheckpointRow.commits
    )
    for walked in _WALKED if count is not None and conditions.committed else ():
        # the newest lie side by side
        if (criteria := conditions.few(connection, walked // 2)) is not None:
            return select_newest_first(*criteria)
        start = _created(connection, walked, *conditions.along)
        later = () if start is None else (CheckpointRow.created > start,)
        along = (*conditions.along, *conditions.each)
        since = _created(connection, (count or 1) - 1, *later, *along)
        if since is not None:
            last = columns.where(CheckpointRow.created >= since, *along)
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
    return _count(connection, _where(connection, where, now, deleted=deleted), most)


def _count(connection: Connection, conditions: _Conditions, most: int | None) -> int | None:
    """As `count_checkpoints`, by conditions."""
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
    """As `Catalog.series`: the last steps of each run are read by an index."""
    if not metrics:
        return {}
    # built once: that takes longer than to ask for a run
    query = (
        sa.select(CheckpointRow.step, Metric.value)
        .join(Metric, Metric.checkpoint == CheckpointRow.serial)
        .where(
            Metric.name == sa.bindparam("metric"),
            _of_run(sa.bindparam("run")),
            CheckpointRow.step.is_not(None),
            Metric.value.is_not(None),
            *_where(connection, where, now, deleted=False).each,
        )
        .order_by(CheckpointRow.step.desc())
        .limit(most)
    )
    return {
        run: sorted(
            (step, value)
            for step, value in connection.execute(query, {"run": run, "metric": metric})
        )
        for run, metric in metrics.items()
    }


def _of_run(name: Any) -> ColumnElement[bool]:
    """Whether a checkpoint is of a run: a condition on a column of indexes, with one value."""
    run = sa.select(RunRow.id).where(RunRow.name == name).scalar_subquery()
    return CheckpointRow.run_id == run


_NAMED = 200  # metrics that are not drawn and yet named


def find_curves(
    connection: Connection,
    run: str,
    where: str | Node,
    now: datetime,
    *,
    most: int,
    drawn: int,
) -> CurvesEntry:
    """As `Catalog.curves`.

    What is read does not grow with the run, unless few of its checkpoints match: those between are
    read to find them.
    """
    each = _where(connection, where, now, deleted=False).each
    steps, every = _along(connection, (_of_run(run), *each), most)
    of_these = Metric.checkpoint.in_(list(steps))
    names = list(
        connection.scalars(
            sa.select(Metric.name)
            .where(of_these)
            .group_by(Metric.name)
            .order_by(sa.func.count().desc(), Metric.name)
        )
    )
    values = sa.select(Metric.name, Metric.checkpoint, Metric.value).where(
        of_these, Metric.name.in_(names[:drawn])
    )
    by_name: dict[str, dict[int, float]] = {name: {} for name in names[:drawn]}
    for name, serial, value in connection.execute(values):
        by_name[name][serial] = float("nan") if value is None else value
    points = {
        name: [(step, valued[serial]) for serial, step in steps.items() if serial in valued]
        for name, valued in by_name.items()
    }
    others = names[drawn : drawn + _NAMED]
    return CurvesEntry(points, others, max(0, len(names) - drawn - _NAMED), every)


def _along(
    connection: Connection, members: Sequence[ColumnElement[bool]], most: int
) -> tuple[dict[int, int], int]:
    """The steps of checkpoints, in order, by the serial, and of how many steps each is the first.

    Each is looked up from the one before it, so those between are not read, except for such as do not match.
    """
    row, other = CheckpointRow, CheckpointRow.__table__.alias().c
    inside = sa.select(row.serial, row.step).where(row.step.is_not(None), *members)
    upwards = inside.order_by(row.step, row.serial)
    steps: dict[int, int] = dict(connection.execute(upwards.limit(most + 1)).all())
    if len(steps) <= most:
        return steps, 1
    serial, first = next(iter(steps.items()))
    last = connection.execute(inside.order_by(row.step.desc()).limit(1)).one().step
    every = (last - first) // most + 1
    chosen = sa.select(
        sa.literal(serial, sa.Integer).label("serial"),
        sa.cast(sa.literal(first, sa.BigInteger), sa.BigInteger).label("step"),
    ).cte("chosen", recursive=True)
    beyond = ((chosen.c.step - first) // every + 1) * every + first
    following = sa.select(row.serial).where(row.step >= beyond, *members).correlate(chosen)
    following = following.order_by(row.step, row.serial).limit(1)
    chosen = chosen.union_all(
        sa.select(other.serial, other.step)
        .select_from(chosen)
        .join(other.serial.table, other.serial == following.scalar_subquery())
    )
    rows = connection.execute(sa.select(chosen).order_by(chosen.c.step))
    return dict(rows.all()), every


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
            best |= _best(connection, page, matches, metric, mode)
    return [replace(listed[number], best=best.get(number)) for number in names]


def _best(
    connection: Connection,
    runs: Sequence[int],
    matches: ColumnElement[bool],
    metric: str,
    mode: Literal["min", "max"],
) -> dict[int, BestEntry]:
    """The best value of a metric in each run, of the checkpoints that match; a NaN is none."""
    row = CheckpointRow
    members = (row.run_id.in_(runs), matches)
    valued = (Metric.name == metric, Metric.value.is_not(None))
    order = Metric.value.asc() if mode == "min" else Metric.value.desc()
    # of most runs it is among the best of all, which the index of the metric has side by side
    first = sa.select(Metric.checkpoint, Metric.value).where(*valued).order_by(order)
    walked = first.limit(_WALKED[-1]).subquery().c
    chosen = getattr(sa.func, mode)
    query = sa.select(row.run_id, chosen(walked.value)).join(
        walked.value.table, walked.checkpoint == row.serial
    )
    best: dict[int, float] = dict(
        connection.execute(query.where(*members).group_by(row.run_id)).all()
    )
    if others := [run for run in runs if run not in best]:
        # by the checkpoint: SQLite would go through all values of the metric
        value = sa.select(Metric.value).where(Metric.checkpoint == row.serial, *valued)
        query = sa.select(row.run_id, chosen(value.scalar_subquery()))
        rows = connection.execute(query.where(row.run_id.in_(others), matches).group_by(row.run_id))
        best |= {run: of_run for run, of_run in rows if of_run is not None}
    listed: dict[int, BestEntry] = {}
    for page in pages(sorted(set(best.values()))):
        place = sa.func.row_number().over(
            partition_by=(row.run_id, Metric.value),
            order_by=(
                sa.func.coalesce(row.step, -1),
                row.serial,
            ),  # databases sort NULL differently
        )
        equal = (
            sa.select(row.run_id, Metric.value, row.id, row.step, place.label("place"))
            .join(Metric, Metric.checkpoint == row.serial)
            .where(Metric.name == metric, Metric.value.in_(page), *members)
            .subquery()
        )
        for run, *rest, _ in connection.execute(sa.select(equal).where(equal.c.place == 1)):
            if rest[0] == best.get(run):
                listed[run] = BestEntry(*rest)
    return listed


def is_empty(connection: Connection) -> bool:
    """Whether there is no checkpoint at all."""
    return connection.scalar(sa.select(CheckpointRow.serial).limit(1)) is None


@dataclass(frozen=True)
class _Conditions:
    """The conditions of a search, all of which a checkpoint meets.

    `each` tests them on a few checkpoints. `parts` has each in the form that finds checkpoints by
    an index, and a query for these if there is an index. `committed` says whether one is that the
    checkpoint is committed; `along` are those by which the newest are walked along an index: of
    all, or of one run.
    """

    each: tuple[ColumnElement[bool], ...]
    parts: tuple[tuple[ColumnElement[bool], Select[Any] | None], ...]
    committed: bool
    along: tuple[ColumnElement[bool], ...]
    _numbers: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # by part: up to, and counted

    def few(self, connection: Connection, most: int) -> Sequence[ColumnElement[bool]] | None:
        """The conditions by which to find checkpoints, if one of them is met by at most so many."""
        for i, (condition, rows) in enumerate(self.parts) if len(self.parts) > 1 else ():
            if rows is None:
                continue
            if self._number(connection, i, rows, most) <= most:
                return condition, *(test for j, test in enumerate(self.each) if j != i)
        return None

    def _number(self, connection: Connection, part: int, rows: Select[Any], most: int) -> int:
        """How many checkpoints meet a part, or a number above `most`."""
        counted_to, number = self._numbers.get(part, (-1, 0))
        if number > counted_to and counted_to < most:
            few = sa.select(sa.func.count()).select_from(rows.limit(most + 1).subquery())
            number = connection.execute(few).scalar_one()
            self._numbers[part] = most, number
        return number

    def all(self, connection: Connection) -> Sequence[ColumnElement[bool]]:
        """The conditions by which to find checkpoints, by the one that fewest meet."""
        few = (self.few(connection, most) for most in _WALKED)
        return next((f for f in few if f is not None), [condition for condition, _ in self.parts])


_COMMITTED = unindexed(CheckpointRow.state) == "committed"


def _one_run(node: Node) -> str | None:
    """The run of which all checkpoints are that meet a condition, if it says that."""
    from ucformat.catalog.filter.syntax import Compare, In, Text

    match node:
        case Compare(key, "=", Text(run)) | In(key, (Text(run),), False) if key.parts == ("run",):
            return run
    return None


def _where(
    connection: Connection, where: str | Node, now: datetime, *, deleted: bool
) -> _Conditions:
    """The conditions of a filter; the names in one that was parsed before are not checked."""
    each: list[ColumnElement[bool]] = []
    parts: list[tuple[ColumnElement[bool], Select[Any] | None]] = []
    keys: set[str] = set()
    run = None
    if not isinstance(where, str) or where.strip():
        from ucformat.catalog.filter.check import used_keys
        from ucformat.catalog.filter.compile import compile_filter, compile_rows, read_filter
        from ucformat.catalog.filter.syntax import operands

        node = read_filter(connection, where) if isinstance(where, str) else where
        for operand in operands(node):
            run = _one_run(operand) or run
            each.append(compile_filter(operand, now=now, each=True))
            parts.append((compile_filter(operand, now=now), compile_rows(operand, now=now)))
        keys = used_keys(node)
    committed = not deleted and "state" not in keys
    if committed:
        each.append(_COMMITTED)
        parts.append((_COMMITTED, None))
    along: tuple[ColumnElement[bool], ...] = (CheckpointRow.state == "committed",)
    if run is not None:
        along = (_of_run(run), *along)
    return _Conditions(tuple(each), tuple(parts), committed, along)
