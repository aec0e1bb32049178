"""Simulated ranks, which hold tensors in any layout: what differs between them is never saved nor certified."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.tiers import rounds
from tests.torch.test_deal import slices
from tests.torch.test_statements import Ranks
from ucformat.errors import UcformatError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.torch import fingerprint, save
from ucformat.torch.loading import certify as module
from ucformat.torch.loading.arguments import LoadOptions
from ucformat.torch.loading.certify import LiveState, certify_local
from ucformat.torch.loading.match import Problems
from ucformat.torch.saving.manifest import SaveMetadata, StateInfo
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.save import write_checkpoint
from ucformat.torch.state.fingerprint import pieces_fingerprints
from ucformat.torch.state.local import LocalShard, local_of
from ucformat.torch.state.memory import dtype_name

if TYPE_CHECKING:
    from ucformat.checkpoint import Checkpoint
    from ucformat.torch import Certificate

#: What is stored: with and without elements, and of a dtype that others are cast to and from.
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "none": (0, 3),
    "line": (5,),
    "matrix": (4, 3),
    "cube": (3, 2, 2),
    "bytes": (6,),
}
saves = iter(range(10**6))
KINDS = ("equal", "different", "unexpected", "cast")
#: Under this name a rank may hold a second tensor that is compared with `matrix`.
TWIN = "twin"


def values(name: str) -> torch.Tensor:
    shape, generator = SHAPES[name], torch.Generator().manual_seed(len(name))
    if name == "bytes":
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return torch.randn(shape, generator=generator)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    url = "memory://certify-layouts"
    save({"model": {name: values(name) for name in SHAPES}}, url, form="packed")
    return ucformat.open(url)


@dataclass
class Part:
    """What a rank holds of a tensor.

    Attributes:
        spoilt: the number of an element of the tensor that is another one here: more by `by`.
    """

    name: str
    boxes: tuple[Box, ...]
    distribution: Distribution | None = None
    dtype: torch.dtype | None = None
    spoilt: int | None = None
    by: int = 1

    @property
    def stored(self) -> str:
        return "matrix" if self.name == TWIN else self.name

    @property
    def size(self) -> int:
        return sum(box.size for box in self.boxes)

    def elements(self) -> list[int]:
        """The numbers in the whole tensor of the elements that the rank holds."""
        shape = SHAPES[self.stored]
        numbers = np.arange(math.prod(shape)).reshape(shape)
        return [n for box in self.boxes for n in numbers[slices(box)].reshape(-1).tolist()]

    def whole(self) -> torch.Tensor:
        whole = values(self.stored)
        if self.spoilt is not None:
            whole.view(-1)[self.spoilt] += self.by
        return whole

    def shard(self) -> LocalShard:
        whole = self.whole()
        boxes = [box for box in self.boxes if box.size]
        parts = [torch.zeros(3), *(whole[slices(box)].reshape(-1) for box in boxes)]
        memory = torch.cat([part.to(self.dtype or whole.dtype) for part in parts])
        offsets = np.cumsum([0, *(box.size for box in boxes)]).tolist()
        pieces = (Piece(b, at, row_major(b.shape)) for b, at in zip(boxes, offsets, strict=False))
        info = TensorInfo(self.name, "weight", dtype_name(memory.dtype), tuple(whole.shape))
        return LocalShard(info, tuple(pieces), memory[3:], self.distribution)


NAMES = {name: name for name in SHAPES} | {TWIN: "matrix"}


def certified(ck: Checkpoint, live: list[LiveState], names: dict[str, str] = NAMES) -> Certificate:
    """The certificate of ranks, of which all get the same."""

    def act(group: Any) -> Any:
        group.links = SimpleNamespace(members=None)
        return certify_local(live[group.rank], ck, group, LoadOptions(), names, 0.0)

    certificates = Ranks(len(live)).each(act)
    for c in certificates:
        assert not isinstance(c, BaseException), c
    alike = {repr(replace(c, nbytes=0, seconds=0.0)) for c in certificates}
    assert len(alike) == 1
    result: Certificate = certificates[0]
    return result


def live_states(held: list[list[Part]]) -> list[LiveState]:
    return [LiveState([part.shard() for part in of_rank]) for of_rank in held]


@st.composite
def worlds(draw: st.DrawFn) -> list[list[Part]]:
    """What each rank holds: of each tensor a part may be cast, spoilt, or not held at all."""
    size = draw(st.sampled_from([1, 2, 3, 4]))
    held: list[list[Part]] = [[] for _ in range(size)]
    for name, shape in SHAPES.items():
        for called in [name, TWIN] if name == "matrix" and draw(st.booleans()) else [name]:
            given = draw(parts(called, shape, size))
            one, other, third = (draw(st.sampled_from([part for part, _ in given])) for _ in "abc")
            if one.size and draw(st.booleans()):
                one.spoilt = draw(st.sampled_from(one.elements()))
            if draw(st.sampled_from([True, False, False])):
                other.dtype = torch.int32 if name == "bytes" else torch.float64
            lacks = draw(st.sampled_from([True, False, False]))
            for part, rank in given:
                if not (lacks and part is third):
                    held[rank].append(part)
    return held


@st.composite
def parts(draw: st.DrawFn, name: str, shape: tuple[int, ...], size: int) -> list[tuple[Part, int]]:
    """What ranks hold of a tensor, of which each has at most one part."""
    kind = draw(st.sampled_from(["mesh", "mesh", "meshes", "whole", "listed"]))
    if kind == "whole":
        ranks = draw(st.sets(st.integers(0, size - 1), min_size=1))
        return [(Part(name, (Box.whole(shape),)), rank) for rank in sorted(ranks)]
    if kind == "listed" and shape:  # boxes that are alike, that overlap, and between which are gaps
        ends = sorted(draw(st.tuples(*[st.integers(0, shape[0])] * 2)))
        rows = st.sampled_from([(0, ends[0]), (ends[0], shape[0]), (0, ends[1]), tuple(ends)])
        drawn = [draw(rows) for _ in range(size)]
        rest = [0 for _ in shape[1:]]
        boxes = [Box((begin, *rest), (end - begin, *shape[1:])) for begin, end in drawn]
        return [(Part(name, (box,)), rank) for rank, box in enumerate(boxes)]
    everyone: list[int] = draw(st.permutations(range(size)))
    at = draw(st.integers(1, size - 1)) if kind == "meshes" and size > 1 else size
    out = []
    for members in (everyone[:at], everyone[at:]):
        if not members:
            continue
        n = len(members)
        sizes = draw(st.sampled_from([(n,), (1, n)] + ([(2, n // 2)] if n % 2 == 0 else [])))
        axes = draw(st.permutations(range(len(sizes))))[: draw(st.sampled_from([0, 1, len(sizes)]))]
        dims = [draw(st.integers(0, len(shape) - 1)) for _ in axes] if shape else []
        d = Distribution(
            RankMesh.of(sizes, members),
            tuple(Cut(dim, axis) for dim, axis in zip(dims, axes, strict=False)),
        )
        left = [axis for axis in range(len(sizes)) if axis not in d.axes]
        locals_of = {d.local(shape, c).size for c in product(*map(range, sizes))}
        if left and len(locals_of) == 1 and draw(st.sampled_from([True, True, False])):
            position = draw(st.integers(0, 5))
            axis = draw(st.sampled_from(left))
            part = max(1, -(-(position + locals_of.pop()) // sizes[axis]))
            d = Distribution(d.mesh, d.cuts, axis, part, position)
        for rank in members:
            coordinate = d.mesh.coordinate(rank)
            assert coordinate is not None
            out.append((Part(name, d.boxes(shape, coordinate), d), rank))
    return out


def expected(held: list[list[Part]]) -> dict[str, set[tuple[str, tuple[int, ...]]]]:
    """The stored tensors, with ranks, by what a certificate must say of them."""
    out: dict[str, set[tuple[str, tuple[int, ...]]]] = {kind: set() for kind in KINDS}
    for name, shape in SHAPES.items():
        own = [(r, p) for r, of_rank in enumerate(held) for p in of_rank if p.stored == name]
        covered = np.zeros(shape, np.bool_)
        for _, part in own:
            for box in part.boxes:
                covered[slices(box)] = True
        spoilt = sorted({r for r, p in own if p.spoilt is not None})
        holding = [(r, p) for r, p in own if p.size or not covered.size]
        holders = sorted({r for r, _ in holding})
        others = sorted({r for r, p in holding if p.dtype is not None})
        if spoilt:
            out["different"].add((name, tuple(spoilt)))
        elif own and not covered.all():
            out["different"].add((name, ()))
        elif others:
            out["cast"].add((name, tuple(others)))
        else:
            out["equal" if own else "unexpected"].add((name, tuple(holders)))
    return out


@given(held=worlds().filter(any), forgotten=st.sets(st.sampled_from(sorted(SHAPES)), max_size=2))
@settings(max_examples=rounds(40, 1000), deadline=None)
def test_what_ranks_hold_is_what_the_certificate_says(
    checkpoint: Checkpoint, held: list[list[Part]], forgotten: set[str]
) -> None:
    """Of some tensors the checkpoint does not record a fingerprint."""
    metadata = checkpoint.metadata
    recorded = {k: v for k, v in metadata.fingerprints.items() if k.name not in forgotten}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.source, "metadata", metadata.replace(fingerprints=recorded))
        certificate = certified(checkpoint, live_states(held))
    told = {
        kind: {(e.name.replace(TWIN, "matrix"), e.ranks) for e in getattr(certificate, kind)}
        for kind in KINDS
    }
    right = expected(held)
    assert told == right
    assert bool(certificate) is not any(right[kind] for kind in right if kind != "equal")
    assert not certificate.missing
    assert certificate.left == 0


def copies_and_boxes() -> list[list[Part]]:
    """What four ranks hold: all of it twice, in one way or another."""
    square = RankMesh.of((2, 2), range(4))
    cut, copied = Distribution(square, (Cut(0, 1),)), Distribution(square, ())
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    return [
        [
            Part("line", cut.boxes((5,), divmod(rank, 2)), cut),
            Part("bytes", (Box((0,), (3,)), Box((3,), (3,))), copied),
            Part("matrix", (halves[rank // 2],)),
            Part("scalar", (Box.whole(()),)),
            Part("none", ()),
            Part("cube", cut.boxes(SHAPES["cube"], divmod(rank, 2)), cut),
        ]
        for rank in range(4)
    ]


def test_what_is_equal_is_not_read(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any, matched: Any, *__: Any) -> None:
        assert not matched

    monkeypatch.setattr(module, "read_staged", refuse)
    assert certified(checkpoint, live_states(copies_and_boxes()))


@pytest.mark.parametrize("name", ["line", "bytes", "matrix", "scalar", "cube"])
def test_any_of_several_replicas_is_compared(checkpoint: Checkpoint, name: str) -> None:
    for rank in range(4):
        held = copies_and_boxes()
        [part] = [part for part in held[rank] if part.name == name]
        part.spoilt = part.elements()[-1]
        certificate = certified(checkpoint, live_states(held))
        assert [(e.name, e.ranks) for e in certificate.different] == [(name, (rank,))]


def test_differences_of_two_replicas_do_not_cancel_out(checkpoint: Checkpoint) -> None:
    copied = Distribution(RankMesh.of((3,), range(3)), ())
    held = [[Part("bytes", (Box((0,), (3,)), Box((3,), (3,))), copied)] for _ in range(3)]
    for rank, by in ((1, 1), (2, -1)):
        held[rank][0].spoilt, held[rank][0].by = 4, by
    certificate = certified(checkpoint, live_states(held))
    assert [(e.name, e.ranks) for e in certificate.different] == [("bytes", (1, 2))]


@pytest.mark.parametrize("name", ["matrix", TWIN])
def test_each_of_two_tensors_that_one_stored_one_is_for_is_compared(
    checkpoint: Checkpoint, name: str
) -> None:
    d = Distribution(RankMesh.of((2,), range(2)), (Cut(0, 0),))
    for spoilt in range(2):
        held = [
            [Part(n, d.boxes(SHAPES["matrix"], (rank,)), d) for n in ("matrix", TWIN)]
            for rank in range(2)
        ]
        [part] = [part for part in held[spoilt] if part.name == name]
        part.spoilt = part.elements()[0]
        different = certified(checkpoint, live_states(held)).different
        assert [e.ranks for e in different] == [(spoilt,)]


def test_states_that_an_optimizer_or_an_entry_asks_for() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).backward()
    optimizer.step()
    url = f"memory://any-layout-{next(saves)}"
    save({"model": model, "optimizer": optimizer}, url)
    ck = ucformat.open(url)
    weight = local_of("weight", "weight", model.weight.detach())
    names = {"weight": "weight"}
    own = LiveState([weight])
    for other, verdict in (
        (own, None),
        (replace(own, optimizer=True), "unexpected"),
        (replace(own, asked=("optimizer",)), "unexpected"),
        (replace(own, optimizer=True, optimized=frozenset(names)), "uninitialised"),
    ):
        for live in ([own, other], [other, own], [own, other, own]):
            certificate = certified(ck, live, names)
            told = {
                kind: [(e.name, e.state) for e in getattr(certificate, kind)]
                for kind in ("unexpected", "uninitialised")
            }
            moment = [("weight", "momentum_buffer")]
            assert {kind: keys for kind, keys in told.items() if keys} == (
                {verdict: moment} if verdict else {}
            )
            assert bool(certificate) is (verdict is None)
            assert certificate.left == (verdict is None)


@pytest.mark.parametrize("ranks", list(permutations(range(3))))
def test_values_that_a_rank_asks_for_and_none_has(
    checkpoint: Checkpoint, ranks: tuple[int, ...]
) -> None:
    value, hyper = "the object notes.y", "the hyper-parameter lr of group 0 of optimizer"
    lacks = LiveState(
        [], problems=Problems(unexpected=(value, hyper)), asked=("notes", "optimizer")
    )
    for other, told in (
        (LiveState([]), [hyper, value]),
        (LiveState([], asked=("note",)), [hyper, value]),
        (LiveState([], asked=("notes", "optimizer")), [hyper]),  # this one has it
    ):
        live = [(lacks, LiveState([]), other)[rank] for rank in ranks]
        assert [e.name for e in certified(checkpoint, live).unexpected] == told


@st.composite
def published(draw: st.DrawFn) -> tuple[list[list[Part]], bool, bool]:
    """What each rank holds of a tensor, whether an element differs between ranks, and whether a box is alone."""
    size, name = (
        draw(st.sampled_from([2, 3, 4, 4])),
        draw(st.sampled_from([*SHAPES, "matrix", "cube"])),
    )
    given = draw(parts(name, SHAPES[name], size))
    held: list[list[Part]] = [[part for part, r in given if r == rank] for rank in range(size)]
    every = [part for of_rank in held for part in of_rank]
    if name == "matrix":  # and another one is equal
        held = [[replace(part, name=TWIN) for part in of_rank] + of_rank for of_rank in held]
    covered = {n for part in every for n in part.elements()}
    holders = []
    if covered:
        element = draw(st.sampled_from(sorted(covered)))
        holders = [part for part in every if element in part.elements()]
        meshes = {part.distribution and part.distribution.mesh for part in holders}
        of_one = st.sampled_from([*map(id, holders)])
        chosen = draw(st.one_of(of_one, of_one, st.sampled_from(["all", "none", *meshes])))
        for part in holders:
            mesh = part.distribution and part.distribution.mesh
            part.spoilt = element if chosen in ("all", mesh, id(part)) else None
    listed = any(
        part.distribution is None and part.boxes != (Box.whole(SHAPES[name]),) for part in every
    )
    return held, len({part.spoilt for part in holders}) > 1, listed


def saved(
    held: list[list[Part]], *, after_equal: bool = False, form: Any = "packed", codec: Any = None
) -> list[Any]:
    """What a save gives on each rank, None or the error that refuses it; perhaps the second save of these ranks."""
    number = next(saves)
    options = SaveOptions(
        f"memory://any-layout-{number}", form=form, codec=codec, overwrite=True, certify=True
    )

    def act(group: Any) -> None:
        own = held[group.rank]
        if after_equal:
            write(group, [replace(part, spoilt=None) for part in own])
        write(group, own)

    def write(group: Any, own: list[Part]) -> None:
        shards = [part.shard() for part in own]
        distributions = tuple(dict.fromkeys(s.distribution for s in shards if s.distribution))
        at = {d: n for n, d in enumerate(distributions)}
        sums = pieces_fingerprints((s, piece) for s in shards for piece in s.pieces)
        state = StateInfo(
            tuple((s.info, s.pieces) for s in shards),
            *({}, {}, (), {}, {}, {}),
            distributions=distributions,
            distributed=tuple(at[s.distribution] if s.distribution else -1 for s in shards),
            live=np.array(sums, "<u8").tobytes(),
        )
        memories = [s.tensor.view(torch.uint8).numpy() for s in shards]
        write_checkpoint(state, memories, options, SaveMetadata(), group)

    refused = Ranks(len(held)).each(act)
    if not any(refused):
        ck = ucformat.open(options.url)
        # one that has the other element last: not all hold it
        every = sorted((p for own in held for p in own), key=lambda p: p.spoilt is not None)
        for name, whole in {part.name: part.whole() for part in every}.items():
            assert ck[name].fingerprint == fingerprint(whole)
    return refused


@given(case=published(), after_equal=st.booleans())
@settings(max_examples=rounds(80, 1000), deadline=None)
def test_ranks_that_hold_different_tensors_under_one_name_cannot_save(
    case: tuple[list[list[Part]], bool, bool], *, after_equal: bool
) -> None:
    held, differ, listed = case
    refused = saved(held, after_equal=after_equal)
    if differ:
        assert all(isinstance(error, UcformatError) for error in refused)
    elif not listed:
        assert refused == [None] * len(held)


@pytest.mark.parametrize("after_equal", [False, True])
@pytest.mark.parametrize("copies", [2, 3])
def test_each_of_several_replicas_is_compared(copies: int, *, after_equal: bool) -> None:
    d = Distribution(RankMesh.of((copies,), range(copies)), ())
    for spoilt in range(copies):
        numbers = [3 if rank == spoilt else None for rank in range(copies)]
        same = Part("scalar", (Box.whole(()),), d)
        held = [[same, Part("line", (Box.whole((5,)),), d, spoilt=n)] for n in numbers]
        assert None not in saved(held, after_equal=after_equal)


@pytest.mark.parametrize("form", ["packed", "encoded", "zarr", "safetensors"])
@pytest.mark.parametrize("after_equal", [False, True])
@pytest.mark.parametrize("spoilt", [None, 0, 11])
def test_a_tensor_that_some_ranks_hold_in_several_boxes_and_one_whole(
    spoilt: int | None, form: str, *, after_equal: bool
) -> None:
    shape = SHAPES["matrix"]
    flat = Distribution(RankMesh.of((2,), [0, 1]), (), 0, part=8, position=3)
    held = [[Part("matrix", flat.boxes(shape, (rank,)), flat)] for rank in (0, 1)]
    assert all(len(part.boxes) > 1 for [part] in held)
    held.append([Part("matrix", (Box.whole(shape),), spoilt=spoilt)])
    codec = "raw" if form == "encoded" else None
    form = "packed" if form == "encoded" else form
    refused = saved(held, after_equal=after_equal, form=form, codec=codec)
    assert [error is None for error in refused] == [spoilt is None] * 3


@pytest.mark.parametrize(
    ("name", "spoilt"),
    [("", ()), ("line", (0,)), ("scalar", (1, 3)), ("scalar", (0, 1)), ("scalar", (2,))],
)
def test_tensors_that_are_replicated_over_different_axes(
    name: str, spoilt: tuple[int, ...]
) -> None:
    mesh = RankMesh.of((2, 2), range(4))
    cut, copied = Distribution(mesh, (Cut(0, 1),)), Distribution(mesh, ())
    held = [
        [
            Part("line", cut.boxes((5,), divmod(rank, 2)), cut),
            Part("scalar", (Box.whole(()),), copied),
        ]
        for rank in range(4)
    ]
    for rank in spoilt:
        for part in held[rank]:
            part.spoilt = 0 if part.name == name else None
    assert [error is None for error in saved(held)] == [not spoilt] * 4


def test_differences_of_two_meshes_do_not_cancel_out() -> None:
    box = Box.whole(SHAPES["matrix"])
    meshes = [Distribution(RankMesh.of((2,), [rank, rank + 1]), ()) for rank in (0, 2)]
    held = [
        [Part(name, (box,), d, spoilt=spoilt)]
        for name, d, numbers in zip(("matrix", TWIN), meshes, ((None, 4), (4, None)), strict=True)
        for spoilt in numbers
    ]
    assert None not in saved(held)
