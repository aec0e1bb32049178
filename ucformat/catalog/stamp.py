"""The user and time of an operation, and clocks by which grace periods are measured."""

from __future__ import annotations

import getpass
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

#: The default grace period, in which a deleted checkpoint can be restored.
GRACE = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Stamp:
    """The user (`user@host`) and time of an operation."""

    who: str
    now: datetime


def now() -> datetime:
    """The current time in UTC."""
    return datetime.now(UTC)


def clocks(connection: Connection) -> dict[str, float]:
    """Read other clocks than this host's.

    Returns:
        The times in seconds, by clock; only differences between two readings of a clock are
        meaningful.
    """
    return dict(reading for clock in CLOCKS for reading in clock(connection))


def _database(connection: Connection) -> Iterator[tuple[str, float]]:
    """The clock of the PostgreSQL server."""
    if connection.dialect.name == "postgresql":
        reading = connection.exec_driver_sql("select extract(epoch from clock_timestamp())")
        yield "the database's clock", float(reading.scalar_one())


def _boot(_: Connection) -> Iterator[tuple[str, float]]:
    """The time since Linux booted, which cannot be set; its name has the boot's id, as it is meaningless after it."""
    with suppress(OSError, AttributeError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        yield f"the time since boot {boot}", time.clock_gettime(time.CLOCK_BOOTTIME)


CLOCKS: list[Callable[[Connection], Iterator[tuple[str, float]]]] = [_database, _boot]


def make_stamp() -> Stamp:
    """The stamp of this user and host, now."""
    user = "unknown"
    with suppress(OSError, KeyError):  # a user id without a name, as in many containers
        user = getpass.getuser()
    return Stamp(f"{user}@{socket.gethostname()}", now())
