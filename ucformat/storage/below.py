"""A folder of a store as a store of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ucformat.storage.base import check_key
from ucformat.storage.lending import lend
from ucformat.storage.wrapped import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.storage.base import Info, Store, Writer
    from ucformat.storage.lending import Lent

__all__ = ["Below"]


class Below(WrappedStore):
    """The files below a folder, under keys that begin there."""

    def __init__(self, inner: Store, folder: str) -> None:
        super().__init__(inner)
        self.folder = check_key(folder)

    @property
    def url(self) -> str:
        """The url of the folder."""
        return f"{self.inner.url}/{self.folder}"

    def _key(self, key: str) -> str:
        return f"{self.folder}/{check_key(key)}"

    def _here(self, info: Info) -> Info:
        return replace(info, key=info.key.removeprefix(f"{self.folder}/"))

    def info(self, key: str) -> Info:
        """See Store."""
        return self._here(self.inner.info(self._key(key)))

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        return self.inner.read(self._key(key), offset, nbytes)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See Store."""
        self.inner.read_into(self._key(key), offset, buffers)

    def lend(self, key: str, ranges: Sequence[tuple[int, int]]) -> Lent | None:
        """See Lends."""
        return lend(self.inner, self._key(key), ranges)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        self.inner.read_rows(self._key(key), offset, step, rows)

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        return self.inner.read_versioned(self._key(key))

    def create(self, key: str, unit: int = 1) -> Writer:
        """See Store."""
        return self.inner.create(self._key(key), unit)

    def adopt(self, key: str) -> None:
        """See Store."""
        self.inner.adopt(self._key(key))

    def put_if_absent(self, key: str, data: bytes) -> str:
        """See Store."""
        return self.inner.put_if_absent(self._key(key), data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """See Store."""
        return self.inner.replace(self._key(key), data, version)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        return map(self._here, self.inner.list(self._key(prefix) if prefix else self.folder))

    def delete(self, key: str) -> None:
        """See Store."""
        self.inner.delete(self._key(key))

    def delete_prefix(self, prefix: str) -> None:
        """See Store."""
        self.inner.delete_prefix(self._key(prefix) if prefix else prefix)

    def sweep(self) -> None:
        """Nothing: what killed writers left is the whole store's."""

    def prune(self, folder: str) -> None:
        """See Store."""
        self.inner.prune(self._key(folder) if folder else self.folder)
