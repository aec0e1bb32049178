"""Launches in the catalog: which continue which, and which checkpoints are the newest by that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.lines import position
from ucformat.catalog.models import CheckpointRow, Continuation, Edge, Launch, RunRow
from ucformat.catalog.rows import get_or_insert, lock_names, pages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from sqlalchemy import ColumnElement, CompoundSelect, Connection, Select

    from ucformat.schema.manifest import Manifest

    _Continued = tuple[str | None, str | None, dict[str, int]]


#: A training goes on from the parent of these edges; a launch of the same run that begins so
#: continues the parent's.
TRAINING = ("resume", "reshard", "finetune")


_LOCK = "ucformat:launches"


def family() -> ColumnElement[int]:
    """The number that launches have in common that continue each other."""
    return sa.func.coalesce(Launch.family, Launch.id)


def record_continued(
    connection: Connection, manifests: Mapping[str, Manifest], serials: Collection[int]
) -> None:
    """Record what the launches of new checkpoints continue, by their manifests and by the edges to their parents."""
    continued: dict[tuple[str, str], int] = {}
    for manifest in manifests.values():
        if manifest.launch is None:
            continue
        for other, count in manifest.launch.continues.items():
            key = manifest.launch.id, other
            continued[key] = max(count, continued.get(key, count))
    if continued:
        names = sorted({name for pair in continued for name in pair})
        ids = {name: get_or_insert(connection, Launch, {"name": name}, {}) for name in names}
        add_continuations(connection, {(ids[a], ids[b]): n for (a, b), n in continued.items()})
    if any(manifest.lineage for manifest in manifests.values()):
        link_launches(connection, Edge.child.in_(serials))


def link_launches(connection: Connection, edges: ColumnElement[bool]) -> None:
    """Record that the launches of children continue those of their parents, where a training went on."""
    child, parent = CheckpointRow.__table__.alias().c, CheckpointRow.__table__.alias().c
    query = (
        sa.select(child.launch_id, parent.launch_id, Launch.name, parent.commits, parent.step)
        .select_from(Edge)
        .join(child.serial.table, child.serial == Edge.child)
        .join(parent.serial.table, parent.serial == Edge.parent)
        .join(Launch, Launch.id == parent.launch_id)
        .where(edges, Edge.kind.in_(TRAINING), child.launch_id != parent.launch_id)
    )
    continued: dict[tuple[int, int], int] = {}
    for launch, other, name, commits, step in connection.execute(query):
        here = position(name, commits, step)
        if here is not None:
            continued[launch, other] = max(here, continued.get((launch, other), here))
    add_continuations(connection, continued)


def add_continuations(connection: Connection, continued: Mapping[tuple[int, int], int]) -> None:
    """Record up to which position launches continue others, unless more is recorded, and join their families."""
    if not continued:
        return
    lock_names(connection, _LOCK)
    recorded = {
        (launch, other): at
        for launch, other, at in _direct(connection, {launch for launch, _ in continued})
    }
    for (launch, other), at in sorted(continued.items()):
        if launch == other or recorded.get((launch, other), -1) >= at:
            continue
        keys = {"launch": launch, "continued": other}
        where = (Continuation.launch == launch, Continuation.continued == other)
        if (launch, other) in recorded:
            connection.execute(sa.update(Continuation).where(*where).values(position=at))
        else:
            connection.execute(sa.insert(Continuation).values(**keys, position=at))
            _join(connection, launch, other)


def _join(connection: Connection, launch: int, other: int) -> None:
    """Make the families of two launches one, with the number of the first by name, the same in all catalogs."""
    both = connection.scalars(sa.select(family()).where(Launch.id.in_((launch, other)))).all()
    numbers = connection.scalars(
        sa.select(Launch.id).where(Launch.id.in_(both)).order_by(Launch.name)
    ).all()
    for rest in numbers[1:]:
        members = sa.or_(Launch.id == rest, Launch.family == rest)
        connection.execute(sa.update(Launch).where(members).values(family=numbers[0]))


def _direct(connection: Connection, launches: Iterable[int]) -> Iterable[tuple[int, int, int]]:
    columns = (Continuation.launch, Continuation.continued, Continuation.position)
    for page in pages(sorted(launches)):
        query = sa.select(*columns).where(Continuation.launch.in_(page))
        yield from ((launch, other, here) for launch, other, here in connection.execute(query))


def load_continuations(
    connection: Connection, launches: Collection[int | None]
) -> dict[int | None, _Continued]:
    """Load launches: the name of each, its family, and the positions up to which it continues others, by their names.

    None is that of checkpoints whose launch is unknown.
    """
    ids = sorted({number for number in launches if number is not None})
    launches_by_number: dict[int | None, _Continued] = {None: (None, None, {})}
    first = Launch.__table__.alias().c
    for page in pages(ids):
        query = (
            sa.select(Launch.id, Launch.name, first.name)
            .join(first.id.table, first.id == family())
            .where(Launch.id.in_(page))
        )
        launches_by_number |= {
            number: (name, common, {}) for number, name, common in connection.execute(query)
        }
        continued = (
            sa.select(Continuation.launch, Launch.name, Continuation.position)
            .join(Launch, Launch.id == Continuation.continued)
            .where(Continuation.launch.in_(page))
        )
        for number, name, here in connection.execute(continued):
            launches_by_number[number][2][name] = here
    return launches_by_number


def load_beginnings(connection: Connection, run: str) -> dict[str | None, int]:
    """Load the counts of commits of those checkpoints of a run with which launches of it began."""
    child, parent = CheckpointRow.__table__.alias().c, CheckpointRow.__table__.alias().c
    query = (
        sa.select(Launch.name, sa.func.max(parent.commits))
        .select_from(Edge)
        .join(child.serial.table, child.serial == Edge.child)
        .join(parent.serial.table, parent.serial == Edge.parent)
        .join(Launch, Launch.id == child.launch_id)
        .join(RunRow, RunRow.id == child.run_id)
        .where(RunRow.name == run, parent.run_id == child.run_id)
        .where(Edge.kind.in_(TRAINING), parent.commits.is_not(None))
        .group_by(Launch.name)
    )
    return dict(connection.execute(query).all())


def load_families(
    connection: Connection, launches: Collection[int | None]
) -> dict[int | None, _Continued]:
    """As `load_continuations`, of all launches in the families of these."""
    common = connection.scalars(sa.select(family()).where(Launch.id.in_(launches)).distinct()).all()
    members = sa.select(Launch.id).where(sa.or_(Launch.id.in_(common), Launch.family.in_(common)))
    return load_continuations(connection, connection.scalars(members).all())


def select_newest_first(*where: ColumnElement[bool]) -> Select[Any]:
    """A query for the serials of checkpoints in the order of `lines.newest_first`."""
    alone = sa.or_(
        CheckpointRow.run_id.is_(None),
        sa.and_(CheckpointRow.step.is_(None), CheckpointRow.commits.is_(None)),
    )
    counted = _counted(
        [CheckpointRow.run_id, family(), sa.case((alone, CheckpointRow.serial))],
        where,
        ("serial", "created"),  # all rows are sorted, so each column more takes time
    )
    order = (counted["counted"], counted["at"], counted.created, counted.serial)
    latest = sa.func.max(counted.created).over(
        partition_by=(counted.part_0, counted.part_1, counted.part_2), order_by=order
    )
    return sa.select(counted.serial).order_by(latest.desc(), *(key.desc() for key in order))


def select_newest_of_launches(*where: ColumnElement[bool]) -> Select[Any]:
    """A query for the newest checkpoints of each launch, several where they tie."""
    counted = _counted([CheckpointRow.launch_id], where, _COLUMNS)
    order = (counted["counted"].desc(), counted["at"].desc())
    place = sa.func.rank().over(partition_by=counted.part_0, order_by=order).label("place")
    placed = sa.select(*(counted[name] for name in (*_COLUMNS, "counted")), place).subquery()
    return sa.select(placed).where(placed.c.place == 1).order_by(placed.c.serial)


_COLUMNS = ("serial", "id", "kind", "step", "commits", "created", "launch_id")


def _counted(parts: list[Any], where: Iterable[ColumnElement[bool]], names: Iterable[str]) -> Any:
    """The columns of a query for checkpoints with their counts, or the substitutes in their part of all."""
    step = sa.func.coalesce(CheckpointRow.step, -1)
    before = sa.func.max(CheckpointRow.commits).over(partition_by=parts, order_by=step)
    columns = (getattr(CheckpointRow, name) for name in names)
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


# checkpoints whose runs are conditions of a query, with which PostgreSQL estimates better
_FEW = 50
_MOST = 2**63 - 1


def _before_many(last: Select[Any]) -> CompoundSelect[Any]:
    """A query for the serials of what `before` describes, for more last ones than a condition lists."""
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
