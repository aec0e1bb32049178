"""Reads deltas of steps: what each of them applied, in the layout of the tensors that it changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import LBFGS, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ucformat.errors import IntegrityError, MissingData, UsageError, first_names
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key, Piece
from ucformat.reading.execute import ReadOptions
from ucformat.reading.plan import check_verify
from ucformat.schema.limits import MAX_CHAIN
from ucformat.schema.manifest import is_delta
from ucformat.torch.loading.match import Matched
from ucformat.torch.loading.read import read
from ucformat.torch.state.collect import collect, same_bits
from ucformat.torch.state.deltas import checked_part, optimized_parameters
from ucformat.torch.state.local import LocalShard, local_of
from ucformat.torch.state.memory import dtype_name, torch_dtype
from ucformat.torch.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.bases import BaseCheckpoint
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.schema.manifest import DeltasDoc, Manifest
    from ucformat.torch.loading.arguments import LoadOptions


#: What wants closures, sparse gradients or metrics.
_NEED_MORE = (LBFGS, SparseAdam, ReduceLROnPlateau)
_EARLIER = "load an earlier checkpoint, or one that is whole"


class ChainLink(NamedTuple):
    """A checkpoint of a chain of deltas, and its place."""

    place: str
    manifest: Manifest


def chain_of(place: str, ck: BaseCheckpoint) -> list[ChainLink]:
    """The checkpoint that has everything, and those with the deltas since, up to one of them.

    Raises:
        MissingData: one is not there, or not based on the one before any more.
    """
    chain = [ChainLink(place, ck.manifest)]
    while (deltas := ck.manifest.deltas) is not None:
        numbers = [n for n, doc in enumerate(ck.bases.docs) if doc.id == deltas.after]
        if len(chain) > MAX_CHAIN or not numbers:
            raise MissingData(f"the chain of deltas up to {place} has no beginning", hint=_EARLIER)
        place, ck = ck.bases.place(numbers[0]), ck.bases.opened(numbers[0])
        step = None if ck.manifest.is_remnant else ck.manifest.step
        if step != deltas.first - 1:
            raise MissingData(
                f"the deltas of steps {deltas.first} to {deltas.last} follow {place}, of which only a part "
                "is left",
                hint=_EARLIER,
            )
        chain.append(ChainLink(place, ck.manifest))
    return chain[::-1]


def number_in(chain: Sequence[ChainLink], merged: Manifest) -> int | None:
    """The number of the checkpoint of a chain that has been merged, or is itself, a whole one; None if none has."""
    ids = {merged.id, *(edge.id for edge in merged.lineage)}
    return next(
        (
            number
            for number, link in enumerate(chain)
            if link.manifest.id in ids and link.manifest.step == merged.step
        ),
        None,
    )


def _deltas_of(ck: Checkpoint) -> DeltasDoc:
    deltas = None if ck.universal is None else ck.universal.manifest.deltas
    assert deltas is not None  # noqa: S101 - it is one of a chain
    return deltas


class DeltaReader:
    """Reads the deltas of checkpoints.

    Args:
        state: a dense delta of the name and the shape of one of its tensors is read in the layout and
            on the device of that; others are read whole, into host memory.

    Attributes:
        nbytes: that were read.
    """

    def __init__(self, state: Mapping[str, Any], options: LoadOptions) -> None:
        self._options = ReadOptions(
            check_verify(options.verify), threads=options.threads, progress=options.progress
        )
        collected = collect(state, options.names or {})
        self._weights = {
            key.name: collected.tensors[path]
            for path, key in collected.keys.items()
            if key.state == "weight"
        }
        self.nbytes = 0

    def read(self, ck: Checkpoint) -> dict[int, dict[str, torch.Tensor]]:
        """What each step of a checkpoint of deltas applied, by name."""
        deltas = _deltas_of(ck)
        targets: list[Matched] = []
        made: dict[int, dict[str, torch.Tensor]] = {
            step: {} for step in range(deltas.first, deltas.last + 1)
        }
        parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        stored = {key: info for key, info in ck.tensors.items() if is_delta(key.state)}
        for info in stored.values():
            if info.state == deltas.state:
                for number, step in enumerate(deltas.steps(info.name)):
                    made[step][info.name], target = self._target(info, number)
                    targets.append(target)
            elif info.state == f"{deltas.state}.indices":
                values = stored[Key(info.name, f"{deltas.state}.values")]
                whole = [torch.empty(i.shape, dtype=torch_dtype(i.dtype)) for i in (info, values)]
                targets += [
                    Matched(local_of(i.name, i.state, t), i)
                    for i, t in zip((info, values), whole, strict=True)
                ]
                parts[info.name] = (whole[0], whole[1])
        self.nbytes += read(ck, targets, self._options).nbytes
        for name, (indices, values) in parts.items():
            sparse, at = deltas.sparse[name], 0
            for step, count in zip(deltas.steps(name), sparse.counts, strict=True):
                try:
                    made[step][name] = torch.sparse_coo_tensor(
                        indices[:, at : at + count],
                        values[at : at + count],
                        sparse.shape,
                        is_coalesced=sparse.coalesced,
                        check_invariants=True,  # indices come from a file
                    )
                except RuntimeError as error:
                    raise IntegrityError(
                        f"{ck.url}: the sparse delta {name} of step {step} is none: {error}",
                        hint="restore it from another copy",
                    ) from None
                at += count
        return made

    def check(self, ck: Checkpoint) -> tuple[int, list[str]]:
        """How many weights a checkpoint has rows of, and which have others now, as far as this rank has them."""
        deltas = _deltas_of(ck)
        live, stored = list[LocalShard](), list[Matched]()
        for name, row in deltas.checked.items():
            info = ck.tensors.get(Key(name, f"{deltas.state}.check"))
            if info is None or name not in self._weights:
                continue
            part = checked_part(local_of(name, "weight", self._weights[name]), row, info.state)
            if part.info == info:  # else it was cast
                live.append(part)
                memory = torch.empty(part.tensor.shape, dtype=part.tensor.dtype)
                stored.append(Matched(replace(part, tensor=memory), info))
        self.nbytes += read(ck, [m for m in stored if m.target.pieces], self._options).nbytes
        differing = [
            part.info.name
            for part, m in zip(live, stored, strict=True)
            if not same_bits(part.tensor.cpu(), m.target.tensor)
        ]
        return len(live), differing

    def _target(self, stacked: TensorInfo, number: int) -> tuple[torch.Tensor, Matched]:
        """Memory for one delta of those that are stacked in a tensor, and what of this it is."""
        shape, dtype = stacked.shape[1:], torch_dtype(stacked.dtype)
        parameter = self._weights.get(stacked.name)
        made = (
            torch.empty(shape, dtype=dtype)
            if parameter is None or tuple(parameter.shape) != shape
            else torch.empty_like(parameter, dtype=dtype)
        )
        shard = local_of(stacked.name, stacked.state, made)
        rows = shard.tensor.unsqueeze(0)
        step = rows.stride(0)
        pieces = tuple(
            Piece(Box((number, *p.box.start), (1, *p.box.shape)), p.offset, (step, *p.strides))
            for p in shard.pieces
        )
        return made, Matched(LocalShard(stacked, pieces, rows), stacked)


class GradientSteps:
    """Applies gradients: of each step those that it had, and then the steps of optimizers and LR schedulers.

    Args:
        state: a training state with its optimizers, and the LR schedulers that make a step after
            each of theirs.
    """

    def __init__(self, state: Mapping[str, Any], names: Mapping[str, int] | None = None) -> None:
        collected = collect(state, names or {})
        self._parameters = optimized_parameters(collected)
        self._optimizers = [o.optimizer for live in collected.optimizers.values() for o in live]
        schedulers = (s for s in _values(state) if isinstance(s, LRScheduler))
        self._schedulers = [*{id(s): s for s in schedulers}.values()]
        if not self._optimizers:
            raise UsageError(
                "the state has no optimizer that could apply gradients",
                hint="give the live optimizer in the state, or a step_fn(step, deltas)",
            )
        for part in (*self._optimizers, *self._schedulers):
            if isinstance(part, _NEED_MORE):
                raise UsageError(
                    f"{type(part).__name__} needs more than gradients for a step",
                    hint="replay(ref, state, step_fn) with a step_fn(step, deltas) that gives it",
                )

    def __call__(self, step: int, deltas: Mapping[str, torch.Tensor]) -> None:
        """Apply the gradients of a step; without any only schedulers make a step."""
        if unknown := deltas.keys() - self._parameters.keys():
            raise UsageError(
                f"no optimizer of the state has the parameters {first_names(sorted(unknown), 5)}, of which step "
                f"{step} has deltas",
                hint="replay(ref, state, step_fn) with a step_fn(step, deltas) that applies them",
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                delta = deltas.get(name)
                parameter.grad = None if delta is None else _as_gradient(name, delta, parameter)
        for optimizer in self._optimizers if deltas else ():
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self._schedulers:
            scheduler.step()


def _as_gradient(name: str, delta: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A delta as the gradient of a parameter, dense and placed as that is."""
    if delta.layout == torch.sparse_coo:
        delta = delta.to_dense()
    if (delta.shape, delta.dtype) != (parameter.shape, parameter.dtype):
        raise UsageError(
            f"a delta of {name} is {dtype_name(delta.dtype)} {list(delta.shape)}, the parameter "
            f"{dtype_name(parameter.dtype)} {list(parameter.shape)}, so it is no gradient of it",
            hint="replay(ref, state, step_fn) with a step_fn(step, deltas) that applies it",
        )
    if is_dtensor(parameter) and not is_dtensor(delta):
        from torch.distributed.tensor import distribute_tensor

        mesh = parameter.device_mesh
        return distribute_tensor(
            delta.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
        )
    return delta.to(parameter.device)


def _values(state: Any) -> Iterator[Any]:
    """All that nested mappings and lists have."""
    if isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _values(value)
    else:
        yield state
