"""A checkpoint as PyTorch DCP sees it: resolves the entries of a program's state dict, and fits their values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ucformat.errors import PermissionDenied, UnsupportedError
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import IntKey
from ucformat.sources.dcp.names import GROUPS, dotted, key_of_dotted
from ucformat.sources.values import from_json
from ucformat.torch.loading.match import Problems
from ucformat.torch.loading.values import ABSENT, SavedState, value_at
from ucformat.torch.state.collect import are_names, is_group
from ucformat.torch.state.memory import torch_dtype
from ucformat.torch.state.objects import decode, tensor_of, unfit
from ucformat.torch.state.subclasses import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.reading.readable import StatePath as Path
    from ucformat.schema.manifest import GroupDoc


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor in one state, under the program's name; `weight` may be stored as `master`."""

    key: Key


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A plain value in its JSON form."""

    data: Any


@dataclass(frozen=True, slots=True)
class SplitValue:
    """A value, such as a tuple, whose tensors were stored separately."""


@dataclass(frozen=True, slots=True)
class StoredWrapper:
    """A wrapper subclass, whose inner tensors are stored."""

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A hyper-parameter of an optimizer group, or without `name` all groups of the optimizer at `root`.

    `which` is the number of the group, or the name of a parameter in it.
    """

    root: str
    which: int | str = 0
    name: str = ""


Entry = StoredWeight | StoredWrapper | PlainValue | SplitValue | Hyperparameter


class Entries(Mapping[str, Any]):
    """The entries of a checkpoint, by the dotted paths of any program's state dict.

    Paths of the state that was saved, if the checkpoint records them, have precedence. Other weights are found with or
    without the prefix under which the program keeps its model (`model.`, `app.model.`), optimizer states below any
    `….state.`, hyper-parameters below any `….param_groups.`, nested or flattened, and plain values by their paths.
    Iteration lists each entry once: as it was saved, or if that is not recorded as in a state
    `{"model": …, "optim": …, …}`.
    """

    def __init__(self, ck: Checkpoint, names: Mapping[str, str]) -> None:
        self.ck, self.names = ck, names
        self.recorded = SavedState(ck, names)
        self.states = {name: tuple(ck.states(stored)) for name, stored in names.items()}
        self._found: dict[str, Entry | None] = {}

    def find(self, fqn: str) -> Entry | None:
        """Resolve an entry."""
        if fqn not in self._found:
            self._found[fqn] = self._find(fqn)
        return self._found[fqn]

    def _find(self, fqn: str) -> Entry | None:
        if fqn in self.recorded.tensors:
            return StoredWeight(self.recorded.tensors[fqn])
        option = self._option(fqn)
        if option is not None and option.root in self.recorded.optimizers:
            known = isinstance(option.which, int) or self.recorded.find_group(option.root)(option.which)
            return option if known else None
        record = value_at(self.ck.objects, f"{fqn}.{RECORD}")
        if isinstance(record, dict):
            return StoredWrapper(from_json(record))
        data = value_at(self.ck.objects, fqn)
        held = self.recorded.holds_tensors(fqn)
        if data is not ABSENT and self.recorded.tensors and not held:
            return PlainValue(data)
        key = key_of_dotted(fqn, self.states)
        if key is not None and self.shape(key) is not None and not self._is_elsewhere(fqn, key):
            return StoredWeight(key)
        if isinstance(data, dict) and set(data) == {"$ref"}:
            return self._find(data["$ref"])
        if held:
            return SplitValue()
        return PlainValue(data) if data is not ABSENT else option

    def _is_elsewhere(self, fqn: str, key: Key) -> bool:
        """Whether a tensor with this name was saved in another entry than the one that is asked for, which exists."""
        stored = self.names[key.name]
        asked_by_name = key.name == fqn or self.recorded.unrenamed.get(key.name) != stored
        if asked_by_name or key.state != "weight" or not self.ck.metadata.paths.get(Key(stored, key.state)):
            return False
        return fqn.partition(".")[0] in self._entries

    @cached_property
    def _entries(self) -> set[str]:
        """The keys of the saved state below which tensors were saved."""
        return {text.partition(".")[0] for text in self.recorded.tensors if "." in text}

    def _option(self, fqn: str) -> Hyperparameter | None:
        if not self.ck.manifest.groups:
            return None
        at = 0 if fqn.startswith(GROUPS) else fqn.find("." + GROUPS) + 1
        root, below = fqn[:at].rstrip("."), fqn[at:]
        if below == GROUPS:
            return Hyperparameter(root)
        if not below.startswith(GROUPS + "."):
            return None
        number, _, name = below[len(GROUPS) + 1 :].partition(".")
        param, _, last = below[len(GROUPS) + 1 :].rpartition(".")
        groups = self.recorded.optimizers.get(root, ())
        if number.isdecimal() and name and not any(p.flattened and param in p.names for _, p in groups):
            return Hyperparameter(root, int(number), name)
        return Hyperparameter(root, param, last) if param and last else None

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None if it is not stored."""
        states = ("weight", "master") if key.state == "weight" else (key.state,)
        stored = (self.ck.tensors.get(Key(self.names[key.name], s)) for s in states)
        return next((info.shape for info in stored if info is not None), None)

    def __getitem__(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        found = self.find(fqn)
        if found is None:
            raise KeyError(fqn)
        if isinstance(found, StoredWrapper):
            return _metadata(found.record["shape"], getattr(torch, found.record["dtype"]))
        return self._tensor(found.key) if isinstance(found, StoredWeight) else BytesStorageMetadata()

    def _tensor(self, key: Key) -> TensorStorageMetadata:
        """The metadata of a tensor, as one chunk, however it is stored; DCP requests the box that a rank holds."""
        stored, shape = self.names[key.name], torch.Size(self.shape(key) or ())
        state = "master" if key.state == "weight" and "weight" not in self.states[key.name] else key.state
        return _metadata(shape, torch_dtype(self.ck.tensors[Key(stored, state)].dtype))

    @cached_property
    def paths(self) -> Mapping[str, Path]:
        """The path of each entry in a state that contains all of them."""
        out = {dotted(p): tuple(str(x) if isinstance(x, IntKey) else x for x in p) for p in self.recorded.entries()}
        known = set(self.recorded.tensors.values())

        def add(*path: str | int) -> None:
            out.setdefault(dotted(path), path)

        listed: set[str] = set()
        for name, stored in self.names.items():
            for state in self.states[name]:
                if Key(stored, state) in known or (stored in listed and state not in _PARAMETER):
                    continue  # tied names have no optimizer states of their own
                if state in _PARAMETER:
                    add("model", name)
                else:
                    add("optim", "state", name, state)
            listed.add(stored)
        if not known and not self.recorded.optimizers:
            for i, group in enumerate(self.ck.manifest.groups):
                for option in ("params", *group.options):
                    add("optim", GROUPS, i, option)
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


_PARAMETER = ("weight", "master")


def _metadata(shape: Sequence[int], dtype: torch.dtype) -> TensorStorageMetadata:
    """The metadata of a tensor that is stored as one chunk."""
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])


_log = logging.getLogger("ucformat")
_MAX_NAMES = 10


def fit_values(
    entries: Entries, fqns: Sequence[str], current: Mapping[str, Any], *, trust: bool, cast: bool
) -> tuple[dict[str, Any], Problems]:
    """Fit the values of entries other than tensors.

    Args:
        current: the values of the program, which determine types that JSON does not record.

    Returns:
        the new values by dotted path, and what does not fit.
    """
    values: dict[str, Any] = {}
    options: dict[str, Hyperparameter] = {}
    others: list[str] = []
    dtypes: list[str] = []
    for fqn in fqns:
        found = entries.find(fqn)
        if isinstance(found, Hyperparameter):
            options[fqn] = found
        elif isinstance(found, PlainValue):
            try:
                value = decode(found.data, current.get(fqn), trust=trust)
            except (PermissionDenied, UnsupportedError) as error:
                others.append(f"the object {fqn}: {error.message}")
                continue
            wrong, dtype = unfit(value, current.get(fqn), cast=cast)
            others += [f"the object {fqn}: {w}" for w in wrong]
            dtypes += [f"the object {fqn} is {d}" for d in dtype]
            values[fqn] = value
        elif isinstance(found, SplitValue):
            try:
                values[fqn] = _joined(entries, fqn, current.get(fqn), trust=trust)
            except (PermissionDenied, UnsupportedError) as error:
                others.append(f"the object {fqn}: {error.message}")
    problems = Problems(dtypes=tuple(dtypes), others=tuple(others))
    by_name, more = _fit_options(entries, options, current, trust=trust)
    return values | by_name, problems | Problems(others=tuple(more))


def _joined(entries: Entries, fqn: str, current: Any, *, trust: bool) -> Any:
    """The value of an entry, such as a tuple, whose tensors were stored separately."""

    def inner(key: Any, value: Any) -> Any:
        return _joined(entries, f"{fqn}.{key}", value, trust=trust)

    found = entries.find(fqn)
    if isinstance(found, StoredWeight):
        stored = entries.names[found.key.name]
        return tensor_of(entries.ck[stored, found.key.state][...])
    if isinstance(current, dict):
        return {k: inner(k, v) for k, v in current.items()}
    if isinstance(current, list | tuple):
        items = [inner(i, v) for i, v in enumerate(current)]
        return type(current)(*items) if hasattr(current, "_fields") else type(current)(items)
    if isinstance(found, PlainValue):
        return decode(found.data, current, trust=trust)
    raise UnsupportedError(
        f"its tensors were stored separately, and {fqn} is not one of them", hint="use a state of the same structure"
    )


def _fit_options(
    entries: Entries, options: Mapping[str, Hyperparameter], current: Mapping[str, Any], *, trust: bool
) -> tuple[dict[str, Any], list[str]]:
    """The values of hyper-parameters, and what does not fit.

    A group of the program gets the hyper-parameters of its parameters, or if these have no names, those of the group
    with its number. A hyper-parameter that is not stored keeps the program's value, which is logged.
    """
    values: dict[str, Any] = {}
    others: list[str] = []
    kept: dict[str, None] = {}
    finders: dict[str, Callable[[str], GroupDoc | None]] = {}
    for fqn, option in options.items():
        group_of = finders.setdefault(option.root, entries.recorded.find_group(option.root))
        if not option.name:
            values[fqn] = _whole(entries, option, current.get(fqn), group_of, kept, trust=trust)
            continue
        params = _params(entries, option, current)
        if option.name == "params":
            mine = current.get(fqn)
            values[fqn] = mine if are_names(mine) and mine else list(params)
            continue
        found = [_option(group_of(p), option.name) for p in params]
        stored = [f for f in found if f is not ABSENT]
        if any(f != stored[0] for f in stored[1:]):
            others.append(f"{fqn}: its parameters were in groups with different values")
        elif stored:
            values[fqn] = _like_number(decode(stored[0], current.get(fqn), trust=trust), current.get(fqn))
        else:
            values[fqn] = current.get(fqn)
        kept |= {f"{p}: {option.name}": None for p, f in zip(params, found, strict=True) if f is ABSENT}
    if kept:
        _log.warning(
            "%s lacks some hyper-parameters, which keep the values of the program: %s",
            entries.ck.url,
            ", ".join([*kept][:_MAX_NAMES]) + (f" and {len(kept) - _MAX_NAMES} more" if len(kept) > _MAX_NAMES else ""),
        )
    return values, others


def _whole(
    entries: Entries,
    option: Hyperparameter,
    current: Any,
    group_of: Callable[[str], GroupDoc | None],
    kept: dict[str, None],
    *,
    trust: bool,
) -> list[dict[str, Any]]:
    """All groups of an optimizer as one value."""
    if not isinstance(current, list) or not current or not all(map(is_group, current)):
        return [
            {"params": list(names), **{k: decode(v, trust=trust) for k, v in group.options.items() if k != "state"}}
            for group, names in _groups(entries, option.root)
        ]
    out = []
    for held in current:
        group = dict(held)
        for key in held.keys() - {"params", "param_names"}:
            stored = [f for p in held["params"] if (f := _option(group_of(p), key)) is not ABSENT]
            if stored and all(f == stored[0] for f in stored):
                group[key] = _like_number(decode(stored[0], held[key], trust=trust), held[key])
            else:
                kept[f"{option.root}: {key}"] = None
        out.append(group)
    return out


def _option(group: GroupDoc | None, name: str) -> Any:
    return ABSENT if group is None else value_at(group.options, name)


def _like_number(value: Any, current: Any) -> Any:
    """A number as a tensor, or a tensor as a number, as the program has it (a learning rate)."""
    if isinstance(current, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(current, value)
    if isinstance(value, torch.Tensor) and isinstance(current, int | float):
        return value.item()
    return value


def _params(entries: Entries, option: Hyperparameter, current: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a group's parameters in the program, or if it has none in the checkpoint."""
    if isinstance(option.which, str):
        return (option.which,)
    root = f"{option.root}.{GROUPS}" if option.root else GROUPS
    mine = current.get(f"{root}.{option.which}.params")
    if are_names(mine) and mine:
        return tuple(mine)
    stored = _groups(entries, option.root)
    return stored[option.which][1] if option.which < len(stored) else ()


def _groups(entries: Entries, root: str) -> list[tuple[GroupDoc, tuple[str, ...]]]:
    """The stored groups of an optimizer, with its names of their parameters; all groups if it is not recorded."""
    mine = entries.recorded.optimizers.get(root)
    if mine is not None:
        return [(group, place.names) for group, place in mine]
    return [(group, group.params) for group in entries.ck.manifest.groups]
