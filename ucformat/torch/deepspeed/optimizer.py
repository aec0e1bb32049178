"""What this rank's optimizer reads of a checkpoint: tensors into its memory, counters by value."""

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
    from ucformat.torch.deepspeed.partitions import OptimizerTensor

__all__ = ["OptimizerTargets", "StoredStates", "forget_states", "make_states", "want_optimizer"]


def make_states(held: OptimizerTensor) -> None:
    """Have the optimizer make its states of one tensor, as its first step would.

    It is the optimizer itself that knows which there are, so it takes a step on that tensor alone, as ZeRO's own step
    does, with a gradient, a learning rate and a weight decay of zero: the tensor stays as it is. What the step counted
    is put right when the checkpoint's counters are read.
    """
    optimizer = held.optimizer
    real = optimizer.param_groups
    group = real[held.group]
    trial: dict[str, Any] = {**group, "params": [held.tensor]}
    for option in ("lr", "weight_decay"):
        if option in trial:
            trial[option] = torch.zeros_like(trial[option]) if torch.is_tensor(trial[option]) else 0.0
    lent = held.tensor.grad  # an offloaded optimizer keeps its gradient's memory
    held.tensor.grad = torch.zeros_like(held.tensor)
    optimizer.param_groups = [trial]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = real
        held.tensor.grad = lent
    group.update({k: v for k, v in trial.items() if k not in group})


def forget_states(held: OptimizerTensor) -> None:
    """Take a tensor's states away, so that the optimizer's next step is its first one on it."""
    held.optimizer.state.pop(held.tensor, None)


@dataclass(frozen=True)
class StoredStates:
    """The optimizer states of a checkpoint by the engine's names of parameters; `names` leads to the stored ones."""

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
        """Whether the checkpoint is of a training at all, which has groups even where it made no step yet."""
        return holds_training(self.ck)

    def stepped(self, name: str) -> bool:
        """Whether an optimizer has made a step on this parameter."""
        stored = self.names.get(name)
        if stored is None:
            return False
        return bool(self.plain.get(stored)) or any(s not in PARAMETER for s in self.ck.states(stored))

    def number(self, name: str, state: str) -> Any:
        """A state that is stored as a plain number, or None."""
        return self.plain.get(self.names.get(name, ""), {}).get(state)

    def room(self, name: str, state: str) -> torch.Tensor:
        """Memory for a 0-d state, in the dtype in which it is stored."""
        info = self.ck.tensors.get(Key(self.names.get(name, name), state))
        return torch.zeros((), dtype=torch_dtype(info.dtype) if info is not None else torch.float32)


@dataclass(slots=True)
class Counter:
    """A state that has one value for all that the optimizer updates together (`step`), and where it is read from."""

    held: OptimizerTensor
    state: str
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """What the checkpoint has, by name."""
        return {name: t.item() for name, t in self.read.items()} | self.told

    @property
    def problem(self) -> str | None:
        """What to say where the parameters that share it have different values in the checkpoint."""
        values = self.values
        first = next(iter(values))
        other = next((n for n, v in values.items() if v != values[first]), None)
        if other is None:
            return None
        return (
            f"{self.state} is {values[first]} of {first} and {values[other]} of {other}, but this engine keeps one "
            "for both: put them in groups of their own, or use ZeRO 0 in fp32"
        )

    def put(self) -> None:
        """Set it."""
        value = next(iter(self.values.values()))
        old = self.held.states[self.state]
        if torch.is_tensor(old):
            old.fill_(value)
        else:
            self.held.states[self.state] = type(old)(value)


@dataclass(slots=True)
class OptimizerTargets:
    """Targets to be read; and what is to be done then: what to set to zero or to forget, as before a first step."""

    targets: list[LocalShard] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    zeros: list[torch.Tensor] = field(default_factory=list)
    forgotten: list[OptimizerTensor] = field(default_factory=list)
    made: list[OptimizerTensor] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)

    def count(self, stored: StoredStates) -> None:
        """Read the counters, which are few bytes, to know whether they fit before anything else is read."""
        rooms = [local_of(name, c.state, room) for c in self.counters for name, room in c.read.items()]
        matched, lacking = match(rooms, {}, stored.ck, stored.names, cast=True)
        read(stored.ck, matched)
        self.targets += [LocalShard(room.info, (), room.tensor) for room in rooms]  # so that they count as expected
        unlike = [c.problem for c in self.counters]
        self.problems |= Problems(missing=lacking.missing, others=tuple(u for u in unlike if u is not None))

    def put(self) -> None:
        """Finish what reading began."""
        for held in self.forgotten:
            forget_states(held)
        for tensor in self.zeros:
            tensor.zero_()
        for counter in self.counters:
            counter.put()

    def undo(self) -> None:
        """Forget the states that were made."""
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
    """Want all that the optimizer has of a checkpoint: its copies of parameters, and if `states` says so its states.

    States that are not there yet are made. A parameter that has no state in a checkpoint that has states of others was
    never stepped on, and is made so.
    """
    if states and held and not stored.trained:
        wanted.problems |= Problems(
            missing=("all optimizer states: it holds weights alone (optimizer=False loads them)",)
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
    """A counter is read for each parameter of which this rank holds a part; where it holds none, for any of them."""
    counter = Counter(held, state)
    names = [n for n in held.parts if stored.stepped(n)] or [n for n in held.shapes if stored.stepped(n)][:1]
    for name in names:
        number = stored.number(name, state)
        if number is not None:
            counter.told[name] = number
        else:
            counter.read[name] = stored.room(name, state)
    return counter


def _local(held: OptimizerTensor, name: str, memory: torch.Tensor, state: str) -> list[LocalShard]:
    local = part_of(held, name, memory, state)
    return [local] if held.whole else list(boxes_of(local))
