"""The leaves of a filter: keys, and the values that they are compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta

from ucformat.errors import UsageError

__all__ = [
    "AGE_UNITS",
    "LONGEST",
    "SIZE_UNITS",
    "Age",
    "Key",
    "Number",
    "Place",
    "Size",
    "Text",
    "Truth",
    "Value",
    "spell",
]

#: So many characters a filter may have, and so many parts a key.
LONGEST = 10_000
PARTS = 32

#: The longest unit first.
AGE_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
SIZE_UNITS = {
    "TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3, "B": 1,
}  # fmt: skip

_KEYWORDS = {"and", "or", "not", "in", "like", "is", "null", "true", "false"}

Place = tuple[int, int]  # in the text of the filter: the first character, and the one after the last


@dataclass(frozen=True)
class _Placed:
    at: Place | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Key(_Placed):
    """What is compared: `step`, or a path such as `config."a.b".c`."""

    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.parts) <= PARTS:
            raise UsageError(f"a key has 1 to {PARTS} parts, and not {len(self.parts)}")
        for part in self.parts:
            _check_text(part)

    def __str__(self) -> str:
        return spell(self.parts)


@dataclass(frozen=True)
class Text(_Placed):
    """Text in quotes; times are written so too."""

    value: str

    def __post_init__(self) -> None:
        _check_text(self.value)

    def __str__(self) -> str:
        return "'" + self.value.replace("'", "''") + "'"


@dataclass(frozen=True)
class Number(_Placed):
    """An integer or a float, which are compared by value."""

    value: int | float

    def __post_init__(self) -> None:
        _check_number(self.value)

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Truth(_Placed):
    """`true` or `false`."""

    value: bool

    def __str__(self) -> str:
        return "true" if self.value else "false"


@dataclass(frozen=True)
class Age(_Placed):
    """A span of time such as `7d`."""

    span: timedelta

    def __str__(self) -> str:
        micros = self.span // timedelta(microseconds=1)
        for unit, seconds in AGE_UNITS.items():
            if micros % (seconds * 10**6) == 0:
                return f"{micros // (seconds * 10**6)}{unit}"
        return f"{'-' * (micros < 0)}{abs(micros) // 10**6}.{abs(micros) % 10**6:06}s"


@dataclass(frozen=True)
class Size(_Placed):
    """A size such as `10GB`, in bytes."""

    nbytes: int

    def __post_init__(self) -> None:
        _check_number(self.nbytes)

    def __str__(self) -> str:
        unit = next(unit for unit, size in SIZE_UNITS.items() if self.nbytes % size == 0)
        return f"{self.nbytes // SIZE_UNITS[unit]}{unit}"


Value = Text | Number | Truth | Age | Size


def _check_text(text: str) -> None:
    if len(text) > LONGEST:
        raise UsageError(f"a text of {len(text)} characters is too long for a filter, which has at most {LONGEST}")
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):  # neither can be stored in PostgreSQL
        raise UsageError("a filter cannot hold the character U+0000, or half a surrogate pair")


def _check_number(value: float) -> None:
    try:
        known = math.isfinite(value) and not isinstance(value, bool)
    except OverflowError:
        known = False
    if not known:
        raise UsageError("a filter cannot hold this number", hint="they go up to 1.7e308, and are neither inf nor nan")


def spell(parts: tuple[str, ...]) -> str:
    """A key as filters write it: parts are bare where the grammar reads them back, else in quotes."""
    return ".".join(part if _bare(part, i) else '"' + part.replace('"', '""') + '"' for i, part in enumerate(parts))


def _bare(part: str, position: int) -> bool:
    if not part.isascii() or part.lower() in _KEYWORDS:
        return False
    return (part.replace("-", "_").isidentifier() and all(part.split("-"))) or (position > 0 and part.isdigit())
