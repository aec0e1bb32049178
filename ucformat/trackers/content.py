"""What a tracker has of a run: parameters, and the values of metrics in the order in which they were logged."""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

#: A step, and the value that was logged at it.
Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class TrackedContent:
    """What was logged to a run.

    `params` are plain JSON values without secrets. `is_single` tells that the tracker keeps values
    in single precision. `ignored` counts what cannot be brought to a checkpoint, by what it is.
    """

    params: Mapping[str, Any]
    metrics: Mapping[str, Sequence[Point]]
    is_single: bool = False
    ignored: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run of a tracker; `references` are the ids of the checkpoints that were logged to it."""

    id: str
    name: str
    references: Callable[[], frozenset[str]]
    read: Callable[[], TrackedContent]

    def __str__(self) -> str:
        return self.name if self.name == self.id else f"{self.name} ({self.id})"


@dataclass(frozen=True, slots=True)
class TrackedRuns:
    """The runs of a tracker, and how many were left out, by reason."""

    runs: Sequence[TrackedRun]
    left_out: Mapping[str, int] = field(default_factory=dict)


class Last(NamedTuple):
    """The last point of a metric up to a step: among all, and among those that no restart has set back."""

    kept: Point | None
    dropped: Point | None


class Series:
    """The values of a metric; of several at one step, the one that was logged last counts."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._points = list(points)

    @cached_property
    def _kept(self) -> list[Point]:
        return sorted(dict(self._points).items())

    @cached_property
    def _dropped(self) -> list[Point]:
        """The points but those whose steps a training has returned to, or before, since."""
        out: list[Point] = []
        for point in self._points:
            while out and out[-1][0] >= point[0]:
                out.pop()
            out.append(point)
        return out

    def last(self, step: int) -> Last:
        """Return the last point up to a step."""
        return Last(*(_last(points, step) for points in (self._kept, self._dropped)))


def _last(points: Sequence[Point], step: int) -> Point | None:
    at = bisect_right(points, step, key=lambda point: point[0])
    return points[at - 1] if at else None


def joined(parts: Sequence[TrackedContent]) -> TrackedContent:
    """Join the contents of runs that continue each other, in this order."""
    if len(parts) == 1:
        return parts[0]
    params: dict[str, Any] = {}
    metrics: dict[str, list[Point]] = {}
    ignored = Counter[str]()
    for part in parts:
        changed = sum(name in params and params[name] != part.params[name] for name in part.params)
        if changed:
            ignored["parameters that a run which continues it has changed"] += changed
        params |= part.params
        for name, points in part.metrics.items():
            metrics.setdefault(name, []).extend(points)
        ignored.update(part.ignored)
    return TrackedContent(params, metrics, any(part.is_single for part in parts), dict(ignored))


def is_same(recorded: float, value: float, *, is_single: bool) -> bool:
    """Whether a recorded value is that of a tracker, as far as its precision goes."""
    if recorded == value or (math.isnan(recorded) and math.isnan(value)):
        return True
    if not is_single:
        return False
    try:
        return bool(struct.unpack("<f", struct.pack("<f", recorded))[0] == value)
    except OverflowError:
        return False


def param_value(text: str) -> Any:
    """The value of a parameter that a tracker keeps as text: a number, true, false or null if Python prints it so."""
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if str(value) == text and math.isfinite(value):
            return value
    return text
