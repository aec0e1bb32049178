"""Models of Llama 405B's and DeepSeek-V3's shapes, and the tensors that a rank holds of them under a layout.

The tensors are real DTensors whose memory is one element, on a process group that sends nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ucformat.torch.saving.statement import Statement, WriteItem
    from ucformat.torch.state.local import LocalShard

STATES = (
    ("weight", "bfloat16"),
    ("master", "float32"),
    ("exp_avg", "float32"),
    ("exp_avg_sq", "float32"),
)
LAYERS, HIDDEN, FFN, VOCAB, KV = 126, 16384, 53248, 128256, 1024
# layers without experts, experts of each other layer, and ranks over which these are
DENSE, EXPERTS, EP = (3, 256, 64)


def llama() -> dict[str, tuple[int, ...]]:
    """The parameters of Llama 405B."""
    out: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        out |= {
            f"{name}.attn.q.weight": (HIDDEN, HIDDEN),
            f"{name}.attn.k.weight": (KV, HIDDEN),
            f"{name}.attn.v.weight": (KV, HIDDEN),
            f"{name}.attn.o.weight": (HIDDEN, HIDDEN),
            f"{name}.mlp.gate.weight": (FFN, HIDDEN),
            f"{name}.mlp.up.weight": (FFN, HIDDEN),
            f"{name}.mlp.down.weight": (HIDDEN, FFN),
            f"{name}.norm1.weight": (HIDDEN,),
            f"{name}.norm2.weight": (HIDDEN,),
        }
    return out | {"norm.weight": (HIDDEN,), "head.weight": (VOCAB, HIDDEN)}


def deepseek() -> dict[str, tuple[int, ...]]:
    """The parameters of DeepSeek-V3 that all ranks share; `experts` has the others."""
    out: dict[str, tuple[int, ...]] = {"embed.weight": (129280, 7168)}
    for layer in range(61):
        name = f"layers.{layer}"
        out |= {
            f"{name}.attn.q_a.weight": (1536, 7168),
            f"{name}.attn.q_a_norm.weight": (1536,),
            f"{name}.attn.q_b.weight": (24576, 1536),
            f"{name}.attn.kv_a.weight": (576, 7168),
            f"{name}.attn.kv_a_norm.weight": (512,),
            f"{name}.attn.kv_b.weight": (32768, 512),
            f"{name}.attn.o.weight": (7168, 16384),
            f"{name}.norm1.weight": (7168,),
            f"{name}.norm2.weight": (7168,),
        }
        kind, width = ("mlp", 18432) if layer < DENSE else ("shared", 2048)
        out |= {f"{name}.{kind}.{m}.weight": (width, 7168) for m in ("gate", "up")}
        out[f"{name}.{kind}.down.weight"] = (7168, width)
        if layer >= DENSE:
            out |= {f"{name}.router.weight": (EXPERTS, 7168), f"{name}.router.bias": (EXPERTS,)}
    return out | {"norm.weight": (7168,), "head.weight": (129280, 7168)}


def experts(index: int) -> dict[str, tuple[int, ...]]:
    """The parameters of the experts that one of 64 expert-parallel ranks holds."""
    mine = range(index * EXPERTS // EP, (index + 1) * EXPERTS // EP)
    return {
        f"layers.{layer}.experts.{e}.{m}.weight": (7168, 2048) if m == "down" else (2048, 7168)
        for layer in range(DENSE, 61)
        for e in mine
        for m in ("gate", "up", "down")
    }


class Held(NamedTuple):
    """Parameters on a mesh: the sizes of its axes, its ranks in row-major order, and the placements of each state."""

    sizes: tuple[int, ...]
    ranks: Sequence[int]
    shapes: dict[str, tuple[int, ...]]
    place: Callable[[str, str, tuple[int, ...]], list[Any]]


class Case(NamedTuple):
    """A way to distribute a model: what a rank holds, and the group of ranks that hold the same tensors."""

    held: Callable[[int, int], list[Held]]
    group: Callable[[int, int], int]


def fsdp2(rank: int, ranks: int) -> list[Held]:
    from torch.distributed.tensor import Shard

    del rank
    return [Held((ranks,), range(ranks), llama(), lambda *_: [Shard(0)])]


def hsdp(rank: int, ranks: int) -> list[Held]:
    from torch.distributed.tensor import Replicate, Shard

    del rank
    return [Held((ranks // 32, 32), range(ranks), llama(), lambda *_: [Replicate(), Shard(0)])]


def stages(ranks: int) -> int:
    return min(16, ranks // 16)


def zero1(rank: int, ranks: int) -> list[Held]:
    """Tensor-parallel by 8, pipeline-parallel by up to 16; optimizer states are sharded over data-parallel ranks."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    pp = stages(ranks)
    dp, each = ranks // 8 // pp, ranks // pp
    stage = rank // each
    first, last = LAYERS * stage // pp, LAYERS * (stage + 1) // pp

    def of(name: str) -> bool:
        if name.startswith("layers."):
            return first <= int(name.split(".")[1]) < last
        return stage == (0 if name.startswith("embed") else pp - 1)

    def place(name: str, state: str, shape: tuple[int, ...]) -> list[Any]:
        dim = 1 if name.endswith(("o.weight", "down.weight")) else 0
        if state == "weight":
            return [Replicate(), Shard(dim) if len(shape) > 1 else Replicate()]
        if len(shape) == 1:
            return [Shard(0), Replicate()]
        return [Shard(0) if dim else _StridedShard(0, split_factor=8), Shard(dim)]

    return [
        Held(
            (dp, 8),
            range(stage * each, (stage + 1) * each),
            {n: s for n, s in llama().items() if of(n)},
            place,
        )
    ]


def expert_parallel(rank: int, ranks: int) -> list[Held]:
    from torch.distributed.tensor import Shard

    every = Held((ranks,), range(ranks), deepseek(), lambda *_: [Shard(0)])
    mine = range(rank % EP, ranks, EP)
    return [every, Held((len(mine),), mine, experts(rank % EP), lambda *_: [Shard(0)])]


CASES = {
    "405B FSDP2": Case(fsdp2, lambda _, ranks: ranks * 0),
    "405B HSDP": Case(hsdp, lambda _, ranks: ranks * 0),
    "405B TP8 PP ZeRO-1": Case(zero1, lambda rank, ranks: rank // (ranks // stages(ranks))),
    "DeepSeek-V3 EP64": Case(expert_parallel, lambda rank, _: rank % EP),
}


def tensors_of(case: Case, rank: int, ranks: int) -> list[tuple[str, str, Any]]:
    """The tensors of a rank: DTensors whose memory is one element, by name and state."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    tensors: list[tuple[str, str, Any]] = []
    try:
        for held in case.held(rank, ranks):
            places = torch.tensor(list(held.ranks)).reshape(held.sizes)
            mesh = DeviceMesh("cpu", places, _init_backend=False, _rank=rank)

            @cache  # layers repeat, and no value differs
            def made(
                shape: tuple[int, ...], dtype: str, placements: tuple[Any, ...], mesh: Any = mesh
            ) -> Any:
                local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
                # replicas are equal
                one = torch.zeros((), dtype=getattr(torch, dtype)).expand(local)
                strides = torch.empty(shape, device="meta").stride()
                return DTensor.from_local(
                    one, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
                )

            tensors += [
                (name, state, made(shape, dtype, tuple(held.place(name, state, shape))))
                for name, shape in held.shapes.items()
                for state, dtype in STATES
            ]
    finally:
        dist.destroy_process_group()
    return tensors


def with_own_memory(tensor: Any) -> Any:
    """A DTensor like another one, over one element of its own: a load fills no memory twice."""
    import torch
    from torch.distributed.tensor import DTensor

    local = tensor.to_local()
    return DTensor.from_local(
        torch.zeros((), dtype=local.dtype).expand(local.shape),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class EqualReplicas:
    """Fingerprints that cost nothing: the figures are of planning, whatever tensors hold."""

    def __init__(self, items: Sequence[WriteItem]) -> None:
        self._items = items

    def __getitem__(self, item: int) -> NDArray[np.uint64]:
        """As of `PieceFingerprints`."""
        return np.zeros((len(self._items[item].boxes), 2), np.uint64)


class Stated(NamedTuple):
    """What a rank states, fingerprints of its pieces, and the processor seconds for the first."""

    statement: Statement
    sums: Any
    seconds: float


def statement_of(case: Case, rank: int, ranks: int) -> Stated:
    """What a rank states, and fingerprints of its pieces."""
    from ucformat.torch.saving.manifest import state_info
    from ucformat.torch.saving.statement import StatedFacts, Statement, WriteItem
    from ucformat.torch.state.local import LocalState, local_of

    known: dict[int, LocalShard] = {}  # by DTensor: layers repeat
    shards = []
    for name, of, tensor in tensors_of(case, rank, ranks):
        like = known.get(id(tensor)) or known.setdefault(id(tensor), local_of(name, of, tensor))
        shards.append(replace(like, info=replace(like.info, name=name, state=of)))
    begun = time.process_time()
    info = state_info(LocalState(tuple(shards)))
    items = [WriteItem(i, tuple(p.box for p in pieces)) for i, pieces in info.tensors]
    distributions = [info.distributions[n] if n >= 0 else None for n in info.distributed]
    statement = Statement(rank, items, distributions, StatedFacts({}, {}))
    return Stated(statement, EqualReplicas(items), time.process_time() - begun)
