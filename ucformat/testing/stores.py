"""What every store must do: a suite for pytest.

Subclass `StoreTests` with a fixture `store` that returns a new, empty store for each test, and run
pytest:

    from ucformat.testing import StoreTests

    class TestMyStore(StoreTests):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ucformat.errors import (
    Conflict,
    MissingData,
    NotFound,
    PermissionDenied,
    UnsafeError,
    UnsupportedError,
)
from ucformat.storage.base import content_version
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.storage.base import Store

__all__ = ["StoreTests", "keys", "put"]

_UNSAFE = [
    "",
    "..",
    "../x",
    "a/../../x",
    "/abs",
    "a//b",
    "a/./b",
    "a/",
    ".",
    "a\\b",
    "a\0b",
    "\ud800",
]


def put(store: Store, key: str, data: bytes = b"x") -> None:
    """Write a file.

    Args:
        store: the store.
        key: key of the file.
        data: its content.
    """
    with store.create(key) as out:
        out.write(data)


def keys(store: Store, prefix: str = "") -> list[str]:
    """The keys below a folder, in the order in which the store lists them.

    Args:
        store: the store.
        prefix: key of the folder (default: the root).
    """
    return [i.key for i in store.list(prefix)]


def _outcomes(work: Callable[[int], object], n: int = 8) -> list[object]:
    """The results or errors of n threads that start `work` together."""
    barrier = threading.Barrier(n)

    def run(i: int) -> object:
        barrier.wait()
        try:
            return work(i)
        except (Conflict, PermissionDenied, UnsupportedError) as error:
            return error

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))


class StoreTests:
    """The behaviour of every store; one without `can_put_if_absent` or `can_replace` must reject these calls."""

    can_put_if_absent = True
    can_replace = True
    patience = 60.0  # seconds within which the clock of the storage advances

    def test_reads_ranges(self, store: Store) -> None:
        put(store, "d/f", bytes(range(100)))
        assert store.read("d/f") == bytes(range(100))
        assert store.read("d/f", 90) == bytes(range(90, 100))
        assert store.read("d/f", 10, 5) == bytes(range(10, 15))
        assert store.read("d/f", 100) == b""
        assert store.read("d/f", 40, 0) == b""

    def test_scatters_a_range_over_buffers(self, store: Store) -> None:
        data = random.Random(1).randbytes(100_000)
        put(store, "f", data)
        sizes = [1, 0, 4096, 3, 0, 70_000]
        buffers = [bytearray(n) for n in sizes]
        store.read_into("f", 17, [memoryview(b) for b in buffers])
        assert b"".join(buffers) == data[17 : 17 + sum(sizes)]

    def test_scatters_over_more_buffers_than_one_call_takes(self, store: Store) -> None:
        data = random.Random(2).randbytes(9000)
        put(store, "f", data)
        target = bytearray(9000)
        view = memoryview(target)
        store.read_into("f", 0, [view[i : i + 3] for i in range(0, 9000, 3)])
        assert target == data

    def test_fills_buffers_of_any_item_type_and_rows_that_are_not_adjacent(
        self, store: Store
    ) -> None:
        put(store, "f", b"\x01\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0" + bytes(range(16, 100)))
        grid, scalar, cube = (
            np.zeros((1, 3), "<u4"),
            np.zeros((), "<u4"),
            np.zeros((4, 5, 6), np.uint8),
        )
        arrays = [
            grid,
            np.zeros((0, 3)),
            scalar,
            cube[:2, 1:4, 2:5],
            cube[3, :0],
            cube[2:, ::4, 1:],
            cube[3, 2:3, 3:6],
        ]
        crcs = list(range(len(arrays)))
        store.read_into("f", 0, [a.data for a in arrays], crcs)
        assert [grid.tolist(), scalar.tolist(), int(np.count_nonzero(cube))] == [[[1, 2, 3]], 4, 41]
        assert b"".join(a.tobytes() for a in arrays[3:]) == bytes(range(16, 57))
        assert crcs == [checksum(a.tobytes(), k) for k, a in enumerate(arrays)]

    def test_reads_many_rows(self, store: Store) -> None:
        data = random.Random(3).randbytes(50_000)
        put(store, "f", data)
        rows = [bytearray(n) for n in [7, 0, 19, *[5] * 3000]]
        store.read_rows("f", 11, 16, [memoryview(r) for r in rows])
        assert rows == [data[11 + 16 * k : 11 + 16 * k + len(r)] for k, r in enumerate(rows)]
        store.read_rows("f", 3, 0, [memoryview(r) for r in rows[:3]])
        assert rows[2] == data[3:22]
        store.read_rows("f", 0, 4, [])
        with pytest.raises(MissingData, match="f: bytes 49996 to 50001"):
            store.read_rows("f", 49_990, 6, [memoryview(bytearray(5)) for _ in range(2)])

    def test_reads_nothing_into_nothing(self, store: Store) -> None:
        put(store, "f", b"abc")
        for offset, buffers in [(0, []), (3, [memoryview(b"")]), (99, [])]:
            store.read_into("f", offset, buffers)

    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(0, 11), (9, 2), (10, 1), (500, 1), (-1, 2), (0, 1 << 60)]
    )
    def test_reading_past_the_end_names_file_range_and_size(
        self, store: Store, offset: int, nbytes: int
    ) -> None:
        put(store, "d/short", b"0123456789")
        with pytest.raises(
            MissingData, match=rf"d/short: bytes {offset} to {offset + nbytes} .* has \d+"
        ):
            store.read("d/short", offset, nbytes)
        if nbytes < 100:
            with pytest.raises(MissingData, match=f"d/short: bytes {offset} to {offset + nbytes}"):
                store.read_into("d/short", offset, [memoryview(bytearray(nbytes))])

    def test_reading_from_beyond_the_end_to_the_end_is_missing_data(self, store: Store) -> None:
        put(store, "f", b"abc")
        with pytest.raises(MissingData):
            store.read("f", 4)

    def test_a_missing_file_is_not_found(self, store: Store) -> None:
        put(store, "a/b/c")
        reads: list[Callable[[str], object]] = [
            store.info,
            store.read,
            store.read_versioned,
            store.adopt,
        ]
        reads += [lambda k: store.read_into(k, 0, [memoryview(bytearray(1))])]
        reads += [lambda k: store.read_rows(k, 0, 1, [memoryview(bytearray(1))])]
        for key in ("nothing", "a/nothing", "no/thing", "a/b", "a"):
            for read in reads:
                with pytest.raises(NotFound, match=key):
                    read(key)

    def test_many_threads_read_the_same_files(self, store: Store) -> None:
        files = {f"d/{i}": random.Random(i).randbytes(5000 + i) for i in range(20)}
        for key, data in files.items():
            put(store, key, data)

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(100):
                key, data = rng.choice(list(files.items()))
                start = rng.randrange(len(data))
                buffer = bytearray(rng.randrange(len(data) - start))
                store.read_into(key, start, [memoryview(buffer)])
                assert buffer == data[start : start + len(buffer)]

        assert _outcomes(work) == [None] * 8

    def test_info_has_the_size_and_a_version_that_changes_with_content(self, store: Store) -> None:
        put(store, "d/f", b"one")
        before = store.info("d/f")
        assert (before.key, before.size) == ("d/f", 3)
        assert store.info("d/f") == before
        put(store, "d/f", b"two")
        assert store.info("d/f").version != before.version

    def test_info_has_the_time_of_the_last_write(self, store: Store) -> None:
        before = time.time()
        put(store, "d/f", b"one")
        for found in (store.info("d/f"), next(iter(store.list()))):
            assert found.modified is not None
            # object stores report whole seconds
            assert before - 1 <= found.modified <= time.time() + 1

        def has_changed() -> bool:  # once the clock of the file system has advanced
            put(store, "d/f", b"two")
            again = store.info("d/f")
            assert again.modified is not None
            assert again.modified >= found.modified  # type: ignore[operator]
            return (again.modified, again.etag) != (found.modified, found.etag)

        end = time.monotonic() + self.patience
        while not has_changed():
            assert time.monotonic() < end, "a file that was written later has the same time"
            time.sleep(0.005)

    def test_a_stream_is_invisible_until_it_is_closed(self, store: Store) -> None:
        out = store.create("d/f")
        buffer = bytearray(b"abc")
        out.write(buffer)
        buffer[:] = b"xyz"  # the caller may reuse it
        out.write(memoryview(b"def"))
        out.write(b"")
        assert keys(store) == []
        with pytest.raises(NotFound):
            store.info("d/f")
        out.close()
        assert (keys(store), store.read("d/f")) == (["d/f"], b"abcdef")
        out.close()
        out.abort()
        assert store.read("d/f") == b"abcdef"

    def test_an_aborted_stream_leaves_nothing(self, store: Store) -> None:
        out = store.create("d/f")
        out.write(b"abc")
        out.abort()
        out.abort()
        out.close()
        with suppress(ZeroDivisionError), store.create("d/g") as out:
            out.write(b"abc")
            raise ZeroDivisionError
        store.create("d/h")  # never closed
        assert keys(store) == []

    def test_an_empty_stream_is_an_empty_file(self, store: Store) -> None:
        store.create("f").close()
        assert (store.read("f"), store.info("f").size) == (b"", 0)

    def test_a_stream_replaces_an_existing_file_for_every_reader(self, store: Store) -> None:
        buffer = memoryview(bytearray(3))
        put(store, "f", b"old")
        store.read_into("f", 0, [buffer])
        out = store.create("f")
        out.write(b"new")
        assert store.read("f") == b"old"
        out.close()
        store.read_into("f", 0, [buffer])
        assert (store.read("f"), bytes(buffer)) == (b"new", b"new")

    def test_threads_write_streams_side_by_side(self, store: Store) -> None:
        def work(i: int) -> None:
            for j in range(10):
                put(store, f"d{j}/{i}", bytes([i]) * 1000)

        assert _outcomes(work) == [None] * 8
        store.flush()
        assert len(keys(store)) == 80
        assert all(store.read(k) == bytes([int(k[-1])]) * 1000 for k in keys(store))

    def test_flush_and_adopt_can_be_called_at_any_time(self, store: Store) -> None:
        store.flush()
        put(store, "a/f")
        store.adopt("a/f")
        store.flush()
        store.adopt("a/f")
        store.delete_prefix("a")
        store.flush()

    # --- put_if_absent and replace

    def test_put_if_absent_puts_once(self, store: Store) -> None:
        if not self.can_put_if_absent:
            with pytest.raises(UnsupportedError, match="not committed to"):
                store.put_if_absent("d/f", b"one")
            return
        assert store.put_if_absent("d/f", b"one") == content_version(b"one")
        with pytest.raises(Conflict, match="d/f"):
            store.put_if_absent("d/f", b"two")
        assert store.read("d/f") == b"one"
        put(store, "g", b"stream")
        with pytest.raises(Conflict):
            store.put_if_absent("g", b"two")
        store.delete("d/f")
        store.put_if_absent("d/f", b"three")
        assert keys(store) == ["d/f", "g"]

    def test_one_of_many_threads_puts(self, store: Store) -> None:
        if not self.can_put_if_absent:  # then no thread succeeds
            assert {*map(type, _outcomes(lambda i: store.put_if_absent("d/f", bytes([i]))))} == {
                UnsupportedError
            }
            return
        for turn in range(20):
            found = _outcomes(lambda i, t=turn: store.put_if_absent(f"d{t}/f", bytes([i]) * 1000))  # type: ignore[misc]
            winners = [i for i, o in enumerate(found) if isinstance(o, str)]
            assert len(winners) == 1
            assert store.read(f"d{turn}/f") == bytes(winners) * 1000
        assert len(keys(store)) == 20

    def test_replace_requires_the_current_version(self, store: Store) -> None:
        put(store, "d/f", b"one")
        data, version = store.read_versioned("d/f")
        assert (data, version) == (b"one", content_version(b"one"))
        if not self.can_replace:
            with pytest.raises(UnsupportedError, match="unchanged"):
                store.replace("d/f", b"two", version)
            return
        second = store.replace("d/f", b"two", version)
        assert store.read_versioned("d/f") == (b"two", second)
        with pytest.raises(Conflict, match="d/f"):
            store.replace("d/f", b"three", version)
        with pytest.raises(Conflict):
            store.replace("d/none", b"three", version)
        store.replace("d/f", b"three", second)
        assert (store.read("d/f"), keys(store)) == (b"three", ["d/f"])

    def test_one_of_many_threads_replaces(self, store: Store) -> None:
        if not self.can_replace:  # then no thread succeeds
            assert {*map(type, _outcomes(lambda i: store.replace("f", bytes([i]), "version")))} == {
                UnsupportedError
            }
            return
        version = store.put_if_absent("f", b"first")
        for turn in range(20):
            found = _outcomes(
                lambda i, t=turn, v=version: store.replace("f", b"%d of %d" % (i, t), v)  # type: ignore[misc]
            )
            [version] = [o for o in found if isinstance(o, str)]
            assert store.read_versioned("f")[1] == version

    def test_lists_in_the_order_of_keys(self, store: Store) -> None:
        names = [
            "a/b/c",
            "a/b-d",
            "a/bc",
            "a/b.x",
            "a/b/a",
            "b",
            "a.b",
            "a-",
            "A",
            "z/y/x/w",
            "é",
            "a/b/.hidden",
        ]
        for name in names:
            put(store, name, name.encode())
        assert keys(store) == sorted(names)
        assert keys(store, "a/b") == ["a/b/.hidden", "a/b/a", "a/b/c"]
        assert keys(store, "z") == ["z/y/x/w"]
        assert (
            keys(store, "b") == keys(store, "nothing/here") == keys(store, "b/under/a/file") == []
        )
        assert [i.size for i in store.list("a/b")] == [11, 5, 5]
        assert list(store.list("z")) == [store.info("z/y/x/w")]

    def test_an_empty_place_lists_nothing(self, store: Store) -> None:
        assert keys(store) == []

    def test_deleting_twice_is_deleting(self, store: Store) -> None:
        put(store, "a/b")
        put(store, "a/bc")
        for _ in range(2):
            store.delete("a/b")
            store.delete("never/was")
        store.delete("a/bc/below/a/file")
        assert keys(store) == ["a/bc"]

    def test_deletes_a_folder_and_only_that(self, store: Store) -> None:
        for name in ("a/b/x", "a/b/c/d/e", "a/bc", "a/b.x", "ab/x"):
            put(store, name)
        store.create("a/b/open").write(b"left by a killed writer")
        for _ in range(2):
            store.delete_prefix("a/b")
        store.delete_prefix("never/was")
        store.delete_prefix("a/bc")  # a file, not a folder
        assert keys(store) == ["a/b.x", "a/bc", "ab/x"]
        put(store, "a/b/x", b"again")
        assert store.read("a/b/x") == b"again"

    def test_many_threads_delete_the_same_folder(self, store: Store) -> None:
        for i in range(50):
            put(store, f"d/{i % 7}/{i}")
        assert _outcomes(lambda _: store.delete_prefix("d")) == [None] * 8
        assert keys(store) == []

    def test_prune_removes_no_file(self, store: Store) -> None:
        for name in ("a/b/c/f", "a/d/g", "h"):
            put(store, name)
        put(store, "a/e/gone")
        store.delete("a/e/gone")
        store.create("a/open/f").write(b"a killed writer's")
        for folder in ("a/e", "a/e", "a/open", "a/b", "a", "", "h", "never/was"):
            store.prune(folder)
        assert keys(store) == ["a/b/c/f", "a/d/g", "h"]

    def test_a_pruned_store_remains_usable(self, store: Store) -> None:
        store.prune("")
        put(store, "a/b/f")
        store.delete("a/b/f")
        for folder in ("a/b", "a", ""):
            store.prune(folder)
        put(store, "a/b/f", b"again")
        store.prune("")
        store.flush()
        assert store.read("a/b/f") == b"again"

    @pytest.mark.parametrize("key", _UNSAFE)
    def test_a_key_that_leaves_the_root_is_refused(self, store: Store, key: str) -> None:
        calls: list[Callable[[str], object]] = [
            store.info,
            store.read,
            store.read_versioned,
            store.create,
            store.adopt,
        ]
        calls += [store.delete, store.delete_prefix, lambda k: store.put_if_absent(k, b"")]
        calls += [lambda k: store.replace(k, b"", ""), *([store.list] if key else [])]
        calls += [lambda k: store.read_into(k, 0, [memoryview(bytearray(1))])]
        for call in calls:
            with pytest.raises(UnsafeError, match="inside"):
                call(key)
        with pytest.raises(UnsafeError, match="temporary"):
            store.create("a/.ucf-b/c")
        assert keys(store) == []

    @pytest.mark.parametrize(
        "name", ["é", "名前", "a b", "%2e%2e", "*", "[a]", "a?b#c", "a:b", "~", "...", "n" * 200]
    )
    def test_any_other_name_is_a_name(self, store: Store, name: str) -> None:
        key = f"{name}/{name}"
        put(store, key, b"abc")
        assert (store.read(key), keys(store), keys(store, name)) == (b"abc", [key], [key])
        store.delete(key)
        assert keys(store) == []
