"""A store around another one, to be made into one that counts, fails or watches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.storage.base import Costs, Info, Store, Writer

__all__ = ["WrappedStore"]


class WrappedStore:
    """Hands every call to the store inside."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """The url of the store inside."""
        return self.inner.url

    @property
    def costs(self) -> Costs:
        """Those of the store inside."""
        return self.inner.costs

    def info(self, key: str) -> Info:
        """See Store."""
        return self.inner.info(key)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        return self.inner.read(key, offset, nbytes)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See Store."""
        self.inner.read_into(key, offset, buffers)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        self.inner.read_rows(key, offset, step, rows)

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        return self.inner.read_versioned(key)

    def create(self, key: str, unit: int = 1) -> Writer:
        """See Store."""
        return self.inner.create(key, unit)

    def flush(self) -> None:
        """See Store."""
        self.inner.flush()

    def adopt(self, key: str) -> None:
        """See Store."""
        self.inner.adopt(key)

    def put_if_absent(self, key: str, data: bytes) -> str:
        """See Store."""
        return self.inner.put_if_absent(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """See Store."""
        return self.inner.replace(key, data, version)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        """See Store."""
        self.inner.delete(key)

    def delete_prefix(self, prefix: str) -> None:
        """See Store."""
        self.inner.delete_prefix(prefix)

    def sweep(self) -> None:
        """See Store."""
        self.inner.sweep()

    def prune(self, folder: str) -> None:
        """See Store."""
        self.inner.prune(folder)
