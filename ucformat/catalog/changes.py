"""What the audit log says has moved: aliases, and the newest checkpoints of runs.

Whoever follows a catalog keeps a position in the log, and looks up again what entries after it may
have moved. All that is known of a follower is this position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.models import AliasMove, AliasRow, CheckpointRow, Event, RunRow
from ucformat.catalog.rows import pages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

#: Actions that change neither which checkpoints a run has, nor their order.
_DESCRIBING = frozenset(
    (
        *("alias", "tag", "untag", "hold", "release", "metric", "note"),
        *("verify", "certify", "ignore-dependent"),
    )
)
_UNSETTLED = 1000  # entries that are looked at again by whoever begins to follow
_RUNNING = sa.text(
    "select txid_snapshot_xmin(s), txid_snapshot_xmax(s) from txid_current_snapshot() as s"
)


@dataclass(frozen=True, slots=True)
class Changes:
    """What entries of the audit log may have moved.

    Attributes:
        position: of the last of these entries.
        aliases: the ids of the checkpoints that each alias has left, by its name.
        runs: whether more than annotations changed of checkpoints of each run, by its name.
    """

    position: int
    aliases: Mapping[str, tuple[str, ...]]
    runs: Mapping[str, bool]


class SettledLog:
    """How far the audit log is settled: no entry will appear at or before this position any more.

    PostgreSQL numbers an entry before its transaction is committed, so an entry may appear behind
    others that are visible already. A number that is missing is awaited until all transactions have
    ended that ran when it was missed. SQLite has one writer at a time.
    """

    def __init__(self) -> None:
        self.position: int | None = None  # None: never read
        self.last = 0  # of all entries
        self._awaited: tuple[int, int] | None = None  # a position, and the first later transaction

    def read(self, connection: Connection) -> int:
        """Look at the log, and return the position up to which it is settled."""
        self.last = last = connection.scalar(sa.select(sa.func.max(Event.id))) or 0
        if connection.dialect.name != "postgresql":
            self.position = last
            return last
        position = max(0, last - _UNSETTLED) if self.position is None else self.position
        oldest, later = connection.execute(_RUNNING).one()
        if self._awaited is not None and oldest >= self._awaited[1]:
            position, self._awaited = max(position, self._awaited[0]), None
        numbers = sa.select(Event.id).where(Event.id > position).order_by(Event.id)
        for number in connection.scalars(numbers):
            if number != position + 1:
                break
            position = number
        if position < last and oldest >= later:  # nobody is writing
            position, self._awaited = last, None
        elif position < last and self._awaited is None:
            self._awaited = (last, later)
        self.position = position
        return position


def load_changes(connection: Connection, after: int, until: int, most: int) -> Changes:
    """Find out what entries of the audit log may have moved.

    Args:
        after: the position before the first entry.
        until: the position of the last entry, up to which the log is settled.
        most: so many entries at most; the rest is after the position that is returned.
    """
    query = (
        sa.select(Event.id, Event.action, Event.detail, Event.checkpoint, RunRow.name)
        .outerjoin(CheckpointRow, CheckpointRow.serial == Event.checkpoint)
        .outerjoin(RunRow, RunRow.id == CheckpointRow.run_id)
        .where(Event.id > after, Event.id <= until)
        .order_by(Event.id)
        .limit(most)
    )
    rows = connection.execute(query).all()
    moves: dict[str, list[int | None]] = {}  # versions
    runs: dict[str, bool] = {}
    for _, action, detail, _, run in rows:
        if action == "alias":
            moves.setdefault(detail["name"], []).append(detail.get("version"))
        for name in (run, detail.get("before") if action == "run" else None):
            if name is not None:
                runs[name] = runs.get(name, False) or not _describes(action, detail)
    for page in pages(sorted({row.checkpoint for row in rows if row.checkpoint is not None})):
        for name in connection.scalars(
            sa.select(AliasRow.name).where(AliasRow.checkpoint.in_(page)).order_by(AliasRow.name)
        ):
            moves.setdefault(name, [])
    position = rows[-1].id if len(rows) == most else until
    left = {name: _left(connection, name, versions) for name, versions in moves.items()}
    return Changes(position, left, runs)


def _describes(action: str, detail: Mapping[str, Any]) -> bool:
    """Whether an entry only annotates; of imports, those of documents may delete and restore."""
    return action in _DESCRIBING or (action == "import" and "tracker" in detail)


def _left(connection: Connection, name: str, versions: Sequence[int | None]) -> tuple[str, ...]:
    """The ids of the checkpoints that an alias has left by these moves.

    Older entries do not say which move they are of, so for them its last moves are taken.
    """
    if not versions:
        return ()
    query: Any = (
        sa.select(CheckpointRow.id)
        .join(AliasMove, AliasMove.source == CheckpointRow.serial)
        .where(AliasMove.name == name)
        .order_by(AliasMove.version.desc())
    )
    these = AliasMove.version.in_(versions)
    query = query.limit(len(versions)) if None in versions else query.where(these)
    return tuple(connection.scalars(query))
