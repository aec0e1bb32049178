"""A store that fails when told to, to see what its users leave behind."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ucformat.errors import UcformatError
from ucformat.storage.base import FileWriter
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.storage.base import Bytes, Checksums, Store


class FaultyStore(WrappedStore):
    """Fails the n-th write or read, counted from 1.

    Writes are `create`, `Writer.write`, `Writer.close`, `flush`, `put_if_absent`, `replace`,
    `delete` and `delete_prefix`. With `dead`, every later call fails as well, as if the process had
    been killed there. `writes` and `reads` count what was tried, so that a test can fail each step
    in turn until it is past the last.
    """

    def __init__(
        self,
        inner: Store,
        *,
        fail_write: int | None = None,
        fail_read: int | None = None,
        dead: bool = False,
        error: BaseException | None = None,
    ) -> None:
        super().__init__(inner)
        self.writes = self.reads = 0
        self.failed = False
        self._fail_write, self._fail_read, self._dead = fail_write, fail_read, dead
        self._error = error or UcformatError("cannot write: No space left on device")
        self._lock = threading.Lock()

    def count_write(self) -> None:
        with self._lock:
            self.writes += 1
            self._perhaps_fail(self.writes == self._fail_write)

    def count_read(self) -> None:
        with self._lock:
            self.reads += 1
            self._perhaps_fail(self.reads == self._fail_read)

    def _perhaps_fail(self, now: bool) -> None:
        if now or (self._dead and self.failed):
            self.failed = True
            raise self._error

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        self.count_read()
        return super().read(key, offset, nbytes)

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        self.count_read()
        super().read_into(key, offset, buffers, crcs)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        self.count_read()
        super().read_rows(key, offset, step, rows)

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        self.count_read()
        return super().read_versioned(key)

    def create(self, key: str, unit: int = 1) -> FileWriter:
        self.count_write()
        return _FaultyWriter(self, super().create(key, unit))

    def flush(self) -> None:
        self.count_write()
        super().flush()

    def put_if_absent(self, key: str, data: bytes) -> str:
        self.count_write()
        return super().put_if_absent(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        self.count_write()
        return super().replace(key, data, version)

    def delete(self, key: str) -> None:
        self.count_write()
        super().delete(key)

    def delete_prefix(self, prefix: str) -> None:
        self.count_write()
        super().delete_prefix(prefix)


class _FaultyWriter(FileWriter):
    def __init__(self, store: FaultyStore, inner: FileWriter) -> None:
        self._store, self._inner = store, inner

    def write(self, data: Bytes) -> None:
        self._store.count_write()
        self._inner.write(data)

    def close(self) -> None:
        try:
            self._store.count_write()
        except BaseException:
            self._inner.abort()
            raise
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()
