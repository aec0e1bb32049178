"""Views against NumPy: slicing and transposing whole tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from tests.geometry.reference import inside
from tests.geometry.strategies import shapes
from ucformat.errors import CoverageError, LayoutError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Block, Extent, Key, TensorInfo
from ucformat.geometry.view import BoxPair, View

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Key("source", "weight")


def from_source(target: Box, box: Box, axes: tuple[int | None, ...]) -> tuple[Key, BoxPair]:
    return SOURCE, BoxPair(target, box, axes)


def stored(shape: tuple[int, ...], cuts: list[int]) -> tuple[np.ndarray, list[Extent]]:
    """A float32 tensor in one file, as the extents of flat slices."""
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    strides = row_major(shape, 4)
    ends = sorted({0, whole.size, *(c % (whole.size + 1) for c in cuts)})
    extents = []
    for a, b in pairwise(ends):
        for box in flat_boxes(shape, a, b):
            offset = sum(i * s for i, s in zip(box.start, strides, strict=True))
            extents.append(Extent(box, "f", offset, strides, Block(offset, box.size * 4)))
    return whole, extents


def read(view: View, whole: np.ndarray, extents: list[Extent]) -> np.ndarray:
    out = np.full(view.info.shape, np.nan, np.float32)
    for e in view.extents(lambda key, _: {SOURCE: extents}[key]):
        source = as_strided(whole.ravel()[e.offset // 4 :], e.box.shape, e.strides)
        to = inside(out, e.box)
        assert np.isnan(to).all()
        to[...] = source
    return out


@st.composite
def permuted(draw: st.DrawFn) -> tuple[np.ndarray, list[Extent], View]:
    """A view of a box of a tensor, axes permuted, dims of size 1 added and taken away."""
    shape = draw(shapes)
    whole, extents = stored(shape, draw(st.lists(st.integers(0, 1000), max_size=4)))
    start = tuple(draw(st.integers(0, n)) for n in shape)
    box = Box(start, tuple(draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))
    kept = [d for d, n in enumerate(box.shape) if n != 1 or draw(st.booleans())]
    added: list[int | None] = [None] * draw(st.integers(0, 2))
    axes = tuple(draw(st.permutations([*kept, *added])))
    target = tuple(1 if a is None else box.shape[a] for a in axes)
    info = TensorInfo("target", "weight", "float32", target)
    return whole, extents, View(info, (from_source(Box.whole(target), box, axes),))


@given(permuted())
def test_a_view_is_a_slice_transposed(case: tuple[np.ndarray, list[Extent], View]) -> None:
    whole, extents, view = case
    _, part = view.parts[0]
    sliced = inside(whole, part.box)
    named = [a for a in part.axes if a is not None]
    dropped = [a for a in range(sliced.ndim) if a not in named]
    expected = sliced.transpose(*named, *dropped).reshape(part.target.shape)
    np.testing.assert_array_equal(read(view, whole, extents), expected)


@given(permuted(), st.data())
def test_within_a_box_only_what_it_needs_is_asked_for(
    case: tuple[np.ndarray, list[Extent], View], data: st.DataObject
) -> None:
    whole, extents, view = case
    start = tuple(data.draw(st.integers(0, n)) for n in view.info.shape)
    shape = tuple(
        data.draw(st.integers(0, n - a)) for a, n in zip(start, view.info.shape, strict=True)
    )
    asked: list[Box] = []

    def near(_: Key, box: Box) -> list[Extent]:
        asked.append(box)
        return [e for e in extents if e.box.intersect(box)]

    out = np.full(view.info.shape, np.nan, np.float32)
    for e in view.extents(near, Box(start, shape)):
        inside(out, e.box)[...] = as_strided(whole.ravel()[e.offset // 4 :], e.box.shape, e.strides)
    wanted = Box(start, shape)
    np.testing.assert_array_equal(inside(out, wanted), inside(read(view, whole, extents), wanted))
    assert [box.size for box in asked] == ([wanted.size] if wanted.size else [])


def test_fused_qkv_by_groups_becomes_q() -> None:
    """Megatron stores for each of 2 query groups 2 heads of q, one of k, one of v, of 3 rows each."""
    whole, extents = stored((24, 5), [33, 60])
    parts = tuple(
        from_source(Box((6 * g, 0), (6, 5)), Box((12 * g, 0), (6, 5)), (0, 1)) for g in range(2)
    )
    view = View(TensorInfo("q", "weight", "float32", (12, 5)), parts)
    np.testing.assert_array_equal(
        read(view, whole, extents), whole.reshape(2, 4, 3, 5)[:, :2].reshape(12, 5)
    )


def test_one_layer_of_a_stack_transposed() -> None:
    whole, extents = stored((4, 2, 3), [])
    part = from_source(Box.whole((3, 2)), Box((2, 0, 0), (1, 2, 3)), (2, 1))
    view = View(TensorInfo("x", "weight", "float32", (3, 2)), (part,))
    np.testing.assert_array_equal(read(view, whole, extents), whole[2].T)


def test_a_checksum_block_survives_only_an_unclipped_extent() -> None:
    _, extents = stored((4, 2), [4])  # two extents, of two rows each
    info = TensorInfo("x", "weight", "float32", (3, 2))
    view = View(info, (from_source(Box.whole((3, 2)), Box((1, 0), (3, 2)), (0, 1)),))
    clipped, full = view.extents(lambda *_: extents)
    assert clipped.block is None
    assert (clipped.box, clipped.offset) == (Box((0, 0), (1, 2)), 8)
    assert full.block == extents[1].block


def test_a_source_is_asked_for_once() -> None:
    asked: list[tuple[Key, Box]] = []
    parts = tuple(from_source(Box((i,), (1,)), Box((3 - i,), (1,)), (0,)) for i in range(4))
    view = View(TensorInfo("x", "weight", "float32", (4,)), parts)

    def extents(key: Key, within: Box) -> list[Extent]:
        asked.append((key, within))
        return [Extent(Box((0,), (4,)), "f", 100, (4,))]

    assert [e.offset for e in view.extents(extents)] == [112, 108, 104, 100]
    assert asked == [(SOURCE, Box((0,), (4,)))]


WHOLE = Box((0, 0), (2, 3))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (from_source(WHOLE, WHOLE, (0,)), "are not distinct source dims, one for each dim"),
        (
            from_source(WHOLE, Box((0, 0), (2, 2)), (0, 0)),
            "are not distinct source dims, one for each dim",
        ),
        (from_source(WHOLE, WHOLE, (0, 2)), "name a dim that the source does not have"),
        (from_source(WHOLE, WHOLE, (0, -1)), "name a dim that the source does not have"),
        (from_source(WHOLE, WHOLE, (1, 0)), "has another shape"),
        (from_source(WHOLE, WHOLE, (None, 1)), "has another shape"),
        (from_source(WHOLE, Box((0, 0, 0), (2, 3, 2)), (0, 1)), "omit a dim longer than 1"),
    ],
)
def test_a_part_that_does_not_fit(part: tuple[Key, BoxPair], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        View(TensorInfo("target", "weight", "float32", (2, 3)), (part,))


def test_parts_tile_the_target_once() -> None:
    info = TensorInfo("target", "weight", "float32", (4,))
    halves = [from_source(Box((a,), (2,)), Box((0,), (2,)), (0,)) for a in (0, 2)]
    View(info, tuple(halves))
    with pytest.raises(CoverageError, match=r"no rank or file holds \[2:4\]"):
        View(info, (halves[0],))
    with pytest.raises(CoverageError, match=r"takes \[0:2\] from two sources"):
        View(info, (*halves, halves[0]))


def test_sources_must_have_the_box_and_the_dtype() -> None:
    view = View(
        TensorInfo("x", "weight", "float32", (2,)),
        (from_source(Box((0,), (2,)), Box((3,), (2,)), (0,)),),
    )

    def source(dtype: str, shape: tuple[int, ...]) -> Callable[[Key], TensorInfo]:
        return lambda k: TensorInfo(k.name, k.state, dtype, shape)

    view.check(source("float32", (5,)))
    with pytest.raises(LayoutError, match=r"is float32, but its source .* is bfloat16"):
        view.check(source("bfloat16", (5,)))
    for shape in [(4,), (5, 1)]:
        with pytest.raises(LayoutError, match="which has the shape"):
            view.check(source("float32", shape))
