"""The host cache: what it serves is current and exact, whatever happens to its folder and to the objects."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import FakeSource
from tests.s3 import set_environment
from tests.s3_files import Served, serving_files
from ucformat.checkpoint import Checkpoint
from ucformat.errors import Conflict, MissingData, NotFound, PermissionDenied, UnsafeError
from ucformat.storage.cache import scope
from ucformat.storage.cache import store as blocks
from ucformat.storage.cache.folder import CacheEntry, CacheFolder
from ucformat.storage.cache.store import CachingStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucformat.storage.base import Store

BLOCK = 1 << 12  # of these tests


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def endpoint(served_folder: Path) -> Iterator[Served]:
    with serving_files(served_folder) as served:
        yield served


@pytest.fixture
def files(served_folder: Path) -> Path:
    """An empty folder that is served."""
    shutil.rmtree(served_folder / "run", ignore_errors=True)
    (served_folder / "run").mkdir()
    return served_folder / "run"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def served(endpoint: Served, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    set_environment(monkeypatch)
    monkeypatch.setenv("UCP_ENDPOINT", endpoint.endpoint)
    monkeypatch.setenv("UCP_CACHE", str(cache))
    monkeypatch.setattr(blocks, "_BLOCK", BLOCK)
    endpoint.counts()
    return endpoint


@pytest.fixture
def store(served: Served, files: Path) -> Store:
    assert files.is_dir()
    return open_store(served.url("run"))


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.name != "state")


class TestVersions:
    def test_a_second_store_requests_no_bytes(
        self, store: Store, served: Served, files: Path
    ) -> None:
        data = random.Random(1).randbytes(5 * BLOCK + 17)
        files.joinpath("f").write_bytes(data)
        assert store.read("f") == data
        served.counts()
        again = open_store(store.url)
        for begin, nbytes in [
            (0, None),
            (0, 1),
            (BLOCK - 1, 2),
            (3, 4 * BLOCK),
            (5 * BLOCK, 17),
            (5 * BLOCK + 16, 1),
        ]:
            end = len(data) if nbytes is None else begin + nbytes
            assert again.read("f", begin, nbytes) == data[begin:end]
        assert served.counts().reads == 0

    def test_a_cold_read_takes_one_request(self, store: Store, served: Served, files: Path) -> None:
        files.joinpath("f").write_bytes(bytes(3 * BLOCK))
        store.read("f")
        assert served.counts().requests == 1

    @pytest.mark.parametrize("size", [2 * BLOCK, 2 * BLOCK + 1, 10, 0])
    def test_a_rewritten_file_is_read_anew(self, store: Store, files: Path, size: int) -> None:
        other = open_store(store.url)
        files.joinpath("f").write_bytes(b"a" * 2 * BLOCK)
        assert (store.read("f"), other.read("f")) == (b"a" * 2 * BLOCK,) * 2
        _replace(files / "f", b"b" * size)
        assert (store.read("f"), other.read("f"), open_store(store.url).read("f")) == (
            b"b" * size,
        ) * 3
        _replace(files / "f", b"c" * 2 * BLOCK)
        buffer = bytearray(BLOCK)
        store.read_into("f", 7, [memoryview(buffer)])
        rows = [bytearray(5), bytearray(5)]
        other.read_rows("f", 0, BLOCK, [memoryview(r) for r in rows])
        assert buffer == b"c" * BLOCK
        assert rows == [b"ccccc"] * 2

    def test_a_deleted_file_is_gone(self, store: Store, files: Path) -> None:
        files.joinpath("f").write_bytes(b"abc")
        assert store.read("f") == b"abc"
        files.joinpath("f").unlink()
        for read in (store.read, store.info, lambda key: store.read(key, 0, 1)):
            with pytest.raises(NotFound, match="run/f does not exist"):
                read("f")
        files.joinpath("f").write_bytes(b"defg")
        assert store.read("f") == b"defg"

    def test_a_file_that_grew_is_long_enough(self, store: Store, files: Path) -> None:
        files.joinpath("f").write_bytes(b"abc")
        assert store.read("f", 1, 2) == b"bc"
        with pytest.raises(MissingData, match="f: bytes 2 to 5 are needed, but the file has 3"):
            store.read("f", 2, 3)
        _replace(files / "f", b"defgh")
        assert store.read("f", 2, 3) == b"fgh"

    def test_files_of_one_name_at_two_endpoints_are_two_files(
        self, store: Store, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "other" / "run").mkdir(parents=True)
        for place, data in ((files, b"one"), (tmp_path / "other" / "run", b"two")):
            place.joinpath("f").write_bytes(data)
            os.utime(place / "f", (1, 1))  # so that their versions are equal
        assert store.read("f") == b"one"
        with serving_files(tmp_path / "other") as other:
            monkeypatch.setenv("UCP_ENDPOINT", other.endpoint)
            assert open_store(store.url).read("f") == b"two"

    def test_a_file_without_a_version_is_not_cached(
        self, store: Store, files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(blocks.FileVersion, "of", lambda _info: None)
        files.joinpath("f").write_bytes(b"abc")
        buffer, rows = bytearray(2), [bytearray(1), bytearray(1)]
        for _ in range(2):
            assert store.read("f") == b"abc"
            store.read_into("f", 1, [memoryview(buffer)])
            store.read_rows("f", 0, 2, [memoryview(r) for r in rows])
            assert buffer == b"bc"
            assert rows == [b"a", b"c"]
        assert not any(b'"block"' in path.read_bytes() for path in entries(cache))


class TestScopes:
    def test_many_files_are_asked_for_with_one_request(
        self, store: Store, served: Served, files: Path
    ) -> None:
        for n in range(20):
            files.joinpath(f"f{n}").write_bytes(bytes([n]) * BLOCK)
        expected = [bytes([n]) * BLOCK for n in range(20)]

        def read() -> list[bytes]:
            return [store.read(f"f{n}") for n in range(20)]

        assert scope.read_consistently(read) == expected
        served.counts()
        assert scope.read_consistently(read) == expected
        assert served.counts().requests == 1
        assert scope.read_consistently(read, optimistic=False) == expected
        assert served.counts().requests == 1

    def test_a_file_that_changes_between_reads_of_a_scope_is_read_again(
        self, store: Store, files: Path
    ) -> None:
        files.joinpath("f").write_bytes(b"a" * 2 * BLOCK)
        assert store.read("f", 0, 1) == b"a"
        turns: list[int] = []

        def read() -> bytes:
            first = store.read("f", 0, 1)
            if not turns:
                _replace(files / "f", b"b" * 2 * BLOCK)
            turns.append(1)
            return first + store.read("f", BLOCK, 1)

        assert (scope.read_consistently(read), len(turns)) == (b"bb", 2)

    def test_what_cannot_be_read_again_is_a_conflict(self, store: Store, files: Path) -> None:
        files.joinpath("f").write_bytes(b"a")
        store.read("f")

        def read() -> None:
            with scope.consistent():
                assert store.read("f") == b"a"
                _replace(files / "f", b"b")

        with pytest.raises(Conflict, match="run/f was rewritten or deleted while it was read"):
            read()

    def test_a_file_that_is_rewritten_for_ever_is_a_conflict(
        self, store: Store, files: Path
    ) -> None:
        files.joinpath("f").write_bytes(bytes(2 * BLOCK))

        def read() -> None:
            store.read("f", 0, 1)
            _replace(files / "f", os.urandom(2 * BLOCK))
            store.read("f", BLOCK, 1)

        with pytest.raises(Conflict, match="rewritten"):
            scope.read_consistently(read)

    def test_an_error_because_of_an_old_version_is_no_error(
        self, store: Store, files: Path
    ) -> None:
        files.joinpath("f").write_bytes(b"old")
        store.read("f")
        _replace(files / "f", b"new")

        def read() -> bytes:
            if (data := store.read("f")) == b"old":
                raise NotFound("what the old file names is gone")
            return data

        assert scope.read_consistently(read) == b"new"

    def test_listings_that_differ_from_other_answers_only_cost_requests(
        self, store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert isinstance(store, CachingStore)
        listed = store.inner.list
        odd = lambda prefix="": (_with_etag(info) for info in listed(prefix))  # noqa: E731
        monkeypatch.setattr(store.inner, "list", odd)
        files.joinpath("f").write_bytes(b"abc")
        for optimistic in (True, False):
            for _ in range(3):
                assert (
                    scope.read_consistently(lambda: store.read("f"), optimistic=optimistic)
                    == b"abc"
                )

    def test_a_checkpoint_that_is_rewritten_is_opened_and_read_anew(
        self, served: Served, files: Path, tmp_path: Path
    ) -> None:
        import numpy as np

        for turn in range(3):
            values = np.full((64, 64), turn, "float32")
            source = FakeSource.write(
                MemoryStore(tmp_path.name), {("w", "weight"): values}, ranks=1
            )
            ucformat.convert(Checkpoint(source), tmp_path / "made", overwrite=True)
            shutil.rmtree(files)
            shutil.copytree(tmp_path / "made", files)
            ck = ucformat.open(served.url("run"))
            assert ck["w"].read().tobytes() == values.tobytes()


class TestDamage:
    def test_no_damaged_exchanged_or_planted_entry_is_served(
        self, store: Store, files: Path, cache: Path
    ) -> None:
        rng = random.Random(7)
        contents = {f"f{n}": rng.randbytes(3 * BLOCK + n) for n in range(3)}
        for name, data in contents.items():
            files.joinpath(name).write_bytes(data)
        for turn in range(60):
            for name, data in contents.items():
                assert open_store(store.url).read(name) == data
            found = entries(cache)
            victim, other = rng.sample(found, 2)
            content = bytearray(victim.read_bytes())
            at = rng.randrange(len(content))
            match turn % 8:
                case 0:
                    content[at] ^= 1 << rng.randrange(8)
                    victim.write_bytes(content)
                case 1:
                    victim.write_bytes(content[:at])
                case 2:
                    victim.write_bytes(bytes(len(content)))
                case 3:
                    victim.write_bytes(other.read_bytes())
                case 4:
                    victim.unlink()
                    victim.symlink_to(other)
                case 5:
                    victim.unlink()
                    os.mkfifo(victim)
                case 6:
                    victim.write_bytes(content + b"\0")
                case 7:
                    victim.write_bytes(b"")
        assert all(path.is_file() for path in entries(cache))

    def test_a_state_file_of_anything_is_harmless(
        self, store: Store, files: Path, cache: Path
    ) -> None:
        files.joinpath("f").write_bytes(b"abc" * BLOCK)
        for content in (b"", b"\xff" * 100, b"\xff" * 9000, os.urandom(5000), bytes(5000)):
            store.read("f")
            cache.joinpath("state").write_bytes(content)
            assert open_store(store.url).read("f") == b"abc" * BLOCK

    def test_the_folder_may_vanish(
        self, store: Store, files: Path, cache: Path, caplog: Any
    ) -> None:
        files.joinpath("f").write_bytes(b"abc" * BLOCK)
        store.read("f")
        shutil.rmtree(cache)
        for _ in range(3):
            assert store.read("f") == b"abc" * BLOCK
        assert len([r for r in caplog.records if "where its disk fails" in r.getMessage()]) == 1

    @pytest.mark.parametrize("call", ["open", "pwrite", "rename", "ftruncate", "utime", "scandir"])
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES])
    def test_no_error_of_its_disk_is_an_error_of_a_read(
        self,
        store: Store,
        files: Path,
        caplog: Any,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        code: int,
    ) -> None:
        files.joinpath("f").write_bytes(b"abc" * BLOCK)
        files.joinpath("g").write_bytes(b"defg" * BLOCK)
        store.read("g")
        true = getattr(os, call)

        def failing(*args: Any, **options: Any) -> Any:
            if call != "open" or options.get("dir_fd") is not None:
                raise OSError(code, os.strerror(code))
            return true(*args, **options)

        monkeypatch.setattr(os, call, failing)
        for _ in range(2):
            assert store.read("f") == b"abc" * BLOCK
            assert store.read("g") == b"defg" * BLOCK
        assert len([r for r in caplog.records if "where its disk fails" in r.getMessage()]) <= 1


class TestFolder:
    def test_it_is_private(self, store: Store, files: Path, cache: Path) -> None:
        files.joinpath("f").write_bytes(b"abc")
        old = os.umask(0)
        try:
            store.read("f")
        finally:
            os.umask(old)
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in cache.iterdir())

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o740, 0o704, 0o711, 0o750])
    def test_one_that_others_can_reach_is_refused(
        self, served: Served, cache: Path, mode: int
    ) -> None:
        cache.mkdir()
        cache.chmod(mode)
        with pytest.raises(UnsafeError, match=rf"the cache {cache} has the mode {mode:04o}"):
            open_store(served.url("run"))
        assert list(cache.iterdir()) == []

    def test_one_of_another_user_is_refused(
        self, served: Served, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache.mkdir(mode=0o700)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(UnsafeError, match=f"the cache {cache} belongs to another user"):
            CacheFolder(str(cache), 1 << 30)
        assert served

    def test_a_link_of_another_user_is_refused(self, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir(mode=0o700)
        cache.symlink_to(tmp_path / "mine")
        CacheFolder(str(cache), 1 << 30)
        if os.geteuid() == 0:
            os.lchown(cache, 12345, 12345)
            with pytest.raises(UnsafeError, match="is a symbolic link of another user"):
                CacheFolder(str(cache), 1 << 30)

    def test_a_file_in_its_place_is_refused(self, cache: Path) -> None:
        cache.write_bytes(b"")
        with pytest.raises(PermissionDenied, match=f"the cache {cache} cannot be opened"):
            CacheFolder(str(cache), 1 << 30)

    def test_it_can_be_switched_off(
        self, served: Served, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCP_CACHE", "none")
        assert not isinstance(open_store(served.url("run")), CachingStore)
        assert not cache.exists()


class TestBound:
    def test_what_was_used_least_recently_goes_first(self, cache: Path) -> None:
        folder = CacheFolder(str(cache), 12 * (4096 + 4096 + 128))
        made = [CacheEntry(f"entry {n}".encode()) for n in range(30)]
        for n, entry in enumerate(made):
            folder.write(entry, bytes([n]) * 4096)
            assert folder.read(made[0]) == bytes(4096)
            assert folder.usage().nbytes <= folder.limit
        kept = [n for n, entry in enumerate(made) if folder.holds(entry)]
        assert kept[0] == 0
        assert kept[1:] == list(range(30 - len(kept) + 1, 30))
        assert len(kept) >= 10

    def test_other_files_stay_and_do_not_count(self, cache: Path) -> None:
        folder = CacheFolder(str(cache), 100_000)
        cache.joinpath("mine").write_bytes(bytes(200_000))
        for n in range(50):
            folder.write(CacheEntry(f"entry {n}".encode()), bytes(10_000))
        folder.clear()
        assert (folder.usage().entries, cache.joinpath("mine").stat().st_size) == (0, 200_000)

    def test_threads_stay_below_it(self, cache: Path) -> None:
        limit = 300_000
        over: list[int] = []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                before = _sizes(cache)
                # those that are the same after all were counted were there at once
                now = sum(nbytes for _, nbytes in before.items() & _sizes(cache).items())
                if now > limit:
                    over.append(now)

        def write(seed: int) -> None:
            folder, rng = CacheFolder(str(cache), limit), random.Random(seed)
            for _ in range(100):
                entry = CacheEntry(f"entry {rng.randrange(60)}".encode())
                folder.write(entry, entry.description * rng.randrange(1, 4000))
                folder.read(CacheEntry(f"entry {rng.randrange(60)}".encode()))

        CacheFolder(str(cache), limit)
        watcher = threading.Thread(target=watch)
        watcher.start()
        threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        watcher.join()
        assert over == []
        assert CacheFolder(str(cache), limit).usage().entries > 0


def _sizes(cache: Path) -> dict[tuple[str, int], int]:
    """The bytes of each file, by its name and inode."""
    sizes = {}
    for path in cache.iterdir():
        with suppress(FileNotFoundError):
            status = path.stat()
            nbytes = status.st_size if path.name.endswith(".tmp") else status.st_blocks * 512
            sizes[path.name, status.st_ino] = nbytes
    return sizes


def _replace(path: Path, data: bytes) -> None:
    """Replace a file, which gets another version: another time, however coarse the clock of the file system is."""
    before = path.stat().st_mtime_ns
    fresh = path.with_name("fresh")
    fresh.write_bytes(data)
    if fresh.stat().st_mtime_ns <= before:
        os.utime(fresh, ns=(before + 1, before + 1))
    fresh.replace(path)


def _with_etag(info: Any) -> Any:
    from dataclasses import replace

    return replace(info, etag=f'"odd {info.etag}"')
