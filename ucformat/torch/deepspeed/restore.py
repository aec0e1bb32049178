"""Put back what is no tensor of a parameter: hyper-parameters, scheduler, loss scaler, counters, client state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ucformat.errors import UcformatError, UsageError
from ucformat.torch.deepspeed.values import CLIENT, scaler_in, set_counters, set_scaler, stateful, with_extra_state
from ucformat.torch.loading.match import Problems
from ucformat.torch.state.local import local_of
from ucformat.torch.state.memory import torch_dtype
from ucformat.torch.state.objects import decode, like

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.deepspeed.engine import Trainer
    from ucformat.torch.deepspeed.optimizer import OptimizerTensor
    from ucformat.torch.state.local import Local

    Put = Callable[[], None]

__all__ = ["Client", "fit_groups", "fit_parts", "fit_values"]

#: Options that say how an optimizer computes, which is the new engine's to say, or that are none.
_NOT_HYPER = frozenset(("state", "param_names", "foreach", "fused", "capturable", "differentiable"))
#: Options that come with training, and so may be the checkpoint's alone.
_ADDED = frozenset(("initial_lr", "step"))


def fit_groups(
    held: Sequence[OptimizerTensor], trainer: Trainer, ck: Checkpoint, names: Mapping[str, str]
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


def fit_parts(trainer: Trainer, ck: Checkpoint, *, scheduler: bool, trust: bool) -> tuple[Problems, Put]:
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


def fit_values(trainer: Trainer, ck: Checkpoint) -> Put:
    """How to put the counters and the loss scaler; an engine whose scale is not dynamic keeps its own."""
    scaler = scaler_in(ck.objects)

    def put() -> None:
        set_counters(trainer, ck.objects, ck.facts.step)
        set_scaler(trainer, scaler)

    return put


class Client:
    """The client state: its large tensors are targets like others, and its value is complete when these are read."""

    def __init__(self, ck: Checkpoint, names: Mapping[str, str], rank: int, ranks: int, *, trust: bool) -> None:
        self._data: dict[str, Any] = dict(ck.objects.get(CLIENT) or {})
        if ck.facts.layout.get("dp") == ranks:  # what this rank of DeepSpeed's own ZeRO 3 checkpoint saved otherwise
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
    def targets(self) -> list[Local]:
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
