"""Processes that share a cache: killed at any instant, while files are rewritten and entries are evicted."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from typing import TYPE_CHECKING, Self

import pytest

import ucformat
from tests.fakes import FakeSource, random_array
from tests.s3 import ENVIRONMENT
from tests.s3_files import serving_files
from tests.storage.cache_program import NAMES, content, read_for_ever, read_replicated, rewrite
from ucformat.checkpoint import Checkpoint
from ucformat.storage.cache.folder import CacheFolder
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KILLS = int(os.environ.get("UCP_TEST_CACHE_KILLS", "60"))
LIMIT = 4_000_000  # less than the files have
READERS = 4


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {**ENVIRONMENT, "UCP_CACHE": str(tmp_path / "cache"), "UCP_CACHE_BYTES": str(LIMIT)}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.mark.matrix
def test_readers_that_are_killed_at_any_instant(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, failed, rng = tmp_path / "served" / "run", tmp_path / "failed", random.Random(KILLS)
    files.mkdir(parents=True)
    for name in NAMES:
        rewrite(files, name, 0)
    over: list[int] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.storage.cache_program", "obstore"])
    with serving_files(tmp_path / "served") as served, watching(tmp_path / "cache", over):
        environment["UCP_ENDPOINT"] = served.endpoint
        monkeypatch.setenv("UCP_ENDPOINT", served.endpoint)
        url = served.url("run")

        def start(seed: int) -> multiprocessing.process.BaseProcess:
            process = context.Process(
                target=read_for_ever, args=(url, files, seed, environment, str(failed))
            )
            process.start()
            return process

        readers = [start(n) for n in range(READERS)]
        for turn in range(KILLS):
            time.sleep(rng.uniform(0, 0.2))
            if turn % 3 == 0:
                rewrite(files, rng.choice(NAMES), turn + 1)
            victim = readers.pop(rng.randrange(READERS))
            victim.kill()
            victim.join()
            readers.append(start(READERS + turn))
            assert not failed.exists(), failed.read_text()
        for reader in readers:
            reader.kill()
            reader.join()
        assert not failed.exists(), failed.read_text()
        assert over == []
        for _ in range(2):
            for name in NAMES:
                generation = int((tmp_path / "served" / f"{name}.generation").read_text())
                assert open_store(url).read(name) == content(name, generation)
    folder = CacheFolder(str(tmp_path / "cache"), LIMIT)
    assert folder.usage().nbytes <= LIMIT
    folder.clear()
    assert folder.usage().entries == 0  # what killed writers left is gone, too


class watching:  # noqa: N801 - used as a function
    """Add up the bytes of a cache again and again, and note sums above the bound."""

    def __init__(self, cache: Path, over: list[int]) -> None:
        self._cache, self._over = cache, over
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.looked = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.is_set():
            if (now := _nbytes(self._cache)) > LIMIT:
                self._over.append(now)
            self.looked += 1


def _nbytes(cache: Path) -> int:
    """The bytes of all files that were there at one time: those that are still there after all were listed."""
    if not cache.exists():
        return 0
    found = {}
    for path in cache.iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found[status.st_ino] = max(status.st_size, 512 * status.st_blocks)
    there = {entry.inode() for entry in os.scandir(cache)}
    return sum(size for inode, size in found.items() if inode in there)


def test_eight_processes_receive_each_byte_once(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_CACHE", "none")
    arrays = {(f"w{n}", "weight"): random_array((500 + n, 500), "float32", n) for n in range(12)}
    source = FakeSource.write(MemoryStore(tmp_path.name), arrays, ranks=2)
    ucformat.convert(Checkpoint(source), tmp_path / "served" / "run")
    environment["UCP_CACHE_BYTES"] = str(1 << 30)
    context = multiprocessing.get_context("forkserver")
    with serving_files(tmp_path / "served", 0.02) as served:
        environment["UCP_ENDPOINT"] = served.endpoint
        for count in (1, 8, 8):  # the last find everything in the cache
            environment["UCP_CACHE"] = str(tmp_path / f"cache of {count}")
            results = [tmp_path / f"result {n}" for n in range(count)]
            arguments = [(served.url("run"), environment, str(result)) for result in results]
            readers = [context.Process(target=read_replicated, args=given) for given in arguments]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            counts = served.counts()
            if count == 1:
                alone, digest = counts, results[0].read_text()
                continue
            assert {result.read_text() for result in results} == {digest}
            # how many listings there are depends on how far apart the processes are, but not which
            # bytes they receive
            assert counts.reads in (0, alone.reads)
            assert counts.requests - counts.reads <= 2 * count
            assert counts.nbytes <= alone.nbytes * (counts.reads > 0) + 2 * count * 10_000


def test_a_process_that_is_stopped_holds_nobody_up_for_ever(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ucformat.storage.cache import folder
    from ucformat.storage.cache import store as caching

    for module, name in (
        (caching, "_PATIENCE"),
        (caching, "_BLOCK_PATIENCE"),
        (folder, "_ACCOUNTS_PATIENCE"),
    ):
        monkeypatch.setattr(module, name, 0.05)
    files = tmp_path / "served" / "run"
    files.mkdir(parents=True)
    rewrite(files, "f5", 0)
    with serving_files(tmp_path / "served") as served:
        monkeypatch.setenv("UCP_ENDPOINT", served.endpoint)
        store = open_store(served.url("run"))
        held = _lock_everything(tmp_path / "cache")
        assert store.read("f5") == content("f5", 0)
        assert environment
        held()
        assert store.read("f5") == content("f5", 0)


def _lock_everything(cache: Path) -> Callable[[], None]:
    """Lock all that can be locked, as a process that is stopped may; returns what ends that."""
    import fcntl
    import struct

    state = os.open(cache / "state", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.fcntl(
        state, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    )
    return lambda: os.close(state)
