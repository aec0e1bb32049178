"""Files of OCDBT, made by hand: a manifest, and nodes of any content, under the right lengths and checksums."""

from __future__ import annotations

import struct

from crc32c import crc32c
from numcodecs import zstd  # type: ignore[import-untyped]

__all__ = ["leaf", "manifest_of", "node_of", "number", "unpacked"]

_NODE, _MANIFEST = b"\x0c\xdb\x20\xde", b"\x0c\xdb\x3a\x2a"


def number(value: int) -> bytes:
    """In groups of seven bits, the lowest first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def node_of(body: bytes, *, packed: bool = True, manifest: bool = False, version: int = 0) -> bytes:
    """A node, or a manifest, with this content."""
    head = number(version) + number(int(packed))
    content = bytes(zstd.compress(body, 3)) if packed else body
    nbytes = 16 + len(head) + len(content)
    data = (_MANIFEST if manifest else _NODE) + struct.pack("<Q", nbytes) + head + content
    return data + struct.pack("<I", crc32c(data))


def unpacked(data: bytes) -> bytes:
    """The content of a node or a manifest."""
    return bytes(zstd.decompress(data[14:-4])) if data[13] else data[14:-4]


def table(path: str) -> bytes:
    """Of one data file."""
    return number(1) + number(len(path)) + number(0) + path.encode()


def manifest_of(path: str, nbytes: int, height: int = 0, offset: int = 0) -> bytes:
    """A manifest of one version, whose root lies there."""
    config = (
        bytes(16)
        + number(0)
        + number(1024)
        + number(100_000_000)
        + b"\x04"
        + number(1)
        + struct.pack("<i", 0)
    )
    root = [
        number(1),
        bytes([height]),
        number(0),
        number(offset),
        number(nbytes),
        number(1),
        number(1),
        number(1),
    ]
    versions = number(1) + b"".join(root) + struct.pack("<Q", 1)
    return node_of(config + table(path) + versions + number(0), manifest=True)


def leaf(shared: list[int], own: list[bytes], values: list[bytes]) -> bytes:
    """The content of a node without others below: of each key how much is like the one before, and what follows."""
    out = [
        b"\0",
        number(0),
        number(len(own)),
        *map(number, shared),
        *(number(len(key)) for key in own),
        *own,
    ]
    return b"".join([*out, *(number(len(v)) for v in values), bytes(len(values)), *values])
