"""The local state of a rank: the pieces that it holds of each tensor, DTensor or ShardedTensor, and plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ucformat.errors import LayoutError, UsageError
from ucformat.geometry.box import Box, chunk, row_major
from ucformat.geometry.distribution import Cut, Distribution, RankMesh, order_of_cuts
from ucformat.geometry.local import Dim, IndexRun, pieces_of
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.reading.readable import GroupPlace, json_key
from ucformat.reading.state_names import GROUPS, dotted
from ucformat.storage.concurrency import gc_paused
from ucformat.torch.state.collect import collect
from ucformat.torch.state.flat import FlatPart
from ucformat.torch.state.memory import dtype_name, synchronize
from ucformat.torch.state.objects import encode
from ucformat.torch.state.sharded import is_dtensor, is_sharded_tensor
from ucformat.torch.state.subclasses import (
    RECORD,
    InnerTensor,
    local_of_dtensor,
    plain_values,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from fractions import Fraction

    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from ucformat.reading.readable import StatePath as Path
    from ucformat.torch.state.collect import CollectedState


@dataclass(slots=True, eq=False)  # frozen, it would take five times as long to make
class LocalShard:
    """The pieces of one tensor that this rank holds, in the memory of `tensor`.

    A piece's offset and strides are in elements, from the first element of `tensor`. On the host
    they follow the strides of `tensor`; on any other device they are row-major, since such tensors
    are copied to and from the host. `distribution` is that over the ranks of its mesh; None if it
    is not known. `wrapper` is the path of the wrapper that the tensor is inside, of which all
    tensors are loaded, and not cast, or none. `sharded_wrapper` says that a DTensor shards the
    wrapper, so that ranks must agree on what they have in common.
    """

    info: TensorInfo
    pieces: tuple[Piece, ...]
    tensor: torch.Tensor
    distribution: Distribution | None = None
    wrapper: str = ""
    sharded_wrapper: bool = False

    @property
    def key(self) -> Key:
        """Name and state."""
        return self.info.key

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(p.box.size for p in self.pieces) * self.info.itemsize


@dataclass(frozen=True, slots=True)
class LocalState:
    """All that one rank saves. Each tensor appears once; ranks that hold equal boxes of a tensor are replicas.

    `objects` are plain values by name, the same on all ranks that have them; `ranks` are per-rank
    values of this rank. `groups` are optimizer groups: `params`, names in order, and
    hyper-parameters. `layout` is that of the manifest. `paths` and `places` are those of
    `CheckpointMetadata`; `places` is empty, or has an item for each group. `changed` is that of
    `StateInfo`.
    """

    tensors: tuple[LocalShard, ...]
    objects: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[Key, tuple[Path, ...]] = field(default_factory=dict)
    places: tuple[GroupPlace | None, ...] = ()
    changed: Mapping[str, bytes] = field(default_factory=dict)


def pieces_in(tensor: torch.Tensor, dims: Sequence[Dim]) -> tuple[Piece, ...]:
    """Return the pieces of a local tensor."""
    return _pieces_in(tuple(dims), _strides_in(tensor))


def _strides_in(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides in elements of pieces of a local tensor; None if they are row-major wherever it is."""
    return tensor.stride() if tensor.is_cpu else None


@lru_cache(maxsize=1 << 12)
def _whole(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[Piece, ...]:
    """The pieces of a tensor that this rank holds whole."""
    return _pieces_in(tuple(map(Dim.whole, shape)), strides)


@lru_cache(maxsize=1 << 12)  # layers repeat: a model has few distinct shapes
def _pieces_in(dims: tuple[Dim, ...], strides: tuple[int, ...] | None) -> tuple[Piece, ...]:
    pieces, _ = pieces_of(dims)
    shape = tuple(d.size for d in dims)
    dense = row_major(shape)
    if strides is None or strides == dense:
        return pieces
    return tuple(Piece(p.box, _strided(p.offset, dense, shape, strides), strides) for p in pieces)


def _strided(
    offset: int, dense: Sequence[int], shape: Sequence[int], strides: Sequence[int]
) -> int:
    """The offset of an element in strided memory, from that in row-major memory."""
    at = 0
    for d, n, s in zip(dense, shape, strides, strict=True):
        at += (offset // d) % n * s
    return at


_info = lru_cache(maxsize=1 << 16)(TensorInfo)  # the next save asks for the same ones
#: The method of a local tensor by which DTensors tell DCP their chunks.
_CHUNKS = "__create_chunk_list__"
#: The pieces of local tensors of DTensors, and their distributions, by what these follow from.
_Placed = dict[tuple[object, ...], tuple[tuple[Piece, ...], Distribution | None]]


def local_of(
    name: str,
    state: str,
    tensor: torch.Tensor | InnerTensor | FlatPart,
    placed: _Placed | None = None,
) -> LocalShard:
    """Return the part of a tensor that this rank holds: the local shard of a DTensor, all of a plain tensor.

    Args:
        placed: of a state, whose tensors `collect` has checked, what is known from others; it is
            added to.
    """
    if type(tensor) is not torch.Tensor:
        if is_dtensor(tensor):
            return _of_dtensor(name, state, tensor, placed)
        if isinstance(tensor, InnerTensor):
            return _of_inner(name, state, tensor)
        if isinstance(tensor, FlatPart):
            return _of_flat(name, state, tensor)
        if is_sharded_tensor(tensor):
            return _of_sharded(name, state, tensor)
    plain = plain_values(name, tensor, checked=placed is not None)
    shape = tuple(plain.shape)
    info = _info(name, state, dtype_name(plain.dtype), shape)
    return LocalShard(info, _whole(shape, _strides_in(plain)), plain)


def mesh_of(tensors: Iterable[torch.Tensor | InnerTensor | FlatPart]) -> dict[str, int]:
    """Return the sizes of the device mesh axes over which tensors are distributed, by name."""
    meshes: dict[int, DeviceMesh] = {}
    axes: dict[str, int] = {}
    for value in tensors:
        if type(value) is torch.Tensor:  # most are
            continue
        if isinstance(value, FlatPart):
            axes |= value.layout
            continue
        tensor = value.outer if isinstance(value, InnerTensor) else value
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            meshes.pop(id(mesh), None)  # of axes of one name, that of the last tensor counts
            meshes[id(mesh)] = mesh
    for mesh in meshes.values():
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        axes |= dict(zip(names, mesh.shape, strict=True))
    return axes


def _of_dtensor(name: str, state: str, tensor: DTensor, placed: _Placed | None) -> LocalShard:
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    local = plain_values(name, local_of_dtensor(tensor), checked=placed is not None)
    placed = {} if placed is None else placed
    info = TensorInfo(name, state, dtype_name(tensor.dtype), shape)
    if (chunks := getattr(tensor._local_tensor, _CHUNKS, None)) is not None:  # noqa: SLF001
        own = _dims_of_chunk(f"{name} ({state})", shape, tuple(local.shape), chunks())
        return LocalShard(info, pieces_in(local, own), local)
    key = (id(mesh), shape, tensor.placements, tuple(local.shape), _strides_in(local))
    if key not in placed:
        if coordinate_of(mesh) is None:
            placed[key] = (), None
        else:
            dims, cuts = _dims_of(f"{name} ({state})", tensor, tuple(local.shape))
            distribution = None if cuts is None else Distribution(_rank_mesh(mesh), cuts)
            placed[key] = pieces_in(local, dims), distribution
    pieces, distribution = placed[key]
    return LocalShard(info, pieces, local, distribution)


def _dims_of_chunk(
    label: str, shape: tuple[int, ...], local: tuple[int, ...], chunks: Sequence[Any]
) -> list[Dim]:
    """The dims of a local tensor that says itself where it is, as DCP asks it, whatever the placements are."""
    boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in chunks]
    if len(boxes) != 1 or boxes[0].shape != local or not Box.whole(shape).contains(boxes[0]):
        raise LayoutError(
            f"{label}: its local tensor of {list(local)} says that it has {boxes} of {list(shape)}",
            hint="call the function of the engine that prepares state dicts for DCP again",
        )
    return [Dim.whole(n, a) for a, n in zip(boxes[0].start, local, strict=True)]


def _dims_of(label: str, tensor: DTensor, local: tuple[int, ...]) -> _DimsAndCuts:
    """The dims of the local tensor, and the cuts that make it, if known; LayoutError if its shape is another."""
    mesh, shape, at = tensor.device_mesh, tuple(tensor.shape), coordinate_of(tensor.device_mesh)
    assert at is not None  # noqa: S101 - checked by the caller
    if any(p.is_partial() for p in tensor.placements):
        raise LayoutError(
            f"{label} is partial over its mesh: each rank holds one summand",
            hint="reduce it first: tensor.redistribute(placements=[Replicate() …])",
        )
    for dims, cuts in _dims_candidates(shape, tensor.placements, mesh.shape, at):
        sizes = tuple(d.size for d in dims)
        if sizes == local or (0 in sizes and 0 in local):  # FSDP2 makes (0, 0) of an empty (0, n)
            return dims, cuts
    raise LayoutError(
        f"{label}: its local shape {local} does not follow from the placements "
        f"{tensor.placements} of {shape} at coordinate {tuple(at)} of the mesh {tuple(mesh.shape)}",
        hint="ucformat supports Shard, _StridedShard and Replicate with shards as from torch.chunk",
    )


def _of_inner(name: str, state: str, inner: InnerTensor) -> LocalShard:
    """The part of a tensor inside a wrapper that is the local tensor of a DTensor."""
    outer, label = inner.outer, f"{name} ({state})"
    local = plain_values(name, inner.tensor)
    info = TensorInfo(name, state, dtype_name(local.dtype), inner.shape)
    outer_dims, cuts = _dims_of(label, outer, tuple(local_of_dtensor(outer).shape))
    dims = [Dim.whole(n) for n in local.shape]
    even = True
    for dim, (at, ratio) in inner.along.items():
        dims[at] = _scaled(label, outer_dims[dim], ratio)
        degree = math.prod(
            n
            for p, n in zip(outer.placements, outer.device_mesh.shape, strict=True)
            if not p.is_replicate() and p.dim == dim
        )
        even = even and (ratio == 1 or outer_dims[dim].size * degree == outer.shape[dim])
    distribution = None
    if cuts is not None and even:
        inner_cuts = tuple(Cut(inner.along[c.dim][0], c.axis) for c in cuts if c.dim in inner.along)
        distribution = Distribution(_rank_mesh(outer.device_mesh), inner_cuts)
    sharded = any(not p.is_replicate() for p in outer.placements)
    return LocalShard(info, pieces_in(local, dims), local, distribution, sharded_wrapper=sharded)


def _of_flat(name: str, state: str, part: FlatPart) -> LocalShard:
    """The elements of a tensor that FSDP1 gives this rank."""
    plain = plain_values(name, part.tensor)
    info = TensorInfo(name, state, dtype_name(plain.dtype), part.shape)
    return flat_local(info, plain, part.start, part.start + plain.numel(), part.distribution)


def flat_local(
    info: TensorInfo, memory: torch.Tensor, start: int, stop: int, distribution: Distribution | None
) -> LocalShard:
    """Return elements `[start, stop)` of a flattened tensor, contiguous in memory."""
    dims = tuple(Dim.whole(n) for n in info.shape)
    return LocalShard(info, pieces_of(dims, flat=(start, stop))[0], memory, distribution)


def _scaled(label: str, dim: Dim, ratio: Fraction) -> Dim:
    """A dim of which each index is that many."""
    runs = []
    for run in dim.runs:
        edges = [n * ratio for n in (run.indices.start, run.indices.stop, run.at)]
        if any(edge.denominator != 1 for edge in edges):
            raise LayoutError(
                f"{label} has {ratio} indices for each of the sharded dim, which is cut at "
                f"{run.indices.start} and "
                f"{run.indices.stop}, within a block",
                hint="use a number of ranks that cuts between blocks, or smaller blocks",
            )
        first, stop, at = (edge.numerator for edge in edges)
        runs.append(IndexRun(range(first, stop), at))
    return Dim((dim.size * ratio).numerator, tuple(runs))


def _rank_mesh(mesh: DeviceMesh) -> RankMesh:
    if mesh not in _meshes:
        _meshes[mesh] = RankMesh.of(tuple(mesh.shape), mesh.mesh.flatten().tolist())
    return _meshes[mesh]


_meshes: WeakKeyDictionary[DeviceMesh, RankMesh] = WeakKeyDictionary()


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Return the coordinate of this rank; a mesh that another rank has pickled has that one's."""
    if not dist.is_initialized():
        at: tuple[int, ...] | None = mesh.get_coordinate()
        return at
    return _coordinate(_rank_mesh(mesh), dist.get_rank())


@lru_cache(maxsize=64)
def _coordinate(mesh: RankMesh, rank: int) -> tuple[int, ...] | None:
    return mesh.coordinate(rank)


#: The dims of a local tensor, and the cuts that make them, if known.
_DimsAndCuts = tuple[tuple[Dim, ...], tuple[Cut, ...] | None]


class _Split(NamedTuple):
    """A split of a dim over an axis of the mesh, and this rank's index `at` on it."""

    axis: int
    degree: int
    at: int
    factor: int = 1  # the parts into which the dim had been split before


def _dims_candidates(
    shape: tuple[int, ...], placements: Sequence[Any], degrees: Sequence[int], at: Sequence[int]
) -> tuple[_DimsAndCuts, ...]:
    """The candidates for the dims of the local tensor: split in the order of strided shards, or from left to right.

    With each candidate come the cuts in their order; None if they take a share of several parts.

    `_StridedShard(d, k)` means that mesh axes further to the right have split the dim into `k`
    parts before (FSDP2 over TP: TP splits first). From left to right, it takes its share of each of
    `k` parts, which is equal for even splits.
    """
    from torch.distributed.tensor.placement_types import _StridedShard  # imported then

    made = []  # from left to right
    for axis, (placement, degree, index) in enumerate(zip(placements, degrees, at, strict=True)):
        if placement.is_replicate():
            continue
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        made.append((placement.dim, _Split(axis, degree, index, factor)))
    return _candidates_of(shape, tuple(made))


@lru_cache(maxsize=1 << 12)  # layers repeat: a model has few distinct shapes
def _candidates_of(
    shape: tuple[int, ...], made: tuple[tuple[int, _Split], ...]
) -> tuple[_DimsAndCuts, ...]:
    """As `_dims_candidates`, from the split dims."""
    out: list[_DimsAndCuts] = []
    splits: dict[int, list[_Split]] = {}
    for dim, split in made:
        splits.setdefault(dim, []).append(split)
    ordered = {d: _order(of_dim) for d, of_dim in splits.items()}
    if all(o is not None for o in ordered.values()):
        cuts = tuple(Cut(d, s.axis) for d in sorted(ordered) for s in ordered[d] or ())
        out.append((tuple(_cut(n, ordered.get(d) or []) for d, n in enumerate(shape)), cuts))
    out.append((tuple(_cut(n, splits.get(d, [])) for d, n in enumerate(shape)), None))
    return tuple(out)


def _order(splits: Sequence[_Split]) -> list[_Split] | None:
    """The splits of a dim in the order in which they were made, as plain ones; None if no order fits the factors."""
    order = order_of_cuts([(s.degree, s.factor) for s in splits])
    return None if order is None else [splits[i]._replace(factor=1) for i in order]


def _cut(n: int, splits: Sequence[_Split]) -> Dim:
    dim = Dim.whole(n)
    for _, degree, index, factor in splits:
        parts = [_chunk(0, dim.size, factor, i) for i in range(factor)]
        dim = dim.take([_chunk(a, b, degree, index) for a, b in parts])
    return dim


def _chunk(begin: int, end: int, count: int, index: int) -> tuple[int, int]:
    """Part `index` of `begin:end` as `torch.chunk` splits it into `count` parts."""
    first, last = chunk(end - begin, count, index)
    return begin + first, begin + last


def _of_sharded(name: str, state: str, tensor: ShardedTensor) -> LocalShard:
    """The local shard of FSDP1's ShardedTensor; a rank has at most one."""
    shards = tensor.local_shards()
    info = TensorInfo(name, state, dtype_name(tensor.dtype), tuple(tensor.size()))
    if not shards:
        return LocalShard(info, (), torch.empty(0, dtype=tensor.dtype))
    if len(shards) > 1:
        raise UsageError(
            f"{name} ({state}): this rank holds {len(shards)} shards of one ShardedTensor",
            hint="save it with torch.distributed.checkpoint and ucformat.torch.Writer",
        )
    local, where = plain_values(name, shards[0].tensor), shards[0].metadata
    starts_and_sizes = zip(where.shard_offsets, where.shard_sizes, strict=True)
    return LocalShard(info, pieces_in(local, [Dim.whole(n, a) for a, n in starts_and_sizes]), local)


@gc_paused()
def local_state(state: Mapping[str, Any], names: Mapping[str, int] | None = None) -> LocalState:
    """Collect the local state of this rank from a training state.

    Args:
        names: as for `save`.
    """
    collected = collect(state, names or {})
    aliases, tensors = without_ties(locals_of(collected))
    synchronize(t.tensor for t in tensors)  # before values are copied from devices
    objects: dict[str, Any] = {}
    for path, leaf in collected.leaves.items():
        _place(objects, path, leaf.value)
    for path, record in records_of(collected).items():
        _place(objects, path, record)
    return LocalState(
        tensors=tuple(tensors),
        objects={json_key(k): encode(v, str(k)) for k, v in objects.items()},
        ranks={dotted(path): encode(leaf.value) for path, (_, leaf) in collected.ranks.items()},
        groups=groups_of(collected, aliases),
        aliases=aliases,
        layout=mesh_of(collected.tensors.values()),
        engine={"name": "torch", "version": torch.__version__},
        paths=paths_of(collected, aliases),
        places=places_of(collected),
    )


def paths_of(collected: CollectedState, aliases: Mapping[str, str]) -> dict[Key, tuple[Path, ...]]:
    """Return the paths of each tensor, by its stored name and state."""
    out: dict[Key, tuple[Path, ...]] = {}
    for path, key in collected.keys.items():
        stored = Key(aliases.get(key.name, key.name), key.state)
        out[stored] = (*out.get(stored, ()), path)
    return out


def places_of(collected: CollectedState) -> tuple[GroupPlace, ...]:
    """Return the place of each optimizer group in the state, in the order of `groups_of`."""
    return tuple(
        GroupPlace(root, g.params, g.flattened)
        for root, groups in collected.groups.items()
        for g in groups
    )


def locals_of(collected: CollectedState) -> list[LocalShard]:
    """Return the part of each tensor of a state that this rank holds."""
    with torch.no_grad():  # in which it is faster to ask for the local tensors of DTensors
        placed: _Placed = {}
        locals_by_path = {
            path: local_of(*collected.keys[path], t, placed)
            for path, t in collected.tensors.items()
        }
    for path in locals_by_path.keys() & collected.wrapper_of.keys():
        wrapper = dotted(collected.wrapper_of[path])
        locals_by_path[path] = replace(locals_by_path[path], wrapper=wrapper)
    return list(locals_by_path.values())


def records_of(collected: CollectedState) -> dict[Path, Mapping[str, Any]]:
    """Return the record of each wrapper of a state, by its path."""
    return {
        (*path, *names, RECORD): record
        for path, (_, contents) in collected.wrappers.items()
        for names, record in contents.records.items()
    }


def groups_of(collected: CollectedState, aliases: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
    """Return the optimizer groups: `params` by stored name, and hyper-parameters as JSON."""
    return tuple(
        {"params": [aliases.get(p, p) for n in g.params for p in [collected.prefixes[root] + n]]}
        | encode(dict(g.options), dotted((*root, GROUPS)))
        for root, groups in collected.groups.items()
        for g in groups
    )


def _place(objects: dict[Any, Any], path: Sequence[str | int], value: Any) -> None:
    """Set a value at its path in nested dictionaries."""
    *before, last = (int(p) if isinstance(p, int) else p for p in path)
    for part in before:
        objects = objects.setdefault(part, {})
    objects[last] = value


def tied_names(weights: Iterable[tuple[str, torch.Tensor, tuple[object, ...]]]) -> dict[str, str]:
    """Find weights that share their memory under several names.

    Args:
        weights: the name and the tensor of each, and what else must be equal: the global shape, an
            offset.
    """
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor, where in weights:
        first_name = first.setdefault(
            (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.stride()), *where), name
        )
        if first_name != name:
            aliases[name] = first_name
    return aliases


def without_ties(tensors: Sequence[LocalShard]) -> tuple[dict[str, str], list[LocalShard]]:
    """The first name of tied weights by each further name, and the tensors without these."""
    weights = [t for t in tensors if t.info.state == "weight" and t.tensor.numel() and t.pieces]
    if len({t.tensor.data_ptr() for t in weights}) == len(weights):
        return {}, list(tensors)
    aliases = tied_names((t.info.name, t.tensor, (t.info.shape,)) for t in weights)
    kept = [t for t in tensors if t.info.state != "weight" or t.info.name not in aliases]
    return aliases, [_renamed(t, aliases) for t in kept]


def _renamed(t: LocalShard, aliases: Mapping[str, str]) -> LocalShard:
    if t.info.name not in aliases:
        return t
    return replace(t, info=replace(t.info, name=aliases[t.info.name]))
