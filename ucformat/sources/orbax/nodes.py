"""How much a manifest or a node of OCDBT stands for, found out before TensorStore unpacks it.

Both are a mark, their length, a version, and a body that zstd may have compressed. The body of a node has its height,
the paths of data files, and the keys of its entries, where each says how much of it is like the one before. So a few
kilobytes may stand for gigabytes: of zeros that were compressed, or of long keys that differ in one byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import IntegrityError, Refused

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["check_manifest", "check_node"]

_FLOOR = 32 << 20  # bytes that any node may become
_RATIO = 400  # and for each of its bytes: real entries take ten of them, offsets that do not shrink
_MANIFEST = 32 << 10  # bytes of a manifest once inflated: it has a path of 50 bytes for each of 16 versions or so
_ENTRY = 1 << 10  # bytes that an entry takes in Python, besides its key and path
_MANY = 1 << 20  # entries of a node, by TensorStore's limit; no more files either
_LONG = 0xFFFF  # bytes of a key or path
_HEADER, _TRAILER = 12, 4  # bytes of the mark and the length; those of a checksum
_ZSTD = 1
_BLOCK = 128 << 10  # bytes that a block of zstd inflates to at most


def check_manifest(data: bytes, where: str) -> None:
    """IntegrityError where a manifest would be far larger, inflated, than any is; `where` names it in messages."""
    _body(data, _MANIFEST, where)


def check_node(data: bytes, stem: int, where: str) -> None:
    """IntegrityError where the entries of a node would take far more memory than its bytes can stand for.

    `stem` is how many bytes come before each of its keys, as the nodes above it say.
    """
    most = _FLOOR + _RATIO * len(data)
    body = _body(data, most, where)
    body.at += 1  # the height
    paths, own = body.names()
    body.lengths(len(paths))  # of the parts of them that are base paths
    body.at += own
    keys, _ = body.names()
    nbytes = int(keys.sum() + paths.sum()) + len(keys) * (int(paths.max(initial=0)) + stem + _ENTRY)
    if nbytes > most:
        raise IntegrityError(
            f"{where} has {len(data):,} bytes, and would take {nbytes:,} in memory: no save writes that"
        )


class _Body:
    """What is in a manifest or a node, read from its beginning on."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def count(self) -> int:
        """A number in groups of seven bits, the lowest first."""
        value = shift = 0
        while self.at < len(self.data) and value <= _MANY:
            byte = self.data[self.at]
            value |= (byte & 127) << shift
            self.at, shift = self.at + 1, shift + 7
            if byte < 128 and value <= _MANY:
                return value
        raise self.damaged()

    def lengths(self, count: int) -> NDArray[np.int64]:
        """So many lengths, written as numbers are."""
        if count <= 0:
            return np.zeros(0, np.int64)
        part = np.frombuffer(self.data, np.uint8)[self.at : self.at + 4 * count].astype(np.int64)
        ends = np.flatnonzero(part < 128)[:count]
        if len(ends) < count:
            raise self.damaged()
        starts = np.concatenate(([0], ends[:-1] + 1))
        widths = ends + 1 - starts
        shifts = 7 * (np.arange(ends[-1] + 1) - np.repeat(starts, widths))
        if widths.max() > 4 or (out := np.add.reduceat((part[: len(shifts)] & 127) << shifts, starts)).max() > _LONG:
            raise self.damaged()
        self.at += int(ends[-1]) + 1
        return out

    def names(self) -> tuple[NDArray[np.int64], int]:
        """The lengths of all keys, or paths; and how many bytes of them are stored."""
        count = self.count()
        shared, own = self.lengths(count - 1), self.lengths(count)
        lengths = own.copy()
        lengths[1:] += shared
        return lengths, int(own.sum())

    def damaged(self) -> IntegrityError:
        return IntegrityError(f"{self.where} is damaged: at byte {self.at:,} of its content is no number that may be")


def _body(data: bytes, most: int, where: str) -> _Body:
    """What is in it; IntegrityError where that is more than `most` bytes."""
    head = _Body(data, where)
    head.at = _HEADER
    _version, packed = head.count(), head.count()
    content = data[head.at : -_TRAILER]
    if packed == _ZSTD:
        _check_zstd(content, most + _BLOCK, where)  # the last block is told no better than that
        content = _inflate(content, where)
    if len(content) > most:
        raise _too_large(len(data), most, where)
    return _Body(content, where)


def _check_zstd(data: bytes, most: int, where: str) -> None:
    """IntegrityError where this is not one frame of zstd, or is one that may inflate to more than `most` bytes.

    Its header need not tell how many those are, but what each of its blocks may become is bounded.
    """
    if len(data) < 6 or data[:4] != b"\x28\xb5\x2f\xfd":
        raise IntegrityError(f"{where} is damaged: it does not hold a frame of zstd")
    told, whole, summed, named = data[4] >> 6, data[4] >> 5 & 1, data[4] >> 2 & 1, data[4] & 3
    begin = 5 + (not whole) + (0, 1, 2, 4)[named]
    at = begin + (whole, 2, 4, 8)[told]
    says = int.from_bytes(data[begin:at], "little")
    nbytes, last = 0, 0
    while not last and max(nbytes, says) <= most:
        block = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        nbytes += _BLOCK if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
        if kind == 3 or at > len(data):
            raise IntegrityError(f"{where} is damaged: its content is a broken frame of zstd")
    if max(nbytes, says) > most:
        raise _too_large(len(data), most, where)
    if at + 4 * summed != len(data):
        raise IntegrityError(f"{where} is damaged: its content is more than a frame of zstd")


def _too_large(nbytes: int, most: int, where: str) -> IntegrityError:
    return IntegrityError(
        f"{where} has {nbytes:,} bytes, and would be inflated to more than {most:,}: no save writes that"
    )


def _inflate(data: bytes, where: str) -> bytes:
    try:
        from numcodecs import zstd  # type: ignore[import-untyped]
    except ImportError:
        raise Refused(
            "this checkpoint is encoded, and decoding it needs the package numcodecs, which is not installed",
            hint="pip install 'ucformat[zarr]'",
        ) from None
    try:
        return bytes(zstd.decompress(data))
    except (RuntimeError, ValueError) as error:
        raise IntegrityError(f"{where} is damaged: {error}") from None
