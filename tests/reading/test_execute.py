"""Plans and their execution against NumPy: any extents, any pieces, every verification mode."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from ucformat.errors import ChecksumError, MissingData
from ucformat.format.chunking import Grid, Tiling
from ucformat.format.shard import write_shard
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Block, Extent, FileRun, Piece, TensorInfo, Tiles
from ucformat.reading import execute as reading
from ucformat.reading.execute import execute, memory_of
from ucformat.reading.plan import ReadItem, Verify, make_plan
from ucformat.storage.base import Costs
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES = {1: "uint8", 2: "uint16", 4: "float32", 8: "float64", 16: "complex128"}
VERIFY: list[Verify] = ["whole", "always", "never"]
COSTS = st.sampled_from(
    [Costs(), Costs(0, 50, 20), Costs(7, 1 << 20, 0), Costs(40, 1 << 20, 1 << 20)]
)
SIZES = st.tuples(
    st.sampled_from([1, 2]), st.sampled_from([0, 16, 8192]), st.sampled_from([1, 40, 1 << 20])
)


def random_tensor(shape: tuple[int, ...], itemsize: int, seed: int = 0) -> np.ndarray:
    data = np.random.default_rng(seed).bytes(math.prod(shape) * itemsize)
    return np.frombuffer(data, f"V{itemsize}").reshape(shape)


def put(store: MemoryStore, key: str, data: bytes) -> None:
    with store.create(key) as out:
        out.write(data)


def store_tiles(store: MemoryStore, a: np.ndarray, grid: Grid) -> list[Tiles]:
    """Write a tensor's shards and give its extents."""
    found = []
    for shard in grid.shards():
        key = "s" + "_".join(map(str, shard))

        def fill(piece: Piece, raw: NDArray[np.uint8]) -> None:
            strides = tuple(s * grid.itemsize for s in piece.strides)
            np.ndarray(piece.box.shape, a.dtype, raw, strides=strides)[...] = a[slices(piece.box)]

        write_shard(store, key, grid, shard, fill)
        found.append(grid.tiles(shard, key))
    return found


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], int, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 13), max_size=4)))
    itemsize = draw(st.sampled_from(list(DTYPES)))
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.just((0,) * len(shape)) | st.tuples(*(st.integers(0, n) for n in shape)))
        if draw(st.booleans()):
            boxes.append(Box(start, tuple(n - a for n, a in zip(shape, start, strict=True))))
            continue
        boxes.append(
            Box(
                start, tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True))
            )
        )
    return shape, itemsize, boxes


def check_reads(
    store: MemoryStore,
    a: np.ndarray,
    extents: list[Extent] | list[Tiles],
    boxes: list[Box],
    verify: Verify,
    costs: Costs,
    sizes: tuple[int, int, int],
) -> None:
    """Each box is read exactly into a strided buffer, and the bytes read are those of the plan.

    Of `sizes`, the first is the distance of the elements of a row, the others replace SHORT_ROW and
    _MIN_RUN.
    """
    step, short_row, min_run = sizes
    info = TensorInfo("t", "weight", DTYPES[a.dtype.itemsize], a.shape)
    spaces = [np.zeros([2 * n for n in b.shape], a.dtype) for b in boxes]
    every_other: list[Any] = [
        (
            ...,
            *(slice(0, 2 * n, 2) for n in b.shape[:-1]),
            *(slice(0, step * n, step) for n in b.shape[-1:]),
        )
        for b in boxes
    ]
    outs = [s[index] for s, index in zip(spaces, every_other, strict=True)]
    pieces = [
        (k, Piece(b, 0, tuple(s // a.dtype.itemsize for s in o.strides)))
        for k, (b, o) in enumerate(zip(boxes, outs, strict=True))
    ]
    plan = make_plan([ReadItem(info, extents, pieces)], verify, costs)
    recorder = RecordingStore(store)
    with mock.patch.multiple(reading, SHORT_ROW=short_row, _MIN_RUN=min_run):
        execute(plan, recorder, [memory_of(o) for o in outs], ["t"] * len(outs), threads=2)
    for b, o, space in zip(boxes, outs, spaces, strict=True):
        assert o.tobytes() == a[slices(b)].tobytes()
        o[...] = np.zeros((), a.dtype)
        assert not any(space.tobytes())  # what lies between is not written
    assert recorder.nbytes == plan.bytes_read
    assert plan.bytes_needed == sum(b.size for b in boxes) * a.dtype.itemsize
    if verify == "always" and extents and isinstance(extents[0], Tiles):
        assert plan.bytes_unverified == 0


@settings(max_examples=150)
@given(
    case=cases(),
    target=st.sampled_from([8, 64, 300]),
    verify=st.sampled_from(VERIFY),
    costs=COSTS,
    sizes=SIZES,
)
def test_chunked_tensors_read_exactly(
    case: tuple[tuple[int, ...], int, list[Box]],
    target: int,
    verify: Verify,
    costs: Costs,
    sizes: tuple[int, int, int],
) -> None:
    shape, itemsize, boxes = case
    a = random_tensor(shape, itemsize)
    store = MemoryStore("tiles")
    extents = store_tiles(store, a, Grid.of(shape, itemsize, target, 4 * target))
    check_reads(store, a, extents, boxes, verify, costs, sizes)


@settings(max_examples=150)
@given(
    case=cases(),
    cuts=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=4),
    verify=st.sampled_from(VERIFY),
    order=st.permutations(range(4)),
    costs=COSTS,
    sizes=SIZES,
    seal=st.booleans(),
)
def test_raw_extents_read_exactly(
    case: tuple[tuple[int, ...], int, list[Box]],
    cuts: list[tuple[int, float]],
    verify: Verify,
    order: list[int],
    costs: Costs,
    sizes: tuple[int, int, int],
    seal: bool,
) -> None:
    """Extents in any cut of the tensor, at odd offsets, their dims in any order in the file."""
    shape, itemsize, boxes = case
    a = random_tensor(shape, itemsize)
    parts = [Box.whole(shape)]
    for dim, where in cuts:
        if dim < len(shape):
            at = int(where * shape[dim])
            parts = [q for p in parts for q in cut(p, dim, at)]
    data, extents = bytearray(b"head"), []
    axes = [d for d in order if d < len(shape)]
    for p in parts:
        block = np.ascontiguousarray(a[slices(p)].transpose(axes)).tobytes()
        inner = dict(zip(axes, row_major(tuple(p.shape[d] for d in axes), itemsize), strict=True))
        sealed = Block(len(data), len(block), crc32c(block)) if seal else None
        extents.append(
            Extent(p, "f", len(data), tuple(inner[d] for d in range(len(shape))), sealed)
        )
        data += block + b"gap"
    store = MemoryStore("raw")
    put(store, "f", bytes(data))
    check_reads(store, a, extents, boxes, verify, costs, sizes)


def cut(p: Box, dim: int, at: int) -> list[Box]:
    n = at - p.start[dim]
    if not 0 < n < p.shape[dim]:
        return [p]
    low = Box(p.start, (*p.shape[:dim], n, *p.shape[dim + 1 :]))
    start = (*p.start[:dim], at, *p.start[dim + 1 :])
    return [low, Box(start, (*p.shape[:dim], p.shape[dim] - n, *p.shape[dim + 1 :]))]


@pytest.mark.parametrize("verify", VERIFY)
def test_a_flipped_bit_is_found_on_whole_chunks(verify: Verify) -> None:
    a = random_tensor((64, 64), 4)
    store = MemoryStore("flip")
    tiles = store_tiles(store, a, Grid.of(a.shape, 4, 1024, 1 << 20))
    data = bytearray(store.read("s0_0"))
    data[5000] ^= 4
    put(store, "s0_0", bytes(data))
    info = TensorInfo("layer.weight", "exp_avg", "float32", a.shape)
    out = np.empty(a.shape, a.dtype)
    plan = make_plan([ReadItem(info, tiles, [(0, Piece(Box.whole(a.shape), 0, (64, 1)))])], verify)
    if verify == "never":
        execute(plan, store, [memory_of(out)], ["layer.weight (exp_avg)"])
        assert out.tobytes() != a.tobytes()
        return
    with pytest.raises(
        ChecksumError, match=r"layer\.weight \(exp_avg\): the chunk at bytes 4964:5028 of s0_0"
    ):
        execute(plan, store, [memory_of(out)], ["layer.weight (exp_avg)"])


def test_gaps_between_blocks_of_a_request_are_left_out() -> None:
    a = random_tensor((2, 16), 4, 9)
    store = MemoryStore("gaps")
    rows = [row.tobytes() + crc32c(row.tobytes()).to_bytes(4, "little") for row in a]
    put(store, "f", rows[0] + b"\xff" * 12 + rows[1])
    extents = [
        Extent(Box((k, 0), (1, 16)), "f", at, (64, 4), Block(at, 64)) for k, at in ((0, 0), (1, 80))
    ]
    info = TensorInfo("x", "weight", "float32", a.shape)
    plan = make_plan([ReadItem(info, extents, [(0, Piece(Box.whole(a.shape), 0, (16, 1)))])])
    (request,) = plan.requests
    assert [len(c.shape) for c in request.copies] == [1, 1]
    out = np.empty(a.shape, a.dtype)
    with mock.patch.object(reading, "_copy_out"):
        execute(plan, store, [memory_of(out)], ["x"])
    assert out.tobytes() == a.tobytes()


def test_a_hole_is_an_error_that_names_tensor_and_box() -> None:
    info = TensorInfo("x", "weight", "float32", (4, 4))
    extents = [Extent(Box((0, 0), (3, 4)), "f", 0, (16, 4))]
    with pytest.raises(
        MissingData, match=r"x \(weight\): 4 elements of \[0:4, 0:4\] are stored in no file"
    ):
        make_plan([ReadItem(info, extents, [(0, Piece(Box.whole((4, 4)), 0, (4, 1)))])])


def test_replicas_are_read_once() -> None:
    info = TensorInfo("x", "weight", "float32", (4, 4))
    extents = [Extent(Box.whole((4, 4)), f"rank{k}", 0, (16, 4)) for k in range(3)]
    plan = make_plan([ReadItem(info, extents, [(0, Piece(Box.whole((4, 4)), 0, (4, 1)))])])
    assert plan.bytes_read == 64
    assert list(plan.files) == ["rank0"]


def test_one_request_stands_for_all_files_of_a_run() -> None:
    info, files = TensorInfo("x", "weight", "uint8", (12, 2)), tuple(f"rank{n}" for n in range(4))
    run = FileRun(Tiles(Box.whole((3, 2)), files[0], 0, (3, 2), 1, (0, 1)), 0, files)
    box = Box((3, 0), (9, 2))
    plan = make_plan([ReadItem(info, [run], [(0, Piece(box, 0, (2, 1)))])], verify="never")
    assert [(r.file, r.others) for r in plan.requests] == [("rank1", ("rank2", "rank3"))]
    assert plan.files == dict.fromkeys(files[1:], 6)
    assert (plan.ranges, plan.bytes_read, plan.bytes_unverified) == (3, 18, 18)
    checked = make_plan([ReadItem(info, [run], [(0, Piece(box, 0, (2, 1)))])])
    assert (checked.bytes_read, checked.bytes_besides, checked.bytes_unverified) == (30, 12, 0)


@given(st.data(), st.sampled_from(VERIFY), COSTS)
def test_tensors_that_lie_alike_are_planned_as_each_alone(
    data: st.DataObject, verify: Verify, costs: Costs
) -> None:
    items = []
    shapes = [tuple(data.draw(st.integers(1, 9)) for _ in range(2)) for _ in range(2)]
    for n in range(data.draw(st.integers(2, 6))):
        shape = data.draw(st.sampled_from(shapes))
        info = TensorInfo(
            f"t{n}", "weight", data.draw(st.sampled_from(["uint8", "float32"])), shape
        )
        tiling = Tiling(data.draw(st.sampled_from([(1, 2), (4, 9), (9, 9)])), info.itemsize)
        box = data.draw(st.sampled_from([Box.whole(shape), Box((0, 0), (1, shape[1]))]))
        offset = 64 * data.draw(st.integers(0, 9))
        tiles = list(tiling.runs(Box.whole(shape), f"file{n}", offset))
        items.append(ReadItem(info, tiles, [(n, Piece(box, 0, row_major(box.shape)))]))
    together = make_plan(items, verify, costs)
    alone = [make_plan([item], verify, costs) for item in items]
    assert list(together.requests) == [r for plan in alone for r in plan.requests]
    assert together.bytes_unverified == sum(plan.bytes_unverified for plan in alone)
    assert together.bytes_read == sum(plan.bytes_read for plan in alone)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 4104), (2056, 2048)])
def test_tensor_parallel_slices_read_only_what_they_need(
    shape: tuple[int, int], degree: int, dim: int
) -> None:
    grid = Grid.of(shape, 4)
    info = TensorInfo("x", "weight", "float32", shape)
    tiles = [grid.tiles(s, f"s{s}") for s in grid.shards()]
    n = shape[dim] // degree
    for rank in range(degree):
        start = tuple(rank * n if d == dim else 0 for d in range(2))
        box = Box(start, tuple(n if d == dim else shape[d] for d in range(2)))
        for verify in VERIFY:
            plan = make_plan(
                [ReadItem(info, tiles, [(0, Piece(box, 0, row_major(box.shape)))])], verify
            )
            assert plan.bytes_read / plan.bytes_needed <= 1.02
            assert verify == "never" or plan.bytes_unverified == 0


@pytest.mark.parametrize("world", range(1, 8))
@pytest.mark.parametrize("shape", [(4096, 1024), (1027, 4096), (4 << 20,), (1000, 64, 129)])
def test_cuts_of_the_first_dim_read_only_what_they_need(shape: tuple[int, ...], world: int) -> None:
    grid = Grid.of(shape, 4)
    info = TensorInfo("x", "weight", "float32", shape)
    tiles = [grid.tiles(s, f"s{s}") for s in grid.shards()]
    step = -(-shape[0] // world)
    for begin in range(0, shape[0], step):
        box = Box((begin, *[0] * (len(shape) - 1)), (min(step, shape[0] - begin), *shape[1:]))
        plan = make_plan([ReadItem(info, tiles, [(0, Piece(box, 0, row_major(box.shape)))])])
        assert plan.bytes_read / plan.bytes_needed <= 1.02


class TestAlike:
    """Tensors that lie alike in a file, each in one tile, share the objects by which planning tells that."""

    BOX, CHUNK, STEPS = Box((0,), (6,)), (6,), (28,)

    def items(self, store: MemoryStore, gaps: list[int]) -> tuple[list[ReadItem], list[np.ndarray]]:
        """Write a tensor after each gap, and a piece for each; the first and the last in files of their own."""
        data, items, tensors = bytearray(), [], []
        piece = Piece(self.BOX, 2, (1,))
        for n, gap in enumerate(gaps):
            values = np.arange(6, dtype="<f4") + 10 * n
            data += bytes(gap)
            tiles = Tiles(self.BOX, "many", len(data), self.CHUNK, 4, self.STEPS)
            seed = reading.place_checksum("many", len(data))
            data += values.tobytes() + crc32c(values.tobytes(), seed).to_bytes(4, "little")
            items.append(ReadItem(TensorInfo(f"t{n}", "", "float32", (6,)), [tiles], [(n, piece)]))
            tensors.append(values)
        put(store, "many", bytes(data))
        return items, tensors

    @pytest.mark.parametrize("verify", VERIFY)
    @given(gaps=st.lists(st.sampled_from([0, 4, 36, 5000]), min_size=1, max_size=12), costs=COSTS)
    @settings(max_examples=40, deadline=None)
    def test_each_is_filled_and_neighbours_are_one_request(
        self, verify: Verify, gaps: list[int], costs: Costs
    ) -> None:
        store = RecordingStore(inner := MemoryStore("alike"))
        items, tensors = self.items(inner, gaps)
        order = np.random.default_rng(len(gaps)).permutation(len(items))
        plan = make_plan([items[n] for n in order], verify, costs)
        memories = [np.full(40, 255, np.uint8) for _ in items]
        execute(plan, store, memories, [f"t{n}" for n in range(len(items))], threads=1)
        for memory, tensor in zip(memories, tensors, strict=True):
            assert memory[8:32].tobytes() == tensor.tobytes()
            assert set(memory[:8].tolist()) | set(memory[32:].tolist()) == {255}
        assert plan.bytes_needed == 24 * len(gaps)
        assert plan.bytes_unverified == (24 * len(gaps) if verify == "never" else 0)
        assert plan.bytes_besides == (0 if verify == "never" else 4 * len(gaps))
        assert plan.bytes_read == store.nbytes
        if costs == Costs():
            assert plan.ranges == 1 + gaps[1:].count(5000)

    @pytest.mark.parametrize("number", [0, 3, 7])
    def test_a_damaged_one_is_named(self, number: int) -> None:
        store = MemoryStore("alike")
        items, _ = self.items(store, [36] * 8)
        damaged = bytearray(store.read("many"))
        damaged[64 * number + 36 + 5] ^= 1
        store.delete("many")
        put(store, "many", bytes(damaged))
        memories = [np.empty(40, np.uint8) for _ in items]
        with pytest.raises(
            ChecksumError, match=rf"^t{number}: the chunk at bytes {64 * number + 36}:"
        ):
            execute(make_plan(items), store, memories, [f"t{n}" for n in range(8)])
        execute(make_plan(items, "never"), store, memories, [""] * 8)

    def test_what_two_buffers_get_is_read_once(self) -> None:
        """Two threads must not decode a tile into the same memory, as that of tied weights is, at once."""
        items, tensors = self.items(inner := MemoryStore("alike"), [36] * 5)
        store = RecordingStore(inner)
        tied = ReadItem(items[2].info, items[2].extents, [(5, items[2].pieces[0][1])])
        plan = make_plan([*items, tied])
        memories = [np.zeros(40, np.uint8) for _ in range(6)]
        execute(plan, store, memories, [""] * 6)
        for memory, tensor in zip(memories, [*tensors, tensors[2]], strict=True):
            assert memory[8:32].tobytes() == tensor.tobytes()
        ranges = sorted((r.offset, r.offset + r.nbytes) for r in plan.requests)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert plan.bytes_read == store.nbytes

    def test_strided_pieces_and_parts_of_tiles(self) -> None:
        store = MemoryStore("alike")
        items, tensors = self.items(store, [0] * 5)
        strided = Piece(self.BOX, 0, (2,))
        first, middle = Piece(Box((0,), (4,)), 0, (1,)), Piece(Box((1,), (3,)), 0, (1,))
        parts = [(part, how) for part in (first, middle) for how in VERIFY]
        for piece, verify in ((strided, "whole"), *parts):
            moved = [ReadItem(i.info, i.extents, [(n, piece)]) for n, i in enumerate(items)]
            memories = [np.zeros(48, np.uint8) for _ in items]
            execute(make_plan(moved, verify), store, memories, [""] * 5)
            for memory, tensor in zip(memories, tensors, strict=True):
                got = memory.view("<f4")[:: piece.strides[0]][: piece.box.size]
                begin = piece.box.start[0]
                assert got.tobytes() == tensor[begin : begin + piece.box.size].tobytes()
