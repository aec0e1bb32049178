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
from ucformat.reading.readable import IntKey
from ucformat.sources.dcp.names import GROUPS, dotted, key_of_dotted
from ucformat.torch.memory import torch_dtype
from ucformat.torch.recorded import ABSENT, Recorded, value_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.checkpoint import Checkpoint
    from ucformat.sources.dcp.names import Path

__all__ = ["Entries", "Option", "Parts", "Value", "Weight"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor in one state, under the program's name for it; `weight` also stands for `master`."""

    key: Key


@dataclass(frozen=True, slots=True)
class Value:
    """A plain value in its JSON form."""

    data: Any


@dataclass(frozen=True, slots=True)
class Parts:
    """A value, such as a tuple, out of which tensors were saved."""


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

    What the checkpoint records of the state that was saved counts first: those paths mean what they meant there.
    Other weights are found with or without what the program keeps its model under (`model.`, `app.model.`), the states
    of an optimizer below any `….state.`, its hyper-parameters below any `….param_groups.`, nested or flattened, and
    plain values by their paths. Iteration lists each once: as it was saved, or where that is not known as a state
    `{"model": …, "optim": …, …}` has it.
    """

    def __init__(self, ck: Checkpoint, names: Mapping[str, str]) -> None:
        self.ck, self.names = ck, names
        self.recorded = Recorded(ck, names)
        self.states = {name: tuple(ck.states(stored)) for name, stored in names.items()}
        self._found: dict[str, Weight | Value | Parts | Option | None] = {}

    def find(self, fqn: str) -> Weight | Value | Parts | Option | None:
        """What an entry means; None where the checkpoint does not have it."""
        if fqn not in self._found:
            self._found[fqn] = self._find(fqn)
        return self._found[fqn]

    def _find(self, fqn: str) -> Weight | Value | Parts | Option | None:
        if fqn in self.recorded.tensors:
            return Weight(self.recorded.tensors[fqn])
        option = self._option(fqn)
        if option is not None and option.root in self.recorded.optimizers:
            known = isinstance(option.which, int) or self.recorded.find_group(option.root)(option.which)
            return option if known else None
        data = value_at(self.ck.objects, fqn)
        held = self.recorded.holds_tensors(fqn)
        if data is not ABSENT and self.recorded.tensors and not held:
            return Value(data)
        key = key_of_dotted(fqn, self.states)
        if key is not None and self.shape(key) is not None:
            return Weight(key)
        if isinstance(data, dict) and set(data) == {"$ref"}:
            return self._find(data["$ref"])
        if held:
            return Parts()
        return Value(data) if data is not ABSENT else option

    def _option(self, fqn: str) -> Option | None:
        if not self.ck.manifest.groups:
            return None
        at = 0 if fqn.startswith(GROUPS) else fqn.find("." + GROUPS) + 1
        root, below = fqn[:at].rstrip("."), fqn[at:]
        if below == GROUPS:
            return Option(root)
        if not below.startswith(GROUPS + "."):
            return None
        number, _, name = below[len(GROUPS) + 1 :].partition(".")
        param, _, last = below[len(GROUPS) + 1 :].rpartition(".")
        groups = self.recorded.optimizers.get(root, ())
        if number.isdecimal() and name and not any(p.flattened and param in p.names for _, p in groups):
            return Option(root, int(number), name)
        return Option(root, param, last) if param and last else None

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
        out = {dotted(p): tuple(str(x) if isinstance(x, IntKey) else x for x in p) for p in self.recorded.entries()}
        known = set(self.recorded.tensors.values())

        def add(*path: str | int) -> None:
            out.setdefault(dotted(path), path)

        own: set[str] = set()
        for name, stored in self.names.items():
            for state in self.states[name]:
                if Key(stored, state) in known or (stored in own and state not in _PARAMETER):
                    continue  # tied names have no optimizer states of their own
                if state in _PARAMETER:
                    add("model", name)
                else:
                    add("optim", "state", name, state)
            own.add(stored)
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
