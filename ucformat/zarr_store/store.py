"""A checkpoint of any kind as a read-only store of zarr-python, in which a chunk is read when it is asked for.

The hierarchy is that of the arrays of universal checkpoints: a group for each state, in it an array
for each tensor.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.sync import loop as zarr_loop

from ucformat.format.arrays import array_folders, chunked_array_json, group_json
from ucformat.format.chunking import row_block
from ucformat.format.zarr_types import register_zarr_dtypes
from ucformat.geometry.box import Box, each_index, row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Piece, Tiles
from ucformat.reading.dtypes import fill_value, numpy_dtype
from ucformat.reading.execute import memory_of, read_planned
from ucformat.reading.plan import check_verify, make_plan
from ucformat.reading.rank import item_for
from ucformat.reading.readable import TRACKERS
from ucformat.storage.wrappers import check_unchanged

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.reading.plan import Verify
    from ucformat.reading.readable import Readable


# A tensor of any checkpoint as a Zarr array: its document, its chunks, and the memory of each.
#
# The array is not sharded, and its chunks are raw. Where the files store the tensor in chunks with
# checksums, the chunks of the array are these, so that each is verified; elsewhere they are rows,
# which are contiguous in most files.


DOCUMENT = "zarr.json"
_MAX_DIGITS = 20  # of a chunk's index
# bytes of a stored chunk that is a chunk of the array, too
_MIN_STORED, _MAX_STORED = (64 << 10, 16 << 20)


class ChunkedArray(ABC):
    """An array of a store: its document, and its chunks, which are read when they are asked for."""

    @property
    @abstractmethod
    def document(self) -> bytes:
        """Its `zarr.json`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of a chunk."""

    @property
    @abstractmethod
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dim."""

    @abstractmethod
    async def read(self, index: tuple[int, ...], start: int, stop: int) -> NDArray[np.uint8]:
        """Read the bytes `[start, stop)` of a chunk."""

    def __iter__(self) -> Iterator[str]:
        """The keys of the document and of all chunks, below the array's folder."""
        yield DOCUMENT
        for index in each_index([range(n) for n in self.grid]):
            yield "/".join(["c", *map(str, index)])

    def index_of(self, parts: list[str]) -> tuple[int, ...] | None:
        """The coordinates of a chunk; None if the array has no such chunk."""
        if (
            parts[:1] != ["c"]
            or len(parts) != 1 + len(self.grid)
            or not all(map(_is_number, parts[1:]))
        ):
            return None
        index = tuple(map(int, parts[1:]))
        return index if all(i < n for i, n in zip(index, self.grid, strict=True)) else None


class TensorArray(ChunkedArray):
    """A tensor as an array of the store."""

    def __init__(
        self, reader: ChunkReader, info: TensorInfo, chunk: tuple[int, ...] | None = None
    ) -> None:
        self.info, self._reader, self._chunk = info, reader, chunk

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """The edges of a chunk, in elements: as given, or else those of the file's, or rows."""
        if self._chunk is not None:
            return self._chunk
        return _stored_chunk(self._reader.source, self.info) or row_block(
            self.info.shape, self.info.itemsize
        )

    @cached_property
    def document(self) -> bytes:
        """See ChunkedArray."""
        return chunked_array_json(self.info, self.chunk)

    @cached_property
    def nbytes(self) -> int:
        """See ChunkedArray."""
        return Box.whole(self.chunk).size * self.info.itemsize

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """See ChunkedArray."""
        return tuple(-(-n // c) for n, c in zip(self.info.shape, self.chunk, strict=True))

    async def read(self, index: tuple[int, ...], start: int, stop: int) -> NDArray[np.uint8]:
        """See ChunkedArray."""
        return await self._reader.read(self, index, start, stop)

    def pieces(
        self, index: tuple[int, ...], count: int, start: int, stop: int
    ) -> tuple[list[Piece], NDArray[Any]]:
        """The parts of the tensor in the bytes `[start, stop)` of chunks, and memory for their elements.

        Elements that exceed the tensor are set to the fill value.

        Args:
            count: number of chunks that follow each other along the first dim.
        """
        unit = self.info.itemsize
        shape = (self.chunk[0] * count, *self.chunk[1:]) if self.chunk else ()
        begin = tuple(i * c for i, c in zip(index, self.chunk, strict=True))
        inside = Box(
            begin,
            tuple(min(c, n - b) for c, n, b in zip(shape, self.info.shape, begin, strict=True)),
        )
        first, last = start // unit, -(-stop // unit)
        strides = row_major(shape)
        out = np.empty(last - first, numpy_dtype(self.info.dtype))
        if inside.shape == shape and last - first == inside.size:
            return [Piece(inside, 0, strides)], out
        out[...] = _fill(self.info.dtype)
        pieces = []
        for box in flat_boxes(shape, first, last):
            part = box.shift(begin).intersect(inside)
            if part is not None:
                offset = sum(
                    (p - b) * s for p, b, s in zip(part.start, begin, strides, strict=True)
                )
                pieces.append(Piece(part, offset - first, strides))
        return pieces, out


def _is_number(text: str) -> bool:
    return (
        text.isdecimal()
        and text.isascii()
        and len(text) < _MAX_DIGITS
        and (text == "0" or text[0] != "0")
    )


def _fill(dtype: str) -> Any:
    """The fill value of an array, which pads the chunks at its edges."""
    value = fill_value(dtype)
    return (
        complex("nan+nanj")
        if isinstance(value, list)
        else float("nan")
        if value == "NaN"
        else value
    )


def _stored_chunk(source: Readable, info: TensorInfo) -> tuple[int, ...] | None:
    """The chunk of a file that holds the first element; None if it is not in one, or in a very small or large one."""
    first = Box((0,) * len(info.shape), (1,) * len(info.shape))
    if not info.size or not info.shape:
        return None
    for extent in source.extents(info.key, first):
        if extent.box.intersect(first) is not None:
            chunk = (
                extent.chunk
                if isinstance(extent, Tiles)
                else extent.box.shape
                if extent.block
                else None
            )
            nbytes = Box.whole(chunk).size * info.itemsize if chunk else 0
            return chunk if min(_MIN_STORED, info.nbytes) <= nbytes <= _MAX_STORED else None
    return None


# Reads chunks of arrays from the extents of their tensors; those that are asked for at the same
# time, together.


@dataclass(frozen=True, slots=True)
class _ChunkRequest:
    """The bytes `[start, stop)` of a chunk, and the future that waits for them."""

    array: TensorArray
    index: tuple[int, ...]
    start: int
    stop: int
    result: asyncio.Future[NDArray[np.uint8]]

    @property
    def is_whole(self) -> bool:
        """Whether these are all bytes of the chunk."""
        return (self.start, self.stop) == (0, self.array.nbytes)

    def precedes(self, other: _ChunkRequest) -> bool:
        """Whether the other one is the next chunk, and follows this one in memory if both are of one buffer."""
        array, index = self.array, self.index
        adjacent = (
            other.array is array
            and set(array.grid[1:]) <= {1}
            and other.index[:1] == (index[0] + 1,)
            if index
            else False
        )
        return adjacent and self.is_whole and other.is_whole


class ChunkReader:
    """Reads chunks for any number of event loops."""

    def __init__(self, source: Readable, verify: Verify) -> None:
        self.source, self._verify = source, check_verify(verify)
        # what each loop starts to read next
        self._waiting: dict[asyncio.AbstractEventLoop, list[_ChunkRequest]] = {}

    async def read(
        self, array: TensorArray, index: tuple[int, ...], start: int, stop: int
    ) -> NDArray[np.uint8]:
        """Read bytes of a chunk, together with what is asked for at the same time.

        Raises:
            Conflict: the file changed since the checkpoint was opened.
        """
        loop = asyncio.get_running_loop()
        request = _ChunkRequest(array, index, start, stop, loop.create_future())
        waiting = self._waiting.setdefault(loop, [])
        waiting.append(request)
        # The first of a turn of the loop starts the read, which takes what is asked for until then.
        if len(waiting) == 1:
            loop.call_soon(self._start, loop)
        return await request.result

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read what is waited for.

        In the loop of zarr-python, which nothing else runs in, a disk is read right here: a thread
        would take longer, because zarr copies each chunk in this one. What others ask for meanwhile
        is read together next.
        """
        requests = self._waiting.pop(loop)
        if loop is zarr_loop[0] and self.source.store.costs.parallel is None:
            _give(requests, self._results(requests))
            return
        try:
            running = loop.run_in_executor(None, copy_context().run, self._results, requests)
        except RuntimeError as error:  # the loop is being closed
            _give(requests, [error] * len(requests))
            return
        running.add_done_callback(lambda done: _give(requests, done.result()))

    def _results(
        self, requests: Sequence[_ChunkRequest]
    ) -> list[NDArray[np.uint8] | BaseException]:
        """The bytes of each request, or why they cannot be read."""
        try:
            return list(self._read_together(requests))
        except BaseException as error:  # noqa: BLE001 - raised where the bytes are waited for
            if len(requests) == 1:
                return [error]
            # the others are intact
            return [result for request in requests for result in self._results([request])]

    def _read_together(self, requests: Sequence[_ChunkRequest]) -> Iterator[NDArray[np.uint8]]:
        source = self.source
        runs: list[list[_ChunkRequest]] = []
        for r in requests:
            if runs and runs[-1][-1].precedes(r):
                runs[-1].append(r)
            else:
                runs.append([r])
        items, outs = [], []
        for number, run in enumerate(runs):
            r, nbytes = run[0], sum(r.stop - r.start for r in run)
            pieces, out = r.array.pieces(r.index, len(run), r.start, r.start + nbytes)
            items.append(item_for(source, r.array.info, [(number, p) for p in pieces]))
            outs.append(out)
        plan = make_plan(items, self._verify, source.store.costs)
        labels = [str(run[0].array.info.key) for run in runs]
        read_planned(plan, source.store, lambda: [memory_of(out) for out in outs], labels)
        check_unchanged(source.store, "the chunk is not used", TRACKERS, plan.files)
        for run, out in zip(runs, outs, strict=True):
            data, offset = out.view(np.uint8), run[0].start % out.itemsize
            for r in run:
                yield data[offset : offset + r.stop - r.start]
                offset += r.stop - r.start


def _give(
    requests: Sequence[_ChunkRequest], results: Sequence[NDArray[np.uint8] | BaseException]
) -> None:
    """Let those go on that wait for bytes, unless they were cancelled."""
    for request, result in zip(requests, results, strict=True):
        if request.result.done():
            continue
        if isinstance(result, BaseException):
            request.result.set_exception(result)
        else:
            request.result.set_result(result)


#: Which the tests of zarr-python expect.
_REFUSAL = "store was opened in read-only mode and does not support writing"


class ArrayStore(Store):
    """Arrays in groups as a store of zarr-python, to which nothing can be written.

    Nevertheless `read_only` is false, because `zarr.open_group(store)`, whose default mode is `a`,
    refuses stores of which it is true; `with_read_only(True)` returns one of these.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        register_zarr_dtypes()

    @property
    @abstractmethod
    def _states(self) -> Mapping[str, Mapping[str, ChunkedArray]]:
        """The arrays by the folder of their state and their own."""

    @abstractmethod
    def _again(self, *, read_only: bool) -> ArrayStore:
        """Another store of the same arrays."""

    __hash__ = None  # type: ignore[assignment]

    def with_read_only(self, read_only: bool = False) -> Store:  # noqa: FBT001, FBT002 - zarr's signature
        """The same store with another value of `read_only`.

        Args:
            read_only: must be true, except of a store of which it is false.
        """
        if self.read_only and not read_only:
            return super().with_read_only(read_only)  # raises NotImplementedError
        return self._again(read_only=read_only)

    # --- reading

    def find(self, key: str) -> bytes | tuple[ChunkedArray, tuple[int, ...]] | None:
        """A document, or an array and the coordinates of one of its chunks; None if there is no such key."""
        state, _, below = key.partition("/")
        if key == DOCUMENT:
            return group_json()
        if below == DOCUMENT:
            return group_json() if state in self._states else None
        folder, _, below = below.partition("/")
        array = self._states.get(state, {}).get(folder)
        if array is None:
            return None
        if below == DOCUMENT:
            return array.document
        index = array.index_of(below.split("/"))
        return None if index is None else (array, index)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The value of a key, or a range of its bytes; of a chunk, only these are read.

        Returns:
            A buffer; None if there is no such key.
        """
        entry = self.find(key)
        if entry is None:
            return None
        if isinstance(entry, bytes):
            start, stop = _span(byte_range, len(entry))
            return prototype.buffer.from_bytes(entry[start:stop])
        array, index = entry
        start, stop = _span(byte_range, array.nbytes)
        data = await array.read(index, start, stop)
        return prototype.buffer.from_bytes(data.data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """The values of several keys, or ranges of them; chunks are read together.

        Args:
            key_ranges: the keys, each with the bytes to read (None: all).
        """
        return list(
            await asyncio.gather(*(self.get(key, prototype, span) for key, span in key_ranges))
        )

    async def exists(self, key: str) -> bool:
        """Whether there is a key; no chunk is read."""
        return self.find(key) is not None

    async def getsize(self, key: str) -> int:
        """The bytes of a value; no chunk is read."""
        entry = self.find(key)
        if entry is None:
            raise FileNotFoundError(key)
        return len(entry) if isinstance(entry, bytes) else entry[0].nbytes

    # --- listing

    async def list(self) -> AsyncIterator[str]:
        """All keys."""
        for key in self._keys(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The keys that begin with a prefix."""
        for key in self._keys(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below a path."""
        for name in self._children(prefix.strip("/")):
            yield name

    def _keys(self, prefix: str) -> Iterator[str]:
        """The keys that begin with a prefix."""
        if DOCUMENT.startswith(prefix):
            yield DOCUMENT
        for state, arrays in self._states.items():
            if not _meet(prefix, f"{state}/"):
                continue
            if f"{state}/{DOCUMENT}".startswith(prefix):
                yield f"{state}/{DOCUMENT}"
            for folder, array in arrays.items():
                if _meet(prefix, below := f"{state}/{folder}/"):
                    yield from (key for rest in array if (key := below + rest).startswith(prefix))

    def _children(self, path: str) -> Iterable[str]:
        """The names directly below a path."""
        if not path:
            return [DOCUMENT, *self._states]
        state, *folders = path.split("/")
        arrays = self._states.get(state, {})
        if not folders:
            return [DOCUMENT, *arrays] if arrays else []
        array = arrays.get(folders[0])
        if array is None or 0 in array.grid:
            return [] if array is None or folders[1:] else [DOCUMENT]
        parts = folders[1:]
        if not parts:
            return [DOCUMENT, "c"]
        depth = len(parts) - 1
        full = [*parts, *["0"] * (len(array.grid) - depth)]
        return (
            map(str, range(array.grid[depth]))
            if depth < len(array.grid) and array.index_of(full) is not None
            else []
        )

    # --- writing, which is refused

    async def set(self, key: str, value: Buffer) -> None:  # noqa: ARG002 - zarr's signature
        """Refuse to write; the other methods that write do so, too."""
        self._refuse()

    async def delete(self, key: str) -> None:  # noqa: ARG002 - zarr's signature
        """See `set`."""
        self._refuse()

    async def delete_dir(self, prefix: str) -> None:  # noqa: ARG002 - zarr's signature
        """See `set`."""
        self._refuse()

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:  # noqa: ARG002 - zarr's signature
        """See `set`."""
        self._refuse()

    async def clear(self) -> None:
        """See `set`."""
        self._refuse()

    def _check_writable(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        raise ValueError(_REFUSAL)


def _meet(prefix: str, below: str) -> bool:
    """Whether keys below a folder may begin with a prefix."""
    return below.startswith(prefix) or prefix.startswith(below)


def _span(byte_range: ByteRequest | None, size: int) -> tuple[int, int]:
    """The bytes `[start, stop)` of a value of this size."""
    match byte_range:
        case None:
            return 0, size
        case RangeByteRequest(start, end):
            return min(start, size), max(min(start, size), min(end, size))
        case OffsetByteRequest(offset):
            return min(offset, size), size
        case SuffixByteRequest(suffix):
            return max(0, size - suffix), size
    raise ValueError(f"Unexpected byte_range, got {byte_range}.")


class TensorSource(Protocol):
    """What the store needs of a `Checkpoint`."""

    source: Readable

    @property
    def url(self) -> str:
        """The url of its store."""

    @property
    def tensors(self) -> Mapping[Key, TensorInfo]:
        """Dtype and shape of each stored tensor."""

    @property
    def recipe(self) -> tuple[object, ...]:
        """What opens it again, the same for checkpoints that were opened in the same way."""


class CheckpointStore(ArrayStore):
    """The tensors of a checkpoint as arrays of zarr-python; see `Checkpoint.zarr_store`.

    It is pickled as the place, the options and the views of the checkpoint, which is opened again
    where it is unpickled.
    """

    def __init__(
        self, checkpoint: TensorSource, *, verify: Verify = "whole", read_only: bool = False
    ) -> None:
        super().__init__(read_only=read_only)
        self._checkpoint, self._verify = checkpoint, verify
        self._reader = ChunkReader(checkpoint.source, verify)

    @cached_property
    def _states(self) -> dict[str, dict[str, TensorArray]]:
        out: dict[str, dict[str, TensorArray]] = {}
        infos = self._checkpoint.tensors
        for key, path in array_folders(infos).items():
            state, _, folder = path.partition("/")
            out.setdefault(state, {})[folder] = TensorArray(self._reader, infos[key])
        return out

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CheckpointStore) or self._verify != other._verify:
            return False
        mine, theirs = self._checkpoint, other._checkpoint
        return mine is theirs or mine.recipe == theirs.recipe

    __hash__ = None

    def __repr__(self) -> str:
        return f"CheckpointStore({self._checkpoint.url!r})"

    def __str__(self) -> str:
        return self._checkpoint.url

    def __reduce__(
        self,
    ) -> tuple[Callable[..., CheckpointStore], tuple[TensorSource, Verify, bool]]:
        return _unpickled, (self._checkpoint, self._verify, self.read_only)

    def _again(self, *, read_only: bool) -> CheckpointStore:
        return CheckpointStore(self._checkpoint, verify=self._verify, read_only=read_only)


def _unpickled(checkpoint: TensorSource, verify: Verify, read_only: bool) -> CheckpointStore:  # noqa: FBT001 - pickled
    return CheckpointStore(checkpoint, verify=verify, read_only=read_only)
