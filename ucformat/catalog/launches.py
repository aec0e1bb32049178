"""Launches in the catalog: of which launch a checkpoint is, and which launches that one continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from ucformat.catalog.lines import position
from ucformat.catalog.models import CheckpointRow, Continuation, Edge, Launch
from ucformat.catalog.rows import MAX_IN_LIST, get_or_insert, lock_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from sqlalchemy import ColumnElement, Connection

    from ucformat.schema.manifest import Manifest

    _Continued = tuple[str | None, str | None, dict[str, int]]


#: A training goes on from the parent of these edges; a launch of the same run that begins so
#: continues the parent's.
_TRAINING = ("resume", "reshard", "finetune")


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
        .where(edges, Edge.kind.in_(_TRAINING), child.launch_id != parent.launch_id)
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
    ids = sorted(launches)
    for at in range(0, len(ids), MAX_IN_LIST):
        page = Continuation.launch.in_(ids[at : at + MAX_IN_LIST])
        query = sa.select(Continuation.launch, Continuation.continued, Continuation.position).where(
            page
        )
        yield from ((launch, other, here) for launch, other, here in connection.execute(query))


def load_continuations(
    connection: Connection, launches: Collection[int | None]
) -> dict[int | None, _Continued]:
    """Load launches: the name of each, its family, and the positions up to which it continues others, by their names.

    None is that of checkpoints whose launch is unknown.
    """
    ids = sorted({number for number in launches if number is not None})
    launches_by_number: dict[int | None, _Continued] = {None: (None, None, {})}
    for at in range(0, len(ids), MAX_IN_LIST):
        page = ids[at : at + MAX_IN_LIST]
        first = Launch.__table__.alias().c
        query = sa.select(Launch.id, Launch.name, first.name).join(
            first.id.table, first.id == family()
        )
        query = query.where(Launch.id.in_(page))
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


def load_families(
    connection: Connection, launches: Collection[int | None]
) -> dict[int | None, _Continued]:
    """As `load_continuations`, of all launches in the families of these."""
    common = connection.scalars(sa.select(family()).where(Launch.id.in_(launches)).distinct()).all()
    members = sa.select(Launch.id).where(sa.or_(Launch.id.in_(common), Launch.family.in_(common)))
    return load_continuations(connection, connection.scalars(members).all())
