"""How one tile, or chunk, is stored: as it is, compressed, or as a patch of the one of the same box in a base.

Everything here works on bytes in memory. Payloads are told apart by their `Encoding` alone, which is recorded beside
them, and what they must decode to is known before they are read: whatever a payload claims is compared with
that before memory is allocated or anything is written (docs/adr/0054-codecs-and-patches.md).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import IntegrityError, UnsupportedError, UpgradeNeeded, UsageError
from ucformat.schema.limits import MAX_BLOSC
from ucformat.storage.concurrency import thread_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ucformat.storage.base import Bytes

__all__ = [
    "Encoding",
    "apply_overwrite",
    "apply_xor",
    "compress",
    "decode_tile",
    "decompress",
    "encode_rows",
    "encode_tile",
    "overwrite_patch",
    "xor_patch",
]


class Encoding(IntEnum):
    """How a tile is stored; the numbers are those of tile indexes."""

    RAW = 0  # the bytes themselves
    BLOSC = 1  # compressed by `compress`
    XOR = 2  # a patch: the bytes XOR those of the base, compressed
    OVERWRITE = 3  # a patch: which elements changed, and their values
    SAME = 4  # equal to the base; nothing is stored
    INT8_BLOCKWISE = 5  # lossy: `ucformat.format.lossy`
    ADAPTIVE = 6  # lossy: `ucformat.format.lossy`


# Blosc

_LEVEL = 1  # higher ones take several times as long for hundredths of the size
_BLOSC_HEADER = struct.Struct("<BBBBIII")
_FORMATS = (2, 1)  # of Blosc, and of its zstd
# shuffled by bytes, not split, by zstd; or so in name, but copied because it did not shrink
_FLAGS = (0x91, 0x93)


def compress(data: Bytes, itemsize: int) -> bytes:
    """Compress bytes with Blosc: byte planes of elements of this size, in one block, by zstd.

    Nothing else uses the interpreter's lock meanwhile, so threads compress at the same time. What does not shrink is
    16 bytes longer.

    Raises:
        UnsupportedError: numcodecs is not installed, or these are more than 2 GiB - 17 bytes.
    """
    nbytes = _size(data)
    if nbytes > MAX_BLOSC:
        raise UnsupportedError(
            f"{nbytes:,} bytes are more than the {MAX_BLOSC:,} that Blosc can compress at once",
            hint="use smaller chunks or tiles, or no codec",
        )
    blosc = _blosc()
    # Blosc's own choice of blocks is smaller than its planes need to compress well
    compressed: bytes = blosc.compress(data, b"zstd", _LEVEL, blosc.SHUFFLE, nbytes, itemsize)
    return compressed


def decompress(stored: Bytes, out: memoryview, itemsize: int, where: str = "the tile") -> None:
    """Decompress what `compress` has made, to exactly as many bytes as `out` has.

    Args:
        where: what is decoded, for messages.

    Raises:
        IntegrityError: it is something else; what `out` has then is not defined if the header was right.
    """
    nbytes = out.nbytes
    _check_header(stored, nbytes, itemsize, where)
    if not nbytes:
        return
    try:
        _blosc().decompress(stored, out)
    except (RuntimeError, ValueError) as error:
        raise IntegrityError(f"{where} is damaged: Blosc cannot decode it: {error}") from None


def _check_header(stored: Bytes, nbytes: int, itemsize: int, where: str) -> None:
    """Check that a Blosc buffer has the only form that `compress` writes, and is of `nbytes` bytes.

    Blosc checks the rest against these. It would leave bytes as they are if splits did not divide a block evenly, so
    buffers with splits are refused.
    """
    size = _size(stored)
    if size < _BLOSC_HEADER.size:
        raise IntegrityError(f"{where} is damaged: {size} bytes are no Blosc buffer")
    *formats, flags, typesize, decoded, _, encoded = _BLOSC_HEADER.unpack_from(stored)
    if (*formats,) != _FORMATS or flags not in _FLAGS:
        raise IntegrityError(f"{where} is damaged: it is no Blosc buffer of shuffled bytes by zstd")
    for what, claimed, actual in (
        ("elements of bytes", typesize, itemsize),
        ("decoded bytes", decoded, nbytes),
        ("stored bytes", encoded, size),
    ):
        if claimed != actual:
            raise IntegrityError(
                f"{where} is damaged: its header says {claimed:,} {what}, and {actual:,} were expected"
            )


@cache
def _blosc() -> Any:
    try:
        from numcodecs import blosc  # type: ignore[import-untyped]
    except ImportError:
        raise UnsupportedError(
            "compression needs the package numcodecs, which is not installed",
            hint="pip install 'ucformat[codecs]'",
        ) from None
    # as zarr-python does: its own threads share one context, with a lock around it
    blosc.use_threads = False
    return blosc


# patches


def xor_patch(new: Bytes, base: Bytes, itemsize: int) -> bytes:
    """Make a patch of the bits that differ. Applying it twice undoes it."""
    _check_base(new, base)
    return compress((_octets(new) ^ _octets(base)).data, itemsize)


def apply_xor(payload: Bytes, out: memoryview, itemsize: int, where: str = "the tile") -> None:
    """Apply a patch of `xor_patch` to the base's bytes, which `out` has; after an error it still does."""
    bits = thread_memory("patch", out.nbytes)
    decompress(payload, bits.data, itemsize, where)
    target = _octets(out)
    np.bitwise_xor(target, bits, out=target)


# A patch of elements is a header, runs, and values. Runs are two columns of u32: how many elements lie before the run
# (after the first one: less 1, since there is one at least), and how many it has, less 1. So runs of any numbers
# ascend, and only their sum must be checked. Either part is compressed if that makes it shorter.
_PATCH_HEADER = struct.Struct("<III")  # runs, changed elements, stored bytes of the runs
_RUN_BYTES = 8
_LONG = 256  # elements of a run that is copied by itself
_AT_ONCE = 1 << 14  # runs of which the places are computed at once
_ITEMSIZES = (1, 2, 4, 8, 16)


def overwrite_patch(new: Bytes, itemsize: int, changed: NDArray[np.bool_]) -> bytes | None:
    """Make a patch of the elements that changed, without those of the base. Applying it twice is applying it once.

    Args:
        new: bytes of elements of 1, 2, 4, 8 or 16 bytes.
        changed: which of them did. If there are fewer, each is for as many elements in a row: which rows did.

    Returns:
        None where the patch would have more bytes than the tile before it is compressed.
    """
    elements = _elements(new, itemsize)
    each, rest = divmod(elements.size, changed.size) if changed.size else (0, elements.size)
    if rest:
        raise UsageError(
            f"a mask of {changed.size:,} cannot be for {elements.size:,} elements",
            hint="give one value for each element, or for each row",
        )
    places = np.flatnonzero(changed)  # of elements, or rows
    steps = np.diff(places, prepend=-2)
    firsts = np.flatnonzero(steps != 1)  # of each run, in `places`
    runs, count = len(firsts), len(places) * each
    if not _plausible(runs, count, elements):
        return None
    before = (steps[firsts] - 1) * each - 1
    before[:1] = places[:1] * each
    lengths = np.diff(firsts, append=len(places)) * each
    columns = np.stack((before, lengths - 1)).astype("<u4")
    values = elements.reshape(changed.size, each)[places]  # a mask would take a pass
    stored = _shorter(_bytes(columns), 4)
    return b"".join(
        (_PATCH_HEADER.pack(runs, count, len(stored)), stored, _shorter(_bytes(values), itemsize))
    )


def apply_overwrite(
    payload: Bytes, out: memoryview, itemsize: int, where: str = "the tile"
) -> None:
    """Apply a patch of `overwrite_patch` to the base's bytes, which `out` has; after an error it still does."""
    payload = memoryview(payload)
    if len(payload) < _PATCH_HEADER.size or itemsize not in _ITEMSIZES or out.nbytes % itemsize:
        raise IntegrityError(f"{where} is damaged: it is no patch of elements")
    target = _elements(out, itemsize)
    runs, count, stored = _PATCH_HEADER.unpack_from(payload)
    if not _plausible(runs, count, target):
        raise IntegrityError(
            f"{where} is damaged: {count:,} elements in {runs:,} runs are no patch of {target.size:,}"
        )
    at = _PATCH_HEADER.size + stored
    columns = _longer(payload[_PATCH_HEADER.size : at], runs * _RUN_BYTES, 4, where)
    before, lengths = np.frombuffer(columns, "<u4").reshape(2, runs)
    skipped = int(before.sum(dtype=np.uint64)) + max(0, runs - 1)
    if int(lengths.sum(dtype=np.uint64)) + runs != count or skipped + count > target.size:
        raise IntegrityError(f"{where} is damaged: its runs do not lie within the tile")
    values = _elements(_longer(payload[at:], count * itemsize, itemsize, where), itemsize)
    _overwrite(target, values, before, lengths)


def _plausible(runs: int, count: int, elements: NDArray[Any]) -> bool:
    """Whether a patch may have so many runs and elements: without compression it is no longer than the tile."""
    return runs <= count and runs * _RUN_BYTES + count * elements.itemsize <= elements.nbytes


def _overwrite(
    target: NDArray[Any],
    values: NDArray[Any],
    before: NDArray[np.uint32],
    lengths: NDArray[np.uint32],
) -> None:
    place = -1  # the first of the next run, if nothing lies before it; of the first one
    taken = 0
    for first in range(0, len(before), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        count = lengths[some].astype(np.int64) + 1
        sources = np.cumsum(count) + (taken - count)
        places = np.cumsum(before[some].astype(np.int64) + 1) + (place - taken) + sources
        place, taken = int(places[-1] + count[-1]), int(sources[-1] + count[-1])
        for run in np.flatnonzero(count >= _LONG):
            to, source, n = places[run], sources[run], count[run]
            target[to : to + n] = values[source : source + n]
        short = count < _LONG
        places, sources, count = places[short], sources[short], count[short]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        target[np.repeat(places, count) + within] = values[np.repeat(sources, count) + within]


def _shorter(data: memoryview, itemsize: int) -> Bytes:
    if not data.nbytes:
        return data
    compressed = compress(data, itemsize)
    return compressed if len(compressed) < data.nbytes else data


def _longer(stored: memoryview, nbytes: int, itemsize: int, where: str) -> memoryview:
    """What `_shorter` was given: so many bytes."""
    if len(stored) == nbytes:
        return stored
    out = memoryview(bytearray(nbytes))
    decompress(stored, out, itemsize, where)
    return out


# tiles


def _is_scattered(changed: NDArray[np.bool_], itemsize: int) -> bool:
    """Whether so many short elements changed, in so many places, that places take more than the bits that are equal."""
    count = np.count_nonzero(changed)
    if itemsize > _SHORT or count * _FEW < changed.size:
        return False
    edges = np.count_nonzero(changed[1:] != changed[:-1])
    return bool(edges * _TOGETHER > 2 * count)


_SHORT, _FEW, _TOGETHER = 2, 1000, 4  # bytes, elements for each that changed, elements in a run


def encode_tile(new: Bytes, itemsize: int, base: Bytes | None = None) -> tuple[Encoding, Bytes]:
    """Encode a tile without loss in the fewest bytes.

    The plain bytes are compressed only if no patch has less than half of them, so that patches are made at the speed
    of memory where little changed.

    Args:
        base: the bytes of the same box of the base; None if no base may be used.

    Returns:
        the encoding, and the payload: `new` itself if nothing is shorter.
    """
    nbytes = _size(new)
    patches: list[tuple[Encoding, Bytes]] = []
    if base is not None:
        _check_base(new, base)
        changed = _changed(new, base, itemsize)
        if not changed.any():
            return Encoding.SAME, b""
        if nbytes <= MAX_BLOSC:
            patches.append((Encoding.XOR, xor_patch(new, base, itemsize)))
            if _has_elements(nbytes, itemsize) and not _is_scattered(changed, itemsize):
                patch = overwrite_patch(new, itemsize, changed)
                if patch is not None:
                    patches.append((Encoding.OVERWRITE, patch))
    return _shortest(new, itemsize, patches)


def encode_rows(new: Bytes, itemsize: int, changed: NDArray[np.bool_]) -> tuple[Encoding, Bytes]:
    """Encode a tile of which it is known which rows changed, as `encode_tile` does, without the bytes of the base.

    Args:
        changed: for each row, which all have the same number of elements.
    """
    if not changed.any():
        return Encoding.SAME, b""
    patch = overwrite_patch(new, itemsize, changed)
    return _shortest(new, itemsize, [] if patch is None else [(Encoding.OVERWRITE, patch)])


def _shortest(
    new: Bytes, itemsize: int, patches: list[tuple[Encoding, Bytes]]
) -> tuple[Encoding, Bytes]:
    """The shortest of some patches, the plain bytes, and these compressed."""
    nbytes = _size(new)
    shortest = min(((Encoding.RAW, new), *patches), key=_stored_bytes)
    if 0 < nbytes <= MAX_BLOSC and 2 * _stored_bytes(shortest) > nbytes:
        plain = (Encoding.BLOSC, compress(new, itemsize))
        shortest = (
            min(plain, shortest, key=_stored_bytes) if _stored_bytes(plain) < nbytes else shortest
        )
    return shortest


def decode_tile(
    encoding: int,
    payload: Bytes,
    out: memoryview,
    itemsize: int,
    *,
    base: Bytes | None = None,
    where: str = "the tile",
) -> None:
    """Decode a tile into `out`, which has exactly its bytes.

    Args:
        base: the bytes of the same box of the base, for a patch; None if `out` has them already.
        where: what is decoded, for messages.

    Raises:
        IntegrityError: the payload is not of such a tile. What `out` has then is not defined.
        UpgradeNeeded: the encoding is none that this version knows.
        UnsupportedError: numcodecs is not installed.
    """
    if base is not None and encoding in PATCHES:
        if _size(base) != out.nbytes:
            raise IntegrityError(
                f"{where} has {out.nbytes:,} bytes, and its base {_size(base):,}",
            )
        _octets(out)[:] = _octets(base)
    match encoding:
        case Encoding.RAW:
            if _size(payload) != out.nbytes:
                raise IntegrityError(
                    f"{where} has {_size(payload):,} bytes, and {out.nbytes:,} were expected"
                )
            _octets(out)[:] = _octets(payload)
        case Encoding.BLOSC:
            decompress(payload, out, itemsize, where)
        case Encoding.XOR:
            apply_xor(payload, out, itemsize, where)
        case Encoding.OVERWRITE:
            apply_overwrite(payload, out, itemsize, where)
        case Encoding.SAME:
            if _size(payload):
                raise IntegrityError(f"{where} is equal to its base, yet has bytes of its own")
        case Encoding.INT8_BLOCKWISE | Encoding.ADAPTIVE:
            raise UsageError(
                f"{where} is stored with loss ({Encoding(encoding).name.lower()})",
                hint="ucformat.format.lossy.dequantize decodes it",
            )
        case _:
            raise UpgradeNeeded(f"{where} has the encoding {encoding}, which is not known here")


#: The encodings that need the bytes of a base.
PATCHES = frozenset({Encoding.XOR, Encoding.OVERWRITE, Encoding.SAME})

#: The encodings with loss.
LOSSY = frozenset({Encoding.INT8_BLOCKWISE, Encoding.ADAPTIVE})


def _stored_bytes(candidate: tuple[Encoding, Bytes]) -> int:
    return _size(candidate[1])


def _size(data: Bytes) -> int:
    return memoryview(data).nbytes


def _check_base(new: Bytes, base: Bytes) -> None:
    if _size(new) != _size(base):
        raise UsageError(f"a tile of {_size(new):,} bytes has no base of {_size(base):,}")


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _octets(data: Bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _has_elements(nbytes: int, itemsize: int) -> bool:
    return itemsize in _ITEMSIZES and nbytes % itemsize == 0


def _elements(data: Bytes, itemsize: int) -> NDArray[Any]:
    """The elements, of a dtype that copies all bits."""
    if not _has_elements(_size(data), itemsize):
        raise UsageError(f"{_size(data):,} bytes are no elements of {itemsize}")
    return np.frombuffer(data, f"<u{itemsize}" if itemsize <= 8 else f"V{itemsize}")


def _changed(new: Bytes, base: Bytes, itemsize: int) -> NDArray[np.bool_]:
    """Which elements differ; which bytes, where there are no whole elements."""
    if not _has_elements(_size(new), itemsize):
        itemsize = 1
    words = max(1, itemsize // 8)
    dtype = f"<u{itemsize // words}"
    differ: NDArray[np.bool_] = np.frombuffer(new, dtype) != np.frombuffer(base, dtype)
    return differ if words == 1 else np.logical_or(differ[::2], differ[1::2])
