"""Text and JSON as both databases take them."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["plain", "storable"]


def storable(value: Any) -> Any:
    """A JSON value that both databases take: numbers that JSON has no word for as `{"$float": "nan"}`, no NUL."""
    match value:
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
        case str():
            return plain(value)
        case dict():
            return {storable(str(k)): storable(v) for k, v in value.items()}
        case list() | tuple():
            return [storable(v) for v in value]
    return value


def plain(text: str) -> str:
    """A text that both databases take: what is no character of Unicode, and NUL, becomes U+FFFD."""
    if text.isascii():
        return text.replace("\0", "\ufffd")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")
