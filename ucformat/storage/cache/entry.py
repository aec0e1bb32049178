"""Entries of the host cache: files that are read as what they say they are, or not at all.

An entry is named by the hash of its description. Its file holds the content, the CRC-32C of each 64 KiB of it, the
description, and a CRC-32C of these two. The checksums continue from that of the description, so a torn, damaged or
exchanged file, or one under another name, counts as missing. Therefore nothing has to be synced.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import TYPE_CHECKING

from ucformat.storage.strided import checksum, read_scattered, write_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.storage.base import Bytes

_PAGE = 64 << 10  # bytes of the content that one checksum covers


class Entry:
    """An entry, whether or not there is a file of it."""

    __slots__ = ("_seed", "description", "digest")

    def __init__(self, description: bytes) -> None:
        self.description = description
        self.digest = hashlib.blake2b(description, digest_size=20).digest()
        self._seed = checksum(description)

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.digest.hex()

    def file_size(self, size: int) -> int:
        """Bytes of the file."""
        return size + 4 * -(-size // _PAGE) + len(self.description) + 4

    def content_size(self, file_size: int) -> int:
        """Bytes of the content; negative if no file of the entry has this size."""
        rest = file_size - len(self.description) - 4
        return rest - 4 * -(-rest // (_PAGE + 4))

    def write(self, fd: int, data: Bytes) -> None:
        """Write the file."""
        view = memoryview(data)
        crcs = [checksum(view[at : at + _PAGE], self._seed) for at in range(0, view.nbytes, _PAGE)]
        footer = struct.pack(f"<{len(crcs)}I", *crcs) + self.description
        write_all(fd, view)
        write_all(fd, footer + checksum(footer).to_bytes(4, "little"))

    def read_into(self, fd: int, size: int, begin: int, buffers: Sequence[memoryview]) -> bool:
        """Read a range of the content, and what else the checksums of the range cover.

        Returns:
            whether the file is the entry's, and the checksums match.
        """
        pages = -(-size // _PAGE)
        footer = os.pread(fd, self.file_size(size) - size + 1, size)
        stored, described = footer[:-4], footer[4 * pages : -4]
        if described != self.description or checksum(stored) != int.from_bytes(footer[-4:], "little"):
            return False
        end = begin + sum(b.nbytes for b in buffers)
        first, last = begin - begin % _PAGE, min(size, end + -end % _PAGE)
        parts = [memoryview(bytearray(begin - first)), *buffers, memoryview(bytearray(last - end))]
        parts = [part for part in parts if part.nbytes]
        if read_scattered(fd, first, parts) != last - first:
            return False
        found: list[int] = []
        room = 0  # bytes that the last page still lacks
        for part in parts:
            while part.nbytes:
                if not room:
                    found.append(self._seed)
                    room = _PAGE
                found[-1] = checksum(part[:room], found[-1])
                part, room = part[room:], max(0, room - part.nbytes)  # noqa: PLW2901
        return tuple(found) == struct.unpack_from(f"<{len(found)}I", stored, first // _PAGE * 4)
