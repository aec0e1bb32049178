"""Plain images of encoded files: virtual files with the bytes that a file would have without a codec.

Extents refer to them like to any other file, in the plain file's offsets. So planning, reading and checksums know
nothing of codecs. Each kind of encoded file is an `Image`, which says where its tiles (or chunks) are stored, and
decodes one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import UcformatError
from ucformat.storage.base import ENCODED, check_range, read_ranges, stored_key
from ucformat.storage.concurrency import Cache, thread_memory
from ucformat.storage.strided import CRC32C_SHIFT, checksum, fill
from ucformat.storage.wrappers import SyntheticStore, layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from ucformat.storage.base import Checksums, Info, Ranges, Store

CHECKSUM_BYTES = 4  # after each tile of the plain file

_CACHE_BYTES = 64 << 20  # of tiles that are read in parts
_INDEX_BYTES = 64 << 20  # of images


@dataclass(frozen=True, eq=False)
class Image(ABC):
    """An encoded file, by the tiles of its plain file.

    Attributes:
        size: bytes of the plain file.
        starts: where each tile begins in the plain file, ascending. A checksum follows it, and zeros lie between.
        sizes: bytes of each tile, without its checksum.
        stored_starts: where each is stored in the encoded file.
        stored_sizes: bytes that are stored of each, with all that belongs to it; 0 if nothing is.
    """

    size: int
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    stored_starts: NDArray[np.int64]
    stored_sizes: NDArray[np.int64]

    @abstractmethod
    def decode(self, number: int, stored: memoryview, out: memoryview) -> int:
        """Decode a tile into all bytes of `out`, and return the checksum that follows it in the plain file.

        Raises:
            IntegrityError: what is stored is damaged.
        """

    def fill_bases(self, outs: Mapping[int, memoryview]) -> None:  # noqa: B027 - most have no base
        """Fill memory with what `decode` needs to find there: the bytes of the base of each tile that is a patch."""

    def read_of_bases(self, tiles: range) -> int:  # noqa: ARG002
        """The bytes that `fill_bases` reads for tiles."""
        return 0

    def is_plain(self, number: int) -> bool:  # noqa: ARG002
        """Whether a tile is stored as it is, followed by a checksum: then it is read into place."""
        return False

    def check_plain(self, number: int, crc: int, stored: memoryview) -> int:
        """Compare the CRC-32C of the bytes of a tile that is stored as it is, and return as `decode`.

        Args:
            stored: what follows these bytes.

        Raises:
            ChecksumError: the tile is damaged.
        """
        raise NotImplementedError(number)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return 4 * self.starts.nbytes

    def meeting(self, start: int, stop: int) -> range:
        """The tiles that have bytes, or a checksum, in a range of the plain file."""
        first = int(self.starts.searchsorted(start, "right")) - 1
        if first < 0 or self.starts[first] + self.sizes[first] + CHECKSUM_BYTES <= start:
            first += 1
        return range(first, int(self.starts.searchsorted(stop, "left")))

    def read_for(self, start: int, stop: int) -> int:
        """The bytes that are read to decode the tiles of a range."""
        tiles = self.meeting(start, stop)
        stored = int(self.stored_sizes[tiles.start : tiles.stop].sum())
        return stored + self.read_of_bases(tiles)


class EncodedStore(SyntheticStore):
    """A store in which the keys below `ENCODED` are plain images of encoded files: `ENCODED` and the file's own key.

    So the placed checksums of the image are those of the plain file, which has the same name.

    A tile that is read whole is decoded into the memory of the reader, by the thread that reads it. Of others the
    last ones are kept.

    Args:
        open_image: reads what an encoded file says of its tiles.
        shared: keeps all tiles, for several checkpoints (default: each keeps those that are read in parts).
        name: of the checkpoint, where tiles are shared.
    """

    def __init__(
        self,
        inner: Store,
        open_image: Callable[[Store, str], Image],
        shared: Cache[memoryview] | None = None,
        name: str = "",
    ) -> None:
        super().__init__(inner)
        self._keeps_all, self._name = shared is not None, name
        self._open = open_image
        self._images = Cache[Image](_INDEX_BYTES)
        self._tiles = shared or Cache[memoryview](_CACHE_BYTES)
        # of threads that read into strided memory: a thread may need more than one, if a base is read so, too
        self._scratch: list[NDArray[np.uint8]] = []

    def image(self, file: str) -> Image:
        """The image of an encoded file; read when it is first asked for."""
        return self._images.get(file, lambda _: self._open(self.inner, file))

    def gaps(self, key: str, offset: int, nbytes: int) -> int:
        """The bytes that are read to decode a range, less those of the range: as a rule below 0."""
        if not self._holds(key):
            return 0
        return self.image(stored_key(key)).read_for(offset, offset + nbytes) - nbytes

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """See Store."""
        if not self._holds(key):
            self.inner.read_into(key, offset, buffers, crcs)
            return
        file = stored_key(key)
        image = self.image(file)
        nbytes = sum(b.nbytes for b in buffers)
        check_range(f"the plain image of {self.url}/{file}", offset, nbytes, image.size)
        tiles = _TileRange.of(image, offset, offset + nbytes)
        scratch = self._scratch.pop() if self._scratch else np.empty(0, np.uint8)
        if scratch.size < nbytes and not all(b.c_contiguous for b in buffers):
            scratch = np.empty(nbytes, np.uint8)
        placed = list(_placed(image, tiles, offset, buffers, scratch.data))
        whole = (
            {}
            if self._keeps_all
            else {n: out for at, target in placed for n, out in tiles.whole(at, target)}
        )
        checksums, plain = self._decode(file, image, whole)
        for k, ((at, target), buffer) in enumerate(zip(placed, buffers, strict=True)):
            self._fill_rest(file, image, tiles, checksums, at, target)
            if target.c_contiguous and not buffer.c_contiguous:
                fill([buffer], target)
            if crcs is None:
                continue
            crc = plain.get((at, target.nbytes))
            if crc is None:
                crcs[k] = checksum(target, crcs[k])
            else:
                crcs[k] = crc ^ CRC32C_SHIFT(crcs[k], target.nbytes)
        self._scratch.append(scratch)

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """See RangeReader."""
        return None if self._holds(key) else read_ranges(self.inner, key, ranges)

    def _holds(self, key: str) -> bool:
        return key.startswith(ENCODED)

    def _info(self, key: str) -> Info:
        file = stored_key(key)
        return replace(self.inner.info(file), key=key, size=self.image(file).size)

    def _content(self, key: str, offset: int, nbytes: int) -> memoryview:
        out = memoryview(bytearray(nbytes))
        self.read_into(key, offset, [out])
        return out

    def _decode(
        self, file: str, image: Image, outs: Mapping[int, memoryview]
    ) -> tuple[dict[int, memoryview], dict[tuple[int, int], int]]:
        """Decode tiles; those that are stored next to each other are read at once.

        Returns:
            The checksum of each tile, and of those that are stored as they are the CRC-32C of the bytes alone, by
            their place in the plain file and their number.
        """
        checksums, plain = dict[int, memoryview](), dict[tuple[int, int], int]()
        image.fill_bases(outs)  # before the memory is used, into which the thread reads those, too
        for tiles in adjacent(image, sorted(outs), self.costs.request):
            places = [outs[n] if image.is_plain(n) else memoryview(b"") for n in tiles]
            sizes = image.stored_sizes[tiles].tolist()
            memory = thread_memory("stored", sum(sizes)).data
            ends = accumulate(n - p.nbytes for n, p in zip(sizes, places, strict=True))
            stored = [memory[a:b] for a, b in pairwise((0, *ends))]
            crcs = [0] * (2 * len(tiles))
            if any(sizes):
                buffers = [b for pair in zip(places, stored, strict=True) for b in pair]
                self.inner.read_into(file, int(image.stored_starts[tiles[0]]), buffers, crcs)
            for n, place, data, crc in zip(tiles, places, stored, crcs[::2], strict=True):
                if place.nbytes:
                    plain[int(image.starts[n]), place.nbytes] = crc
                    follows = image.check_plain(n, crc, data)
                else:
                    follows = image.decode(n, data, outs[n])
                checksums[n] = memoryview(follows.to_bytes(CHECKSUM_BYTES, "little"))
        return checksums, plain

    def _fill_rest(
        self,
        file: str,
        image: Image,
        tiles: _TileRange,
        checksums: Mapping[int, memoryview],
        start: int,
        target: memoryview,
    ) -> None:
        """Fill a range of the plain file except for the tiles that were decoded, of which it gets the checksums."""
        end, stop = start, start + target.nbytes
        for n, begin, size in tiles.meeting(start, stop):
            if begin > end:
                target[end - start : begin - start] = bytes(begin - end)
            end = begin + size + CHECKSUM_BYTES
            if n in checksums:
                begin, data = begin + size, checksums[n]  # noqa: PLW2901 - what is left of it
            else:
                name = f"{self._name} {file} {n}"
                data = self._tiles.get(name, lambda _, n=n: self._tile(file, image, n))  # type: ignore[misc]
            low, high = max(begin, start), min(end, stop)
            if low < high:
                target[low - start : high - start] = data[low - begin : high - begin]
        if end < stop:
            target[end - start :] = bytes(stop - end)

    def _tile(self, file: str, image: Image, number: int) -> memoryview:
        """A tile and its checksum."""
        size = int(image.sizes[number])
        out = memoryview(bytearray(size + CHECKSUM_BYTES))
        out[size:] = self._decode(file, image, {number: out[:size]})[0][number]
        return out


def find_image(store: Store, key: str) -> Image:
    """The image of an encoded file, by its key or that of the plain file, in the layers of a store."""
    (encoded,) = (layer for layer in layers(store) if isinstance(layer, EncodedStore))
    return encoded.image(stored_key(key))


def has_image(store: Store, key: str) -> bool:
    """Whether the image of an encoded file can be read."""
    try:
        find_image(store, key)
    except UcformatError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class _TileRange:
    """Tiles of an image that follow each other, as numbers of Python, which are faster one by one."""

    first: int
    starts: list[int]
    sizes: list[int]
    ends: list[int]  # of their checksums

    @classmethod
    def of(cls, image: Image, start: int, stop: int) -> Self:
        """The tiles that have bytes, or a checksum, in a range of the plain file."""
        tiles = image.meeting(start, stop)
        starts, sizes = (a[tiles.start : tiles.stop] for a in (image.starts, image.sizes))
        ends = starts + sizes + CHECKSUM_BYTES
        return cls(tiles.start, starts.tolist(), sizes.tolist(), ends.tolist())

    def meeting(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Those of them that meet another range: the number, the first byte, and the bytes of each."""
        for k in range(bisect_right(self.ends, start), bisect_left(self.starts, stop)):
            yield self.first + k, self.starts[k], self.sizes[k]

    def whole(self, start: int, target: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Those of which a range of the plain file has all bytes, each with its place in memory."""
        stop = start + target.nbytes
        for n, begin, size in self.meeting(start, stop):
            if not target.c_contiguous:  # of one tile
                yield n, target
            elif begin >= start and begin + size <= stop:
                yield n, target[begin - start : begin - start + size]


def _placed(
    image: Image,
    tiles: _TileRange,
    offset: int,
    buffers: Iterable[memoryview],
    scratch: memoryview,
) -> Iterator[tuple[int, memoryview]]:
    """Where each buffer begins in the file, and memory for its bytes.

    That is its own, if it is contiguous, or if exactly one tile is read into it that is not decoded.
    """
    begin = offset
    for buffer in buffers:
        stop = offset + buffer.nbytes
        if not buffer.nbytes:
            yield offset, memoryview(b"")
        elif buffer.c_contiguous:
            yield offset, buffer.cast("B")
        else:
            own = [
                image.is_plain(n) and (start, size) == (offset, buffer.nbytes)
                for n, start, size in tiles.meeting(offset, stop)
            ] == [True]
            yield offset, buffer if own else scratch[offset - begin : stop - begin]
        offset = stop


def adjacent(image: Image, tiles: Iterable[int], most: int) -> Iterator[list[int]]:
    """Tiles that are stored one after another, of at most so many bytes unless one is larger.

    Args:
        tiles: in ascending order.
    """
    run: list[int] = []
    end = nbytes = 0
    for n in tiles:
        begin, size = int(image.stored_starts[n]), int(image.stored_sizes[n])
        if run and (begin != end or nbytes + size > most):
            yield run
            run, nbytes = [], 0
        run.append(n)
        end, nbytes = begin + size, nbytes + size
    if run:
        yield run
