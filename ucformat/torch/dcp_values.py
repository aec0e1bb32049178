"""What PyTorch DCP loads besides tensors: plain values, and hyper-parameters by the names of their parameters."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ucformat.errors import Refused
from ucformat.sources.dcp.names import GROUPS
from ucformat.torch.collect import are_names, is_group
from ucformat.torch.dcp_entries import Option, Parts, Value, Weight
from ucformat.torch.match import Problems
from ucformat.torch.objects import decode, tensor_of, unfit
from ucformat.torch.recorded import ABSENT, value_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.schema.manifest import GroupDoc
    from ucformat.torch.dcp_entries import Entries

__all__ = ["fit_values"]

_log = logging.getLogger("ucformat")
_SHOWN = 10


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
            wrong, dtype = unfit(value, current.get(fqn), cast=cast)
            others += [f"the object {fqn}: {w}" for w in wrong]
            dtypes += [f"the object {fqn} is {d}" for d in dtype]
            values[fqn] = value
        elif isinstance(found, Parts):
            try:
                values[fqn] = _joined(entries, fqn, current.get(fqn), trust=trust)
            except Refused as error:
                others.append(f"the object {fqn}: {error.message}")
    problems = Problems(dtypes=tuple(dtypes), others=tuple(others))
    by_name, more = _fit_options(entries, options, current, trust=trust)
    return values | by_name, problems | Problems(others=tuple(more))


def _joined(entries: Entries, fqn: str, current: Any, *, trust: bool) -> Any:
    """What DCP takes for one value, such as a tuple, of the tensors and values that were saved out of it."""

    def inner(key: Any, value: Any) -> Any:
        return _joined(entries, f"{fqn}.{key}", value, trust=trust)

    found = entries.find(fqn)
    if isinstance(found, Weight):
        stored = entries.names[found.key.name]
        return tensor_of(entries.ck[stored, found.key.state][...])
    if isinstance(current, dict):
        return {k: inner(k, v) for k, v in current.items()}
    if isinstance(current, list | tuple):
        items = [inner(i, v) for i, v in enumerate(current)]
        return type(current)(*items) if hasattr(current, "_fields") else type(current)(items)
    if isinstance(found, Value):
        return decode(found.data, current, trust=trust)
    raise Refused(f"tensors were saved out of it, and {fqn} is none of them", hint="give a state of its structure")


def _fit_options(
    entries: Entries, options: Mapping[str, Option], current: Mapping[str, Any], *, trust: bool
) -> tuple[dict[str, Any], list[str]]:
    """The hyper-parameters that are wanted, and what does not fit.

    A group of the program's gets those of its own parameters; where the program does not name them, those of the group
    of its number. What the checkpoint does not have keeps the program's value, and is logged.
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
            others.append(f"{fqn}: its parameters were in groups with different values of it")
        elif stored:
            values[fqn] = _like_number(decode(stored[0], current.get(fqn), trust=trust), current.get(fqn))
        else:
            values[fqn] = current.get(fqn)
        kept |= {f"{p}: {option.name}": None for p, f in zip(params, found, strict=True) if f is ABSENT}
    if kept:
        _log.warning(
            "%s does not have all hyper-parameters; these keep the values of the program: %s",
            entries.ck.url,
            ", ".join([*kept][:_SHOWN]) + (f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""),
        )
    return values, others


def _whole(
    entries: Entries,
    option: Option,
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
    """A learning rate as a tensor where the program has one, and as a number where it has that."""
    if isinstance(current, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(current, value)
    if isinstance(value, torch.Tensor) and isinstance(current, int | float):
        return value.item()
    return value


def _params(entries: Entries, option: Option, current: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a group's parameters: the program's, or where it has none the checkpoint's."""
    if isinstance(option.which, str):
        return (option.which,)
    root = f"{option.root}.{GROUPS}" if option.root else GROUPS
    mine = current.get(f"{root}.{option.which}.params")
    if are_names(mine) and mine:
        return tuple(mine)
    stored = _groups(entries, option.root)
    return stored[option.which][1] if option.which < len(stored) else ()


def _groups(entries: Entries, root: str) -> list[tuple[GroupDoc, tuple[str, ...]]]:
    """The stored groups of an optimizer, and its names of their parameters; of one that is not known all groups."""
    mine = entries.recorded.optimizers.get(root)
    if mine is not None:
        return [(group, place.names) for group, place in mine]
    return [(group, group.params) for group in entries.ck.manifest.groups]
