"""PyTorch DCP checkpoints, read in place."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from ucformat.geometry.tensor import Roster, TensorInfo
from ucformat.reading.readable import Facts, Place
from ucformat.sources.contents import unknown_tensor
from ucformat.sources.dcp.names import dotted
from ucformat.sources.dcp.state import name_entries
from ucformat.sources.dcp.values import STEPS, groups_of, objects_of, plain_value, raw_groups, step_of
from ucformat.sources.values import from_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.reading.readable import Record
    from ucformat.sources.dcp.items import Items
    from ucformat.sources.dcp.metadata import Metadata
    from ucformat.sources.dcp.names import Path
    from ucformat.sources.dcp.state import Named, Optimizer

__all__ = ["LazyFacts", "OpenDcp"]

_DEPTH = 3  # below the top of the state a value called `step` is the training's


class OpenDcp:
    """One opened DCP checkpoint."""

    kind = "dcp"

    def __init__(self, items: Items, groups: Sequence[Sequence[str]] | None, owners: Mapping[str, str] | None) -> None:
        self.store, self.items, meta = items.store, items, items.meta

        def read_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
            return raw_groups(optimizer, self.items.values(optimizer.options))

        self.named = name_entries(meta, read_groups, groups, owners)
        self._infos = {
            key: TensorInfo(*key, meta.tensors[fqn].dtype, meta.tensors[fqn].shape)
            for key, fqn in self.named.tensors.items()
        }
        self.facts: Facts = self.make_facts(self.named, _by_name(self._infos))

    def make_facts(self, named: Named, infos: tuple[TensorInfo, ...]) -> LazyFacts:
        """What the checkpoint says of itself."""
        meta = self.items.meta
        version = meta.root.get("version")
        engine = {"name": "torch.distributed.checkpoint", "version": version if isinstance(version, str) else ""}
        files = (meta.file, *meta.files)
        paths = {key: (_path(meta, fqn),) for key, fqn in named.tensors.items()}
        return LazyFacts(self.items, named, infos, engine=engine, files=files, save_id=meta.save_id, paths=paths)

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Where the bytes of a tensor lie; opens the items that hold them, if they are not yet open."""
        if key not in self._infos:
            raise unknown_tensor(key, self._infos, self.store.url)
        return self.items.extents(self.named.tensors[key], self._infos[key], within)

    def records(self) -> Iterator[Record]:
        """Every record of the archives of all items; opens each."""
        return self.items.records()


def _path(meta: Metadata, fqn: str) -> Path:
    """Where an entry lies in the state of the program."""
    path = meta.paths.get(fqn, (fqn,))
    return path if dotted(path) == fqn else (fqn,)


def _by_name(infos: Mapping[Key, TensorInfo]) -> tuple[TensorInfo, ...]:
    """In their order, with all states of a name together."""
    by_name: dict[str, list[TensorInfo]] = {}
    for key, info in infos.items():
        by_name.setdefault(key.name, []).append(info)
    return tuple(info for some in by_name.values() for info in some)


class _LazyRoster(Roster):
    """A roster whose groups are read when somebody asks: they are thousands of items."""

    def __init__(self, tensors: tuple[TensorInfo, ...], facts: LazyFacts) -> None:
        object.__setattr__(self, "tensors", tensors)
        self.__dict__["_facts"] = facts

    @cached_property
    def groups(self) -> dict[str, int]:
        facts: LazyFacts = self.__dict__["_facts"]
        return {name: i for i, group in enumerate(facts.groups) for name in group["params"]}


class LazyFacts(Facts):
    """Facts of which those that lie in items are read when somebody asks."""

    def __init__(self, items: Items, named: Named, infos: tuple[TensorInfo, ...], **told: Any) -> None:
        super().__init__(roster=_LazyRoster(infos, self), **told)
        for name in ("groups", "places", "objects", "step"):
            self.__dict__.pop(name, None)  # the defaults, which would stand in the place of what is read later
        self.__dict__.update(_items=items, _named=named)

    @cached_property
    def _placed(self) -> list[list[tuple[Mapping[str, Any], Place | None]] | None]:
        """The groups of each optimizer."""
        items: Items = self.__dict__["_items"]
        optimizers = self.__dict__["_named"].optimizers
        files = items.values(f for o in optimizers for f in (*o.options, *o.plain))
        return [groups_of(o, files) for o in optimizers]

    @cached_property
    def groups(self) -> tuple[Mapping[str, Any], ...]:
        """See Facts."""
        return tuple(group for groups in self._placed for group, _ in groups or ())

    @cached_property
    def places(self) -> tuple[Place | None, ...]:
        """See Facts."""
        return tuple(place for groups in self._placed for _, place in groups or ())

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """See Facts."""
        items, named = self.__dict__["_items"], self.__dict__["_named"]
        values = dict(named.values)
        for optimizer, groups in zip(named.optimizers, self._placed, strict=True):
            if not groups or any(place is None for _, place in groups):
                values |= {f: (*optimizer.root, *below) for f, below in optimizer.options.items()}
        order = {f: i for i, f in enumerate(items.meta.paths)}
        values = dict(sorted(values.items(), key=lambda item: order.get(item[0], len(order))))
        tensors = [items.meta.paths.get(f, (f,)) for f in named.tensors.values()]
        return objects_of(values, items.values(values), tensors)

    @cached_property
    def step(self) -> int | None:
        """See Facts."""
        items, named = self.__dict__["_items"], self.__dict__["_named"]
        paths = named.values | {
            fqn: items.meta.paths.get(fqn, (fqn,))
            for key, fqn in named.tensors.items()
            if key.state == "weight" and items.meta.tensors[fqn].shape == ()
        }
        wanted = {f: p for f, p in paths.items() if p[-1] in STEPS and len(p) <= _DEPTH}
        files = items.values(wanted)
        return step_of({path: _integer(plain_value(files[fqn], fqn)) for fqn, path in wanted.items()})


def _integer(value: Any) -> Any:
    """A plain integer, or the one in a 0-d tensor of integers."""
    tensor = value.get("$tensor") if isinstance(value, dict) else None
    if tensor and tensor["dtype"].startswith(("int", "uint")) and not tensor["shape"]:
        return int(from_json(value))
    return value
