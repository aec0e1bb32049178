"""Optimizer groups of a training state: the names of their parameters, and hyper-parameters that can be set."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.reading.state_names import split_option
from ucformat.torch.state.objects import encode

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    import torch

    from ucformat.torch.state.flat import FlatSlot


@dataclass(frozen=True, slots=True)
class CollectedGroup:
    """An optimizer group: the optimizer's names of its parameters, and its hyper-parameters, to be set in place."""

    params: tuple[str, ...]
    options: MutableMapping[str, Any]

    @property
    def flattened(self) -> bool:
        """Whether the state dict has separate hyper-parameters for each parameter."""
        return isinstance(self.options, _FlatOptions)

    def parts(self) -> list[CollectedGroup]:
        """Return what can have its own hyper-parameters: each parameter of a flattened group, else the group itself."""
        if not isinstance(self.options, _FlatOptions):
            return [self]
        flat = self.options
        return [
            CollectedGroup((name,), _FlatOptions(flat.state, keys))
            for name, keys in zip(self.params, flat.keys_of, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class LiveOptimizer:
    """An optimizer of a state, or the part of it on this rank.

    Attributes:
        params: those of which it has the states, by name, in the order of its groups; of those that
            FSDP1 joins, several names have one.
        slots: where those that FSDP1 cuts are in what the optimizer has.
    """

    optimizer: torch.optim.Optimizer
    groups: Sequence[CollectedGroup]
    params: Mapping[str, torch.Tensor]
    slots: Mapping[str, FlatSlot] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole parameter."""
        return self.slots[name].shape if name in self.slots else tuple(self.params[name].shape)

    def joined(self, name: str) -> list[str]:
        """Return the other parameters that are one for the optimizer with this one."""
        if name not in self.slots or not self.slots[name].joined:
            return []
        param = self.params[name]
        return [n for n, other in self.params.items() if other is param and n != name]


def is_group(group: Any) -> bool:
    """Check whether a value is an optimizer group with named parameters."""
    names = group.get("params") if isinstance(group, dict) else None
    return isinstance(names, list) and are_names(names) and all(type(k) is str for k in group)


def are_names(params: Any) -> bool:
    """Check whether a value is a sequence of names."""
    return isinstance(params, list | tuple) and all(isinstance(p, str) for p in params)


class GroupOptions(dict[str, Any]):
    """The hyper-parameters of a group in a state dict; an item that is set is also set there."""

    def __init__(
        self, group: MutableMapping[str, Any], without: tuple[str, ...] = ("params",)
    ) -> None:
        super().__init__({k: v for k, v in group.items() if k not in without})
        self.group = group

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.group[key] = value


def flattened_groups(value: Any, keys: set[str]) -> list[CollectedGroup]:
    """Return the groups of a flattened optimizer state dict: parameters with equal hyper-parameters form a group."""
    options: dict[str, dict[str, str]] = {}  # name -> option -> key
    for key in (k for k in value if k in keys):
        name, option = split_option(key)
        options.setdefault(name, {})[option] = key
    groups: dict[str, CollectedGroup] = {}
    for name, by_option in options.items():
        options_text = json.dumps(
            encode({o: value[k] for o, k in by_option.items()}), sort_keys=True
        )
        if (group := groups.get(options_text)) is None:
            groups[options_text] = CollectedGroup((name,), _FlatOptions(value, by_option))
        else:
            group.options.add(by_option)  # type: ignore[attr-defined]
            groups[options_text] = CollectedGroup((*group.params, name), group.options)
    return list(groups.values())


class _FlatOptions(dict[str, Any]):
    """The hyper-parameters that parameters of a flattened optimizer state dict share; set for all of them."""

    def __init__(self, state: MutableMapping[str, Any], keys: Mapping[str, str]) -> None:
        super().__init__({o: state[k] for o, k in keys.items()})
        self.state, self.keys_of = state, [keys]

    def add(self, keys: Mapping[str, str]) -> None:
        self.keys_of.append(keys)

    def __setitem__(self, option: str, value: Any) -> None:
        super().__setitem__(option, value)
        for keys in self.keys_of:
            if option in keys:
                self.state[keys[option]] = value
