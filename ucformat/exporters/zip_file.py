"""Uncompressed zip archives as parts of a file, which is written from beginning to end.

The CRC-32 of a member that contains elements of tensors follows it, in a data descriptor, and is
repeated in the directory at the end (PKWARE's APPNOTE 4.3.9, 4.4.4). The contents of members begin
at multiples of 64 bytes, so that they can be mapped to memory. Sizes and numbers of members are not
limited (zip64, APPNOTE 4.5.3).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from ucformat.errors import UnsupportedError
from ucformat.exporters.base import Sealed, TargetFile
from ucformat.exporters.pickle import Storage, dump
from ucformat.storage.strided import CRC32_SHIFT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.exporters.base import Part, Span


# Files as `torch.save` writes them: an uncompressed zip archive of a pickle and the storages of its
# tensors.


def torch_file(key: str, value: Any, *, last: bool = False) -> TargetFile:
    """A file of `torch.save`."""
    return TargetFile.of(key, *torch_archive(value, _top(key)), last=last)


def lazy_torch_file(
    key: str, make: Callable[[bool], Any], *, like: TargetFile | None = None, last: bool = False
) -> TargetFile:
    """A file of `torch.save` whose value is made when it is written, so that a plan need not hold those of all ranks.

    Args:
        make: returns the value; called with False when the file is planned, for which spans need no
            pieces.
        like: a planned file of the same size, so that the value is not made for the plan.
    """
    nbytes = torch_file(key, make(False)).nbytes if like is None else like.nbytes
    return TargetFile(
        key, nbytes, lambda: torch_archive(make(True), _top(key)), last, checksums=True
    )


def _top(key: str) -> str:
    """The folder in the archive, which PyTorch names after the file."""
    return key.rpartition("/")[2].partition(".")[0] or "archive"


def torch_archive(value: Any, top: str = "archive", spans: int = 0) -> tuple[Part, ...]:
    """The parts of an archive, which may be part of a larger file."""
    keys: dict[Storage, str] = {}
    pickled = dump(value, lambda storage: keys.setdefault(storage, str(len(keys))))
    archive = ZipArchive(spans)
    archive.add(f"{top}/data.pkl", pickled)
    archive.add(f"{top}/byteorder", b"little")
    for storage, key in keys.items():
        archive.add(f"{top}/data/{key}", storage.span if storage.data is None else storage.data)
    archive.add(f"{top}/version", b"3\n")
    return archive.end()


_ALIGN = 64
_MAX32, _MAX16 = 0xFFFFFFFF, 0xFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_PADDING_ID = 0x4246  # of the extra field that PyTorch pads with
_UTF8, _DESCRIPTOR = 0x0800, 0x0008  # flags
_EPOCH = 0x21  # 1980-01-01, the earliest date


@dataclass(frozen=True, slots=True)
class _Sum:
    """The CRC-32 of a part of a member, or the number of the span that has it."""

    nbytes: int
    crc: int | None
    span: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """A member: its place, and the checksums of its parts."""

    name: bytes
    offset: int
    nbytes: int
    sums: tuple[_Sum, ...]

    @property
    def known(self) -> bool:
        """Whether its CRC-32 does not depend on spans."""
        return all(s.crc is not None for s in self.sums)

    def crc(self, crcs: Sequence[int]) -> int:
        value = 0
        for part in self.sums:
            # The CRC-32 of a concatenation: that of the beginning, shifted by the bytes of the
            # end, xor that of the end.
            value = CRC32_SHIFT(value, part.nbytes) ^ (
                crcs[part.span] if part.crc is None else part.crc
            )
        return value

    def directory_nbytes(self) -> int:
        return _CENTRAL.size + len(self.name) + len(_large(self.nbytes, self.offset))

    def directory_entry(self, crcs: Sequence[int]) -> bytes:
        extra = _large(self.nbytes, self.offset)
        flags = _UTF8 if self.known else _UTF8 | _DESCRIPTOR
        size = min(self.nbytes, _MAX32)
        # The version of the format that a reader needs: 4.5 introduced zip64.
        version = 45 if extra else 20
        names = len(self.name), len(extra)
        head = _CENTRAL.pack(
            *(b"PK\1\2", version, version, flags, 0, 0, _EPOCH, self.crc(crcs), size, size, *names),
            *(0, 0, 0, 0, min(self.offset, _MAX32)),
        )
        return head + self.name + extra


def _large(nbytes: int, offset: int) -> bytes:
    """The extra field of a directory entry whose size or offset exceeds 32 bits."""
    values = [nbytes, nbytes] if nbytes >= _MAX32 else []
    values += [offset] if offset >= _MAX32 else []
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


class ZipArchive:
    """The parts of an archive so far; it may be part of a larger file."""

    def __init__(self, spans: int = 0) -> None:
        self._spans = spans
        self._parts: list[Part] = []
        self._entries: list[_Entry] = []
        self._at = 0

    def add(self, name: str, *content: bytes | Span) -> None:
        """Add a member."""
        full = name.encode()
        if len(full) > _MAX16:
            raise UnsupportedError(
                f"{name[:80]}… has a name of {len(full):,} bytes, and zip archives have names of "
                f"at most {_MAX16:,}",
                hint="rename it by a view",
            )
        entry = self._entry(full, content)
        large = entry.nbytes >= _MAX32
        fixed = (
            struct.pack("<2H2Q", 1, 16, *((entry.nbytes,) * 2 if entry.known else (0, 0)))
            if large
            else b""
        )
        # 4: the id and the length of the extra field that is the padding.
        pad = -(self._at + _LOCAL.size + len(full) + len(fixed) + 4) % _ALIGN
        extra = fixed + struct.pack("<2H", _PADDING_ID, pad) + b"Z" * pad
        flags = _UTF8 if entry.known else _UTF8 | _DESCRIPTOR
        size = _MAX32 if large else entry.nbytes if entry.known else 0
        stored = (entry.crc(()) if entry.known else 0, size, size)
        head = _LOCAL.pack(
            b"PK\3\4", 45 if large else 20, flags, 0, 0, _EPOCH, *stored, len(full), len(extra)
        )
        self._put(head + full + extra)
        self._entries.append(entry)
        for part in content:
            self._put(part)
        if entry.known:
            return
        form = "<4sI2Q" if large else "<4s3I"

        def describe(crcs: Sequence[int]) -> bytes:
            return struct.pack(form, b"PK\7\10", entry.crc(crcs), entry.nbytes, entry.nbytes)

        self._put(Sealed(struct.calcsize(form), describe))

    def _entry(self, name: bytes, content: Sequence[bytes | Span]) -> _Entry:
        sums = []
        for part in content:
            if isinstance(part, bytes):
                sums.append(_Sum(len(part), crc32(part)))
            else:
                sums.append(_Sum(part.nbytes, None, self._spans))
                self._spans += 1
        return _Entry(name, self._at, sum(s.nbytes for s in sums), tuple(sums))

    def _put(self, part: Part) -> None:
        self._parts.append(part)
        self._at += len(part) if isinstance(part, bytes) else part.nbytes

    def end(self) -> tuple[Part, ...]:
        """Add the directory."""
        begin, entries = self._at, tuple(self._entries)
        nbytes = sum(e.directory_nbytes() for e in entries)
        count = len(entries)
        end = b""
        if begin + nbytes >= _MAX32 or count >= _MAX16:
            record = struct.pack(
                "<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, begin
            )
            end = record + struct.pack("<4sIQI", b"PK\6\7", 0, begin + nbytes, 1)
        # A field that is too narrow has its maximum, which refers the reader to the zip64 record.
        short_count = min(count, _MAX16)
        end += struct.pack(
            "<4s4H2IH",
            b"PK\5\6",
            0,
            0,
            short_count,
            short_count,
            min(nbytes, _MAX32),
            min(begin, _MAX32),
            0,
        )
        self._put(Sealed(nbytes, lambda crcs: b"".join(e.directory_entry(crcs) for e in entries)))
        self._put(end)
        return tuple(self._parts)
