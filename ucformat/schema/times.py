"""Times in documents: those that every clock and database can count with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime

__all__ = ["Instant", "Time"]


def _countable(value: datetime) -> datetime:
    """A time that is one in UTC as well: the first and last days that there are, are not in every zone.

    Raises:
        ValueError: it is not.
    """
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    try:
        aware.astimezone(UTC)
    except OverflowError:
        raise ValueError("the time is beyond all that can be counted with") from None
    return value


Time = Annotated[datetime, AfterValidator(_countable)]
Instant = Annotated[AwareDatetime, AfterValidator(_countable)]
