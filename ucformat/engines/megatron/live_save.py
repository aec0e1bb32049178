"""`save` and `async_save`: what the ranks of Megatron-Core hold, as one universal checkpoint."""

from __future__ import annotations

from argparse import Namespace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ucformat.engines.megatron.folder import MegatronArguments
from ucformat.engines.megatron.live_entries import Region, place, read_entries
from ucformat.engines.megatron.live_optimizer import live_parts
from ucformat.engines.megatron.live_shards import (
    FlatRange,
    StageLayout,
    local_states,
    local_weights,
)
from ucformat.engines.megatron.names import Member, groups_by_rule
from ucformat.errors import UnsupportedError, refuse_arguments
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import json_key
from ucformat.torch.saving.asynchronous import async_save as async_save_state
from ucformat.torch.saving.save import prepare, save_prepared, saving_group
from ucformat.torch.state.local import LocalState
from ucformat.torch.state.memory import synchronize
from ucformat.torch.state.objects import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    from ucformat.engines.megatron.live_entries import Path, StateEntries
    from ucformat.engines.megatron.live_shards import LocalBoxes, Rows
    from ucformat.torch.saving.handles import SaveHandle
    from ucformat.torch.saving.options import SaveArguments
    from ucformat.torch.saving.save import Saved

__all__ = ["async_save", "collect", "save"]

#: Arguments of saves that an engine determines, and what to do instead.
_REFUSED = {
    "names": "the keys of the sharded state dict are the names in the whole model",
    "group": "all ranks of the training save together",
}
#: The key of the step in the state dicts of Megatron's optimizers, which is that of all parameters.
_STEP = "common_step"


class LiveModel:
    """The entries of a sharded state dict, and how this rank holds them.

    Args:
        vocab_size: the rows of the vocabulary without padding (None: as the `args` among the
            entries say, if they are there).
        rows: the rows of a vocabulary, if neither says it.
    """

    def __init__(
        self,
        sharded_state_dict: Mapping[str, Any],
        vocab_size: int | None,
        *,
        rows: Rows | None = None,
    ) -> None:
        self.entries = entries = read_entries(sharded_state_dict)
        self._rows = rows
        self.layout = StageLayout()
        recorded = entries.plain.get("args")
        values = vars(recorded) if isinstance(recorded, Namespace) else recorded
        self.args = MegatronArguments.of(values, vocab_size, "the state")
        self._resizable = {r.key.name for rs in entries.tensors.values() for r in rs if r.resizable}
        self.parts = [
            p
            for o in entries.optimizers.values()
            for p in live_parts(o, entries.weights, entries.chunks)
        ]
        if entries.buckets and not self.parts:
            key = next(iter(entries.buckets.values())).key
            raise UnsupportedError(
                f"{key} is in a flat bucket of the distributed optimizer, without the names of its "
                "parameters",
                hint=(
                    'put the optimizer itself in the place of its sharded state dict: {"optimizer": '
                    "optimizer}"
                ),
            )

    def rows(self, name: str, stored: int) -> int:
        """The rows of a vocabulary without its padding."""
        rows = self.args.rows(name, stored)
        return rows if self._rows is None or name not in self._resizable else self._rows(name, rows)

    @cached_property
    def said(self) -> dict[int, StateEntries]:
        """What optimizers that are not distributed say themselves, by their number."""
        return {
            number: read_entries(
                part.optimizer.sharded_state_dict(dict(self.entries.items)),
                local=self.entries.local,
            )
            for number, part in enumerate(self.parts)
            if not part.distributed
        }

    def weights(self, *, steps: bool = True) -> list[LocalBoxes]:
        """What this rank holds of the tensors that the state dict names, and of whole states.

        Args:
            steps: also the step that all parameters share, as a tensor of each.
        """
        named = [self.entries, *self.said.values()]
        regions = [
            r
            for entries in named
            for of_entry in entries.tensors.values()
            for r in of_entry
            if not r.view.is_meta
        ]
        regions += [r for entries in named for r in _steps(entries)] if steps else ()
        return [*local_weights(regions, self.layout, self.rows), *self._sharded()]

    def _sharded(self) -> Iterator[LocalBoxes]:
        """What this rank holds of the parameters under Megatron-FSDP."""
        for parameter in (p for chunk in self.entries.chunks for p in chunk.parameters):
            regions = self.entries.weights.of(parameter.stand_in)
            flat = FlatRange.of(parameter, regions)
            memory = parameter.memory
            yield from local_states(flat, "weight", memory.dtype, memory, self.layout, self.rows)

    def states(self, *, shared: bool = True) -> Iterator[LocalBoxes]:
        """What this rank holds of the states of distributed optimizers.

        Args:
            shared: also those that are the memory of the parameters themselves.
        """
        for part in self.parts:
            if part.distributed and not part.empty:
                for state in part.states():
                    if shared or not state.is_shared:
                        yield from state.local(self.layout, self.rows)


def _steps(entries: StateEntries) -> Iterator[Region]:
    """The step of every parameter with whole states, which Megatron keeps once for all states of an optimizer."""
    for path, step in _paths_of(entries.plain, _STEP):
        if not torch.is_tensor(step) or step.dim():
            continue
        states = [r for p, rs in entries.tensors.items() if p[: len(path)] == path for r in rs]
        for name in dict.fromkeys(region.key.name for region in states):
            yield Region(Key(name, "step"), (), Box((), ()), step.detach())


def _paths_of(values: Any, key: str, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values under a key, at any depth of nested mappings, with the paths of the mappings that have it."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if name == key:
            yield path, value
        else:
            yield from _paths_of(value, key, (*path, name))


def collect(sharded_state_dict: Mapping[str, Any], *, vocab_size: int | None = None) -> LocalState:
    """Collect the local state of this rank from a sharded state dict, without copying.

    Args:
        sharded_state_dict: as `dist_checkpointing.save` takes it, with the optimizer itself in the
            place of its sharded state dict.
        vocab_size: the rows of the vocabulary without padding (default: as `args` in the state say;
            without either, the padding is a part of the weights).

    Raises:
        UnsupportedError: an optimizer's state cannot be saved yet.
        UsageError: an entry has no data, or the model of an optimizer is not in the state.
    """
    import megatron.core
    import torch.distributed as dist

    live = LiveModel(sharded_state_dict, vocab_size)
    tensors = [local.shard() for local in (*live.weights(), *live.states())]
    synchronize(t.tensor for t in tensors)  # before values are copied from devices
    objects = {}
    for item in live.entries.objects.values():
        empty = item.data is None and item.key.endswith("_extra_state")
        if is_main(item.replica_id) and not empty:
            objects[item.unique_key] = encode(item.data, item.key)
    if dist.get_rank() == 0:  # as in Megatron's own checkpoints
        objects |= plain_objects(live)
    return LocalState(
        tensors=tuple(tensors),
        objects=objects,
        groups=groups_of(live, {t.info.key: len(t.info.shape) for t in tensors}),
        aliases=aliases_of(live),
        layout=live.layout.degrees,
        engine={"name": "megatron-core", "version": str(megatron.core.__version__)},
    )


def is_main(replica: Any) -> bool:
    """Whether a rank's replica is the one that Megatron saves."""
    return not any(replica) if isinstance(replica, tuple | list) else replica == 0


def plain_objects(live: LiveModel) -> dict[str, Any]:
    """The values that are the same on all ranks, as JSON; a namespace as its values."""
    values: dict[Any, Any] = {}
    for name, value in live.entries.plain.items():
        values[name] = vars(value) if isinstance(value, Namespace) else value
    numbers = iter(range(len(live.parts)))
    for path, optimizer in live.entries.optimizers.items():
        count = len(live_parts(optimizer, live.entries.weights, live.entries.chunks))
        own = [_of_part(live, next(numbers)) for _ in range(count)]
        if any(own):
            place(values, path, own[0] if count == 1 else dict(enumerate(own)))
    return {json_key(name): encode(value, str(name)) for name, value in values.items()}


def _of_part(live: LiveModel, number: int) -> dict[Any, Any]:
    """The plain values of an optimizer: what it says, or of a distributed one its loss scaler."""
    if (said := live.said.get(number)) is not None:
        return said.plain
    scaler = getattr(live.parts[number].optimizer, "grad_scaler", None)
    return {} if scaler is None else {"grad_scaler": scaler.state_dict()}


def groups_of(live: LiveModel, ndims: Mapping[Key, int]) -> tuple[dict[str, Any], ...]:
    """The optimizer groups with their parameters by name; of an optimizer's state dict by Megatron's rule."""
    if live.parts:
        return tuple(group for part in live.parts if not part.empty for group in part.groups())
    raw = [g for _, groups in _paths_of(live.entries.plain, "param_groups") for g in groups]
    trained = {key.name for key in ndims if key.state not in ("weight", "weight.padding")}
    members = [
        Member(k.name, n) for k, n in ndims.items() if k.state == "weight" and k.name in trained
    ]
    groups = groups_by_rule(raw, members, lambda value: encode(value, "an optimizer group"))
    return tuple(group.json() for group in groups or ())


def aliases_of(live: LiveModel) -> dict[str, str]:
    """The tied output layer, if the arguments say that there is one, or this rank has its copy."""
    word, out = "embedding.word_embeddings.weight", "output_layer.weight"
    names = {r.key.name for regions in live.entries.tensors.values() for r in regions}
    copied = any(
        str(path[-1]) == out and any(r.key.name == word for r in regions)
        for path, regions in live.entries.tensors.items()
    )
    tied = live.args.tied and live.layout.is_last_stage and word in names and out not in names
    return {out: word} if copied or tied else {}


def save(
    sharded_state_dict: Mapping[str, Any],
    url: str | PathLike[str],
    *,
    vocab_size: int | None = None,
    **arguments: Unpack[SaveArguments],
) -> Saved:
    """Save a training with Megatron-Core between two steps; all ranks call this together.

    Each rank writes parts of what it holds; nothing is gathered. The names and states are those
    with which ucformat opens Megatron's own distributed checkpoints.

    Args:
        sharded_state_dict: as `dist_checkpointing.save` takes it, with the optimizer itself in the
            place of its sharded state dict: `{"model": model.sharded_state_dict(), "optimizer":
            optimizer, "args": args, …}`. State dicts of optimizers are accepted, but for those of
            flat buckets, which have no names. A model chunk under Megatron-FSDP stands for itself,
            too: `{"model": model, …}`.
        url: where to write the checkpoint, a path or URL; the same on all ranks.
        vocab_size: as for `collect`.
        arguments: those of `SaveArguments`, by keyword, except `names` and `group`. The `step` is the
            state's `iteration` by default.

    Raises:
        UnsupportedError: an optimizer's state cannot be saved yet.
        UsageError: an argument is not supported, or replicas differ.
        Conflict: a checkpoint exists at `url`.
        UcformatError: a rank failed or died; nothing is committed. Every rank gets the same error.
    """
    refuse_arguments("ucformat.torch.megatron.save", arguments, _REFUSED)
    with saving_group(url, "save", arguments) as ranks:
        with ranks.sharing_errors():
            state = collect(sharded_state_dict, vocab_size=vocab_size)
            completed = with_step(arguments, sharded_state_dict)
            prepared = prepare(state, url, ranks, completed)
        return save_prepared(*prepared, completed, ranks)


def with_step(arguments: SaveArguments, state: Mapping[str, Any]) -> SaveArguments:
    """The arguments of a save with the state's step, if they have none."""
    completed: SaveArguments = {**arguments}
    if completed.get("step") is None and isinstance(state.get("iteration"), int):
        completed["step"] = state["iteration"]
    return completed


def async_save(
    sharded_state_dict: Mapping[str, Any],
    url: str | PathLike[str],
    *,
    vocab_size: int | None = None,
    in_flight: int = 1,
    **arguments: Unpack[SaveArguments],
) -> SaveHandle:
    """Save a training with Megatron-Core in the background; all ranks call this together.

    Returns as soon as the state is copied to host memory; see `ucformat.torch.async_save`.

    Args:
        sharded_state_dict: as for `save`.
        url: as for `save`.
        vocab_size: as for `save`.
        in_flight: as for `ucformat.torch.async_save`.
        arguments: as for `save`.

    Returns:
        a handle, whose `wait` returns when the checkpoint is committed.

    Raises:
        UcformatError: as from `save`, or an earlier call has failed.
    """
    refuse_arguments("ucformat.torch.megatron.async_save", arguments, _REFUSED)
    with saving_group(url, "async_save", arguments) as ranks, ranks.sharing_errors():
        state: Any = collect(sharded_state_dict, vocab_size=vocab_size)
    completed = with_step(arguments, sharded_state_dict)
    return async_save_state(state, url, in_flight=in_flight, **completed)
