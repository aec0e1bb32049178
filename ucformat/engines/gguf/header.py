"""The header of a GGUF file: key-value pairs, and for each tensor its name, shape, type and offset.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import reprlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable

MAGIC = b"GGUF"
ALIGNMENT = 32  # if the file does not say otherwise
_MAX_ALIGNMENT = 1 << 20  # an export writes padding from memory
STATE = "blocks."  # and the type, in lower case: the state of a quantized tensor

#: Types whose elements are numbers.
_PLAIN = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}
#: Types of blocks: the name, the elements of a block and its bytes.
_BLOCKS = {
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 40),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    29: ("iq1_m", 256, 56),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
}
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_HEAD = struct.Struct("<4sIQQ")
_MIN_INFO = 24  # bytes of the entry of a tensor, at least
_MIN_PAIR = 13  # likewise of a key with its value
_MAX_DIMS = 4
_MAX_SIZE = 1 << 48  # of a dim
_MAX_NESTED = 4  # arrays inside each other
_MAX_SHOWN = 64  # elements of an array that is among the values
_MAX_BYTES = 512 << 20  # of a header
_HINT = "the file is damaged, or its copy did not finish: copy it again"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file.

    Attributes:
        state: `weight`, or that of the type of its blocks.
        dtype: of what is stored: bytes, if it has blocks; empty if the type is unknown.
        shape: likewise, row-major: the reverse of the file's order.
        start: the first byte in the file.
        type: the number of the type in the file.
    """

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    type: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; 0 if its type is unknown."""
        return math.prod(self.shape) * ITEMSIZE.get(self.dtype, 0)


@dataclass(frozen=True, slots=True)
class Header:
    """A header: its bytes end where those of tensors may begin, at `start`.

    Attributes:
        values: the values of keys; of longer arrays, only their type and size.
        entries: the tensors, in the order of the file.
    """

    version: int
    alignment: int
    values: dict[str, Any]
    entries: tuple[Entry, ...]
    start: int


class _Cursor:
    """Reads values from the beginning of a file, more and more of it as they are needed."""

    def __init__(self, read: Callable[[int], bytes], size: int, file: str) -> None:
        self._read, self.size, self.file = read, size, file
        self._data, self.at = b"", 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        end = self.at + count
        if end > min(self.size, _MAX_BYTES):
            raise self.damaged("ends in its header")
        if end > len(self._data):
            self._data = self._read(min(self.size, max(end, 4 * len(self._data), 1 << 16)))
        self.at = end
        return self._data[end - count : end]

    def number(self, kind: str) -> Any:
        """The next number."""
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def text(self, *, exact: bool = True) -> str:
        """The next string; of bytes that are no text, as tokens may be, what is shown instead, unless `exact`."""
        data = self.take(self.number("<Q"))
        try:
            return data.decode(errors="strict" if exact else "replace")
        except UnicodeDecodeError as error:
            raise self.damaged(f"has the name {reprlib.repr(data)}") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """The next value; of a long array, its type and size."""
        if kind in _NUMBERS:
            return self.number(f"<{_NUMBERS[kind]}")
        if kind == _STRING:
            return self.text(exact=False)
        if kind != _ARRAY or depth > _MAX_NESTED:
            raise self.damaged(f"has a value of the unknown type {kind}")
        inner, count = self.number("<I"), self.number("<Q")
        if count > self.size - self.at:
            raise self.damaged(f"has an array of {count:,} values")
        if inner in _NUMBERS:
            data = self.take(count * struct.calcsize(f"<{_NUMBERS[inner]}"))
            if count <= _MAX_SHOWN:
                return list(struct.unpack(f"<{count}{_NUMBERS[inner]}", data))
            return {"type": inner, "count": count}
        values: list[Any] = []
        for _ in range(count):
            value = self.value(inner, depth + 1)
            if len(values) <= _MAX_SHOWN:
                values.append(value)
        return values if count <= _MAX_SHOWN else {"type": inner, "count": count}

    def damaged(self, problem: str) -> IntegrityError:
        """The error for a header that no program writes."""
        return IntegrityError(f"{self.file} {problem}", hint=_HINT)


def read_header(read: Callable[[int], bytes], size: int, file: str) -> Header:
    """Parse the header of a file, and check that the file holds its tensors, none inside of another.

    Args:
        read: returns so many first bytes of the file.
        size: of the file.
        file: its name, for messages.
    """
    cursor = _Cursor(read, size, file)
    magic, version, tensors, pairs = _HEAD.unpack(cursor.take(_HEAD.size))
    if magic != MAGIC:
        raise cursor.damaged(f"begins with {magic!r}, not with {MAGIC!r}")
    if version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{file} is a big-endian GGUF file",
            hint="convert it with llama.cpp's gguf_convert_endian.py FILE little",
        )
    if version not in (2, 3):
        raise UnsupportedError(
            f"{file} has version {version} of GGUF; 2 and 3 are read",
            hint="convert the model again with a current llama.cpp",
        )
    if tensors * _MIN_INFO + pairs * _MIN_PAIR > size:
        raise cursor.damaged(f"would have {tensors:,} tensors and {pairs:,} values")
    values: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text()
        if key in values:
            raise cursor.damaged(f"has two values of {reprlib.repr(key)}")
        values[key] = cursor.value(cursor.number("<I"))
    alignment = values.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.damaged(
            f"has the alignment {reprlib.repr(alignment)}, which is no power of two"
        )
    if alignment > _MAX_ALIGNMENT:
        raise cursor.damaged(f"has the alignment {alignment:,}, more than {_MAX_ALIGNMENT:,}")
    raw = [_entry(cursor) for _ in range(tensors)]
    start = aligned(cursor.at, alignment)
    if not tensors:  # as of a vocabulary alone, which llama.cpp's converter does not pad
        start = min(start, size)
    entries = tuple(_placed(cursor, alignment, start, *entry) for entry in raw)
    _check_places(cursor, alignment, start, entries)
    return Header(version, alignment, values, entries, start)


def aligned(offset: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-offset // alignment) * alignment


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """The name, shape, type and offset of the next tensor."""
    name, dims = cursor.text(), cursor.number("<I")
    if dims > _MAX_DIMS:
        raise cursor.damaged(f"gives {reprlib.repr(name)} {dims} dims")
    shape = tuple(cursor.number("<Q") for _ in range(dims))
    if any(n > _MAX_SIZE for n in shape):
        raise cursor.damaged(f"gives {reprlib.repr(name)} the shape {list(shape)}")
    return name, shape[::-1], cursor.number("<I"), cursor.number("<Q")


def _placed(
    cursor: _Cursor,
    alignment: int,
    start: int,
    name: str,
    shape: tuple[int, ...],
    kind: int,
    offset: int,
) -> Entry:
    """The entry of a tensor, after a check that the file holds it."""
    shown = reprlib.repr(name)
    if offset % alignment:
        raise cursor.damaged(f"puts {shown} at {offset}, which is not aligned to {alignment} bytes")
    state, dtype = "weight", _PLAIN.get(kind, "")
    if kind in _BLOCKS:
        label, elements, nbytes = _BLOCKS[kind]
        if not shape or shape[-1] % elements:
            raise cursor.damaged(
                f"gives {shown} the shape {list(shape)}, but blocks of {label} have {elements} elements"
            )
        state, dtype = f"{STATE}{label}", "uint8"
        shape = (*shape[:-1], shape[-1] // elements * nbytes)
    entry = Entry(name, state, dtype, shape, start + offset, kind)
    if entry.start + entry.nbytes > cursor.size:
        raise cursor.damaged(
            f"has {cursor.size:,} bytes, but {shown} would end at {entry.start + entry.nbytes:,}"
        )
    return entry


def _check_places(cursor: _Cursor, alignment: int, start: int, entries: tuple[Entry, ...]) -> None:
    """Check that the tensors follow each other, without anything but padding between them."""
    end, unknown = start, False
    for entry in sorted(entries, key=lambda e: (e.start, e.nbytes)):
        if entry.start < end or (entry.start != aligned(end, alignment) and not unknown):
            raise cursor.damaged(
                f"puts {reprlib.repr(entry.name)} at byte {entry.start}, and what is before it ends "
                f"at {end}"
            )
        end, unknown = entry.start + entry.nbytes, not entry.dtype
    if cursor.size > aligned(end, alignment) and not unknown:
        raise cursor.damaged(f"has {cursor.size - end:,} bytes after its last tensor")
