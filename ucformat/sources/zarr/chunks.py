"""From arrays to extents: where each chunk lies, and what must be decoded first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from ucformat.errors import IntegrityError, MissingData, NotFound, Refused
from ucformat.geometry.box import Box, each_index, row_major
from ucformat.geometry.tensor import Block, Extent
from ucformat.sources.decoded import DECODED, Cache
from ucformat.sources.zarr.codecs import has_crc32c
from ucformat.sources.zarr.decode import decode_chunk, fill_chunk
from ucformat.sources.zarr.values import Stored
from ucformat.storage.base import Info

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ucformat.sources.zarr.array import Array
    from ucformat.storage.base import Store

__all__ = ["Chunks"]

_MOST = 1 << 22  # chunks, read at once, of an array of which some may be missing
_FEW, _EACH = 1 << 14, 16  # so many anyhow, and one for so many stored bytes: that is an entry in the index of a shard
_INDEXES = 64 << 20  # bytes of the indexes of shards that are kept
_MOST_INDEX = 256 << 20  # and of one: of 16 million chunks


class Chunks:
    """The chunks of many arrays; also what decodes them.

    A chunk that is not stored is an error: in a checkpoint it is far likelier to have been lost than to hold nothing
    but the fill value, which is what Zarr says of it. Of the arrays whose paths are in `filled` it does.
    """

    def __init__(
        self,
        store: Store,
        values: Mapping[str, Stored],
        arrays: Mapping[str, Array],
        filled: Collection[str],
        hint: str,
    ) -> None:
        self._store, self._values, self._arrays = store, values, arrays
        self._filled, self._hint = frozenset(filled), hint
        self._most = min(_MOST, _FEW + sum(v.nbytes for v in values.values()) // _EACH)
        self._indexes = Cache(_INDEXES)

    def extents(self, array: Array, within: Box | None = None) -> Iterator[Extent]:
        """The chunks of an array that meet a box; MissingData at the first that is missing and must not be."""
        if 0 in array.shape:
            return
        whole = Box.whole(array.shape)
        near = within or whole
        firsts = tuple(a // c for a, c in zip(near.start, array.chunk, strict=True))
        grid = [range(f, -(-b // c)) for b, c, f in zip(near.stop, array.chunk, firsts, strict=True)]
        count = math.prod(map(len, grid))
        if array.path in self._filled and count > self._most:
            raise Refused(
                f"{self._label(array)} would have {count:,} chunks here, and what is stored may hold {self._most:,}",
                hint="read less of it at once; or, if most of its chunks are missing, write it anew",
            )
        for at in each_index(grid):
            box = Box(tuple(a * c for a, c in zip(at, array.chunk, strict=True)), array.chunk).intersect(whole)
            yield self._extent(array, at, box or whole, self._find(array, at))

    def _extent(self, array: Array, at: tuple[int, ...], box: Box, stored: Stored | None) -> Extent:
        if stored is None and array.path not in self._filled:
            raise MissingData(f"{self._label(array)}: its chunk {list(at)} is not stored", hint=self._hint)
        raw = array.raw
        if stored is None or stored.data is not None or raw is None:
            name = f"{array.path}/{'.'.join(['c', *map(str, at)])}"
            return Extent(box, DECODED + name, 0, row_major(array.chunk, array.itemsize))
        nbytes = array.chunk_nbytes
        if stored.nbytes != nbytes + 4 * raw.checked:
            raise IntegrityError(
                f"{self._label(array)}: its chunk {list(at)} has {stored.nbytes} bytes instead of "
                f"{nbytes + 4 * raw.checked} in {stored.file}",
                hint="the file is truncated, or the metadata is another array's: restore them from another copy",
            )
        within = row_major(tuple(array.chunk[axis] for axis in raw.order), array.itemsize)
        strides = tuple(within[raw.order.index(axis)] for axis in range(len(array.chunk)))
        block = Block(stored.offset, nbytes) if raw.checked else None
        return Extent(box, stored.file, stored.offset, strides, block)

    def _label(self, array: Array) -> str:
        return f"{self._store.url}: array {array.path or 'at the root'}"

    def _find(self, array: Array, at: tuple[int, ...]) -> Stored | None:
        """Where a chunk is stored; None where it is not."""
        if array.sharding is None:
            return self._values.get(array.key(at))
        ratio = tuple(s // c for s, c in zip(array.stored, array.chunk, strict=True))
        key = array.key(tuple(a // r for a, r in zip(at, ratio, strict=True)))
        shard = self._values.get(key)
        if shard is None:
            return None
        index = np.frombuffer(self._indexes.get(key, lambda _: self._index(array, shard, ratio)), np.uint64)
        number = sum(a % r * s for a, r, s in zip(at, ratio, row_major(ratio), strict=True))
        offset, nbytes = int(index[2 * number]), int(index[2 * number + 1])
        if offset == nbytes == (1 << 64) - 1:
            return None
        if offset + nbytes > shard.nbytes:
            raise IntegrityError(
                f"{self._label(array)}: its chunk {list(at)} should lie at bytes {offset}:{offset + nbytes} of "
                f"{shard.file}, whose shard has {shard.nbytes}"
            )
        data = None if shard.data is None else shard.data[offset : offset + nbytes]
        return Stored(shard.file, shard.offset + offset, nbytes, data)

    def _index(self, array: Array, shard: Stored, ratio: tuple[int, ...]) -> memoryview:
        """The index of a shard: offset and size of each of its chunks."""
        form = array.sharding
        assert form is not None  # noqa: S101
        entries = 16 * math.prod(ratio)
        nbytes = entries + 4 * form.index_checked
        if shard.nbytes < nbytes:
            raise IntegrityError(f"{self._label(array)}: {shard.file} is too short for the index of a shard")
        if nbytes > _MOST_INDEX:
            raise Refused(
                f"{self._label(array)}: the shard in {shard.file} has an index of {nbytes:,} bytes, more than "
                f"{_MOST_INDEX:,}",
                hint="write the array anew with larger chunks, or smaller shards",
            )
        offset = 0 if form.index_first else shard.nbytes - nbytes
        if shard.data is not None:
            data = shard.data[offset : offset + nbytes]
        else:
            data = self._store.read(shard.file, shard.offset + offset, nbytes)
        if form.index_checked and crc32c(data[:entries]) != int.from_bytes(data[entries:], "little"):
            raise IntegrityError(f"{self._label(array)}: the index of the shard in {shard.file} is damaged")
        found = np.frombuffer(data[:entries], "<u8" if form.index_endian == "little" else ">u8")
        return found.astype(np.uint64).view(np.uint8).data

    def info(self, name: str) -> Info:
        """See Decoder."""
        array, at = self._parse(name)
        stored = self._find(array, at)
        if stored is None:
            return Info(DECODED + name, array.chunk_nbytes, "not stored")
        of = self._store.info(stored.file)
        if of.size < stored.offset + stored.nbytes and stored.data is None:
            raise MissingData(f"{self._store.url}/{stored.file} has {of.size} bytes, less than when it was opened")
        return Info(DECODED + name, array.chunk_nbytes, f"{of.version} at {stored.offset}", of.modified)

    def decode(self, name: str) -> memoryview:
        """See Decoder."""
        array, at = self._parse(name)
        where = f"{self._label(array)}: its chunk {list(at)}"
        stored = self._find(array, at)
        if stored is None:
            if array.path not in self._filled:
                raise MissingData(f"{where} is not stored", hint=self._hint)
            return fill_chunk(array, where)
        return decode_chunk(array, at, stored.read(self._store), where)

    def is_checked(self, name: str) -> bool:
        """See Decoder."""
        array, at = self._parse(name)
        return has_crc32c(array.chunk_codecs) and self._find(array, at) is not None

    def _parse(self, name: str) -> tuple[Array, tuple[int, ...]]:
        path, _, last = name.rpartition("/")
        array = self._arrays.get(path)
        at = tuple(int(i) for i in last.split(".")[1:] if i.isdecimal())
        if array is None or len(at) != len(array.shape):
            raise NotFound(f"{self._store.url} has no decoded chunk {name}")
        return array, at
