"""What a training applies in each step, and batches of steps as tensors that can be saved."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ucformat.errors import UnsupportedError, UsageError, first_names
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.schema.manifest import SparseDeltaDoc, delta_state
from ucformat.torch.state.collect import collect
from ucformat.torch.state.fingerprint import piece_in
from ucformat.torch.state.local import LocalShard, local_of
from ucformat.torch.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.torch.state.collect import CollectedState


def gradients(
    state: Mapping[str, Any], names: Mapping[str, int] | None = None
) -> dict[str, torch.Tensor]:
    """Return the gradients of the parameters of a state's optimizers, by the names that checkpoints have.

    They are those that optimizers apply if this is called before their `step`, after gradients were
    reduced, unscaled, compressed and clipped. They are the gradients themselves, which the next step
    changes: `Manager` copies them, and for `save` keep a `clone()` of each.

    Args:
        state: as for `save`.
        names: as for `save`.
    """
    optimized = optimized_parameters(collect(state, names or {}))
    return {name: p.grad for name, p in optimized.items() if p.grad is not None}


def optimized_parameters(collected: CollectedState) -> dict[str, torch.Tensor]:
    """The parameters of optimizers, by their names in checkpoints."""
    return {
        collected.prefixes.get(path, "") + name: parameter
        for path, optimizers in collected.optimizers.items()
        for optimizer in optimizers
        for name, parameter in optimizer.params.items()
    }


def copy_deltas(step: int, deltas: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the deltas of a step to host memory; DTensors stay where they are.

    Raises:
        UsageError: they are not tensors by name.
        UnsupportedError: the layout of one is not supported.
    """
    _check_deltas(step, deltas)
    return {
        name: delta.detach().clone() if is_dtensor(delta) else delta.detach().to("cpu", copy=True)
        for name, delta in deltas.items()
    }


def _check_deltas(step: int, deltas: object) -> None:
    if not isinstance(deltas, Mapping) or not all(
        isinstance(name, str) and name and isinstance(delta, torch.Tensor)
        for name, delta in deltas.items()
    ):
        raise UsageError(
            f"the deltas of step {step} are not tensors by name",
            hint="{name: tensor}, such as the gradients of parameters by their names; {} for none",
        )
    for name, delta in deltas.items():
        local = delta.to_local() if is_dtensor(delta) else delta
        if local.layout == torch.sparse_coo and local is delta:
            continue
        if local.layout != torch.strided:
            raise UnsupportedError(
                f"the delta {name} of step {step} has the layout {local.layout}",
                hint="torch.sparse_coo tensors, dense ones and DTensors of dense ones can be saved; name the "
                'parts of others: {"layer.weight.values": …, "layer.weight.indices": …}',
            )


@dataclass(frozen=True)
class DeltaBatch:
    """The deltas of consecutive steps: each name's stacked to one tensor, and what tells how."""

    tensors: tuple[LocalShard, ...]
    first: int
    last: int
    partial: Mapping[str, tuple[int, ...]]
    sparse: Mapping[str, SparseDeltaDoc]

    @property
    def names(self) -> set[str]:
        """The names that have deltas."""
        return {t.info.name for t in self.tensors}

    @property
    def told(self) -> str:
        """What is the same on all ranks, in short."""
        names = sorted((str(t.key), t.info.dtype, t.info.shape) for t in self.tensors)
        content = f"{names} {self.partial} {self.sparse}"
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        return f"deltas of steps {self.first} to {self.last} ({digest})"


def stack_deltas(deltas: Mapping[int, Mapping[str, torch.Tensor]], step: int | None) -> DeltaBatch:
    """Stack the deltas of a batch of steps.

    Raises:
        UsageError: the steps do not follow each other, or a delta has different shapes.
    """
    is_by_step = isinstance(deltas, Mapping) and all(type(n) is int for n in deltas)
    steps = sorted(deltas) if is_by_step else []
    if not steps or steps != list(range(steps[0], steps[-1] + 1)) or steps[-1] != step:
        raise UsageError(
            f"the deltas are of steps {first_names(map(str, steps), 5) or 'none'}, and the checkpoint of step {step}",
            hint="deltas={step: {name: tensor}}, of each step after the base up to step=",
        )
    for number in steps:
        _check_deltas(number, deltas[number])
    names = list(dict.fromkeys(name for number in steps for name in deltas[number]))
    tensors = list[LocalShard]()
    partial, sparse = dict[str, tuple[int, ...]](), dict[str, SparseDeltaDoc]()
    state = delta_state(steps[0])
    for name in names:
        present = [number for number in steps if name in deltas[number]]
        parts = [deltas[number][name] for number in present]
        if len(present) < len(steps):
            partial[name] = tuple(present)
        if len({p.data_ptr() for p in parts if _has_memory(p)}) < sum(map(_has_memory, parts)):
            raise UsageError(
                f"the deltas {name} of several steps are one tensor, which has only what the last of them applied",
                hint="keep a copy of each step's: delta.clone()",
            )
        first = parts[0]
        kinds = {(p.layout, p.dtype, tuple(p.shape), is_dtensor(p)) for p in parts}
        if len(kinds) > 1:
            raise UsageError(
                f"the deltas {name} of steps {present[0]} to {present[-1]} differ in layout, dtype or shape: "
                f"{sorted((str(dtype), shape) for _, dtype, shape, _ in kinds)}",
                hint="save a batch before they change; torch.sparse_coo tensors may have any number of elements",
            )
        if first.layout == torch.sparse_coo:
            indices, values, sparse[name] = _join_sparse(name, parts)
            tensors.append(local_of(name, f"{state}.indices", indices))
            tensors.append(local_of(name, f"{state}.values", values))
        elif is_dtensor(first):
            tensors.append(local_of(name, state, _stack_dtensors(name, parts)))
        else:
            tensors.append(local_of(name, state, torch.stack(parts)))
    return DeltaBatch(tuple(tensors), steps[0], steps[-1], partial, sparse)


def _has_memory(delta: torch.Tensor) -> bool:
    return delta.layout == torch.strided and not is_dtensor(delta) and delta.numel() > 0


def _join_sparse(
    name: str, parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, SparseDeltaDoc]:
    """The indices and values of sparse deltas, one after another, and what tells them apart."""
    coalesced = {p.is_coalesced() for p in parts}
    if len(coalesced) > 1 or len({p.dense_dim() for p in parts}) > 1:
        raise UsageError(
            f"some of the sparse deltas {name} are coalesced, others not", hint="delta.coalesce()"
        )
    # the public methods are for coalesced ones only
    indices = [p._indices() for p in parts]  # noqa: SLF001
    values = [p._values() for p in parts]  # noqa: SLF001
    counts = tuple(len(v) for v in values)
    shape = tuple(parts[0].shape)
    doc = SparseDeltaDoc(shape=shape, counts=counts, coalesced=coalesced.pop())
    return torch.cat(indices, 1), torch.cat(values), doc


def _stack_dtensors(name: str, parts: Sequence[Any]) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    first = parts[0]
    if any((p.placements, p.device_mesh) != (first.placements, first.device_mesh) for p in parts):
        raise UsageError(f"the placements of the deltas {name} change between steps")
    moved = []
    for placement in first.placements:
        if type(placement) not in (Shard, Replicate):
            raise UnsupportedError(
                f"the delta {name} is placed as {placement}",
                hint="redistribute it to Shard and Replicate first",
            )
        moved.append(Shard(placement.dim + 1) if isinstance(placement, Shard) else placement)
    local = torch.stack([p.to_local() for p in parts])
    shape = torch.Size((len(parts), *first.shape))
    stride = (first.numel(), *first.stride())
    return DTensor.from_local(
        local, first.device_mesh, moved, run_check=False, shape=shape, stride=stride
    )


def checked_part(weight: LocalShard, row: int, state: str) -> LocalShard:
    """A row of a weight, or all of one of at most one dim, as far as this rank has it: a tensor of its own."""
    shape = weight.info.shape
    rows = Box.whole(shape)
    if len(shape) > 1:
        rows = Box((row, *rows.start[1:]), (1, *rows.shape[1:]))
    pieces, parts, at = list[Piece](), list[torch.Tensor](), 0
    for piece in weight.pieces:
        box = piece.box.intersect(rows)
        if box is None:
            continue
        parts.append(piece_in(weight.tensor, piece.part(box)).reshape(-1))
        start = box.start if len(shape) < 2 else (0, *box.start[1:])
        pieces.append(Piece(Box(start, box.shape), at, row_major(box.shape)))
        at += box.size
    memory = torch.cat(parts) if parts else weight.tensor.new_empty(0)
    info = TensorInfo(weight.info.name, state, weight.info.dtype, rows.shape)
    return LocalShard(info, tuple(pieces), memory)
