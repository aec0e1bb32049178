"""Who waits for whom on PostgreSQL; SQLite lets only one write anyway.

Locks are taken in this order: turns, then rows of checkpoints, each kind in one order, so that two transactions do not
wait for each other. Where they do nevertheless, PostgreSQL ends one, and `Database.write` does it again.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import sqlalchemy as sa

from ucformat.catalog.models import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection

__all__ = ["PAGE", "lock", "take_turns"]

#: Serials in one IN list.
PAGE = 5000
_TURNS = sa.text("select count(pg_advisory_xact_lock(number)) from unnest(cast(:numbers as bigint[])) as number")


def take_turns(connection: Connection, *words: str) -> None:
    """Until the transaction ends, keep out all others that take turns by one of these words.

    For what has no row to lock, as it is not there yet: a parent that is recorded while a child looks for it.
    """
    if connection.dialect.name == "postgresql":
        hashes = {blake2b(w.encode("utf-8", "surrogatepass"), digest_size=8).digest() for w in words}
        numbers = sorted(int.from_bytes(h, "big", signed=True) for h in hashes)
        connection.execute(_TURNS, {"numbers": numbers})


def lock(connection: Connection, serials: Iterable[int]) -> dict[int, str]:
    """Lock checkpoints until the transaction ends; their states. Rows that refer to them can still be added."""
    found: dict[int, str] = {}
    ordered = sorted(set(serials))
    for at in range(0, len(ordered), PAGE):
        chosen = Checkpoint.serial.in_(ordered[at : at + PAGE])
        query = sa.select(Checkpoint.serial, Checkpoint.state).where(chosen).order_by(Checkpoint.serial)
        found |= dict(connection.execute(query.with_for_update(key_share=True)).all())
    return found
