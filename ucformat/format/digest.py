"""Content digests: XXH3-128 of each chunk of a tensor, and then of these digests, which may be computed in any order.

The digests of a shard are those of its chunks, in C order, and the shard's part of the tensor's
fingerprint, 16 bytes each.

XXH3 runs at memory speed and finds accidental changes; it is not secure against deliberate
collisions. Small files have a SHA-256 digest.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_hexdigest

from ucformat.errors import UsageError
from ucformat.schema.limits import MAX_DEPTH, check_json
from ucformat.storage.base import read_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from pydantic import BaseModel

    from ucformat.format.chunking import Grid
    from ucformat.geometry.fingerprint import Sums
    from ucformat.storage.base import Bytes, Store


# Encodes documents, and parses them again before they replace anything, since nobody could open
# what is wrong.


def check_values(values: Any, label: str, depth: int = MAX_DEPTH) -> None:
    """Check that JSON values keep the limits of documents."""
    try:
        check_json(values, label, depth)
    except ValueError as error:
        raise UsageError(str(error), hint=_HINT) from None


def encoded(document: BaseModel) -> bytes:
    """The file of a document, after it was parsed again: what no reader would accept must replace nothing."""
    from ucformat.schema.values import parsed  # with pydantic, which no digest needs

    try:
        data = document.model_dump_json(indent=1).encode()
        same = parsed(type(document), data) == document
    except (ValueError, RecursionError) as error:
        raise unwritable(type(document).__name__, error) from None
    if not same:
        raise unwritable(type(document).__name__, "what was written differs from what is read")
    return data


def unwritable(document: str, reason: object) -> UsageError:
    """The error for a document that no reader would accept."""
    return UsageError(
        f"{document} would exceed the limits of the format, so nothing was replaced: "
        f"{str(reason)[:300]}",
        hint=_HINT,
    )


_HINT = "docs/spec/format.md lists the limits of nesting, integers and text; change the value that the message names"


LEAF_BYTES = 16
_SUMS = struct.Struct("<QQ")


def leaf(chunk: Bytes) -> bytes:
    """The XXH3-128 of a chunk: 16 bytes, the most significant first."""
    return xxh3_128_digest(chunk)


def bytes_digest(data: Bytes) -> str:
    """The digest of a small file: `sha256:` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def file_digest(store: Store, key: str, take: Callable[[memoryview], None] | None = None) -> str:
    """The XXH3-128 of a file, which is read in blocks: `xxh3:` and 32 hexadecimal digits.

    Args:
        take: called with each block.
    """
    state = xxh3_128()
    for _, part in read_parts(store, key, store.info(key).size):
        state.update(part)
        if take is not None:
            take(part)
    return f"xxh3:{state.hexdigest()}"


def with_own_digest(document: bytes) -> bytes:
    """Append the member `digest`, the digest of all bytes before it, to a JSON object."""
    body = document.rstrip()[:-1].rstrip()  # without the brace that closes it
    return body + _ending(bytes_digest(body))


def own_digest(document: bytes) -> str | None:
    """The digest that `with_own_digest` has appended; None if there is none, or another."""
    body = memoryview(document)[:-_ENDING_BYTES]
    digest = bytes_digest(body)
    return digest if document[len(body) :] == _ending(digest) else None


def whole_and_own_digest(store: Store, key: str) -> tuple[str, str]:
    """The digests of a whole manifest, which is read in blocks, and of the bytes that its own digest covers."""
    size = store.info(key).size
    whole, own = hashlib.sha256(), hashlib.sha256()
    for at, part in read_parts(store, key, size):
        whole.update(part)
        own.update(part[: max(0, size - _ENDING_BYTES - at)])
    return f"sha256:{whole.hexdigest()}", f"sha256:{own.hexdigest()}"


def _ending(digest: str) -> bytes:
    return f',\n "digest": "{digest}"\n}}'.encode()


_ENDING_BYTES = len(_ending(bytes_digest(b"")))


def document_digest(document: object) -> str:
    """The digest of a JSON value, which does not depend on the order of keys."""
    return bytes_digest(
        json.dumps(document, sort_keys=True, separators=(",", ":"), default=str).encode()
    )


def shard_digests(leaves: Iterable[bytes], parts: Iterable[Sums]) -> bytes:
    """The digests of a shard.

    Args:
        leaves: those of its chunks, in C order.
        parts: the fingerprints of parts that together are the shard.
    """
    from ucformat.geometry.fingerprint import total  # with NumPy, as below

    return b"".join((*leaves, _SUMS.pack(*total(parts))))


def shard_digests_nbytes(chunks: int) -> int:
    """The bytes of the digests of a shard with so many chunks."""
    return LEAF_BYTES * chunks + _SUMS.size


def tensor_fingerprint(shards: Iterable[bytes]) -> str:
    """The fingerprint of a tensor, from the digests of all its shards."""
    from ucformat.geometry.fingerprint import text_of, total

    return text_of(total(_SUMS.unpack(digests[-_SUMS.size :]) for digests in shards))


def tensor_digest(dtype: str, grid: Grid, shards: Mapping[tuple[int, ...], bytes]) -> str:
    """The digest of a tensor, computed from those of its chunks.

    It is the XXH3-128 of a JSON line with dtype, shape and chunk, followed by the digests of all
    chunks in C order of the chunk grid, so it depends neither on the writer nor on the shards
    (docs/spec/format.md, "Digests").

    Args:
        shards: the digests of each shard, by its coordinates.
    """
    import numpy as np  # here, because many commands only digest documents

    head = json.dumps(
        {"dtype": dtype, "shape": grid.shape, "chunk": grid.chunk}, separators=(",", ":")
    )
    ordered: NDArray[np.uint8] = np.empty(
        (*grid.chunks, LEAF_BYTES) if all(grid.shape) else 0, np.uint8
    )
    per_shard = grid.chunks_in_shard
    for shard in grid.shards():
        counts = grid.tiles(shard, "").grid
        where = tuple(
            slice(i * n, i * n + c) for i, n, c in zip(shard, per_shard, counts, strict=True)
        )
        leaves = np.frombuffer(shards[shard], np.uint8)[: -_SUMS.size]
        ordered[where] = leaves.reshape(*counts, LEAF_BYTES)
    return "xxh3:" + xxh3_128_hexdigest(head.encode() + b"\n" + ordered.tobytes())
