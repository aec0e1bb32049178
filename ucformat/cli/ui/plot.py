"""Plots of values along steps, in plain characters."""

from __future__ import annotations

import math
from itertools import pairwise
from string import ascii_lowercase
from typing import TYPE_CHECKING

from ucformat.cli.ui.output import Heading
from ucformat.texts import clean, count, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Points = Sequence[tuple[int, float | None]]

MAX_SERIES = len(ascii_lowercase)
_HEIGHT, _MIN_WIDTH = 12, 20
_ALONE, _SEVERAL, _BETWEEN = "*", "#", "."


def plot(title: str, series: Mapping[str, Points], width: int) -> Iterator[str]:
    """Draw series over one pair of axes.

    Neighbours are joined by dots, but not across a step without a finite value. Several series have
    letters as marks, and `#` where they meet.

    Args:
        series: at most `MAX_SERIES`; pairs of a step and a value, in the order of steps.
        width: of the terminal, in characters.
    """
    drawn = {name: [p for p in points if _finite(p[1])] for name, points in series.items()}
    values = [v for points in drawn.values() for _, v in points if v is not None]
    steps = [step for points in drawn.values() for step, _ in points]
    yield Heading(clean(title, keep=""))
    if not values:
        yield "  no values"
        return
    low, high = min(values), max(values)
    labels = [_number(high), _number(low / 2 + high / 2), _number(low)]
    margin = max(map(len, labels))
    columns = max(_MIN_WIDTH, width - margin - 3)
    grid = _Grid(columns, (min(steps), max(steps)), (low, high))
    marks = [_ALONE] if len(series) == 1 else ascii_lowercase
    for mark, points in zip(marks, series.values(), strict=False):
        grid.draw(mark, points)
    shown = dict(zip((0, _HEIGHT // 2, _HEIGHT - 1), labels, strict=True))
    if low == high:
        shown = {_HEIGHT // 2: labels[0]}
    for i, row in enumerate(grid.rows):
        yield f"{shown.get(i, ''):>{margin}} | {''.join(row)}".rstrip()
    yield f"{'':>{margin}} +{'-' * (columns + 1)}"
    ends = [count(step) for step in dict.fromkeys((min(steps), max(steps)))]
    if sum(map(len, ends)) + 8 > columns:
        ends = [_number(float(end.replace(",", ""))) for end in ends]
    first, last = f"step {ends[0]}", "".join(ends[1:])
    yield f"{'':>{margin}}   {first}{last:>{max(1, columns - len(first))}}".rstrip()
    if len(series) > 1:
        for mark, (name, points) in zip(marks, drawn.items(), strict=False):
            room = max(_MIN_WIDTH, width - 6)
            yield f"  {mark}  {shorten(clean(name, keep=''), room)}{'' if points else '  (no values)'}"


class _Grid:
    """The characters of a plot."""

    def __init__(self, columns: int, steps: tuple[int, int], values: tuple[float, float]) -> None:
        self.rows = [[" "] * columns for _ in range(_HEIGHT)]
        self._columns, self._steps, self._values = columns, steps, values

    def draw(self, mark: str, points: Points) -> None:
        """Draw a series: lines first, so that its marks are on top."""
        for (x, a), (y, b) in pairwise(points):
            if _finite(a) and _finite(b):
                self._join(self._cell(x, a or 0.0), self._cell(y, b or 0.0))
        for step, value in points:
            if _finite(value):
                column, row = self._cell(step, value or 0.0)
                there = self.rows[row][column]
                self.rows[row][column] = mark if there in (" ", _BETWEEN, mark) else _SEVERAL

    def _cell(self, step: int, value: float) -> tuple[int, int]:
        """The column and the row of a point."""
        (first, last), (low, high) = self._steps, self._values
        across = 0.0 if first == last else (step - first) / (last - first)
        # halves, because a difference of large numbers may be infinite
        up = 0.5 if low == high else (value / 2 - low / 2) / (high / 2 - low / 2)
        return round(across * (self._columns - 1)), _HEIGHT - 1 - round(up * (_HEIGHT - 1))

    def _join(self, start: tuple[int, int], stop: tuple[int, int]) -> None:
        """Draw a line of dots between two cells, where nothing else is."""
        length = max(abs(stop[0] - start[0]), abs(stop[1] - start[1]))
        for i in range(1, length):
            column, row = (
                round(a + (b - a) * i / length) for a, b in zip(start, stop, strict=True)
            )
            if self.rows[row][column] == " ":
                self.rows[row][column] = _BETWEEN


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: float) -> str:
    return f"{value:.4g}"
