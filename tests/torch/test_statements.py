"""Plans from descriptions: files that simulated ranks write by them open as what the ranks held."""

from __future__ import annotations

import functools
import math
import threading
from contextlib import contextmanager, nullcontext
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.fakes import random_array
from tests.torch.test_deal import slices
from ucformat.errors import UcformatError, UsageError
from ucformat.format import arrays as limits
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.storage.memory import MemoryStore
from ucformat.torch.comm.wire import Addressed, decode, encode
from ucformat.torch.saving import shards
from ucformat.torch.saving.manifest import (
    RankReport,
    SaveMetadata,
    StateInfo,
    WriteReport,
    WrittenByRank,
    merge_reports,
    numbered_mesh,
    slowest,
    write_report,
)
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.plan import SavePlanner
from ucformat.torch.saving.save import write_checkpoint
from ucformat.torch.saving.statement import WriteItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        self._handing = threading.Condition()
        self._handed: dict[tuple[int, int], bytes] = {}

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

    def hand(self, sender: int, to: int, data: bytes) -> None:
        """Wait until the receiver has taken a message: nothing is kept on the way."""
        with self._handing:
            self._handed[sender, to] = data
            self._handing.notify_all()
            assert self._handing.wait_for(lambda: (sender, to) not in self._handed, 20)

    def take(self, sender: int, to: int) -> bytes:
        with self._handing:
            assert self._handing.wait_for(lambda: (sender, to) in self._handed, 20)
            self._handing.notify_all()
            return self._handed.pop((sender, to))

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

    intact, call = True, "save"

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, ranks.size
        self.planners: dict[type, Any] = {}

    @contextmanager
    def kept(self, kind: type) -> Iterator[Any]:
        yield self.planners.setdefault(kind, kind())

    def sharing_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def send_bulk(self, messages: Iterable[tuple[int, Callable[[], Sequence[Any]]]]) -> None:
        for to, parts in messages:
            self._ranks.hand(self.rank, to, b"".join(bytes(p) for p in parts()))

    def receive_bulk(self, shared: Any, slots: Mapping[int, tuple[int, int]]) -> None:
        for sender, (begin, end) in slots.items():
            shared.memory[begin:end] = np.frombuffer(self._ranks.take(sender, self.rank), np.uint8)

    def combine(
        self,
        value: Any,
        merge: Any,
        kind: Any,
        then: Any = None,
        answer_kind: Any = None,
        relay: Any = None,
    ) -> Any:
        if relay and self.rank and not isinstance(value, BaseException):
            value = relay(value)

        def answer(values: list[Any]) -> list[Any]:
            merged = functools.reduce(merge, [decode(encode(v, kind), kind) for v in values])
            told = then(merged) if then else merged
            told = told if isinstance(told, Addressed) else Addressed(told, {})
            answers = [told.others.get(rank, told.common) for rank in range(self.size)]
            sent = answer_kind if then else kind
            return [decode(encode(a, sent), sent) for a in answers]

        return self._ranks.exchange(self.rank, value, answer)


@st.composite
def worlds(
    draw: st.DrawFn,
) -> tuple[int, list[list[tuple[WriteItem, Distribution | None]]], dict[str, Any]]:
    """The size of a world, what each rank holds, and the tensors: distributed, held whole by some ranks, or listed."""
    size = draw(st.sampled_from([1, 2, 4]))
    held: list[list[tuple[WriteItem, Distribution | None]]] = [[] for _ in range(size)]
    arrays: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int8"]))
        info = TensorInfo(
            f"{'tT'[number % 2]}{number // 2}", "weight", dtype, shape
        )  # some differ only in case
        arrays[info.name] = random_array(shape, dtype, number)
        kind = draw(st.sampled_from(["mesh", "mesh", "whole", "listed"]))
        if kind == "mesh":
            sizes = draw(
                st.sampled_from(
                    [s for s in ((size,), (2, size // 2), (1, size)) if math.prod(s) == size]
                )
            )
            ranks = draw(st.permutations(range(size)))
            axes = (
                draw(st.permutations(range(len(sizes))))[: draw(st.integers(0, len(sizes)))]
                if shape
                else []
            )
            cuts = tuple(Cut(draw(st.integers(0, len(shape) - 1)), axis) for axis in axes)
            d = Distribution(RankMesh.of(sizes, ranks), cuts)
            left = [axis for axis in range(len(sizes)) if axis not in axes]
            locals_of = {d.local(shape, at).size for at in product(*map(range, sizes))}
            if left and len(locals_of) == 1 and draw(st.booleans()):
                position = draw(st.integers(0, 3))
                part = max(1, -(-(position + locals_of.pop()) // sizes[left[0]]))
                d = Distribution(d.mesh, cuts, left[0], part, position)
            for rank in range(size):
                at = d.mesh.coordinate(rank)
                assert at is not None
                held[rank].append((WriteItem(info, d.boxes(shape, at)), d))
        elif kind == "whole":
            for rank in draw(st.sets(st.integers(0, size - 1), min_size=1)):
                held[rank].append((WriteItem(info, (Box.whole(shape),)), None))
        else:
            inner = (
                st.lists(st.integers(0, shape[0]), min_size=size - 1, max_size=size - 1)
                if shape
                else st.just([])
            )
            for rank, (a, b) in enumerate(
                pairwise([0, *sorted(draw(inner)), shape[0]]) if shape else ()
            ):
                box = Box((a, *(0 for _ in shape[1:])), (b - a, *shape[1:]))
                held[rank].append((WriteItem(info, (box,)), None))
            if not shape:
                held[0].append((WriteItem(info, (Box.whole(shape),)), None))
    return size, held, arrays


def save(
    size: int,
    held: Sequence[Any],
    arrays: Mapping[str, Any],
    url: str,
    changed: int = -1,
    form: Any = "packed",
) -> list[Any]:
    """Let all ranks save twice, arrays in small shards; on rank `changed` other values. Returns their plans."""
    ranks = Ranks(size)
    small: dict[str, Any] = {} if form == "packed" else {"chunk_bytes": 8, "shard_bytes": 16}
    options = SaveOptions(url, form="zarr" if form == "mixed" else form, overwrite=True, **small)

    def act(group: Any) -> Any:
        tensors, memories = [], []
        for item, _ in held[group.rank]:
            parts = [arrays[item.info.name][slices(b)].tobytes() for b in item.boxes]
            ends = [len(p) // item.info.itemsize for p in parts]
            offsets = np.cumsum([0, *ends]).tolist()
            pieces = (
                Piece(b, at, row_major(b.shape)) for b, at in zip(item.boxes, offsets, strict=False)
            )
            tensors.append((item.info, tuple(pieces)))
            raw = b"".join(parts)
            memories.append(
                np.frombuffer(
                    bytes(255 - b for b in raw) if group.rank == changed else raw, np.uint8
                )
            )
        distributions = tuple(dict.fromkeys(d for _, d in held[group.rank] if d))
        numbers = tuple(-1 if d is None else distributions.index(d) for _, d in held[group.rank])
        state = StateInfo(
            tuple(tensors), {}, {}, (), {}, {}, {}, distributions=distributions, distributed=numbers
        )
        for again in (False, True):
            before = ranks.collectives
            write_checkpoint(state, memories, options, SaveMetadata(), group)
            told = ranks.collectives - before
            if again and not group.rank:
                assert told == 2  # nothing new is told
        return None if group.rank else group.planners[SavePlanner].plan

    return ranks.each(act)


@pytest.mark.parametrize("form", ["packed", "zarr", "mixed"])
@given(case=worlds(), batch=st.sampled_from([32, 10**6]))
@settings(max_examples=60, deadline=None)
def test_what_ranks_describe_opens_as_what_they_held(case: Any, batch: int, form: str) -> None:
    size, held, arrays = case
    url = f"memory://statements-{next(count)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_BYTES", batch)
        if form == "mixed":
            patch.setattr(limits, "MOST_SMALL_ARRAYS", 1)
            patch.setattr(limits, "SMALL_BYTES", 20)
        plan, *_ = save(size, held, arrays, url, form=form)
    assert not isinstance(plan, BaseException), plan
    store = MemoryStore(url.removeprefix("memory://"))
    ck = ucformat.open(store)
    for name, array in arrays.items():
        got = ck[name].read()
        assert got.tobytes() == array.tobytes()
        assert got.dtype == array.dtype
    report = ucformat.verify(store)
    assert report, report
    if form == "mixed":
        packed = {t.name for t in ck.manifest.tensors if t.path is None}
        little = {name for name, array in arrays.items() if array.nbytes < 20}
        assert packed == (little if len(little) > 1 else set())
        return
    alone = [i for of_rank in held for i, d in of_rank if d is None and i.info.size]
    listed = {i.info.name for i in alone if [b.shape for b in i.boxes] != [i.info.shape]}
    assert {t.info.name for t in plan.exceptions.listed} == listed
    stored = plan.packed if form == "packed" else plan.arrays
    assert {i.name for i in stored.infos} == arrays.keys()
    if form == "packed":
        assert len(stored.described.rows if stored.described else ()) == len(arrays) - len(listed)


def mesh_of_four() -> list[list[tuple[WriteItem, Distribution | None]]]:
    """Two tensors on two by two ranks: one cut along the second axis, one whole on all."""
    d = Distribution(RankMesh.of((2, 2), range(4)), (Cut(0, 1),))
    cut, whole = (
        TensorInfo("cut", "weight", "float32", (6,)),
        TensorInfo("whole", "weight", "float32", (3,)),
    )
    return [
        [
            (WriteItem(cut, d.boxes((6,), (rank // 2, rank % 2))), d),
            (WriteItem(whole, (Box.whole((3,)),)), None),
        ]
        for rank in range(4)
    ]


ARRAYS = {"cut": random_array((6,), "float32", 1), "whole": random_array((3,), "float32", 2)}


@pytest.mark.parametrize("form", ["packed", "zarr"])
@pytest.mark.parametrize("rank", range(4))
def test_replicas_that_differ_are_found(rank: int, form: str) -> None:
    for error in save(
        4, mesh_of_four(), ARRAYS, f"memory://statements-{next(count)}", changed=rank, form=form
    ):
        assert isinstance(error, UsageError)
        assert "has a different value on rank" in error.message


@pytest.mark.parametrize("form", ["packed", "zarr"])
def test_a_tensor_without_elements_has_no_boxes_to_list(form: str) -> None:
    held = mesh_of_four()
    for rank in (1, 3):
        held[rank].append((WriteItem(TensorInfo("none", "weight", "float32", (0, 3)), ()), None))
    arrays = {**ARRAYS, "none": np.zeros((0, 3), np.float32)}
    plan, *_ = save(4, held, arrays, url := f"memory://statements-{next(count)}", form=form)
    assert not plan.exceptions.listed
    assert ucformat.open(url)["none"].shape == (0, 3)


def test_what_is_the_same_on_ranks_is_reported_once() -> None:
    reports = [
        write_report(
            rank,
            StateInfo((), {}, {"rng": rank}, ({"params": ["a"]},), {}, {}, {}),
            WrittenByRank([], {}, 0, 0.0, {}),
            (1.0, 0.5, 0.0, 0.0),
            0,
        )
        for rank in range(9)
    ]
    odd = StateInfo((), {}, {}, ({"params": ["b"]},), {}, {}, {})
    reports.insert(
        4, write_report(9, odd, WrittenByRank([], {"step": 1}, 0, 0.0, {}), (1.0, 0.5, 0.0, 0.0), 0)
    )
    merged = functools.reduce(merge_reports, reports)
    assert len({r.state for r in merged.ranks}) == 2
    assert len(merged.states) == 2
    assert len(merged.ranks) == 10
    assert merged.objects == {"step": 1}
    assert decode(encode(merged, WriteReport), WriteReport) == merged


def test_a_manifest_lists_the_slowest_of_many_ranks() -> None:
    reports = [RankReport(rank, b"", 0, float(rank % 50), 0.0) for rank in range(1000)]
    listed = slowest(reports)
    assert [r.rank for r in listed] == sorted(r.rank for r in listed)
    assert len(listed) == 64
    assert {r.seconds for r in listed} == {46.0, 47.0, 48.0, 49.0}
    assert slowest(reports[:3]) == reports[:3]


def test_a_mesh_of_which_a_rank_is_missing_is_listed() -> None:
    held = mesh_of_four()
    held[3] = held[3][1:]
    plan, *_ = save(
        4, held, ARRAYS, f"memory://statements-{next(count)}"
    )  # rank 1 has the same part
    assert [t.info.name for t in plan.exceptions.listed] == ["cut"]
    assert [plan.packed.infos[row.tensor].name for row in plan.packed.described.rows] == ["whole"]


def test_a_tensor_that_one_rank_cannot_describe_is_listed_by_all() -> None:
    held = mesh_of_four()
    held[2][0] = (held[2][0][0], None)
    plan, *_ = save(4, held, ARRAYS, f"memory://statements-{next(count)}")
    assert [t.info.name for t in plan.exceptions.listed] == ["cut"]
    assert [plan.packed.infos[row.tensor].name for row in plan.packed.described.rows] == ["whole"]


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
    assert len(plan.packed.described.rows) == 3
    for error in save(4, held, arrays, f"memory://statements-{next(count)}", changed=3):
        assert isinstance(error, UsageError)


def test_a_mesh_is_numbered_by_those_that_take_part() -> None:
    mesh = RankMesh.of((2,), [6, 4])
    assert numbered_mesh(mesh, {4: 0, 6: 1, 9: 2}) == RankMesh.of((2,), [1, 0])
    assert numbered_mesh(mesh, {4: 0, 9: 1}) is None
