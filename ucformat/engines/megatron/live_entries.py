"""The entries of Megatron's sharded state dicts: which boxes this rank holds of which tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from ucformat.engines.megatron.live_fsdp import ShardedChunk, is_sharded_chunk
from ucformat.engines.megatron.names import LOCAL, Bucket, StateKey, name_of, split_state_key
from ucformat.errors import UnsupportedError, UsageError
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key
from ucformat.torch.state.subclasses import plain_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor that this rank holds, in the memory of `view`, which has the shape of the box.

    Attributes:
        shape: of the whole tensor, with the padding of a vocabulary.
        resizable: whether Megatron also loads the tensor where it is padded to another size.
    """

    key: Key
    shape: tuple[int, ...]
    box: Box
    view: torch.Tensor
    resizable: bool = False


@dataclass
class StateEntries:
    """What a sharded state dict consists of.

    Attributes:
        tensors: the regions of each sharded tensor or factory, by path.
        owners: the tensors from which these were made: parameters of the model, or states.
        buckets: sharded tensors of flat buckets, by path.
        objects: sharded objects, by path.
        optimizers: live optimizers, by path.
        plain: the values that are the same on all ranks.
        items: the sharded tensors and factories themselves, by path.
        built: what factories have built, by path.
        local: whether norms have names of their own, as in the local specification of layers.
        chunks: model chunks under Megatron-FSDP, in whose regions there is no memory.
    """

    tensors: dict[Path, list[Region]] = field(default_factory=dict)
    owners: dict[Path, torch.Tensor] = field(default_factory=dict)
    buckets: dict[Path, Any] = field(default_factory=dict)
    objects: dict[Path, Any] = field(default_factory=dict)
    optimizers: dict[Path, Any] = field(default_factory=dict)
    plain: dict[Any, Any] = field(default_factory=dict)
    items: dict[Path, Any] = field(default_factory=dict)
    built: dict[Path, Any] = field(default_factory=dict)
    local: bool = False
    chunks: list[ShardedChunk] = field(default_factory=list)

    @cached_property
    def weights(self) -> WeightRegions:
        """The regions of the model's weights, by their memory."""
        regions = (r for of_entry in self.tensors.values() for r in of_entry)
        weights = (r for r in regions if r.key.state == "weight")
        return WeightRegions(weights, self.owners.values())


class WeightRegions:
    """The regions of weights, found by memory: an entry may be a detached tensor, or a part of a parameter."""

    def __init__(self, regions: Iterable[Region], owners: Iterable[torch.Tensor]) -> None:
        placed = ((*_address(r.view), r) for r in regions if r.view.numel())
        self._placed = sorted(placed, key=itemgetter(0, 1))
        self._addresses = [at[:2] for at in self._placed]
        self._owners = {_address(owner) for owner in owners if owner.numel()}

    def is_saved_otherwise(self, parameter: torch.Tensor) -> bool:
        """Whether it is in the state dict, but no region in its memory: a factory copies what it saves of it."""
        return _address(parameter) in self._owners and not self.of(parameter)

    def of(self, parameter: torch.Tensor) -> list[Region]:
        """The regions in the memory of a parameter, in its order; none if it is not in the state dict."""
        storage, begin = _address(parameter)
        end = begin + parameter.numel() * parameter.element_size()
        first, last = (bisect_left(self._addresses, (storage, at)) for at in (begin, end))
        return [region for *_, region in self._placed[first:last]]


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    """The storage of a tensor, and the byte of it at which the tensor begins."""
    storage = tensor.untyped_storage()
    # that of a tensor without memory has no address
    identity = storage._cdata if tensor.is_meta else storage.data_ptr()  # noqa: SLF001
    return identity, tensor.storage_offset() * tensor.element_size()


def read_entries(sharded_state_dict: Mapping[Any, Any], *, local: bool = False) -> StateEntries:
    """Sort the entries of a sharded state dict, as `dist_checkpointing.save` takes it, and of live optimizers.

    Args:
        local: as in `StateEntries`, if it is known.

    Raises:
        UsageError: an entry has no data.
        UnsupportedError: an optimizer's entry is of a format that is not known.
    """
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    entries = StateEntries()
    leaves: list[tuple[Path, Any]] = []
    for path, value in _leaves((), sharded_state_dict):
        if is_sharded_chunk(value):
            entries.chunks.append(chunk := ShardedChunk(value))
            leaves += _leaves(path, chunk.state)
        else:
            leaves.append((path, value))
    sharded = [(p, v) for p, v in leaves if isinstance(v, ShardedTensor | ShardedTensorFactory)]
    entries.local = local = local or any(_is_unfused(path, value.key) for path, value in sharded)
    for path, value in leaves:
        match value:
            case ShardedTensor() if isinstance(split_state_key(value.key), Bucket):
                entries.buckets[path] = value
            case ShardedTensor():
                entries.tensors[path] = list(_regions(value, local=local))
                entries.owners[path], entries.items[path] = value.data, value
            case ShardedTensorFactory():
                entries.built[path] = value.build()
                built = [v for _, v in _leaves((), entries.built[path])]
                entries.tensors[path] = [r for v in built for r in _regions(v, local=local)]
                entries.owners[path], entries.items[path] = value.data, value
            case ShardedObject():
                entries.objects[path] = value
            case MegatronOptimizer():
                entries.optimizers[path] = value
            case LocalNonpersistentObject():
                pass
            case _:
                place(entries.plain, path, value)
    return entries


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """The values of nested mappings, and of lists that contain entries, by path; a plain list is one value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
    elif isinstance(value, list) and _holds_entries(value):
        for number, inner in enumerate(value):
            yield from _leaves((*path, number), inner)
    else:
        yield path, value


def _holds_entries(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_entries, value.values()))
    if isinstance(value, list):
        return any(map(_holds_entries, value))
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    is_entry: bool = isinstance(value, ShardedBase | LocalNonpersistentObject)
    return is_entry


def place(into: dict[Any, Any], path: Path, value: Any) -> None:
    """Put a value at its path in nested dictionaries."""
    *above, last = path
    for part in above:
        into = into.setdefault(part, {})
    into[last] = value


def _is_unfused(path: Path, key: str) -> bool:
    """Whether a norm has a key that names the linear layer after it, in which it is not."""
    name = str(path[-1]) if path else ""
    return any(f".{fused}" in key and f".{unfused}" in f".{name}" for fused, unfused in LOCAL)


def _regions(entry: Any, *, local: bool) -> Iterator[Region]:
    """The regions of a sharded tensor: one for each layer and expert of which it has a part."""
    parsed = split_state_key(entry.key)
    if not isinstance(parsed, StateKey):
        raise UnsupportedError(
            f"{entry.key} is an optimizer's tensor that ucformat does not know",
            hint="put the optimizer itself in its place in the state",
        )
    if entry.data is None:
        raise UsageError(f"{entry.key} has no data", hint="pass the state dict of a live model")
    if entry.flattened_range is not None:
        raise UnsupportedError(
            f"{entry.key} is a flat range, which Megatron-Core itself does not save any more",
            hint="put the optimizer itself in its place in the state",
        )
    name = name_of(parsed.key, local=local)
    data = entry.data.detach()
    data = data if data.is_meta else plain_values(entry.key, data)
    local_shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
    start, whole = tuple(entry.global_offset), tuple(entry.global_shape)
    view, n = data[(None,) * entry.prepend_axis_num], name.leading
    for index in product(*map(range, local_shape[:n])):
        at = tuple(a + i for a, i in zip(start, index, strict=False))
        box, shape = Box(start[n:], local_shape[n:]), whole[n:]
        if name.half is not None:  # both halves of a gated projection have entries of their own
            rows = shape[0]
            shape = (2 * rows, *shape[1:])
            box = box.shift((name.half * rows, *(0 for _ in shape[1:])))
        yield Region(
            Key(name.at(at), parsed.state),
            shape,
            box,
            view[index],
            bool(entry.allow_shape_mismatch),
        )


def loaded_tensor(entries: StateEntries, path: Path) -> torch.Tensor:
    """The tensor of an entry after its regions are filled: that which it was made of, or what a factory merges."""
    owner = entries.owners[path]
    storage = owner.untyped_storage().data_ptr()
    if all(r.view.untyped_storage().data_ptr() == storage for r in entries.tensors[path]):
        return owner
    merged: torch.Tensor = entries.items[path].merge_fn(_data_of(entries.built[path]))
    with torch.no_grad():
        owner.copy_(merged)
    return owner


def _data_of(built: Any) -> Any:
    if isinstance(built, Mapping):
        return {key: _data_of(inner) for key, inner in built.items()}
    return [_data_of(inner) for inner in built] if isinstance(built, list) else built.data


def rebuilt(value: Any, put: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A state dict of the same structure, without plain values and live optimizers.

    Args:
        put: the value in the place of an entry.
    """
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    if isinstance(value, Mapping):
        pairs = ((key, rebuilt(inner, put, (*path, key))) for key, inner in value.items())
        return {key: inner for key, inner in pairs if inner is not _NOTHING}
    if isinstance(value, list) and _holds_entries(value):
        return [rebuilt(inner, put, (*path, number)) for number, inner in enumerate(value)]
    if isinstance(value, LocalNonpersistentObject):
        return value.unwrap()
    return put(path, value) if isinstance(value, ShardedBase) else _NOTHING


def at_path(values: Any, path: Path) -> Any:
    """The value at a path in nested dictionaries and lists."""
    for part in path:
        values = values[part]
    return values


def is_of_bucket(value: Any) -> bool:
    """Whether there is a tensor of a flat bucket in a sharded state dict."""
    if isinstance(value, Mapping):
        return any(map(is_of_bucket, value.values()))
    if isinstance(value, list):
        return any(map(is_of_bucket, value))
    key = getattr(value, "key", None)
    return isinstance(key, str) and isinstance(split_state_key(key), Bucket)


_NOTHING = object()


def joined_regions(regions: list[Region]) -> list[Region]:
    """Regions of one tensor, those joined that follow each other both in it and in memory: halves that are not cut."""
    out: list[Region] = []
    for region in sorted(regions, key=lambda r: r.box):
        last = out[-1] if out else None
        if last is not None and (both := _joined(last, region)) is not None:
            out[-1] = both
        else:
            out.append(region)
    return out


def _joined(a: Region, b: Region) -> Region | None:
    if not a.box.shape or a.box.shape[1:] != b.box.shape[1:] or a.box.start[1:] != b.box.start[1:]:
        return None
    if a.box.start[0] + a.box.shape[0] != b.box.start[0] or not follows(a.view, b.view):
        return None
    shape = (a.box.shape[0] + b.box.shape[0], *a.box.shape[1:])
    view = a.view.as_strided(shape, a.view.stride())
    return replace(a, box=Box(a.box.start, shape), view=view)


def follows(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a contiguous tensor follows another one in memory."""
    return bool(
        a.is_contiguous()
        and b.is_contiguous()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
    )
