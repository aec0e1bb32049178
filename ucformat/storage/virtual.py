"""A store with files that no disk has: their bytes are made when they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ucformat.storage.wrapped import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.storage.base import Info

__all__ = ["VirtualStore"]


class VirtualStore(WrappedStore, ABC):
    """A store around another one, with virtual files besides those of the store inside.

    Their keys begin with `HIDDEN`, so that no file of a checkpoint can be called so.
    """

    @abstractmethod
    def _holds(self, key: str) -> bool:
        """Whether a key is that of a virtual file."""

    @abstractmethod
    def _info(self, key: str) -> Info:
        """Size and version of a virtual file."""

    @abstractmethod
    def _content(self, key: str, offset: int, nbytes: int) -> memoryview:
        """These bytes of a virtual file; MissingData where it has not so many."""

    def info(self, key: str) -> Info:
        """See Store."""
        return self._info(key) if self._holds(key) else self.inner.info(key)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        if not self._holds(key):
            return self.inner.read(key, offset, nbytes)
        return bytes(self._content(key, offset, self._info(key).size - offset if nbytes is None else nbytes))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See Store."""
        if not self._holds(key):
            self.inner.read_into(key, offset, buffers)
            return
        data = self._content(key, offset, sum(b.nbytes for b in buffers))
        for b in buffers:
            if b.nbytes:
                b.cast("B")[:] = data[: b.nbytes]
                data = data[b.nbytes :]

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        if not self._holds(key):
            self.inner.read_rows(key, offset, step, rows)
            return
        for number, row in enumerate(rows):
            self.read_into(key, offset + number * step, [row])
