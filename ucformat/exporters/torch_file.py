"""Files as `torch.save` writes them: an uncompressed zip archive of a pickle and the storages of its tensors.

The archive is written from beginning to end: the CRC-32 of a storage follows it, in a data descriptor, and is repeated
in the directory at the end (PKWARE's APPNOTE 4.3.9, 4.4.4). Storages begin at multiples of 64 bytes, as PyTorch aligns
them so that they can be mapped to memory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from ucformat.exporters.base import Sealed, TargetFile
from ucformat.exporters.pickle import Storage, dump

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.exporters.base import Part

__all__ = ["torch_archive", "torch_file"]

_ALIGN = 64
_MAX32, _MAX16 = 0xFFFFFFFF, 0xFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_PADDING_ID = 0x4246  # of the extra field that PyTorch pads with
_UTF8, _DESCRIPTOR = 0x0800, 0x0008  # flags
_EPOCH = 0x21  # 1980-01-01, the earliest date


@dataclass(frozen=True, slots=True)
class _Entry:
    """A member: its place, and its CRC-32, or the number of the span that has it."""

    name: bytes
    at: int
    nbytes: int
    crc: int | None
    span: int = 0

    def directory_nbytes(self) -> int:
        return _CENTRAL.size + len(self.name) + len(_large(self.nbytes, self.at))

    def directory_entry(self, crcs: Sequence[int]) -> bytes:
        extra = _large(self.nbytes, self.at)
        flags = _UTF8 | (_DESCRIPTOR if self.crc is None else 0)
        crc = crcs[self.span] if self.crc is None else self.crc
        size = min(self.nbytes, _MAX32)
        version = 45 if extra else 20
        head = (b"PK\1\2", version, version, flags, 0, 0, _EPOCH, crc, size, size, len(self.name), len(extra))
        return _CENTRAL.pack(*head, 0, 0, 0, 0, min(self.at, _MAX32)) + self.name + extra


def _large(nbytes: int, at: int) -> bytes:
    """The extra field of a directory entry whose size or offset exceeds 32 bits (APPNOTE 4.5.3)."""
    values = [nbytes, nbytes] if nbytes >= _MAX32 else []
    values += [at] if at >= _MAX32 else []
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def torch_file(key: str, value: Any, *, last: bool = False) -> TargetFile:
    """A file of `torch.save`.

    Args:
        key: its path in the target.
        value: the value, with `SavedTensor` for tensors (see `pickle.dump`).
        last: as in `TargetFile`.

    Raises:
        UnsupportedError: the value contains something that is not written to a pickle.
    """
    return TargetFile.of(key, *torch_archive(value, key.rpartition("/")[2].partition(".")[0] or "archive"), last=last)


def torch_archive(value: Any, top: str = "archive", spans: int = 0) -> tuple[Part, ...]:
    """The parts of an archive, which may be part of a larger file.

    Args:
        value: as for `torch_file`.
        top: the name of the folder in the archive.
        spans: how many spans the file has before the archive.

    Raises:
        UnsupportedError: as for `torch_file`.
    """
    keys: dict[Storage, str] = {}
    pickled = dump(value, lambda storage: keys.setdefault(storage, str(len(keys))))
    archive = _Archive(top, spans)
    archive.add("data.pkl", pickled)
    archive.add("byteorder", b"little")
    for storage, key in keys.items():
        archive.add(f"data/{key}", storage)
    archive.add("version", b"3\n")
    return archive.end()


class _Archive:
    """The parts of an archive so far."""

    def __init__(self, top: str, spans: int) -> None:
        self._top, self._spans = top, spans
        self._parts: list[Part] = []
        self._entries: list[_Entry] = []
        self._at = 0

    def add(self, name: str, content: bytes | Storage) -> None:
        """Add a member."""
        full = f"{self._top}/{name}".encode()
        size = len(content) if isinstance(content, bytes) else content.span.nbytes
        large = size >= _MAX32
        known = isinstance(content, bytes)
        crc = crc32(content) if isinstance(content, bytes) else None
        entry = _Entry(full, self._at, size, crc, self._spans)
        fixed = struct.pack("<2H2Q", 1, 16, 0, 0) if large else b""
        pad = -(self._at + _LOCAL.size + len(full) + len(fixed) + 4) % _ALIGN
        extra = fixed + struct.pack("<2H", _PADDING_ID, pad) + b"Z" * pad
        flags = _UTF8 if known else _UTF8 | _DESCRIPTOR
        stored = (crc or 0, size, size) if known else (0, 0, 0) if not large else (0, _MAX32, _MAX32)
        head = _LOCAL.pack(b"PK\3\4", 45 if large else 20, flags, 0, 0, _EPOCH, *stored, len(full), len(extra))
        self._put(head + full + extra)
        self._entries.append(entry)
        if isinstance(content, bytes):
            self._put(content)
            return
        self._put(content.span)
        self._spans += 1
        form = "<4sI2Q" if large else "<4s3I"

        def describe(crcs: Sequence[int]) -> bytes:
            return struct.pack(form, b"PK\7\10", crcs[entry.span], size, size)

        self._put(Sealed(struct.calcsize(form), describe))

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
            record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, begin)
            end = record + struct.pack("<4sIQI", b"PK\6\7", 0, begin + nbytes, 1)
        few = min(count, _MAX16)
        end += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, few, few, min(nbytes, _MAX32), min(begin, _MAX32), 0)
        self._put(Sealed(nbytes, lambda crcs: b"".join(e.directory_entry(crcs) for e in entries)))
        self._put(end)
        return tuple(self._parts)
