"""Which boxes a rank's DTensor holds: against cutting an index tensor with torch, and against FSDP2 itself."""

from __future__ import annotations

import math
from contextlib import contextmanager
from fractions import Fraction
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.torch.test_deal import agreed
from ucformat.errors import LayoutError, UsageError
from ucformat.geometry.distribution import Distribution, RankMesh
from ucformat.torch.saving.statement import WriteItem
from ucformat.torch.state.elements import elements_of, host_memory, row_major_bytes
from ucformat.torch.state.local import LocalShard, _dims_candidates, local_of, mesh_of, pieces_in
from ucformat.torch.state.memory import dtype_name
from ucformat.torch.state.subclasses import InnerTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def alone_as(rank: int, ranks: int) -> Iterator[None]:
    """This process as one rank of many, whose communication does nothing."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def own_names(rank: int, *names: str) -> tuple[str, ...]:
    """Names for the axes of a mesh: torch would take an equal mesh of an earlier test, which knows another rank."""
    return tuple(f"{name}-{rank}" for name in names)


def held(local: LocalShard) -> set[tuple[tuple[int, ...], float]]:
    """The elements that the pieces say this rank holds: where in the whole tensor, and what is there."""
    out = set()
    memory = host_memory(local.tensor)
    for piece in local.pieces:
        values = row_major_bytes(elements_of(piece, memory, local.info.itemsize))
        places = product(
            *(range(a, a + n) for a, n in zip(piece.box.start, piece.box.shape, strict=True))
        )
        array = np.frombuffer(values.tobytes(), np.dtype(local.info.dtype))
        out |= set(zip(places, map(float, array), strict=True))
    assert len(out) == local.tensor.numel()
    return out


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Each element is its own place in row-major order."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def expected(tensor: torch.Tensor, shape: tuple[int, ...]) -> set[tuple[tuple[int, ...], float]]:
    """The places of numbered elements."""
    places = list(product(*map(range, shape)))
    return {(places[int(v)], v) for v in tensor.reshape(-1).tolist()}


def chunk(tensor: torch.Tensor, degree: int, index: int, dim: int) -> torch.Tensor:
    parts = tensor.chunk(degree, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


@st.composite
def cut_orders(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Placement], list[int], list[int]]:
    """A shape, placements over a mesh, its sizes, and the order in which its axes were cut."""
    shape = tuple(
        draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 9, 12]), min_size=1, max_size=3))
    )
    degrees = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    order = draw(st.permutations(range(len(degrees))))
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in degrees]
    placements: list[Placement] = []
    for axis, dim in enumerate(dims):
        before = order[: order.index(axis)]
        factor = math.prod(degrees[b] for b in before if b > axis and dims[b] == dim)
        plain = Replicate() if dim is None else Shard(dim)
        placements.append(
            plain if dim is None or factor == 1 else _StridedShard(dim, split_factor=factor)
        )
    return shape, placements, degrees, order


def local_by_hand(
    shape: tuple[int, ...],
    placements: list[Placement],
    degrees: list[int],
    order: list[int],
    at: tuple[int, ...],
) -> torch.Tensor:
    tensor = numbered(shape)
    for axis in order:
        placement: Any = placements[axis]
        if not placement.is_replicate():
            tensor = chunk(tensor, degrees[axis], at[axis], placement.dim)
    return tensor.clone()


@given(cut_orders())
def test_cuts_in_any_order_of_the_axes(
    case: tuple[tuple[int, ...], list[Placement], list[int], list[int]],
) -> None:
    """Two or three axes that cut one dim, whichever was cut first, even or not; `Shard` where none came before."""
    shape, placements, degrees, order = case
    for at in product(*map(range, degrees)):
        tensor = local_by_hand(shape, placements, degrees, order, at)
        dims, cuts = next(iter(_dims_candidates(shape, placements, degrees, at)))
        info = local_of("t", "weight", numbered(shape)).info
        assert tuple(d.size for d in dims) == tuple(tensor.shape)
        assert held(LocalShard(info, pieces_in(tensor, dims), tensor)) == expected(tensor, shape)
        assert cuts is not None
        distribution = Distribution(RankMesh.of(tuple(degrees), range(math.prod(degrees))), cuts)
        assert distribution.boxes(shape, at) == tuple(
            p.box for p in pieces_in(tensor, dims) if p.box.size
        )


def strided(
    tensor: torch.Tensor, placements: tuple[Placement, ...], degrees: tuple[int, ...], at: Any
) -> torch.Tensor:
    """Cut from left to right as torch's own `_StridedShard` cuts: its share of each of its parts."""
    for placement, degree, index in zip(placements, degrees, at, strict=True):
        if isinstance(placement, _StridedShard):
            parts = [
                chunk(tensor, placement.split_factor, k, placement.dim)
                for k in range(placement.split_factor)
            ]
            tensor = torch.cat(
                [chunk(p, degree, index, placement.dim) for p in parts], placement.dim
            )
        elif isinstance(placement, Shard):
            tensor = chunk(tensor, degree, index, placement.dim)
    return tensor.clone()


@pytest.mark.parametrize("n", [5, 7, 8, 12])
@pytest.mark.parametrize("factor", [2, 3, 5])
def test_a_strided_shard_that_no_other_axis_explains(n: int, factor: int) -> None:
    """Its factor stands for a cut that this mesh does not have: it takes its share of each part."""
    placements = (_StridedShard(0, split_factor=factor), Shard(1))
    covered: list[float] = []
    for rank in range(4):
        with alone_as(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            local = strided(numbered((n, 3)), placements, (2, 2), mesh.get_coordinate())
            tensor = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=(n, 3), stride=(3, 1)
            )
            found = held(local_of("t", "weight", tensor))
        assert found == expected(local, (n, 3))
        covered += [v for _, v in found]
    assert sorted(covered) == list(range(3 * n))


@pytest.mark.parametrize("size", [1, 2, 7, 9, 12, 13])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3), (4, 2)])
def test_fsdp2_over_tensor_parallelism(size: int, dp: int, tp: int) -> None:
    """What FSDP2 itself keeps of rows that tensor parallelism cut first, even or not, empty shards too."""
    items = []
    for rank in range(dp * tp):
        with alone_as(rank, dp * tp):
            model = two_layers(size)
            names = own_names(rank, "dp", "tp")
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=names)
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh[names[1]], plan, src_data_rank=None)
            fully_shard(model, mesh=mesh[names[0]])
            locals_ = [local_of(name, "weight", p) for name, p in model.named_parameters()]
            for local in locals_:
                shape = local.info.shape
                assert all(places_value(place, shape) == v for place, v in held(local))
            items.append([WriteItem(x.info, tuple(p.box for p in x.pieces)) for x in locals_])
            assert mesh_of(list(model.parameters())) == dict(zip(names, (dp, tp), strict=True))
    infos = agreed(items)[1].packed.infos  # which proves that no element is missing
    assert {i.name: i.shape for i in infos} == {
        "up.weight": (size, 5), "up.bias": (size,), "down.weight": (4, size), "down.bias": (4,)
    }  # fmt: skip


def two_layers(size: int) -> torch.nn.Module:
    model = torch.nn.Module()
    model.up = torch.nn.Linear(5, size)
    model.down = torch.nn.Linear(size, 4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(numbered(tuple(p.shape)))
    return model


def places_value(place: tuple[int, ...], shape: tuple[int, ...]) -> float:
    return float(np.ravel_multi_index(place, shape))


@pytest.mark.parametrize("dim", [0, 1])
def test_fsdp2_over_replicas_and_along_any_dim(dim: int) -> None:
    for rank in range(4):
        with alone_as(rank, 4):
            model = torch.nn.Linear(6, 10)
            with torch.no_grad():
                model.weight.copy_(numbered((10, 6)))
            mesh = init_device_mesh(
                "cpu", (2, 2), mesh_dim_names=own_names(rank, "replicas", "shards")
            )
            fully_shard(
                model, mesh=mesh, shard_placement_fn=lambda p: Shard(dim if p.ndim > 1 else 0)
            )
            local = local_of("w", "weight", model.weight)
            assert held(local) == expected(chunk(numbered((10, 6)), 2, rank % 2, dim), (10, 6))


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with alone_as(2, 4):
        mesh = dist.DeviceMesh("cpu", [0, 1], _init_backend=False)
        tensor = DTensor.from_local(
            torch.empty(0), mesh, [Shard(0)], run_check=False, shape=(6,), stride=(1,)
        )
        local = local_of("t", "weight", tensor)
        assert local.pieces == ()
        assert local.info.shape == (6,)


def as_dtensor(
    local: torch.Tensor, placements: list[Placement], shape: tuple[int, ...], **kwargs: Any
) -> DTensor:
    mesh = init_device_mesh("cpu", (2, 2))
    stride = numbered(shape).stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride, **kwargs
    )


def test_a_local_shape_that_is_not_what_the_placements_say() -> None:
    with alone_as(1, 4):
        tensor = as_dtensor(torch.zeros(3, 2), [Shard(0), Replicate()], (8, 2))
        with pytest.raises(
            LayoutError,
            match=r"w \(exp_avg\): its local shape \(3, 2\) .* of \(8, 2\) at coordinate",
        ) as e:
            local_of("w", "exp_avg", tensor)
        assert e.value.hint is not None


def test_a_local_tensor_that_says_where_it_is() -> None:
    """As Megatron-FSDP tells DCP, whatever the placements are: here the second half, where they say the first."""
    chunk = SimpleNamespace(offsets=(4, 0), sizes=(4, 2))
    with alone_as(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=own_names(0, "said"))
        tensor = DTensor.from_local(numbered((8, 2))[4:], mesh, [Shard(0)], run_check=False)
        tensor._local_tensor.__create_chunk_list__ = lambda: [chunk]
        local = local_of("w", "weight", tensor)
        assert held(local) == expected(numbered((8, 2))[4:], (8, 2))
        assert local.distribution is None
        for wrong in ((5, 0), (4, 1), (-1, 0)):
            chunk.offsets = wrong
            with pytest.raises(
                LayoutError, match=r"w \(weight\): its local tensor of \[4, 2\] says"
            ):
                local_of("w", "weight", tensor)
        chunk.offsets, chunk.sizes = (4, 0), (3, 2)
        with pytest.raises(LayoutError, match="says that it has"):
            local_of("w", "weight", tensor)


@pytest.mark.parametrize(
    ("local", "rows"), [((1, 2), 2), ((0, 2), 4)], ids=["too much", "too little"]
)
def test_only_an_empty_part_has_another_shape_without_elements(
    local: tuple[int, ...], rows: int
) -> None:
    """Of 2 rows the last of four ranks has none, and FSDP2 makes (0, 0) of them; of 4 it has one."""
    with alone_as(3, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=own_names(3, "all"))

        def part(of: tuple[int, ...]) -> DTensor:
            options: Any = {"run_check": False, "shape": (rows, 2), "stride": (2, 1)}
            return DTensor.from_local(torch.zeros(of), mesh, [Shard(0)], **options)

        with pytest.raises(LayoutError, match="does not follow from the placements"):
            local_of("w", "weight", part(local))
        if rows == 2:
            assert not local_of("w", "weight", part((0, 0))).pieces


@pytest.mark.parametrize("placements", [[Partial(), Replicate()], [Shard(0), Partial("avg")]])
def test_summands_are_not_stored(placements: list[Placement]) -> None:
    with alone_as(0, 4):
        tensor = as_dtensor(torch.zeros(4), placements, (4,))
        with pytest.raises(LayoutError, match=r"w \(weight\) is partial over its mesh"):
            local_of("w", "weight", tensor)


def parameter_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor)


@pytest.mark.parametrize("make", [torch.Tensor.detach, parameter_of, torch.Tensor.requires_grad_])
def test_plain_tensors_are_held_whole_in_their_own_memory(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = make(numbered((3, 4)))
    local = local_of("w", "weight", tensor)
    assert held(local) == expected(numbered((3, 4)), (3, 4))
    assert local.tensor.data_ptr() == tensor.data_ptr()
    assert local.nbytes == 48


def test_strided_scalar_and_empty_tensors() -> None:
    turned = numbered((3, 4)).t()
    assert held(local_of("w", "weight", turned)) == {
        ((j, i), 4.0 * i + j) for i in range(3) for j in range(4)
    }
    assert held(local_of("w", "weight", turned[1::2, 1:])) == {
        ((j, i), 4.0 * (i + 1) + 2 * j + 1) for i in range(2) for j in range(2)
    }
    assert held(local_of("w", "weight", torch.tensor(7.0))) == {((), 7.0)}
    assert local_of("w", "weight", torch.empty(3, 0, 2)).pieces == ()
    assert local_of("w", "weight", torch.empty(0)).nbytes == 0


def test_conjugate_and_negative_views_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert tensor.is_conj()
    assert host_memory(local_of("w", "weight", tensor).tensor).view(np.complex64).tolist() == [
        1 - 2j,
        3 + 4j,
    ]
    assert tensor.imag.is_neg()
    assert host_memory(local_of("w", "weight", tensor.imag).tensor).view(np.float32).tolist() == [
        -2.0,
        4.0,
    ]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda t: t.to("meta"), "meta"),
        (lambda t: t.to_sparse(), "sparse"),
        (lambda t: t.to_sparse_csr(), "sparse"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["meta", "coo", "csr", "quantized"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of layouts that are young or old
def test_tensors_without_plain_memory_are_refused(
    make: Callable[[torch.Tensor], torch.Tensor], word: str
) -> None:
    with pytest.raises(UsageError, match=f"w is a .*{word}.* tensor, which has no plain memory"):
        local_of("w", "weight", make(torch.eye(3)))


def test_dtypes_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot store the dtype 'quint8'"):
        dtype_name(torch.quint8)


def sharded(rank: int, starts: list[int], size: int = 10) -> ShardedTensor:
    """A vector of FSDP1's kind: this rank has the shards that begin at `starts`, of 5 each."""
    shards = [
        TensorShard.from_tensor_and_offsets(numbered((size, 2))[a : a + 5].clone(), [a, 0], rank)
        for a in starts
    ]
    return ShardedTensor._init_from_local_shards(shards, (size, 2))


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_sharded_tensors_of_fsdp1() -> None:
    with alone_as(0, 1):
        local = local_of("w", "weight", sharded(0, [0], 5))
        assert held(local) == expected(numbered((5, 2)), (5, 2))
        with pytest.raises(
            UsageError, match=r"w \(weight\): this rank holds 2 shards of one ShardedTensor"
        ):
            local_of("w", "weight", sharded(0, [0, 5]))


@pytest.mark.parametrize(
    ("rows", "ratio", "known"), [(5, 1, True), (4, 1, True), (4, 2, True), (5, 2, False)]
)
def test_the_distribution_inside_a_wrapper_is_known_where_it_is_that_of_a_plain_tensor(
    rows: int, ratio: int, known: bool
) -> None:
    """Uneven parts of which each index is several are not cut as such a tensor would be."""
    with alone_as(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=own_names(0, "inner"))
        held_rows = -(-rows // 2)
        outer = DTensor.from_local(
            torch.zeros(held_rows, 3), mesh, [Shard(0)], shape=(rows, 3), stride=(3, 1)
        )
        inner = torch.zeros(held_rows * ratio, 3)
        local = local_of(
            "t", "weight", InnerTensor(outer, inner, (rows * ratio, 3), {0: (0, Fraction(ratio))})
        )
    assert [p.box.shape for p in local.pieces] == [(held_rows * ratio, 3)]
    assert (local.distribution is not None) == known
    if local.distribution is not None:
        assert local.distribution.boxes((rows * ratio, 3), (0,)) == (local.pieces[0].box,)
