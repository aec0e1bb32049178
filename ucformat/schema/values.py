"""Values of documents: JSON with NaN and infinities as `{"$float": "nan"}`, `"inf"`, `"-inf"`, and times."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from ucformat.schema.limits import check_json

_WORDS = ("nan", "inf", "-inf")


def finite(value: Any) -> Any:
    """Replace each float that is not finite by a JSON object such as `{"$float": "nan"}`."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return (
        {"$float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value
    )


def dumps(value: Any, indent: int | None = None) -> str:
    """Serialize a value as JSON without bare NaN.

    Args:
        indent: spaces for each level (default: everything on one line).
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Parse a JSON text; unlike Python's own parser this refuses bare NaN and infinities."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _number(value: Any) -> Any:
    """The float that an object such as `{"$float": "nan"}` represents; other values unchanged."""
    if isinstance(value, dict) and len(value) == 1 and value.get("$float") in _WORDS:
        return float(value["$float"])
    return value


#: A float in a document.
Number = Annotated[
    float,
    BeforeValidator(_number),
    PlainSerializer(finite, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number"},
                {
                    "type": "object",
                    "properties": {"$float": {"enum": list(_WORDS)}},
                    "required": ["$float"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]

#: A float that is a finite number.
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _within_limits(value: dict[str, Any]) -> dict[str, Any]:
    """Check the limits of values."""
    check_json(value, "a value")
    return value


#: JSON values by name. After reading they contain such objects; for writing they may contain any
#: float.
Values = Annotated[
    dict[str, Any], AfterValidator(_within_limits), PlainSerializer(finite, when_used="json")
]


def _countable(value: datetime) -> datetime:
    """Check that a time can be expressed in UTC: the first and last representable days may not be."""
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    try:
        aware.astimezone(UTC)
    except OverflowError:
        raise ValueError("the time is out of range") from None
    return value


Time = Annotated[datetime, AfterValidator(_countable)]
Instant = Annotated[AwareDatetime, AfterValidator(_countable)]
