"""From a training state, as the program has it, to what this rank holds under the names of every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ucformat.geometry.tensor import Key
from ucformat.reading.readable import Place
from ucformat.sources.dcp.names import dotted
from ucformat.sources.values import json_key
from ucformat.torch.collect import collect
from ucformat.torch.devices import synchronize
from ucformat.torch.dtensor import local_of, mesh_of
from ucformat.torch.local import LocalState
from ucformat.torch.objects import encode
from ucformat.torch.writing import Listing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.geometry.tensor import Piece, TensorInfo
    from ucformat.sources.dcp.names import Path
    from ucformat.torch.collect import Collected
    from ucformat.torch.local import Local

__all__ = ["groups_of", "listing_of", "local_state", "locals_of", "paths_of", "places_of", "without_ties"]


def local_state(state: Mapping[str, Any]) -> LocalState:
    """What this rank holds of a training state, under the names and states of the catalog."""
    found = collect(state)
    aliases, tensors = without_ties(locals_of(found))
    synchronize(t.tensor for t in tensors)  # before values are copied from devices
    objects: dict[str, Any] = {}
    for path, leaf in found.leaves.items():
        _place(objects, path, leaf.value)
    return LocalState(
        tensors=tuple(tensors),
        objects={json_key(k): encode(v, str(k)) for k, v in objects.items()},
        ranks={dotted(path): encode(leaf.value) for path, (_, leaf) in found.ranks.items()},
        groups=groups_of(found, aliases),
        aliases=aliases,
        layout=mesh_of(list(found.tensors.values())),
        engine={"name": "torch", "version": torch.__version__},
        paths=paths_of(found, aliases),
        places=places_of(found),
    )


def paths_of(found: Collected, aliases: Mapping[str, str]) -> dict[Key, tuple[Path, ...]]:
    """The paths of each tensor, by the name under which it is stored."""
    out: dict[Key, tuple[Path, ...]] = {}
    for path, key in found.keys.items():
        stored = Key(aliases.get(key.name, key.name), key.state)
        out[stored] = (*out.get(stored, ()), path)
    return out


def places_of(found: Collected) -> tuple[Place, ...]:
    """The place of each optimizer group, in the order of `groups_of`."""
    return tuple(Place(root, g.params, g.flattened) for root, groups in found.groups.items() for g in groups)


def locals_of(found: Collected) -> list[Local]:
    """What this rank has of each tensor that was found."""
    return [local_of(*found.keys[path], t) for path, t in found.tensors.items()]


def groups_of(found: Collected, aliases: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
    """The optimizer groups: parameters by the names under which they are stored, and hyper-parameters as JSON."""
    return tuple(
        {"params": [aliases.get(p, p) for n in g.params for p in [found.prefixes[root] + n]], **encode(dict(g.options))}
        for root, groups in found.groups.items()
        for g in groups
    )


def _place(objects: dict[Any, Any], path: Sequence[str | int], value: Any) -> None:
    """Put a value at its path in nested dictionaries."""
    *before, last = (int(p) if isinstance(p, int) else p for p in path)
    for part in before:
        objects = objects.setdefault(part, {})
    objects[last] = value


def without_ties(tensors: Sequence[Local]) -> tuple[dict[str, str], list[Local]]:
    """Weights that are one memory under several names: further names by the first, and each memory once."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for t in tensors:
        if t.info.state == "weight" and t.tensor.numel() and t.pieces:
            where = (t.tensor.data_ptr(), t.tensor.device, t.info.dtype, t.info.shape, tuple(t.tensor.stride()))
            name = first.setdefault(where, t.info.name)
            if name != t.info.name:
                aliases[t.info.name] = name
    kept = [t for t in tensors if t.info.state != "weight" or t.info.name not in aliases]
    return aliases, [_renamed(t, aliases) for t in kept]


def _renamed(t: Local, aliases: Mapping[str, str]) -> Local:
    if t.info.name not in aliases:
        return t
    return type(t)(type(t.info)(aliases[t.info.name], t.info.state, t.info.dtype, t.info.shape), t.pieces, t.tensor)


def listing_of(
    state: LocalState, tensors: tuple[tuple[TensorInfo, tuple[Piece, ...]], ...] | None = None, stall: float = 0.0
) -> Listing:
    """A local state without its memory; `tensors` say where they lie, if not where they are."""
    return Listing(
        tensors=tuple((t.info, t.pieces) for t in state.tensors) if tensors is None else tensors,
        objects=state.objects,
        ranks=state.ranks,
        groups=state.groups,
        aliases=state.aliases,
        layout=state.layout,
        engine=state.engine,
        paths=state.paths,
        places=state.places,
        stall=stall,
    )
