"""Values of documents: JSON with NaN and infinities as `{"$float": "nan"}`, `"inf"`, `"-inf"`, and times."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, PlainSerializer, WithJsonSchema

__all__ = ["Finite", "Instant", "Number", "Time", "Values", "dumps", "finite", "loads"]

_WORDS = ("nan", "inf", "-inf")


def finite(value: Any) -> Any:
    """The same value, with each float that is not finite as a JSON object."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return {"$float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def dumps(value: Any, indent: int | None = None) -> str:
    """A value as JSON, which has no bare NaN.

    Args:
        value: the value.
        indent: blanks for each level; None: all on one line.
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """The value of a JSON text.

    Args:
        text: the text; Python's own reader takes bare NaN and infinities, which this does not.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _number(value: Any) -> Any:
    """The float that such an object stands for; anything else as it is."""
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

#: JSON values by name. Those that were read hold such objects, those that are to be written may hold any float.
Values = Annotated[dict[str, Any], PlainSerializer(finite, when_used="json")]


def _countable(value: datetime) -> datetime:
    """A time that is one in UTC as well: the first and last days that there are, are not in every zone.

    Raises:
        ValueError: it is not.
    """
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    try:
        aware.astimezone(UTC)
    except OverflowError:
        raise ValueError("the time is beyond all that can be counted with") from None
    return value


Time = Annotated[datetime, AfterValidator(_countable)]
Instant = Annotated[AwareDatetime, AfterValidator(_countable)]
