"""Saves and restores the non-tensor values of a DeepSpeed engine: counters, scheduler, loss scaler, groups."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ucformat.errors import UcformatError, UsageError
from ucformat.reading.readable import LazySequence, json_key
from ucformat.sources.values import SMALL
from ucformat.torch.loading.match import Problems
from ucformat.torch.state.local import local_of
from ucformat.torch.state.memory import torch_dtype
from ucformat.torch.state.objects import PerRank, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.deepspeed.live_engine import EngineParts, OptimizerTensor
    from ucformat.torch.state.local import LocalShard

    Put = Callable[[], None]

CLIENT = "client_state"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
#: The state of a loss scaler; its settings belong to the configuration.
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def plain_values(trainer: EngineParts) -> dict[str, Any]:
    """Return the objects of a checkpoint as JSON, under the names of DeepSpeed's own checkpoints."""
    engine = trainer.engine
    found: dict[str, Any] = {name: int(getattr(engine, name)) for name in _COUNTERS}
    found["ds_config"] = engine._config._param_dict  # noqa: SLF001 - engine.config may be the name of a file
    # which an export to stage 3 must tell from frozen parameters
    found["buffer_names"] = list(trainer.buffers)
    found |= {name: part.state_dict() for name, part in stateful(engine).items()}
    scaler = _scaler(trainer.optimizer)
    if scaler is not None:
        dynamic = {"dynamic": _is_dynamic(scaler)}
        kept = {k: getattr(scaler, k) for k in _SCALER if getattr(scaler, k, None) is not None}
        found["optimizer"] = {"loss_scaler": dynamic | kept}
    return {name: encode(value, name) for name, value in found.items()}


def stateful(engine: Any) -> dict[str, Any]:
    """Return the parts of an engine with a state dict, by their names in DeepSpeed's checkpoints."""
    found = {"lr_scheduler": engine.lr_scheduler}
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = engine.training_dataloader.data_sampler
    if engine.random_ltd_enabled():
        found["random_ltd"] = engine.random_ltd_scheduler
    return {name: part for name, part in found.items() if part is not None}


def with_extra_state(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the submodules that define `get_extra_state`, with the key of this state in a state dict."""
    own = torch.nn.Module.get_extra_state
    for path, part in module.named_modules():
        if type(part).get_extra_state is not own:
            yield (f"{path}._extra_state" if path else "_extra_state"), part


def extra_states(module: torch.nn.Module) -> dict[str, Any]:
    """Return the extra states of submodules as JSON, by their keys in a state dict."""
    return {key: encode(part.get_extra_state(), key) for key, part in with_extra_state(module)}


def _scaler(optimizer: Any) -> Any:
    """The object with the loss scale: under ZeRO the scaler, else a configuration that changes."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _is_dynamic(scaler: Any) -> bool:
    return bool(getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)))


def scaler_in(objects: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of the dynamic loss scaler in a checkpoint; None if there is none.

    There are three forms: that of `plain_values`; DeepSpeed's pickled scaler of ZeRO 1 to 3; its
    fields of ZeRO 0.
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
    """Set the state of the engine's loss scaler; a static one is left as configured."""
    scaler = _scaler(trainer.optimizer)
    if scaler is None or not _is_dynamic(scaler) or found is None:
        return
    for name, value in found.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def set_counters(trainer: EngineParts, objects: Mapping[str, Any], step: int | None) -> None:
    """Set the engine's counters; micro-steps are rounded up to a whole accumulation, whose length may have changed."""
    engine = trainer.engine
    steps = objects.get("global_steps", step)
    if steps is None:
        return
    engine.global_steps = int(steps)
    engine.global_samples = int(
        objects.get("global_samples", engine.global_steps * engine.train_batch_size())
    )
    engine.skipped_steps = int(objects.get("skipped_steps", 0))
    each = engine.gradient_accumulation_steps()
    engine.micro_steps = (
        -(-int(objects.get("micro_steps", engine.global_steps * each)) // each) * each
    )


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
#: Options that are added during training, and so may exist only in the checkpoint.
_ADDED = frozenset(("initial_lr", "step"))


def fit_groups(
    held: Sequence[OptimizerTensor], trainer: EngineParts, ck: Checkpoint, names: Mapping[str, str]
) -> tuple[Problems, Put]:
    """Match optimizer groups with stored hyper-parameters, by the names of their parameters.

    A parameter that was in no group, because it was frozen or is empty, gets those of the others in
    its group.

    Returns:
        what is missing or does not fit, and a function that sets the hyper-parameters.
    """
    stored = {name: group.options for group in ck.manifest.groups for name in group.params}
    missing, others = [], []
    fitting: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, group in enumerate(trainer.inner.param_groups if trainer.inner is not None else ()):
        members = [names.get(n, n) for one in held if one.group == number for n in one.shapes]
        found = [_hyper(stored[n], group) for n in members if n in stored]
        if members and not found:
            missing.append(
                f"optimizer group {number}: the hyper-parameters of {', '.join(members[:3])}"
            )
            continue
        differing = sorted(
            {k for options in found for k in options if options[k] != found[0].get(k)}
        )
        if differing:
            names_of = ", ".join(differing)
            others.append(
                f"optimizer group {number}: its parameters were in groups with different {names_of}"
            )
        elif found:
            fitting.append((group, found[0]))

    def put() -> None:
        for group, options in fitting:
            for key, value in options.items():
                if torch.is_tensor(group.get(key)):
                    group[key].fill_(value)
                else:
                    group[key] = decode(value, group.get(key))

    return Problems(missing=tuple(missing), others=tuple(others)), put


def _hyper(options: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if (k in group and k not in _NOT_HYPER) or k in _ADDED}


def fit_parts(
    trainer: EngineParts, ck: Checkpoint, *, scheduler: bool, trust: bool
) -> tuple[Problems, Put]:
    """Match the states of the scheduler, of similar parts, and of submodules with the checkpoint.

    Returns:
        what is missing or does not fit, and a function that sets the states.
    """
    parts = {k: v for k, v in stateful(trainer.engine).items() if scheduler or k != "lr_scheduler"}
    problems = Problems()
    fitting: list[tuple[Any, Any]] = []
    for name, part in parts.items():
        try:
            fitting.append(
                (
                    part.load_state_dict,
                    _fitting(ck.objects.get(name), part.state_dict(), trust=trust),
                )
            )
        except KeyError:
            problems |= Problems(missing=(f"the object {name}{_HINTS.get(name, '')}",))
        except UcformatError as error:
            problems |= Problems(
                others=(f"the object {name}: {error.message}{_HINTS.get(name, '')}",)
            )
    kept = ck.objects.get("module") or {}
    for key, module in with_extra_state(trainer.engine.module):
        if key not in kept:
            problems |= Problems(missing=(f"the extra state {key}",))
            continue
        try:
            fitting.append((module.set_extra_state, decode(kept[key], trust=trust)))
        except UcformatError as error:
            problems |= Problems(others=(f"the extra state {key}: {error.message}",))

    def put() -> None:
        for setter, value in fitting:
            setter(value)

    return problems, put


_HINTS = {"lr_scheduler": " (scheduler=False keeps that of the engine)"}


def _fitting(data: Any, template: Any, *, trust: bool) -> Any:
    """A stored state dict; KeyError if there is none, UsageError if it is of another class."""
    if data is None:
        raise KeyError
    lacking = sorted(set(template) - set(data)) if isinstance(data, dict) else sorted(template)
    if lacking:
        raise UsageError(f"it is the state of another class, without {', '.join(lacking)}")
    return decode(data, template, trust=trust)


def fit_values(trainer: EngineParts, ck: Checkpoint) -> Put:
    """Return a function that sets the counters and a dynamic loss scaler."""
    scaler = scaler_in(ck.objects)

    def put() -> None:
        set_counters(trainer, ck.objects, ck.metadata.step)
        set_scaler(trainer, scaler)

    return put


class ClientState:
    """The client state of a checkpoint; its large tensors are targets, and its value is complete when they are read."""

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
            for name in _references(self._data)
            for info in [ck[name, "weight"].info]
        }
        saved = {
            k[len(CLIENT) + 1 :]: values
            for k, values in ck.per_rank.items()
            if k.startswith(CLIENT + ".")
        }
        self.ranks: dict[str, Sequence[Any]] = {
            k: LazySequence(partial(self._decoded, values)) for k, values in saved.items()
        }
        own = ((k, values[rank]) for k, values in saved.items() if len(values) == ranks)
        self._own = {k: self._filled(decode(value, trust=trust)) for k, value in own}

    def _decoded(self, values: Sequence[Any]) -> list[Any]:
        return [decode(v, trust=self._trust) for v in values]

    @property
    def targets(self) -> list[LocalShard]:
        """The large tensors, to be read."""
        return [
            local_of(self._called[name], "weight", tensor) for name, tensor in self._room.items()
        ]

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


def _references(data: Any) -> list[str]:
    """The names of tensors that a JSON form refers to."""
    if isinstance(data, dict):
        if set(data) == {"$ref"}:
            return [data["$ref"]]
        return [name for v in data.values() for name in _references(v)]
    return [name for v in data for name in _references(v)] if isinstance(data, list) else []
