"""Shards dealt by descriptions: each rank's own plan fits those of all others, and nobody waits for ever."""

from __future__ import annotations

import functools
import math
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.torch.test_deal import everybody_is_done, received, slices
from tests.torch.test_deal import worlds as listed_worlds
from ucformat.format.chunking import Grid
from ucformat.geometry.box import Box
from ucformat.geometry.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.tensor import TensorInfo
from ucformat.torch.saving import shards
from ucformat.torch.saving.agree import join, merge_summaries
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.shards import plan_shards
from ucformat.torch.saving.statement import Exceptions, StatedFacts, Statement, WriteItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.torch.test_deal import Claims
    from ucformat.torch.saving.shards import ShardBatch, Transfer

Held = list[tuple[TensorInfo, Distribution]]


@st.composite
def worlds(draw: st.DrawFn) -> list[Statement]:
    """What up to eight ranks state: tensors on a mesh of all of them, of halves, of odd and even ones, and whole."""
    size = draw(st.sampled_from([2, 3, 4, 6, 8]))
    everyone = list(range(size))
    some = [
        everyone,
        everyone[::-1],
        everyone[: size // 2],
        everyone[size // 2 :],
        everyone[::2],
        everyone[1::2],
    ]
    held: list[list[tuple[WriteItem, Distribution | None]]] = [[] for _ in everyone]
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        info = TensorInfo(f"t{number}", "weight", draw(st.sampled_from(["int8", "float32"])), shape)
        ranks = draw(st.sampled_from(some))
        sizes = draw(
            st.sampled_from(
                [s for s in product(range(1, 9), repeat=2) if math.prod(s) == len(ranks)]
            )
        )
        axes = draw(st.permutations(range(2)))[: draw(st.integers(0, 2))]
        d = Distribution(
            RankMesh.of(sizes, ranks),
            tuple(Cut(draw(st.integers(0, len(shape) - 1)), axis) for axis in axes),
        )
        left = [axis for axis in (0, 1) if axis not in axes]
        locals_of = {d.local(shape, at).size for at in product(*map(range, sizes))}
        if left and len(locals_of) == 1 and draw(st.booleans()):
            position = draw(st.integers(0, 3))
            d = Distribution(
                d.mesh,
                d.cuts,
                left[0],
                -(-(position + locals_of.pop()) // sizes[left[0]]),
                position,
            )
        whole = draw(st.booleans()) and not d.axes and ranks == everyone
        for rank in ranks:
            at = d.mesh.coordinate(rank)
            assert at is not None
            held[rank].append((WriteItem(info, d.boxes(shape, at)), None if whole else d))
    return [
        Statement(rank, [item for item, _ in mine], [d for _, d in mine], StatedFacts({}, {}))
        for rank, mine in enumerate(held)
    ]


def exceptions_of(statements: Sequence[Statement]) -> Exceptions:
    summaries = [s.summary("", None, (b"", Exceptions())) for s in statements]
    encoded = {d: data for s in statements for d, data in s.encoded.items()}
    return join(functools.reduce(merge_summaries, summaries), encoded, SaveOptions("")).exceptions


def planned(
    statements: Sequence[Statement],
) -> list[tuple[tuple[ShardBatch, ...], tuple[Transfer, ...]]]:
    exceptions = exceptions_of(statements)
    return [plan_shards(s, exceptions, grid_of) for s in statements]


def grid_of(info: TensorInfo) -> Grid:
    return Grid.of(info.shape, info.itemsize, 8, 16)


@given(listed_worlds(), st.sampled_from([16, 64, 10**6]))
def test_the_plans_of_ranks_that_list_boxes_fit_each_other(items: Claims, batch_bytes: int) -> None:
    check_plans(
        [
            Statement(rank, own, [None] * len(own), StatedFacts({}, {}))
            for rank, own in enumerate(items)
        ],
        batch_bytes,
    )


@given(worlds(), st.sampled_from([16, 64, 10**6]))
def test_the_plans_of_all_ranks_fit_each_other(
    statements: list[Statement], batch_bytes: int
) -> None:
    check_plans(statements, batch_bytes)


def check_plans(statements: list[Statement], batch_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_BYTES", batch_bytes)
        plans = planned(statements)
    written: dict[TensorInfo, np.ndarray] = {}
    outgoing = [list(messages) for _, messages in plans]
    numbered = [
        list(messages) for _, messages in plans
    ]  # by the owner's batches of all descriptions
    for owner, (batches, _) in enumerate(plans):
        for number, batch in enumerate(batches):
            for shard in batch:
                info = statements[owner].items[shard.tensor].info
                box = grid_of(info).box(shard.at)
                count = written.setdefault(info, np.zeros(info.shape, int))
                for f in shard.fragments:
                    count[slices(f.box)] += 1
                    assert box.contains(f.box)
            for sender, wanted in received(
                batch, owner
            ).items():  # the sender's next message to the owner is just this
                message = next(m for m in outgoing[sender] if m.to == owner)
                outgoing[sender].remove(message)
                numbered[sender][plans[sender][1].index(message)] = message._replace(number=number)
                its = statements[sender].items
                sent = [(its[f.item].info, f.box) for f in message.fragments]
                assert sent == [(statements[owner].items[f.tensor].info, f.box) for f in wanted]
                assert all(its[f.item].boxes[f.piece].contains(f.box) for f in message.fragments)
            sizes = [f.box.size * statements[owner].items[f.tensor].info.itemsize
                     for s in batch for f in s.fragments]  # fmt: skip
            assert len(batch) == 1 or sum(sizes) <= batch_bytes
    assert not any(outgoing)
    assert set(written) == {i.info for s in statements for i in s.items if i.info.size}
    assert all((count == 1).all() for count in written.values())
    assert everybody_is_done([b for b, _ in plans], numbered)


def stated(size: int, held: Held) -> list[Statement]:
    out = []
    for rank in range(size):
        mine = [(info, d, at) for info, d in held if (at := d.mesh.coordinate(rank)) is not None]
        items = [WriteItem(info, d.boxes(info.shape, at)) for info, d, at in mine]
        out.append(Statement(rank, items, [d for _, d, _ in mine], StatedFacts({}, {})))
    return out


@pytest.mark.parametrize("cuts", [(), (Cut(0, 0),), (Cut(0, 1),), (Cut(1, 0), Cut(0, 1))], ids=str)
def test_shards_are_balanced_and_replicas_that_are_near_send(cuts: tuple[Cut, ...]) -> None:
    d = Distribution(RankMesh.of((2, 4), range(8)), cuts)
    infos = [TensorInfo(f"t{n}", "weight", "float32", (8, 2 + n % 3)) for n in range(24)]
    plans = planned(stated(8, [(info, d) for info in infos]))
    loads = [
        sum(f.box.size for b in batches for s in b for f in s.fragments) for batches, _ in plans
    ]
    assert sum(loads) == sum(math.prod(i.shape) for i in infos)
    assert max(loads) <= 1.5 * sum(loads) / 8
    for rank, (_, messages) in enumerate(plans):
        for message in messages:
            here, there = d.mesh.coordinate(rank), d.mesh.coordinate(message.to)
            assert here is not None
            assert there is not None
            assert d.copy_of(here) == d.copy_of(there)


def test_the_owner_is_a_rank_that_holds_most() -> None:
    d = Distribution(RankMesh.of((3,), range(3)), (Cut(0, 0),))
    info = TensorInfo(
        "t", "weight", "int8", (16,)
    )  # of which ranks hold 6, 6 and 4 elements, in one shard
    owners = [rank for rank, (batches, _) in enumerate(planned(stated(3, [(info, d)]))) if batches]
    assert owners == [0]
    box = Box((6,), (10,))  # of the shard, rank 1 holds 6 and rank 2 holds 4
    assert d.overlap((16,), box).tolist() == [0, 6, 4]
