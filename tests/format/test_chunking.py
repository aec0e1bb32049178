"""The grids of format version 1."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.format.chunking import CHUNK_BYTES, SHARD_BYTES, Grid, chunk_shape, shard_shape
from ucformat.format.shard import bands
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.reading.plan import ReadItem, Verify, make_plan
from ucformat.storage.base import Costs
from ucformat.storage.objects import ObjectStore

SHAPE = st.lists(st.integers(0, 5000), max_size=4).map(tuple)
ITEMSIZE = st.sampled_from([1, 2, 4, 8, 16])
MIB = 1 << 20
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32"}
VERIFY: tuple[Verify, ...] = ("whole", "always", "never")
S3 = ObjectStore("s3://bucket").costs


@given(shape=SHAPE, itemsize=ITEMSIZE, target=st.sampled_from([64, 4096, CHUNK_BYTES]))
def test_chunks_and_shards_keep_their_bounds(
    shape: tuple[int, ...], itemsize: int, target: int
) -> None:
    grid = Grid.of(shape, itemsize, target)
    assert all(1 <= c <= max(1, n) for c, n in zip(grid.chunk, shape, strict=True))
    assert grid.chunk_nbytes <= max(target, itemsize)
    assert all(s % c == 0 for s, c in zip(grid.shard, grid.chunk, strict=True))
    assert math.prod(grid.shard) * itemsize <= max(SHARD_BYTES, grid.chunk_nbytes)


@given(shape=SHAPE, itemsize=ITEMSIZE)
def test_the_number_of_objects_is_bounded_by_bytes(shape: tuple[int, ...], itemsize: int) -> None:
    grid = Grid.of(shape, itemsize)
    shards = math.prod(-(-n // s) for n, s in zip(shape, grid.shard, strict=True))
    assert shards <= math.prod(shape) * itemsize / (SHARD_BYTES // 2) + 1


def allows_cuts(shape: tuple[int, ...], itemsize: int, dim: int, parts: int) -> bool:
    """Whether 256 bytes of a part of a dim follow one another in the tensor, so that chunks may end with it."""
    return math.prod(shape[dim:]) * itemsize >= 256 * parts


@given(shape=SHAPE, itemsize=ITEMSIZE)
def test_no_chunk_has_rows_of_fewer_than_256_bytes(shape: tuple[int, ...], itemsize: int) -> None:
    grid = Grid.of(shape, itemsize)
    cut = [d for d, n in enumerate(grid.chunks) if n > 1]
    if cut and 0 not in shape:
        last = cut[-1]
        row = math.prod((grid.chunk[last], *shape[last + 1 :]))
        assert row * itemsize >= 256


@given(
    shape=st.lists(
        st.sampled_from([16, 48, 1024, 4096, 1000, 513, 7168]), min_size=2, max_size=2
    ).map(tuple),
    itemsize=st.sampled_from([2, 4]),
)
def test_degrees_fall_on_chunk_boundaries_where_the_dim_divides(
    shape: tuple[int, ...], itemsize: int
) -> None:
    grid = Grid.of(shape, itemsize)
    if math.prod(shape) * itemsize < 16 * MIB:
        return
    for dim, (n, c) in enumerate(zip(shape, grid.chunk, strict=True)):
        for degree in (1, 2, 4, 8, 16):
            if n % degree == 0 and allows_cuts(shape, itemsize, dim, degree):
                assert c == n or (n // degree) % c == 0


@pytest.mark.parametrize(
    "shape", [(2048, 2048), (16, 512, 512), (256, 256, 8, 8), (64, 64, 32, 32)]
)
def test_a_tensor_of_16_mib_keeps_four_cuts_of_each_dim(shape: tuple[int, ...]) -> None:
    chunks = Grid.of(shape, 4).chunks
    assert all(n >= 4 for d, n in enumerate(chunks) if allows_cuts(shape, 4, d, 4))


LENGTH = st.one_of(
    st.integers(1, 40), st.integers(1, 64).map(lambda n: 16 * n), st.integers(1, 2000)
)


def cannot_be_divided(n: int, edge: int) -> bool:
    """Whether a part of a dim is more than a chunk, and no number of chunks that the rule tries divides it."""
    parts = [n // g for g in (1, 2, 4, 8, 16) if n % g == 0 and n // g > edge]
    least = [-(-part // edge) for part in parts]
    return any(
        all(part % k for k in range(f, 4 * f + 1)) for part, f in zip(parts, least, strict=True)
    )


@given(
    data=st.data(),
    leading=st.lists(LENGTH, min_size=1, max_size=3),
    itemsize=st.sampled_from([1, 2, 4]),
)
def test_what_cuts_of_large_tensors_read(
    data: st.DataObject, leading: list[int], itemsize: int
) -> None:
    """The bounds of ADR 0007, which hold for any dim, any number of parts, and whatever is verified."""
    least = -(-16 * MIB // (math.prod(leading) * itemsize))  # last dim of a tensor of 16 MiB
    last = data.draw(st.sampled_from([least, 16 * -(-least // 16), least + 7]))
    shape = tuple(data.draw(st.permutations([*leading, last])))
    grid = Grid.of(shape, itemsize)
    dim = data.draw(st.integers(0, len(shape) - 1))
    n, chunks, edge = shape[dim], grid.chunks[dim], grid.chunk[dim]
    parts = data.draw(st.integers(1, min(16, n)))
    step = -(-n // parts)
    verify = data.draw(st.sampled_from(VERIFY))
    costs = data.draw(st.sampled_from([Costs(), S3]))
    read = 0
    for begin in range(0, n, step):
        start = tuple(begin if d == dim else 0 for d in range(len(shape)))
        extent = tuple(min(step, n - begin) if d == dim else m for d, m in enumerate(shape))
        pieces = [(0, Piece(Box(start, extent), 0, row_major(extent)))]
        tiles = [grid.tiles(s, f"{s}") for s in grid.shards(Box(start, extent))]
        read += make_plan(
            [ReadItem(TensorInfo("x", "weight", DTYPES[itemsize], shape), tiles, pieces)],
            verify,
            costs,
        ).bytes_read
    inside = sum(boundary % edge != 0 for boundary in range(step, n, step))
    stored = math.prod(c * e for c, e in zip(grid.chunks, grid.chunk, strict=True)) * itemsize
    assert (
        read <= stored * (1 + inside / chunks) * 1.011
    )  # checksums, and gaps of up to a hundredth
    if n % parts or not allows_cuts(shape, itemsize, dim, parts):
        return
    if parts in (2, 4):
        assert inside == 0 or cannot_be_divided(n, edge)
    if parts in (8, 16):
        assert inside / chunks <= parts / 4 - 1 or cannot_be_divided(n, edge)


@pytest.mark.parametrize(
    ("shape", "itemsize", "chunk", "shard"),
    [
        ((), 4, (), ()),
        ((10,), 4, (10,), (10,)),
        ((0, 5), 4, (1, 5), (1, 5)),
        ((1024, 1024), 4, (128, 128), (1024, 1024)),
        ((512, 1024), 4, (64, 256), (512, 1024)),
        ((512, 2048), 2, (64, 512), (512, 2048)),
        ((1024, 2816), 4, (128, 176), (1024, 2816)),
        ((4096, 4096), 2, (256, 256), (4096, 4096)),
        ((8192, 8192), 4, (512, 512), (4096, 8192)),
        ((32000, 4096), 4, (1000, 256), (8000, 4096)),
        ((64 * MIB,), 4, (MIB // 4,), (32 * MIB,)),
        ((50257, 768), 4, (50257, 48), None),
        ((1_000_000, 16), 4, (15625, 16), None),  # rows of 64 bytes are not cut
        ((1_000_000, 16, 1), 4, (15625, 16, 1), None),
        ((200_000, 128), 4, (3125, 64), None),
        ((4096, 1024), 2, (256, 128), None),
        ((20_000, 12, 32), 4, (1250, 3, 32), None),  # single indices would have 128 bytes in a row
        ((8, 14336, 4096), 2, (1, 896, 256), None),
        ((5, 2048, 2048), 4, (1, 128, 128), None),
        ((12, 2048, 2048), 4, (1, 128, 128), None),
        ((5, 1024, 2048), 4, (5, 64, 128), None),  # single indices would make chunks of 32 KiB
        ((28, 3, 4096, 4096), 2, (7, 1, 256, 256), None),
        ((2048, 2048, 3, 3), 4, (128, 128, 3, 3), None),  # and not rows of one element
    ],
)
def test_examples(
    shape: tuple[int, ...], itemsize: int, chunk: tuple[int, ...], shard: tuple[int, ...] | None
) -> None:
    found = chunk_shape(shape, itemsize)
    if shape != (50257, 768):  # an odd first dim is cut by rows inside its tiles
        assert found == chunk
    assert math.prod(found) * itemsize <= CHUNK_BYTES
    if shard is not None:
        assert shard_shape(shape, found, itemsize) == shard


@given(
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    target=st.sampled_from([8, 64, 500]),
    most=st.sampled_from([1, 100, 1000, 10**6]),
)
def test_bands_cover_each_shard_in_the_order_of_its_chunks(
    shape: tuple[int, ...], target: int, most: int
) -> None:
    grid = Grid.of(shape, 4, target, 6 * target)
    boxes = []
    for shard in grid.shards():
        following = 0
        starts = []
        for piece, counts in bands(grid, shard, most):
            starts.append(piece.box.start)
            following += math.prod(counts)
            assert math.prod(counts) * grid.chunk_nbytes <= max(most, grid.chunk_nbytes)
            boxes.append((str(shard), piece.box))
        assert starts == sorted(set(starts))
        assert following == math.prod(grid.tiles(shard, "").grid)
    if math.prod(shape):
        prove(TensorInfo("t", "weight", "float32", shape), boxes)


@given(shape=st.lists(st.integers(1, 20), max_size=3).map(tuple), data=st.data())
def test_the_shards_that_meet_a_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    grid = Grid.of(shape, 4, 64, 256)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(
        start, tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
    )
    assert list(grid.shards(box)) == [s for s in grid.shards() if grid.box(s).intersect(box)]
