"""Numbers and tables for people."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ucformat.cli.output import Heading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["bytes_text", "count", "field", "plural", "shape_text", "shorten", "table"]


def bytes_text(nbytes: float) -> str:
    """Bytes for people: `512 B`, `1.5 MiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        nbytes /= 1024
        if nbytes < 1023.95 or unit == "TiB":
            break
    return f"{nbytes:.1f} {unit}"


def count(n: int) -> str:
    """A number with its thousands apart: `1,234,567`."""
    return f"{n:,}"


def plural(n: int, noun: str) -> str:
    """`1 tensor`, `1,024 tensors`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def shape_text(shape: Sequence[int]) -> str:
    """`4096 x 1024`; a tensor without dims is a `scalar`."""
    return " x ".join(map(str, shape)) or "scalar"


def shorten(text: str, width: int | None) -> str:
    """The text, with its middle left out where it is wider: both ends of a tensor's name tell more."""
    if width is None or len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :] if tail else ''}"


def field(label: str, text: str, width: int | None) -> Iterator[str]:
    """`  label     text`, wrapped under the text."""
    start = f"  {label:<10}"
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
    left: int = 1,
    width: int | None = None,
    total: Sequence[str] | None = None,
) -> Iterator[str]:
    """Aligned columns: the first `left` ones to the left, the others to the right.

    Where a width is given, the first column is shortened so that the lines fit. A `total` is set off by a rule.
    """
    body = [list(row) for row in rows]
    every = [list(head), *body, *([list(total)] if total else [])]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    if width is not None:
        widths[0] = max(12, min(widths[0], width - sum(w + 2 for w in widths[1:])))

    def line(row: Sequence[str]) -> str:
        cells = [shorten(row[0], widths[0]), *row[1:]]
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    yield Heading(line(head))
    yield from map(line, body)
    if total:
        yield "  ".join("─" * w for w in widths)
        yield line(total)
