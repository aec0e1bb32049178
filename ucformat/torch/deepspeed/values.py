"""The values of a DeepSpeed engine besides tensors, saved and restored: counters, scheduler, loss scaler, groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ucformat.errors import UcformatError, UsageError
from ucformat.sources.values import SMALL, json_key
from ucformat.torch.loading.match import Problems
from ucformat.torch.state.local import local_of
from ucformat.torch.state.memory import torch_dtype
from ucformat.torch.state.objects import PerRank, decode, encode, like

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.deepspeed.engine import EngineParts
    from ucformat.torch.deepspeed.partitions import OptimizerTensor
    from ucformat.torch.state.local import LocalShard

    Put = Callable[[], None]

__all__ = [
    "CLIENT",
    "ClientState",
    "client_values",
    "extra_states",
    "fit_groups",
    "fit_parts",
    "fit_values",
    "plain_values",
    "scaler_in",
    "set_counters",
    "set_scaler",
    "stateful",
    "with_extra_state",
]

CLIENT = "client_state"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
#: What changes in a loss scaler while it works; its settings are the configuration's.
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def plain_values(trainer: EngineParts) -> dict[str, Any]:
    """The objects of a checkpoint as JSON, under the names that they have in DeepSpeed's own."""
    engine = trainer.engine
    found: dict[str, Any] = {name: int(getattr(engine, name)) for name in _COUNTERS}
    found["ds_config"] = engine._config._param_dict  # noqa: SLF001 - engine.config may be the name of a file
    found |= {name: part.state_dict() for name, part in stateful(engine).items()}
    scaler = _scaler(trainer.optimizer)
    if scaler is not None:
        dynamic = {"dynamic": _is_dynamic(scaler)}
        kept = {k: getattr(scaler, k) for k in _SCALER if getattr(scaler, k, None) is not None}
        found["optimizer"] = {"loss_scaler": dynamic | kept}
    return {name: encode(value, name) for name, value in found.items()}


def stateful(engine: Any) -> dict[str, Any]:
    """The parts of an engine that have a state dict of their own, as DeepSpeed's checkpoints call them."""
    found = {"lr_scheduler": engine.lr_scheduler}
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = engine.training_dataloader.data_sampler
    if engine.random_ltd_enabled():
        found["random_ltd"] = engine.random_ltd_scheduler
    return {name: part for name, part in found.items() if part is not None}


def with_extra_state(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that keep more than parameters and buffers (`get_extra_state`), and the keys of that in a state dict."""
    own = torch.nn.Module.get_extra_state
    for path, part in module.named_modules():
        if type(part).get_extra_state is not own:
            yield (f"{path}._extra_state" if path else "_extra_state"), part


def extra_states(module: torch.nn.Module) -> dict[str, Any]:
    """What such modules keep, as JSON."""
    return {key: encode(part.get_extra_state(), key) for key, part in with_extra_state(module)}


def _scaler(optimizer: Any) -> Any:
    """What holds the loss scale: under ZeRO an object that scales, else a configuration that changes."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _is_dynamic(scaler: Any) -> bool:
    return bool(getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)))


def scaler_in(objects: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the objects of a checkpoint say of a dynamic loss scaler; None where there was none.

    Three spellings: ours; under ZeRO 1 to 3 DeepSpeed pickles its scaler; under ZeRO 0 it lists the scaler's fields.
    """
    optimizer = objects.get("optimizer")
    if not isinstance(optimizer, dict):
        return None
    scaler = optimizer.get("loss_scaler", optimizer)
    if "$class" in scaler:
        scaler = scaler.get("$state") or {}
    if not (scaler.get("dynamic") or scaler.get("dynamic_loss_scale")):
        return None
    return {k: scaler[k] for k in _SCALER if k in scaler}


def set_scaler(trainer: EngineParts, found: Mapping[str, Any] | None) -> None:
    """Give a dynamic loss scaler what the checkpoint's had; one that is static stays as it is configured."""
    scaler = _scaler(trainer.optimizer)
    if scaler is None or not _is_dynamic(scaler) or found is None:
        return
    for name, value in found.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def set_counters(trainer: EngineParts, objects: Mapping[str, Any], step: int | None) -> None:
    """The engine's counters; micro-steps go on from a whole accumulation, whose length may be another now."""
    engine = trainer.engine
    steps = objects.get("global_steps", step)
    if steps is None:
        return
    engine.global_steps = int(steps)
    engine.global_samples = int(objects.get("global_samples", engine.global_steps * engine.train_batch_size()))
    engine.skipped_steps = int(objects.get("skipped_steps", 0))
    each = engine.gradient_accumulation_steps()
    engine.micro_steps = -(-int(objects.get("micro_steps", engine.global_steps * each)) // each) * each


def client_values(
    client: Mapping[str, Any], taken: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """The client state as JSON, that of its values that each rank has for itself, and its large tensors by name.

    A tensor above 64 KiB becomes a tensor of the checkpoint, named by its path: `client_state.ema.weight`.
    """
    large: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > SMALL:
            if path in taken or path in large:
                raise UsageError(f"two tensors would be called {path}", hint="use another key in the client state")
            large[path] = value.detach()
            return {"$ref": path}
        if isinstance(value, dict) and all(type(k) in (str, int) for k in value):
            return {json_key(k): walk(v, f"{path}.{k}") for k, v in value.items()}
        if type(value) in (list, tuple):
            return [walk(v, f"{path}.{i}") for i, v in enumerate(value)]
        return encode(value, path)

    own = {k: v.value for k, v in client.items() if isinstance(v, PerRank)}
    shared = walk({k: v for k, v in client.items() if k not in own}, CLIENT)
    return shared, {f"{CLIENT}.{k}": encode(v, k) for k, v in own.items()}, large


#: Options that say how an optimizer computes, which is the new engine's to say, or that are none.
_NOT_HYPER = frozenset(("state", "param_names", "foreach", "fused", "capturable", "differentiable"))
#: Options that come with training, and so may be the checkpoint's alone.
_ADDED = frozenset(("initial_lr", "step"))


def fit_groups(
    held: Sequence[OptimizerTensor], trainer: EngineParts, ck: Checkpoint, names: Mapping[str, str]
) -> tuple[Problems, Put]:
    """Which stored hyper-parameters each optimizer group gets, by the names of its parameters, and how to put them.

    A parameter that was in no group, because it was frozen or is empty, follows the others of its group.
    """
    stored = {name: group.options for group in ck.manifest.groups for name in group.params}
    missing, others = [], []
    todo: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, group in enumerate(trainer.inner.param_groups if trainer.inner is not None else ()):
        members = [names.get(n, n) for one in held if one.group == number for n in one.shapes]
        found = [_hyper(stored[n], group) for n in members if n in stored]
        if members and not found:
            missing.append(f"optimizer group {number}: the hyper-parameters of {', '.join(members[:3])}")
            continue
        unlike = sorted({k for options in found for k in options if options[k] != found[0].get(k)})
        if unlike:
            others.append(f"optimizer group {number}: its parameters were in groups of different {', '.join(unlike)}")
        elif found:
            todo.append((group, found[0]))

    def put() -> None:
        for group, options in todo:
            for key, value in options.items():
                if torch.is_tensor(group.get(key)):
                    group[key].fill_(value)
                else:
                    group[key] = decode(value, group.get(key))

    return Problems(missing=tuple(missing), others=tuple(others)), put


def _hyper(options: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if (k in group and k not in _NOT_HYPER) or k in _ADDED}


def fit_parts(trainer: EngineParts, ck: Checkpoint, *, scheduler: bool, trust: bool) -> tuple[Problems, Put]:
    """Whether the checkpoint has the states of the scheduler and its like, and of modules; and how to put them."""
    parts = {k: v for k, v in stateful(trainer.engine).items() if scheduler or k != "lr_scheduler"}
    problems = Problems()
    todo: list[tuple[Any, Any]] = []
    for name, part in parts.items():
        try:
            todo.append((part.load_state_dict, _fitting(ck.objects.get(name), part.state_dict(), trust=trust)))
        except KeyError:
            problems |= Problems(missing=(f"the object {name}{_LEAVE.get(name, '')}",))
        except UcformatError as error:
            problems |= Problems(others=(f"the object {name}: {error.message}{_LEAVE.get(name, '')}",))
    kept = ck.objects.get("module") or {}
    for key, module in with_extra_state(trainer.engine.module):
        if key not in kept:
            problems |= Problems(missing=(f"the extra state {key}",))
            continue
        try:
            todo.append((module.set_extra_state, decode(kept[key], trust=trust)))
        except UcformatError as error:
            problems |= Problems(others=(f"the extra state {key}: {error.message}",))

    def put() -> None:
        for setter, value in todo:
            setter(value)

    return problems, put


_LEAVE = {"lr_scheduler": " (scheduler=False leaves the engine's as it is)"}


def _fitting(data: Any, template: Any, *, trust: bool) -> Any:
    """A stored state dict; KeyError where there is none, UsageError for that of another class."""
    if data is None:
        raise KeyError
    lacking = sorted(set(template) - set(data)) if isinstance(data, dict) else sorted(template)
    if lacking:
        raise UsageError(f"it is another one's state, without {', '.join(lacking)}")
    return decode(data, template, trust=trust)


def fit_values(trainer: EngineParts, ck: Checkpoint) -> Put:
    """How to put the counters and the loss scaler; an engine whose scale is not dynamic keeps its own."""
    scaler = scaler_in(ck.objects)

    def put() -> None:
        set_counters(trainer, ck.objects, ck.metadata.step)
        set_scaler(trainer, scaler)

    return put


class ClientState:
    """The client state: its large tensors are targets like others, and its value is complete when these are read."""

    def __init__(self, ck: Checkpoint, names: Mapping[str, str], rank: int, ranks: int, *, trust: bool) -> None:
        self._data: dict[str, Any] = dict(ck.objects.get(CLIENT) or {})
        if ck.metadata.layout.get("dp") == ranks:  # what this rank of DeepSpeed's own ZeRO 3 checkpoint saved otherwise
            self._data |= ck.objects.get("rank", {}).get(str(rank), {}).get(CLIENT) or {}
        self._trust = trust
        self._called = {stored: name for name, stored in names.items()}
        self._room = {
            name: torch.empty(info.shape, dtype=torch_dtype(info.dtype))
            for name in _references(self._data)
            for info in [ck[name, "weight"].info]
        }
        saved = ck.objects.get("per_rank", {})
        self.ranks: dict[str, list[Any]] = {
            key[len(CLIENT) + 1 :]: [decode(v, trust=trust) for v in values]
            for key, values in saved.items()
            if key.startswith(CLIENT + ".")
        }
        self._own = {k: self._filled(values[rank]) for k, values in self.ranks.items() if len(values) == ranks}

    @property
    def targets(self) -> list[LocalShard]:
        """The large tensors."""
        return [local_of(self._called[name], "weight", tensor) for name, tensor in self._room.items()]

    def value(self) -> dict[str, Any]:
        """The client state as `save` was given it, that of each rank where as many ranks load as saved.

        Tuples come back as lists, and NumPy's arrays as tensors.
        """
        shared: dict[str, Any] = self._filled(decode(self._data, trust=self._trust))
        return shared | self._own

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) == {"$ref"}:
                return self._room[value["$ref"]]
            return {k: self._filled(v) for k, v in value.items()}
        return [self._filled(v) for v in value] if isinstance(value, list) else like(value, None)


def _references(data: Any) -> list[str]:
    """The names of tensors that a JSON form refers to."""
    if isinstance(data, dict):
        if set(data) == {"$ref"}:
            return [data["$ref"]]
        return [name for v in data.values() for name in _references(v)]
    return [name for v in data for name in _references(v)] if isinstance(data, list) else []
