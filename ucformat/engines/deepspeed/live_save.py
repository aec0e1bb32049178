"""`save`: saves what each rank of a DeepSpeed engine holds as one universal checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from ucformat.engines.deepspeed.live_engine import (
    EngineParts,
    OptimizerTensor,
    inspect_engine,
    optimizer_tensors,
    partition_of,
    partitions_of,
    shape_of,
)
from ucformat.engines.deepspeed.live_values import CLIENT, client_values, extra_states, plain_values
from ucformat.errors import UnsupportedError, UsageError
from ucformat.geometry.box import row_major
from ucformat.geometry.local import Dim, pieces_of
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.sources.configuration import program_config
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.saving.manifest import SaveMetadata
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.save import save_in_group
from ucformat.torch.state.local import LocalShard, LocalState, local_of
from ucformat.torch.state.memory import dtype_name, synchronize
from ucformat.torch.state.objects import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike

    from ucformat.geometry.distribution import Distribution
    from ucformat.schema.manifest import LineageDoc
    from ucformat.torch.saving.save import Saved

__all__ = [
    "boxes_of",
    "collect",
    "locals_of_buffers",
    "master_state",
    "part_of",
    "save",
    "weight_of",
]


def collect(engine: Any, client_state: Mapping[str, Any] | None = None) -> LocalState:
    """Collect the local state of this rank from a DeepSpeed engine, without copying.

    A parameter whose master weight has the same dtype, as in fp32, is stored once, as `weight`;
    otherwise both are stored. Buffers, extra states of modules, and tensors above 64 KiB in the
    client state are those of rank 0, as in DeepSpeed's own files of ZeRO 0 to 2.

    Args:
        engine: as returned by `deepspeed.initialize`.
        client_state: values of the program, as for `engine.save_checkpoint`, the same on all ranks;
            those that differ as `ucformat.torch.PerRank(value)`. May contain tensors.

    Returns:
        what `ucformat.torch.saving.save.save_local` saves.

    Raises:
        UsageError: it is not a DeepSpeed engine.
        UnsupportedError: the engine has state that cannot be saved yet, or is in the middle of
            gradient accumulation.
    """
    import deepspeed

    trainer = inspect_engine(engine)
    _refuse_half_a_step(engine)
    held = optimizer_tensors(trainer)
    tensors = list(_tensors(trainer, held))
    synchronize(t.tensor for t in tensors)  # before values are copied from devices
    plain, ranks, large = client_values(
        client_state or {}, {t.info.name for t in tensors} | trainer.buffers.keys()
    )
    objects = plain_values(trainer) | ({CLIENT: plain} if plain else {})
    if trainer.rank == 0:
        tensors += locals_of_buffers(trainer)
        tensors += [local_of(name, "weight", tensor) for name, tensor in large.items()]
        objects |= {"module": extra} if (extra := extra_states(engine.module)) else {}
    return LocalState(
        tensors=tuple(tensors),
        objects=objects,
        ranks=ranks,
        groups=groups_of(trainer, held),
        aliases=dict(trainer.aliases),
        layout=trainer.layout,
        engine={"name": "deepspeed", "version": str(deepspeed.__version__)},
    )


def _refuse_half_a_step(engine: Any) -> None:
    """Refuse to save in the middle of gradient accumulation, since gradients are not saved."""
    if engine.managed_gradient_accumulation():
        done = engine.micro_steps % engine.gradient_accumulation_steps()
    else:
        done = engine._unmanaged_backward_count  # noqa: SLF001 - there is no public attribute
    if done:
        raise UnsupportedError(
            f"the engine has accumulated the gradients of {done} micro-batches, which a checkpoint does not contain",
            hint="save after the engine.step() that applies them",
        )


def _tensors(trainer: EngineParts, held: Sequence[OptimizerTensor]) -> Iterator[LocalShard]:
    """The states of each parameter, in the order of the module."""
    mine: dict[str, list[OptimizerTensor]] = {name: [] for name in trainer.parameters}
    for one in held:
        # a rank also describes what it holds no elements of
        for name in one.distributions or one.parts:
            mine[name].append(one)
    owned = {name: one for one in held for name in one.shapes}
    for name in trainer.parameters:
        owner = owned.get(name)
        if owner is None or master_state(trainer, name, owner) == "master":
            yield weight_of(trainer, name)
        for one in mine[name]:
            yield part_of(one, name, one.tensor, master_state(trainer, name, one))
            for state, value in one.states.items():
                if torch.is_tensor(value):
                    yield part_of(one, name, value, state)


def master_state(trainer: EngineParts, name: str, held: OptimizerTensor) -> str:
    """Return the state under which the optimizer's copy of a parameter is stored.

    Args:
        trainer: the parts of the engine.
        name: of the parameter.
        held: the optimizer's tensor.

    Returns:
        `weight` if the copy has the dtype of the parameter, else `master`.
    """
    return "weight" if held.tensor.dtype == trainer.parameters[name].dtype else "master"


def part_of(held: OptimizerTensor, name: str, memory: torch.Tensor, state: str) -> LocalShard:
    """Return the part of a parameter's state that this rank holds in the optimizer.

    Args:
        held: the optimizer's tensor that contains the parameter.
        name: of the parameter.
        memory: the optimizer's tensor of the state.
        state: its name.

    Raises:
        UnsupportedError: `memory` has neither the shape of the flat buffer nor a single value.
    """
    memory = memory.detach()
    if memory.dim() == 0 or held.whole:
        return local_of(name, state, memory)
    if memory.shape != held.tensor.shape:
        raise UnsupportedError(
            f"the optimizer state {state!r} of {name} has shape {list(memory.shape)}, which differs from that of the "
            f"flat buffer of {held.tensor.numel()} elements",
            hint="such optimizers can be saved and loaded with ZeRO 0 only",
        )
    start, stop, offset = held.parts.get(name, (0, 0, 0))
    info = TensorInfo(name, state, dtype_name(memory.dtype), held.shapes[name])
    return flat_local(
        info, memory.narrow(0, offset, stop - start), start, stop, held.distributions.get(name)
    )


def flat_local(
    info: TensorInfo, memory: torch.Tensor, start: int, stop: int, distribution: Distribution | None
) -> LocalShard:
    """Elements `[start, stop)` of a flattened tensor, contiguous in memory."""
    dims = tuple(Dim.whole(n) for n in info.shape)
    return LocalShard(info, pieces_of(dims, flat=(start, stop))[0], memory, distribution)


def boxes_of(local: LocalShard) -> Iterator[LocalShard]:
    """Split a flat range into boxes, each as a view of the box's shape.

    Args:
        local: a flat range of a tensor.
    """
    if not local.pieces:
        yield local
    for piece in local.pieces:
        view = local.tensor[piece.offset : piece.offset + piece.box.size].view(piece.box.shape)
        yield LocalShard(local.info, (Piece(piece.box, 0, row_major(piece.box.shape)),), view)


def weight_of(trainer: EngineParts, name: str) -> LocalShard:
    """Return the part of a module's parameter that this rank holds: all, or under ZeRO 3 its partition.

    Args:
        trainer: the parts of the engine.
        name: of the parameter.
    """
    parameter: Any = trainer.parameters[name]
    if not hasattr(parameter, "ds_tensor"):
        return local_of(name, "weight", parameter)
    memory = parameter.ds_tensor.detach().view(-1)
    start, stop = partition_of(trainer.optimizer, parameter)
    info = TensorInfo(name, "weight", dtype_name(memory.dtype), shape_of(parameter))
    return flat_local(info, memory[: stop - start], start, stop, partitions_of(parameter))


def locals_of_buffers(trainer: EngineParts) -> list[LocalShard]:
    """Return the persistent buffers of the module.

    Args:
        trainer: the parts of the engine.
    """
    return [local_of(name, "weight", buffer) for name, buffer in trainer.buffers.items()]


def groups_of(trainer: EngineParts, held: Sequence[OptimizerTensor]) -> tuple[dict[str, Any], ...]:
    """The optimizer groups: `params` by name, hyper-parameters, and in `state` the states that are plain numbers."""
    if trainer.inner is None:
        return ()
    found = []
    for g, group in enumerate(trainer.inner.param_groups):
        mine = [one for one in held if one.group == g]
        hyper = {k: _number(v) for k, v in group.items() if k not in ("params", "param_names")}
        entry = {"params": [name for one in mine for name in one.shapes], **hyper}
        state = _plain_state(mine)
        found.append(encode({**entry, "state": state} if state else entry, f"group {g}"))
    return tuple(found)


def _number(value: Any) -> Any:
    """A hyper-parameter as a number, also if it is a tensor (a learning rate on the device)."""
    if torch.is_tensor(value):
        if value.dim():
            raise UsageError(
                f"an optimizer group has a tensor of shape {list(value.shape)} as hyper-parameter"
            )
        return value.item()
    return value


def _plain_state(held: Sequence[OptimizerTensor]) -> dict[str, Any]:
    """States that are plain numbers: one value if all parameters with states have the same, else one for each name."""
    by_name: dict[str, dict[str, Any]] = {}
    stateful = 0
    for one in held:
        states = one.states
        stateful += len(one.shapes) if states else 0
        for state, value in states.items():
            if not torch.is_tensor(value):
                by_name.setdefault(state, {}).update(dict.fromkeys(one.shapes, value))
    return {
        state: next(iter(values.values()))
        if len(values) == stateful and len(set(map(repr, values.values()))) == 1
        else values
        for state, values in by_name.items()
    }


def save(
    engine: Any,
    url: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    metrics: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    client_state: Mapping[str, Any] | None = None,
    form: Literal["zarr", "packed", "safetensors"] = "zarr",
    overwrite: bool = False,
    lineage: Sequence[LineageDoc] = (),
    timeout: float = TIMEOUT,
) -> Saved:
    """Save a DeepSpeed engine of ZeRO 0, 1, 2 or 3 between two steps; all ranks call this together.

    Saves weights, master weights, all optimizer states, optimizer groups by name, frozen
    parameters, buffers, the learning rate scheduler, the loss scaler, the step counters and the
    client state. Random generators are not part of an engine.

    Args:
        engine: as returned by `deepspeed.initialize`.
        url: where to write the checkpoint, a path or URL; the same on all ranks.
        step: the training step (default: the engine's).
        run: name of the training run, for the catalog.
        metrics: numbers to record in the catalog: `{"val_loss": 2.1}`.
        config: configuration of the training, JSON values (default: DeepSpeed's, without secrets).
            DeepSpeed's is always saved as the object `ds_config`, too.
        client_state: as for `collect`.
        form: `zarr` writes arrays, `packed` one file per rank, `safetensors` files of weights; see
            `ucformat.torch.save`.
        overwrite: replace an existing checkpoint, which stays intact until the new one is
            committed.
        lineage: the checkpoints that this one was derived from.
        timeout: seconds after which an unresponsive rank is considered dead.

    Returns:
        the committed checkpoint.

    Raises:
        UnsupportedError: the engine has state that cannot be saved yet (pipeline, tensor or expert
            parallelism, NVMe), or is in the middle of gradient accumulation.
        Conflict: a checkpoint exists at `url`.
        UcformatError: a rank failed or died; nothing is committed. Every rank gets the same error.
    """
    with group_for_call(None, timeout, "save", url) as ranks:
        with ranks.sharing_errors():
            state = collect(engine, client_state)
            steps = int(engine.global_steps) if step is None else step
            if config is None:
                config = program_config(("ds_config", engine._config._param_dict))  # noqa: SLF001 - engine.config may name a file
            metadata = SaveMetadata.of(
                {
                    "step": steps,
                    "run": run,
                    "metrics": metrics,
                    "config": config,
                    "lineage": lineage,
                }
            )
            options = SaveOptions(str(url), form, overwrite)
        return save_in_group(state, options, metadata, ranks)
