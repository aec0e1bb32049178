"""The encoding of described tensors: metadata and columns of a sidecar (docs/spec.md, section 7)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import LayoutError
from ucformat.format.described import Described, DescribedRow, kind_of, without_position
from ucformat.format.distribution import Cut, Distribution, RankMesh
from ucformat.format.stored_tensors import StoredTensors
from ucformat.schema import ITEMSIZE
from ucformat.schema.documents import DescribedDoc, DistributionDoc, MeshDoc
from ucformat.schema.limits import MAX_RANKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ucformat.schema.tensors import TensorTable

#: Columns of the sidecar, with a row for each described tensor; and one with a row for each dim of these.
COLUMNS = ("described", "distribution", "writer", "position")
DESCRIBED_TILE = "described_tile"


def describe(described: Described) -> DescribedDoc:
    """Return the metadata of described tensors."""
    numbers = _numbers(described)
    meshes = {mesh: n for n, mesh in enumerate(dict.fromkeys(d.mesh for d in numbers))}
    return DescribedDoc(
        tensors=len(described.rows),
        folder=described.folder,
        meshes=tuple(MeshDoc(sizes=m.sizes, first=m.first, strides=m.strides, ranks=m.listed) for m in meshes),
        distributions=tuple(
            DistributionDoc(mesh=meshes[d.mesh], cuts=d.cuts, flat=d.flat, part=d.part) for d in numbers
        ),
    )


def encode_rows(described: Described) -> dict[str, NDArray[np.int64]]:
    """Return the columns of described tensors."""
    numbers = _numbers(described)
    table = [
        (r.tensor, numbers[without_position(r.distribution)], r.writer, r.distribution.position) for r in described.rows
    ]
    columns = dict(zip(COLUMNS, np.array(table, np.int64).reshape(-1, len(COLUMNS)).T, strict=True))
    return {**columns, DESCRIBED_TILE: np.array([t for r in described.rows for t in r.tile], np.int64)}


def _numbers(described: Described) -> dict[Distribution, int]:
    """The number of each distribution, without positions in flat buffers."""
    distinct = dict.fromkeys(r.distribution for r in described.rows)
    return {d: n for n, d in enumerate(dict.fromkeys(map(without_position, distinct)))}


def decode_rows(doc: DescribedDoc, columns: Mapping[str, NDArray[np.int64]], tensors: TensorTable) -> Described:
    """Return the described tensors of a sidecar."""
    meshes = list(map(_mesh, doc.meshes))
    if max((d.mesh for d in doc.distributions), default=-1) >= len(meshes):
        raise LayoutError("a distribution has a mesh that is not listed")
    known = [
        Distribution(meshes[d.mesh], tuple(Cut(*cut) for cut in d.cuts), d.flat, d.part) for d in doc.distributions
    ]
    rows, kinds, tiles, end = [], [], columns[DESCRIBED_TILE].tolist(), 0
    of_kind = [(k.shape, ITEMSIZE[k.dtype]) for k in tensors.kinds]
    last: tuple[Any, ...] = ()  # rows of a group follow each other; most of 200,000 are of a few groups
    for tensor, number, writer, position in zip(*(columns[name].tolist() for name in COLUMNS), strict=True):
        shape, itemsize = of_kind[tensors.kind[tensor]]
        begin, end = end, end + len(shape)
        tile = tuple(tiles[begin:end])
        if last != (number, shape, itemsize, tile):
            if not 0 <= number < len(known):
                raise LayoutError("a tensor has a distribution that is not listed")
            last, d = (number, shape, itemsize, tile), known[number]
            kind = kind_of(d, shape, itemsize, tile)
        rows.append(DescribedRow(tensor, replace(d, position=position) if position else d, writer, tile))
        kinds.append(kind)
    return Described(rows, StoredTensors(tensors), doc.folder, kinds)


def _mesh(doc: MeshDoc) -> RankMesh:
    """The mesh of a document; LayoutError if it is impossible."""
    size = math.prod(doc.sizes)
    listed = len(doc.ranks) == size and not doc.strides
    if size > MAX_RANKS or not (listed or (len(doc.strides) == len(doc.sizes) and not doc.ranks)):
        raise LayoutError(f"a mesh of the sizes {doc.sizes} is impossible")
    mesh = RankMesh(doc.sizes, doc.first, doc.strides, doc.ranks)
    if int(mesh.ranks.max()) >= MAX_RANKS or len(np.unique(mesh.ranks)) < size:
        raise LayoutError(f"a mesh of the sizes {doc.sizes} has a rank twice, or one above {MAX_RANKS}")
    return mesh
