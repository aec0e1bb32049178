"""Every store behaves with a cache as it does without one."""

from __future__ import annotations

import pickle
import uuid
from typing import TYPE_CHECKING

import fsspec
import pytest

from ucformat.storage.cache.folder import CacheFolder
from ucformat.storage.cache.store import CachingStore
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.local import LocalStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import WrappedStore
from ucformat.testing.stores import StoreTests, put

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3 import Bucket
    from ucformat.storage.base import Store


class TestObjectStore(StoreTests):
    @pytest.fixture
    def store(self, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setenv("UCP_CACHE", str(tmp_path / "cache"))
        store = open_store(bucket.place(f"{uuid.uuid4().hex}/a run"))
        assert isinstance(store, CachingStore)
        return store

    def test_pickles_with_its_cache(self, store: Store) -> None:
        put(store, "f", b"abc")
        again = pickle.loads(pickle.dumps(store))  # noqa: S301
        assert isinstance(again, CachingStore)
        assert again.read("f") == b"abc"


class TestObjectStoreWithoutRoom(TestObjectStore):
    """Nothing fits into the cache."""

    @pytest.fixture
    def store(self, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setenv("UCP_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("UCP_CACHE_BYTES", "1")
        return open_store(bucket.place(f"{uuid.uuid4().hex}/a run"))


class _Reader(WrappedStore):
    """Reads through fsspec and a cache what another store writes to the same folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        super().__init__(LocalStore(folder))
        self.reader = CachingStore(
            FsspecStore(str(folder), fsspec.filesystem("file")), CacheFolder(str(cache), 1 << 30)
        )
        for name in ("info", "read", "read_into", "read_rows", "read_versioned", "list", "adopt"):
            setattr(self, name, getattr(self.reader, name))


class TestFsspec(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(
            "ucformat.storage.cache.store._SETTLED", -1e9
        )  # so that files just written are cached
        return _Reader(tmp_path / "not" / "yet", tmp_path / "cache")
