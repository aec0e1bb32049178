"""Who does something, when, and how long it can be taken back; apart from what needs a database."""

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

__all__ = ["GRACE", "Stamp", "clocks", "make_stamp", "now"]

#: How long a deleted checkpoint can be restored, where nobody says.
GRACE = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who does something, and when."""

    who: str
    now: datetime


def now() -> datetime:
    """The time, with its zone."""
    return datetime.now(UTC)


def clocks(connection: Connection) -> dict[str, float]:
    """What other clocks than this host's show, by name, in seconds: only what passes between two looks counts."""
    return dict(shown for clock in CLOCKS for shown in clock(connection))


def _database(connection: Connection) -> Iterator[tuple[str, float]]:
    """That of PostgreSQL's server."""
    if connection.dialect.name == "postgresql":
        shown = connection.exec_driver_sql("select extract(epoch from clock_timestamp())")
        yield "the database's clock", float(shown.scalar_one())


def _boot(_: Connection) -> Iterator[tuple[str, float]]:
    """Linux's since the boot, which nobody can set; named by its boot, for it tells nothing of the time before."""
    with suppress(OSError, AttributeError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        yield f"the time since boot {boot}", time.clock_gettime(time.CLOCK_BOOTTIME)


CLOCKS: list[Callable[[Connection], Iterator[tuple[str, float]]]] = [_database, _boot]


def make_stamp() -> Stamp:
    """Who we are, and the time."""
    user = "unknown"
    with suppress(OSError, KeyError):  # a user id without a name, as in many containers
        user = getpass.getuser()
    return Stamp(f"{user}@{socket.gethostname()}", now())
