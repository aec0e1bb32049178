"""HTML for notebooks and SVG: self-contained, without scripts, for dark and light pages alike.

Colours are those of the text around, or of middle brightness. Whatever comes from a checkpoint is
escaped.
"""

from __future__ import annotations

import html
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from ucformat.errors import UsageError
from ucformat.geometry.box import unravel
from ucformat.texts import clean, count, plural, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ucformat.geometry.box import Box

#: Rectangles of one drawing: more cannot be told apart, and browsers are slow with them.
MAX_RECTANGLES = 4096
_COLOURS = ("#4c78a8", "#e08a2e", "#54a24b", "#b279a2", "#2ba6b5", "#d65f52", "#9a9a2f", "#8a7fd6")
_LINE, _GREY = "1px solid rgba(128,128,128,.35)", "#808080"
_WIDTH, _LOW, _HIGH = 640.0, 40.0, 420.0
_MAX_NAMED = 12  # ranks that hold the same box and are listed
_MAX_ROWS = 50
_MAX_TEXT = 300


class Drawing:
    """A drawing: notebooks show it, and `str()` is its SVG, which is also a file that browsers show."""

    def __init__(self, svg: str) -> None:
        self._svg = svg

    def __str__(self) -> str:
        return self._svg

    def __repr__(self) -> str:
        return f"<ucformat.Drawing: {len(self._svg)} characters of SVG>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the SVG within the page, whose text has the colour of the page."""
        return self._svg


def escaped(text: object) -> str:
    """Text for HTML, in attributes too; control characters are spelled out."""
    return html.escape(clean(str(text), keep=""))


def card(
    title: str,
    facts: Mapping[str, object],
    head: Sequence[str] = (),
    rows: Iterable[Sequence[object]] = (),
    *,
    text: str = "",
    more: str = "",
) -> str:
    """A title, facts that are not None, and perhaps a table or preformatted text, as HTML.

    Args:
        head: the headings of the table.
        rows: at most `_MAX_ROWS` are shown, and it is said how many there are.
        more: a summary under which the table and the text are folded.
    """
    parts = [f'<div style="font-weight:600;margin-bottom:.3em">{escaped(title)}</div>']
    shown = [(label, value) for label, value in facts.items() if value is not None]
    if shown:
        cells = "".join(
            f'<tr><td style="text-align:left;opacity:.75;padding:0 1em 0 0">{escaped(label)}</td>'
            f'<td style="text-align:left;padding:0">{escaped(shorten(str(value), _MAX_TEXT))}</td></tr>'
            for label, value in shown
        )
        parts.append(f'<table style="border:none;margin:0">{cells}</table>')
    body = _table(head, [*rows]) if head else ""
    if text:
        body += f'<pre style="margin:.5em 0;overflow-x:auto">{html.escape(clean(text))}</pre>'
    if body and more:
        body = f"<details><summary>{escaped(more)}</summary>{body}</details>"
    return f'<div style="border:{_LINE};border-radius:4px;padding:.6em .8em">{"".join(parts)}{body}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    style = f'style="text-align:left;border-bottom:{_LINE};padding:.15em 1em .15em 0"'
    lines = ["".join(f"<th {style}>{escaped(text)}</th>" for text in head)]
    lines += [
        "".join(f"<td {style}>{escaped(cell)}</td>" for cell in row) for row in rows[:_MAX_ROWS]
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    rest = len(rows) - _MAX_ROWS
    left = f'<div style="opacity:.75">and {count(rest)} more</div>' if rest > 0 else ""
    return f'<table style="border:none;margin:.5em 0 0">{body}</table>{left}'


def draw_boxes(
    label: str,
    shape: Sequence[int],
    chunks: Iterable[Box],
    held: Mapping[Box, Sequence[int]],
    *,
    others: int = 0,
    undrawn: int = 0,
    width: float = _WIDTH,
    captioned: bool = True,
) -> Drawing:
    """Draw the chunks of a tensor, and over them the boxes that ranks hold.

    The last dim runs to the right, all others downwards. The grid is left out, and the label says
    so, where it has more rectangles than can be told apart.

    Args:
        label: what the tensor is.
        held: the ranks that hold each box, of which the first gives it its colour.
        others: how many chunks there are besides; then none is drawn.
        undrawn: how many boxes ranks hold besides.
        width: of a tensor that is not much higher than wide, in pixels.
        captioned: whether the label is also below the boxes (default: yes).

    Raises:
        UsageError: the ranks' boxes are too many to be drawn.
    """
    rows, columns = prod(shape[:-1]), shape[-1] if shape else 1
    height = min(_HIGH, max(_LOW, width * rows / max(1, columns)))
    if columns < rows / 4:
        width /= 3
    across, down = width / max(1, columns), height / max(1, rows)
    parts: list[str] = []
    grid: list[str] = []
    number = others
    outline = f'fill="none" stroke="{_GREY}" stroke-opacity=".6" stroke-width=".7"'
    for box in chunks:
        number += 1
        room = MAX_RECTANGLES + 1 - len(grid)
        places = islice(_rectangles(box, shape), room)
        grid += [_rectangle(place, across, down, outline) for place in places]
    description = f"{label}, stored in {plural(number, 'part')}"
    if others or len(grid) > MAX_RECTANGLES:
        description += ", which are too many to be drawn"
    else:
        parts += grid
    if held:
        ranks = {rank for some in held.values() for rank in some}
        description += f", {'boxes' if len(held) > 1 else 'box'} of {plural(len(ranks), 'rank')}"
    if undrawn:
        description += f"; not drawn: {plural(undrawn, 'more part')} that ranks hold"
    drawn = 0
    for box, some in held.items():
        text = _ranks(some)
        colour = f'fill="{colour_of(some[0])}" fill-opacity=".55" stroke="{_GREY}"'
        title = f"<title>{escaped(f'{text}: {box}')}</title>"
        for place in _rectangles(box, shape):
            drawn += 1
            if drawn > MAX_RECTANGLES:
                raise UsageError(
                    f"the boxes of the ranks are more than {count(MAX_RECTANGLES)} rectangles",
                    hint="`ck.plan(layout, rank)` tells in numbers what a rank reads",
                )
            parts.append(_rectangle(place, across, down, colour, title))
            parts.append(_name(text, place, across, down))
    caption = escaped(description)
    if captioned:
        at = f'x="0" y="{height + 18:.0f}" font-size="12" fill="currentColor"'
        parts.append(f"<text {at}>{caption}</text>")
        width, height = max(width, 420.0), height + 26
    return Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{caption}" '
        f'font-family="sans-serif">{"".join(parts)}</svg>'
    )


def colour_of(rank: int) -> str:
    """The colour of what a rank holds."""
    return _COLOURS[rank % len(_COLOURS)]


def _rectangles(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """The rectangles of a box where all dims but the last run downwards: row, column, rows, columns."""
    if 0 in box.shape:
        return
    column, columns = (box.start[-1], box.shape[-1]) if shape else (0, 1)
    start, size = box.start[:-1], box.shape[:-1]
    # rows follow each other as far as inner dims are held whole
    inner = len(size)
    while inner > 1 and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)
    unit = prod(shape[inner:-1])
    rows = (size[outer] if size else 1) * unit
    for number in range(prod(size[:outer])):  # `product` would store the indices of every dim first
        within = (*unravel(number, size[:outer]), *(0,) * (inner - outer))
        row = 0
        for at, begin, extent in zip(within, start, shape[:inner], strict=False):
            row = row * extent + begin + at
        yield row * unit, column, rows, columns


def _rectangle(
    place: tuple[int, int, int, int], across: float, down: float, style: str, inside: str = ""
) -> str:
    row, column, rows, columns = place
    at = f'x="{column * across:.2f}" y="{row * down:.2f}"'
    size = f'width="{columns * across:.2f}" height="{rows * down:.2f}"'
    return (
        f"<rect {at} {size} {style}>{inside}</rect>" if inside else f"<rect {at} {size} {style}/>"
    )


def _name(text: str, place: tuple[int, int, int, int], across: float, down: float) -> str:
    """The text at the top of a rectangle, where it fits."""
    row, column, rows, columns = place
    if columns * across < 7 * len(text) or rows * down < 14:
        return ""
    x, y = (column + columns / 2) * across, row * down + 12
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" text-anchor="middle" fill="currentColor" '
        f'pointer-events="none">{escaped(text)}</text>'
    )


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {count(len(ranks) - _MAX_NAMED)} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
