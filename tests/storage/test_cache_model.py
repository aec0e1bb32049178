"""A model of the host cache: whatever is done, every read returns what the files hold at that time."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.s3 import ENVIRONMENT
from tests.s3_files import BUCKET, Served, serving_files
from ucformat.errors import MissingData, NotFound
from ucformat.storage.cache import scope
from ucformat.storage.cache import store as blocks
from ucformat.storage.cache.folder import CacheFolder
from ucformat.storage.url import open_store

BLOCK = 1 << 10  # of these tests
LIMIT = 60_000  # a dozen blocks, which take 4 KiB on the disk at least
KEYS = ("a", "b", "c/d")
STORES = ("one", "two", "three")  # the last two see the same files under two URLs


@pytest.fixture(scope="module")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    Machine.files = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch, serving_files(Machine.files) as served:
        Machine.served = served
        patch.setattr(blocks, "_BLOCK", BLOCK)
        for name, value in {
            **ENVIRONMENT,
            "UCP_ENDPOINT": served.endpoint,
            "UCP_CACHE_BYTES": str(LIMIT),
            "UCP_CACHE": "none",
        }.items():
            patch.setenv(name, value)
        yield patch


class Killed(BaseException):
    """The end of a process: nothing after it is done, not even cleaning up."""


class Machine(RuleBasedStateMachine):
    """Three stores in one cache; the model is the files themselves."""

    files: Path
    served: Served
    number = itertools.count()

    @initialize()
    def begin(self) -> None:
        self.cache = Path(tempfile.mkdtemp())
        os.environ["UCP_CACHE"] = str(self.cache)
        run = f"run{next(self.number)}"
        self.folders = {"one": f"{run}/x", "two": f"{run}/y", "three": f"{run}/y"}
        self.stores: dict[str, Any] = {}
        self.time = 1
        for name in STORES:
            (self.files / self.folders[name]).mkdir(parents=True, exist_ok=True)

    def _path(self, name: str, key: str) -> Path:
        return self.files / self.folders[name] / key

    def _store(self, name: str, *, fresh: bool) -> Any:
        if fresh or name not in self.stores:
            slash = "/" if name == "three" else ""
            self.stores[name] = open_store(f"s3://{BUCKET}/{self.folders[name]}{slash}")
        return self.stores[name]

    def _content(self, name: str, key: str) -> bytes | None:
        path = self._path(name, key)
        return path.read_bytes() if path.exists() else None

    @rule(
        name=st.sampled_from(STORES),
        key=st.sampled_from(KEYS),
        size=st.sampled_from([0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 9 * BLOCK]),
        seed=st.integers(0, 255),
    )
    def write(self, name: str, key: str, size: int, seed: int) -> None:
        path = self._path(name, key)
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_name("fresh")
        fresh.write_bytes(bytes((seed + n // 7) % 251 for n in range(size)))
        self.time += 1
        os.utime(fresh, (self.time, self.time))
        fresh.replace(path)

    @rule(name=st.sampled_from(STORES), key=st.sampled_from(KEYS))
    def delete(self, name: str, key: str) -> None:
        self._path(name, key).unlink(missing_ok=True)

    @rule(
        name=st.sampled_from(STORES),
        key=st.sampled_from(KEYS),
        begin=st.integers(0, 10 * BLOCK),
        nbytes=st.none() | st.integers(0, 4 * BLOCK),
        fresh=st.booleans(),
    )
    def read(self, name: str, key: str, begin: int, nbytes: int | None, fresh: bool) -> None:
        self._read(self._store(name, fresh=fresh), name, key, begin, nbytes)

    def _read(self, store: Any, name: str, key: str, begin: int, nbytes: int | None) -> None:
        content = self._content(name, key)
        if content is not None and begin % 3:
            begin %= len(content) + 1
        end = None if nbytes is None else begin + nbytes
        try:
            found = store.read(key, begin, nbytes)
        except NotFound:
            assert content is None
        except MissingData:
            assert content is not None
            assert max(begin, end or 0) > len(content)
        else:
            assert found == (content or b"")[begin:end]

    @rule(name=st.sampled_from(STORES), key=st.sampled_from(KEYS), fresh=st.booleans())
    def read_all_ways(self, name: str, key: str, fresh: bool) -> None:
        content = self._content(name, key)
        if not content:
            return
        store = self._store(name, fresh=fresh)
        whole = bytearray(len(content))
        store.read_into(key, 0, [memoryview(whole)[:3], memoryview(whole)[3:]])
        rows = [bytearray(3) for _ in range(0, len(content) - 3, 17)]
        store.read_rows(key, 0, 17, [memoryview(row) for row in rows])
        assert whole == content
        assert rows == [content[at : at + 3] for at in range(0, len(content) - 3, 17)]

    @rule(
        name=st.sampled_from(STORES),
        optimistic=st.booleans(),
        fresh=st.booleans(),
        key=st.sampled_from(KEYS),
    )
    def read_in_a_scope(self, name: str, optimistic: bool, fresh: bool, key: str) -> None:
        store = self._store(name, fresh=fresh)

        def read() -> dict[str, bytes]:
            there = [info.key for info in store.list() if "fresh" not in info.key]
            return {found: store.read(found) for found in there}

        expected = {k: c for k in KEYS if (c := self._content(name, k)) is not None}
        assert scope.read_consistently(read, optimistic=optimistic) == expected
        assert scope.read_consistently(read, optimistic=optimistic, listing=False) == expected

    @rule(
        name=st.sampled_from(STORES),
        key=st.sampled_from(KEYS),
        call=st.sampled_from(["open", "pwrite", "rename", "ftruncate", "utime", "unlink"]),
        after=st.integers(0, 6),
    )
    def kill(self, name: str, key: str, call: str, after: int) -> None:
        """Read, and end at a call to the operating system; what was open is closed, as by the kernel."""
        calls = itertools.count()
        true = getattr(os, call)
        dead = False

        def dying(*args: Any, **options: Any) -> Any:
            nonlocal dead
            dead = dead or (next(calls) >= after and (call != "open" or "dir_fd" in options))
            if dead and (call != "open" or "dir_fd" in options):
                raise Killed
            return true(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, dying)
            patch.setattr(CacheFolder, "_remove", _remove_unless(lambda: dead))
            try:
                self._store(name, fresh=True).read(key)
            except Killed:
                pass
            except NotFound:
                assert self._content(name, key) is None

    @rule(
        victim=st.integers(0, 99),
        other=st.integers(0, 99),
        at=st.integers(0, 1 << 14),
        flip=st.booleans(),
    )
    def damage(self, victim: int, other: int, at: int, flip: bool) -> None:
        found = sorted(self.cache.iterdir())
        if not found:
            return
        path = found[victim % len(found)]
        if path.name == "state":  # a number of bytes that is too low would let the cache grow
            path.unlink()
            return
        content = bytearray(path.read_bytes())
        if flip and content:
            content[at % len(content)] ^= 1 << at % 8
            path.write_bytes(content)
        else:
            path.write_bytes(found[other % len(found)].read_bytes()[: len(content)])

    @rule()
    def clear(self) -> None:
        CacheFolder(str(self.cache), LIMIT).clear()

    @invariant()
    def is_bounded(self) -> None:
        if hasattr(self, "cache"):
            assert (
                sum(max(p.stat().st_size, 512 * p.stat().st_blocks) for p in self.cache.iterdir())
                <= LIMIT
            )

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            shutil.rmtree(self.cache)


def _remove_unless(dead: Any) -> Any:
    true = CacheFolder._remove

    def remove(self: CacheFolder, name: str) -> None:
        if not dead():
            true(self, name)

    return remove


@pytest.mark.usefixtures("_served")
def test_the_cache_is_the_store() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
