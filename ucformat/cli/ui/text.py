"""Numbers and tables for people."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ucformat.cli.ui.output import Heading, Tabbed
from ucformat.texts import clean, shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

# characters to which columns of a table are shortened, and further if that is not enough
_MIN_WIDTHS = (12, 6)


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
