"""Finds what a checkpoint has for a training state: tensors, plain values and hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from ucformat.storage.concurrency import gc_paused
from ucformat.torch.loading.find import asked_entries, find_tensors, left_values
from ucformat.torch.loading.match import Problems, fits, stored_names
from ucformat.torch.loading.optimizers import place_states
from ucformat.torch.loading.values import (
    FittedValues,
    SavedState,
    fit_groups,
    fit_objects,
    fit_plain_states,
    fit_wrappers,
    resize_extra_states,
    take_values,
)
from ucformat.torch.state.collect import CollectedState, collect
from ucformat.torch.state.local import LocalShard, locals_of, without_ties
from ucformat.torch.state.memory import check_fillable
from ucformat.torch.state.subclasses import memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.arguments import LoadOptions


@dataclass(frozen=True, slots=True)
class AlignedState:
    """A training state and what a checkpoint has for it.

    Attributes:
        targets: the tensors, without further names of tied ones, which `aliases` has.
        entries: the entries of the saved state that are asked for.
        problems: what fits nothing, so far; the tensors themselves are not matched yet.
    """

    collected: CollectedState
    recorded: SavedState
    targets: list[LocalShard]
    aliases: dict[str, str]
    entries: tuple[str, ...]
    objects: FittedValues
    groups: FittedValues
    problems: Problems

    @property
    def has_optimizer(self) -> bool:
        """Whether the state has an optimizer, even one without states."""
        return bool(self.collected.groups or self.collected.optimizer_dicts)


@gc_paused()
def align(
    state: Mapping[str, Any],
    ck: Checkpoint,
    ranks: Group,
    options: LoadOptions,
    *,
    to_fill: bool = True,
) -> AlignedState:
    """Find what a checkpoint has for a state.

    Args:
        to_fill: make the state ready to be filled: optimizers get the states that the checkpoint
            has (False: it is only looked at).
    """
    collected = collect(state, options.names or {})
    recorded = SavedState(ck, stored_names(ck, options.rename))
    problems = Problems()
    if to_fill:
        problems = Problems(others=tuple(collected.unloadable))
        # before `find_tensors`, which sets the keys of the tensors that this adds
        problems |= place_states(collected, recorded)
    problems |= find_tensors(collected, recorded)
    problems |= fit_wrappers(collected, recorded)
    if to_fill:
        _check_lazy(collected)
    take_values(collected, recorded)
    if to_fill:
        resize_extra_states(collected, recorded)
    entries = asked_entries(collected, recorded)
    aliases, targets = without_ties(locals_of(collected))
    targets, numbers = fit_plain_states(targets, ck, recorded.names)
    objects = fit_objects(collected, recorded, ranks, trust=options.trust, cast=options.cast)
    groups = fit_groups(
        collected, recorded, lambda text: fits(text, *options.leave), trust=options.trust
    )
    groups.values += numbers.values
    problems |= (
        objects.problems()
        | groups.problems()
        | Problems(unexpected=left_values(collected, recorded, entries, options.leave))
    )
    return AlignedState(collected, recorded, targets, aliases, entries, objects, groups, problems)


def _check_lazy(collected: CollectedState) -> None:
    """Check that no tensor is a lazy view; that each has memory of its own, `collect` checks."""
    # a subclass may answer for its memory
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001
        for path, tensor in collected.tensors.items():
            if isinstance(tensor, ShardedTensor):
                continue
            memory = memory_of(tensor)
            if memory.is_conj() or memory.is_neg():
                check_fillable(str(collected.keys[path]), memory)
