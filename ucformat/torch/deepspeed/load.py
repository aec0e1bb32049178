"""`load`: restores a DeepSpeed engine from a checkpoint of any engine, ZeRO stage and world size."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ucformat.checkpoint import Checkpoint
from ucformat.storage.url import as_strings
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.deepspeed.engine import inspect_engine, update_module
from ucformat.torch.deepspeed.optimizer import OptimizerTargets, StoredStates, want_optimizer
from ucformat.torch.deepspeed.parts import optimizer_tensors
from ucformat.torch.deepspeed.save import boxes_of, locals_of_buffers, weight_of
from ucformat.torch.deepspeed.values import ClientState, fit_groups, fit_parts, fit_values
from ucformat.torch.loading.load import LoadReport, load_local
from ucformat.torch.loading.match import holds_training, stored_names
from ucformat.torch.loading.together import open_together

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from os import PathLike

    from ucformat.reading.plan import Verify
    from ucformat.torch.comm.group import Group
    from ucformat.torch.deepspeed.engine import EngineParts
    from ucformat.torch.loading.match import Problems, Rename, Strict
    from ucformat.torch.state.local import LocalShard

__all__ = ["EngineReport", "load"]


@dataclass(frozen=True, slots=True)
class EngineReport(LoadReport):
    """The result of loading an engine; see `LoadReport`.

    `client_state` is the one passed to `save`; it includes per-rank values if the number of ranks is the same.
    `client_ranks` always has the per-rank values of all ranks that saved, in order; they are read when they are used.
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
    rename: Rename | None = None,
    leave: str | Iterable[str] = (),
    cast: bool = False,
    trust: bool = False,
    verify: Verify = "whole",
    threads: int | None = None,
    timeout: float = TIMEOUT,
) -> EngineReport:
    """Load a checkpoint into a DeepSpeed engine of ZeRO 0, 1, 2 or 3; all ranks call this together.

    Each rank reads its partitions straight into their memory. The optimizer's fp32 copies are read from `master` if it
    is stored, else from an fp32 `weight`, and rounded into the module as in a training step. All mismatches are found
    before any parameter is changed, and raised in one error on all ranks.

    Args:
        engine: as returned by `deepspeed.initialize`, new or trained.
        url: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open checkpoint.
        strict: `"report"`: missing entries and different shapes or dtypes are errors, and entries that only the
            checkpoint has are listed in the report; True: these are errors too; False: what fits is loaded, and the
            report lists the rest.
        optimizer: load optimizer states, hyper-parameters, counters and the loss scaler too, not only weights.
        scheduler: load the learning rate scheduler.
        rename: maps names of the checkpoint to names of the engine: a function, or `{regex: replacement}`, where the
            regex matches the whole name.
        leave: what of the checkpoint needs no place in the engine: names, prefixes of names that end at a dot, or globs
            (`*.exp_avg`), of tensors.
        cast: cast tensors to the dtypes of the engine, such as frozen fp32 weights to bf16.
        trust: unpickle opaque objects, which may run code.
        verify: which checksums to check, as for `ucformat.torch.load`.
        threads: how many threads read on this rank (default: as many as the storage can use).
        timeout: seconds after which an unresponsive rank is considered dead.

    Raises:
        StateMismatch: the checkpoint does not fit the engine; the message lists all mismatches.
        UnsupportedError: the engine has state that cannot be loaded yet.
        ChecksumError: a chunk does not match its checksum.
        UcformatError: a rank failed or died. Every rank gets the same error.
    """
    with group_for_call(None, timeout, "load", url.url if isinstance(url, Checkpoint) else url) as group:
        plan = _EnginePlan(_LoadChoice(rename, optimizer=optimizer, scheduler=scheduler, trust=trust))
        try:
            ck = open_together(url, group)
            with group.sharing_errors():
                plan.make(engine, ck, group)
            report = load_local(
                plan.targets,
                ck,
                strict=strict,
                aliases=plan.trainer.aliases,
                names=plan.names,
                cast=cast,
                verify=verify,
                threads=threads,
                group=group,
                problems=plan.problems,
                leave=as_strings(leave),
                then=plan.put,
                layout=plan.trainer.layout,
                stateful=optimizer and holds_training(ck),
            )
        except BaseException:
            plan.wanted.undo()
            raise
    update_module(plan.trainer)
    found = {f.name: getattr(report, f.name) for f in fields(report)}
    return EngineReport(**found, client_state=plan.client.value(), client_ranks=plan.client.ranks)


@dataclass(frozen=True, slots=True)
class _LoadChoice:
    rename: Rename | None
    optimizer: bool
    scheduler: bool
    trust: bool


class _EnginePlan:
    """What this rank reads, and how it is applied; until then the engine only gets states that it does not have."""

    trainer: EngineParts
    client: ClientState
    names: dict[str, str]
    problems: Problems
    targets: list[LocalShard]

    def __init__(self, choice: _LoadChoice) -> None:
        self.choice, self.wanted = choice, OptimizerTargets()
        self._puts = [self.wanted.put]

    def make(self, engine: Any, ck: Checkpoint, group: Group) -> None:
        """Inspect the engine and match it with the checkpoint."""
        choice = self.choice
        self.trainer = trainer = inspect_engine(engine)
        held = optimizer_tensors(trainer)
        self.names = names = stored_names(ck, choice.rename)
        stored = StoredStates(ck, names)
        want_optimizer(self.wanted, trainer, held, stored, states=choice.optimizer)
        self.problems = self.wanted.problems
        self.client = ClientState(ck, names, group.rank, group.size, trust=choice.trust)
        if choice.optimizer and stored.trained:
            groups, put_groups = fit_groups(held, trainer, ck, names)
            parts, put_parts = fit_parts(trainer, ck, scheduler=choice.scheduler, trust=choice.trust)
            self.problems |= groups | parts
            self._puts += [put_groups, put_parts, fit_values(trainer, ck)]
        optimized = {name for one in held for name in one.shapes}
        buffers = locals_of_buffers(trainer)
        self.targets = [*self.wanted.targets, *_weights(trainer, optimized), *buffers, *self.client.targets]

    def put(self) -> None:
        """Apply what was read."""
        for put in self._puts:
            put()


def _weights(trainer: EngineParts, optimized: set[str]) -> list[LocalShard]:
    """The parameters that are not in an optimizer: frozen ones, empty ones, all of an engine that only evaluates."""
    out = []
    for name in trainer.parameters:
        if name not in optimized:
            local = weight_of(trainer, name)
            out += list(boxes_of(local)) if hasattr(trainer.parameters[name], "ds_tensor") else [local]
    return out
