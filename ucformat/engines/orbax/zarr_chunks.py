"""The extents of arrays: where each chunk is stored, and the bytes of chunks that must be decoded first.

TensorStore decodes each chunk in memory, so every kind of store works, and only the chunk is read.
"""

from __future__ import annotations

import bz2
import math
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import ChecksumError, IntegrityError, MissingData, NotFound, UnsupportedError
from ucformat.geometry.box import Box, each_index, row_major
from ucformat.geometry.tensor import Block, Extent, TensorInfo
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.repeats import are_repeated
from ucformat.sources.index import IndexedSource, TensorIndex
from ucformat.storage.base import ByteRange, Info, content_version
from ucformat.storage.concurrency import Cache
from ucformat.storage.decoded import DECODED, read_value, size_of, slice_value
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ucformat.engines.orbax.zarr_array import Codec, ZarrArray
    from ucformat.geometry.tensor import Key
    from ucformat.storage.base import Store
    from ucformat.storage.decoded import Value

_MIN_LIMIT = 64 << 20  # bytes that any chunk may decode to
# or, for a large chunk, times its stored bytes: zstd compresses zeros to a 32,000th
_MAX_RATIO = 1 << 17


#: What TensorStore raises for values that it cannot decode.
FAILURES = (ValueError, TypeError, RuntimeError, OverflowError, KeyError, NotImplementedError)


def tensorstore() -> Any:
    """Import tensorstore when first needed: not before a process forks."""
    try:
        import tensorstore as package
    except ImportError:
        raise UnsupportedError(
            "this checkpoint is encoded, and decoding it needs the package tensorstore, which is "
            "not installed",
            hint="pip install 'ucformat[zarr]'",
        ) from None
    return package


def _decode_chunk(array: ZarrArray, index: tuple[int, ...], data: bytes, where: str) -> memoryview:
    """Decode a chunk to row-major little-endian elements; `where` is its name in messages.

    The elements of a chunk outside the array are zero, as they need not be stored.
    """
    nbytes = array.chunk_nbytes
    if nbytes > max(_MIN_LIMIT, len(data) * _MAX_RATIO):
        raise IntegrityError(
            f"{where}: {len(data)} bytes are too few for a chunk of {list(array.chunk)} elements"
        )
    if array.stream:
        data = _unpack(array.stream, data, nbytes, where)
    codecs, data = _before_blosc(array.chunk_codecs, data, nbytes, where)
    inside = (min(c, n - a * c) for a, c, n in zip(index, array.chunk, array.shape, strict=True))
    return _read(array, codecs, tuple(inside), data, where)


def _fill_chunk(array: ZarrArray, where: str) -> memoryview:
    """The content of a chunk that is not stored: the array's fill value."""
    if array.chunk_nbytes > _MIN_LIMIT:
        raise UnsupportedError(
            f"{where} is not stored, and with {array.chunk_nbytes} bytes too large to be filled"
        )
    return _read(array, array.chunk_codecs, array.chunk, None, where)


def _unpack(codec: str, data: bytes, nbytes: int, where: str) -> bytes:
    """Decompress a stream, to no more bytes than are expected."""
    try:
        if codec == "zlib":
            out = zlib.decompressobj().decompress(data, nbytes + 1)
        else:
            out = bz2.BZ2Decompressor().decompress(data, nbytes + 1)
    except (zlib.error, OSError, ValueError, EOFError) as error:
        raise IntegrityError(f"{where}: it is not a {codec} stream: {error}") from None
    if len(out) != nbytes:
        raise IntegrityError(f"{where}: it does not decode to the {nbytes} bytes of a chunk")
    return out


def _before_blosc(
    codecs: tuple[Codec, ...], data: bytes, nbytes: int, where: str
) -> tuple[tuple[Codec, ...], bytes]:
    """The codecs and bytes that remain once the checksums around blosc are checked.

    TensorStore inflates with other codecs only as far as necessary, but with blosc to the size in
    its header. So that is checked here, which is possible only if the header is at the beginning of
    the stored bytes and blosc contains nothing but the elements.
    """
    if not _has_blosc(codecs):
        return codecs, data
    while codecs[-1]["name"] == "crc32c":
        data, stored = data[:-4], data[-4:]
        if checksum(data) != int.from_bytes(stored, "little"):
            raise ChecksumError(f"{where} does not match its CRC-32C")
        codecs = codecs[:-1]
    if [c["name"] for c in codecs if c["name"] != "transpose"] != ["bytes", "blosc"]:
        raise UnsupportedError(
            f"{where}: it is encoded with blosc and another codec, so its decoded size is unknown",
            hint=(
                "write the array anew with a single compression codec, or with shards that use "
                "blosc only for chunks"
            ),
        )
    if len(data) < 16 or int.from_bytes(data[4:8], "little") != nbytes:
        raise IntegrityError(f"{where}: it does not decode to the {nbytes} bytes of a chunk")
    return codecs, data


def _has_blosc(codecs: Sequence[Codec]) -> bool:
    inner = (codec.get("configuration", {}).get("codecs", ()) for codec in codecs)
    return any(codec["name"] == "blosc" for codec in codecs) or any(map(_has_blosc, inner))


def _read(
    array: ZarrArray,
    codecs: tuple[Codec, ...],
    inside: tuple[int, ...],
    data: bytes | None,
    where: str,
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
        out = np.zeros(math.prod(array.chunk), numpy_dtype(array.dtype))
        index: tuple[Any, ...] = (*map(slice, inside), ...)
        part = out.reshape(array.chunk)[index]
        ts.array(part, copy=False, write=True).write(stored).result()
    except MemoryError:
        raise MemoryError(
            f"{where}: not enough memory for its {array.chunk_nbytes} bytes"
        ) from None
    except FAILURES as error:
        reason = str(error).partition(" [")[0][:300]
        raise IntegrityError(f"{where} cannot be decoded: {reason}") from None
    return out.view(np.uint8).data


def _zero(dtype: str) -> object:
    if dtype == "bool":
        return False
    return [0, 0] if dtype.startswith("complex") else 0


_MAX_CHUNKS = 1 << 22  # chunks in one read of an array that may lack some
#: The limit is lower if little is stored: this many chunks, and one for each entry in the index of
#: a shard.
_MIN_CHUNKS, _BYTES_PER_CHUNK = 1 << 14, 16
_INDEX_CACHE = 64 << 20  # bytes of the indexes of shards that are kept
_MAX_INDEX = 256 << 20  # bytes of one index: of 16 million chunks


class Chunks:
    """The chunks of many arrays, and their decoder.

    A chunk that is not stored is an error: in a checkpoint, it is far more likely to be lost than
    to contain only the fill value, which it means according to Zarr. It has that meaning for the
    arrays whose paths are in `filled`.
    """

    def __init__(
        self,
        store: Store,
        values: Mapping[str, Value],
        arrays: Mapping[str, ZarrArray],
        filled: Collection[str],
        hint: str,
    ) -> None:
        self._store, self._values, self._arrays = store, values, arrays
        self._filled, self._hint = frozenset(filled), hint
        self._max_chunks = min(
            _MAX_CHUNKS, _MIN_CHUNKS + sum(map(size_of, values.values())) // _BYTES_PER_CHUNK
        )
        self._indexes = Cache[memoryview](_INDEX_CACHE)

    def extents(self, array: ZarrArray, within: Box | None = None) -> Iterator[Extent]:
        """Find the extents of an array's chunks."""
        if 0 in array.shape:
            return
        whole = Box.whole(array.shape)
        region = within or whole
        sides = zip(region.start, region.stop, array.chunk, strict=True)
        grid = [range(start // c, -(-stop // c)) for start, stop, c in sides]
        count = math.prod(map(len, grid))
        if array.path in self._filled and count > self._max_chunks:
            raise UnsupportedError(
                f"{self._label(array)} would have {count:,} chunks here, but the limit for its "
                "size is "
                f"{self._max_chunks:,}",
                hint=(
                    "read less of it at once; or, if most of its chunks are missing, write it anew"
                ),
            )
        for index in each_index(grid):
            start = tuple(a * c for a, c in zip(index, array.chunk, strict=True))
            box = Box(start, array.chunk).intersect(whole)
            yield self._extent(array, index, box or whole, self._find(array, index))

    def _extent(
        self, array: ZarrArray, index: tuple[int, ...], box: Box, stored: Value | None
    ) -> Extent:
        if stored is None and array.path not in self._filled:
            raise MissingData(
                f"{self._label(array)}: its chunk {list(index)} is not stored", hint=self._hint
            )
        raw = array.raw
        if not isinstance(stored, ByteRange) or raw is None:
            name = f"{array.path}/{'.'.join(['c', *map(str, index)])}"
            return Extent(box, DECODED + name, 0, row_major(array.chunk, array.itemsize))
        nbytes = array.chunk_nbytes
        if stored.nbytes != nbytes + 4 * raw.checked:
            raise IntegrityError(
                f"{self._label(array)}: its chunk {list(index)} has {stored.nbytes} bytes instead of "
                f"{nbytes + 4 * raw.checked} in {stored.file}",
                hint=(
                    "the file is truncated, or the metadata is another array's: restore them "
                    "from another copy"
                ),
            )
        within = row_major(tuple(array.chunk[axis] for axis in raw.order), array.itemsize)
        strides = tuple(within[raw.order.index(axis)] for axis in range(len(array.chunk)))
        block = Block(stored.offset, nbytes) if raw.checked else None
        return Extent(box, stored.file, stored.offset, strides, block)

    def _label(self, array: ZarrArray) -> str:
        return f"{self._store.url}: array {array.path or 'at the root'}"

    def _find(self, array: ZarrArray, index: tuple[int, ...]) -> Value | None:
        """The location of a chunk; None if it is not stored."""
        if array.sharding is None:
            return self._values.get(array.key(index))
        ratio = tuple(s // c for s, c in zip(array.stored, array.chunk, strict=True))
        key = array.key(tuple(a // r for a, r in zip(index, ratio, strict=True)))
        shard = self._values.get(key)
        if shard is None:
            return None
        entries = self._indexes.get(key, lambda _: self._index(array, shard, key, ratio))
        table = np.frombuffer(entries, np.uint64)
        number = sum(a % r * s for a, r, s in zip(index, ratio, row_major(ratio), strict=True))
        offset, nbytes = int(table[2 * number]), int(table[2 * number + 1])
        # How Zarr's index of a shard marks a chunk that is not stored.
        if offset == nbytes == (1 << 64) - 1:
            return None
        if offset + nbytes > size_of(shard):
            raise IntegrityError(
                f"{self._label(array)}: its chunk {list(index)} should be at bytes "
                f"{offset}:{offset + nbytes} of "
                f"the shard {key}, which has {size_of(shard)}"
            )
        return slice_value(shard, offset, nbytes)

    def _index(
        self, array: ZarrArray, shard: Value, key: str, ratio: tuple[int, ...]
    ) -> memoryview:
        """Read the index of a shard: offset and size of each of its chunks."""
        sharding = array.sharding
        assert sharding is not None  # noqa: S101
        entries = 16 * math.prod(ratio)
        nbytes = entries + 4 * sharding.index_checked
        if size_of(shard) < nbytes:
            raise IntegrityError(
                f"{self._label(array)}: {key} is too short for the index of a shard"
            )
        if nbytes > _MAX_INDEX:
            raise UnsupportedError(
                f"{self._label(array)}: the shard {key} has an index of {nbytes:,} bytes, more "
                f"than {_MAX_INDEX:,}",
                hint="write the array anew with larger chunks, or smaller shards",
            )
        offset = 0 if sharding.index_first else size_of(shard) - nbytes
        data = read_value(self._store, slice_value(shard, offset, nbytes))
        if sharding.index_checked and checksum(data[:entries]) != int.from_bytes(
            data[entries:], "little"
        ):
            raise IntegrityError(f"{self._label(array)}: the index of the shard {key} is damaged")
        dtype = "<u8" if sharding.index_endian == "little" else ">u8"
        index = np.frombuffer(data[:entries], dtype).astype(np.uint64)
        # Clipped to the shard, so that the sums of wrong numbers do not overflow.
        begins, sizes = (
            np.minimum(index.reshape(-1, 2), np.uint64(size_of(shard))).astype(np.int64).T
        )
        if are_repeated(begins, np.minimum(begins + sizes, size_of(shard))):
            raise IntegrityError(
                f"{self._label(array)}: the index of the shard {key} puts so many chunks at the "
                "same bytes that they "
                "are far more than it has"
            )
        return index.view(np.uint8).data

    def info(self, name: str) -> Info:
        """See `Decoder.info`."""
        array, index = self._parse(name)
        stored = self._find(array, index)
        if stored is None:
            return Info(DECODED + name, array.chunk_nbytes, "not stored")
        if isinstance(stored, bytes):
            return Info(DECODED + name, array.chunk_nbytes, content_version(stored))
        file = self._store.info(stored.file)
        if file.size < stored.offset + stored.nbytes:
            raise MissingData(
                f"{self._store.url}/{stored.file} has {file.size} bytes, less than when it was opened"
            )
        return Info(
            DECODED + name, array.chunk_nbytes, f"{file.version} at {stored.offset}", file.modified
        )

    def decode(self, name: str) -> memoryview:
        """See `Decoder.decode`."""
        array, index = self._parse(name)
        where = f"{self._label(array)}: its chunk {list(index)}"
        stored = self._find(array, index)
        if stored is None:
            if array.path not in self._filled:
                raise MissingData(f"{where} is not stored", hint=self._hint)
            return _fill_chunk(array, where)
        return _decode_chunk(array, index, read_value(self._store, stored), where)

    def is_checked(self, name: str) -> bool:
        """See `Decoder.is_checked`."""
        array, index = self._parse(name)
        # not those of shards inside a chunk
        crc = any(c["name"] == "crc32c" for c in array.chunk_codecs)
        return crc and self._find(array, index) is not None

    def _parse(self, name: str) -> tuple[ZarrArray, tuple[int, ...]]:
        path, _, last = name.rpartition("/")
        array = self._arrays.get(path)
        index = tuple(int(i) for i in last.split(".")[1:] if i.isdecimal())
        if array is None or len(index) != len(array.shape):
            raise NotFound(f"{self._store.url} has no decoded chunk {name}")
        return array, index


class OpenArrays(IndexedSource):
    """An opened checkpoint whose tensors are arrays; extents need indexes of shards.

    It has no records: Orbax has no checksums of data, and Zarr's are next to its chunks.
    """

    def _add(
        self, chunks: Chunks, arrays: Mapping[Key, ZarrArray], unreadable: Mapping[Key, str]
    ) -> None:
        self.contents = TensorIndex()
        for key, array in arrays.items():
            info = TensorInfo(*key, array.dtype, array.shape)
            self.contents.put(info, partial(chunks.extents, array))
        for key, reason in unreadable.items():
            self.contents.refuse(key, reason)
