"""Reading into the tensors of a state: straight into their memory, or through host buffers where they are cast."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
import ucformat.torch
from tests.fakes import ODD, random_array
from tests.packed import write_packed
from ucformat.errors import ChecksumError, UsageError
from ucformat.geometry.box import Box
from ucformat.geometry.local import Dim, IndexRun
from ucformat.geometry.tensor import Key
from ucformat.reading.execute import ReadOptions
from ucformat.storage.memory import MemoryStore
from ucformat.torch.loading import read as reading
from ucformat.torch.loading.match import Matched
from ucformat.torch.loading.read import read
from ucformat.torch.state.elements import host_memory
from ucformat.torch.state.local import LocalShard, local_of, pieces_in
from ucformat.torch.state.memory import torch_dtype

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint

ROWS, COLUMNS = 40, 30
FLOATS: Any = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
ARRAYS = {
    **ODD,
    ("w", "weight"): FLOATS,
    ("scalar", "weight"): FLOATS[0, 0],
    ("row", "weight"): FLOATS[0],
}
NO_FACTS: dict[str, Any] = {"aliases": {}, "groups": ()}


@pytest.fixture(scope="module", params=["packed", "arrays"])
def ck(request: pytest.FixtureRequest) -> Checkpoint:
    place = (
        uuid4().hex
    )  # a test process that takes over others' tests sets up a module's fixtures again
    made = write_packed(MemoryStore(f"{place}-packed"), ARRAYS, **NO_FACTS)
    if request.param == "packed":
        return made
    return ucformat.convert(made, MemoryStore(f"{place}-arrays"), chunk_bytes=256, shard_bytes=1024)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tensor is read in many blocks, and in many batches."""
    monkeypatch.setattr(reading, "STAGED_BYTES", 400)


def target(name: str, tensor: torch.Tensor, state: str = "weight") -> LocalShard:
    return local_of(name, state, tensor)


def read_one(ck: Checkpoint, local: LocalShard, **options: Any) -> int:
    return read(ck, [Matched(local, ck.tensors[local.key])], ReadOptions(**options)).nbytes


def bits(tensor: torch.Tensor) -> bytes:
    return host_memory(torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)).tobytes()


@pytest.mark.parametrize("key", ODD, ids=str)
def test_every_dtype_is_read_as_it_is(ck: Checkpoint, key: tuple[str, str]) -> None:
    array = ODD[key]
    tensor = torch.zeros(array.shape, dtype=torch_dtype(array.dtype.name))
    nbytes = read_one(ck, target(key[0], tensor, key[1]))
    assert bits(tensor) == array.tobytes()
    assert nbytes >= array.nbytes


def strided(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of 40 by 30 whose memory is not one row after the other."""
    if kind == "transposed":
        return torch.zeros(COLUMNS, ROWS, dtype=dtype).t()
    if kind == "sliced":
        return torch.zeros(ROWS + 2, COLUMNS * 2, dtype=dtype)[1:-1, 1::2]
    if kind == "middle":
        return torch.zeros(ROWS, 3, COLUMNS, dtype=dtype)[:, 1]
    return torch.zeros(ROWS, COLUMNS, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["dense", "transposed", "sliced", "middle"])
def test_into_memory_of_any_strides(ck: Checkpoint, kind: str, dtype: torch.dtype) -> None:
    """Straight where the dtype is the stored one, else through buffers; nothing beside it is touched."""
    tensor = strided(kind, dtype)
    whole = tensor._base if tensor._base is not None else tensor
    read_one(ck, target("w", tensor))
    assert torch.equal(tensor, torch.from_numpy(FLOATS).to(dtype))
    assert int((whole != 0).sum()) == int((tensor != 0).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_pieces_of_a_shard(ck: Checkpoint, dtype: torch.dtype, turned: bool) -> None:
    """Rows 3 to 8 and 20 to 40, columns 0 to 5 and 9 to 30, side by side."""
    rows, columns = Dim(25, (run(3, 0, 5), run(20, 5, 20))), Dim(26, (run(0, 0, 5), run(9, 5, 21)))
    tensor = torch.zeros(26, 25, dtype=dtype).t() if turned else torch.zeros(25, 26, dtype=dtype)
    info = target("w", torch.zeros(ROWS, COLUMNS, dtype=dtype)).info
    nbytes = read_one(
        ck, LocalShard(info, pieces_in(tensor, (rows, columns)), tensor), verify="never"
    )
    kept = FLOATS[[*range(3, 8), *range(20, 40)]][:, [*range(5), *range(9, 30)]]
    assert torch.equal(tensor, torch.from_numpy(kept).to(dtype))
    assert nbytes >= kept.nbytes


def run(start: int, at: int, size: int) -> IndexRun:
    return IndexRun(range(start, start + size), at)


@settings(max_examples=60)
@given(st.data())
def test_any_shard_through_buffers_of_any_size(data: st.DataObject) -> None:
    dims = []
    for n in (ROWS, COLUMNS):
        ends = sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=4, unique=True)))
        pairs = list(zip(ends[::2], ends[1::2], strict=False))
        starts = [0, *np.cumsum([b - a for a, b in pairs]).tolist()]
        dims.append(
            Dim(
                starts[-1],
                tuple(run(a, at, b - a) for (a, b), at in zip(pairs, starts, strict=False)),
            )
        )
    shape = tuple(d.size for d in dims)
    order = data.draw(st.permutations([0, 1]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    base = torch.zeros([shape[d] for d in order], dtype=dtype)
    tensor = base.permute(*[order.index(d) for d in range(2)])
    info = target("w", torch.zeros(ROWS, COLUMNS, dtype=dtype)).info
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "STAGED_BYTES", data.draw(st.sampled_from([4, 60, 1000, 10**6])))
        read_one(floats_alone(), LocalShard(info, pieces_in(tensor, dims), tensor))
    index = [[i for r in d.runs for i in r.indices] for d in dims]
    assert torch.equal(tensor, torch.from_numpy(FLOATS[np.ix_(*index)]).to(dtype))


@cache
def floats_alone() -> Checkpoint:
    return write_packed(MemoryStore("reading-any"), {("w", "weight"): FLOATS}, **NO_FACTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scalars_rows_and_empty_tensors(ck: Checkpoint, dtype: torch.dtype) -> None:
    scalar, row, empty = (torch.zeros(s, dtype=dtype) for s in ((), (COLUMNS,), (0, 4)))
    locals_ = [target("scalar", scalar), target("row", row), target("empty", empty)]
    nbytes = read(ck, [Matched(x, ck.tensors[x.key]) for x in locals_]).nbytes
    assert scalar.item() == torch.tensor(FLOATS[0, 0]).to(dtype).item()
    assert torch.equal(row, torch.from_numpy(FLOATS[0]).to(dtype))
    assert nbytes >= 4 * (COLUMNS + 1)
    assert read(ck, []) == (0, 0)


def test_what_is_cast_and_what_is_not_in_one_go(ck: Checkpoint) -> None:
    plain, cast, other = (
        torch.zeros(ROWS, COLUMNS),
        torch.zeros(ROWS, COLUMNS, dtype=torch.float64),
        torch.zeros(COLUMNS),
    )
    locals_ = [target("w", plain), target("w", cast), target("row", other)]
    done: list[int] = []
    nbytes = read(
        ck, [Matched(x, ck.tensors[x.key]) for x in locals_], ReadOptions(progress=done.append)
    ).nbytes
    assert torch.equal(plain, torch.from_numpy(FLOATS))
    assert torch.equal(cast, torch.from_numpy(FLOATS).double())
    assert torch.equal(other, torch.from_numpy(FLOATS[0]))
    assert sum(done) == nbytes


@pytest.mark.parametrize(("rows", "nbytes"), [(ROWS, 800), (1, 4 * COLUMNS)])
def test_host_memory_is_that_of_two_parts_or_of_all(
    ck: Checkpoint, rows: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    buffer = reading._host_buffer

    def counted(nbytes: int, devices: Any) -> torch.Tensor:
        made.append(nbytes)
        return buffer(nbytes, devices)

    monkeypatch.setattr(reading, "_host_buffer", counted)
    whole = target("w", torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
    (piece,) = whole.pieces
    box = Box(piece.box.start, (rows, COLUMNS))
    read_one(ck, replace(whole, pieces=(replace(piece, box=box),)))
    assert made == [-(-nbytes // 16) * 16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_changed_byte_is_found_on_both_ways(dtype: torch.dtype) -> None:
    store = MemoryStore(f"reading-changed-{dtype}")
    array = random_array((ROWS, COLUMNS), "float32", 5)
    damaged = write_packed(store, {("w", "weight"): array}, **NO_FACTS)
    (file, *_) = [i.key for i in store.list() if i.key.endswith("rank1.bin")]
    data = bytearray(store.read(file))
    data[50] ^= 4
    with store.create(file) as out:
        out.write(bytes(data))
    tensor = torch.zeros(ROWS, COLUMNS, dtype=dtype)
    with pytest.raises(ChecksumError):
        read_one(damaged, target("w", tensor), verify="always")
    assert read_one(damaged, target("w", tensor), verify="never") > 0


def test_expanded_memory_cannot_hold_a_tensor(ck: Checkpoint) -> None:
    """Its rows are one memory: whatever were read would be the last row."""
    tensor = torch.zeros(1, COLUMNS).expand(ROWS, COLUMNS)
    with pytest.raises(UsageError, match=r"w \(weight\) is expanded"):
        read_one(ck, target("w", tensor))
    assert ck.tensors[Key("w", "weight")].shape == (ROWS, COLUMNS)
    overlapping = torch.zeros(2 * (ROWS + COLUMNS)).as_strided((ROWS, COLUMNS), (1, 2))
    with pytest.raises(UsageError, match=r"w \(weight\) is expanded"):
        read_one(ck, target("w", overlapping))
    assert not overlapping.any()


@pytest.mark.parametrize("state", [{"c": 0}, {"im": 0}])
def test_lazy_conjugates_and_negatives_are_not_filled(
    state: dict[str, Any], tmp_path: Path
) -> None:
    """What they show is not what their memory holds, and a copy of them is nobody's."""
    stored = torch.complex(torch.arange(4.0), torch.ones(4))
    ucformat.torch.save({"c": stored, "im": stored.imag}, tmp_path / "ck")
    own = torch.zeros(4, dtype=torch.complex64)
    given = {name: own.conj() if name == "c" else own.conj().imag for name in state}
    with pytest.raises(UsageError, match=r"is a lazy (conjugate|negative)"):
        ucformat.torch.load(given, tmp_path / "ck")
    assert not own.any()


def test_a_dtype_that_torch_does_not_have() -> None:
    with pytest.raises(UsageError, match="has no dtype 'float6_e2m3fn'") as error:
        torch_dtype("float6_e2m3fn")
    assert error.value.hint
