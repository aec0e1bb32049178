from __future__ import annotations

import itertools
import pickle
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import fsspec
import pytest

from tests.storage.behaviour import StoreBehaviour, keys, put
from ucformat.errors import NotFound, Refused, UcformatError
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.recording import Read, RecordingStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucformat.storage.base import Store


class TestLocalStore(StoreBehaviour):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "not" / "yet")


class TestMemoryStore(StoreBehaviour):
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
        with pytest.raises(Refused, match="one process"):
            pickle.dumps(store)


class TestFsspecMemory(StoreBehaviour):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        filesystem = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
        yield FsspecStore(f"memory://{uuid.uuid4().hex}", filesystem)
        assert not [name for name in filesystem.store if name.endswith(".tmp")]


class TestFsspecLocal(StoreBehaviour):
    can_put_if_absent = False
    can_replace = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FsspecStore(str(tmp_path / "not" / "yet"), fsspec.filesystem("file"))

    def test_pickles(self, store: Store) -> None:
        put(store, "f", b"abc")
        assert pickle.loads(pickle.dumps(store)).read("f") == b"abc"  # noqa: S301

    def test_never_deletes_by_a_pattern(self, store: Store) -> None:
        put(store, "ab/f")
        with pytest.raises(Refused, match="pattern"):
            store.delete_prefix("a*")
        assert keys(store) == ["ab/f"]


class TestRecordingStore(StoreBehaviour):
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
        assert store.reads == [Read("f", 2, 8), Read("f", 0, 10), Read("f", 1, 5)]
        assert store.nbytes == 23
        store.clear()
        assert store.nbytes == 0


class OddError(Exception):
    """An error of a library behind fsspec."""


class ObjectStore(fsspec.AbstractFileSystem):
    """As s3fs behaves: files appear whole at close, unless discarded; a range past the end is an error."""

    protocol = "s3"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.times: dict[str, datetime] = {}
        self.discarded = 0
        self.fail = False

    def _open(self, path: str, mode: str = "rb", **_: object) -> _Upload:
        return _Upload(self, path, mode, block_size=1000)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        assert mode == "create"
        if self.files.setdefault(path, value) is not value:
            raise FileExistsError(path)
        self.times[path] = datetime.now(UTC)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        if self.fail:
            raise OddError("credentials")
        if path not in self.files:
            raise FileNotFoundError(path)
        if end is not None and end > len(self.files[path]):
            raise OSError(22, "The requested range is not satisfiable")
        return self.files[path][start:end]

    def info(self, path: str, **_: object) -> dict[str, object]:
        if path in self.files:
            found = {"name": path, "size": len(self.files[path]), "type": "file"}
            return {**found, "ETag": str(id(self.files[path])), "LastModified": self.times[path]}
        if any(p.startswith(path + "/") for p in self.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def find(self, path: str, **_: object) -> dict[str, dict[str, object]]:
        return {p: self.info(p) for p in tuple(self.files) if f"{p}/".startswith(path + "/")}

    def rm(self, path: str, recursive: bool = False, **_: object) -> None:
        for p in self.find(path):
            self.files.pop(p, None)

    def rm_file(self, path: str) -> None:
        self.files.pop(path, None)


class _Upload(fsspec.spec.AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> None:
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.files[self.path] = b"".join(self.parts)
            self.fs.times[self.path] = datetime.now(UTC)

    def discard(self) -> None:
        self.fs.discarded += 1


class TestObjectStore(StoreBehaviour):
    can_replace = False

    @pytest.fixture
    def store(self) -> Store:
        return FsspecStore("s3://bucket/run", ObjectStore())

    def test_aborting_discards_the_upload(self) -> None:
        objects = ObjectStore()
        store = FsspecStore("s3://bucket/run", objects)
        for _, size in itertools.product(range(2), (10, 10_000)):
            out = store.create("f")
            out.write(bytes(size))
            out.abort()
        assert (objects.files, objects.discarded) == ({}, 4)

    def test_an_error_of_the_library_becomes_ours(self) -> None:
        objects = ObjectStore()
        objects.fail = True
        with pytest.raises(UcformatError, match=r"cannot read s3://bucket/run/f: OddError: credentials"):
            FsspecStore("s3://bucket/run", objects).read("f")
