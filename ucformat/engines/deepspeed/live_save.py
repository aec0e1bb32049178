"""`save`: saves what each rank of a DeepSpeed engine holds as one universal checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import setitem
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ucformat.engines.deepspeed.live_engine import (
    inspect_engine,
    optimizer_tensors,
    partition_of,
    partitions_of,
    shape_of,
)
from ucformat.engines.deepspeed.model_states import SCALER, scaler_of
from ucformat.errors import UcformatError, UnsupportedError, UsageError, refuse_arguments
from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.reading.readable import LazySequence, json_key
from ucformat.reading.values import SMALL, references
from ucformat.sources.configuration import program_config
from ucformat.torch.loading.values import FittedValues
from ucformat.torch.saving.save import prepare, save_prepared, saving_group
from ucformat.torch.state.collect import ValueSlot
from ucformat.torch.state.fingerprint import piece_in
from ucformat.torch.state.local import LocalShard, LocalState, flat_local, local_of
from ucformat.torch.state.memory import dtype_name, synchronize, torch_dtype
from ucformat.torch.state.names import with_extra_state
from ucformat.torch.state.objects import PerRank, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from os import PathLike

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.deepspeed.live_engine import EngineParts, OptimizerTensor
    from ucformat.torch.saving.options import SaveArguments
    from ucformat.torch.saving.save import Saved

    Put = Callable[[], None]

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
    otherwise both are stored. Buffers and extra states of modules are those of the first
    data-parallel rank, tensors above 64 KiB in the client state those of rank 0, as in DeepSpeed's
    own files of ZeRO 0 to 2. What no rank knows of a pipeline alone is not collected: the names of
    all buffers (`buffer_names`) and the extra states of all modules, which `save` adds.

    Args:
        client_state: values of the program, as for `engine.save_checkpoint`, the same on all ranks;
            those that differ as `ucformat.torch.PerRank(value)`. May contain tensors.

    Raises:
        UsageError: it is not a DeepSpeed engine.
        UnsupportedError: the engine has state that cannot be saved yet, or is in the middle of
            gradient accumulation.
    """
    return _collected(inspect_engine(engine), client_state)


def _collected(trainer: EngineParts, client_state: Mapping[str, Any] | None) -> LocalState:
    """As `collect`, from the parts of an engine."""
    import deepspeed

    _refuse_half_a_step(trainer.engine)
    entries = optimizer_tensors(trainer)
    tensors = list(tensors_of(trainer, entries))
    synchronize(t.tensor for t in tensors)  # before values are copied from devices
    names = {t.info.name for t in tensors} | trainer.buffers.keys()
    plain, ranks, large = client_values(client_state or {}, names)
    objects = plain_values(trainer) | ({CLIENT: plain} if plain else {})
    tensors += [b for b in locals_of_buffers(trainer) if trainer.provides(b.info.name)]
    if trainer.rank == 0:
        tensors += [local_of(name, "weight", tensor) for name, tensor in large.items()]
        objects |= module_values(trainer) if trainer.is_whole else {}
    return LocalState(
        tensors=tuple(tensors),
        objects=objects,
        ranks=ranks,
        groups=groups_of(trainer, entries),
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
            f"the engine has accumulated the gradients of {done} micro-batches, which a "
            "checkpoint does not contain",
            hint="save after the engine.step() that applies them",
        )


def tensors_of(trainer: EngineParts, entries: Sequence[OptimizerTensor]) -> Iterator[LocalShard]:
    """Yield the states of each parameter, in the order of the module."""
    by_name: dict[str, list[OptimizerTensor]] = {name: [] for name in trainer.parameters}
    for entry in entries:
        # a rank also describes what it holds no elements of
        for name in entry.distributions or entry.parts:
            by_name[name].append(entry)
    owners = {name: entry for entry in entries for name in entry.shapes}
    for name in trainer.parameters:
        owner = owners.get(name)
        if owner is None or master_state(trainer, name, owner) == "master":
            yield weight_of(trainer, name)
        for entry in by_name[name]:
            yield part_of(trainer, entry, name, entry.tensor, master_state(trainer, name, entry))
            for state, value in entry.states.items():
                if torch.is_tensor(value):
                    yield part_of(trainer, entry, name, value, state)


def master_state(trainer: EngineParts, name: str, entry: OptimizerTensor) -> str:
    """Return the state under which the optimizer's copy of a parameter is stored."""
    return "weight" if entry.tensor.dtype == trainer.parameters[name].dtype else "master"


def part_of(
    trainer: EngineParts, entry: OptimizerTensor, name: str, memory: torch.Tensor, state: str
) -> LocalShard:
    """Return the part of a parameter's state that this rank holds in the optimizer.

    Raises:
        UnsupportedError: `memory` has neither the shape of the flat buffer nor a single value.
    """
    memory = memory.detach()
    if memory.dim() == 0 or entry.whole:
        return trainer.whole(local_of(name, state, memory))
    if memory.shape != entry.tensor.shape:
        raise UnsupportedError(
            f"the optimizer state {state!r} of {name} has shape {list(memory.shape)}, which "
            "differs from that of the "
            f"flat buffer of {entry.tensor.numel()} elements",
            hint="such optimizers can be saved and loaded with ZeRO 0 only",
        )
    start, stop, offset = entry.parts.get(name, (0, 0, 0))
    info = TensorInfo(name, state, dtype_name(memory.dtype), entry.shapes[name])
    part = memory.narrow(0, offset, stop - start)
    return trainer.whole(flat_local(info, part, start, stop, entry.distributions.get(name)))


def boxes_of(local: LocalShard) -> Iterator[LocalShard]:
    """Split a flat range into boxes, each as a view of the box's shape."""
    if not local.pieces:
        yield local
    for piece in local.pieces:
        view = piece_in(local.tensor, piece)
        strides = view.stride() if view.is_cpu else row_major(piece.box.shape)
        yield LocalShard(local.info, (Piece(piece.box, 0, strides),), view)


def weight_of(trainer: EngineParts, name: str) -> LocalShard:
    """Return the part of a parameter that this rank holds: all, or under ZeRO 3 its partition."""
    parameter: Any = trainer.parameters[name]
    if not hasattr(parameter, "ds_tensor"):
        return trainer.whole(local_of(name, "weight", parameter))
    memory = parameter.ds_tensor.detach().view(-1)
    start, stop = partition_of(trainer.optimizer, parameter)
    info = TensorInfo(name, "weight", dtype_name(memory.dtype), shape_of(parameter))
    local = flat_local(info, memory[: stop - start], start, stop, partitions_of(parameter))
    return trainer.whole(local)


def locals_of_buffers(trainer: EngineParts) -> list[LocalShard]:
    """Return the persistent buffers of the module."""
    return [local_of(name, "weight", buffer) for name, buffer in trainer.buffers.items()]


def groups_of(
    trainer: EngineParts, entries: Sequence[OptimizerTensor]
) -> tuple[dict[str, Any], ...]:
    """The optimizer groups; `state` has the states that are plain numbers."""
    if trainer.inner is None:
        return ()
    groups = []
    for g, group in enumerate(trainer.inner.param_groups):
        mine = [entry for entry in entries if entry.group == g]
        hyper = {k: _number(v) for k, v in group.items() if k not in ("params", "param_names")}
        document = {"params": [name for entry in mine for name in entry.shapes], **hyper}
        state = _plain_state(mine)
        groups.append(encode({**document, "state": state} if state else document, f"group {g}"))
    return tuple(groups)


def _number(value: Any) -> Any:
    """A hyper-parameter as a number, also if it is a tensor (a learning rate on the device)."""
    if torch.is_tensor(value):
        if value.dim():
            raise UsageError(
                f"an optimizer group has a tensor of shape {list(value.shape)} as hyper-parameter"
            )
        return value.item()
    return value


def _plain_state(entries: Sequence[OptimizerTensor]) -> dict[str, Any]:
    """States that are plain numbers: one value if all have the same, else one for each name."""
    by_name: dict[str, dict[str, Any]] = {}
    stateful = 0
    for entry in entries:
        states = entry.states
        stateful += len(entry.shapes) if states else 0
        for state, value in states.items():
            if not torch.is_tensor(value):
                by_name.setdefault(state, {}).update(dict.fromkeys(entry.shapes, value))
    return {
        state: next(iter(values.values()))
        if len(values) == stateful and len(set(map(repr, values.values()))) == 1
        else values
        for state, values in by_name.items()
    }


#: Arguments of saves that an engine determines, and what to do instead.
_REFUSED = {
    "names": "an engine has the names of its whole model",
    "group": "all ranks of the engine save together",
}


def save(
    engine: Any,
    url: str | PathLike[str],
    *,
    client_state: Mapping[str, Any] | None = None,
    **arguments: Unpack[SaveArguments],
) -> Saved:
    """Save a DeepSpeed engine of ZeRO 0, 1, 2 or 3 between two steps; all ranks call this together.

    Saves weights, master weights, all optimizer states, optimizer groups by name, frozen
    parameters, buffers, the learning rate scheduler, the loss scaler, the step counters and the
    client state, under the names that they have in the whole model. Random generators are not part
    of an engine.

    Args:
        engine: as returned by `deepspeed.initialize`.
        url: where to write the checkpoint, a path or URL; the same on all ranks.
        client_state: as for `collect`.
        arguments: those of `SaveArguments`, by keyword, except `names` and `group`. The `step` is the
            engine's by default, and the `config` DeepSpeed's, without secrets, which is always saved
            as the object `ds_config`, too.

    Raises:
        UnsupportedError: the engine has state that cannot be saved yet (on NVMe, of experts in a
            pipeline, …), or is in the middle of gradient accumulation.
        UsageError: an argument is not supported.
        Conflict: a checkpoint exists at `url`.
        UcformatError: a rank failed or died; nothing is committed. Every rank gets the same error.
    """
    refuse_arguments("ucformat.torch.deepspeed.save", arguments, _REFUSED)
    with saving_group(url, "save", arguments) as ranks:
        with ranks.sharing_errors():
            trainer = inspect_engine(engine)
            state = _collected(trainer, client_state)
        if not trainer.is_whole:
            values = ranks.combine(module_values(trainer), _joined_values, Any)
            state = replace(state, objects={**state.objects, **values})
        with ranks.sharing_errors():
            completed: SaveArguments = {**arguments}
            if completed.get("step") is None:
                completed["step"] = int(engine.global_steps)
            if completed.get("config") is None:
                completed["config"] = program_config(("ds_config", engine._config._param_dict))  # noqa: SLF001 - engine.config may name a file
            prepared = prepare(state, url, ranks, completed)
        return save_prepared(*prepared, completed, ranks)


# Saves and restores the non-tensor values of a DeepSpeed engine: counters, scheduler, loss scaler, groups.


CLIENT = "client_state"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def plain_values(trainer: EngineParts) -> dict[str, Any]:
    """Return the objects of a checkpoint as JSON, under the names of DeepSpeed's own checkpoints."""
    engine = trainer.engine
    values: dict[str, Any] = {name: int(getattr(engine, name)) for name in _COUNTERS}
    values["ds_config"] = engine._config._param_dict  # noqa: SLF001 - engine.config may be the name of a file
    values |= {name: part.state_dict() for name, part in stateful(engine).items()}
    scaler = _scaler(trainer.optimizer)
    if scaler is not None:
        dynamic = {"dynamic": _is_dynamic(scaler)}
        state = {k: getattr(scaler, k) for k in SCALER if getattr(scaler, k, None) is not None}
        values["optimizer"] = {"loss_scaler": dynamic | state}
    return {name: encode(value, name) for name, value in values.items()}


def module_values(trainer: EngineParts) -> dict[str, Any]:
    """Return the objects of a checkpoint that follow from modules, as far as this rank has these."""
    # which an export to stage 3 must tell from frozen parameters
    values: dict[str, Any] = {"buffer_names": list(filter(trainer.provides, trainer.buffers))}
    extra = {
        key: encode(part.get_extra_state(), key)
        for key, part in _with_extra_state(trainer)
        if trainer.provides(key)
    }
    return values | ({"module": extra} if extra else {})


def _joined_values(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The values of the modules of some consecutive ranks and of those after them."""
    names = dict.fromkeys((*a["buffer_names"], *b["buffer_names"]))
    extra = {**b.get("module", {}), **a.get("module", {})}
    return {"buffer_names": list(names)} | ({"module": extra} if extra else {})


def stateful(engine: Any) -> dict[str, Any]:
    """Return the parts of an engine with a state dict, by their names in DeepSpeed's checkpoints."""
    parts = {"lr_scheduler": engine.lr_scheduler}
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        parts["data_sampler"] = engine.training_dataloader.data_sampler
    if engine.random_ltd_enabled():
        parts["random_ltd"] = engine.random_ltd_scheduler
    return {name: part for name, part in parts.items() if part is not None}


def _with_extra_state(trainer: EngineParts) -> Iterator[tuple[str, torch.nn.Module]]:
    """As `with_extra_state`, with the keys of the whole model."""
    for key, part in with_extra_state(trainer.engine.module):
        yield trainer.experts.whole_name(key), part


def _scaler(optimizer: Any) -> Any:
    """The object with the loss scale: under ZeRO the scaler, else a configuration that changes."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _is_dynamic(scaler: Any) -> bool:
    return bool(getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)))


def scaler_in(objects: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of the dynamic loss scaler in a checkpoint; None if there is none."""
    optimizer = objects.get("optimizer")
    if not isinstance(optimizer, dict):
        return None
    scaler, dynamic = scaler_of(optimizer)
    return {k: scaler[k] for k in SCALER if k in scaler} if dynamic else None


def set_scaler(trainer: EngineParts, state: Mapping[str, Any] | None) -> None:
    """Set the state of the engine's loss scaler; a static one is left as configured."""
    scaler = _scaler(trainer.optimizer)
    if scaler is None or not _is_dynamic(scaler) or state is None:
        return
    for name, value in state.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def set_counters(trainer: EngineParts, objects: Mapping[str, Any], step: int | None) -> None:
    """Set the engine's counters; micro-steps are rounded up to a whole accumulation."""
    engine = trainer.engine
    steps = objects.get("global_steps", step)
    if steps is None:
        return
    engine.global_steps = int(steps)
    samples = engine.global_steps * engine.train_batch_size()
    engine.global_samples = int(objects.get("global_samples", samples))
    engine.skipped_steps = int(objects.get("skipped_steps", 0))
    each = engine.gradient_accumulation_steps()
    micro_steps = int(objects.get("micro_steps", engine.global_steps * each))
    engine.micro_steps = -(-micro_steps // each) * each


def client_values(
    client: Mapping[str, Any], taken: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """Split a client state into objects and tensors.

    A tensor above 64 KiB becomes a tensor of the checkpoint, named by its path:
    `client_state.ema.weight`.

    Returns:
        shared values as JSON, per-rank values as JSON, and large tensors by name.
    """
    large: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > SMALL:
            if path in taken or path in large:
                raise UsageError(
                    f"two tensors would be named {path}", hint="use another key in the client state"
                )
            large[path] = value.detach()
            return {"$ref": path}
        if isinstance(value, dict) and all(type(k) in (str, int) for k in value):
            return {json_key(k): walk(v, f"{path}.{k}") for k, v in value.items()}
        if type(value) in (list, tuple):
            return [walk(v, f"{path}.{i}") for i, v in enumerate(value)]
        return encode(value, path)

    per_rank = {k: v.value for k, v in client.items() if isinstance(v, PerRank)}
    shared = walk({k: v for k, v in client.items() if k not in per_rank}, CLIENT)
    return shared, {f"{CLIENT}.{k}": encode(v, k) for k, v in per_rank.items()}, large


#: Options that select an implementation, which the new engine does, or that are not
#: hyper-parameters.
_NOT_HYPER = frozenset(("state", "param_names", "foreach", "fused", "capturable", "differentiable"))
#: Options by which DeepSpeed finds the ranks that have a group of experts.
_OF_EXPERTS = frozenset(("name", "moe"))
#: Options that are added during training, and so may exist only in the checkpoint.
_ADDED = frozenset(("initial_lr", "step"))


def fit_groups(
    entries: Sequence[OptimizerTensor],
    trainer: EngineParts,
    ck: Checkpoint,
    names: Mapping[str, str],
) -> FittedValues:
    """Match optimizer groups with stored hyper-parameters, by the names of their parameters.

    A parameter that was in no group, because it was frozen or is empty, gets those of the others in
    its group.
    """
    stored = {name: group.options for group in ck.manifest.groups for name in group.params}
    fit = FittedValues()
    for number, group in enumerate(trainer.inner.param_groups if trainer.inner is not None else ()):
        members = [
            names.get(n, n) for entry in entries if entry.group == number for n in entry.shapes
        ]
        label = f"optimizer group {number}"
        of_members = [stored[n] for n in members if n in stored]
        of_experts = any("moe" in options for options in (group, *of_members))
        ignored = _NOT_HYPER | _OF_EXPERTS if of_experts else _NOT_HYPER
        hypers = [_hyper(options, group, ignored) for options in of_members]
        for key, value in fit.common_options(label, members, hypers).items():
            current = group.get(key)
            is_tensor = torch.is_tensor(current)
            put = current.fill_ if is_tensor else partial(setitem, group, key)
            saved = value if is_tensor else decode(value, current)
            slot = ValueSlot(_number(current), put)
            fit.fit(f"the hyper-parameter {key} of {label}", slot, saved)
    return fit


def _hyper(
    options: Mapping[str, Any], group: Mapping[str, Any], ignored: frozenset[str]
) -> dict[str, Any]:
    return {k: v for k, v in options.items() if (k in group and k not in ignored) or k in _ADDED}


def fit_parts(
    trainer: EngineParts, ck: Checkpoint, *, scheduler: bool, trust: bool
) -> FittedValues:
    """Match the states of the scheduler, of similar parts, and of submodules with the checkpoint."""
    parts = {k: v for k, v in stateful(trainer.engine).items() if scheduler or k != "lr_scheduler"}
    fit = FittedValues()
    for name, part in parts.items():
        slot = ValueSlot(part.state_dict(), part.load_state_dict)
        try:
            state = _fitting(ck.objects.get(name), slot.value, trust=trust)
            fit.fit(f"the object {name}", slot, state)
        except KeyError:
            fit.missing.append(f"the object {name}{_HINTS.get(name, '')}")
        except UcformatError as error:
            fit.others.append(f"the object {name}: {error.message}{_HINTS.get(name, '')}")
    extra = ck.objects.get("module") or {}
    for key, module in _with_extra_state(trainer):
        if key not in extra:
            fit.missing.append(f"the extra state {key}")
            continue
        slot = ValueSlot(module.get_extra_state(), module.set_extra_state)
        try:
            fit.fit(f"the extra state {key}", slot, decode(extra[key], trust=trust))
        except UcformatError as error:
            fit.others.append(f"the extra state {key}: {error.message}")
    return fit


#: What schedulers of torch keep for each optimizer group.
_BY_GROUP = frozenset(("base_lrs", "_last_lr"))
_HINTS = {"lr_scheduler": " (scheduler=False keeps that of the engine)"}


def _fitting(data: Any, template: Any, *, trust: bool) -> Any:
    """A stored state dict; KeyError if there is none, UsageError if it is of another class."""
    if data is None:
        raise KeyError
    lacking = sorted(set(template) - set(data)) if isinstance(data, dict) else sorted(template)
    if lacking:
        raise UsageError(f"it is the state of another class, without {', '.join(lacking)}")
    for key in _BY_GROUP.intersection(template):
        if len(data[key]) != len(template[key]):
            # which of them would be those of this engine's groups is not known
            raise UsageError(
                f"it is for {len(data[key])} optimizer groups, and this rank has "
                f"{len(template[key])}, as a pipeline stage without parameters for one"
            )
    return decode(data, template, trust=trust)


def values_now(trainer: EngineParts, ck: Checkpoint) -> FittedValues:
    """The counters and a dynamic loss scaler as they are, and as they were saved."""
    fit = FittedValues()
    for name in ("global_steps", "skipped_steps"):
        if name in ck.objects:
            current = int(getattr(trainer.engine, name))
            fit.compare(f"the object {name}", current, decode(ck.objects[name]))
    scaler, saved = _scaler(trainer.optimizer), scaler_in(ck.objects)
    if scaler is not None and _is_dynamic(scaler):
        for name, value in (saved or {}).items():
            if hasattr(scaler, name):
                label = f"the object optimizer.loss_scaler.{name}"
                fit.compare(label, getattr(scaler, name), value)
    return fit


def fit_values(trainer: EngineParts, ck: Checkpoint) -> Put:
    """Return a function that sets the counters and a dynamic loss scaler."""
    scaler = scaler_in(ck.objects)

    def put() -> None:
        set_counters(trainer, ck.objects, ck.metadata.step)
        set_scaler(trainer, scaler)

    return put


class ClientState:
    """The client state of a checkpoint, whose large tensors are targets."""

    def __init__(
        self, ck: Checkpoint, names: Mapping[str, str], rank: int, ranks: int, *, trust: bool
    ) -> None:
        self._data: dict[str, Any] = dict(ck.objects.get(CLIENT) or {})
        # values of this rank that differ in DeepSpeed's ZeRO 3 checkpoint
        if ck.metadata.layout.get("dp") == ranks:
            self._data |= ck.objects.get("rank", {}).get(str(rank), {}).get(CLIENT) or {}
        self._trust = trust
        self._called = {stored: name for name, stored in names.items()}
        self._room = {
            name: torch.empty(info.shape, dtype=torch_dtype(info.dtype))
            for name in references(self._data)
            for info in [ck[name, "weight"].info]
        }
        below = f"{CLIENT}."
        own_keys = [key for key in ck.per_rank if key.startswith(below)]
        saved = {key.removeprefix(below): ck.per_rank[key] for key in own_keys}
        self.ranks: dict[str, Sequence[Any]] = {
            k: LazySequence(partial(self._decoded, values)) for k, values in saved.items()
        }
        of_this_rank = ((k, values[rank]) for k, values in saved.items() if len(values) == ranks)
        self._own = {k: self._filled(decode(value, trust=trust)) for k, value in of_this_rank}

    def _decoded(self, values: Sequence[Any]) -> list[Any]:
        return [decode(v, trust=self._trust) for v in values]

    @property
    def targets(self) -> list[LocalShard]:
        """The large tensors, to be read."""
        return [local_of(self._called[name], "weight", t) for name, t in self._room.items()]

    def value(self) -> dict[str, Any]:
        """Return the client state that was passed to `save`, with per-rank values if the number of ranks is the same.

        Values have the types with which they were saved.
        """
        shared: dict[str, Any] = self._filled(decode(self._data, trust=self._trust))
        return shared | self._own

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) == {"$ref"}:
                return self._room[value["$ref"]]
            return {k: self._filled(v) for k, v in value.items()}
        return [self._filled(v) for v in value] if isinstance(value, list) else value
