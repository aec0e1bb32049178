"""The files of a checkpoint one by one: each is read once, compared with its checksums, and written as it is read.

A file that is not what was committed is never seen at its destination. One that is there whole, from a copy that was
interrupted, is read back there instead and kept.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ucformat.errors import ChecksumError, IntegrityError, MissingData, NotFound, UcformatError
from ucformat.format.arrays import metadata_documents, shard_key
from ucformat.format.extents import blocks_of
from ucformat.format.shard import check_shard
from ucformat.format.sidecar import NO_BLOCK
from ucformat.format.universal import grid_of
from ucformat.reading.execute import checksum, place_checksum
from ucformat.storage.concurrency import map_io
from ucformat.storage.upload import unit_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.format.chunking import Grid
    from ucformat.format.universal import Universal
    from ucformat.geometry.tensor import Block, Key
    from ucformat.schema.manifest import FileDoc
    from ucformat.storage.base import Store, Writer

__all__ = ["BlockChecker", "Item", "Shard", "items", "read_through", "transfer"]

_READ = 8 << 20  # bytes that are held at once


class BlockChecker:
    """Compares the blocks of a file, which may overlap, with their checksums while the file goes by."""

    def __init__(self, file: str, blocks: Sequence[tuple[Key, Block]]) -> None:
        self._todo = deque(_BlockSum(file, key, block) for key, block in blocks)  # in the order of their offsets
        self._begun: list[_BlockSum] = []
        self._bad: list[_BlockSum] = []

    def take(self, at: int, data: memoryview) -> None:
        """The next bytes of the file, from `at` on."""
        stop = at + len(data)
        while self._todo and self._todo[0].block.offset < stop:
            self._begun.append(self._todo.popleft())
        for each in self._begun:
            each.take(at, data)
        self._bad += [s for s in self._begun if s.end <= stop and not s.ok]
        self._begun = [s for s in self._begun if s.end > stop]

    def damaged(self) -> list[tuple[Key, Block]]:
        """The blocks that are not what their checksums say, and those that the file ends before."""
        return [(s.key, s.block) for s in (*self._bad, *self._begun, *self._todo) if s.block.nbytes]


class _BlockSum:
    """The checksum of one block so far, and the one stored behind it."""

    __slots__ = ("_crc", "_stored", "block", "end", "key")

    def __init__(self, file: str, key: Key, block: Block) -> None:
        self.key, self.block = key, block
        self.end = block.offset + block.nbytes + (4 if block.crc32c is None else 0)
        self._crc = place_checksum(file, block.offset) if block.placed else 0
        self._stored = b""

    def take(self, at: int, data: memoryview) -> None:
        start, stop = self.block.offset, self.block.offset + self.block.nbytes
        self._crc = checksum(data[max(0, start - at) : max(0, stop - at)], self._crc)
        self._stored += data[max(0, stop - at) : max(0, self.end - at)]

    @property
    def ok(self) -> bool:
        crc = self.block.crc32c
        return self._crc == (int.from_bytes(self._stored, "little") if crc is None else crc)


def read_through(
    store: Store, file: str, nbytes: int, see: Callable[[int, memoryview], None], out: Writer | None
) -> None:
    """Read a file front to back, and write it to `out`."""
    for at, data in _parts(store, file, nbytes):
        see(at, data)
        if out is not None:
            out.write(data)


def _parts(store: Store, file: str, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    buffer = memoryview(bytearray(min(_READ, nbytes)))
    for at in range(0, nbytes, _READ):
        part = buffer[: min(_READ, nbytes - at)]
        store.read_into(file, at, [part])
        yield at, part


_NAMED = 5  # damaged chunks or blocks of a file that are named
_HINT = "restore it from another copy of the checkpoint; nothing is committed at the destination"


class Item(Protocol):
    """A file that is to be copied."""

    @property
    def file(self) -> str:
        """Its key, the same in both places."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def copy(self, src: Store, dst: Store) -> bytes:
        """Write at `dst` what `src` has; for a shard the digests of its chunks.

        Raises:
            IntegrityError: the source is damaged; the message names the file, and the tensor.
        """

    def kept(self, src: Store, dst: Store) -> bytes | None:
        """What `copy` gives, if the file at `dst`, which has the right size, is whole; else None."""


def transfer(item: Item, src: Store, dst: Store, there: Mapping[str, int]) -> tuple[bytes, bool]:
    """Have a file at the destination, where files of these sizes lie; what `copy` gives, and whether it was there."""
    if there.get(item.file) == item.nbytes:
        try:
            found = item.kept(src, dst)
        except NotFound:  # somebody removed it just now
            found = None
        if found is not None:
            dst.adopt(item.file)
            return found, True
    return item.copy(src, dst), False


def items(source: Universal) -> list[Item]:
    """All files that a manifest names but itself, the large ones first.

    Raises:
        MissingData: a packed file is not there, or many shards are not.
    """
    m = source.manifest
    found: list[Item] = [_SmallFile(doc) for doc in (m.objects, m.sidecar, *m.assets.values()) if doc is not None]
    found += [_ZarrJson(file, data, key) for file, data, key in metadata_documents(m)]
    for key, doc in source.docs.items():
        if doc.path is not None:
            grid = grid_of(doc)
            if missing := source.missing_shards(doc):
                raise MissingData(f"{missing:,} of the {grid.count:,} shards of {key} are missing", hint=_HINT)
            found += [Shard(key, grid, shard, shard_key(doc.path, shard)) for shard in grid.shards()]
    if m.sidecar is not None:
        found += _packed(source)
    return sorted(found, key=lambda item: -item.nbytes)


def _packed(source: Universal) -> list[_PackedFile]:
    sidecar, keys = source.sidecar(), list(source.docs)
    blocks: dict[str, list[tuple[Key, Block]]] = {file: [] for file in sidecar.files}
    for file, tensor, block in blocks_of(sidecar):
        blocks[file].append((keys[tensor], block))
    c = sidecar.columns
    bare = {sidecar.files[n] for n in set(c.file[(c.block_offset == NO_BLOCK) & ~sidecar.tiled].tolist())}

    def made(file: str) -> _PackedFile:
        try:
            size = source.store.info(file).size
        except NotFound as error:
            names = _names([key for key, _ in blocks[file]])
            raise MissingData(f"{error.message}{names}", hint=_HINT) from error
        return _PackedFile(file, size, tuple(blocks[file]), file not in bare)

    return map_io(made, sidecar.files)


@dataclass(frozen=True, slots=True)
class Shard:
    """The file of a shard."""

    key: Key
    grid: Grid
    shard: tuple[int, ...]
    file: str

    @property
    def nbytes(self) -> int:
        """Its size, which follows from the grid."""
        return self.grid.file_nbytes(self.shard)

    def copy(self, src: Store, dst: Store) -> bytes:
        """See Item."""
        with dst.create(self.file, self.grid.chunk_nbytes + 4) as out:
            leaves, damages = check_shard(src, self.file, self.grid, self.shard, out)
            if damages:
                reasons = [d.reason + (f", chunk {list(d.chunk)}" if d.chunk else "") for d in damages]
                raise _damaged(src, self.file, reasons, [self.key])
        return leaves

    def kept(self, src: Store, dst: Store) -> bytes | None:  # noqa: ARG002 - see Item
        """See Item."""
        leaves, damages = check_shard(dst, self.file, self.grid, self.shard)
        return None if damages else leaves


@dataclass(frozen=True, slots=True)
class _SmallFile:
    """A file whose digest the manifest has."""

    doc: FileDoc

    @property
    def file(self) -> str:
        return self.doc.path

    @property
    def nbytes(self) -> int:
        return self.doc.nbytes

    def copy(self, src: Store, dst: Store) -> bytes:
        _check_size(src, self.file, self.nbytes)
        with dst.create(self.file) as out:
            if self._digest(src, out) != self.doc.digest:
                raise _damaged(src, self.file, ["its digest differs"], ())
        return b""

    def kept(self, src: Store, dst: Store) -> bytes | None:  # noqa: ARG002 - see Item
        return b"" if self._digest(dst, None) == self.doc.digest else None

    def _digest(self, store: Store, out: Writer | None) -> str:
        state = hashlib.sha256()
        read_through(store, self.file, self.nbytes, lambda _, data: state.update(data), out)
        return f"sha256:{state.hexdigest()}"


@dataclass(frozen=True, slots=True)
class _PackedFile:
    """A file of extents, which has checksums for blocks; `covered` says whether for all extents."""

    file: str
    nbytes: int
    blocks: tuple[tuple[Key, Block], ...]
    covered: bool

    def copy(self, src: Store, dst: Store) -> bytes:
        with dst.create(self.file, unit_for(self.nbytes)) as out:
            if bad := self._damaged(src, out):
                reasons = [f"crc32c differs (block at byte {block.offset})" for _, block in bad]
                raise _damaged(src, self.file, reasons, [key for key, _ in bad])
        return b""

    def kept(self, src: Store, dst: Store) -> bytes | None:  # noqa: ARG002 - see Item
        return b"" if self.covered and not self._damaged(dst, None) else None

    def _damaged(self, store: Store, out: Writer | None) -> list[tuple[Key, Block]]:
        sums = BlockChecker(self.file, self.blocks)
        read_through(store, self.file, self.nbytes, sums.take, out)
        return sums.damaged()


@dataclass(frozen=True, slots=True)
class _ZarrJson:
    """A `zarr.json`, of an array or of a group."""

    file: str
    data: bytes
    key: Key | None

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def copy(self, src: Store, dst: Store) -> bytes:
        keys = () if self.key is None else (self.key,)
        try:
            found = src.read(self.file)
        except NotFound as error:
            raise MissingData(f"{error.message}{_names(keys)}", hint=_HINT) from error
        if found != self.data:
            raise _damaged(src, self.file, ["is not what the format says"], keys)
        with dst.create(self.file) as out:
            out.write(found)
        return b""

    def kept(self, src: Store, dst: Store) -> bytes | None:  # noqa: ARG002 - see Item
        return b"" if dst.read(self.file) == self.data else None


def _check_size(src: Store, file: str, nbytes: int) -> None:
    try:
        size = src.info(file).size
    except NotFound as error:
        raise MissingData(error.message, hint=_HINT) from error
    if size != nbytes:
        raise _damaged(src, file, [f"the file has {size} bytes instead of {nbytes}"], ())


def _damaged(src: Store, file: str, reasons: Sequence[str], keys: Sequence[Key]) -> UcformatError:
    more = f", and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
    why = "; ".join(reasons[:_NAMED])
    kind = MissingData if why == "the file is missing" else ChecksumError if "differs" in why else IntegrityError
    return kind(f"{src.url}/{file}: {why}{more}{_names(keys)}", hint=_HINT)


def _names(keys: Sequence[Key]) -> str:
    """` in a (weight), b (weight)`, the first of them."""
    distinct = list(dict.fromkeys(map(str, keys)))
    more = f" and {len(distinct) - _NAMED} more" if len(distinct) > _NAMED else ""
    return f" in {', '.join(distinct[:_NAMED])}{more}" if distinct else ""
