"""What PyTorch DCP loads besides tensors: plain values, and hyper-parameters by the names of their parameters."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ucformat.errors import Refused
from ucformat.sources.dcp.names import GROUPS
from ucformat.torch.collect import Collected, Group
from ucformat.torch.dcp_entries import Option, Value
from ucformat.torch.match import Problems
from ucformat.torch.objects import decode
from ucformat.torch.restore import fit_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.torch.dcp_entries import Entries

__all__ = ["fit_values"]


def fit_values(
    entries: Entries, fqns: Sequence[str], current: Mapping[str, Any], *, trust: bool, cast: bool
) -> tuple[dict[str, Any], Problems]:
    """The new value of each entry, in the types of the program's `current` one, and what does not fit."""
    values: dict[str, Any] = {}
    options: dict[str, Option] = {}
    others: list[str] = []
    dtypes: list[str] = []
    for fqn in fqns:
        found = entries.find(fqn)
        if isinstance(found, Option):
            options[fqn] = found
        elif isinstance(found, Value):
            try:
                value = decode(found.data, current.get(fqn), trust=trust)
            except Refused as error:
                others.append(f"the object {fqn}: {error.message}")
                continue
            wrong, dtype = _unfit(value, current.get(fqn), cast=cast)
            others += [f"the object {fqn}: {w}" for w in wrong]
            dtypes += [f"the object {fqn} is {d}" for d in dtype]
            values[fqn] = value
    problems = Problems(dtypes=tuple(dtypes), others=tuple(others))
    by_name, more = _fit_options(entries, options, current)
    return values | by_name, problems | more


def _unfit(value: Any, current: Any, *, cast: bool) -> tuple[list[str], list[str]]:
    """Why a value cannot take the place of a tensor of the program; and of another dtype it is."""
    if not isinstance(current, torch.Tensor):
        return [], []
    if isinstance(current, DTensor) or not isinstance(value, torch.Tensor):
        return [f"a {type(value).__name__} cannot take the place of a {type(current).__name__}"], []
    if value.shape != current.shape:
        return [f"it is {list(current.shape)}, in the checkpoint {list(value.shape)}"], []
    if value.dtype != current.dtype and not cast:
        return [], [f"{current.dtype}, in the checkpoint {value.dtype}"]
    return [], []


def _fit_options(
    entries: Entries, options: Mapping[str, Option], current: Mapping[str, Any]
) -> tuple[dict[str, Any], Problems]:
    """The hyper-parameters that are wanted; those that the checkpoint does not have stay as they are."""
    groups: dict[tuple[str, int | str], Group] = {}
    whole: dict[str, list[dict[str, Any]]] = {}
    for fqn, option in options.items():
        if not option.name:  # all groups as one value
            blank = [{"params": list(g.params), **dict.fromkeys(g.options)} for g in _stored(entries)]
            whole[fqn] = copy.deepcopy(current[fqn]) if current.get(fqn) else blank
            for i, held in enumerate(whole[fqn]):
                groups[option.root, i] = Group(tuple(map(str, held["params"])), held)
            continue
        at = (option.root, option.which)
        params = _params(entries, option, current)
        group = groups.setdefault(at, Group(params, {}))
        blank_value = list(params) if option.name == "params" else None
        group.options[option.name] = blank_value if current.get(fqn) is None else current[fqn]
    found = Collected()
    for (root, _), group in groups.items():
        found.groups.setdefault((root or GROUPS,), []).append(group)
    problems, put = fit_groups(found, entries.ck, entries.names)
    put()
    values = {f: groups[o.root, o.which].options[o.name] for f, o in options.items() if o.name}
    return {f: _like_number(v, current.get(f)) for f, v in values.items()} | whole, problems


def _like_number(value: Any, current: Any) -> Any:
    """A learning rate as a tensor where the program has one, and as a number where it has that."""
    if isinstance(current, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(current, value)
    if isinstance(value, torch.Tensor) and isinstance(current, int | float):
        return value.item()
    return value


def _params(entries: Entries, option: Option, current: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a group's parameters: the program's, or where it has none yet the checkpoint's."""
    if isinstance(option.which, str):
        return (option.which,)
    root = f"{option.root}.{GROUPS}" if option.root else GROUPS
    mine = current.get(f"{root}.{option.which}.params")
    if isinstance(mine, list | tuple):
        return tuple(map(str, mine))
    stored = _stored(entries)
    return stored[option.which].params if option.which < len(stored) else ()


def _stored(entries: Entries) -> Sequence[Any]:
    return entries.ck.manifest.groups
