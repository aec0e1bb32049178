from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from typing_extensions import Buffer

def copy(target: Buffer, source: Buffer, /) -> None: ...
def crc32c(buffer: Buffer, value: int = 0, /) -> int: ...
def crc32(buffer: Buffer, value: int = 0, /) -> int: ...
def crc32c_each(items: Buffer, nbytes: int, value: int, /) -> bytes: ...
def fill(
    buffers: Sequence[Buffer] | Sequence[tuple[Any, Buffer | None]],
    data: Buffer,
    crcs: MutableSequence[int] | None = None,
    /,
) -> None: ...
def fingerprint(words: Buffer, steps: tuple[int, ...], first: int, /) -> tuple[int, int]: ...
def interpret(
    data: bytes, meaning: object, calls: tuple[Callable[..., Any], ...], damaged: type[Exception], /
) -> Any: ...
def pack(
    target: Buffer,
    file: int,
    begin: int,
    elements: list[Any],
    starts: Buffer,
    places: Buffer,
    sums: Buffer,
    /,
) -> None: ...
def read_into(
    fd: int,
    offset: int,
    buffers: Sequence[Buffer] | Sequence[tuple[Any, Buffer | None]],
    crcs: MutableSequence[int] | None = None,
    /,
) -> int: ...
def seal(chunks: Buffer, pitch: int, /) -> bytes: ...
def write_all(fd: int, data: Buffer, /) -> None: ...
