"""What the optimizer of this rank reads from a checkpoint: tensors into its memory, counters by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ucformat.geometry.tensor import Key
from ucformat.torch.deepspeed.save import boxes_of, master_state, part_of
from ucformat.torch.loading.match import PARAMETER, Problems, holds_training, match
from ucformat.torch.loading.read import read
from ucformat.torch.state.local import LocalShard, local_of
from ucformat.torch.state.memory import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.deepspeed.engine import EngineParts
    from ucformat.torch.deepspeed.parts import OptimizerTensor


def make_states(held: OptimizerTensor) -> None:
    """Create the optimizer's states of one tensor, as its first step would.

    Only the optimizer knows its states, so it makes a step on this tensor alone, as in ZeRO's own step, with a
    gradient, a learning rate and a weight decay of zero, which leaves the tensor unchanged. The counters that the step
    has increased are set when those of the checkpoint are read.
    """
    optimizer = held.optimizer
    real = optimizer.param_groups
    group = real[held.group]
    trial: dict[str, Any] = {**group, "params": [held.tensor]}
    for option in ("lr", "weight_decay"):
        if option in trial:
            trial[option] = torch.zeros_like(trial[option]) if torch.is_tensor(trial[option]) else 0.0
    gradient = held.tensor.grad  # its memory is kept by an offloaded optimizer
    held.tensor.grad = torch.zeros_like(held.tensor)
    optimizer.param_groups = [trial]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = real
        held.tensor.grad = gradient
    group.update({k: v for k, v in trial.items() if k not in group})


def forget_states(held: OptimizerTensor) -> None:
    """Delete the optimizer's states of a tensor, so that its next step on it is the first."""
    held.optimizer.state.pop(held.tensor, None)


@dataclass(frozen=True)
class StoredStates:
    """The optimizer states of a checkpoint, by the engine's names of parameters; `names` maps these to stored names."""

    ck: Checkpoint
    names: Mapping[str, str]

    @cached_property
    def plain(self) -> dict[str, dict[str, Any]]:
        """States that are plain numbers, by stored name."""
        found: dict[str, dict[str, Any]] = {}
        for group in self.ck.manifest.groups:
            for state, value in (group.options.get("state") or {}).items():
                by_name = value if isinstance(value, Mapping) else dict.fromkeys(group.params, value)
                for name, one in by_name.items():
                    found.setdefault(name, {})[state] = one
        return found

    @cached_property
    def trained(self) -> bool:
        """Whether the checkpoint contains optimizer states, or groups, which exist before the first step."""
        return holds_training(self.ck)

    def stepped(self, name: str) -> bool:
        """Check whether the checkpoint has optimizer states of a parameter."""
        stored = self.names.get(name)
        if stored is None:
            return False
        return bool(self.plain.get(stored)) or any(s not in PARAMETER for s in self.ck.states(stored))

    def number(self, name: str, state: str) -> Any:
        """Return a state that is stored as a plain number, or None."""
        return self.plain.get(self.names.get(name, ""), {}).get(state)

    def scalar(self, name: str, state: str) -> torch.Tensor:
        """Return a tensor for a 0-d state, in its stored dtype."""
        info = self.ck.tensors.get(Key(self.names.get(name, name), state))
        return torch.zeros((), dtype=torch_dtype(info.dtype) if info is not None else torch.float32)


@dataclass(slots=True)
class Counter:
    """A state with one value for all parameters that share a tensor (`step`).

    `read` are the tensors to read by name of the parameter, `recorded` the values that are stored as plain numbers.
    """

    held: OptimizerTensor
    state: str
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    recorded: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """The values in the checkpoint, by name of the parameter."""
        return {name: t.item() for name, t in self.read.items()} | self.recorded

    @property
    def problem(self) -> str | None:
        """The problem if parameters that share the counter have different values in the checkpoint."""
        values = self.values
        first = next(iter(values))
        other = next((n for n, v in values.items() if v != values[first]), None)
        if other is None:
            return None
        return (
            f"{self.state} is {values[first]} for {first} and {values[other]} for {other}, but this engine keeps one "
            "value for both: put them in separate groups, or use ZeRO 0 in fp32"
        )

    def put(self) -> None:
        """Set the counter."""
        value = next(iter(self.values.values()))
        old = self.held.states[self.state]
        if torch.is_tensor(old):
            old.fill_(value)
        else:
            self.held.states[self.state] = type(old)(value)


@dataclass(slots=True)
class OptimizerTargets:
    """What the optimizer of this rank reads, and what is done then.

    `targets` are filled and `counters` set; `zeros` are set to zero and the states of `forgotten` are deleted, as
    before a first step. `made` are the tensors whose states were created for this.
    """

    targets: list[LocalShard] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    zeros: list[torch.Tensor] = field(default_factory=list)
    forgotten: list[OptimizerTensor] = field(default_factory=list)
    made: list[OptimizerTensor] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)

    def count(self, stored: StoredStates) -> None:
        """Read the counters, which are few bytes, to check them before anything else is read."""
        scalars = [local_of(name, c.state, scalar) for c in self.counters for name, scalar in c.read.items()]
        matched, found, _ = match(scalars, {}, stored.ck, stored.names, cast=True)
        read(stored.ck, matched)
        self.targets += [LocalShard(s.info, (), s.tensor) for s in scalars]  # so that they are not unexpected
        differing = [c.problem for c in self.counters]
        self.problems |= Problems(missing=found.missing, others=tuple(d for d in differing if d is not None))

    def put(self) -> None:
        """Apply what was read."""
        for held in self.forgotten:
            forget_states(held)
        for tensor in self.zeros:
            tensor.zero_()
        for counter in self.counters:
            counter.put()

    def undo(self) -> None:
        """Delete the states that were created."""
        for held in self.made:
            forget_states(held)


def want_optimizer(
    wanted: OptimizerTargets,
    trainer: EngineParts,
    held: Sequence[OptimizerTensor],
    stored: StoredStates,
    *,
    states: bool,
) -> None:
    """Add what an optimizer reads from a checkpoint: its copies of parameters, and its states.

    Missing states of the optimizer are created. If the checkpoint has states of some parameters only, the others are
    reset to their condition before the first step.
    """
    if states and held and not stored.trained:
        wanted.problems |= Problems(
            missing=("all optimizer states: the checkpoint contains only weights (optimizer=False loads these)",)
        )
        states = False
    for one in held:
        for name in one.parts:
            wanted.targets += _local(one, name, one.tensor, master_state(trainer, name, one))
        if states:
            _want_states(wanted, one, stored)
    wanted.count(stored)


def _want_states(wanted: OptimizerTargets, held: OptimizerTensor, stored: StoredStates) -> None:
    if not any(map(stored.stepped, held.shapes)):
        wanted.forgotten.append(held)
        return
    if not held.states:
        wanted.made.append(held)
        make_states(held)
    for state, value in held.states.items():
        if value is None:
            continue
        if torch.is_tensor(value) and (value.dim() or (held.whole and held.tensor.dim() == 0 and state != "step")):
            for name in held.parts:
                if stored.stepped(name):
                    wanted.targets += _local(held, name, value, state)
                else:
                    wanted.zeros += [local.tensor for local in _local(held, name, value, state)]
        else:
            wanted.counters.append(_counter(held, state, stored))


def _counter(held: OptimizerTensor, state: str, stored: StoredStates) -> Counter:
    """A counter, read for each parameter of which this rank holds a part; if it holds none, for one of the others."""
    counter = Counter(held, state)
    names = [n for n in held.parts if stored.stepped(n)] or [n for n in held.shapes if stored.stepped(n)][:1]
    for name in names:
        number = stored.number(name, state)
        if number is not None:
            counter.recorded[name] = number
        else:
            counter.read[name] = stored.scalar(name, state)
    return counter


def _local(held: OptimizerTensor, name: str, memory: torch.Tensor, state: str) -> list[LocalShard]:
    local = part_of(held, name, memory, state)
    return [local] if held.whole else list(boxes_of(local))
