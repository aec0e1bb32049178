"""Counting what is really read, for tests and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ucformat.storage.wrapped import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.storage.base import Store

__all__ = ["Read", "RecordingStore"]


class Read(NamedTuple):
    """One read that succeeded: the file, and the range in bytes."""

    key: str
    offset: int
    nbytes: int


class RecordingStore(WrappedStore):
    """Keeps in `reads` every read of the store inside, in the order in which they end."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reads: list[Read] = []  # appending is one step, so threads need no lock

    @property
    def nbytes(self) -> int:
        """The bytes of all reads, twice those read twice."""
        return sum(r.nbytes for r in self.reads)

    def clear(self) -> None:
        """Begin anew."""
        self.reads.clear()

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        data = self.inner.read(key, offset, nbytes)
        self.reads.append(Read(key, offset, len(data)))
        return data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See Store."""
        self.inner.read_into(key, offset, buffers)
        self.reads.append(Read(key, offset, sum(b.nbytes for b in buffers)))

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        self.inner.read_rows(key, offset, step, rows)
        self.reads.extend(Read(key, offset + k * step, row.nbytes) for k, row in enumerate(rows))

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        data, version = self.inner.read_versioned(key)
        self.reads.append(Read(key, 0, len(data)))
        return data, version
