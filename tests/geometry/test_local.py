"""Local tensors, whole or as flat ranges in files, against NumPy: what is read of the parts is the whole tensor."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from tests.geometry.reference import inside
from tests.geometry.strategies import _shard, shapes
from ucformat.errors import LayoutError
from ucformat.geometry.box import row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.local import (
    ShardAt,
    keep_rows,
    local_dims,
    pieces_of,
    regions_of,
    strided_regions,
)
from ucformat.geometry.placement import Shard
from ucformat.geometry.tensor import Extent, Key, TensorInfo
from ucformat.geometry.view import BoxPair, View


def fill(local: Any, regions: tuple[BoxPair, ...], whole: Any) -> None:
    for region in regions:
        inside(local, region.box)[...] = inside(whole, region.target)


def stored(local: Any, file: str, cuts: list[int]) -> tuple[bytes, list[Extent]]:
    """The bytes of a local tensor in one file, as the extents of flat slices of it."""
    strides = row_major(local.shape, 4)
    ends = sorted({0, local.size, *(c % (local.size + 1) for c in cuts)})
    boxes = [box for a, b in pairwise(ends) for box in flat_boxes(local.shape, a, b)]
    return local.tobytes(), [
        Extent(box, file, sum(i * s for i, s in zip(box.start, strides, strict=True)), strides)
        for box in boxes
    ]


def read(view: View, files: dict[str, bytes], extents: dict[str, list[Extent]]) -> Any:
    out = np.full(view.info.shape, -1, np.int32)
    for extent in view.extents(lambda key, _: extents[key.name]):
        to = inside(out, extent.box)
        assert (to == -1).all()
        offset = extent.offset // 4
        flat = np.frombuffer(files[extent.file], np.int32)[offset:]
        to[...] = as_strided(flat, extent.box.shape, extent.strides)
    return out


@given(
    st.data(), shapes.filter(len), st.integers(1, 4), st.lists(st.integers(0, 10**4), max_size=4)
)
def test_flat_ranges_of_sharded_tensors_are_boxes_of_the_whole(
    data: st.DataObject, shape: tuple[int, ...], degree: int, cuts: list[int]
) -> None:
    shard = data.draw(_shard(shape, ("tp",), degree, set()))
    whole = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    files: dict[str, bytes] = {}
    extents: dict[str, list[Extent]] = {}
    parts: list[tuple[Key, BoxPair]] = []
    spare: list[BoxPair] = []
    for at in range(degree):
        dims = local_dims(shape, (ShardAt(shard, degree, at),))
        local = np.full([d.size for d in dims], -2, np.int32)
        regions, padding = regions_of(dims)
        fill(local, regions, whole)
        assert sum(r.box.size for r in regions) + sum(r.box.size for r in padding) == local.size
        files[str(at)], extents[str(at)] = stored(local, str(at), cuts)
        parts += ((Key(str(at), ""), r) for r in regions)
        spare += padding
    view = View(TensorInfo("w", "weight", "int32", shape), tuple(parts))
    assert (read(view, files, extents) == whole).all()
    if spare:
        dim = shard.dim % len(shape)
        extra = list(shape)
        extra[dim] = -shape[dim] % (shard.pad_to or 1)
        assert sum(r.box.size for r in spare) == math.prod(extra)
        assert all(b <= n for r in spare for b, n in zip(r.target.stop, extra, strict=True))


@given(st.integers(1, 12), st.integers(0, 12), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_rows_of_padding_are_kept_apart(columns: int, rows: int, widths: list[int]) -> None:
    total = sum(widths)
    rows = min(rows, total)
    whole = np.arange(total * columns, dtype=np.int32).reshape(total, columns)
    files: dict[str, bytes] = {}
    extents: dict[str, list[Extent]] = {}
    kept: list[tuple[Key, BoxPair]] = []
    spare: list[tuple[Key, BoxPair]] = []
    at = 0
    shard = Shard(0, "tp", sizes=tuple(widths))
    for t, n in enumerate(widths):
        local = whole[at : at + n]
        dims = local_dims((total, columns), (ShardAt(shard, len(widths), t),))
        a, b = keep_rows(regions_of(dims)[0], rows)
        kept += ((Key(str(t), ""), r) for r in a)
        spare += ((Key(str(t), ""), r) for r in b)
        files[str(t)], extents[str(t)] = stored(local, str(t), [])
        at += n
    for parts, expected in ((kept, whole[:rows]), (spare, whole[rows:])):
        view = View(TensorInfo("w", "weight", "int32", expected.shape), tuple(parts))
        assert (read(view, files, extents) == expected).all()


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_strided_pieces_are_what_as_strided_gives(data: st.DataObject, shape: list[int]) -> None:
    whole = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    slices, size, steps = [], [], []
    for n in shape:
        start, step = data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, 2))
        count = data.draw(st.integers(0, -(-(n - start) // step)))
        slices.append(slice(start, start + count * step, step))
        size.append(count)
        steps.append(step)
    unit = row_major(tuple(shape))
    offset = sum(s.start * u for s, u in zip(slices, unit, strict=True))
    at = (offset, tuple(s * u for s, u in zip(steps, unit, strict=True)))
    local = np.full(size, -1, np.int32)
    mine = (0, row_major(tuple(size)))
    regions = tuple(strided_regions(tuple(shape), tuple(size), tuple(size), at, mine))
    fill(local, regions, whole)
    assert (local == whole[tuple(slices)]).all()
    assert sum(r.box.size for r in regions) == local.size


@pytest.mark.parametrize(
    ("size", "offset", "strides", "why"),
    [
        ((2, 3), 0, (1, 4), "along the dims"),  # transposed
        ((2, 3), 0, (5, 1), "along the dims"),  # skewed
        ((4, 4), 4, (4, 1), "along the dims"),  # past the end
        ((2, 3), 2, (4, 1), "along the dims"),  # round the corner
        ((6,), 0, (1,), "dims of a tensor"),
        ((2, 3), -4, (4, 1), "dims of a tensor"),
        ((2, 3), 0, (0, 1), "along the dims"),
        ((2, 3), 10**30, (4, 1), "along the dims"),
    ],
)
def test_other_pieces_are_refused(
    size: tuple[int, ...], offset: int, strides: tuple[int, ...], why: str
) -> None:
    with pytest.raises(LayoutError, match=why):
        list(strided_regions((4, 4), size, size, (offset, strides), (0, row_major(size))))


def test_a_piece_in_a_million_parts_is_refused() -> None:
    shape = (1 << 20, 2)
    at = (0, (4, 1))
    with pytest.raises(LayoutError, match="65,536"):
        list(strided_regions((1 << 21, 2), shape, shape, at, (0, (2, 1))))


@pytest.mark.parametrize("split", [pieces_of, regions_of])
def test_runs_in_two_dims_that_make_a_million_parts_are_refused(split: Any) -> None:
    parts = Shard(0, "tp", parts=(4,) * 1024), Shard(1, "tp", parts=(4,) * 1024)
    dims = local_dims((4096, 4096), tuple(ShardAt(shard, 2, 0) for shard in parts))
    with pytest.raises(LayoutError, match="65,536"):
        split(dims)
