"""What one rank holds of a training state: the meeting point of every engine, of saving, and of loading."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.geometry.box import row_major
from ucformat.geometry.local import pieces_of
from ucformat.geometry.tensor import Piece

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ucformat.geometry.local import Dim
    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.reading.readable import Place
    from ucformat.sources.dcp.names import Path

__all__ = ["Local", "LocalState", "pieces_in"]


@dataclass(frozen=True, slots=True)
class Local:
    """The pieces of one tensor that this rank holds, in the memory of `tensor`.

    A piece's offset and strides are in elements of that memory, from the first element of `tensor` on: they are those
    of its strides on the host, and row-major on any other device, whose tensors are copied to and from the host.
    """

    info: TensorInfo
    pieces: tuple[Piece, ...]
    tensor: torch.Tensor

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
    """All that one rank saves. Each tensor appears once; ranks that hold equal boxes of one are its replicas.

    `objects` are plain values by name, the same on all ranks that have them; `ranks` are those of each rank alone.
    `groups` are optimizer groups: `params`, names in order, and hyper-parameters. `layout` is what the manifest says.
    `paths` and `places` are those of `Facts`; `places` are none, or as many as groups.
    """

    tensors: tuple[Local, ...]
    objects: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[Key, tuple[Path, ...]] = field(default_factory=dict)
    places: tuple[Place | None, ...] = ()


def pieces_in(tensor: torch.Tensor, dims: Sequence[Dim]) -> tuple[Piece, ...]:
    """The pieces of a local tensor whose dims hold these runs of the global ones."""
    pieces, _ = pieces_of(tuple(dims))
    shape = tuple(d.size for d in dims)
    dense = row_major(shape)
    strides = tensor.stride() if tensor.device.type == "cpu" else dense
    if tuple(strides) == dense:
        return pieces
    return tuple(Piece(p.box, _strided(p.offset, dense, shape, strides), tuple(strides)) for p in pieces)


def _strided(offset: int, dense: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> int:
    """The offset of an element in strided memory, from that in row-major memory."""
    at = 0
    for d, n, s in zip(dense, shape, strides, strict=True):
        at += (offset // d) % n * s
    return at
