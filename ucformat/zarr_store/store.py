"""A checkpoint of any kind as a read-only store of zarr-python, in which a chunk is read when it is asked for.

The hierarchy is that of the arrays of universal checkpoints: a group for each state, in it an array for each tensor.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from ucformat.format.arrays import array_folders, group_json
from ucformat.format.zarr_types import register_zarr_dtypes
from ucformat.zarr_store.array import DOCUMENT, TensorArray
from ucformat.zarr_store.reader import ChunkReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping

    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.reading.plan import Verify
    from ucformat.reading.readable import Readable

#: Which the tests of zarr-python expect.
_REFUSAL = "store was opened in read-only mode and does not support writing"


class Source(Protocol):
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


class CheckpointStore(Store):
    """The tensors of a checkpoint as arrays of zarr-python; see `Checkpoint.zarr_store`.

    It cannot be written to. Nevertheless `read_only` is false, because `zarr.open_group(store)`, whose default mode is
    `a`, refuses stores of which it is true; `with_read_only(True)` returns one of these. It is pickled as the place,
    the options and the views of the checkpoint, which is opened again where it is unpickled.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, checkpoint: Source, *, verify: Verify = "whole", read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self._checkpoint, self._verify = checkpoint, verify
        self._reader = ChunkReader(checkpoint.source, verify)
        register_zarr_dtypes()

    @cached_property
    def _states(self) -> dict[str, dict[str, TensorArray]]:
        """The arrays by the folder of their state and their own."""
        out: dict[str, dict[str, TensorArray]] = {}
        infos = self._checkpoint.tensors
        for key, path in array_folders(infos).items():
            state, _, folder = path.partition("/")
            out.setdefault(state, {})[folder] = TensorArray(self._checkpoint.source, infos[key])
        return out

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CheckpointStore) or self._verify != other._verify:
            return False
        one, two = self._checkpoint, other._checkpoint
        return one is two or one.recipe == two.recipe

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"CheckpointStore({self._checkpoint.url!r})"

    def __str__(self) -> str:
        return self._checkpoint.url

    def __reduce__(self) -> tuple[Callable[..., CheckpointStore], tuple[Source, Verify, bool]]:
        return _unpickled, (self._checkpoint, self._verify, self.read_only)

    def with_read_only(self, read_only: bool = False) -> Store:  # noqa: FBT001, FBT002 - zarr's signature
        """The same store with another value of `read_only`.

        Args:
            read_only: must be true, except of a store of which it is false.
        """
        if self.read_only and not read_only:
            return super().with_read_only(read_only)  # raises NotImplementedError
        return _unpickled(self._checkpoint, self._verify, read_only)

    # --- reading

    def _find(self, key: str) -> bytes | tuple[TensorArray, tuple[int, ...]] | None:
        """A document, or an array and the coordinates of one of its chunks; None if there is no such key."""
        state, _, rest = key.partition("/")
        if key == DOCUMENT:
            return group_json()
        if rest == DOCUMENT:
            return group_json() if state in self._states else None
        folder, _, rest = rest.partition("/")
        array = self._states.get(state, {}).get(folder)
        if array is None:
            return None
        if rest == DOCUMENT:
            return array.document
        at = array.at(rest.split("/"))
        return None if at is None else (array, at)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """The value of a key, or a range of its bytes; of a chunk, only these are read.

        Returns:
            A buffer; None if there is no such key.
        """
        found = self._find(key)
        if found is None:
            return None
        if isinstance(found, bytes):
            start, stop = _span(byte_range, len(found))
            return prototype.buffer.from_bytes(found[start:stop])
        array, at = found
        start, stop = _span(byte_range, array.nbytes)
        data = await self._reader.read(array, at, start, stop)
        return prototype.buffer.from_bytes(data.data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """The values of several keys, or ranges of them; chunks are read together.

        Args:
            key_ranges: the keys, each with the bytes to read (None: all).
        """
        return list(await asyncio.gather(*(self.get(key, prototype, span) for key, span in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Whether there is a key; no chunk is read."""
        return self._find(key) is not None

    async def getsize(self, key: str) -> int:
        """The bytes of a value; no chunk is read."""
        found = self._find(key)
        if found is None:
            raise FileNotFoundError(key)
        return len(found) if isinstance(found, bytes) else found[0].nbytes

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
        state, *rest = path.split("/")
        arrays = self._states.get(state, {})
        if not rest:
            return [DOCUMENT, *arrays] if arrays else []
        array = arrays.get(rest[0])
        if array is None or 0 in array.grid:
            return [] if array is None or rest[1:] else [DOCUMENT]
        at = rest[1:]
        if not at:
            return [DOCUMENT, "c"]
        depth = len(at) - 1
        full = [*at, *["0"] * (len(array.grid) - depth)]
        return map(str, range(array.grid[depth])) if depth < len(array.grid) and array.at(full) is not None else []

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


def _unpickled(checkpoint: Source, verify: Verify, read_only: bool) -> CheckpointStore:  # noqa: FBT001 - pickled
    return CheckpointStore(checkpoint, verify=verify, read_only=read_only)


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
