"""Plans from descriptions: files that simulated ranks write by them open as what the ranks held."""

from __future__ import annotations

import functools
import math
import threading
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.fakes import random_array
from tests.torch.test_deal import slices
from ucformat.errors import UcformatError, UsageError
from ucformat.format.commit import commit
from ucformat.format.described import packed_file
from ucformat.format.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import TensorInfo
from ucformat.storage.memory import MemoryStore
from ucformat.torch.comm.wire import Addressed, decode, encode
from ucformat.torch.saving.assignment import WriteItem
from ucformat.torch.saving.manifest import SaveMetadata, StateInfo, WriteReport, manifest_of
from ucformat.torch.saving.plan import Held, SaveOptions, plan_save
from ucformat.torch.saving.write import write_packed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

count = iter(range(10**6))


class Ranks:
    """Groups of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size
        self._answers: list[Any] = [None] * size
        self.collectives = 0

    def exchange(self, rank: int, value: Any, answer: Callable[[list[Any]], list[Any]]) -> Any:
        self._values[rank] = value
        self._barrier.wait(20)
        if not rank:
            self.collectives += 1
            error = next((v for v in self._values if isinstance(v, BaseException)), None)
            try:
                self._answers = [error] * self.size if error else answer(self._values)
            except UcformatError as failed:
                self._answers = [failed] * self.size
        self._barrier.wait(20)
        got = self._answers[rank]
        self._barrier.wait(20)
        if isinstance(got, BaseException):
            raise got
        return got

    def each(self, act: Callable[[Any], Any]) -> list[Any]:
        """What a function gives on each rank, or raises."""
        out: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            try:
                out[rank] = act(OneRank(self, rank))
            except UcformatError as error:
                out[rank] = error
            except BaseException as error:
                out[rank] = error
                self._barrier.abort()
                raise

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out


class OneRank:
    """The group as a rank sees it."""

    intact = True

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, ranks.size
        self.cache: dict[str, Any] = {}

    def sharing_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gather_scatter(self, value: Any, compute: Any, kind: Any = Any, answer_kind: Any = Any) -> Any:
        def answer(values: list[Any]) -> list[Any]:
            return list(compute([decode(encode(v, kind), kind) for v in values]))

        return self._ranks.exchange(self.rank, value, answer)

    def combine(self, value: Any, merge: Any, kind: Any, then: Any, answer_kind: Any) -> Any:
        def answer(values: list[Any]) -> list[Any]:
            told = then(functools.reduce(merge, [decode(encode(v, kind), kind) for v in values]))
            told = told if isinstance(told, Addressed) else Addressed(told, {})
            answers = [told.others.get(rank, told.common) for rank in range(self.size)]
            return [decode(encode(a, answer_kind), answer_kind) for a in answers]

        return self._ranks.exchange(self.rank, value, answer)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[list[tuple[WriteItem, Distribution | None]]], dict[str, Any]]:
    """The size of a world, what each rank holds, and the tensors: distributed, held whole by some ranks, or listed."""
    size = draw(st.sampled_from([1, 2, 4]))
    held: list[list[tuple[WriteItem, Distribution | None]]] = [[] for _ in range(size)]
    arrays: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int8"]))
        info = TensorInfo(f"t{number}", "weight", dtype, shape)
        arrays[info.name] = random_array(shape, dtype, number)
        kind = draw(st.sampled_from(["mesh", "mesh", "whole", "listed"]))
        if kind == "mesh":
            sizes = draw(st.sampled_from([s for s in ((size,), (2, size // 2), (1, size)) if math.prod(s) == size]))
            ranks = draw(st.permutations(range(size)))
            axes = draw(st.permutations(range(len(sizes))))[: draw(st.integers(0, len(sizes)))] if shape else []
            cuts = tuple(Cut(draw(st.integers(0, len(shape) - 1)), axis) for axis in axes)
            d = Distribution(RankMesh.of(sizes, ranks), cuts)
            for rank in range(size):
                at = d.mesh.coordinate(rank)
                assert at is not None
                held[rank].append((WriteItem(info, d.boxes(shape, at)), d))
        elif kind == "whole":
            for rank in draw(st.sets(st.integers(0, size - 1), min_size=1)):
                held[rank].append((WriteItem(info, (Box.whole(shape),)), None))
        else:
            inner = st.lists(st.integers(0, shape[0]), min_size=size - 1, max_size=size - 1) if shape else st.just([])
            for rank, (a, b) in enumerate(pairwise([0, *sorted(draw(inner)), shape[0]]) if shape else ()):
                box = Box((a, *(0 for _ in shape[1:])), (b - a, *shape[1:]))
                held[rank].append((WriteItem(info, (box,)), None))
            if not shape:
                held[0].append((WriteItem(info, (Box.whole(shape),)), None))
    return size, held, arrays


def save(size: int, held: Sequence[Any], arrays: Mapping[str, Any], url: str, changed: int = -1) -> list[Any]:
    """Let all ranks plan twice and write; on rank `changed` other values."""
    ranks = Ranks(size)
    options = SaveOptions(url, form="packed")

    def act(group: Any) -> Any:
        store = MemoryStore(url.removeprefix("memory://"))
        items = [item for item, _ in held[group.rank]]

        def elements(item: int, piece: int) -> Any:
            info, box = items[item].info, items[item].boxes[piece]
            raw = arrays[info.name].view(f"V{info.itemsize}")[(..., *slices(box))]
            if group.rank != changed:
                return raw
            return np.frombuffer(bytes(255 - b for b in raw.tobytes()), raw.dtype).reshape(raw.shape)

        mine = Held(items, [d for _, d in held[group.rank]], {}, {}, elements)
        state = StateInfo((), {}, {}, (), {}, {}, {})
        for again in (False, True):
            before = ranks.collectives
            assignment, attempt, plan = plan_save(group, options, store, mine)
            told = ranks.collectives - before
            if again:
                assert told == 1 + bool(plan and plan.tensors) or group.rank  # nothing new is told
        parts = [(items[i].info, items[i].boxes[p], elements(i, p)) for i, p in assignment.part.pieces]
        write_packed(store, packed_file(f"data/{assignment.attempt}", group.rank), parts, lambda _: None)
        report = WriteReport([], {}, state, 0, 0.0)

        def done(reports: list[Any]) -> list[Any]:
            assert attempt is not None
            assert plan is not None
            made = manifest_of(store, options, SaveMetadata(), attempt, plan, assignment, reports)
            commit(store, attempt, made)
            return [plan] * size

        return ranks.exchange(group.rank, report, done)

    return ranks.each(act)


@given(worlds())
@settings(max_examples=60, deadline=None)
def test_what_ranks_describe_opens_as_what_they_held(case: Any) -> None:
    size, held, arrays = case
    url = f"memory://statements-{next(count)}"
    plan, *_ = save(size, held, arrays, url)
    assert not isinstance(plan, BaseException), plan
    store = MemoryStore(url.removeprefix("memory://"))
    ck = ucformat.open(store)
    for name, array in arrays.items():
        got = ck[name].read()
        assert got.tobytes() == array.tobytes()
        assert got.dtype == array.dtype
    report = ucformat.verify(store)
    assert report, report
    listed = any(d is None and [b.shape for b in i.boxes] != [i.info.shape] for of_rank in held for i, d in of_rank)
    assert (plan.described is None) == listed


def mesh_of_four() -> list[list[tuple[WriteItem, Distribution | None]]]:
    """Two tensors on two by two ranks: one cut along the second axis, one whole on all."""
    d = Distribution(RankMesh.of((2, 2), range(4)), (Cut(0, 1),))
    cut, whole = TensorInfo("cut", "weight", "float32", (6,)), TensorInfo("whole", "weight", "float32", (3,))
    return [
        [(WriteItem(cut, d.boxes((6,), (rank // 2, rank % 2))), d), (WriteItem(whole, (Box.whole((3,)),)), None)]
        for rank in range(4)
    ]


ARRAYS = {"cut": random_array((6,), "float32", 1), "whole": random_array((3,), "float32", 2)}


@pytest.mark.parametrize("rank", range(4))
def test_replicas_that_differ_are_found(rank: int) -> None:
    for error in save(4, mesh_of_four(), ARRAYS, f"memory://statements-{next(count)}", changed=rank):
        assert isinstance(error, UsageError)
        assert "has a different value on rank" in error.message


def test_a_mesh_of_which_a_rank_is_missing_is_listed() -> None:
    held = mesh_of_four()
    held[3] = held[3][1:]
    plan, *_ = save(4, held, ARRAYS, f"memory://statements-{next(count)}")  # rank 1 has the same part
    assert plan.described is None
    assert {t.info.name for t in plan.tensors} == {"cut", "whole"}


def test_boxes_that_do_not_follow_from_the_distribution_are_listed() -> None:
    held = mesh_of_four()
    item, d = held[2][0]
    held[2][0] = (WriteItem(item.info, (Box((0,), (2,)), Box((2,), (1,)))), d)
    plans = save(4, held, ARRAYS, f"memory://statements-{next(count)}")
    assert isinstance(plans[0], UcformatError)  # the mesh lacks a rank; as boxes they overlap


def test_tensors_of_several_descriptions_are_written_once_and_compared() -> None:
    held = mesh_of_four()
    extra = TensorInfo("extra", "weight", "float32", (2,))
    for rank in (0, 1):
        held[rank].append((WriteItem(extra, (Box.whole((2,)),)), None))
    arrays = {**ARRAYS, "extra": random_array((2,), "float32", 3)}
    plan, *_ = save(4, held, arrays, f"memory://statements-{next(count)}")
    assert len(plan.described.rows) == 3
    for error in save(4, held, arrays, f"memory://statements-{next(count)}", changed=3):
        assert isinstance(error, UsageError)
