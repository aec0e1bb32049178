"""Regular expressions out of a checkpoint, kept from taking for ever.

DeepSpeed applies its patterns with `re.match`, so a pattern must only match the beginning of a name. Those that AutoTP
writes are exact names (`^name$`, escaped); they are looked up.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ucformat.errors import IntegrityError, Refused, option_text

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Patterns", "is_exact"]

T = TypeVar("T")

_LONG = 1000  # characters of a pattern, and of a name that it is tried on
_REPEATS, _OPTIONS = 3, 8
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|*+?{]|.", re.DOTALL)


class Patterns(Generic[T]):
    """Patterns, each with a value; the first that matches a name gives it."""

    def __init__(self, pairs: Iterable[tuple[Any, T]], what: str) -> None:
        self._exact: dict[str, tuple[str, T]] = {}
        self._others: list[tuple[re.Pattern[str], str, T]] = []
        for pattern, value in pairs:
            if not isinstance(pattern, str):
                raise IntegrityError(f"{what} has a pattern that is no text ({type(pattern).__name__})")
            name = _literal(pattern)
            if name is not None:
                self._exact.setdefault(name, (pattern, value))
            else:
                self._others.append((_compiled(pattern, what), pattern, value))

    def __bool__(self) -> bool:
        return bool(self._exact or self._others)

    def find(self, name: str) -> tuple[str, T] | None:
        """The pattern that matches a name, and its value."""
        if name in self._exact:
            return self._exact[name]
        if self._others and len(name) > _LONG:
            raise Refused(f"the tensor name {name[:80]}… is too long to try patterns of a checkpoint on")
        return next(((pattern, value) for regex, pattern, value in self._others if regex.match(name)), None)


def is_exact(pattern: str) -> bool:
    """Whether a pattern is a name, as AutoTP writes them."""
    return _literal(pattern) is not None


def _literal(pattern: str) -> str | None:
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
    return name if re.escape(name) == pattern[1:-1] else None


def _compiled(pattern: str, what: str) -> re.Pattern[str]:
    doubt = _doubt(pattern)
    if doubt:
        raise Refused(
            f"{what} has the pattern {pattern[:80]!r}, which {doubt}, so matching it may take for ever",
            hint=f"say how the tensors are cut instead: {option_text('layout')}",
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise IntegrityError(f"{what} has the pattern {pattern[:80]!r}, which is none: {error}") from error


def _doubt(pattern: str) -> str | None:
    """Why a pattern may take more than polynomial time; a conservative look at its pieces."""
    if len(pattern) > _LONG:
        return f"is longer than {_LONG} characters"
    groups: list[bool] = [False]  # of each open group, whether it repeats or branches
    closed = False  # whether the group that was closed just now does
    repeats = options = 0
    before = ""
    for piece in _PIECE.findall(pattern):
        if (piece[0] == "\\" and piece[1:].isdigit()) or (piece == "(" and "(?P=" in pattern):
            return "refers to an earlier group"
        if piece in ("*", "+", "{"):
            repeats += 1
            if closed:
                return "repeats a group that repeats or branches"
            groups[-1] = True
        elif piece == "|":
            groups[-1] = True
        elif piece == "?" and before not in ("(", "*", "+", "?", "}"):
            options += 1
            groups[-1] = True
        before = piece
        closed = False
        if piece == "(":
            groups.append(False)
        elif piece == ")" and len(groups) > 1:
            closed = groups.pop()
            groups[-1] |= closed
    return (
        f"has more than {_REPEATS} repeats or {_OPTIONS} options" if repeats > _REPEATS or options > _OPTIONS else None
    )
