"""Errors that show the place of a filter where something is wrong."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from ucformat.catalog.filter.values import Place

__all__ = ["pointing_error"]

_LONGEST = 400  # characters of a message, which may quote the filter
_BEFORE, _AFTER = 60, 40  # so much of a long filter is shown around the place


def pointing_error(message: str, text: str | None, at: Place | None, *, hint: str | None = None) -> UsageError:
    """A UsageError with the line of the filter and carets under the place, where text and place are known."""
    message = _short(message)
    hint = hint and _short(hint)
    if text is None or at is None:
        return UsageError(message, hint=hint)
    start, end = at
    whole = len(text) <= _BEFORE + _AFTER
    left = 0 if whole else max(0, start - _BEFORE)
    right = len(text) if whole else min(len(text), start + _AFTER)
    before = "…" * (left > 0) + _shown(text[left:start])
    marked = _shown(text[start : min(end, right)])
    after = _shown(text[min(max(start, end), right) : right]) + "…" * (right < len(text))
    carets = " " * _width(before) + "^" * max(1, _width(marked))
    return UsageError(f"{message}\n  {before}{marked}{after}\n  {carets}", hint=hint)


def _short(text: str) -> str:
    return _shown(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def _shown(text: str) -> str:
    """On one line, and without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


def _width(text: str) -> int:
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in {"W", "F"} else 1 for c in text
    )
