"""Numbers and tables for people."""

from __future__ import annotations

import textwrap
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ucformat.cli.ui.output import Heading, Tabbed, clean

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

# characters to which columns of a table are shortened, and further if that is not enough
_MIN_WIDTHS = (12, 6)


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


def field(label: str, text: str, width: int | None) -> Iterator[str]:
    """Format a labelled text: `  label     text`, with further lines indented below the text."""
    start = f"  {label:<9} "
    if width is None:
        yield f"{start}{text}"
        return
    room = max(20, width - len(start))
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    for i, line in enumerate(lines):
        yield f"{start if i == 0 else ' ' * len(start)}{shorten(line, room)}"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int | Collection[int] = 1,
    shrink: Collection[int] = (0,),
    width: int | None = None,
    total: Sequence[str] | None = None,
) -> Iterator[str]:
    """Format a table.

    Args:
        left: how many columns, or which ones, are aligned left; the others are aligned right
            (default: the first).
        shrink: the columns that may be shortened, the widest first (default: the first).
        width: characters that the lines have to fit into (default: any).
    """
    body = [list(row) for row in rows]
    every = [list(head), *body, *([list(total)] if total else [])]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    lefts = range(left) if isinstance(left, int) else left
    if width is not None:
        _fit(widths, shrink, width)

    def line(row: Sequence[str]) -> str:
        cells = [shorten(c, w) for c, w in zip(row, widths, strict=True)]
        padded = [
            c.ljust(w) if i in lefts else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    yield Heading(line(head))
    yield from map(line, body)
    if total:
        yield "  ".join("─" * w for w in widths)
        yield line(total)


def _fit(widths: list[int], shrink: Collection[int], width: int) -> None:
    """Narrow the widest of these columns until the lines fit, but not below `_MIN_WIDTHS`."""
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    for minimum in _MIN_WIDTHS:
        while excess > 0 and (wide := [i for i in shrink if widths[i] > minimum]):
            widths[max(wide, key=widths.__getitem__)] -= 1
            excess -= 1


def tabbed(cells: Iterable[str]) -> Tabbed:
    """Join cells with tabs, for scripts; line breaks and tabs in cells are escaped."""
    return Tabbed("\t".join(clean(c, keep="") for c in cells))


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
