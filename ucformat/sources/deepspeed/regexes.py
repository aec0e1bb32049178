"""Regular expressions out of a checkpoint, each with what it says.

DeepSpeed applies its patterns with `re.match`, so a pattern must only match the beginning of a name. Those that AutoTP
writes are exact names (`^name$`, escaped); they are looked up.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ucformat.errors import IntegrityError, LayoutError, Refused, option_text
from ucformat.geometry.patterns import Pattern, compile_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Patterns", "is_exact"]

T = TypeVar("T")


class Patterns(Generic[T]):
    """Patterns, each with a value; the first that matches a name gives it."""

    def __init__(self, pairs: Iterable[tuple[Any, T]], what: str) -> None:
        self._exact: dict[str, tuple[str, T]] = {}
        self._others: list[tuple[Pattern, str, T]] = []
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
        try:
            return next(((pattern, value) for regex, pattern, value in self._others if regex.match(name)), None)
        except LayoutError as error:
            raise Refused(error.message, hint=f"say how the tensors are cut: {option_text('layout')}") from error


def is_exact(pattern: str) -> bool:
    """Whether a pattern is a name, as AutoTP writes them."""
    return _literal(pattern) is not None


def _literal(pattern: str) -> str | None:
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
    return name if re.escape(name) == pattern[1:-1] else None


def _compiled(pattern: str, what: str) -> Pattern:
    try:
        return compile_pattern(pattern)
    except LayoutError as error:
        if error.__cause__ is not None:
            raise IntegrityError(f"{what} has a pattern that is none: {error.message}") from error
        raise Refused(
            f"of the patterns of {what}, {error.message}",
            hint=f"say how the tensors are cut instead: {option_text('layout')}",
        ) from error
