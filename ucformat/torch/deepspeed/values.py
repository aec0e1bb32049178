"""The values of a DeepSpeed engine that are no parameters' tensors: counters, scheduler, loss scaler, client state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ucformat.errors import UsageError
from ucformat.sources.values import SMALL, json_key
from ucformat.torch.objects import PerRank, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ucformat.torch.deepspeed.engine import Trainer

__all__ = [
    "CLIENT",
    "client_values",
    "extra_states",
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


def plain_values(trainer: Trainer) -> dict[str, Any]:
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


def set_scaler(trainer: Trainer, found: Mapping[str, Any] | None) -> None:
    """Give a dynamic loss scaler what the checkpoint's had; one that is static stays as it is configured."""
    scaler = _scaler(trainer.optimizer)
    if scaler is None or not _is_dynamic(scaler) or found is None:
        return
    for name, value in found.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def set_counters(trainer: Trainer, objects: Mapping[str, Any], step: int | None) -> None:
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
