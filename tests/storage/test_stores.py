from __future__ import annotations

import pickle
import uuid
from typing import TYPE_CHECKING

import fsspec
import pytest

from ucformat.errors import NotFound, UcformatError, UnsupportedError
from ucformat.storage.base import ByteRange
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import RecordingStore, WrappedStore
from ucformat.testing.stores import StoreTests, keys, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.s3 import Bucket
    from ucformat.storage.base import Store


class TestLocalStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "not" / "yet")


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        name = uuid.uuid4().hex
        yield MemoryStore(f"{name}/run")
        MemoryStore("x").delete_prefix("y")
        everything = MemoryStore(name)
        everything.delete_prefix("run")
        assert keys(everything) == []

    def test_one_name_is_one_place(self, store: Store) -> None:
        put(store, "a/b", b"abc")
        assert MemoryStore(store.url.removeprefix("memory://")).read("a/b") == b"abc"
        assert MemoryStore(store.url.removeprefix("memory://") + "/a").read("b") == b"abc"
        assert keys(MemoryStore("another")) == []

    def test_does_not_leave_its_process(self, store: Store) -> None:
        with pytest.raises(UnsupportedError, match="one process"):
            pickle.dumps(store)


class _Reader(WrappedStore):
    """Reads through fsspec what another store writes to the same folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalStore(folder))
        self.reader = FsspecStore(str(folder), fsspec.filesystem("file"))
        for name in ("info", "read", "read_into", "read_rows", "read_versioned", "list", "adopt"):
            setattr(self, name, getattr(self.reader, name))


class TestFsspec(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return _Reader(tmp_path / "not" / "yet")

    def test_pickles(self, tmp_path: Path) -> None:
        store = _Reader(tmp_path)
        put(store, "f", b"abc")
        assert pickle.loads(pickle.dumps(store.reader)).read("f") == b"abc"  # noqa: S301

    def test_writes_nothing_and_says_so(self, tmp_path: Path) -> None:
        store = FsspecStore(str(tmp_path), fsspec.filesystem("file"))
        acts: list[Callable[[], object]] = [
            lambda: store.create("f"),
            lambda: store.put_if_absent("f", b""),
            lambda: store.replace("f", b"", ""),
            lambda: store.delete("f"),
            lambda: store.delete_prefix("f"),
        ]
        for act in acts:
            with pytest.raises(UnsupportedError, match="can be read, but not written to"):
                act()
        assert list(tmp_path.iterdir()) == []

    def test_an_error_of_the_library_becomes_ours(self) -> None:
        class Odd(fsspec.AbstractFileSystem):
            def cat_file(self, *_: object, **__: object) -> bytes:
                raise ArithmeticError("no line")

        with pytest.raises(
            UcformatError, match=r"cannot read odd://host/run/f: ArithmeticError: no line"
        ):
            FsspecStore("odd://host/run", Odd()).read("f")


class TestObjectStore(StoreTests):
    """Over HTTP, at a real endpoint."""

    @pytest.fixture
    def store(self, bucket: Bucket) -> Store:
        return open_store(bucket.place(f"{uuid.uuid4().hex}/a run"))


class TestRecordingStore(StoreTests):
    """A wrapped store behaves as the one inside."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return RecordingStore(LocalStore(tmp_path))

    def test_records_what_was_read(self, tmp_path: Path) -> None:
        store = RecordingStore(LocalStore(tmp_path))
        put(store, "f", b"0123456789")
        store.read("f", 2)
        store.read_versioned("f")
        store.read_into("f", 1, [memoryview(bytearray(2)), memoryview(bytearray(3))])
        with pytest.raises(NotFound):
            store.read("g")
        assert store.reads == [ByteRange("f", 2, 8), ByteRange("f", 0, 10), ByteRange("f", 1, 5)]
        assert store.nbytes == 23
        store.clear()
        assert store.nbytes == 0
