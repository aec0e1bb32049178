"""`load`: restores a DeepSpeed engine from a checkpoint of any engine, ZeRO stage and world size."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ucformat.engines.deepspeed.live_certify import certify_engine
from ucformat.engines.deepspeed.live_engine import inspect_engine, optimizer_tensors, update_module
from ucformat.engines.deepspeed.live_save import (
    ClientState,
    boxes_of,
    fit_groups,
    fit_parts,
    fit_values,
    locals_of_buffers,
    master_state,
    part_of,
    weight_of,
)
from ucformat.engines.deepspeed.stored_states import StoredStates
from ucformat.errors import check_keywords
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.loading.arguments import LoadOptions, RestoreArguments
from ucformat.torch.loading.load import LoadReport, LoadTargets, load_local
from ucformat.torch.loading.match import Problems, holds_training, match, stored_names
from ucformat.torch.loading.read import read
from ucformat.torch.loading.share import open_together
from ucformat.torch.state.local import LocalShard, local_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.deepspeed.live_engine import EngineParts, OptimizerTensor
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.match import Strict


__all__ = ["EngineReport", "load"]


@dataclass(frozen=True, slots=True)
class EngineReport(LoadReport):
    """The result of loading an engine; see `LoadReport`.

    `client_state` is the one passed to `save`; it includes per-rank values if the number of ranks
    is the same. `client_ranks` always has the per-rank values of all ranks that saved, in order;
    they are read when they are used.
    """

    client_state: dict[str, Any] = field(default_factory=dict)
    client_ranks: dict[str, Sequence[Any]] = field(default_factory=dict)


def load(
    engine: Any,
    url: str | PathLike[str] | Checkpoint,
    *,
    strict: Strict = "report",
    optimizer: bool = True,
    scheduler: bool = True,
    **arguments: Unpack[RestoreArguments],
) -> EngineReport:
    """Load a checkpoint into a DeepSpeed engine of ZeRO 0, 1, 2 or 3; all ranks call this together.

    Each rank reads its partitions straight into their memory. The optimizer's fp32 copies are read
    from `master` if it is stored, else from an fp32 `weight`, and rounded into the module as in a
    training step. All mismatches are found before any parameter is changed, and raised in one error
    on all ranks.

    Args:
        engine: as returned by `deepspeed.initialize`, new or trained.
        url: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open
            checkpoint.
        strict: `"report"`: missing entries and different shapes or dtypes are errors, and entries
            that only the checkpoint has are listed in the report; True: these are errors too;
            False: what fits is loaded, and the report lists the rest.
        optimizer: load optimizer states, hyper-parameters, counters and the loss scaler too, not
            only weights.
        scheduler: load the learning rate scheduler.
        arguments: those of `RestoreArguments`, by keyword, as for `ucformat.torch.load`.

    Raises:
        StateMismatch: the checkpoint does not fit the engine; the message lists all mismatches.
        UnsupportedError: the engine has state that cannot be loaded yet.
        ChecksumError: a chunk does not match its checksum.
        UcformatError: a rank failed or died. Every rank gets the same error.
    """
    check_keywords("load", arguments, RestoreArguments)
    with group_for_call("load", url, timeout=arguments.get("timeout", TIMEOUT)) as group:
        with group.sharing_errors():
            options = LoadOptions.of(strict, arguments)
        plan = _EnginePlan(options, optimizer=optimizer, scheduler=scheduler)
        try:
            ck = open_together(url, group)
            with group.sharing_errors():
                plan.make(engine, ck, group)
            targets = LoadTargets(
                plan.targets,
                plan.trainer.aliases,
                plan.problems,
                plan.put,
                plan.trainer.layout,
                stateful=optimizer and holds_training(ck),
            )
            report = load_local(targets, ck, group, options, plan.names)
        except BaseException:
            plan.wanted.undo()
            raise
        update_module(plan.trainer)
        loaded = {f.name: getattr(report, f.name) for f in fields(report)}
        if options.certify:
            certificate = certify_engine(
                engine, ck, group, options, optimizer=optimizer, scheduler=scheduler
            )
            loaded["certificate"] = certificate.checked()
    return EngineReport(**loaded, client_state=plan.client.value(), client_ranks=plan.client.ranks)


class _EnginePlan:
    """What this rank reads, and how it is applied; before, only missing states are made."""

    trainer: EngineParts
    client: ClientState
    names: dict[str, str]
    problems: Problems
    targets: list[LocalShard]

    def __init__(self, options: LoadOptions, *, optimizer: bool, scheduler: bool) -> None:
        self.options, self.optimizer, self.scheduler = options, optimizer, scheduler
        self.wanted = OptimizerTargets()
        self._puts = [self.wanted.put]

    def make(self, engine: Any, ck: Checkpoint, group: Group) -> None:
        """Inspect the engine and match it with the checkpoint."""
        trust = self.options.trust
        self.trainer = trainer = inspect_engine(engine)
        entries = optimizer_tensors(trainer)
        self.names = names = stored_names(ck, self.options.rename)
        stored = StoredStates(ck, names)
        want_optimizer(self.wanted, trainer, entries, stored, states=self.optimizer)
        self.problems = self.wanted.problems
        self.client = ClientState(ck, names, group.rank, group.size, trust=trust)
        if self.optimizer and stored.trained:
            groups = fit_groups(entries, trainer, ck, names)
            parts = fit_parts(trainer, ck, scheduler=self.scheduler, trust=trust)
            self.problems |= groups.problems() | parts.problems()
            self._puts += [groups.put, parts.put, fit_values(trainer, ck)]
        optimized = {name for entry in entries for name in entry.shapes}
        weights = [*_weights(trainer, optimized), *locals_of_buffers(trainer)]
        self.targets = [*self.wanted.targets, *weights, *self.client.targets]

    def put(self) -> None:
        """Apply what was read."""
        for put in self._puts:
            put()


def _weights(trainer: EngineParts, optimized: set[str]) -> list[LocalShard]:
    """The parameters in no optimizer: frozen, empty, or of an engine that evaluates."""
    out = []
    for name in trainer.parameters:
        if name not in optimized:
            local = weight_of(trainer, name)
            is_partitioned = hasattr(trainer.parameters[name], "ds_tensor")
            out += list(boxes_of(local)) if is_partitioned else [local]
    return out


# What the optimizer of this rank reads from a checkpoint: tensors into its memory, counters by
# value.


def make_states(entry: OptimizerTensor) -> None:
    """Create the optimizer's states of one tensor, as its first step would.

    Only the optimizer knows its states, so it makes a step on this tensor alone, as in ZeRO's own
    step, with a gradient, a learning rate and a weight decay of zero, which leaves the tensor
    unchanged. The counters that the step has increased are set when those of the checkpoint are
    read.
    """
    optimizer = entry.optimizer
    real = optimizer.param_groups
    group = real[entry.group]
    trial: dict[str, Any] = {**group, "params": [entry.tensor]}
    for option in ("lr", "weight_decay"):
        if option in trial:
            value = trial[option]
            trial[option] = torch.zeros_like(value) if torch.is_tensor(value) else 0.0
    gradient = entry.tensor.grad  # its memory is kept by an offloaded optimizer
    entry.tensor.grad = torch.zeros_like(entry.tensor)
    optimizer.param_groups = [trial]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = real
        entry.tensor.grad = gradient
    # The step may have added an option to the group, such as FusedAdam's `step`.
    group.update({k: v for k, v in trial.items() if k not in group})


def forget_states(entry: OptimizerTensor) -> None:
    """Delete the optimizer's states of a tensor, so that its next step on it is the first."""
    entry.optimizer.state.pop(entry.tensor, None)


@dataclass(slots=True)
class Counter:
    """A state with one value for all parameters that share a tensor (`step`).

    `read` are the tensors to read by name of the parameter, `recorded` the values that are stored
    as plain numbers.
    """

    entry: OptimizerTensor
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
        differing = next((n for n, v in values.items() if v != values[first]), None)
        if differing is None:
            return None
        return (
            f"{self.state} is {values[first]} for {first} and {values[differing]} for {differing}, but "
            "this engine keeps one "
            "value for both: put them in separate groups, or use ZeRO 0 in fp32"
        )

    def put(self) -> None:
        """Set the counter."""
        value = next(iter(self.values.values()))
        current = self.entry.states[self.state]
        if torch.is_tensor(current):
            current.fill_(value)
        else:
            self.entry.states[self.state] = type(current)(value)


@dataclass(slots=True)
class OptimizerTargets:
    """What the optimizer of this rank reads, and what is done then.

    `targets` are filled and `counters` set; `zeros` are set to zero and the states of `forgotten`
    are deleted, as before a first step. `created` are the tensors whose states were created for this.
    """

    targets: list[LocalShard] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    zeros: list[torch.Tensor] = field(default_factory=list)
    forgotten: list[OptimizerTensor] = field(default_factory=list)
    created: list[OptimizerTensor] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)

    def count(self, stored: StoredStates) -> None:
        """Read the counters, which are few bytes, to check them before anything else is read."""
        read_ones = ((c.state, name, t) for c in self.counters for name, t in c.read.items())
        scalars = [local_of(name, state, scalar) for state, name, scalar in read_ones]
        matched, problems, _ = match(scalars, {}, stored.ck, stored.names, cast=True)
        read(stored.ck, matched)
        # so that they are not unexpected
        self.targets += [LocalShard(s.info, (), s.tensor) for s in scalars]
        differing = tuple(p for c in self.counters if (p := c.problem) is not None)
        self.problems |= Problems(missing=problems.missing, others=differing)

    def put(self) -> None:
        """Apply what was read."""
        for entry in self.forgotten:
            forget_states(entry)
        for tensor in self.zeros:
            tensor.zero_()
        for counter in self.counters:
            counter.put()

    def undo(self) -> None:
        """Delete the states that were created."""
        for entry in self.created:
            forget_states(entry)


def want_optimizer(
    wanted: OptimizerTargets,
    trainer: EngineParts,
    entries: Sequence[OptimizerTensor],
    stored: StoredStates,
    *,
    states: bool,
) -> None:
    """Add what an optimizer reads from a checkpoint: its copies of parameters, and its states.

    Missing states of the optimizer are created. If the checkpoint has states of some parameters
    only, the others are reset to their condition before the first step.
    """
    if states and entries and not stored.trained:
        lacking = "all optimizer states: the checkpoint contains only weights (optimizer=False loads these)"
        wanted.problems |= Problems(missing=(lacking,))
        states = False
    for entry in entries:
        for name in entry.parts:
            wanted.targets += _local(
                trainer, entry, name, entry.tensor, master_state(trainer, name, entry)
            )
        if states:
            _want_states(wanted, trainer, entry, stored)
    wanted.count(stored)


def _want_states(
    wanted: OptimizerTargets, trainer: EngineParts, entry: OptimizerTensor, stored: StoredStates
) -> None:
    if not any(map(stored.stepped, entry.shapes)):
        wanted.forgotten.append(entry)
        return
    if not entry.states:
        wanted.created.append(entry)
        make_states(entry)
    for state, value in entry.states.items():
        if value is None:
            continue
        of_scalar = entry.whole and entry.tensor.dim() == 0 and state != "step"
        if torch.is_tensor(value) and (value.dim() or of_scalar):
            for name in entry.parts:
                if stored.stepped(name):
                    wanted.targets += _local(trainer, entry, name, value, state)
                else:
                    wanted.zeros += [
                        local.tensor for local in _local(trainer, entry, name, value, state)
                    ]
        else:
            wanted.counters.append(_counter(entry, state, stored))


def _counter(entry: OptimizerTensor, state: str, stored: StoredStates) -> Counter:
    """A counter, read for each parameter of which this rank holds a part, or else for one other."""
    counter = Counter(entry, state)
    mine = list(filter(stored.stepped, entry.parts))
    for name in mine or list(filter(stored.stepped, entry.shapes))[:1]:
        number = stored.number(name, state)
        if number is not None:
            counter.recorded[name] = number
        else:
            counter.read[name] = stored.scalar(name, state)
    return counter


def _local(
    trainer: EngineParts, entry: OptimizerTensor, name: str, memory: torch.Tensor, state: str
) -> list[LocalShard]:
    local = part_of(trainer, entry, name, memory, state)
    return [local] if entry.whole else list(boxes_of(local))
