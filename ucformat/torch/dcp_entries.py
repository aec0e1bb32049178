"""A checkpoint as PyTorch DCP sees it: what each entry of a program's state dict means in it, looked up as asked."""

from __future__ import annotations

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

from ucformat.geometry.tensor import Key
from ucformat.sources.dcp.names import GROUPS, dotted, key_of_dotted
from ucformat.sources.values import json_key
from ucformat.torch.memory import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.checkpoint import Checkpoint
    from ucformat.sources.dcp.names import Path

__all__ = ["Entries", "Option", "Value", "Weight"]

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor in one state, under the program's name for it; `weight` also stands for `master`."""

    key: Key


@dataclass(frozen=True, slots=True)
class Value:
    """A plain value in its JSON form."""

    data: Any


@dataclass(frozen=True, slots=True)
class Option:
    """A hyper-parameter of an optimizer: of group number `which`, or of the group of the parameter of that name.

    Without `name` all groups of the optimizer at `root` are meant.
    """

    root: str
    which: int | str = 0
    name: str = ""


class Entries(Mapping[str, Any]):
    """The entries of a checkpoint by the dotted paths of any program's state dict.

    Weights are found with or without what the program keeps its model under (`model.`, `app.model.`), the states of an
    optimizer below any `….state.`, its hyper-parameters below any `….param_groups.`, nested or flattened, and plain
    values by their paths. Iteration lists each once, as a state `{"model": …, "optim": …, …}` has it.
    """

    def __init__(self, ck: Checkpoint, names: Mapping[str, str]) -> None:
        self.ck, self.names = ck, names
        self.states = {name: tuple(ck.states(stored)) for name, stored in names.items()}
        self._found: dict[str, Weight | Value | Option | None] = {}

    def find(self, fqn: str) -> Weight | Value | Option | None:
        """What an entry means; None where the checkpoint does not have it."""
        if fqn not in self._found:
            self._found[fqn] = self._find(fqn)
        return self._found[fqn]

    def _find(self, fqn: str) -> Weight | Value | Option | None:
        key = key_of_dotted(fqn, self.states)
        if key is not None and self.shape(key) is not None:
            return Weight(key)
        data = _value_at(self.ck.objects, fqn)
        if isinstance(data, dict) and set(data) == {"$ref"}:
            return self._find(data["$ref"])
        return Value(data) if data is not _ABSENT else self._option(fqn)

    def _option(self, fqn: str) -> Option | None:
        if not self.ck.manifest.groups:
            return None
        at = 0 if fqn.startswith(GROUPS) else fqn.find("." + GROUPS) + 1
        root, below = fqn[:at].rstrip("."), fqn[at:]
        if below == GROUPS:
            return Option(root)
        which, _, name = below.removeprefix(GROUPS + ".").rpartition(".")
        if not below.startswith(GROUPS + ".") or not which:
            return None
        return Option(root, int(which) if which.isdigit() else which, name)

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """The shape of a tensor; None where it is not stored."""
        states = ("weight", "master") if key.state == "weight" else (key.state,)
        stored = (self.ck.tensors.get(Key(self.names[key.name], s)) for s in states)
        return next((info.shape for info in stored if info is not None), None)

    def __getitem__(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        found = self.find(fqn)
        if found is None:
            raise KeyError(fqn)
        return self._tensor(found.key) if isinstance(found, Weight) else BytesStorageMetadata()

    def _tensor(self, key: Key) -> TensorStorageMetadata:
        """One chunk stands for the whole tensor, however it is stored: a rank asks for the box that it holds."""
        stored, shape = self.names[key.name], torch.Size(self.shape(key) or ())
        state = "master" if key.state == "weight" and "weight" not in self.states[key.name] else key.state
        dtype = torch_dtype(self.ck.tensors[Key(stored, state)].dtype)
        whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [whole])

    @cached_property
    def paths(self) -> Mapping[str, Path]:
        """The path of each entry in a state that holds them all."""
        out: dict[str, Path] = {}

        def add(*path: str | int) -> None:
            out[dotted(path)] = path

        own: set[str] = set()
        for name, stored in self.names.items():
            add("model", name)
            if stored not in own:  # tied names have no optimizer states of their own
                own.add(stored)
                for state in self.states[name]:
                    if state not in ("weight", "master"):
                        add("optim", "state", name, state)
        for i, group in enumerate(self.ck.manifest.groups):
            for option in ("params", *group.options):
                add("optim", GROUPS, i, option)
        for path in _leaves({k: v for k, v in self.ck.objects.items() if k != "per_rank"}, ()):
            add(*path)
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


def _value_at(node: Any, text: str) -> Any:
    """The JSON form of the value at a dotted path, whose parts may hold dots themselves; else `_ABSENT`."""
    at = -1
    while at < len(text):
        at = text.find(".", at + 1)
        at = len(text) if at < 0 else at
        inner = _item(node, text[:at])
        if inner is not _ABSENT:
            found = inner if at == len(text) else _value_at(inner, text[at + 1 :])
            if found is not _ABSENT:
                return found
    return _ABSENT


def _item(node: Any, part: str) -> Any:
    if isinstance(node, list):
        return node[int(part)] if part.isdigit() and int(part) < len(node) else _ABSENT
    if not isinstance(node, Mapping) or _is_special(node):
        return _ABSENT
    keys = [json_key(part), *([json_key(int(part))] if part.isdigit() else [])]
    return next((node[k] for k in keys if k in node), _ABSENT)


def _is_special(node: Mapping[str, Any]) -> bool:
    """Whether this stands for something that is no dictionary."""
    return any(k.startswith("$") and not k.startswith(("$$", "$int:")) for k in node)


def _leaves(node: Any, path: Path) -> Iterator[Path]:
    """The paths of plain values, where DCP cuts a state: lists are cut where they hold dictionaries."""
    if isinstance(node, dict) and not _is_special(node):
        for key, inner in node.items():
            yield from _leaves(inner, (*path, key.removeprefix("$int:").removeprefix("$")))
    elif isinstance(node, list) and _is_cut(node):
        for i, inner in enumerate(node):
            yield from _leaves(inner, (*path, i))
    else:
        yield path


def _is_cut(node: list[Any]) -> bool:
    return any((isinstance(v, dict) and not _is_special(v)) or (isinstance(v, list) and _is_cut(v)) for v in node)
