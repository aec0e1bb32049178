"""Content digests, XXH3-128 over the chunks of a tensor and then over those; and CRCs combined from those of parts.

Both are made from parts in any order. The CRC of two runs of bytes is the CRC of the first, shifted over the length of
the second, xor the CRC of the second: a CRC is linear, and the inversions at its ends cancel out.

XXH3 tells apart whatever training writes, at memory speed; it is no proof against somebody who makes collisions on
purpose. Small files have SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import threading
from typing import TYPE_CHECKING

from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_hexdigest

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from ucformat.format.chunking import Grid
    from ucformat.storage.base import Bytes, Store

__all__ = [
    "CRC32C_SHIFT",
    "CRC32_SHIFT",
    "LEAF_BYTES",
    "CrcShift",
    "bytes_digest",
    "document_digest",
    "file_digest",
    "leaf",
    "own_digest",
    "tensor_digest",
    "with_own_digest",
]

LEAF_BYTES = 16
_BLOCK = 8 << 20  # bytes of a file that are read at once


def leaf(chunk: Bytes) -> bytes:
    """The digest of one chunk's bytes, its padding included: 16 bytes, the most significant first."""
    return xxh3_128_digest(chunk)


def bytes_digest(data: Bytes) -> str:
    """The digest of a small file's bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def file_digest(store: Store, key: str) -> str:
    """The XXH3-128 of a whole file."""
    size, state = store.info(key).size, xxh3_128()
    buffer = memoryview(bytearray(min(_BLOCK, size)))
    for start in range(0, size, _BLOCK):
        part = buffer[: min(_BLOCK, size - start)]
        store.read_into(key, start, [part])
        state.update(part)
    return f"xxh3:{state.hexdigest()}"


def with_own_digest(document: bytes) -> bytes:
    """A JSON object with a last member: `digest`, of all bytes before it."""
    body = document.rstrip()[:-1].rstrip()  # without the brace that closes it
    return body + _ending(bytes_digest(body))


def own_digest(document: bytes) -> str | None:
    """The digest at the end of a document; None where it has none, or is not what that says."""
    body = memoryview(document)[:-_ENDING_BYTES]
    digest = bytes_digest(body)
    return digest if document[len(body) :] == _ending(digest) else None


def _ending(digest: str) -> bytes:
    return f',\n "digest": "{digest}"\n}}'.encode()


_ENDING_BYTES = len(_ending(bytes_digest(b"")))


def document_digest(document: object) -> str:
    """The digest of a JSON value, whatever the order of its keys."""
    return bytes_digest(json.dumps(document, sort_keys=True, separators=(",", ":"), default=str).encode())


def tensor_digest(dtype: str, grid: Grid, leaves: Mapping[tuple[int, ...], bytes]) -> str:
    """The digest of a tensor from its chunks': `leaves` holds, for each shard, those of its chunks in C order.

    XXH3-128 over a JSON line of dtype, shape and chunk, then over all chunks' digests in C order of the chunk grid, so
    that neither the writer nor the shards matter (docs/spec.md, "Digests").
    """
    import numpy as np  # not for the digest of a document, which is all that many commands need

    head = json.dumps({"dtype": dtype, "shape": grid.shape, "chunk": grid.chunk}, separators=(",", ":"))
    ordered: NDArray[np.uint8] = np.empty((*grid.chunks, LEAF_BYTES) if all(grid.shape) else 0, np.uint8)
    per_shard = grid.chunks_in_shard
    for shard in grid.shards():
        held = grid.tiles(shard, "").grid
        where = tuple(slice(i * n, i * n + h) for i, n, h in zip(shard, per_shard, held, strict=True))
        ordered[where] = np.frombuffer(leaves[shard], np.uint8).reshape(*held, LEAF_BYTES)
    return "xxh3:" + xxh3_128_hexdigest(head.encode() + b"\n" + ordered.tobytes())


_Tables = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class CrcShift:
    """Shifts the CRCs of one polynomial, given with its lowest coefficient as the highest bit."""

    def __init__(self, polynomial: int) -> None:
        self._polynomial = polynomial
        self._lock = threading.Lock()
        self._doubled: list[_Tables] = []  # by 1, 2, 4, … bytes, made when they are first needed

    def __call__(self, crc: int, nbytes: int) -> int:
        """The CRC as it counts with so many bytes behind."""
        power = 0
        while nbytes:
            if nbytes & 1:
                if power >= len(self._doubled):
                    with self._lock:
                        self._make(power)
                a, b, c, d = self._doubled[power]
                crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24]
            nbytes >>= 1
            power += 1
        return crc

    def _make(self, power: int) -> None:
        """What each byte of a CRC becomes, up to 2 ** power bytes."""
        while len(self._doubled) <= power:
            if self._doubled:
                half = self._doubled[-1]
                rows = [self._apply(half, self._apply(half, 1 << bit)) for bit in range(32)]
            else:
                rows = [self._over_byte(1 << bit) for bit in range(32)]
            tables = tuple(tuple(_xor(rows[8 * k : 8 * k + 8], value) for value in range(256)) for k in range(4))
            self._doubled.append((tables[0], tables[1], tables[2], tables[3]))

    def _over_byte(self, crc: int) -> int:
        for _ in range(8):
            crc = crc >> 1 ^ (self._polynomial if crc & 1 else 0)
        return crc

    @staticmethod
    def _apply(tables: _Tables, crc: int) -> int:
        return tables[0][crc & 255] ^ tables[1][crc >> 8 & 255] ^ tables[2][crc >> 16 & 255] ^ tables[3][crc >> 24]


def _xor(rows: list[int], chosen: int) -> int:
    out = 0
    for bit, row in enumerate(rows):
        if chosen >> bit & 1:
            out ^= row
    return out


CRC32_SHIFT = CrcShift(0xEDB88320)
CRC32C_SHIFT = CrcShift(0x82F63B78)
