"""Runs of files against the extents that they stand for, and against files that are written box by box."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest import mock
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.errors import ChecksumError
from ucformat.format import described
from ucformat.format.chunking import Tiling
from ucformat.format.described import ALIGNMENT, Described, DescribedRow, packed_file
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.tensor import FileRun, Piece, TensorInfo, single_extents
from ucformat.reading.execute import execute, place_checksum
from ucformat.reading.plan import ReadItem, make_plan
from ucformat.storage.base import Costs
from ucformat.storage.memory import MemoryStore
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDER = "data/x"


@st.composite
def distributions(draw: st.DrawFn) -> tuple[tuple[int, ...], Distribution]:
    """A shape, and how ranks hold it: in any order, cut along one dim or two, once or twice, or copied."""
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 8, 16, 40]), min_size=1, max_size=3)))
    sizes = sizes if math.prod(sizes) <= 256 else sizes[:1]
    count = math.prod(sizes)
    order = draw(st.sampled_from(["rows", "columns", "strided", "any", "backwards"]))
    ranks = np.arange(count)
    if order == "columns":
        ranks = ranks.reshape(sizes[::-1]).T.reshape(-1)
    elif order == "strided":
        ranks = 3 * ranks + 5
    elif order == "any":
        ranks = np.array(draw(st.permutations(range(count))))
    elif order == "backwards":
        ranks = ranks[::-1]
    mesh = RankMesh.of(sizes, [int(r) for r in ranks])
    shape = tuple(
        draw(st.lists(st.sampled_from([1, 2, 7, 16, 24, 64, 100, 130]), min_size=1, max_size=3))
    )
    shape = shape if math.prod(shape) <= 20000 else shape[:2]
    axes = draw(st.permutations(range(len(sizes))))[: draw(st.integers(1, len(sizes)))]
    return shape, Distribution(
        mesh, tuple(Cut(draw(st.integers(0, len(shape) - 1)), axis) for axis in axes)
    )


@st.composite
def saved(draw: st.DrawFn) -> tuple[Described, list[np.ndarray[Any, Any]], MemoryStore]:
    """Some tensors of one distribution, their values, and the files of all ranks."""
    shape, d = draw(distributions())
    dtype = draw(st.sampled_from(["uint8", "float32"]))
    tile = tuple(draw(st.sampled_from([1, 2, 3, 4, 8, 200])) for _ in shape)
    infos = [TensorInfo(f"t{n}", "weight", dtype, shape) for n in range(draw(st.integers(1, 3)))]
    rows = [DescribedRow(n, d, draw(st.integers(0, d.copies - 1)), tile) for n in range(len(infos))]
    values = [
        np.random.default_rng(n)
        .integers(0, 256, (*shape, infos[0].itemsize), np.uint8)
        .view(dtype)[..., 0]
        for n in range(len(infos))
    ]
    files: dict[int, bytearray] = {}
    tiling = Tiling(tile, infos[0].itemsize)
    for row, value in zip(rows, values, strict=True):
        for coordinate in product(*map(range, d.mesh.sizes)):
            rank = int(d.mesh.ranks[coordinate])
            file = files.setdefault(rank, bytearray())
            for box in d.boxes(shape, coordinate) if d.copy_of(coordinate) == row.writer else ():
                file += bytes(-len(file) % ALIGNMENT)
                for part in tiling.boxes(box):
                    data = np.ascontiguousarray(value[slices(part)]).tobytes()
                    crc = checksum(
                        memoryview(data), place_checksum(packed_file(FOLDER, rank), len(file))
                    )
                    file += data + crc.to_bytes(4, "little")
    store = MemoryStore(uuid4().hex)
    for rank, content in files.items():
        store.put_if_absent(packed_file(FOLDER, rank), bytes(content))
    return Described(rows, infos, FOLDER), values, store


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    if draw(st.booleans()):
        start = (0,) * len(shape)
    return Box(
        start,
        tuple(
            draw(st.one_of(st.just(n - a), st.integers(1, n - a)))
            for n, a in zip(shape, start, strict=True)
        ),
    )


def each(found: Sequence[Any]) -> Iterator[Any]:
    """The extents for which runs stand."""
    for e in found:
        yield from single_extents(
            map(e.tiles, range(len(e.files))) if isinstance(e, FileRun) else [e]
        )


@given(saved(), st.data(), st.sampled_from([1, 8]))
def test_runs_stand_for_the_extents(
    case: tuple[Described, list[np.ndarray[Any, Any]], MemoryStore],
    data: st.DataObject,
    fewest: int,
) -> None:
    found, values, _ = case
    for number, value in enumerate(values):
        within = data.draw(boxes(value.shape))
        with mock.patch.object(described, "_FEWEST", fewest):
            runs = list(found.file_runs(number, within))
        expanded = list(each(runs))
        assert len(expanded) == len(set(expanded))
        assert set(single_extents(found.extents(number, within))) <= set(expanded)
        assert set(expanded) <= set(single_extents(found.extents(number)))
        for run in runs:
            if isinstance(run, FileRun):
                assert run.box.size == sum(run.tiles(n).box.size for n in range(len(run.files)))
                for tiles, others in run.parts(run.box):
                    assert [tiles.file, *others] == list(run.files)


@given(saved(), st.data(), st.sampled_from(["whole", "always", "never"]), st.integers(1, 3))
def test_what_is_read_is_what_was_written(
    case: tuple[Described, list[np.ndarray[Any, Any]], MemoryStore],
    data: st.DataObject,
    verify: Any,
    parts: int,
) -> None:
    found, values, store = case
    costs = data.draw(
        st.sampled_from([Costs(), Costs(request=64, join=32, gap=8), Costs(gap=0, short=0)])
    )
    items: dict[bool, list[ReadItem]] = {True: [], False: []}
    expected: list[tuple[np.ndarray[Any, Any], str]] = []
    for number, value in enumerate(values):
        info = found.infos[number]
        within = data.draw(boxes(value.shape))
        pieces = []
        for _ in range(parts):
            box = data.draw(boxes(within.shape)).shift(within.start)
            order = data.draw(st.permutations(range(len(box.shape))))
            strides = row_major(tuple(box.shape[n] for n in order))
            by_dim = tuple(strides[order.index(n)] for n in range(len(order)))
            pieces.append((len(expected), Piece(box, 0, by_dim)))
            expected.append((value[slices(box)].transpose(order), info.dtype))
        items[True].append(ReadItem(info, list(found.file_runs(number, within)), pieces))
        items[False].append(ReadItem(info, list(found.extents(number, within)), pieces))
    with mock.patch.object(described, "_FEWEST", 2):
        plans = {runs: make_plan(items[runs], verify, costs) for runs in (True, False)}
    memories = [np.zeros(v.size * v.itemsize, np.uint8) for v, _ in expected]
    execute(plans[True], store, memories, [str(n) for n in range(len(memories))], threads=1)
    for memory, (value, _) in zip(memories, expected, strict=True):
        assert memory.tobytes() == np.ascontiguousarray(value).tobytes()
    for what in ("bytes_needed", "bytes_unverified"):
        assert getattr(plans[True], what) == getattr(plans[False], what)
    # What several pieces want of a tile is read once where the files are listed, and for each piece
    # where they are not.
    assert plans[True].bytes_besides >= plans[False].bytes_besides
    if parts == 1:
        assert plans[True].bytes_besides == plans[False].bytes_besides
    listed = list(plans[True].each())
    assert [(r.file, r.offset) for r in listed] == sorted((r.file, r.offset) for r in listed)
    assert sum(r.count for r in listed) == plans[True].ranges
    assert sum(r.total for r in listed) == plans[True].bytes_read == sum(plans[True].files.values())
    assert plans[True].ends == {
        f: max(r.end for r in listed if r.file == f) for f in {r.file for r in listed}
    }
    assert plans[True].ends == plans[False].ends
    assert plans[True].ranges <= max(
        1.1 * plans[False].ranges, plans[False].ranges + 2 * len(values) * parts * 16
    )


def test_a_thousand_ranks_take_a_few_requests() -> None:
    mesh = RankMesh.of((1000,), range(1000))
    d = Distribution(mesh, (Cut(0, 0),))
    infos = [TensorInfo(f"t{n}", "weight", "float32", (4000, 15)) for n in range(2)]
    found = Described([DescribedRow(n, d, 0, (4, 15)) for n in range(2)], infos, FOLDER)
    box = Box((10, 0), (2001, 15))
    items = [
        ReadItem(i, found.file_runs(n, box), [(n, Piece(box, 0, (15, 1)))])
        for n, i in enumerate(infos)
    ]
    plan = make_plan(items)
    assert len(plan.requests) <= 3
    assert len(plan.files) == plan.ranges == 501  # the tensors follow each other in each file


def test_runs_of_other_files_are_not_joined() -> None:
    """Two tensors that follow each other in the files, of which one is read from more files."""
    d = Distribution(RankMesh.of((40,), range(40)), (Cut(0, 0),))
    infos = [TensorInfo(f"t{n}", "weight", "float32", (40, 15)) for n in range(2)]
    found = Described([DescribedRow(n, d, 0, (1, 15)) for n in range(2)], infos, FOLDER)
    few, many = Box((0, 0), (10, 15)), Box((0, 0), (20, 15))
    for first, second in ((few, many), (many, few)):
        items = [
            ReadItem(info, found.file_runs(n, box), [(n, Piece(box, 0, (15, 1)))])
            for n, (info, box) in enumerate(zip(infos, (first, second), strict=True))
        ]
        plan = make_plan(items)
        assert sorted(len(r.others) for r in plan.requests) == [9, 19]
        assert (plan.ranges, len(plan.files)) == (30, 20)


def test_a_damaged_tile_is_found_in_any_file() -> None:
    mesh = RankMesh.of((16,), range(16))
    info = TensorInfo("t", "weight", "uint8", (64,))
    found = Described([DescribedRow(0, Distribution(mesh, (Cut(0, 0),)), 0, (8,))], [info], FOLDER)
    box = Box((0,), (64,))
    for damaged in (0, 7, 15):
        store = MemoryStore(uuid4().hex)
        for rank in range(16):
            data = bytes([rank] * 4)
            crc = checksum(memoryview(data), place_checksum(packed_file(FOLDER, rank), 0)).to_bytes(
                4, "little"
            )
            store.put_if_absent(
                packed_file(FOLDER, rank),
                (b"\xff" if rank == damaged else data[:1]) + data[1:] + crc,
            )
        plan = make_plan([ReadItem(info, found.file_runs(0, box), [(0, Piece(box, 0, (1,)))])])
        with pytest.raises(ChecksumError, match=f"rank-{damaged:05d}.bin"):
            execute(plan, store, [np.zeros(64, np.uint8)], ["t"])
