"""The order of checkpoints by age: by counts of commits where they exist, because clocks may be wrong.

A training counts its commits (`commits` of a manifest). Within a family, launches of a run that
continue each other (`catalog.lines`), the checkpoint with the higher count is newer, since its
writer had loaded or seen the others; with equal counts the one with the higher step, then the one
that was created later. A checkpoint without a count (of an engine, or converted) is treated as
having the highest count at its step or before. Families, and checkpoints with neither step nor
count, are compared by time, where a checkpoint is never earlier than those of its family that it is
newer than.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from sqlalchemy import ColumnElement, CompoundSelect, Connection, Select


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


class OfFamily(Dated, Protocol):
    """A checkpoint with its family."""

    @property
    def family(self) -> object:
        """What its launch has in common with those that it continues, and with those that continue it."""


T = TypeVar("T", bound=Dated)
F = TypeVar("F", bound=OfFamily)


def newest_first(items: Iterable[F]) -> list[F]:
    """Sort checkpoints, newest first."""
    families: dict[object, list[F]] = {}
    for item in items:
        alone = item.run is None or (item.step is None and item.commits is None)
        families.setdefault(("", item.id) if alone else (item.run, item.family), []).append(item)
    dated: list[tuple[tuple[Any, ...], F]] = []
    for family in families.values():
        latest = min(item.created for item in family)
        for *rank, item in sorted(ranked(family), key=lambda r: r[:-1]):
            latest = max(latest, item.created)
            dated.append(((latest, *rank), item))
    return [item for _, item in sorted(dated, key=itemgetter(0), reverse=True)]


def ranked(items: Iterable[T]) -> list[tuple[int, int, datetime, str, T]]:
    """Give each checkpoint of a family its rank, by which the newest is the greatest: count, step, time and id."""
    count, ranks = 0, []
    for item in sorted(items, key=lambda i: (_step(i), i.commits is None)):
        count = max(count, item.commits or 0)
        own = count if item.commits is None else item.commits
        ranks.append((own, _step(item), item.created, item.id, item))
    return ranks


def _step(item: Dated) -> int:
    return -1 if item.step is None else item.step


def select_newest_first(*where: ColumnElement[bool]) -> Select[Any]:
    """The same order as a query.

    Returns:
        A query for serial, id, kind, step, commits and created, and `counted`: the commits or their
        substitute.
    """
    import sqlalchemy as sa

    from ucformat.catalog.models import CheckpointRow, Launch

    alone = sa.or_(
        CheckpointRow.run_id.is_(None),
        sa.and_(CheckpointRow.step.is_(None), CheckpointRow.commits.is_(None)),
    )
    family = sa.func.coalesce(Launch.family, Launch.id)
    counted = _counted(
        [CheckpointRow.run_id, family, sa.case((alone, CheckpointRow.serial))], where
    )
    order = (counted["counted"], counted["at"], counted.created, counted.serial)
    latest = sa.func.max(counted.created).over(
        partition_by=(counted.part_0, counted.part_1, counted.part_2), order_by=order
    )
    query = sa.select(*(counted[name] for name in (*_COLUMNS, "counted")))
    return query.order_by(latest.desc(), *(key.desc() for key in order))


def select_newest_of_launches(*where: ColumnElement[bool]) -> Select[Any]:
    """A query for the newest checkpoints of each launch, several where they tie."""
    import sqlalchemy as sa

    from ucformat.catalog.models import CheckpointRow

    counted = _counted([CheckpointRow.launch_id], where)
    order = (counted["counted"].desc(), counted["at"].desc())
    place = sa.func.rank().over(partition_by=counted.part_0, order_by=order).label("place")
    placed = sa.select(*(counted[name] for name in (*_COLUMNS, "counted")), place).subquery()
    return sa.select(placed).where(placed.c.place == 1).order_by(placed.c.serial)


_COLUMNS = ("serial", "id", "kind", "step", "commits", "created", "launch_id")


def _counted(parts: list[Any], where: Iterable[ColumnElement[bool]]) -> Any:
    """The columns of a query for checkpoints with their counts, or the substitutes in their part of all."""
    import sqlalchemy as sa

    from ucformat.catalog.models import CheckpointRow, Launch

    step = sa.func.coalesce(CheckpointRow.step, -1)
    before = sa.func.max(CheckpointRow.commits).over(partition_by=parts, order_by=step)
    columns = (getattr(CheckpointRow, name) for name in _COLUMNS)
    keys = (part.label(f"part_{i}") for i, part in enumerate(parts))
    count = sa.func.coalesce(CheckpointRow.commits, before, 0).label("counted")
    query = sa.select(*columns, *keys, count, step.label("at")).outerjoin(
        Launch, Launch.id == CheckpointRow.launch_id
    )
    return query.where(*where).subquery().c


def before(connection: Connection, last: Select[Any]) -> ColumnElement[bool]:
    """The condition that is met by all checkpoints that can come before any of the last ones, and by some others.

    These are of the same runs. What comes before one of them has as many commits, or none and a
    step that is at least that of one with as many; in a run without counts, at least its step. What
    comes after all of them was created earlier, and changes the time of none.
    """
    import sqlalchemy as sa

    from ucformat.catalog.models import CheckpointRow

    rows = connection.execute(last.limit(_FEW + 1)).all()
    if len(rows) > _FEW:
        return CheckpointRow.serial.in_(_before_many(last))
    step, commits = CheckpointRow.step, CheckpointRow.commits
    least: dict[int, tuple[int, int]] = {}
    for row in rows:
        if row.run_id is not None:
            steps, counts = least.get(row.run_id, (_MOST, _MOST))
            own = -1 if row.step is None else row.step
            least[row.run_id] = min(steps, own), min(counts, row.commits or 0)
    counted = sa.or_(
        sa.false(),
        *(
            sa.and_(CheckpointRow.run_id == run, commits >= count)
            for run, (_, count) in least.items()
        ),
    )
    query = sa.select(CheckpointRow.run_id, sa.func.min(sa.func.coalesce(step, -1))).where(counted)
    lower: dict[int, int] = dict(connection.execute(query.group_by(CheckpointRow.run_id)).all())
    parts: list[ColumnElement[bool]] = [CheckpointRow.serial.in_([row.serial for row in rows])]
    for run, (own, _) in least.items():
        begin = min(own, lower.get(run, own))
        later = sa.or_(step >= begin, step.is_(None)) if begin < 0 else step >= begin
        parts.append(sa.and_(CheckpointRow.run_id == run, later))
    return sa.or_(*parts)


_FEW = (
    50  # checkpoints whose runs are conditions of a query, with which PostgreSQL estimates better
)
_MOST = 2**63 - 1


def _before_many(last: Select[Any]) -> CompoundSelect[Any]:
    """The serials of these checkpoints, found in the same query."""
    import sqlalchemy as sa

    from ucformat.catalog.models import CheckpointRow

    newest = last.cte()
    step, commits = (
        sa.func.min(sa.func.coalesce(newest.c.step, -1)),
        sa.func.min(sa.func.coalesce(newest.c.commits, 0)),
    )
    least = (
        sa.select(newest.c.run_id, step.label("step"), commits.label("commits"))
        .group_by(newest.c.run_id)
        .cte()
    )
    run, other = CheckpointRow.__table__.alias().c, CheckpointRow.__table__.alias().c
    counted = sa.select(sa.func.min(sa.func.coalesce(other.step, -1))).where(
        other.run_id == least.c.run_id, other.commits >= least.c.commits
    )
    parts = [
        sa.select(run.serial).where(run.run_id == least.c.run_id, later)
        for later in (
            run.step >= least.c.step,
            run.step >= counted.scalar_subquery(),
            run.step.is_(None),
        )
    ]
    return sa.union(sa.select(newest.c.serial), *parts)
