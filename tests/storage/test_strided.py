"""Strided memory, by the compiled functions and by those in Python."""

from __future__ import annotations

import errno
import math
import os
import random
import resource
import threading
import zlib
from array import array
from itertools import accumulate, pairwise, product
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.test_stores import TestMemoryStore as MemoryStoreTests
from ucformat.storage import strided
from ucformat.storage.local import LocalStore
from ucformat.testing.stores import StoreTests

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ucformat.storage.base import Store

WAYS = [
    pytest.param(
        True,
        id="native",
        marks=pytest.mark.skipif(
            not strided.NATIVE,
            reason="ucformat._native was not built (it needs x86-64 Linux and a C compiler): pip install -e .",
        ),
    ),
    pytest.param(False, id="python"),
]


@pytest.fixture(params=WAYS, autouse=True)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(strided, "NATIVE", request.param)
    return bool(request.param)


class TestLocalStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path)


class TestMemoryStore(MemoryStoreTests):
    pass


@st.composite
def views(draw: st.DrawFn) -> NDArray[np.uint8]:
    """A part of an array, of which the last dim is contiguous."""
    shape = [*draw(st.lists(st.integers(1, 6), max_size=3)), draw(st.integers(1, 700))]
    array = (
        np.frombuffer(random.Random(len(shape)).randbytes(int(np.prod(shape))), np.uint8)
        .reshape(shape)
        .copy()
    )
    index = []
    for n in shape[:-1]:
        begin, step = draw(st.integers(0, n)), draw(st.integers(1, 3))
        index.append(slice(begin, draw(st.integers(begin, n)), step))
    begin = draw(st.integers(0, shape[-1]))
    return array[(*index, slice(begin, draw(st.integers(begin, shape[-1]))))]


@given(view=views(), before=st.integers(0, (1 << 32) - 1), flip=st.booleans())
def test_checksums_are_those_of_the_bytes_in_order(
    view: NDArray[np.uint8], before: int, *, flip: bool
) -> None:
    if flip and view.ndim > 1:
        view = view[::-1]
    assert strided.checksum(view.data, before) == crc32c(view.tobytes(), before)
    assert strided.crc32(view.data, before) == zlib.crc32(view.tobytes(), before)
    assert b"".join(strided.rows(view.data)) == view.tobytes()


def test_checksums_of_every_length_and_alignment() -> None:
    for nbytes in [*range(700), 4096, 4097, 65_535, 1 << 20, (1 << 20) + 77]:
        data = random.Random(nbytes).randbytes(nbytes + 64)
        for skip in (0, 1, 7, 63):
            case = f"{nbytes} bytes from {skip}"
            part = memoryview(data)[skip : skip + nbytes]
            head, tail = part[: nbytes // 3], part[nbytes // 3 :]
            assert strided.checksum(part) == crc32c(part), case
            assert strided.checksum(tail, strided.checksum(head)) == crc32c(part), case
            assert strided.crc32(part) == zlib.crc32(part), case
            assert strided.crc32(tail, strided.crc32(head)) == zlib.crc32(part), case


def test_known_checksums() -> None:
    assert (
        strided.checksum(b"123456789") == 0xE3069283
    )  # the check value of CRC-32C, RFC 3720's polynomial
    assert strided.crc32(b"123456789") == 0xCBF43926
    assert strided.checksum(b"") == strided.crc32(b"") == 0


def test_checksums_of_arrays_of_any_item_type() -> None:
    array = np.arange(30, dtype="<f8").reshape(5, 6)
    assert strided.checksum(array.data) == crc32c(array.tobytes())
    assert strided.checksum(np.float32(3.5).data) == crc32c(np.float32(3.5).tobytes())


@given(view=views())
def test_rows_are_read_and_filled_in_order(view: NDArray[np.uint8]) -> None:
    data = os.urandom(view.size + 5)
    fd = os.memfd_create("rows")
    try:
        os.pwrite(fd, data, 0)
        assert strided.read_scattered(fd, 3, [view.data]) == view.size
        assert view.tobytes() == data[3 : 3 + view.size]
        strided.fill([view.data], memoryview(data))
        assert view.tobytes() == data[: view.size]
        other = np.zeros(view.size + 20, np.uint8)
        assert strided.read_scattered(fd, 0, [view.data, other.data]) == view.size + 5
        assert view.tobytes() + other[:5].tobytes() == data
    finally:
        os.close(fd)


@st.composite
def columns(draw: st.DrawFn) -> strided.Column:
    """Chunks anywhere in memory, in any order, and perhaps what is behind each."""
    run, count, rows = draw(st.integers(1, 5000)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    wide = run + draw(st.integers(0, 70))
    memory = np.zeros((count, rows, wide), np.uint8)[:: draw(st.sampled_from([1, -1]))]
    first = draw(st.integers(0, wide - run))
    chunks = memory[:, :, first : first + run] if rows > 1 else memory[:, 0, first : first + run]
    gap = draw(st.sampled_from([0, 4, 17]))
    return strided.Column(chunks, memoryview(bytearray(gap * count)) if gap else None)


@given(given_columns=st.lists(columns(), min_size=1, max_size=4), data=st.data())
def test_columns_of_chunks_are_read_and_filled_as_their_buffers(
    given_columns: list[strided.Column], data: st.DataObject
) -> None:
    buffers = strided.ChunkBuffers(given_columns)
    content = random.Random(len(buffers)).randbytes(buffers.nbytes)
    assert [b.nbytes for b in buffers] == [buffers[k].nbytes for k in range(len(buffers))]
    assert strided.nbytes_of(buffers) == sum(b.nbytes for b in buffers[:])
    before = data.draw(
        st.lists(st.integers(0, (1 << 32) - 1), min_size=len(buffers), max_size=len(buffers))
    )
    ends = [0, *accumulate(b.nbytes for b in buffers)]
    parts = [content[a:b] for a, b in pairwise(ends)]
    expected = [crc32c(part, crc) for part, crc in zip(parts, before, strict=True)]
    with TemporaryFile() as file:
        file.write(content)
        file.flush()
        for act in (
            lambda crcs: strided.read_scattered(file.fileno(), 0, buffers, crcs),
            lambda crcs: strided.fill(buffers, memoryview(content), crcs),
        ):
            for buffer in buffers:
                np.asarray(buffer)[...] = 0
            crcs = array("I", before)
            act(crcs)
            assert [bytes(b) for b in map(strided_bytes, buffers)] == parts
            assert crcs.tolist() == expected


@pytest.mark.parametrize("native", WAYS[:1])
def test_columns_that_are_none_are_refused(native: bool, tmp_path: Path) -> None:
    from ucformat import _native

    assert native
    chunks, behind = np.zeros((3, 8), np.uint8), memoryview(bytearray(12))
    crcs = array("I", [0] * 6)
    (tmp_path / "file").write_bytes(bytes(100))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert _native.read_into(fd, 0, [(chunks, behind)], crcs) == 36
        refused: list[tuple[list[Any], Any]] = [
            ([(chunks[0], behind)], crcs),  # no dim of chunks
            ([(chunks, behind[:5])], crcs),  # not of all alike
            ([(chunks, behind[:0])], crcs),
            ([(chunks[:0], None)], array("I")),
            ([(chunks, behind)], crcs[:5]),
            ([(chunks, None)], crcs),
        ]
        for columns_given, sums in refused:
            with pytest.raises(ValueError, match=r"column|32 bits"):
                _native.read_into(fd, 0, columns_given, sums)
        broken: list[Any] = [
            [chunks],
            [(chunks,)],
            [(chunks[:, ::2], None)],
            [(bytes(9), None)],
        ]
        for case in broken:
            with pytest.raises((TypeError, ValueError, BufferError, SystemError)):
                _native.read_into(fd, 0, case, array("I", [0] * 3))
        assert strided.checksums(bytes(range(16)), 8, 7).tolist() == [
            crc32c(bytes(range(8)), 7),
            crc32c(bytes(range(8, 16)), 7),
        ]
        with pytest.raises(ValueError, match="no items of 8"):
            _native.crc32c_each(bytes(9), 8, 0)
    finally:
        os.close(fd)


def test_nothing_outside_the_rows_is_written() -> None:
    memory = np.full((40, 50), 7, np.uint8)
    tile = memory[3:30, 10:41]
    fd = os.memfd_create("tile")
    try:
        os.pwrite(fd, bytes(tile.size), 0)
        assert strided.read_scattered(fd, 0, [tile.data]) == tile.size
    finally:
        os.close(fd)
    expected = np.full((40, 50), 7, np.uint8)
    expected[3:30, 10:41] = 0
    np.testing.assert_array_equal(memory, expected)


def test_a_read_of_more_bytes_than_the_system_reads_at_once() -> None:
    """Linux reads at most 2 GiB - 4 KiB a call, which ends within a row here."""
    row = np.zeros((3, 100 << 20), np.uint8)[
        ::2
    ]  # every buffer is the same memory: what counts is the last
    tail = bytearray(1000)
    fd = os.memfd_create("large")
    try:
        size = 21 * row.nbytes // 2
        os.ftruncate(fd, size)
        expected = os.urandom(1000)
        os.pwrite(fd, expected, size)
        buffers = [row[k % 2 : k % 2 + 1].data for k in range(21)]
        assert strided.read_scattered(fd, 0, [*buffers, memoryview(tail)]) == size + 1000
        assert tail == expected
    finally:
        os.close(fd)


@pytest.mark.front("native-*", "python-[38]*", "python-10*", "python-70000")
@pytest.mark.parametrize(
    "nbytes", [1, 2, 3, 4, 8, 16, 32, 384, 1023, 1024, 1025, 70_000, (1 << 20) - 1, 1 << 20]
)
def test_more_rows_than_one_call_takes(nbytes: int) -> None:
    """Tiles with short or long rows, and between them the four bytes of a checksum."""
    count = max(1, 300_000 // nbytes // 9)
    memory = np.zeros((3, count, 5, nbytes + 1), np.uint8)
    tiles = [memory[0, :, ::2, :nbytes], memory[1, :, 1:4, :nbytes], memory[2, :, :3, :nbytes]]
    stored = [bytearray(4) for _ in tiles]
    buffers = [
        b for tile, four in zip(tiles, stored, strict=True) for b in (tile.data, memoryview(four))
    ]
    data = os.urandom(3 * (tiles[0].size + 4))
    fd = os.memfd_create("rows")
    try:
        os.pwrite(fd, data, 11)
        for _ in range(2):  # two ways to read such rows take turns
            memory[...] = 0
            crcs = list(range(6))
            assert strided.read_scattered(fd, 11, buffers, crcs) == len(data)
            assert crcs == [crc32c(strided_bytes(b), k) for k, b in enumerate(buffers)]
            assert b"".join(map(strided_bytes, buffers)) == data
    finally:
        os.close(fd)
    memory[...] = 0
    again = list(range(6))
    strided.fill(buffers, memoryview(data), again)
    assert again == crcs
    assert b"".join(map(strided_bytes, buffers)) == data
    for tile in tiles:
        tile[...] = 0
    assert not memory.any()


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize(
    "nbytes", [100, 511, 2047, 2048, 4096, 5000, (256 << 10) - 1, 256 << 10, 600_000]
)
def test_rows_at_any_place_within_their_page(nbytes: int, *, verified: bool) -> None:
    """How bytes are read depends on where in a page they are in the file and in memory."""
    count = 1 if nbytes == 600_000 else max(2, 9000 // nbytes)
    pitch = nbytes + 200
    memory = np.zeros(4096 + (count + 1) * pitch, np.uint8)
    data = os.urandom(count * nbytes + 4200)
    fd = os.memfd_create("rows")
    try:
        os.pwrite(fd, data, 0)
        for offset, place in product((0, 1, 31, 64, 4090, 4095), (0, 1, 17, 63, 64)):
            memory[...] = 7
            begin = (offset + place - memory.ctypes.data) % 4096
            rows = memory[begin : begin + count * pitch].reshape(count, pitch)[:, :nbytes]
            expected = data[offset : offset + rows.size]
            crcs = [5] if verified else None
            assert strided.read_scattered(fd, offset, [rows.data], crcs) == len(expected)
            assert rows.tobytes() == expected
            assert crcs is None or crcs == [crc32c(expected, 5)]
            rows[...] = 7
            assert (memory == 7).all()
    finally:
        os.close(fd)


def strided_bytes(buffer: memoryview) -> bytes:
    return np.asarray(buffer).tobytes()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1000, (1 << 20) + 7])
def test_bytes_are_copied_to_and_from_any_alignment(nbytes: int) -> None:
    data = os.urandom(nbytes + 70)
    for skip in (0, 1, 5, 64):
        memory = bytearray(nbytes + 70)
        strided.fill([memoryview(memory)[skip : skip + nbytes]], memoryview(data)[3:])
        assert memory == bytes(skip) + data[3 : 3 + nbytes] + bytes(70 - skip)
    with pytest.raises(ValueError, match="larger"):
        strided.fill([memoryview(memory)], memoryview(data)[1:])


@pytest.mark.parametrize("nbytes", [0, 1, (256 << 10) + 1, (2 << 20) + (64 << 10) + 5])
def test_all_of_a_buffer_is_written(tmp_path: Path, nbytes: int) -> None:
    data = np.frombuffer(random.Random(1).randbytes(nbytes * 4), "<u4")
    with (tmp_path / "f").open("wb", buffering=0) as file:
        strided.write_all(file.fileno(), b"head")
        strided.write_all(file.fileno(), data.data)
    assert (tmp_path / "f").read_bytes() == b"head" + data.tobytes()


def test_all_of_a_buffer_is_written_to_a_pipe() -> None:
    """Which has no position."""
    data = random.Random(1).randbytes((256 << 10) + 3)
    end, begin = os.pipe()
    with os.fdopen(end, "rb") as reader:
        thread = threading.Thread(
            target=lambda: (strided.write_all(begin, data), os.close(begin))  # type: ignore[func-returns-value]
        )
        thread.start()
        assert reader.read() == data
        thread.join()


def test_calls_that_write_end_at_multiples_of_their_size(native: bool, tmp_path: Path) -> None:
    """So that the page cache has large folios."""
    if not native:
        pytest.skip("only the compiled function does")

    def calls() -> int:
        counts = Path("/proc/thread-self/io").read_text(encoding="ascii")
        return int(counts.split("syscw: ")[1].split()[0])

    data = bytes(1 << 20)
    with (tmp_path / "f").open("wb", buffering=0) as file:
        for expected in (4, 4):
            before = calls()
            strided.write_all(file.fileno(), data)
            assert calls() - before == expected
        strided.write_all(file.fileno(), b"head")
        before = calls()
        strided.write_all(file.fileno(), data)
        assert calls() - before == 5
    assert (tmp_path / "f").read_bytes() == 2 * data + b"head" + data


def test_a_file_that_may_not_grow_holds_what_was_written_until_then(tmp_path: Path) -> None:
    data, most = random.Random(1).randbytes(1 << 20), (256 << 10) + 7
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "f").open("wb", buffering=0) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                strided.write_all(file.fileno(), data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "f").read_bytes() == data[:most]


def test_what_cannot_be_read_into_is_refused() -> None:
    columns = np.zeros((4, 6), np.uint8)[:, ::2]
    frozen = memoryview(b"abcdef")
    fd = os.memfd_create("refused")
    try:
        os.pwrite(fd, b"123456789012", 0)
        with pytest.raises((ValueError, TypeError, BufferError)):
            strided.read_scattered(fd, 0, [columns.data])
        with pytest.raises(BufferError):
            strided.read_scattered(fd, 0, [frozen])
        with pytest.raises((ValueError, BufferError)):
            strided.fill([frozen], memoryview(b"123456789012"))
        with pytest.raises((ValueError, TypeError, BufferError)):
            strided.checksum(columns.data)
    finally:
        os.close(fd)
    assert bytes(frozen) == b"abcdef"
    with pytest.raises(OSError, match="Bad file descriptor"):
        strided.read_scattered(fd, 0, [memoryview(bytearray(3))])


def test_threads_read_at_once(tmp_path: Path) -> None:
    data = os.urandom(8 << 20)
    (tmp_path / "f").write_bytes(data)
    store = LocalStore(tmp_path)
    memory = np.zeros((4, 2, 1 << 20), np.uint8)

    def read(part: int) -> None:
        for _ in range(20):
            store.read_into("f", part * memory[0].nbytes, [memory[part].data])
            assert strided.checksum(memory[part].data) == crc32c(memory[part].tobytes())

    threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert memory.tobytes() == data


@pytest.mark.parametrize("native", WAYS)
@given(data=st.data())
def test_a_copy_has_the_elements_of_its_source(native: bool, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    dtype = data.draw(st.sampled_from(["u1", "<u2", "<u8", "V16"]))
    target, source = (strided_array(data, shape, dtype) for _ in range(2))
    source[...] = np.frombuffer(np.random.default_rng(0).bytes(source.nbytes), dtype).reshape(shape)
    expected = source.tobytes()
    with mock.patch.object(strided, "NATIVE", native):
        strided.copy(target, source)
    assert target.tobytes() == source.tobytes() == expected


def strided_array(data: st.DataObject, shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    """An array of any strides, at any address."""
    order = data.draw(st.permutations(range(len(shape))))
    steps = data.draw(st.tuples(*(st.sampled_from([1, 1, 2]) for _ in shape)))
    outer = [shape[d] * steps[d] for d in order]
    memory = bytearray(1 + math.prod(outer) * np.dtype(dtype).itemsize)
    index: tuple[Any, ...] = (..., *(slice(None, None, steps[d]) for d in order))
    array: NDArray[np.generic] = np.ndarray(outer, dtype, memory, 1)[index]
    return array.transpose(np.argsort(order)) if shape else array


@pytest.mark.parametrize("native", WAYS)
def test_a_copy_to_an_array_of_another_size_is_refused(native: bool) -> None:
    with (
        mock.patch.object(strided, "NATIVE", native),
        pytest.raises(ValueError, match=r"size|shape"),
    ):
        strided.copy(np.zeros((2, 3), np.uint8), np.zeros((3, 3), np.uint8))
