"""Encoded packed files: tiles of any encoding, one after another, and an index at the end (docs/spec/format.md).

The index says of each tile where it begins in the *plain file*, the one that the packed form has without a codec, its
checksum there, and its fingerprint. So nothing but the reading of a file depends on how it is stored, and which tiles
are equal to those of another checkpoint can be told without reading them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ucformat.errors import ChecksumError, IntegrityError, MissingData, NotFound
from ucformat.format.encoded import CHECKSUM_BYTES, Image, find_image
from ucformat.format.encoding import LOSSY, PATCHES, Encoding, decode_tile, encode_tile
from ucformat.format.lossy import dequantize
from ucformat.geometry.tensor import Block
from ucformat.reading.execute import place_checksum
from ucformat.schema.limits import MAX_BASES, MAX_SPAN, MAX_TILE_BYTES
from ucformat.storage.base import ENCODED
from ucformat.storage.strided import CRC32C_SHIFT, checksum
from ucformat.storage.wrappers import routed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.format.lossy import Quantized
    from ucformat.format.lossy_states import Loss
    from ucformat.geometry.box import Box
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.storage.base import Bytes, Store


#: What may be written: tiles as they are, or each compressed if that makes it smaller.
CODECS = ("raw", "blosc")

NO_BASE = 0xFFFF
_MAGIC = b"UCFTILES"
_ENTRY = np.dtype(
    [
        ("start", "<u8"),
        ("nbytes", "<u4"),
        ("stored", "<u4"),
        ("crc32c", "<u4"),
        ("encoding", "u1"),
        ("itemsize", "u1"),
        ("base", "<u2"),
        ("fingerprint", "<u8", (2,)),
    ]
)
_TRAILER = struct.Struct(
    "<8sQQII"
)  # magic, entries, bytes of the plain file, zero, placed checksum
_ALIGNMENT = 64  # of boxes in the plain file: fewer bytes lie between tiles
# bytes that are read at once to find the index: this part of the file, but at least and at most so many
_TAIL, _TAIL_BYTES = 256, (4 << 10, 64 << 10)

_HINT = "restore the file from another copy; `ucp verify` names every damaged tile"


class Tiles(Protocol):
    """What the tiles of a checkpoint are of, which is not in the index of a file."""

    def locate(self, file: str, start: int) -> tuple[Key, Box]:
        """The tensor and the box of the tile that begins at a byte of a plain file."""

    def read_base(
        self, number: int, key: Key, boxes: Sequence[Box], outs: Sequence[memoryview]
    ) -> None:
        """Read boxes of a tensor of a base, each row-major into memory of exactly its bytes."""

    def read_of_base(self, number: int, key: Key, boxes: Sequence[Box]) -> int:
        """The bytes that `read_base` reads."""

    def wrong_base(self, number: int) -> ChecksumError:
        """The error if the bytes of a base are not those of which a tile is a patch."""

    def lossy_dtype(self, key: Key) -> np.dtype[Any]:
        """The dtype of a tensor whose tiles may be encoded with loss.

        Raises:
            IntegrityError: the manifest does not say so of this tensor.
        """


class EncodedTile(NamedTuple):
    """A tile as it is written.

    Attributes:
        crc32c: the placed checksum of the plain tile.
        loss: the largest absolute and relative error of an element, if it is encoded with loss.
    """

    nbytes: int
    itemsize: int
    crc32c: int
    fingerprint: Sums
    encoding: Encoding
    payload: Bytes
    base: int = NO_BASE
    loss: Loss | None = None


class TileIndexWriter:
    """The index of a file that is written from beginning to end."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._entries: list[tuple[int | Sums, ...]] = []
        self.end = 0  #: Bytes of the encoded file so far.

    def add(self, start: int, tile: EncodedTile) -> bytes:
        """Record the next tile, and return the checksum to store after its payload; empty if it has none."""
        stored = memoryview(tile.payload).nbytes
        sizes, how = (tile.nbytes, stored), (tile.encoding, tile.itemsize, tile.base)
        self._entries.append((start, *sizes, tile.crc32c, *how, tile.fingerprint))
        if not stored:
            return b""
        placed = place_checksum(self._file, self.end)
        if tile.encoding == Encoding.RAW:  # the checksum of the same bytes at another place
            other = place_checksum(self._file, start)
            crc = tile.crc32c ^ CRC32C_SHIFT(placed ^ other, stored)
        else:
            crc = checksum(tile.payload, placed)
        self.end += stored + CHECKSUM_BYTES
        return crc.to_bytes(CHECKSUM_BYTES, "little")

    def encode(self, plain_nbytes: int) -> bytes:
        """Encode the index and its trailer, with which the file ends.

        Args:
            plain_nbytes: bytes of the plain file.
        """
        entries = np.array(self._entries, _ENTRY).tobytes()
        trailer = _TRAILER.pack(_MAGIC, len(self._entries), plain_nbytes, 0, 0)[:-CHECKSUM_BYTES]
        crc = checksum(trailer, checksum(entries, place_checksum(self._file, self.end)))
        return entries + trailer + crc.to_bytes(CHECKSUM_BYTES, "little")


def encode(
    file: str,
    start: int,
    data: Bytes,
    itemsize: int,
    fingerprint: Sums,
    codec: str,
    patched: tuple[Encoding, Bytes] | None = None,
    number: int = 0,
) -> EncodedTile:
    """Encode a tile.

    Args:
        start: where it begins in the plain file.
        patched: how it is encoded, and its payload, if that has been chosen with regard to a base.
        number: that of the base.
    """
    crc, nbytes = checksum(data, place_checksum(file, start)), memoryview(data).nbytes
    encoding, payload = Encoding.RAW, data
    if patched is not None:
        encoding, payload = patched
    elif codec != "raw":
        encoding, payload = encode_tile(data, itemsize)
    base = number if encoding in PATCHES else NO_BASE
    return EncodedTile(nbytes, itemsize, crc, fingerprint, encoding, payload, base)


def encode_quantized(
    file: str,
    start: int,
    quantized: Quantized,
    fingerprint: Sums,
    patched: tuple[Encoding, Bytes] | None = None,
) -> EncodedTile:
    """Encode a tile with loss; checksum and `fingerprint` are those of what it decodes to.

    Args:
        patched: as for `encode`, of what it decodes to.
    """
    octets, itemsize = quantized.octets, quantized.decoded.itemsize
    stored = (quantized.encoding, quantized.payload) if patched is None else patched
    encoded = encode(file, start, octets.data, itemsize, fingerprint, "raw", stored)
    return encoded._replace(loss=(quantized.absolute, quantized.relative))


@dataclass(frozen=True, eq=False)
class TileIndex(Image):
    """The tiles of an encoded packed file."""

    file: str
    entries: NDArray[np.void]
    _tiles: Tiles

    def decode(self, number: int, stored: memoryview, out: memoryview) -> int:
        """See Image."""
        entry = self.entries[number]
        payload = self.payload(number, stored) if stored else stored
        try:
            encoding = int(entry["encoding"])
            if encoding in LOSSY:
                self._dequantize(number, payload, out)
            else:
                decode_tile(encoding, payload, out, int(entry["itemsize"]), where="it")
            if encoding in PATCHES:
                self._check_patched(number, out)
        except IntegrityError as error:
            raise self._named(number, error) from error
        return int(entry["crc32c"])

    def payload(self, number: int, stored: memoryview) -> memoryview:
        """What is stored of a tile but the checksum at its end, with which it is compared.

        Raises:
            ChecksumError: it is damaged.
        """
        payload = stored[:-CHECKSUM_BYTES]
        try:
            _check(checksum(payload, self._place(number)), stored)
        except IntegrityError as error:
            raise self._named(number, error) from error
        return payload

    def check_plain(self, number: int, crc: int, stored: memoryview) -> int:
        """See Image."""
        entry = self.entries[number]
        try:
            _check(crc ^ CRC32C_SHIFT(self._place(number), int(entry["nbytes"])), stored)
        except IntegrityError as error:
            raise self._named(number, error) from error
        return int(entry["crc32c"])

    def _place(self, number: int) -> int:
        """What the checksum of a stored tile begins with."""
        return place_checksum(self.file, int(self.stored_starts[number]))

    def _named(self, number: int, error: IntegrityError) -> IntegrityError:
        """An error of a tile with its name."""
        key, box = self._tiles.locate(self.file, int(self.starts[number]))
        at = int(self.stored_starts[number])
        end = at + int(self.stored_sizes[number])
        named = type(error)(
            f"{key}: the tile {box} at bytes {at}:{end} of {self.file} cannot be decoded: "
            f"{error.message}",
            hint=error.hint if error.in_base else _HINT,
        )
        named.in_base = error.in_base
        return named

    def is_plain(self, number: int) -> bool:
        """See Image."""
        return int(self.entries[number]["encoding"]) == Encoding.RAW

    def _dequantize(self, number: int, payload: memoryview, out: memoryview) -> None:
        """Decode a tile that is encoded with loss, and check that arithmetic gives the same here as for its writer."""
        key, _ = self._tiles.locate(self.file, int(self.starts[number]))
        elements = np.frombuffer(out, self._tiles.lossy_dtype(key))
        dequantize(int(self.entries[number]["encoding"]), payload, elements, "it")
        if not self._has_checksum(number, out):
            raise ChecksumError("it decodes to other elements than those that were recorded")

    def _has_checksum(self, number: int, out: memoryview) -> bool:
        """Whether the bytes of a tile are those of which the index has the checksum."""
        entry = self.entries[number]
        return checksum(out, place_checksum(self.file, int(entry["start"]))) == int(entry["crc32c"])

    def _check_patched(self, number: int, out: memoryview) -> None:
        """Check what a patch has made of the bytes of a base: others would make other bytes."""
        if not self._has_checksum(number, out):
            raise self._tiles.wrong_base(int(self.entries[number]["base"]))

    def fill_bases(self, outs: Mapping[int, memoryview]) -> None:
        """See Image."""
        for (base, key), tiles in self._patches(outs).items():
            boxes, numbers = zip(*tiles, strict=True)
            self._tiles.read_base(base, key, boxes, [outs[n] for n in numbers])

    def read_of_bases(self, tiles: range) -> int:
        """See Image."""
        return sum(
            self._tiles.read_of_base(base, key, [box for box, _ in patches])
            for (base, key), patches in self._patches(tiles).items()
        )

    def _patches(self, tiles: Iterable[int]) -> dict[tuple[int, Key], list[tuple[Box, int]]]:
        """Those of some tiles that are patches, with their boxes, by base and tensor."""
        out: dict[tuple[int, Key], list[tuple[Box, int]]] = {}
        numbers = np.fromiter(tiles, np.int64)
        columns = [self.entries[name][numbers].tolist() for name in ("start", "encoding", "base")]
        for n, start, encoding, base in zip(numbers.tolist(), *columns, strict=True):
            if encoding in PATCHES:
                key, box = self._tiles.locate(self.file, start)
                out.setdefault((base, key), []).append((box, n))
        return out

    def other_tile(self, tiles: Iterable[tuple[int, int]]) -> str | None:
        """How it differs from an index of exactly these tiles, each by its place and its bytes; None if it does not."""
        listed = set(zip(self.starts.tolist(), self.sizes.tolist(), strict=True))
        different = listed ^ set(tiles)
        if not different:
            return None
        start = min(different)[0]
        return f"its index has another tile at byte {start} of the plain file than the tensors"

    def fingerprint(self, number: int) -> Sums:
        """The part of a tile in the fingerprint of its tensor."""
        low, high = self.entries[number]["fingerprint"].tolist()
        return low, high

    @property
    def nbytes(self) -> int:
        """See Image."""
        return super().nbytes + self.entries.nbytes

    @property
    def stored(self) -> Iterator[tuple[int, Block]]:
        """The tiles of which bytes are stored, by number, each as a block of the encoded file."""
        for n in np.flatnonzero(self.stored_sizes).tolist():
            yield (
                n,
                Block(
                    int(self.stored_starts[n]),
                    int(self.stored_sizes[n]) - CHECKSUM_BYTES,
                    placed=True,
                ),
            )

    @property
    def own_block(self) -> Block:
        """The index, as a block of the encoded file."""
        begin = int(self.stored_sizes.sum())
        nbytes = self.entries.nbytes + _TRAILER.size - CHECKSUM_BYTES
        return Block(begin, nbytes, placed=True)


def find_tile(store: Store, extent: Extent) -> tuple[TileIndex, int] | None:
    """The index of an encoded file, and the number of the tile in it that is an extent; None if none is."""
    if ENCODED not in extent.file:
        return None
    image = find_image(*routed(store, extent.file))
    number = int(np.searchsorted(image.starts, extent.offset))
    if not isinstance(image, TileIndex) or extent.offset not in image.starts[number : number + 1]:
        return None
    return image, number


def tile_fingerprint(store: Store, extent: Extent) -> Sums | None:
    """The fingerprint that the index of an encoded file has for an extent; None if that is no whole tile of one."""
    tile = find_tile(store, extent)
    return None if tile is None else tile[0].fingerprint(tile[1])


def _check(crc: int, stored: memoryview) -> None:
    """Compare a checksum with the one at the end of what is stored of a tile."""
    expected = int.from_bytes(stored[-CHECKSUM_BYTES:], "little")
    if crc != expected:
        raise ChecksumError(f"it is damaged (its crc32c is not {expected:#010x})")


def read_index(store: Store, file: str, tiles: Tiles) -> TileIndex:
    """Read and check the index of an encoded packed file.

    Raises:
        MissingData: there is no such file.
        IntegrityError: it is damaged, or no encoded file.
    """
    where = f"{store.url}/{file}"
    try:
        size = store.info(file).size
    except NotFound as error:
        raise MissingData(error.message, hint=error.hint) from error
    if size < _TRAILER.size:
        raise _damaged(where, f"{size} bytes are too few for an index of tiles")
    least, most = _TAIL_BYTES
    tail_bytes = min(size, most, max(least, size // _TAIL))
    tail = store.read(file, size - tail_bytes, tail_bytes)
    magic, count, plain, zero, crc = _TRAILER.unpack_from(tail, len(tail) - _TRAILER.size)
    nbytes = count * _ENTRY.itemsize + _TRAILER.size
    if magic != _MAGIC or zero or nbytes > size or plain > MAX_SPAN:
        raise _damaged(where, "it does not end with an index of tiles")
    begin = size - nbytes
    data = tail[-nbytes:] if nbytes <= len(tail) else store.read(file, begin, nbytes)
    if checksum(data[:-CHECKSUM_BYTES], place_checksum(file, begin)) != crc:
        raise ChecksumError(f"{where}: its index of tiles is damaged (crc32c differs)", hint=_HINT)
    entries = np.frombuffer(data, _ENTRY, count)
    starts, sizes = entries["start"].astype(np.int64), entries["nbytes"].astype(np.int64)
    stored = entries["stored"].astype(np.int64)
    stored_sizes = stored + np.where(stored > 0, CHECKSUM_BYTES, 0)
    if reason := _fault(entries, starts, sizes, stored, plain):
        raise _damaged(where, reason)
    stored_ends = np.cumsum(stored_sizes)
    if (int(stored_ends[-1]) if count else 0) != begin:
        raise _damaged(where, "its tiles do not end where their index begins")
    return TileIndex(
        plain,
        starts,
        sizes,
        stored_ends - stored_sizes,
        stored_sizes,
        file,
        entries,
        tiles,
    )


def _fault(
    entries: NDArray[np.void],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    stored: NDArray[np.int64],
    plain: int,
) -> str | None:
    """What is impossible in an index; None if nothing is."""
    if (entries["start"] > plain).any():
        return "a tile begins after the end of the plain file"
    if (sizes < 1).any() or (sizes > MAX_TILE_BYTES).any():
        return f"a tile has no bytes, or more than {MAX_TILE_BYTES:,}"
    between = np.append(starts, plain) - np.append(0, starts + sizes + CHECKSUM_BYTES)
    if (between < 0).any() or (between >= _ALIGNMENT).any():
        return "its tiles do not follow each other in the plain file"
    itemsize = entries["itemsize"]
    if not np.isin(itemsize, (1, 2, 4, 8, 16)).all() or (sizes % np.maximum(itemsize, 1)).any():
        return "a tile has impossible elements"
    same, raw = entries["encoding"] == Encoding.SAME, entries["encoding"] == Encoding.RAW
    if ((stored > sizes) | (raw & (stored != sizes)) | (same != (stored == 0))).any():
        return "a tile is stored in an impossible number of bytes"
    base = entries["base"]
    needs = np.isin(entries["encoding"], list(PATCHES))
    if (needs != (base != NO_BASE)).any() or (needs & (base >= MAX_BASES)).any():
        return "a tile has no base, or one that it does not need"
    return None


def _damaged(where: str, reason: str) -> IntegrityError:
    return IntegrityError(f"{where} is damaged: {reason}", hint="restore it from another copy")
