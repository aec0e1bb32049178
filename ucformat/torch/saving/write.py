"""Writes one rank's part of a checkpoint.

In the packed form each rank writes its pieces to one file, tile by tile, each followed by its
checksum. In the Zarr form each shard is written by one rank, which receives the parts that other
ranks hold.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from ucformat.format.arrays import shard_key
from ucformat.format.chunking import CHECKSUM_BYTES, Tiling
from ucformat.format.described import ALIGNMENT, packed_file
from ucformat.format.encoding import Encoding
from ucformat.format.lossy_states import larger, lossy_codec
from ucformat.format.packing import NO_RUN, pack, run_of
from ucformat.format.shard import BAND_BYTES, write_shard
from ucformat.format.sidecar import tiled_columns
from ucformat.geometry.fingerprint import LANES, fingerprint_of
from ucformat.geometry.flat_buffer import align_up
from ucformat.geometry.tensor import Key
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.execute import default_threads, place_checksum
from ucformat.storage.base import Bytes
from ucformat.storage.concurrency import grouped
from ucformat.storage.strided import checksum, copy
from ucformat.storage.upload import unit_for
from ucformat.torch.state.elements import (
    SharedMemory,
    copy_common,
    dense_elements,
    elements_of,
    elements_within,
    row_major_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.format.arrays import StoredArray
    from ucformat.format.described import Described
    from ucformat.format.lossy_states import Loss, LossyCodec
    from ucformat.format.sidecar import Columns
    from ucformat.format.tile_index import EncodedTile
    from ucformat.geometry.box import Box
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Piece, TensorInfo
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.options import Codec
    from ucformat.torch.saving.patching import TilePatcher
    from ucformat.torch.saving.shards import (
        OwnPart,
        PlannedTensors,
        ShardBatch,
        ShardTask,
        Transfer,
    )
    from ucformat.torch.saving.statement import Fragment
    from ucformat.torch.state.elements import Elements, Memory

S = TypeVar("S")
T = TypeVar("T")


# bytes of a tile that is written from where it is; smaller ones are copied to be written together
_DIRECT = 256 << 10


class TileOptions(NamedTuple):
    """How the tiles of a packed file are encoded.

    Attributes:
        codec: None: they are not, and the file has no index.
        threads: that encode, at least.
        patcher: encodes tiles of which a base has the same box.
        encode: the states whose tiles are encoded with loss, as for `save`.
    """

    codec: Codec | None
    threads: int = 1
    patcher: TilePatcher | None = None
    encode: Mapping[str, str] = MappingProxyType({})


class WrittenBoxes(NamedTuple):
    """What was written of boxes of tensors.

    Attributes:
        sums: the fingerprint of each box, a row for each.
        patched: the boxes of which tiles need the base.
        losses: the largest absolute and relative errors of the boxes with lossy tiles.
    """

    sums: NDArray[np.uint64]
    patched: set[int]
    losses: dict[int, Loss]


def write_packed(
    store: Store,
    key: str,
    parts: Sequence[Part],
    progress: Callable[[int], None],
    how: TileOptions | None = None,
) -> WrittenBoxes:
    """Write boxes of tensors to a file of the packed form."""
    sums = np.zeros((len(parts), LANES), np.uint64)
    patched: set[int] = set()
    losses: dict[int, Loss] = {}
    if how is None or how.codec is None:
        written = _write_plain(store, key, parts)
    else:
        written = _write_encoded(store, key, parts, how)
    for numbers, nbytes, fingerprints, is_patch, loss in written:
        np.add.at(sums, numbers, np.asarray(fingerprints, np.uint64))
        progress(nbytes)
        if is_patch:
            patched.update(numbers)
        if loss is not None:
            for part in numbers:
                losses[part] = larger(loss, losses.get(part, loss))
    return WrittenBoxes(sums, patched, losses)


#: A tensor, a box of it, and the elements of the box.
Part = tuple["TensorInfo", "Box", "Elements"]


class _Tile(NamedTuple):
    """A tile of one of the boxes, which are numbered as `part`, where it begins in the plain file, and its `run_of`."""

    part: int
    info: TensorInfo
    box: Box
    elements: Elements
    start: int
    nbytes: int
    first: int

    def fingerprint(self, data: Memory) -> Sums:
        """The part of the tile in the fingerprint of its tensor, from its bytes in row-major order."""
        elements = np.ndarray(self.elements.shape, self.elements.dtype, data)
        return fingerprint_of(elements, self.info.shape, self.box)


def _tiles(parts: Sequence[Part]) -> Iterator[_Tile]:
    """The tiles of a packed file, in its order."""
    end, last, shape, dtype = 0, None, None, None
    for part, (info, whole, elements) in enumerate(parts):
        end = align_up(end, ALIGNMENT)
        # those of a group, which follow each other, have the same box
        if last is not whole or info.shape != shape or info.dtype != dtype:
            last, shape, dtype = whole, info.shape, info.dtype
            tiling = Tiling.of(shape, info.itemsize)
            # of the only tile
            first = run_of(whole, shape) if tiling.count(whole) == 1 else None
        if first is not None:
            yield _Tile(part, info, whole, elements, end, elements.nbytes, first)
            end += elements.nbytes + CHECKSUM_BYTES
            continue
        for box in tiling.boxes(whole):
            of_tile = elements_within(elements, whole, box)
            yield _Tile(part, info, box, of_tile, end, of_tile.nbytes, run_of(box, shape))
            end += of_tile.nbytes + CHECKSUM_BYTES


def _most_bytes(parts: Sequence[Part]) -> int:
    """The bytes of a packed file that is not encoded, or a few more."""
    nbytes = of_box = 0
    last, shape, dtype = None, None, None
    for info, box, _ in parts:
        # those of a group, which follow each other, have the same box
        if last is not box or info.shape != shape or info.dtype != dtype:
            last, shape, dtype = box, info.shape, info.dtype
            of_box = Tiling.of(shape, info.itemsize).nbytes(box) + ALIGNMENT
        nbytes += of_box
    return nbytes


class _Written(NamedTuple):
    """Tiles that are written: the numbers of their boxes, the bytes stored, whether they are patches, their errors."""

    parts: list[int]
    nbytes: int
    fingerprints: Sequence[Sums] | NDArray[np.uint64]
    is_patch: bool
    loss: Loss | None = None


def _write_plain(store: Store, key: str, parts: Sequence[Part]) -> Iterator[_Written]:
    """Write tiles, each followed by its checksum.

    Large ones that are row-major in memory are written without a copy; others are copied, as many as fit in 4 MiB.
    """
    most = _most_bytes(parts)
    # of tiles that are copied, and written at once
    band = np.empty(min(most, BAND_BYTES), np.uint8)
    end = used = 0
    with store.create(key, unit_for(most)) as out:

        def room_for(nbytes: int) -> NDArray[np.uint8]:
            nonlocal band, end, used
            if used + nbytes > band.size:
                out.write(band[:used].data)
                used = 0
                if nbytes > band.size:
                    band = np.empty(nbytes, np.uint8)
            end += nbytes
            used += nbytes
            return band[used - nbytes : used]

        for tiles in grouped(_tiles(parts), lambda tile: tile.nbytes + ALIGNMENT, _DIRECT):
            begin, last = end, tiles[-1]
            if last.nbytes >= _DIRECT and last.elements.flags.c_contiguous:
                room_for(last.start - end)[:] = 0
                data = row_major_bytes(last.elements)
                out.write(band[:used].data)
                out.write(data.data)
                used, end = 0, end + last.nbytes
                crc = checksum(data.data, place_checksum(key, last.start))
                room_for(CHECKSUM_BYTES).data[:] = crc.to_bytes(CHECKSUM_BYTES, "little")
                sums: Sequence[Sums] | NDArray[np.uint64] = [last.fingerprint(data)]
            else:
                room = room_for(last.start + last.nbytes + CHECKSUM_BYTES - end)
                sums = _packed(room, key, begin, tiles)
            yield _Written([t.part for t in tiles], sum(t.nbytes for t in tiles), sums, False)
        out.write(band[:used].data)


def _packed(
    room: NDArray[np.uint8], key: str, begin: int, tiles: Sequence[_Tile]
) -> NDArray[np.uint64]:
    """Put tiles into a part of a file, which has its byte `begin` first; returns their fingerprints."""
    starts = [tile.start - begin for tile in tiles]
    elements = [tile.elements for tile in tiles]
    for number, (tile, start) in enumerate(zip(tiles, starts, strict=True)):
        if not tile.elements.flags.c_contiguous:
            data = room[start : start + tile.nbytes]
            elements[number] = np.ndarray(tile.elements.shape, tile.elements.dtype, data)
            copy(elements[number], tile.elements)
    sums = pack(room, key, begin, elements, starts, [tile.first for tile in tiles])
    for number, (tile, start) in enumerate(zip(tiles, starts, strict=True)):
        if tile.first == NO_RUN:
            sums[number] = tile.fingerprint(room[start : start + tile.nbytes])
    return sums


_ENCODERS = 4  # threads that encode, if there are as many cores
_AHEAD = 2  # runs of tiles for each of them that are encoded or wait to be written
_RUN_BYTES = 2 << 20  # of tiles that are encoded at once, so that the base is read in large parts


def _write_encoded(
    store: Store,
    key: str,
    parts: Sequence[Part],
    how: TileOptions,
) -> Iterator[_Written]:
    """Write tiles that threads encode, and then their index."""
    # only here, since it takes time to import
    from ucformat.format.tile_index import NO_BASE, TileIndexWriter, encode, encode_quantized

    def encoded(tiles: Sequence[_Tile]) -> list[EncodedTile]:
        lossy = lossy_codec(how.encode, tiles[0].info)
        if lossy is None:
            return encoded_exactly(tiles)
        return [quantized(tile, lossy) or encoded_exactly([tile])[0] for tile in tiles]

    def quantized(tile: _Tile, lossy: LossyCodec) -> EncodedTile | None:
        elements = row_major_bytes(tile.elements).view(numpy_dtype(tile.info.dtype))
        done = lossy.quantize(elements.reshape(tile.box.shape))
        if done is None:
            return None
        fingerprint = tile.fingerprint(done.octets)
        same = how.patcher is not None and how.patcher.is_same(tile.info, tile.box, fingerprint)
        patched = (Encoding.SAME, b"") if same else None
        return encode_quantized(key, tile.start, done, fingerprint, patched)

    def encoded_exactly(tiles: Sequence[_Tile]) -> list[EncodedTile]:
        info, codec = tiles[0].info, how.codec or "raw"
        data = [row_major_bytes(tile.elements) for tile in tiles]
        sums = [tile.fingerprint(d) for tile, d in zip(tiles, data, strict=True)]
        patched: list[tuple[Encoding, Bytes] | None] = [None] * len(tiles)
        if how.patcher is not None:
            compared = zip((tile.box for tile in tiles), (d.data for d in data), sums, strict=True)
            patched = how.patcher.encode(info, list(compared))
        return [
            encode(key, tile.start, d.data, info.itemsize, fingerprint, codec, patch)
            for tile, d, fingerprint, patch in zip(tiles, data, sums, patched, strict=True)
        ]

    index, end = TileIndexWriter(key), 0
    pending, waiting = list[Bytes](), 0  # what is written at once, and the bytes of its payloads
    threads = max(how.threads, min(_ENCODERS, default_threads()))
    with (
        ThreadPoolExecutor(threads, "ucformat-encode") as pool,
        store.create(key, unit_for(_most_bytes(parts))) as out,
    ):
        runs = _in_order(pool, encoded, _runs(parts), threads * _AHEAD)
        for tile, done in chain.from_iterable(zip(*run, strict=True) for run in runs):
            if (nbytes := memoryview(done.payload).nbytes) >= _DIRECT:
                out.write(b"".join(pending))
                out.write(done.payload)
                pending, waiting = [], 0
            else:
                pending.append(done.payload)
                waiting += nbytes
            pending.append(index.add(tile.start, done))
            if waiting >= BAND_BYTES:
                out.write(b"".join(pending))
                pending, waiting = [], 0
            end = tile.start + tile.nbytes + CHECKSUM_BYTES
            is_patch = done.base != NO_BASE
            yield _Written([tile.part], nbytes, [done.fingerprint], is_patch, done.loss)
        out.write(b"".join((*pending, index.encode(end))))


def _runs(parts: Sequence[Part]) -> Iterator[list[_Tile]]:
    """The tiles of a packed file, in its order: as many of one box together as are encoded at once."""
    for _, of_part in groupby(_tiles(parts), attrgetter("part")):
        yield from grouped(of_part, attrgetter("nbytes"), _RUN_BYTES)


def _in_order(
    pool: ThreadPoolExecutor, call: Callable[[S], T], tasks: Iterable[S], ahead: int
) -> Iterator[tuple[S, T]]:
    """Call a function in threads, and return each result in order; at most so many calls have begun."""
    waiting = deque[tuple[S, Future[T]]]()
    try:
        for task in tasks:
            if len(waiting) == ahead:
                first, result = waiting.popleft()
                yield first, result.result()
            waiting.append((task, pool.submit(call, task)))
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
    finally:
        for _, result in waiting:
            result.cancel()


def packed_extents(
    plan: PlannedTensors, folder: str, begins: Mapping[int, int]
) -> tuple[Columns, list[str], Described | None]:
    """Return the listed extents of packed files, the files that they number, and the described.

    Args:
        begins: for each rank, the byte of its file at which listed tensors begin.
    """
    described = plan.described and plan.described.in_folder(folder)
    number = {info.key: n for n, info in enumerate(plan.infos)}
    tilings = {number[t.info.key]: Tiling.of(t.info.shape, t.info.itemsize) for t in plan.listed}
    ranks = sorted({rank for tensor in plan.listed for rank in tensor.ranks})
    ends = {rank: begins[rank] for rank in ranks}
    file = {rank: n for n, rank in enumerate(ranks)}
    files = [packed_file(folder, rank) for rank in ranks]
    rows: list[tuple[int, int, int, Box]] = []  # tensor, file, offset, box
    for tensor in plan.listed:
        n = number[tensor.info.key]
        for box, rank in zip(tensor.boxes, tensor.ranks, strict=True):
            offset = align_up(ends[rank], ALIGNMENT)
            rows.append((n, file[rank], offset, box))
            ends[rank] = offset + tilings[n].nbytes(box)
    rows.sort(key=lambda f: (f[0], f[3].start))
    columns = tiled_columns((n, file, at, box, tilings[n]) for n, file, at, box in rows)
    return columns, files, described


#: The tensor, index of the shard in the grid, its digests.
ShardDigests = list[tuple[Key, tuple[int, ...], bytes]]


def write_shards(
    store: Store,
    group: Group,
    arrays: Mapping[int, StoredArray],
    part: OwnPart,
    elements: Callable[[Fragment], Elements],
    progress: Callable[[int], None],
    threads: int = 1,
) -> ShardDigests:
    """Write this rank's shards, and send the fragments that other ranks need for theirs."""

    def write(shard: ShardTask, parts: Sequence[Elements]) -> tuple[Key, tuple[int, ...], bytes]:
        array = arrays[shard.tensor]
        return array.info.key, shard.at, _write(store, array, shard, parts, progress)

    itemsizes = {number: array.info.itemsize for number, array in arrays.items()}
    return exchange(group, itemsizes, part.batches, part.messages, elements, write, threads)


def exchange(
    group: Group,
    itemsizes: Sequence[int] | Mapping[int, int],
    batches: Sequence[ShardBatch],
    messages: Sequence[Transfer],
    elements: Callable[[Fragment], Elements],
    write: Callable[[ShardTask, Sequence[Elements]], T],
    threads: int = 1,
) -> list[T]:
    """Send the fragments that other ranks write, and receive and write those that this rank writes.

    The next batch is received while one is written. At most two batches (or larger shards) of
    received data are in memory, and of one message to send the fragments that are not row-major. A
    rank that fails to write continues to receive and send, so that no other rank waits in vain, and
    raises at the end.

    Args:
        threads: how many threads write the shards of a batch (1: they are written in order).
    """
    failures: list[BaseException] = []
    sender = threading.Thread(
        target=_send_all, args=(group, messages, elements, failures), name="ucformat-send"
    )
    sender.start()
    results: list[T] = []
    current, following = _Buffer(), _Buffer()
    try:
        with (
            ThreadPoolExecutor(threads, "ucformat-write") as pool,
            ThreadPoolExecutor(1, "ucformat-receive") as receiver,
        ):

            def write_received(received: dict[Fragment, Memory], shard: ShardTask) -> T:
                return write(
                    shard,
                    [
                        elements(f)
                        if f.sender == group.rank
                        else dense_elements(f.box.shape, received[f], itemsizes[f.tensor])
                        for f in shard.fragments
                    ],
                )

            receiving = [
                receiver.submit(_receive, group, itemsizes, batch, current) for batch in batches[:1]
            ]
            for number, batch in enumerate(batches):
                received = receiving.pop().result()
                next_batches = batches[number + 1 : number + 2]
                receiving += [
                    receiver.submit(_receive, group, itemsizes, b, following) for b in next_batches
                ]
                current, following = following, current
                try:
                    if not failures:
                        results += (map if threads == 1 else pool.map)(
                            partial(write_received, received), batch
                        )
                except Exception as error:  # noqa: BLE001 - raised below
                    failures.append(error)
    finally:
        sender.join()
        current.close()
        following.close()
    if failures:
        raise failures[0]
    return results


class _Buffer:
    """Shared memory that is used again."""

    def __init__(self) -> None:
        self._shared = SharedMemory(0)

    def of(self, nbytes: int) -> SharedMemory:
        """At least so many bytes, whose content is what was there before."""
        if self._shared.memory.size < nbytes:
            self.close()
            self._shared = SharedMemory(nbytes)
        return self._shared

    def close(self) -> None:
        self._shared.close()


def _send_all(
    group: Group,
    messages: Sequence[Transfer],
    elements: Callable[[Fragment], Elements],
    failures: list[BaseException],
) -> None:
    try:
        group.send_bulk((m.to, partial(_bytes_of, m.fragments, elements)) for m in messages)
    except BaseException as error:  # noqa: BLE001 - raised by `write_shards`
        failures.append(error)


def _bytes_of(
    fragments: Sequence[Fragment], elements: Callable[[Fragment], Elements]
) -> list[Memory]:
    return [row_major_bytes(elements(f)) for f in fragments]


def _receive(
    group: Group, itemsizes: Sequence[int] | Mapping[int, int], batch: ShardBatch, buffer: _Buffer
) -> dict[Fragment, Memory]:
    """The bytes of the fragments of a batch that other ranks hold, in a buffer."""
    by_sender: dict[int, list[Fragment]] = {}
    for shard in batch:
        for f in shard.fragments:
            if f.sender != group.rank:
                by_sender.setdefault(f.sender, []).append(f)
    sizes = {f: f.box.size * itemsizes[f.tensor] for sent in by_sender.values() for f in sent}
    shared, at = buffer.of(sum(sizes.values())), 0
    out: dict[Fragment, Memory] = {}
    slots: dict[int, tuple[int, int]] = {}
    for sender, fragments in by_sender.items():
        begin = at
        for f in fragments:
            out[f] = shared.memory[at : at + sizes[f]]
            at += sizes[f]
        slots[sender] = (begin, at)
    group.receive_bulk(shared, slots)
    return out


def _write(
    store: Store,
    array: StoredArray,
    shard: ShardTask,
    parts: Sequence[Elements],
    progress: Callable[[int], None],
) -> bytes:
    """Write one shard, and return its digests."""
    itemsize = array.info.itemsize

    def fill(piece: Piece, raw: NDArray[np.uint8]) -> Elements | None:
        progress(piece.box.size * itemsize)
        if piece.box.size * itemsize == raw.nbytes:  # no chunk exceeds the tensor
            for f, part in zip(shard.fragments, parts, strict=True):
                if f.box.contains(piece.box) and part.ndim and part.strides[-1] == itemsize:
                    return elements_within(part, f.box, piece.box)
        target = elements_of(piece, raw, itemsize)
        for f, part in zip(shard.fragments, parts, strict=True):
            copy_common(part, f.box, target, piece.box)
        return None

    key = shard_key(array.path, shard.at)
    return write_shard(store, key, array.grid, shard.at, fill, array.codec)
