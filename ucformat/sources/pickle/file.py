"""Files of `torch.save`, read by ranges: the pickle as a value with lazy tensors, and the bytes of each storage.

Such a file (PyTorch 1.6 and later) is an uncompressed zip archive with one top folder:
`<top>/data.pkl` is a pickle whose tensors name their storages by a persistent id,
`<top>/data/<key>` is the raw bytes of a storage, and `<top>/byteorder` is `little` (since PyTorch
2.1). Opening a file reads its last 64 KiB, the pickle and, for each storage that is used, the 30
bytes of that member's local header; never the tensors.

Such an archive may also be a range of a larger file, like each item of a PyTorch DCP checkpoint.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData, UnsafeError, UnsupportedError
from ucformat.geometry.box import Box, reach
from ucformat.geometry.flat_buffer import flat_extents
from ucformat.geometry.tensor import Extent
from ucformat.reading.readable import FileRecord
from ucformat.reading.stand_ins import OpaqueFile, why_refused
from ucformat.schema import ITEMSIZE
from ucformat.sources.pickle.unpickler import unpickle
from ucformat.storage.base import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucformat.reading.stand_ins import StoredTensor
    from ucformat.storage.base import Store

# bytes of data.pkl, and of the zip directory; real ones are kilobytes to a few megabytes
_MAX_PICKLE = 256 << 20
_TAIL = 64 << 10
_HEAD = 32 << 10  # read with the first bytes: the pickle is first in the file, and mostly smaller
_ITEM = 2 << 10  # instead of both, for an archive in a larger file, which contains only one value
_HEADER = 30  # bytes of a local header, without the name
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 0x1
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch's magic number, pickled: the format before PyTorch 1.6
_SAVE_HINT = (
    "save it again with torch.save of PyTorch 1.6 or later: torch.save(torch.load(old), new)"
)


@dataclass(frozen=True, slots=True)
class _Member:
    """A member of the archive, according to the directory at its end."""

    header_offset: int
    nbytes: int
    crc32: int


class _Ranges(io.RawIOBase):
    """A seekable file over ranged reads; it keeps the tail and the last other range that it read."""

    def __init__(self, store: Store, key: str, size: int, base: int, tail: int) -> None:
        self._store, self._key, self._size, self._base, self._at = store, key, size, base, 0
        start = max(0, size - tail)
        self._windows = [(start, store.read(key, base + start, size - start)), (0, b"")]

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def read(self, n: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = self.fetch(self._at, left if n < 0 else min(n, left))
        self._at += len(data)
        return data

    def cached(self, offset: int, n: int) -> bytes | None:
        """These bytes, if they were read before."""
        for start, data in self._windows:
            if start <= offset and offset + n <= start + len(data):
                return data[offset - start : offset - start + n]
        return None

    def fetch(self, offset: int, n: int, ahead: int = 0) -> bytes:
        """These bytes; if they must be read, `ahead` more are read with them."""
        if n > _MAX_PICKLE:
            raise UnsupportedError(
                f"{self._key} has a directory or pickle of {n:,} bytes, more than {_MAX_PICKLE:,}"
            )
        cached = self.cached(offset, n)
        if cached is not None:
            return cached
        data = self._store.read(self._key, self._base + offset, min(n + ahead, self._size - offset))
        self._windows[1] = (offset, data)
        return data[:n]


class TorchZip:
    """An archive written by `torch.save`: a file, or a range of one."""

    def __init__(self, store: Store, file: str | ByteRange, name: str = "") -> None:
        """Read the directory and the pickle."""
        self.store, self._name = store, name
        self.key, self._base, self.size = _range(store, file)
        self.label = f"{name} in {self.key}" if name else self.key
        tail, self._head = (_TAIL, _HEAD) if isinstance(file, str) else (_ITEM, _ITEM)
        self._ranges = _Ranges(
            store, self.key, self.size, self._base, self.size if self.size <= 2 * tail else tail
        )
        self._members = self._directory()
        tops = {
            name.removesuffix("/data.pkl") for name in self._members if name.endswith("/data.pkl")
        }
        tops = {top for top in tops if "/" not in top}
        if len(tops) != 1 or any(f"{top}/constants.pkl" in self._members for top in tops):
            raise UnsupportedError(
                f"{self.label} is a zip file but not one of torch.save (a TorchScript archive, "
                "perhaps)",
                hint="save the state dict with torch.save and read that",
            )
        self._top = tops.pop()
        self._offsets: dict[str, int] = {}
        order = f"{self._top}/byteorder"
        if order in self._members and self._content(order) != b"little":
            raise UnsupportedError(
                f"{self.label} was written on a big-endian machine; only little-endian files are "
                "read"
            )
        self.pickle = self._content(f"{self._top}/data.pkl")

    def nbytes(self, storage: str) -> int:
        """Bytes of a storage."""
        return self._storage(storage).nbytes

    def crc32(self, storage: str) -> int:
        """CRC-32 of a storage according to the directory; 0 if torch was configured not to compute it."""
        return self._storage(storage).crc32

    def records(self) -> Iterator[FileRecord]:
        """List every member with its checksum: None if torch was configured not to compute it and wrote 0.

        (`torch.serialization.set_crc32_options(False)`; for an empty member, 0 is the checksum.)
        """
        for name, member in self._members.items():
            crc = member.crc32 if member.crc32 or not member.nbytes else None
            whole = f"{name} of {self._name}" if self._name else name
            header = self._base + member.header_offset
            cached = self._ranges.cached(member.header_offset, _HEADER)
            head = (
                partial(self.store.read, self.key, header, _HEADER)
                if cached is None
                else partial(bytes, cached)
            )
            start = partial(
                _start,
                head,
                header,
                member.nbytes,
                self._base + self.size,
                f"{name} in {self.label}",
            )
            yield FileRecord(self.key, whole, member.nbytes, crc, start, header)

    def offset(self, storage: str) -> int:
        """The first byte of a storage in the file; the first call for each storage reads 30 bytes."""
        if storage not in self._offsets:
            self._offsets[storage] = self._base + self._locate(f"{self._top}/data/{storage}")
        return self._offsets[storage]

    def _storage(self, storage: str) -> _Member:
        member = self._members.get(f"{self._top}/data/{storage}")
        if member is None:
            raise MissingData(
                f"{self.label} lacks the storage {storage!r} that its pickle names",
                hint="the file is damaged; copy it again from where it was saved",
            )
        return member

    def _directory(self) -> dict[str, _Member]:
        """The members by name, each checked to be uncompressed and inside the file."""
        if self.size < 4 or not self._ranges.fetch(
            0, min(512, self.size), ahead=self._head
        ).startswith(b"PK\x03\x04"):
            raise self._not_a_zip()
        try:
            with zipfile.ZipFile(self._ranges) as archive:
                listed = archive.infolist()
        except (
            zipfile.BadZipFile,
            OSError,
            ValueError,
            struct.error,
            NotImplementedError,
            UnicodeError,
        ) as error:
            raise IntegrityError(
                f"{self.label} begins as a zip file but has no directory at its end ({error}): "
                "it is truncated or "
                "damaged",
                hint="copy it again from where it was saved",
            ) from error
        members: dict[str, _Member] = {}
        for info in listed:
            name = info.filename
            if info.flag_bits & _ENCRYPTED or info.compress_type != zipfile.ZIP_STORED:
                raise UnsupportedError(
                    f"{name} in {self.label} is compressed or encrypted, so it cannot be read in "
                    "place",
                    hint="the file was packed by something other than torch.save; " + _SAVE_HINT,
                )
            if info.file_size != info.compress_size or name in members:
                raise IntegrityError(f"{name} in {self.label} has two sizes, or is listed twice")
            if not 0 <= info.header_offset <= info.header_offset + info.file_size <= self.size:
                raise IntegrityError(
                    f"{name} in {self.label} would reach past the end of the file ({self.size:,} "
                    "bytes)",
                    hint="the file is truncated or damaged; copy it again from where it was saved",
                )
            members[name] = _Member(info.header_offset, info.file_size, info.CRC)
        self._check_apart(members)
        return members

    def _check_apart(self, members: dict[str, _Member]) -> None:
        """IntegrityError if members share bytes: then a small file would contain more than its size."""
        end, last = 0, ""
        for name, member in sorted(members.items(), key=lambda item: item[1].header_offset):
            if member.header_offset < end:
                raise IntegrityError(
                    f"{name} in {self.label} overlaps {last}",
                    hint="no torch.save writes such a file; copy it again",
                )
            end, last = member.header_offset + _HEADER + member.nbytes, name

    def _not_a_zip(self) -> IntegrityError | UnsupportedError:
        """The error for a file that is not a zip archive."""
        head = self._ranges.fetch(0, min(512, self.size))
        # The first versions of torch.save wrote tar archives, which have their magic at byte 257.
        if _LEGACY in head[:32] or head[257:262] == b"ustar":
            return UnsupportedError(
                f"{self.label} has torch's format from before version 1.6", hint=_SAVE_HINT
            )
        return IntegrityError(
            f"{self.label} is not a file of torch.save ({self.size:,} bytes that begin with "
            f"{head[:8]!r})",
            hint="copy it again from where it was saved",
        )

    def _locate(self, name: str) -> int:
        """The offset of a member's content in the archive: after its local header, which alone has its length."""
        member = self._members.get(name)
        if member is None:
            raise MissingData(f"{self.label} lacks its member {name}")
        header, label = member.header_offset, f"{name} in {self.label}"
        head = partial(self._ranges.fetch, header, min(_HEADER, self.size - header))
        return _start(head, header, member.nbytes, self.size, label)

    def _content(self, name: str) -> bytes:
        """Read a small member, and check its CRC-32."""
        member = self._members[name]
        if member.nbytes > _MAX_PICKLE:
            raise UnsupportedError(
                f"{name} in {self.label} has {member.nbytes:,} bytes, more than {_MAX_PICKLE:,}"
            )
        # Header and content in one request: the name and padding between them, whose length only the
        # header has, take less than 1 KiB.
        self._ranges.fetch(
            member.header_offset,
            min(30, self.size - member.header_offset),
            ahead=member.nbytes + 1024,
        )
        data = self._ranges.fetch(self._locate(name), member.nbytes)
        if member.crc32 and zlib.crc32(data) != member.crc32:
            raise IntegrityError(
                f"{name} in {self.label} does not match its CRC-32", hint="the file is damaged"
            )
        return data


def _start(read: Callable[[], bytes], header: int, nbytes: int, end: int, label: str) -> int:
    """The offset of the content of the member whose local header is at `header`, in a file that ends at `end`."""
    head = read()
    if len(head) < _HEADER or not head.startswith(b"PK\x03\x04"):
        raise IntegrityError(f"{label} has no header where the directory puts it")
    _, name_length, extra_length = _LOCAL_HEADER.unpack(head)
    start = header + _HEADER + name_length + extra_length
    if start + nbytes > end:
        raise IntegrityError(f"{label} would reach past the end of the file ({end:,} bytes)")
    return int(start)


def open_file(
    store: Store,
    file: str | ByteRange,
    name: str = "",
    *,
    allow: tuple[str, ...] = (),
    exact: bool = False,
) -> TorchFile | OpaqueFile:
    """Open a file of torch.save; an `OpaqueFile` if its pickle is not allowed or not supported.

    Args:
        exact: NumPy scalars, byte arrays and `torch.Size` keep their types.
    """
    try:
        return TorchFile(store, file, name, allow=allow, exact=exact)
    except (UnsafeError, UnsupportedError) as error:
        return OpaqueFile(store, _range(store, file), error)


def _range(store: Store, file: str | ByteRange) -> ByteRange:
    return ByteRange(file, 0, store.info(file).size) if isinstance(file, str) else file


class TorchFile:
    """A file of `torch.save`: `value` is the saved value, with a `StoredTensor` for each tensor."""

    def __init__(
        self,
        store: Store,
        file: str | ByteRange,
        name: str = "",
        *,
        allow: tuple[str, ...] = (),
        exact: bool = False,
    ) -> None:
        self._zip = TorchZip(store, file, name)
        self.store, self.key = store, self._zip.key
        self.value: Any = unpickle(
            self._zip.pickle,
            file=self._zip.label,
            storage_nbytes=self._zip.nbytes,
            allow=allow,
            exact=exact,
        )

    def records(self) -> Iterator[FileRecord]:
        """List every member of the file with its checksum (see `TorchZip.records`)."""
        return self._zip.records()

    def whole(self, tensor: StoredTensor, within: Box | None = None) -> Iterator[Extent]:  # noqa: ARG002 - for subclasses
        """The extent of a whole tensor; none if it has no elements."""
        if tensor.size:
            unit = self._itemsize(tensor)
            offset = self._zip.offset(tensor.storage) + tensor.offset * unit
            yield Extent(
                Box.whole(tensor.shape), self.key, offset, tuple(s * unit for s in tensor.strides)
            )

    def flat(
        self, buffer: StoredTensor, begin: int, shape: tuple[int, ...], start: int, stop: int
    ) -> Iterator[Extent]:
        """The extents of a flat range of a tensor that is stored in a flat buffer.

        Args:
            begin: the element of the buffer at which the range is stored.
            start: the first element of the range in the row-major flattened tensor.
        """
        if (
            len(buffer.shape) != 1
            or buffer.strides != (1,)
            or not 0 <= begin <= begin + stop - start <= buffer.size
        ):
            raise IntegrityError(
                f"elements {begin} to {begin + stop - start} of a flat buffer in {self.key} are "
                "wanted, but it has "
                "shape "
                f"{buffer.shape} and strides {buffer.strides}"
            )
        unit = self._itemsize(buffer)
        if start < stop:
            first = self._zip.offset(buffer.storage) + (buffer.offset + begin) * unit
            yield from flat_extents(shape, start, stop, unit, self.key, first)

    def read(self, tensor: StoredTensor) -> bytes:
        """Read a small tensor."""
        import numpy as np

        if not tensor.size:
            return b""
        unit = self._itemsize(tensor)
        span = 1 + reach(tensor.shape, tensor.strides)
        data = self.store.read(
            self.key, self._zip.offset(tensor.storage) + tensor.offset * unit, span * unit
        )
        raw = np.frombuffer(data, f"V{unit}")
        return np.lib.stride_tricks.as_strided(
            raw, tensor.shape, tuple(s * unit for s in tensor.strides), writeable=False
        ).tobytes()

    def read_head(self, tensor: StoredTensor, most: int) -> bytes:
        """Read the first elements of a tensor, as they are stored, at most so many."""
        n = min(most, tensor.size, tensor.numel - tensor.offset)
        return self.read(replace(tensor, shape=(n,), strides=(1,)))

    def crc32(self, tensor: StoredTensor) -> int:
        """CRC-32 of the storage of a tensor according to the file; 0 if it has none."""
        return self._zip.crc32(tensor.storage) if tensor.storage else 0

    def _itemsize(self, tensor: StoredTensor) -> int:
        """Bytes of an element; UnsupportedError if the tensor cannot be read."""
        if not tensor.readable:
            raise UnsupportedError(
                f"{self.key}: a tensor of shape {tensor.shape} {why_refused(tensor.dtype)}"
            )
        return ITEMSIZE[tensor.dtype]
