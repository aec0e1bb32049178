"""Values of documents: JSON with NaN and infinities as `{"$float": "nan"}`, `"inf"`, `"-inf"`, and times."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from ucformat.schema.limits import MAX_BITS, MAX_DEPTH, check_json

if TYPE_CHECKING:
    from collections.abc import Collection

Model = TypeVar("Model", bound=BaseModel)

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
    """Serialize a value as JSON without bare NaN."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), indent=indent, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Parse a document as RFC 8259 has it, within the limits of the format.

    Raises:
        ValueError: it is no JSON, has a member twice, or exceeds a limit of nesting, integers or
            text.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(_DEEP) from None
    _check(value)
    # text that was decoded is Unicode, except for escapes
    if "\\" in text and re.search(r"\\u[dD][89a-fA-F]", text):
        check_json(value, "the document")
    return value


def parsed(document: type[Model], data: bytes) -> Model:
    """Parse a document of the format; nothing is coerced to another type.

    Raises:
        ValueError: it is none, or exceeds a limit.
    """
    # pydantic's parser knows no limits, and takes the last of two equal members
    loads(data)
    return document.model_validate_json(data, strict=True)


def version_of(data: bytes, form: str) -> int | None:
    """The version of a document of some format; None if it is none."""
    try:
        document = loads(data)
    except ValueError:
        return None
    if not isinstance(document, dict) or document.get("format") != form:
        return None
    version = document.get("version")
    return version if type(version) is int else 0


_MANY = 64  # from so many on, one look at all integers is faster than one at each type
_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(members)
    if len(out) < len(members):
        name, _ = Counter(name for name, _ in members).most_common(1)[0]
        raise ValueError(f"an object has the member {name[:100]!a} twice")
    return out


def _check(value: Any) -> None:
    """Check nesting and integers; lists of a million texts or numbers are looked at as a whole."""
    waiting: list[tuple[Collection[Any], int]] = [((value,), 0)]
    while waiting:
        items, level = waiting.pop()
        if len(items) > _MANY and _are_short(items):
            continue
        types = set(map(type, items))
        if int in types:
            numbers = [n for n in items if type(n) is int] if len(types) > 1 else items
            if any(n.bit_length() > MAX_BITS for n in (min(numbers), max(numbers))):
                raise ValueError(f"it has an integer of more than {MAX_BITS:,} bits")
        if types & {dict, list}:
            if level == MAX_DEPTH:
                raise ValueError(_DEEP)
            for item in items:
                if isinstance(item, dict | list):
                    inner = item.values() if isinstance(item, dict) else item
                    waiting.append((inner, level + 1))


def _are_short(items: Collection[Any]) -> bool:
    """Whether all are integers of 64 bits."""
    try:
        array("q", items)
    except (TypeError, OverflowError):
        return False
    return True


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
