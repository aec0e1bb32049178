"""Dealing a save to its ranks: every element once, loads balanced, nothing sent twice, and nobody waits for ever."""

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.errors import CoverageError, UsageError
from ucformat.format.chunking import Grid
from ucformat.geometry.box import Box
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import TensorInfo
from ucformat.torch.saving import shards
from ucformat.torch.saving.agree import join, merge_summaries
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.shards import plan_shards
from ucformat.torch.saving.statement import Exceptions, StatedFacts, Statement, WriteItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.torch.saving.options import Form
    from ucformat.torch.saving.shards import GlobalPlan, ShardBatch, Transfer
    from ucformat.torch.saving.statement import Fragment

Claims = list[list[WriteItem]]

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13]), max_size=3).map(tuple)
dtypes = st.sampled_from(["uint8", "bfloat16", "float32", "complex128"])


def chunked(shape: tuple[int, ...], dim: int, count: int) -> list[Box]:
    """A tensor cut along a dim as `torch.chunk` cuts it; the last ones may be empty."""
    step = -(-shape[dim] // count)
    out = []
    for i in range(count):
        a, b = min(shape[dim], i * step), min(shape[dim], (i + 1) * step)
        start = tuple(a if d == dim else 0 for d in range(len(shape)))
        out.append(Box(start, tuple(b - a if d == dim else n for d, n in enumerate(shape))))
    return out


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], parts: int) -> list[list[Box]]:
    """The boxes of each part: all in one, cut along one dim or two, or in flat ranges."""
    kind = draw(st.sampled_from(["whole", "dim", "two dims", "flat"]))
    if kind == "dim" and shape:
        return [[b] for b in chunked(shape, draw(st.integers(0, len(shape) - 1)), parts)]
    if kind == "two dims" and len(shape) > 1:
        boxes = [Box(tuple(map(sum, zip(a.start, b.start, strict=True))), b.shape)
                 for a in chunked(shape, 0, 2) for b in chunked(a.shape, 1, parts)]  # fmt: skip
        return [boxes[i::parts] for i in range(parts)]
    if kind == "flat":
        size = math.prod(shape)
        ends = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
        return [
            list(flat_boxes(shape, a, b)) for a, b in zip([0, *ends], [*ends, size], strict=True)
        ]
    return [[Box.whole(shape)] for _ in range(parts)]


@st.composite
def worlds(draw: st.DrawFn) -> Claims:
    """What 1 to 5 ranks hold of some tensors: cut over some of them, the rest replicas or without it."""
    ranks = draw(st.integers(1, 5))
    items: Claims = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 5))):
        info = TensorInfo(f"t{number}", "weight", draw(dtypes), draw(shapes))
        parts = draw(st.integers(1, ranks))
        boxes = draw(cuts(info.shape, parts))
        order = draw(st.permutations(range(ranks)))
        holders = (
            parts if draw(st.booleans()) else ranks
        )  # else the further ranks have nothing of it
        for place, rank in enumerate(order[:holders]):
            items[rank].append(WriteItem(info, tuple(boxes[place % parts])))
    for mine in items:
        draw(st.randoms()).shuffle(mine)
    return items


def agreed(items: Claims, form: Form = "packed") -> tuple[list[Statement], GlobalPlan]:
    """What ranks that know no distributions state, and the plan that follows."""
    statements = [
        Statement(rank, mine, [None] * len(mine), StatedFacts({}, {}))
        for rank, mine in enumerate(items)
    ]
    summaries = [s.summary("", None, (b"", Exceptions())) for s in statements]
    encoded = {d: data for s in statements for d, data in s.encoded.items()}
    return statements, join(
        functools.reduce(merge_summaries, summaries), encoded, SaveOptions("", form)
    )


def shards_of(
    items: Claims, chunk: int, shard: int
) -> list[tuple[tuple[ShardBatch, ...], tuple[Transfer, ...]]]:
    statements, plan = agreed(items, "zarr")

    def grid_of(info: TensorInfo) -> Grid:
        return Grid.of(info.shape, info.itemsize, chunk, shard)

    return [plan_shards(s, plan.exceptions, grid_of) for s in statements]


def slices(box: Box, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    return tuple(
        slice(a - o, a - o + n)
        for a, n, o in zip(box.start, box.shape, origin or (0,) * 9, strict=False)
    )


@given(worlds())
def test_every_element_of_every_piece_is_written_once(items: Claims) -> None:
    statements, plan = agreed(items)
    counts = {i.key: np.zeros(i.shape, int) for i in plan.packed.infos}
    for statement, mine in zip(statements, items, strict=True):
        for item, piece in statement.pieces(plan.exceptions, "packed"):
            counts[mine[item].info.key][slices(mine[item].boxes[piece])] += 1
    assert all((c == 1).all() for c in counts.values())
    assert {i.info for mine in items for i in mine} == set(plan.packed.infos)


def received(batch: ShardBatch, owner: int) -> dict[int, list[Fragment]]:
    """What the owner of a batch waits for, by sender."""
    senders = {f.sender for s in batch for f in s.fragments} - {owner}
    parts = [f for s in batch for f in s.fragments]
    return {r: [f for f in parts if f.sender == r] for r in senders}


def everybody_is_done(
    batches: Sequence[Sequence[ShardBatch]], messages: Sequence[Sequence[Transfer]]
) -> bool:
    """Runs the worst network: a message goes only while its owner waits for just that batch, and none is kept."""
    outgoing = [deque(mine) for mine in messages]
    at = [0] * len(batches)
    lacking = [set(received(mine[0], r)) if mine else set() for r, mine in enumerate(batches)]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(outgoing):
            if queue and at[queue[0].to] == queue[0].number and rank in lacking[queue[0].to]:
                lacking[queue.popleft().to].remove(rank)
                moved = True
        for rank, mine in enumerate(batches):
            while at[rank] < len(mine) and not lacking[rank]:
                at[rank] += 1
                lacking[rank] = (
                    set(received(mine[at[rank]], rank)) if at[rank] < len(mine) else set()
                )
                moved = True
    return not any(outgoing) and all(a == len(mine) for a, mine in zip(at, batches, strict=True))


def test_the_worst_network_shows_an_order_that_waits_for_ever() -> None:
    """Two ranks that each send the second batch's part first: the simulation above finds it."""
    info = TensorInfo("t", "weight", "uint8", (64,))
    halves = [WriteItem(info, tuple(Box((a + 16 * k,), (8,)) for k in range(4))) for a in (0, 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_BYTES", 16)
        plans = shards_of([[h] for h in halves], 16, 16)
    batches, messages = [b for b, _ in plans], [m for _, m in plans]
    assert [len(mine) for mine in messages] == [2, 2]
    assert everybody_is_done(batches, messages)
    assert not everybody_is_done(batches, [list(reversed(mine)) for mine in messages])


def work_of(batches: Sequence[Sequence[ShardBatch]], itemsize: int) -> list[int]:
    """Bytes that each rank writes, and those it receives for that."""
    return [
        sum(
            f.box.size * itemsize * (1 if f.sender == owner else 2)
            for b in mine
            for s in b
            for f in s.fragments
        )
        for owner, mine in enumerate(batches)
    ]  # fmt: skip


@given(st.integers(1, 6), st.lists(st.tuples(shapes, dtypes), max_size=12))
def test_replicas_share_the_writing_by_bytes_and_send_nothing(
    ranks: int, kinds: list[tuple[tuple[int, ...], str]]
) -> None:
    infos = [TensorInfo(f"t{n}", "weight", dtype, shape) for n, (shape, dtype) in enumerate(kinds)]
    items = [[WriteItem(i, (Box.whole(i.shape),)) for i in infos]] * ranks
    total, largest = sum(i.nbytes for i in infos), max((i.nbytes for i in infos), default=0)
    statements, plan = agreed(items)
    for statement in statements:
        mine = statement.pieces(plan.exceptions, "packed")
        assert sum(infos[item].nbytes for item, _ in mine) <= total / ranks + largest
    assert not any(messages for _, messages in shards_of(items, 16, 64))


def test_who_holds_a_shard_writes_it() -> None:
    """Rows that end with a shard: nothing is sent, and each rank writes its own."""
    infos = [TensorInfo(f"t{n}", "weight", "float32", (64, 16)) for n in range(3)]
    items = [[WriteItem(i, (Box((16 * r, 0), (16, 16)),)) for i in infos] for r in range(4)]
    plans = shards_of(items, 256, 512)
    assert not any(messages for _, messages in plans)
    assert work_of([b for b, _ in plans], 4) == [3 * 16 * 16 * 4] * 4


def test_many_small_tensors_go_in_few_messages() -> None:
    infos = [TensorInfo(f"t{n}", "weight", "float32", (6, 10)) for n in range(500)]
    items = [
        [WriteItem(i, (b,)) for i in infos] for b in (Box((0, 0), (6, 5)), Box((0, 5), (6, 5)))
    ]
    plans = shards_of(items, 10**6, 10**6)
    assert [len(batches) for batches, _ in plans] == [1, 1]
    assert [len(messages) for _, messages in plans] == [1, 1]


INFO = TensorInfo("t", "weight", "float32", (4, 6))


def rows(a: int, n: int, info: TensorInfo = INFO) -> WriteItem:
    return WriteItem(info, (Box((a, 0), (n, 6)),))


def test_tensors_come_in_the_order_of_the_first_rank_that_has_them() -> None:
    a, b, c = (WriteItem(replace(INFO, name=n), (Box.whole(INFO.shape),)) for n in "abc")
    assert [i.name for i in agreed([[b], [c, b, a], [a]])[1].packed.infos] == ["b", "c", "a"]
    assert agreed([[]])[1].packed.infos == ()


@pytest.mark.parametrize("other", [replace(INFO, dtype="bfloat16"), replace(INFO, shape=(6, 4))])
def test_a_tensor_has_one_dtype_and_shape(other: TensorInfo) -> None:
    with pytest.raises(
        UsageError, match=r"t \(weight\) is float32 \(4, 6\) on rank 1, but .* on rank 3"
    ) as caught:
        agreed([[], [rows(0, 2)], [rows(2, 2)], [WriteItem(other, ())]])
    assert caught.value.hint is not None
    assert other.dtype in caught.value.message
    assert str(other.shape) in caught.value.message


def test_a_rank_lists_a_tensor_once() -> None:
    with pytest.raises(UsageError, match=r"rank 1 saves two tensors as t \(weight\)"):
        agreed([[rows(0, 4)], [rows(0, 4), rows(0, 4)]])


NOTHING = WriteItem(INFO, ())


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([[rows(0, 2)], [rows(3, 1)]], r"\[2:3, 0:6\]"),
        ([[rows(0, 2)], [NOTHING]], r"\[2:4, 0:6\]"),
        ([[NOTHING], [NOTHING]], r"\[0:4, 0:6\]"),
        ([[rows(0, 3)], [rows(2, 2)]], r"rank 0 holds .* rank 1 holds .* share \[2:3, 0:6\]"),
        ([[rows(0, 4)], [rows(0, 2)]], r"rank 1 holds .* rank 0 holds .* share \[0:2, 0:6\]"),
        ([[rows(0, 2)], [rows(2, 3)]], "leaves the tensor"),
    ],
)
def test_holes_and_unequal_overlaps_are_errors(items: Claims, words: str) -> None:
    with pytest.raises(CoverageError, match=words) as caught:
        agreed(items)
    assert "t (weight)" in caught.value.message
    assert caught.value.hint == "check that all ranks of the mesh take part in this save"


def test_an_empty_tensor_needs_no_holder() -> None:
    info = TensorInfo("t", "weight", "float32", (0, 3))
    items = [[WriteItem(info, ())], [WriteItem(info, (Box((0, 0), (0, 3)),))]]
    assert agreed(items)[1].packed.infos == (info,)
    assert shards_of(items, 16, 16) == [((), ()), ((), ())]
