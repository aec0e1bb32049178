"""Reads past the page cache: the same bytes, only where they pay, and ordinary reads where they fail."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.fakes import FakeSource, random_array, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import ChecksumError, MissingData, NotFound
from ucformat.reading import execute
from ucformat.reading.plan import Plan, Request
from ucformat.storage import direct
from ucformat.storage.base import Costs
from ucformat.storage.direct import DIRECT, is_cached
from ucformat.storage.local import LocalStore
from ucformat.storage.local_files import OpenFile
from ucformat.storage.profiles import Profile, keep_profile
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PAGE = 4096
SIZE = (1 << 20) + 777
CONTENT = random.Random(1).randbytes(SIZE)
preadv = os.preadv


class Disk:
    """A disk that refuses what is not a multiple of a page, and counts what it reads."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.error: int | None = None
        self.most = 1 << 30  # bytes of one call

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        assert (address % PAGE, len(buffer) % PAGE, offset % PAGE) == (0, 0, 0)
        self.calls.append((offset, len(buffer)))
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return preadv(fd, [buffer[: self.most]], offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(direct, "_MIN", 2 * PAGE)
    monkeypatch.setattr(direct, "is_cached", lambda _fd, _offset: False)
    monkeypatch.setattr(os, "preadv", made.preadv)
    return made


@pytest.fixture
def store(tmp_path: Path, disk: Disk) -> LocalStore:
    (tmp_path / "f").write_bytes(CONTENT)
    out = LocalStore(tmp_path)
    out.is_direct = True
    return out


def lent(store: LocalStore, ranges: Sequence[tuple[int, int]]) -> list[bytes] | None:
    loan = store.read_ranges("f", ranges)
    if loan is None:
        return None
    with loan as views:
        return [bytes(view) for view in views]


class TestRanges:
    @pytest.mark.parametrize("seed", range(30))
    def test_any_ranges(
        self, store: LocalStore, disk: Disk, monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        monkeypatch.setattr(direct, "_MIN", 0)
        rng = random.Random(seed)
        disk.most = rng.choice((PAGE, 3 * PAGE, 1 << 30))
        ranges: list[tuple[int, int]] = []
        at = rng.randrange(3 * PAGE)
        while at < SIZE and len(ranges) < 20:
            ranges.append((at, min(SIZE - at, rng.choice((0, 1, 4, 5000, 40_000)))))
            at += sum(ranges[-1][1:]) + rng.choice((0, 4, 6000, 70_000, -1, -5000))
            at = max(at, ranges[-1][0])
        ranges.append((SIZE - 3 * PAGE, 3 * PAGE))
        ranges.sort()
        wanted = [CONTENT[at : at + nbytes] for at, nbytes in ranges]
        assert lent(store, ranges) == wanted

    def test_neighbours_are_one_request(self, store: LocalStore, disk: Disk) -> None:
        ranges = [(5 + n * 10_004, 10_000) for n in range(50)]
        assert lent(store, ranges) == [CONTENT[at : at + n] for at, n in ranges]
        assert disk.calls == [(0, -(-(5 + 49 * 10_004 + 10_000) // PAGE) * PAGE)]

    def test_a_gap_is_not_read(self, store: LocalStore, disk: Disk) -> None:
        ranges = [(100, 10_000), (500_000, 10_000)]
        assert lent(store, ranges) == [CONTENT[at : at + n] for at, n in ranges]
        assert [offset for offset, _ in disk.calls] == [0, 500_000 // PAGE * PAGE]

    def test_to_the_last_byte(self, store: LocalStore) -> None:
        assert lent(store, [(10, SIZE - 10)]) == [CONTENT[10:]]
        assert lent(store, [(10, SIZE - 9)]) is None

    def test_what_is_small_or_scattered_or_nothing(self, store: LocalStore, disk: Disk) -> None:
        assert lent(store, [(0, 100)]) is None
        assert lent(store, [(n * 100_000, 100) for n in range(10)]) is None
        assert lent(store, []) is None
        assert disk.calls == []

    def test_more_than_the_memory_of_a_thread(
        self, store: LocalStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(direct, "_MAX", SIZE // 2)
        assert lent(store, [(0, SIZE)]) is None
        assert disk.calls == []

    def test_a_missing_file(self, store: LocalStore) -> None:
        with pytest.raises(NotFound):
            store.read_ranges("missing", [(0, SIZE)])


class TestFallbacks:
    """`read_into` gives the bytes, or the error of an ordinary read."""

    def check(self, store: LocalStore) -> None:
        memory = bytearray(SIZE - 3)
        crcs = [0, 7]
        views = [memoryview(memory)[:500_001], memoryview(memory)[500_001:]]
        store.read_into("f", 3, views, crcs)
        assert memory == CONTENT[3:]
        assert crcs == [checksum(CONTENT[3:500_004]), checksum(CONTENT[500_004:], 7)]

    def test_none(self, store: LocalStore, disk: Disk) -> None:
        self.check(store)
        assert disk.calls == [(0, -(-SIZE // PAGE) * PAGE)]

    @pytest.mark.parametrize("error", [errno.EINVAL, errno.EIO])
    def test_a_disk_that_fails(self, store: LocalStore, disk: Disk, error: int) -> None:
        disk.error = error
        self.check(store)
        assert len(disk.calls) == 1

    def test_a_file_system_that_refuses(
        self, store: LocalStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = os.open

        def refuse(path: str, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no")
            return opened(path, flags, *more, **named)

        monkeypatch.setattr(os, "open", refuse)
        self.check(store)
        self.check(store)
        assert disk.calls == []

    def test_a_system_without(
        self, store: LocalStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(os, "O_DIRECT")
        self.check(store)
        assert disk.calls == []

    def test_what_is_cached(
        self, store: LocalStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(direct, "is_cached", is_cached)
        self.check(store)  # it was just written
        assert lent(store, [(0, SIZE)]) is None
        assert disk.calls == []

    def test_a_truncated_file(self, store: LocalStore) -> None:
        with pytest.raises(MissingData, match=f"the file has {SIZE}"):
            store.read_into("f", 0, [memoryview(bytearray(SIZE + 1))])

    def test_a_file_that_was_replaced_is_read_as_it_was_opened(
        self, store: LocalStore, tmp_path: Path
    ) -> None:
        store.read_into("f", 0, [memoryview(bytearray(1))])
        (tmp_path / "f").rename(tmp_path / "g")
        (tmp_path / "f").write_bytes(bytes(SIZE))
        self.check(store)


class TestCached:
    def test_what_was_written_is(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(CONTENT)
        file = OpenFile(str(tmp_path / "f"))
        assert is_cached(file.fd, SIZE // 2)

    def test_what_was_dropped_is_not(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(CONTENT)
        file = OpenFile(str(tmp_path / "f"))
        os.fsync(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        kind = subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path], text=True).strip()
        assert is_cached(file.fd, SIZE // 2) is (kind == "tmpfs")

    def test_what_is_unknown_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert is_cached(-1, 0)
        monkeypatch.delattr(os, "O_DIRECT")
        direct._calls.cache_clear()
        try:
            assert is_cached(-1, 0)
        finally:
            direct._calls.cache_clear()


class TestCheckpoint:
    """A checkpoint of chunks that no page begins with."""

    A = random_array((700, 300), "float32", 1)

    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        source = Checkpoint(FakeSource.write(LocalStore(tmp_path / "s"), {("a", "weight"): self.A}))
        ucformat.convert(source, tmp_path / "here" / "ck", chunk_bytes=70_000)
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        keep_profile(str(tmp_path / "here"), Profile(1.0, 1.0, 1.0, direct=True))
        return tmp_path / "here" / "ck"

    @pytest.mark.parametrize("verify", ["whole", "never", "always"])
    def test_what_is_read(self, place: Path, disk: Disk, verify: Any) -> None:
        ck = ucformat.open(place)
        assert ck.store.costs == DIRECT
        assert same(ck["a"].read(verify=verify), self.A)
        assert disk.calls
        assert same(ck["a"][13:600, 7:280], self.A[13:600, 7:280])

    def test_damage(self, place: Path, disk: Disk) -> None:
        (file,) = [f for f in place.rglob("*") if f.stat().st_size > self.A.nbytes]
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(ChecksumError, match="is damaged"):
            ucformat.open(place)["a"].read()
        assert disk.calls

    def test_other_places_are_read_as_ever(self, place: Path, tmp_path: Path) -> None:
        assert LocalStore(place.parent).is_direct
        assert LocalStore(tmp_path / "s").costs == Costs()


def test_the_memory_of_all_threads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "default_threads", lambda: 16)
    request = Request("f", 0, DIRECT.request, ())
    plan = Plan((replace(request, offset=0),) * 100, 0, 0)
    assert execute._parallel(plan, DIRECT, 100) * DIRECT.request <= (DIRECT.in_flight or 0)
    monkeypatch.setattr(execute, "default_threads", lambda: 2)
    assert execute._parallel(plan, DIRECT, 100) == 4  # two copy while two wait
    assert execute._parallel(plan, Costs(), 100) == 2
