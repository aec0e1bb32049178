"""The parts of parameters that this rank of a DeepSpeed engine has: rows or columns of AutoTP, experts of a stack."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError
from ucformat.geometry.distribution import Cut, Distribution
from ucformat.geometry.tensor import Piece
from ucformat.torch.state.local import LocalShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.geometry.distribution import RankMesh
    from ucformat.geometry.view import BoxPair


@dataclass(frozen=True, slots=True)
class CutParameter:
    """A parameter that ranks have in parts: the shape of all of it, that of this rank's part, and where the part lies.

    `dim` is the dim along which it is cut, None if there are several.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    regions: tuple[BoxPair, ...]
    dim: int | None

    def whole(self, local: LocalShard, mesh: RankMesh | None) -> LocalShard:
        """The part of the whole tensor, of that of this rank's part of it.

        Args:
            mesh: of the ranks that have the same part, and of those that have the others; None if
                no description covers them.

        Raises:
            UnsupportedError: it is a state of another shape than the parameter.
        """
        info, flat = local.info, local.distribution
        if info.shape != self.local:
            raise UnsupportedError(
                f"the optimizer state {info.state!r} of {info.name} has the shape {list(info.shape)}, that of "
                f"the parameter is {list(self.local)}: it belongs to this rank's part alone",
                hint="use an optimizer whose states have the shapes of parameters",
            )
        distribution = None
        if mesh is not None and self.dim is not None:
            distribution = on_mesh(mesh, flat, (Cut(self.dim, 1),))
        info = replace(info, shape=self.shape)
        return LocalShard(info, tuple(self.pieces(local.pieces)), local.tensor, distribution)

    def pieces(self, pieces: tuple[Piece, ...]) -> Iterator[Piece]:
        """The pieces of the whole parameter, of those of the part."""
        for piece in pieces:
            for region in self.regions:
                common = piece.box.intersect(region.box)
                if common is None:
                    continue
                inner = tuple(a - b for a, b in zip(common.start, piece.box.start, strict=True))
                at = sum(i * s for i, s in zip(inner, piece.strides, strict=True))
                moved = tuple(
                    t - b for t, b in zip(region.target.start, region.box.start, strict=True)
                )
                yield Piece(common.shift(moved), piece.offset + at, piece.strides)


def on_mesh(
    mesh: RankMesh, flat: Distribution | None, cuts: tuple[Cut, ...]
) -> Distribution | None:
    """A distribution over the first axis of a mesh, with cuts over the second."""
    if flat is None:
        return Distribution(mesh, cuts)
    if flat.mesh.size != mesh.sizes[0]:
        return None
    return Distribution(mesh, cuts, 0, flat.part, flat.position)
