"""Messages of Protocol Buffers by the numbers of their fields."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.storage.base import Store

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_MOST_SHIFTS = 63  # of a number of 64 bits
#: The most bytes of a record that is one message.
MOST_BYTES = 256 << 20
_MOST_FIELDS = 1 << 20  # a field of two bytes takes a hundred times as many in memory


def damaged(store: Store, key: str, at: int, why: str, *, hint: str) -> IntegrityError:
    """The error for a log of messages that cannot be read from a byte on."""
    return IntegrityError(f"{store.url}/{key} is damaged at byte {at:,}: {why}", hint=hint)


class Message:
    """A message: the values of its fields by number, in their order, not decoded further."""

    def __init__(self, data: bytes) -> None:
        self._values: dict[int, list[int | bytes]] = {}
        for count, (number, value) in enumerate(_fields(data), 1):
            if count > _MOST_FIELDS:
                raise IntegrityError(f"a message has more than {_MOST_FIELDS:,} fields")
            self._values.setdefault(number, []).append(value)

    def _of_kind(self, number: int, kind: type) -> list[int | bytes]:
        values = self._values.get(number, [])
        if any(not isinstance(value, kind) for value in values):
            raise IntegrityError(f"a message has field {number} in another encoding")
        return values

    def __contains__(self, number: int) -> bool:
        return number in self._values

    def all_bytes(self, number: int) -> list[bytes]:
        """The values of a repeated field of bytes."""
        return [value for value in self._of_kind(number, bytes) if isinstance(value, bytes)]

    def messages(self, number: int) -> Iterator[Message]:
        """The values of a repeated field of messages, one at a time."""
        return map(Message, self.all_bytes(number))

    def bytes_of(self, number: int) -> bytes:
        """The value of a field of bytes; empty without one."""
        values = self.all_bytes(number)
        return values[-1] if values else b""

    def text(self, number: int) -> str:
        """The value of a field of text."""
        return self.bytes_of(number).decode(errors="replace")

    def message(self, number: int) -> Message:
        """The value of a field that is a message; an empty one without it."""
        return Message(self.bytes_of(number))

    def integer(self, number: int) -> int:
        """The value of a field of a signed or unsigned number of 64 bits; 0 without one."""
        values = [value for value in self._of_kind(number, int) if isinstance(value, int)]
        value = values[-1] if values else 0
        return value - (1 << 64) if value >> 63 else value

    def double(self, number: int) -> float:
        """The value of a field of double precision; 0 without one."""
        return _number("<d", self.bytes_of(number))

    def single(self, number: int) -> float:
        """The value of a field of single precision; 0 without one."""
        return _number("<f", self.bytes_of(number))


def _number(form: str, data: bytes) -> float:
    if not data:
        return 0.0
    if len(data) != struct.calcsize(form):
        raise IntegrityError("a message has a number of another size")
    return float(struct.unpack(form, data)[0])


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and the value of each field: an integer, or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise IntegrityError(f"a message has a field of the unknown wire type {wire}")
        if size > len(data) - at:
            raise IntegrityError("a message ends within a field")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > _MOST_SHIFTS:
            raise IntegrityError("a message ends within a number, or has one of more than 64 bits")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
