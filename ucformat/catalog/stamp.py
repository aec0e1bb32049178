"""Who does something, and when; apart from what needs a database."""

from __future__ import annotations

import getpass
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

__all__ = ["Stamp", "make_stamp", "now"]


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who does something, and when."""

    who: str
    now: datetime


def now() -> datetime:
    """The time, with its zone."""
    return datetime.now(UTC)


def make_stamp() -> Stamp:
    """Who we are, and the time."""
    user = "unknown"
    with suppress(OSError, KeyError):  # a user id without a name, as in many containers
        user = getpass.getuser()
    return Stamp(f"{user}@{socket.gethostname()}", now())
