"""A layout bound to a tensor list: the boxes of each tensor that each rank holds, and their offsets in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ucformat.errors import LayoutError, TensorNotFound
from ucformat.geometry.coverage import prove
from ucformat.geometry.flat_buffer import FlatBuffer, join_flat
from ucformat.geometry.local import Dim, ShardAt, local_dims, pieces_of
from ucformat.geometry.patterns import compile_regex
from ucformat.geometry.placement import Flat, axes_of
from ucformat.geometry.tensor import Key, Piece, TensorInfo, TensorList

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ucformat.geometry.box import Box
    from ucformat.geometry.placement import Mesh, Placed


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One rank's part of a tensor: an array of its own (`buffer` is None), or a slice of a flat buffer.

    `shape` is in elements and includes padding; the shape of a slice is `(size,)`. `padding` are
    pieces of the padding tensor, in the same buffer.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[Piece, ...]
    buffer: str | None = None

    @property
    def size(self) -> int:
        """Number of elements, padding included."""
        return math.prod(self.shape)

    @property
    def offset(self) -> int:
        """Index of its first element in the buffer; 0 if it is empty."""
        return min((p.offset for p in (*self.pieces, *self.padding)), default=0)


class LocalBuffer(NamedTuple):
    """One rank's flat buffer of one state: its elements, padding included, and its dtype."""

    size: int
    dtype: str


class _BufferGroup:
    """The tensors of one flat group in all states, and its geometry at each coordinate."""

    def __init__(self, name: str, flat: Flat, mesh: Mesh) -> None:
        self.name, self.flat, self.mesh = name, flat, mesh
        # by name; all states have the same geometry
        self.members: dict[str, tuple[TensorInfo, Placed]] = {}
        self.axes: tuple[str, ...] = ()
        self._joined: dict[tuple[int, ...], dict[str, FlatBuffer]] = {}

    def add(self, info: TensorInfo, placed: Placed) -> None:
        first, as_first = self.members.setdefault(info.name, (info, placed))
        if first.shape != info.shape:
            raise LayoutError(
                f"{info.key} of shape {info.shape} cannot share {self.name} with {first.key} of "
                f"shape {first.shape}",
                hint="match states of other shapes, such as a scalar step, by an earlier rule",
            )
        if (as_first.shards, as_first.holders) != (placed.shards, placed.holders):
            raise LayoutError(
                f"{info.key} and {first.key} share {self.name}, but are cut differently before it"
            )
        self.axes = tuple(a for a in self.mesh.axes if a in self.axes or a in placed.axes)

    def joined(self, coordinate: Mapping[str, int]) -> dict[str, FlatBuffer]:
        """The flat buffer of each tensor for the coordinates that differ from this one only in the flat axes."""
        at = tuple(coordinate[a] for a in self.axes)
        if at not in self._joined:
            members = [
                (name, math.prod(d.size for d in _dims(info, placed, coordinate)))
                for name, (info, placed) in self.members.items()
                if placed.holds(coordinate)
            ]
            self._joined[at] = join_flat(
                self.flat, self.mesh.degree(axes_of(self.flat)), self.name, members
            )
        return self._joined[at]


class BoundLayout:
    """A layout applied to the tensors of a tensor list. `Layout.bind` creates it and raises LayoutError."""

    def __init__(
        self, meshes: Mapping[str, Mesh], tensor_list: TensorList, placed: Mapping[Key, Placed]
    ) -> None:
        self._meshes = meshes
        self.tensor_list = tensor_list
        self._placed = placed
        self._infos = {info.key: info for info in tensor_list.tensors}
        groups: dict[tuple[str, Flat, Mesh], _BufferGroup] = {}
        self._group: dict[Key, _BufferGroup] = {}
        # buffer name and state -> the group that fills it
        by_buffer: dict[tuple[str, str], _BufferGroup] = {}
        for key, info in self._infos.items():
            placement = placed[key]
            # fail here rather than at the first rank
            _dims(info, placement, dict.fromkeys(placement.mesh.axes, 0))
            flat, mesh = placement.flat, placement.mesh
            if flat is None:
                continue
            name = self._buffer_name(info, placement, flat)
            group = groups.setdefault((name, flat, mesh), _BufferGroup(name, flat, mesh))
            group.add(info, placement)
            self._group[key] = group
            if by_buffer.setdefault((name, key.state), group) is not group:
                raise LayoutError(
                    f"{key} joins the flat buffer {name!r}, which another rule fills with "
                    "different settings",
                    hint="give the groups different names by a /regex/, or the same settings",
                )
        self._check_dtypes()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return next(iter(self._meshes.values())).size

    def keys(self, rank: int) -> Iterator[Key]:
        """The tensors that this rank holds a part of, empty shards included, in the order of the tensor list."""
        at = {mesh: mesh.coordinate(rank) for mesh in self._meshes.values()}
        return (key for key, placed in self._placed.items() if placed.holds(at[placed.mesh]))

    def pieces(self, key: Key, rank: int) -> tuple[Piece, ...]:
        """The boxes of a tensor that this rank holds, disjoint and in ascending order of offset."""
        local = self.local(key, rank)
        return local.pieces if local else ()

    def local(self, key: Key, rank: int) -> LocalTensor | None:
        """This rank's part of a tensor; None if its stage or owner is on other ranks."""
        return self._local(key, self.placed(key).mesh.coordinate(rank))

    def buffers(self, rank: int) -> dict[tuple[str, str], LocalBuffer]:
        """This rank's flat buffers, by name and state."""
        out: dict[tuple[str, str], LocalBuffer] = {}
        for key, group in self._group.items():
            at = group.mesh.coordinate(rank)
            if self._placed[key].holds(at):
                flat = group.joined(at)[key.name]
                out.setdefault(
                    (flat.name, key.state), LocalBuffer(flat.size, self._infos[key].dtype)
                )
        return out

    def placed(self, key: Key) -> Placed:
        """The placement of a tensor that results from all matching rules.

        Raises:
            TensorNotFound: the tensor is not in the tensor list.
        """
        try:
            return self._placed[key]
        except KeyError:
            raise TensorNotFound(f"the layout is not bound to {Key(*key)}") from None

    def reduction(self, key: Key) -> str | None:
        """The reduction that combines the values of a `partial` tensor; None for any other tensor."""
        partial = self.placed(key).partial
        return partial.reduction if partial else None

    def padding(self, key: Key) -> TensorInfo | None:
        """The padding tensor of a tensor: the rows that `pad_to` appends to its padded dim.

        None if nothing is padded.
        """
        placed, info = self.placed(key), self._infos[key]
        for shard in placed.shards:
            if shard.pad_to and (extra := -info.shape[shard.dim] % shard.pad_to):
                shape = list(info.shape)
                shape[shard.dim] = extra
                return TensorInfo(*key.padding, info.dtype, tuple(shape))
        return None

    def prove(self) -> None:
        """Prove that the pieces of all ranks cover every tensor once, not counting replicas.

        Coordinates that hold the same boxes are proved once, and so are tensors of the same shape
        and placement, and the states that share the geometry of a flat buffer.
        """
        done: set[tuple[object, object]] = set()
        for key, info in self._infos.items():
            placed, group = self._placed[key], self._group.get(key)
            proved_as = (info.shape, placed) if group is None else (info.name, id(group))
            if proved_as in done:
                continue
            done.add(proved_as)
            own = (*placed.axes, *(axes_of(group.flat) if group else ()))
            # Axes that shard only other tensors of the group still move the bounds of this one in
            # the flat buffer.
            other = tuple(a for a in group.axes if a not in own) if group else ()
            for base in placed.mesh.coordinates(other):
                prove(info, self._boxes(key, placed, base))

    def _boxes(
        self, key: Key, placed: Placed, base: Mapping[str, int]
    ) -> Iterator[tuple[int, Box]]:
        """The boxes of all coordinates that differ from `base` only in the axes that shard this tensor."""
        mesh, group = placed.mesh, self._group.get(key)
        for at in mesh.coordinates(placed.axes, base):
            if not placed.holds(at):
                continue
            holders: Iterable[Mapping[str, int]] = (at,)
            if group is not None:  # only a few of a thousand data-parallel ranks hold a part of it
                flat, axes = group.joined(at)[key.name], axes_of(group.flat)
                holders = [mesh.move(at, axes, i) for i in flat.holders(key.name)]
            for holder in holders:
                for piece in self.pieces(key, rank := mesh.rank(holder)):
                    yield rank, piece.box

    def _local(self, key: Key, at: Mapping[str, int]) -> LocalTensor | None:
        placed, group = self._placed[key], self._group.get(key)
        if not placed.holds(at):
            return None
        dims = _dims(self._infos[key], placed, at)
        if group is None:
            return LocalTensor(tuple(d.size for d in dims), *pieces_of(dims))
        flat = group.joined(at)[key.name]
        index = group.mesh.index(axes_of(group.flat), at)
        start, stop, offset = flat.part_on(key.name, index)
        pieces = pieces_of(dims, (start, stop), offset, flat.name)
        return LocalTensor((stop - start,), *pieces, flat.name)

    def _buffer_name(self, info: TensorInfo, placed: Placed, flat: Flat) -> str:
        """`flat:<group>`, or `flat:<mesh>:<group>` if the layout has several meshes."""
        prefix = next(f"flat:{n}:" for n, m in self._meshes.items() if m is placed.mesh)
        prefix = prefix if len(self._meshes) > 1 else "flat:"
        match flat.group:
            case "all":
                return prefix + "all"
            case "tensor":
                return prefix + info.name
            case "optimizer":
                if info.name in self.tensor_list.groups:
                    return f"{prefix}{self.tensor_list.groups[info.name]}"
                raise LayoutError(
                    f"{info.key} is in no optimizer group, but {placed.rules[-1]} joins it to "
                    "its group's flat buffer",
                    hint="match frozen parameters by an earlier rule, or use another group",
                )
            case regex:
                match = compile_regex(regex).fullmatch(info.name)
                if match is None or match[1] is None:
                    raise LayoutError(
                        f"the flat group {regex} of {placed.rules[-1]} does not match {info.key}"
                    )
                return prefix + match[1]

    def _check_dtypes(self) -> None:
        first: dict[tuple[str, str], TensorInfo] = {}
        for key, group in self._group.items():
            info = self._infos[key]
            other = first.setdefault((group.name, key.state), info)
            if other.dtype != info.dtype:
                raise LayoutError(
                    f"{key} is {info.dtype}, but shares the flat buffer {group.name!r} with "
                    f"{other.key}, {other.dtype}",
                    hint="give each dtype a flat group of its own",
                )


def _dims(info: TensorInfo, placed: Placed, at: Mapping[str, int]) -> tuple[Dim, ...]:
    mesh = placed.mesh
    cuts = tuple(
        ShardAt(s, mesh.degree(axes_of(s)), mesh.index(axes_of(s), at)) for s in placed.shards
    )
    try:
        return local_dims(info.shape, cuts)
    except LayoutError as e:
        rules = ", ".join(str(r) for r in placed.rules if any(s in r.place for s in placed.shards))
        raise type(e)(f"{info.key}: {e.message}, in {rules}", hint=e.hint) from e
