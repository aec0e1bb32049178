"""Numbers, sizes and times as people read them, in the terminal and on pages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def bytes_text(nbytes: float) -> str:
    """Format a size: `512 B`, `1.5 MiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        nbytes /= 1024
        if nbytes < 1023.95 or unit == "TiB":
            break
    return f"{nbytes:.1f} {unit}"


def count(n: int) -> str:
    """Format a number: `1,234,567`."""
    return f"{n:,}"


def plural(n: int, noun: str) -> str:
    """Format a number of things: `1 tensor`, `1,024 tensors`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape: `4096 x 1024`, `scalar`."""
    return " x ".join(map(str, shape)) or "scalar"


def shorten(text: str, width: int | None) -> str:
    """Shorten text in its middle, since both ends of a tensor's name tell more."""
    if width is None or len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :] if tail else ''}"


def moment(at: datetime) -> str:
    """Format a time to the minute, in UTC: `2026-11-21 05:45Z`."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}Z"


def ago(at: datetime, now: datetime | None = None) -> str:
    """Format how long ago a time was, in one unit: `40s`, `5m`, `7h`, `30d`; `0s` for a future time."""
    seconds = max(0, int(((now or datetime.now(UTC)) - at).total_seconds()))
    unit, size = next(
        ((u, n) for u, n in (("d", 86400), ("h", 3600), ("m", 60)) if seconds >= 2 * n), ("s", 1)
    )
    return f"{seconds // size}{unit}"


def clean(text: str, keep: str = "\n") -> str:
    """Escape control characters, since names from files must not control terminals or the direction of text."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)
