"""Which checkpoint is the newest: by what their writers knew of each other, and by clocks only where nobody knew.

A training counts its commits (`commits` of a manifest). Of one run's checkpoints that is newer which counts more: it
was made from the others, or by one who had seen them. Where counts are equal, the higher step is newer, and then what
was created later. One that nobody counted (of an engine, or converted) stands by its step, as if it counted as many as
the greatest at its step or before. Different runs, and what has neither step nor count, are compared by time. In a run
times never go back: each stands no earlier than what it is newer than.
"""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from sqlalchemy import ColumnElement, Select

__all__ = ["Dated", "contradiction", "contradictions", "newest_first", "select_newest_first"]


class Dated(Protocol):
    """What orders a checkpoint."""

    @property
    def id(self) -> str:
        """Which it is."""

    @property
    def run(self) -> str | None:
        """The training that it is of."""

    @property
    def step(self) -> int | None:
        """How far that was."""

    @property
    def commits(self) -> int | None:
        """How many of its checkpoints were committed by then."""

    @property
    def created(self) -> datetime:
        """When, by its writer's clock."""


T = TypeVar("T", bound=Dated)


def newest_first(items: Iterable[T]) -> list[T]:
    """Checkpoints, the newest first."""
    runs: dict[object, list[T]] = {}
    for item in items:
        alone = item.run is None or (item.step is None and item.commits is None)
        runs.setdefault(("", item.id) if alone else (item.run,), []).append(item)
    found: list[tuple[tuple[Any, ...], T]] = []
    for run in runs.values():
        count, places = 0, []
        for item in sorted(run, key=lambda i: (_step(i), i.commits is None)):
            count = max(count, item.commits or 0)
            own = count if item.commits is None else item.commits
            places.append(((own, _step(item), item.created, item.id), item))
        places.sort(key=itemgetter(0))
        latest = min(item.created for item in run)
        for place, item in places:
            latest = max(latest, item.created)
            found.append(((latest, *place), item))
    return [item for _, item in sorted(found, key=itemgetter(0), reverse=True)]


def _step(item: Dated) -> int:
    return -1 if item.step is None else item.step


def select_newest_first(*where: ColumnElement[bool], first: int | None = None) -> Select[Any]:
    """The same as a query: serial, id, kind, step, commits and created, and `place`, the count by which each stands.

    Where so many are enough as `first` says, only the runs of as many that were created last are put in order.
    """
    import sqlalchemy as sa

    from ucformat.catalog.models import Checkpoint

    step = sa.func.coalesce(Checkpoint.step, -1)
    alone = sa.or_(Checkpoint.run_id.is_(None), sa.and_(Checkpoint.step.is_(None), Checkpoint.commits.is_(None)))
    run: list[Any] = [Checkpoint.run_id, sa.case((alone, Checkpoint.serial))]
    before = sa.func.max(Checkpoint.commits).over(partition_by=run, order_by=step)
    columns = ("serial", "id", "kind", "step", "commits", "created")
    if first is not None:  # of another run nothing stands later than these
        last = sa.select(Checkpoint.serial, Checkpoint.run_id).where(*where).order_by(Checkpoint.created.desc())
        top = last.limit(first).cte()
        where += (
            sa.or_(Checkpoint.serial.in_(sa.select(top.c.serial)), Checkpoint.run_id.in_(sa.select(top.c.run_id))),
        )
    placed = (
        sa.select(
            *(getattr(Checkpoint, name) for name in columns),
            run[0].label("run"),
            run[1].label("alone"),
            sa.func.coalesce(Checkpoint.commits, before, 0).label("place"),
            step.label("at"),
        )
        .where(*where)
        .subquery()
        .c
    )
    order = (placed.place, placed["at"], placed.created, placed.serial)
    latest = sa.func.max(placed.created).over(partition_by=(placed.run, placed.alone), order_by=order)
    found = sa.select(*(placed[name] for name in columns), placed.place)
    return found.order_by(latest.desc(), *(key.desc() for key in order))


def contradictions(items: Iterable[T], name: Callable[[T], str]) -> list[str]:
    """What to warn of: of each run, the newest checkpoint that is older by its time than one that counts less.

    Args:
        items: checkpoints, in any order.
        name: how one is called in the warning.
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
    """What to say of two checkpoints of which the one was committed later, and created earlier.

    Args:
        newer: what the one is called that counts more.
        created: when, by its writer's clock.
        older: what the other is called.
        before: when that one was created, which is later.
    """
    times = f"{created.isoformat()} and {before.isoformat()}"
    return f"{newer} was committed after {older}, and by a clock that was wrong is older ({times}): its count decides"
