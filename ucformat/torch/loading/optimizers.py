"""Makes optimizers ready for the states that a checkpoint has; parameters that were saved without state get none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from ucformat.errors import UcformatError
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import IntKey
from ucformat.reading.state_names import GROUPS, dotted, split_state
from ucformat.torch.loading.find import prefixes_of
from ucformat.torch.loading.match import PARAMETER, Problems
from ucformat.torch.state.collect import ValueSlot, collect_made
from ucformat.torch.state.flat import FlatPart
from ucformat.torch.state.groups import CollectedGroup, GroupOptions
from ucformat.torch.state.memory import torch_dtype
from ucformat.torch.state.objects import decode
from ucformat.torch.state.subclasses import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ucformat.reading.readable import StatePath as Path
    from ucformat.schema.manifest import GroupDoc
    from ucformat.torch.loading.values import SavedState
    from ucformat.torch.state.collect import CollectedState
    from ucformat.torch.state.flat import FlatSlot
    from ucformat.torch.state.groups import LiveOptimizer

_STATE = "state"
#: Optimizers that make all states when they are constructed, and cannot go on without.
_EAGER = (torch.optim.Adagrad,)


def place_states(collected: CollectedState, recorded: SavedState) -> Problems:
    """Make a state ready for the optimizer states that a checkpoint has.

    Parameters that have states in the checkpoint get a tensor or a slot for each, parameters that
    have none lose theirs, and parameters that the checkpoint does not know keep what they have.
    Optimizers and state dicts change when the state is loaded. Returned are the states for which no
    place can be made.
    """
    placing = _Placing(collected, recorded)
    for root, lives in collected.optimizers.items():
        for live in lives:
            placing.live(root, live)
    for root, entries in collected.optimizer_dicts.items():
        placing.entries(root, entries)
    collected.finish[:0] = placing.finish
    return Problems(others=tuple(placing.others))


@dataclass(frozen=True, slots=True)
class _Stored:
    """The stored states of an optimizer's parameters.

    Attributes:
        tensors: of each parameter by name: the key of each tensor, by its path below the parameter.
        values: the paths of values that are not tensors.
        wrappers: the paths of tensors of other classes, which only the optimizer itself can make.
        whole: whether the checkpoint records what the program had under the path of the optimizer.
    """

    tensors: Mapping[str, Mapping[Path, Key]]
    values: Mapping[str, Sequence[Path]]
    wrappers: Mapping[str, Collection[Path]]
    whole: bool

    def kinds(self, name: str) -> dict[Path, bool]:
        """Whether there is a tensor at each path below a parameter."""
        return dict.fromkeys(self.values.get(name, ()), False) | dict.fromkeys(
            self.tensors.get(name, ()), True
        )


class _Placing:
    def __init__(self, collected: CollectedState, recorded: SavedState) -> None:
        self.collected, self.recorded = collected, recorded
        self.finish: list[Callable[[], Any]] = []
        self.others: list[str] = []

    def live(self, root: Path, live: LiveOptimizer) -> None:
        """Prepare an optimizer itself."""
        collected, optimizer = self.collected, live.optimizer
        prefix = collected.prefixes.get(root, "")
        stored = self._stored(root, prefix, live.params)
        group_of = self.recorded.find_group(dotted(root), prefix)
        fresh = {
            n: p for n, p in live.params.items() if stored.kinds(n) and not optimizer.state.get(p)
        }
        state_paths = self._state_paths(root, live.params)
        new_states, failure = _first_states(optimizer, fresh, self._options(live.groups, group_of))
        if failure is not None and not self._may_restore(root, live, stored, fresh):
            self.others.append(
                f"the states of {dotted(root)} ({type(optimizer).__name__}) cannot be made "
                "before its first step, and "
                f"the checkpoint does not tell how: {failure}"
            )
            return
        for name, param in live.params.items():
            where, slot = (*root, _STATE, name), live.slots.get(name)
            states = optimizer.state.get(param) or new_states.get(name) or {}
            if not stored.kinds(name):
                if stateful := [other for other in live.joined(name) if stored.kinds(other)]:
                    self.others.append(
                        f"{dotted(where)}: the checkpoint has states of {stateful[0]}, and none of "
                        f"{name}, which FSDP1 has joined to one parameter (use_orig_params=True "
                        "does not)"
                    )
                elif states and group_of(name) is not None and not isinstance(optimizer, _EAGER):
                    self._forget(state_paths.get(name, ()))
                    self.finish.append(partial(optimizer.state.pop, param, None))
                continue
            program_paths = state_paths.get(name, [])
            if name in new_states:
                program_paths = collect_made(collected, where, prefix + name, states, slot)
            other = _of_other_structure(
                {p[len(where) :]: p in collected.tensors for p in program_paths}, stored.kinds(name)
            )
            self._forget(path for path in program_paths if path[len(where)] in other)
            program_paths = [path for path in program_paths if path[len(where)] not in other]
            replaced: dict[Any, Any] = {}
            self._check_wrappers(where, stored.wrappers.get(name, ()))
            for below, key in _lacking(where, program_paths, stored, name).items():
                self._add(
                    *(where, below, key, replaced if below[0] in other else states, below),
                    *(param, slot),
                )
            if other:
                self.finish.append(partial(states.update, replaced))
            if name in fresh:
                self.finish.append(partial(optimizer.state.__setitem__, param, states))

    def entries(self, root: Path, entries: MutableMapping[str, Any]) -> None:
        """Prepare the state dict of an optimizer."""
        collected = self.collected
        prefix = collected.prefixes.get(root, "")
        groups = collected.groups.get(root, ())
        flattened = any(g.flattened for g in groups)
        names = dict.fromkeys(name for g in groups for name in g.params)
        stored = self._stored(root, prefix, names)
        group_of = self.recorded.find_group(dotted(root), prefix)
        weights = self._weights()
        state_paths = self._state_paths(root, names)
        for name in names:
            program_paths = state_paths.get(name, ())
            if not stored.kinds(name):
                if program_paths and group_of(name) is not None:
                    self._forget(program_paths)
                    self.finish.append(partial(_remove, entries, name))
                continue
            self._check_wrappers((*root, _STATE, name), stored.wrappers.get(name, ()))
            for below, key in _lacking((*root, _STATE, name), program_paths, stored, name).items():
                inside: Path = (
                    (f"{_STATE}.{name}.{dotted(below)}",) if flattened else (_STATE, name, *below)
                )
                self._add(root, inside, key, entries, inside, weights.get(prefix + name))
        if not names and not self._positions(root, entries):
            self._numbered(root, entries)

    def _positions(self, root: Path, entries: MutableMapping[str, Any]) -> bool:
        """Prepare a state dict that numbers its parameters, which were saved by name; whether it is one.

        The n-th parameter of a group is the n-th one of the group that was saved.
        """
        collected = self.collected
        saved = self.recorded.optimizers.get(dotted(root), [])
        groups = entries.get(GROUPS)
        if not saved or not isinstance(groups, list) or not all(map(_is_numbered, groups)):
            return False
        if [len(g["params"]) for g in groups] != [len(place.names) for _, place in saved]:
            self.others.append(
                f"{dotted((*root, GROUPS))}: the groups have other numbers of parameters than "
                "those that were saved by "
                "name; pass the optimizer itself, or its state dict by name "
                "(get_optimizer_state_dict)"
            )
            return True
        collected.leaves.pop((*root, GROUPS), None)
        collected.groups[root] = [
            CollectedGroup(place.names, GroupOptions(g))
            for g, (_, place) in zip(groups, saved, strict=True)
        ]
        names = [name for _, place in saved for name in place.names]
        stored = self._stored(root, "", names)
        weights = self._weights()
        program_texts = {dotted(p) for p in (*collected.tensors, *collected.leaves)}
        for number, name in zip((n for g in groups for n in g["params"]), names, strict=True):
            for below, key in _lacking((), (), stored, name).items():
                inside: Path = (_STATE, IntKey(number), *below)
                if dotted((*root, *inside)) in program_texts:
                    if key is not None:
                        collected.keys[(*root, *inside)] = key
                    continue
                weight = None if key is None else weights.get(key.name)
                self._add(root, inside, key, entries, inside, weight)
        return True

    def _numbered(self, root: Path, entries: MutableMapping[str, Any]) -> None:
        """Prepare a state dict that numbers its parameters: it gets what was saved under its path."""
        head = _head(root)
        program_texts = {dotted(p) for p in (*self.collected.tensors, *self.collected.leaves)}
        saved = {
            text: (path, self.recorded.tensors[text]) for text, path in self.recorded.paths.items()
        }
        values = {dotted(path): (path, None) for path in self.recorded.value_paths}
        for text, (path, key) in (saved | values).items():
            if text.startswith(head) and text not in program_texts:
                inside = path[len(root) :]
                inside = (_STATE, IntKey(inside[1]), *inside[2:])
                self._add(root, inside, key, entries, inside, None)

    def _weights(self) -> dict[str, torch.Tensor]:
        """The weights of the state, by name."""
        return {
            key.name: self.collected.tensors[path]
            for path, key in self.collected.keys.items()
            if key.state == "weight"
        }

    def _stored(self, root: Path, prefix: str, names: Collection[str]) -> _Stored:
        recorded, head = self.recorded, _head(root)
        tensors: dict[str, dict[Path, Key]] = {}
        for text, key in recorded.tensors.items():
            if text.startswith(head) and text.endswith(f".{key.state}"):
                name = text[len(head) : -len(key.state) - 1]
                if name.isdigit():  # of a state dict that numbers its parameters
                    name = key.name.removeprefix(prefix)
                tensors.setdefault(name, {})[_below(recorded.paths[text], root, key.state)] = key
        whole = bool(tensors) or dotted(root) in recorded.optimizers
        values: dict[str, list[Path]] = {}
        wrappers: dict[str, set[Path]] = {}
        if whole:
            for path in recorded.value_paths:
                text = dotted(path)
                split = split_state(text[len(head) :], names) if text.startswith(head) else None
                if split is not None and split[0] in names:
                    below = _below(path, root, split[1])
                    if RECORD in below:
                        wrappers.setdefault(split[0], set()).add(below[: below.index(RECORD)])
                    else:
                        values.setdefault(split[0], []).append(below)
        else:
            for name in names:
                at = recorded.names.get(prefix + name)
                states = (
                    [] if at is None else [s for s in recorded.ck.states(at) if s not in PARAMETER]
                )
                if states:
                    tensors[name] = {(state,): Key(prefix + name, state) for state in states}
        return _Stored(tensors, values, wrappers, whole)

    def _options(
        self, groups: Iterable[CollectedGroup], group_of: Callable[[str], GroupDoc | None]
    ) -> list[dict[str, Any]]:
        """The hyper-parameters that each group will have."""
        out = []
        for group in groups:
            options: dict[str, Any] = {}
            saved = next((g for n in group.params if (g := group_of(n)) is not None), None)
            for key, value in ({} if saved is None else saved.options).items():
                if key in group.options:
                    with suppress(UcformatError):
                        options[key] = decode(value, group.options[key])
            out.append(options)
        return out

    def _may_restore(
        self, root: Path, live: LiveOptimizer, stored: _Stored, fresh: Iterable[str]
    ) -> bool:
        """Whether states are complete as they were saved, though the optimizer has not made any.

        States that are not like their parameter may belong to all parameters in their order.
        """
        if not stored.whole:
            return False
        groups = self.recorded.optimizers.get(dotted(root), [])
        if [n for _, place in groups for n in place.names] == list(live.params):
            return True
        keys = (
            (key, live.shape(name))
            for name in fresh
            for key in stored.tensors.get(name, {}).values()
        )
        return all(self.recorded.ck.tensors[key].shape == shape for key, shape in keys)

    def _state_paths(self, root: Path, names: Collection[str]) -> dict[str, list[Path]]:
        """The paths of the states that the program has, by the name of the parameter."""
        head = _head(root)
        out: dict[str, list[Path]] = {}
        for path in (*self.collected.tensors, *self.collected.leaves):
            text = dotted(path)
            split = split_state(text[len(head) :], names) if text.startswith(head) else None
            if split is not None and split[0] in names:
                out.setdefault(split[0], []).append(path)
        return out

    def _check_wrappers(self, where: Path, wrappers: Iterable[Path]) -> None:
        """Refuse what only the optimizer could make, and has not."""
        program_wrappers = self.collected.wrappers
        for path in ((*where, *wrapper) for wrapper in wrappers):
            heads = (path[:i] for i in range(len(where) + 1, len(path) + 1))
            if not any(
                head in program_wrappers and path[len(head) :] in program_wrappers[head][1].records
                for head in heads
            ):
                self.others.append(
                    f"{dotted(path)}: the checkpoint has a tensor of another class here, which "
                    "the program has not made"
                )

    def _add(
        self,
        where: Path,
        below: Path,
        key: Key | None,
        holder: Any,
        inside: Path,
        param: torch.Tensor | None,
        slot: FlatSlot | None = None,
    ) -> None:
        """Add a tensor, or without a key a value, which is put into the holder when it is loaded."""
        collected, path = self.collected, (*where, *below)
        if key is None and (slot is None or not slot.joined):
            collected.leaves[path] = ValueSlot(None, lambda value: _insert(holder, inside, value))
            return
        info = None if key is None else self.recorded.ck.tensors[self.recorded.stored(key)]
        tensor: torch.Tensor | None = None
        if info is not None:
            dtype, step = torch_dtype(info.dtype), below[-1] == "step"
            tensor = (
                _empty(info.shape, dtype, param, sharded=self._is_sharded(), step=step)
                if slot is None
                else slot.empty(info.shape, dtype, step=step)
            )
        if key is None or tensor is None:
            self.others.append(
                f"{dotted(path)}: the program has no tensor for it, and its shape does not tell "
                "how it is sharded"
            )
            return
        collected.tensors[path] = tensor if slot is None else slot.state(dotted(path), tensor)
        collected.keys[path] = key
        self.finish.append(lambda: _insert(holder, inside, tensor))

    def _is_sharded(self) -> bool:
        kinds = (DTensor, ShardedTensor, FlatPart)
        return any(isinstance(t, kinds) for t in self.collected.tensors.values())

    def _forget(self, paths: Iterable[Path]) -> None:
        """Take the states of a parameter out of the state."""
        for path in paths:
            self.collected.drop(path)


def _lacking(
    where: Path, program_paths: Iterable[Path], stored: _Stored, name: str
) -> dict[Path, Key | None]:
    """What the checkpoint has of a parameter's states, and can be made, and the program has nothing in its place."""
    names = set(map(dotted, program_paths))
    names |= prefixes_of(names)
    out: dict[Path, Key | None] = {
        **stored.tensors.get(name, {}),
        **dict.fromkeys(stored.values.get(name, ())),
    }
    wrappers = stored.wrappers.get(name, ())
    return {
        below: key
        for below, key in out.items()
        if dotted((*where, *below)) not in names and not any(below[: len(w)] == w for w in wrappers)
    }


def _of_other_structure(program: Mapping[Path, bool], saved: Mapping[Path, bool]) -> set[str | int]:
    """The states that are made anew: lists of other items than were saved, and values that were tensors.

    Both mappings tell whether what is at a path is a tensor.
    """
    out = {path[0] for path, is_tensor in saved.items() if is_tensor and program.get(path) is False}
    for key in {path[0] for path in saved if any(type(part) is int for part in path)}:
        program_paths, saved_paths = (
            {path for path in paths if path[0] == key} for paths in (program, saved)
        )
        if program_paths != saved_paths:
            out.add(key)
    return out


def _is_numbered(group: Any) -> bool:
    """Whether a group of a state dict numbers its parameters."""
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and all(type(p) is int for p in params)


def _head(root: Path) -> str:
    return dotted((*root, _STATE, ""))


def _below(path: Path, root: Path, state: str) -> Path:
    """The part of a path below the name of a parameter, which may be one key."""
    nested = path[len(root) + 2 :]
    return nested if dotted(nested) == state else (state,)


def _empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    param: torch.Tensor | None,
    *,
    sharded: bool,
    step: bool,
) -> torch.Tensor | None:
    """A tensor for a state: distributed like its parameter if it has its shape; None if that is not known."""
    if param is None:
        return None if sharded and shape else torch.empty(shape, dtype=dtype)
    if isinstance(param, DTensor | ShardedTensor) and shape:
        return torch.empty_like(param, dtype=dtype) if shape == tuple(param.shape) else None
    # PyTorch keeps `step` on the host, unless the optimizer is capturable or fused
    return torch.empty(shape, dtype=dtype, device="cpu" if step and not shape else param.device)


def _insert(holder: Any, path: Path, value: Any) -> None:
    """Put a value into nested dictionaries, and lists where a key is a position."""
    for key, following in pairwise(path):
        inner: Any = [] if type(following) is int else {}
        if isinstance(holder, list):
            assert isinstance(key, int)  # noqa: S101 - a position
            holder.extend([None] * (key + 1 - len(holder)))
            if holder[key] is None:
                holder[key] = inner
        holder = (
            holder[_plain(key)]
            if isinstance(holder, list)
            else holder.setdefault(_plain(key), inner)
        )
    last = _plain(path[-1])
    if isinstance(holder, list):
        holder.extend([None] * (last + 1 - len(holder)))
    holder[last] = value


def _plain(key: str | int) -> Any:
    return int(key) if isinstance(key, int | IntKey) else key


def _remove(entries: MutableMapping[str, Any], name: str) -> None:
    """Remove the states of a parameter from a state dict, nested or flattened."""
    nested = entries.get(_STATE)
    if isinstance(nested, MutableMapping):
        nested.pop(name, None)
    for key in [k for k in entries if isinstance(k, str) and k.startswith(f"{_STATE}.{name}.")]:
        del entries[key]


def _first_states(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, torch.Tensor],
    options: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, dict[Any, Any]], Exception | None]:
    """The states that an optimizer makes for parameters in its first step, in which no value changes.

    The optimizer and the parameters are afterwards as before.

    Returns:
        the states by name, and the error of the step, if it fails.
    """
    if not params:
        return {}, None
    groups = [dict(g) for g in optimizer.param_groups]
    all_params = [p for g in groups for p in g["params"]]
    grads = [p.grad for p in all_params]
    values = {p: p.detach().clone() for p in params.values()}  # several names may have one
    attributes = dict(vars(optimizer))
    before = dict(optimizer.state)
    devices = {p.device for p in all_params if p.device.type not in ("cpu", "meta")}
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng([d.index for d in devices], device_type=_device_type(devices)),
        ):
            optimizer._optimizer_step_pre_hooks = OrderedDict()  # noqa: SLF001 - restored with the attributes
            optimizer._optimizer_step_post_hooks = OrderedDict()  # noqa: SLF001
            # a step skips parameters without a gradient
            for p in all_params:
                p.grad = None
            for p in params.values():
                p.grad = torch.zeros_like(p)
            for group, saved in zip(optimizer.param_groups, options, strict=True):
                group.update(saved)
                if "lr" in group:
                    group["lr"] = (
                        torch.zeros_like(lr) if isinstance(lr := group["lr"], torch.Tensor) else 0.0
                    )
            optimizer.step()
        return {n: state for n, p in params.items() if (state := optimizer.state.get(p))}, None
    except Exception as error:  # noqa: BLE001 - whatever the optimizer does not support
        return {}, error
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(saved)
        optimizer.state.clear()
        optimizer.state.update(before)
        with torch.no_grad():
            for p, grad in zip(all_params, grads, strict=True):
                p.grad = grad
            for p, value in values.items():
                p.copy_(value)


def _device_type(devices: Iterable[torch.device]) -> str:
    return next((d.type for d in devices), "cuda")
