"""Encodes documents, and parses them again before they replace anything, since nobody could open what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError
from ucformat.schema.limits import MAX_DEPTH, check_json

if TYPE_CHECKING:
    from pydantic import BaseModel


def check_values(values: Any, label: str, depth: int = MAX_DEPTH) -> None:
    """Check that JSON values keep the limits of documents."""
    try:
        check_json(values, label, depth)
    except ValueError as error:
        raise UsageError(str(error), hint=_HINT) from None


def encoded(document: BaseModel) -> bytes:
    """The file of a document, after it was parsed again: what no reader would accept must replace nothing."""
    try:
        data = document.model_dump_json(indent=1).encode()
        same = type(document).model_validate_json(data) == document
    except (ValueError, RecursionError) as error:
        raise unwritable(type(document).__name__, error) from None
    if not same:
        raise unwritable(type(document).__name__, "what was written differs from what is read")
    return data


def unwritable(document: str, reason: object) -> UsageError:
    """The error for a document that no reader would accept."""
    return UsageError(
        f"{document} would exceed the limits of the format, so nothing was replaced: {str(reason)[:300]}",
        hint=_HINT,
    )


_HINT = "docs/spec.md (Limits) lists the limits of nesting, integers and text; change the value that the message names"
