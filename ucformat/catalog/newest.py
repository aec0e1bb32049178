"""The order of checkpoints by age: by counts of commits where they exist, because clocks may be wrong.

A training counts its commits (`commits` of a manifest). Within a run, the checkpoint with the higher count is newer,
since its writer had loaded or seen the others; with equal counts the one with the higher step, then the one that was
created later. A checkpoint without a count (of an engine, or converted) is treated as having the highest count at its
step or before. Runs, and checkpoints with neither step nor count, are compared by time, where a checkpoint is never
earlier than those of its run that it is newer than.
"""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from sqlalchemy import ColumnElement, CompoundSelect, Connection, Select

__all__ = ["Dated", "before", "contradiction", "contradictions", "newest_first", "select_newest_first"]


class Dated(Protocol):
    """The properties of a checkpoint that determine its order."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def run(self) -> str | None:
        """The name of its run."""

    @property
    def step(self) -> int | None:
        """The training step."""

    @property
    def commits(self) -> int | None:
        """The number of checkpoints that the run had committed, including this one."""

    @property
    def created(self) -> datetime:
        """When it was created, by its writer's clock."""


T = TypeVar("T", bound=Dated)


def newest_first(items: Iterable[T]) -> list[T]:
    """Sort checkpoints, newest first.

    Args:
        items: the checkpoints, in any order.
    """
    runs: dict[object, list[T]] = {}
    for item in items:
        alone = item.run is None or (item.step is None and item.commits is None)
        runs.setdefault(("", item.id) if alone else (item.run,), []).append(item)
    found: list[tuple[tuple[Any, ...], T]] = []
    for run in runs.values():
        count, ranked = 0, []
        for item in sorted(run, key=lambda i: (_step(i), i.commits is None)):
            count = max(count, item.commits or 0)
            own = count if item.commits is None else item.commits
            ranked.append(((own, _step(item), item.created, item.id), item))
        ranked.sort(key=itemgetter(0))
        latest = min(item.created for item in run)
        for rank, item in ranked:
            latest = max(latest, item.created)
            found.append(((latest, *rank), item))
    return [item for _, item in sorted(found, key=itemgetter(0), reverse=True)]


def _step(item: Dated) -> int:
    return -1 if item.step is None else item.step


def select_newest_first(*where: ColumnElement[bool]) -> Select[Any]:
    """The same order as a query.

    Args:
        where: conditions on `models.Checkpoint`.

    Returns:
        A query for serial, id, kind, step, commits and created, and `counted`: the commits or their substitute.
    """
    import sqlalchemy as sa

    from ucformat.catalog.models import Checkpoint

    step = sa.func.coalesce(Checkpoint.step, -1)
    alone = sa.or_(Checkpoint.run_id.is_(None), sa.and_(Checkpoint.step.is_(None), Checkpoint.commits.is_(None)))
    run: list[Any] = [Checkpoint.run_id, sa.case((alone, Checkpoint.serial))]
    before = sa.func.max(Checkpoint.commits).over(partition_by=run, order_by=step)
    columns = ("serial", "id", "kind", "step", "commits", "created")
    counted = (
        sa.select(
            *(getattr(Checkpoint, name) for name in columns),
            run[0].label("run"),
            run[1].label("alone"),
            sa.func.coalesce(Checkpoint.commits, before, 0).label("count"),
            step.label("at"),
        )
        .where(*where)
        .subquery()
        .c
    )
    order = (counted["count"], counted["at"], counted.created, counted.serial)
    latest = sa.func.max(counted.created).over(partition_by=(counted.run, counted.alone), order_by=order)
    found = sa.select(*(counted[name] for name in columns), counted["count"].label("counted"))
    return found.order_by(latest.desc(), *(key.desc() for key in order))


def before(connection: Connection, last: Select[Any]) -> ColumnElement[bool]:
    """The condition that is met by all checkpoints that can come before any of the last ones, and by some others.

    These are of the same runs. What comes before one of them has as many commits, or none and a step that is at least
    that of one with as many; in a run without counts, at least its step. What comes after all of them was created
    earlier, and changes the time of none.

    Args:
        connection: a transaction.
        last: a query for serial, run_id, step and commits of all that were created since some time.
    """
    import sqlalchemy as sa

    from ucformat.catalog.models import Checkpoint

    rows = connection.execute(last.limit(_FEW + 1)).all()
    if len(rows) > _FEW:
        return Checkpoint.serial.in_(_before_many(last))
    step, commits = Checkpoint.step, Checkpoint.commits
    least: dict[int, tuple[int, int]] = {}
    for row in rows:
        if row.run_id is not None:
            steps, counts = least.get(row.run_id, (_MOST, _MOST))
            own = -1 if row.step is None else row.step
            least[row.run_id] = min(steps, own), min(counts, row.commits or 0)
    counted = sa.or_(
        sa.false(), *(sa.and_(Checkpoint.run_id == run, commits >= count) for run, (_, count) in least.items())
    )
    query = sa.select(Checkpoint.run_id, sa.func.min(sa.func.coalesce(step, -1))).where(counted)
    lower: dict[int, int] = dict(connection.execute(query.group_by(Checkpoint.run_id)).all())
    parts: list[ColumnElement[bool]] = [Checkpoint.serial.in_([row.serial for row in rows])]
    for run, (own, _) in least.items():
        begin = min(own, lower.get(run, own))
        later = sa.or_(step >= begin, step.is_(None)) if begin < 0 else step >= begin
        parts.append(sa.and_(Checkpoint.run_id == run, later))
    return sa.or_(*parts)


_FEW = 50  # checkpoints whose runs are conditions of a query, with which PostgreSQL estimates better
_MOST = 2**63 - 1


def _before_many(last: Select[Any]) -> CompoundSelect[Any]:
    """The serials of these checkpoints, found in the same query."""
    import sqlalchemy as sa

    from ucformat.catalog.models import Checkpoint

    found = last.cte()
    step, commits = sa.func.min(sa.func.coalesce(found.c.step, -1)), sa.func.min(sa.func.coalesce(found.c.commits, 0))
    least = sa.select(found.c.run_id, step.label("step"), commits.label("commits")).group_by(found.c.run_id).cte()
    run, other = Checkpoint.__table__.alias().c, Checkpoint.__table__.alias().c
    counted = sa.select(sa.func.min(sa.func.coalesce(other.step, -1))).where(
        other.run_id == least.c.run_id, other.commits >= least.c.commits
    )
    parts = [
        sa.select(run.serial).where(run.run_id == least.c.run_id, later)
        for later in (run.step >= least.c.step, run.step >= counted.scalar_subquery(), run.step.is_(None))
    ]
    return sa.union(sa.select(found.c.serial), *parts)


def contradictions(items: Iterable[T], name: Callable[[T], str]) -> list[str]:
    """Warn of runs in which a checkpoint was created earlier than one with fewer commits, by a clock that was wrong.

    Args:
        items: the checkpoints, in any order.
        name: returns the name of a checkpoint for the warning.

    Returns:
        At most one warning for each run, on its newest such checkpoint.
    """
    last: dict[str | None, T] = {}
    found: dict[str | None, str] = {}
    for item in sorted((i for i in items if i.commits is not None), key=attrgetter("commits")):
        other = last.get(item.run, item)
        if item.run is not None and item.created < other.created and item.commits != other.commits:
            found[item.run] = contradiction(name(item), item.created, name(other), other.created)
        last[item.run] = max(other, item, key=attrgetter("created"))
    return list(found.values())


def contradiction(newer: str, created: datetime, older: str, before: datetime) -> str:
    """The warning for two checkpoints of which one was committed later, but created earlier by its clock.

    Args:
        newer: the name of the one with more commits.
        created: when it was created, by its writer's clock.
        older: the name of the other.
        before: when that one was created, which is later.
    """
    times = f"{created.isoformat()} and {before.isoformat()}"
    return f"{newer} was committed after {older}, but created earlier ({times}): a clock was wrong; commits decide"
