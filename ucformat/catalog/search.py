"""Finding checkpoints by a filter, in an order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.models import Checkpoint, Metric
from ucformat.catalog.newest import select_newest_first
from ucformat.catalog.rows import unindexed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection, Select

    from ucformat.catalog.filter.syntax import Sort

__all__ = ["NEWEST", "count_checkpoints", "find_serials"]

#: The default order (`catalog.newest`).
NEWEST = "newest"


def find_serials(
    connection: Connection,
    where: str,
    now: datetime,
    *,
    sort: str,
    limit: int | None,
    offset: int,
    deleted: bool,
) -> list[int]:
    """Find the checkpoints that match a filter.

    Args:
        connection: a transaction.
        where: the filter; empty for all checkpoints.
        now: the time that ages and holds refer to.
        sort: the keys to sort by, or NEWEST.
        limit: the maximum number of checkpoints (None: all).
        offset: how many to skip.
        deleted: include those that are no longer committed, as a filter on `state` does.

    Returns:
        Their serials, in order.
    """
    conditions, each = _where(connection, where, now, deleted=deleted)
    if sort == NEWEST:
        committed = (Checkpoint.state == "committed",) if each and each[-1] is _COMMITTED else ()
        since, few = None, False
        if limit is not None:
            since, few = _since(connection, conditions, each, committed, max(1, offset + limit))
        chosen = select_newest_first(*(each if few else conditions), since=since, recent=committed)
    else:
        by, order = _order(connection, sort, now)
        for walked in _WALKED if limit is not None and _metric(by) is not None else ():
            found = _first_by_metric(connection, each, by, order, walked).limit(limit).offset(offset)
            if len(first := list(connection.scalars(found))) == limit:
                return first
        chosen = sa.select(Checkpoint.serial).where(*conditions).order_by(*order)
    return list(connection.scalars(chosen.limit(limit).offset(offset)))


#: Of how many checkpoints, in the order of an index, a filter is tested before all that match are looked for.
_WALKED = (1_000, 20_000)


def _since(
    connection: Connection,
    conditions: Sequence[ColumnElement[bool]],
    each: Sequence[ColumnElement[bool]],
    committed: Sequence[ColumnElement[bool]],
    count: int,
) -> tuple[datetime | None, bool]:
    """When the first of the `count` checkpoints was created that were created last; None if there are fewer.

    The second value says whether they were found among the last ones of all, so that it is faster to test `each`.
    """

    def at(number: int, *where: ColumnElement[bool]) -> datetime | None:
        chosen = sa.select(Checkpoint.created).where(*where).order_by(Checkpoint.created.desc())
        return connection.scalar(chosen.offset(number).limit(1))

    for walked in _WALKED if committed else ():
        before = at(walked, *committed)
        later = () if before is None else (Checkpoint.created > before,)
        since = at(count - 1, *committed, *later, *each)
        if since is not None:
            return since, True
    return at(count - 1, *conditions), False


def _order(connection: Connection, sort: str, now: datetime) -> tuple[Sort, list[ColumnElement[Any]]]:
    from ucformat.catalog.filter import check_names, compile_sort, parse_sort

    by = parse_sort(sort)
    check_names(connection, by, sort)
    return by, compile_sort(by, now=now)


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
    known = sa.select(Metric.checkpoint, Metric.value).where(Metric.name == name, Metric.value.is_not(None))
    best = known.order_by(value).limit(walked).subquery()
    last = connection.scalar(sa.select(known.order_by(value).offset(walked).limit(1).subquery().c.value))
    chosen = sa.select(Checkpoint.serial).join(best, best.c.checkpoint == Checkpoint.serial).where(*each)
    if last is not None:  # of equal values, others may come first
        chosen = chosen.where(best.c.value > last if down else best.c.value < last)
    return chosen.order_by(*order)


def count_checkpoints(connection: Connection, where: str, now: datetime, *, deleted: bool) -> int:
    """Count the checkpoints that match a filter.

    Args:
        connection: a transaction.
        where: the filter; empty for all checkpoints.
        now: the time that ages and holds refer to.
        deleted: include those that are no longer committed, as a filter on `state` does.
    """
    conditions, _ = _where(connection, where, now, deleted=deleted)
    return connection.execute(sa.select(sa.func.count()).select_from(Checkpoint).where(*conditions)).scalar_one()


_COMMITTED = unindexed(Checkpoint.state) == "committed"


def _where(
    connection: Connection, where: str, now: datetime, *, deleted: bool
) -> tuple[list[ColumnElement[bool]], list[ColumnElement[bool]]]:
    """The conditions by which to find checkpoints, and the same ones to test `each` of a few."""
    found: list[ColumnElement[bool]] = []
    each: list[ColumnElement[bool]] = []
    keys: set[str] = set()
    if where.strip():
        from ucformat.catalog.filter import check_names, compile_filter, parse, used_keys

        node = parse(where)
        check_names(connection, node, where)
        found.append(compile_filter(node, now=now))
        each.append(compile_filter(node, now=now, each=True))
        keys = used_keys(node)
    if not deleted and "state" not in keys:
        found.append(_COMMITTED)
        each.append(_COMMITTED)
    return found, each
