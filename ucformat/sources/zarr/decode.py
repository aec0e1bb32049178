"""Decodes one chunk, through TensorStore: the chunk becomes the only one of an array in memory, which is then read.

So every store serves, and no more is read of it than the chunk.
"""

from __future__ import annotations

import bz2
import math
import zlib
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from crc32c import crc32c

from ucformat.errors import ChecksumError, IntegrityError, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.sources.zarr.array import Array
    from ucformat.sources.zarr.codecs import Codec

__all__ = ["decode_chunk", "fill_chunk", "tensorstore"]

_FLOOR = 64 << 20  # bytes that any chunk may decode to
_RATIO = 1 << 17  # and how much larger than its stored bytes: zstd shrinks zeros to a 32,000th
_EXTRA = {n: np.dtype(getattr(ml_dtypes, n)) for n in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}


def tensorstore() -> Any:
    """The package, imported when first needed: it must not be loaded before a process forks."""
    try:
        import tensorstore as package
    except ImportError:
        raise Refused(
            "this checkpoint is encoded, and decoding it needs the package tensorstore, which is not installed",
            hint="pip install 'ucformat[zarr]'",
        ) from None
    return package


def decode_chunk(array: Array, at: tuple[int, ...], data: bytes, where: str) -> memoryview:
    """The elements of a chunk, row-major and little-endian; `where` names it in messages.

    Of a chunk that reaches past the array, what is outside is zero: it need not be stored.

    Raises:
        IntegrityError: the bytes are not such a chunk.
    """
    nbytes = array.chunk_nbytes
    if nbytes > max(_FLOOR, len(data) * _RATIO):
        raise IntegrityError(f"{where}: {len(data)} bytes are too few for a chunk of {list(array.chunk)} elements")
    if array.packed:
        data = _unpack(array.packed, data, nbytes, where)
    codecs, data = _before_blosc(array.chunk_codecs, data, nbytes, where)
    inside = (min(c, n - a * c) for a, c, n in zip(at, array.chunk, array.shape, strict=True))
    return _read(array, codecs, tuple(inside), data, where)


def fill_chunk(array: Array, where: str) -> memoryview:
    """A chunk that is not stored: all of it the array's fill value."""
    if array.chunk_nbytes > _FLOOR:
        raise Refused(f"{where} is not stored, and too large to be made of the fill value: {array.chunk_nbytes} bytes")
    return _read(array, array.chunk_codecs, array.chunk, None, where)


def _unpack(codec: str, data: bytes, nbytes: int, where: str) -> bytes:
    """The bytes out of a compressed stream, never more than are expected."""
    try:
        if codec == "zlib":
            out = zlib.decompressobj().decompress(data, nbytes + 1)
        else:
            out = bz2.BZ2Decompressor().decompress(data, nbytes + 1)
    except (zlib.error, OSError, ValueError, EOFError) as error:
        raise IntegrityError(f"{where}: it is no {codec} stream: {error}") from None
    if len(out) != nbytes:
        raise IntegrityError(f"{where}: it does not decode to the {nbytes} bytes of a chunk")
    return out


def _before_blosc(codecs: tuple[Codec, ...], data: bytes, nbytes: int, where: str) -> tuple[tuple[Codec, ...], bytes]:
    """The codecs and bytes that are left once the checksums around blosc are checked.

    TensorStore inflates other codecs as far as it needs, but blosc as far as its first bytes say: so these are looked
    at, which takes that they are the first bytes that are stored, and that blosc holds nothing but the elements.
    """
    if not _has_blosc(codecs):
        return codecs, data
    while codecs[-1]["name"] == "crc32c":
        data, stored = data[:-4], data[-4:]
        if crc32c(data) != int.from_bytes(stored, "little"):
            raise ChecksumError(f"{where} does not match its CRC-32C")
        codecs = codecs[:-1]
    if [c["name"] for c in codecs if c["name"] != "transpose"] != ["bytes", "blosc"]:
        raise Refused(
            f"{where}: it is encoded with blosc and something else, so that nothing tells how large it becomes",
            hint="write the array anew with one codec that compresses, and shards without blosc in others",
        )
    if len(data) < 16 or int.from_bytes(data[4:8], "little") != nbytes:
        raise IntegrityError(f"{where}: it does not decode to the {nbytes} bytes of a chunk")
    return codecs, data


def _has_blosc(codecs: Sequence[Codec]) -> bool:
    return any(c["name"] == "blosc" or _has_blosc(c.get("configuration", {}).get("codecs", ())) for c in codecs)


def _read(
    array: Array, codecs: tuple[Codec, ...], inside: tuple[int, ...], data: bytes | None, where: str
) -> memoryview:
    ts = tensorstore()
    ndim = len(array.chunk)
    fill = array.fill_value
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(inside),
        "data_type": array.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _zero(array.dtype) if fill is None else fill,
        "codecs": list(codecs),
    }
    context = ts.Context()
    try:
        if data is not None:
            key = "/".join(["c", *["0"] * ndim])
            ts.KvStore.open("memory://", context=context).result().write(key, data).result()
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": "memory://", "metadata": metadata}
        spec["fill_missing_data_reads"] = data is None  # within shards, too
        stored = ts.open(spec, open=True, assume_metadata=True, context=context).result()
        out = np.zeros(math.prod(array.chunk), _EXTRA.get(array.dtype, array.dtype))
        index: tuple[Any, ...] = (*map(slice, inside), ...)
        part = out.reshape(array.chunk)[index]
        ts.array(part, copy=False, write=True).write(stored).result()
    except MemoryError:
        raise MemoryError(f"{where}: there is no memory for its {array.chunk_nbytes} bytes") from None
    except (ValueError, TypeError, RuntimeError, OverflowError, KeyError, NotImplementedError) as error:
        reason = str(error).partition(" [")[0][:300]
        raise IntegrityError(f"{where} cannot be decoded: {reason}") from None
    return out.view(np.uint8).data


def _zero(dtype: str) -> object:
    if dtype == "bool":
        return False
    return [0, 0] if dtype.startswith("complex") else 0
