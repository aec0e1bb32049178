"""The sidecar: the extents of a packed checkpoint as columns of a safetensors file (docs/spec/format.md, "Sidecar").

Decoding a sidecar checks all columns; `Extent` objects are created only for the tensors that are
read.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import zlib
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load

from ucformat.errors import (
    IntegrityError,
    LayoutError,
    UnsafeError,
    UnsupportedError,
    UpgradeNeeded,
    UsageError,
)
from ucformat.format.chunking import Tiling
from ucformat.format.described import Described, DescribedRow, kind_of, without_position
from ucformat.format.stored_tensors import StoredTensors
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.tensor import Block, Extent
from ucformat.schema.documents import DescribedDoc, DistributionDoc, MeshDoc
from ucformat.schema.limits import MAX_RANKS, MAX_TILES
from ucformat.schema.manifest import EXTENTS, PACKED
from ucformat.schema.values import loads, parsed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import Tiles
    from ucformat.schema.tensors import TensorTable

    Column = NDArray[np.int64]


# The encoding of described tensors: metadata and columns of a sidecar (docs/spec/format.md, section 7).


#: Columns of the sidecar, with a row for each described tensor; and one with a row for each dim of
#: these.
COLUMNS = ("described", "distribution", "writer", "position")
DESCRIBED_TILE = "described_tile"


def describe(described: Described) -> DescribedDoc:
    """Return the metadata of described tensors."""
    numbers = _numbers(described)
    meshes = {mesh: n for n, mesh in enumerate(dict.fromkeys(d.mesh for d in numbers))}
    return DescribedDoc(
        tensors=len(described.rows),
        folder=described.folder,
        meshes=tuple(
            MeshDoc(sizes=m.sizes, first=m.first, strides=m.strides, ranks=m.listed) for m in meshes
        ),
        distributions=tuple(
            DistributionDoc(mesh=meshes[d.mesh], cuts=d.cuts, flat=d.flat, part=d.part)
            for d in numbers
        ),
    )


def encode_rows(described: Described) -> dict[str, NDArray[np.int64]]:
    """Return the columns of described tensors."""
    numbers = _numbers(described)
    table = [
        (r.tensor, numbers[without_position(r.distribution)], r.writer, r.distribution.position)
        for r in described.rows
    ]
    columns = dict(zip(COLUMNS, np.array(table, np.int64).reshape(-1, len(COLUMNS)).T, strict=True))
    return {
        **columns,
        DESCRIBED_TILE: np.array([t for r in described.rows for t in r.tile], np.int64),
    }


def _numbers(described: Described) -> dict[Distribution, int]:
    """The number of each distribution, without positions in flat buffers."""
    distinct = dict.fromkeys(r.distribution for r in described.rows)
    return {d: n for n, d in enumerate(dict.fromkeys(map(without_position, distinct)))}


def decode_rows(
    doc: DescribedDoc, columns: Mapping[str, NDArray[np.int64]], tensors: TensorTable
) -> Described:
    """Return the described tensors of a sidecar."""
    meshes = list(map(_mesh, doc.meshes))
    if max((d.mesh for d in doc.distributions), default=-1) >= len(meshes):
        raise LayoutError("a distribution has a mesh that is not listed")
    distributions = [
        Distribution(meshes[d.mesh], tuple(Cut(*cut) for cut in d.cuts), d.flat, d.part)
        for d in doc.distributions
    ]
    # otherwise the order of files, in which equal ones are one, would be another by their numbers
    if len(set(meshes)) < len(meshes) or len(set(distributions)) < len(distributions):
        raise LayoutError("a mesh or distribution is listed twice")
    rows, kinds, tiles, end = [], [], columns[DESCRIBED_TILE].tolist(), 0
    of_kind = [(k.shape, k.unit) for k in tensors.kinds]
    # rows of a group follow each other; most of 200,000 are of a few groups
    last: tuple[Any, ...] = ()
    for tensor, number, writer, position in zip(
        *(columns[name].tolist() for name in COLUMNS), strict=True
    ):
        shape, itemsize = of_kind[tensors.kind[tensor]]
        begin, end = end, end + len(shape)
        tile = tuple(tiles[begin:end])
        if last != (number, shape, itemsize, tile):
            if not 0 <= number < len(distributions):
                raise LayoutError("a tensor has a distribution that is not listed")
            last, d = (number, shape, itemsize, tile), distributions[number]
            kind = kind_of(d, shape, itemsize, tile)
        rows.append(
            DescribedRow(tensor, replace(d, position=position) if position else d, writer, tile)
        )
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
        raise LayoutError(
            f"a mesh of the sizes {doc.sizes} has a rank twice, or one above {MAX_RANKS}"
        )
    if RankMesh.of(doc.sizes, mesh.ranks.reshape(-1).tolist()) != mesh:
        raise LayoutError(f"a mesh of the sizes {doc.sizes} is spelled otherwise than it must be")
    return mesh


#: In `block_offset`: no checksum covers the extent.
NO_BLOCK = -1
#: In `crc32c`: the checksum is stored after the block; PLACED: it also covers the block's file and
#: offset.
FOLLOWS, PLACED = -1, -2

# one for each extent
_ROWS = ("tensor", "file", "offset", "block_offset", "block_nbytes", "crc32c")
_DIMS = ("start", "shape", "strides")  # one for each dim of each extent
_TILE = "tile"  # likewise, if any extent is tiled
# columns that grow from row to row, packed as differences
_STEPS = {"tensor", "file", "offset", "block_offset"}

_MAX_ROWS = 1 << 27  # rows of a column: bounds the memory of a reader
_INFLATION = 1032  # the most bytes that one byte of a deflate stream can produce
_LEVEL = 6


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Extents as columns of int64, with a row for each extent, in any order.

    `start`, `shape`, `strides` and `tile` have a row for each dim of each extent, one extent after
    another.

    Attributes:
        tensor: the number of the tensor in the manifest.
        file: the number of the file in the list of files.
        offset: the byte of the file at which the first element begins.
        block_offset: the first byte under the checksum; NO_BLOCK if there is none.
        block_nbytes: the number of bytes under the checksum.
        crc32c: the checksum; FOLLOWS or PLACED if it is stored after these bytes.
        start: the first index of the box, in elements.
        shape: the shape of the box, in elements.
        strides: bytes from an element to the next; of a tiled extent 0, except for the last dim,
            which has the itemsize.
        tile: the edges of the tiles (see `Tiling`) in elements, each stored with its checksum; 0 if
            it is not tiled.
    """

    tensor: Column
    file: Column
    offset: Column
    block_offset: Column
    block_nbytes: Column
    crc32c: Column
    start: Column
    shape: Column
    strides: Column
    tile: Column = field(default_factory=lambda: np.zeros(0, np.int64))  # empty: no extent is tiled

    def __post_init__(self) -> None:
        if not len(self.tile):
            object.__setattr__(self, "tile", np.zeros_like(self.start))

    def __len__(self) -> int:
        return len(self.tensor)


class Sidecar:
    """The checked extents of a checkpoint, of which objects are made for one tensor at a time."""

    def __init__(
        self, columns: Columns, files: Sequence[str], ndims: Column, described: Described | None
    ) -> None:
        self.columns, self.described = columns, described
        listed = set(files)
        self.files = (
            *files,
            *(f for f in (described.files if described else ()) if f not in listed),
        )
        self._ndims = ndims
        self._order = np.argsort(columns.tensor, kind="stable")
        self._bounds = np.searchsorted(columns.tensor[self._order], np.arange(len(ndims) + 1))
        self._ends = np.cumsum(ndims[columns.tensor])
        #: For each row, whether the extent is stored as tiles, each with a checksum.
        self.tiled = _any(columns.tile > 0, columns.tensor, ndims)

    def tiles_in(self, file: str) -> dict[int, tuple[int, Box]]:
        """The tiles of a file, by their offsets: the number of the tensor, and the box of the tile."""
        out: dict[int, tuple[int, Box]] = {}
        if (described := self.described) is not None and file in described.files:
            rank = int(described.ranks[described.files.index(file)])
            for tensor, box, offset in described.written_by(rank):
                out |= _placed_tiles(tensor, described.tiling(tensor), box, offset)
        c = self.columns
        number = self.files.index(file)
        for row in np.flatnonzero(c.file == number).tolist():
            tensor, box, tiling = self._stored(row)
            out |= _placed_tiles(tensor, tiling, box, int(c.offset[row]))
        return out

    def _stored(self, row: int) -> tuple[int, Box, Tiling]:
        """The tensor of an extent of tiles, or of one, its box, and its tiles."""
        c, end = self.columns, int(self._ends[row])
        tensor = int(c.tensor[row])
        dims = slice(end - int(self._ndims[tensor]), end)
        start, shape, tile = (tuple(a[dims].tolist()) for a in (c.start, c.shape, c.tile))
        if not self.tiled[row]:
            tile = tuple(a + n for a, n in zip(start, shape, strict=True))
        itemsize = int(c.strides[end - 1]) if shape else int(c.block_nbytes[row])
        return tensor, Box(start, shape), Tiling(tile, itemsize)

    def below(self, prefix: str) -> Sidecar:
        """The same extents in files whose keys begin with a prefix."""
        out = copy(self)
        out.files = tuple(prefix + file for file in self.files)
        if self.described is not None:
            out.described = self.described.in_folder(prefix + self.described.folder)
        return out

    @property
    def features(self) -> tuple[str, ...]:
        """What a reader of it must implement, as `requires` names it."""
        placed = self.tiled | ((self.columns.block_offset >= 0) & (self.columns.crc32c == PLACED))
        packed = (PACKED,) if self.described or placed.any() else ()
        return packed if placed.all() else (*packed, EXTENTS)

    def tile_sizes(self, row: int) -> Iterator[int]:
        """Bytes of each tile of a tiled extent, without checksums, in the order of the file."""
        _, whole, tiling = self._stored(row)
        return (box.size * tiling.itemsize for box in tiling.boxes(whole))

    def extents(self, number: int, within: Box | None = None) -> tuple[Extent | Tiles, ...]:
        """The extents of a tensor, or only those that intersect a box of it."""
        if self.described and number in self.described:
            return tuple(self.described.extents(number, within))
        c = self.columns
        rows = self._order[self._bounds[number] : self._bounds[number + 1]]
        ndim = int(self._ndims[number])
        of_row = (self.tiled, c.file, c.offset, c.block_offset, c.block_nbytes, c.crc32c)
        of_dim = (c.start, c.shape, c.strides, c.tile)
        values: Iterable[tuple[Any, ...]]
        if len(rows) == 1:  # as of small tensors, of which there may be many
            row = int(rows[0])
            end = int(self._ends[row])
            by_dim = [tuple(a[end - ndim : end].tolist()) for a in of_dim]
            if within is not None and not _meet(by_dim[0], by_dim[1], within):
                return ()
            values = [(*(int(a[row]) for a in of_row), *by_dim)]
        else:
            dims = (self._ends[rows] - ndim)[:, None] + np.arange(ndim)
            if within is not None:
                start, stop = c.start[dims], c.start[dims] + c.shape[dims]
                meets = (
                    (start < np.array(within.stop, np.int64))
                    & (stop > np.array(within.start, np.int64))
                ).all(axis=1)
                rows, dims = rows[meets], dims[meets]
            values = zip(
                *(a[rows].tolist() for a in of_row),
                *(map(tuple, a[dims].tolist()) for a in of_dim),
                strict=True,
            )
        out: list[Extent | Tiles] = []
        for tiled, file, offset, at, nbytes, crc, start, shape, strides, tile in values:
            if tiled:
                out += Tiling(tile, strides[-1]).runs(
                    Box(start, shape), self.files[file], offset, within
                )
                continue
            block = None if at == NO_BLOCK else block_of(at, nbytes, crc)
            out.append(Extent(Box(start, shape), self.files[file], offset, strides, block))
        return tuple(out)


def _meet(start: Iterable[int], shape: Iterable[int], within: Box) -> bool:
    """Whether an extent and a box may have elements in common."""
    dims = zip(start, shape, within.start, within.stop, strict=True)
    return all(a < stop and a + n > begin for a, n, begin, stop in dims)


def _placed_tiles(tensor: int, tiling: Tiling, box: Box, offset: int) -> dict[int, tuple[int, Box]]:
    """The tiles of a box, by their offsets."""
    return {begin: (tensor, tile) for begin, tile in tiling.placed(box, offset)}


def block_of(offset: int, nbytes: int, crc32c: int) -> Block:
    """The block of a row that has one."""
    return Block(offset, nbytes, None if crc32c < 0 else crc32c, placed=crc32c == PLACED)


def encode(extents: Sequence[Iterable[Extent]]) -> bytes:
    """Encode the extents of each tensor, in the order of the manifest, as the file of a sidecar."""
    listed = [(number, e) for number, of_tensor in enumerate(extents) for e in of_tensor]
    files: dict[str, int] = {}
    blocks = [
        (NO_BLOCK, 0, 0)
        if b is None
        else (
            b.offset,
            b.nbytes,
            (PLACED if b.placed else FOLLOWS) if b.crc32c is None else b.crc32c,
        )
        for b in (e.block for _, e in listed)
    ]
    columns = Columns(
        tensor=_column(number for number, _ in listed),
        file=_column(files.setdefault(e.file, len(files)) for _, e in listed),
        offset=_column(e.offset for _, e in listed),
        block_offset=_column(b[0] for b in blocks),
        block_nbytes=_column(b[1] for b in blocks),
        crc32c=_column(b[2] for b in blocks),
        start=_column(chain.from_iterable(e.box.start for _, e in listed)),
        shape=_column(chain.from_iterable(e.box.shape for _, e in listed)),
        strides=_column(chain.from_iterable(e.strides for _, e in listed)),
    )
    return encode_columns(columns, list(files))


def tiled_columns(rows: Iterable[tuple[int, int, int, Box, Tiling]]) -> Columns:
    """Extents that are stored tile by tile: the tensor, the file, the first byte, the box, and the tiles of each.

    One that is a single tile is recorded as a block.
    """
    listed = list(rows)
    tensor, file, offset, boxes, tilings = zip(*listed, strict=True) if listed else ((),) * 5
    single = [t.count(box) == 1 for box, t in zip(boxes, tilings, strict=True)]
    stored = list(zip(boxes, tilings, single, strict=True))
    is_block, at = np.array(single, np.bool_), _column(offset)
    nbytes = _column(box.size * t.itemsize for box, t, _ in stored)
    return Columns(
        tensor=_column(tensor),
        file=_column(file),
        offset=at,
        block_offset=np.where(is_block, at, NO_BLOCK),
        block_nbytes=np.where(is_block, nbytes, 0),
        crc32c=np.where(is_block, PLACED, 0),
        start=_column(chain.from_iterable(box.start for box in boxes)),
        shape=_column(chain.from_iterable(box.shape for box in boxes)),
        strides=_column(
            chain.from_iterable(
                row_major(box.shape, t.itemsize)
                if block
                else (0,) * (len(t.tile) - 1) + (t.itemsize,)
                for box, t, block in stored
            )
        ),
        tile=_column(
            chain.from_iterable((0,) * len(t.tile) if block else t.tile for _, t, block in stored)
        ),
    )


def joined(parts: Iterable[tuple[Columns, Sequence[str]]]) -> tuple[Columns, list[str]]:
    """Return all extents of several parts of a checkpoint, and the keys of the files that they number."""
    files: list[str] = []
    numbered: list[Columns] = []
    for columns, of_part in parts:
        numbered.append(replace(columns, file=columns.file + len(files)))
        files += of_part
    names = [f.name for f in fields(Columns)]
    return Columns(
        **{name: np.concatenate([getattr(c, name) for c in numbered]) for name in names}
    ), files


def encode_columns(
    columns: Columns, files: Sequence[str], described: Described | None = None
) -> bytes:
    """Encode columns as the file of a sidecar."""
    n, dims = len(columns), len(columns.start)
    by_dim = (*_DIMS, *((_TILE,) if columns.tile.any() else ()))
    for name, rows in {**dict.fromkeys(_ROWS, n), **dict.fromkeys((*_DIMS, _TILE), dims)}.items():
        if len(getattr(columns, name)) != rows:
            raise UsageError(
                f"the column {name} has {len(getattr(columns, name))} rows instead of {rows}"
            )
    if max(n, dims) > _MAX_ROWS:
        raise UnsupportedError(
            f"{n} extents of {dims} dims are too many for a sidecar; at most {_MAX_ROWS} dims fit"
        )
    packed = {name: _pack(getattr(columns, name), name) for name in (*_ROWS, *by_dim)}
    meta = {"format": "ucformat-extents", "extents": str(n), "files": json.dumps(list(files))}
    if described:
        if not described.encoded:
            row_columns = {
                name: _pack(column, name) for name, column in encode_rows(described).items()
            }
            described.encoded.append((describe(described), row_columns))
        doc, row_columns = described.encoded[0]
        meta["described"] = doc.model_copy(update={"folder": described.folder}).model_dump_json(
            exclude_defaults=True
        )
        packed |= row_columns
    return _safetensors(packed, meta)


def decode(data: bytes, tensors: TensorTable, where: str) -> Sidecar:
    """Decode and check the file of a sidecar."""
    arrays, meta = _parse(data, where)
    files, ndims = _files(meta, where), np.array(tensors.ndims, np.int64)
    columns = _packed(arrays, meta, ndims, where)
    _check(columns, ndims, len(files), where)
    described = _described(arrays, meta, tensors, ndims, where)
    if described and any(number in described for number in np.unique(columns.tensor).tolist()):
        raise IntegrityError(f"{where} describes a tensor that has extents")
    return Sidecar(columns, files, ndims, described)


def _described(
    arrays: Mapping[str, NDArray[np.uint8]],
    meta: Mapping[str, str],
    tensors: TensorTable,
    ndims: Column,
    where: str,
) -> Described | None:
    if "described" not in meta:
        return None
    try:
        doc = parsed(DescribedDoc, meta["described"].encode())
        columns = {name: _unpack(arrays[name], name, doc.tensors, where) for name in COLUMNS}
        dims = int(_ndim(columns[COLUMNS[0]], ndims, where).sum())
        columns[DESCRIBED_TILE] = _unpack(arrays[DESCRIBED_TILE], DESCRIBED_TILE, dims, where)
        return decode_rows(doc, columns, tensors)
    except LayoutError as error:  # a ValueError, too
        raise IntegrityError(
            f"{where}: {error.message}", hint="restore it from another copy"
        ) from None
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise IntegrityError(f"{where}: its described tensors are damaged: {reason}") from None


def _parse(data: bytes, where: str) -> tuple[dict[str, NDArray[np.uint8]], dict[str, str]]:
    """The packed columns of the safetensors file by name, and its metadata."""
    try:
        arrays = load(data)
        size = int.from_bytes(data[:8], "little")
        meta = loads(data[8 : 8 + size])["__metadata__"]
        form, _ = (str(meta[key]) for key in ("format", "files"))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{where} is not a ucformat sidecar: {error}") from None
    if form != "ucformat-extents":
        raise IntegrityError(f"{where} is not a ucformat sidecar")
    described = {*COLUMNS, DESCRIBED_TILE} if "described" in meta else set()
    if unknown := set(arrays) - {*_ROWS, *_DIMS, _TILE} - described:
        raise UpgradeNeeded(
            f"{where} has the column {min(unknown)[:100]!r}, which this ucformat does not know"
        )
    if not {*_ROWS, *_DIMS, *described} <= set(arrays) or any(
        a.ndim != 1 or a.dtype != np.uint8 for a in arrays.values()
    ):
        raise IntegrityError(
            f"{where} is not a ucformat sidecar: columns are missing or have a wrong dtype or shape"
        )
    return arrays, meta


def _packed(
    arrays: Mapping[str, NDArray[np.uint8]], meta: Mapping[str, str], ndims: Column, where: str
) -> Columns:
    """The columns; nothing is inflated before its size is known and found to be possible."""
    if not re.fullmatch("[0-9]{1,10}", meta.get("extents", "")):
        raise IntegrityError(f"{where} does not contain the number of its extents")
    n = int(meta["extents"])
    columns = {name: _unpack(arrays[name], name, n, where) for name in _ROWS}
    dims = int(_ndim(columns["tensor"], ndims, where).sum())
    columns |= {
        name: _unpack(arrays[name], name, dims, where) for name in (*_DIMS, _TILE) if name in arrays
    }
    return Columns(**columns)


def _safetensors(packed: Mapping[str, bytes], meta: Mapping[str, str]) -> bytes:
    """A safetensors file of U8 tensors, always the same bytes, which the library's own writer does not guarantee."""
    header: dict[str, Any] = {"__metadata__": meta}
    end = 0
    for name, data in packed.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *packed.values()))


def _pack(column: Column, name: str) -> bytes:
    """The first bytes of all rows, then the second bytes, …, compressed; of differences if the column grows."""
    column = np.ascontiguousarray(column, "<i8")
    if name in _STEPS:
        column = np.diff(column, prepend=np.int64(0))
    return zlib.compress(column.view(np.uint8).reshape(-1, 8).T.tobytes(), _LEVEL)


def _unpack(packed: NDArray[np.uint8], name: str, rows: int, where: str) -> Column:
    nbytes = 8 * rows
    if not 0 <= rows <= _MAX_ROWS or nbytes > _INFLATION * len(packed):
        raise IntegrityError(f"{where}: its column {name} cannot have {rows} rows")
    stream = zlib.decompressobj()
    try:
        # one byte more than expected shows a stream that is too long
        data = stream.decompress(packed.data, nbytes + 1)
    except zlib.error as error:
        raise IntegrityError(f"{where}: its column {name} is damaged: {error}") from None
    if len(data) != nbytes or not stream.eof or stream.unused_data:
        raise IntegrityError(f"{where}: its column {name} does not have {rows} rows")
    column = (
        np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(8, rows).T)
        .view("<i8")
        .reshape(rows)
    )
    return np.cumsum(column) if name in _STEPS else column


def _column(values: Iterable[int]) -> Column:
    return np.fromiter(values, np.int64)


def _ndim(tensor: Column, ndims: Column, where: str) -> Column:
    """The number of dims of each extent."""
    if len(tensor) and not (tensor.min() >= 0 and tensor.max() < len(ndims)):
        raise _unfit(where)
    return ndims[tensor]


def _any(by_dim: NDArray[np.bool_], tensor: Column, ndims: Column) -> NDArray[np.bool_]:
    """For each extent, whether the condition holds for any of its dims."""
    out = np.zeros(len(tensor), np.bool_)
    if by_dim.any():
        out[np.repeat(np.arange(len(tensor)), ndims[tensor])[by_dim]] = True
    return out


def _tile_counts(c: Columns, ndims: Column) -> NDArray[np.float64]:
    """The number of tiles of each tiled extent; as floats, which do not overflow."""
    start, edge = c.start.astype(np.float64), np.maximum(c.tile, 1)
    counts = np.ceil((start + c.shape) / edge) - np.floor(start / edge)
    owner = np.repeat(np.arange(len(c)), ndims[c.tensor])
    return np.exp2(np.bincount(owner, np.log2(np.maximum(counts, 1)), len(c)))


def _unfit(where: str) -> IntegrityError:
    return IntegrityError(
        f"{where}: its columns do not match the manifest", hint="restore it from another copy"
    )


def _files(meta: Mapping[str, str], where: str) -> list[str]:
    try:
        files = loads(meta["files"])
    except (ValueError, TypeError):
        files = None
    if not isinstance(files, list):
        raise IntegrityError(f"{where} does not list the files of its extents")
    for file in files:
        if not isinstance(file, str) or "://" in file or file.startswith("/"):
            raise UnsafeError(
                f"{where} points to {reprlib.repr(file)}, outside its checkpoint",
                hint="only files below the checkpoint's own folder are read",
            )
    return files


def _check(c: Columns, ndims: Column, files: int, where: str) -> None:
    """Raise IntegrityError if columns do not match, or for the first impossible extent."""
    if any(len(getattr(c, name)) != len(c) for name in _ROWS):
        raise _unfit(where)
    ends = np.cumsum(_ndim(c.tensor, ndims, where))
    if any(len(getattr(c, name)) != (ends[-1] if len(c) else 0) for name in (*_DIMS, _TILE)):
        raise _unfit(where)
    if len(c) and c.crc32c.min() < PLACED:
        raise UpgradeNeeded(
            f"{where} has checksums of the kind {c.crc32c.min()}, which this ucformat does not know"
        )
    wrong = (
        (c.file < 0)
        | (c.file >= files)
        | (c.offset < 0)
        | (c.block_offset < NO_BLOCK)
        | (c.block_nbytes < 0)
    )
    wrong |= c.crc32c >> 32 > 0
    wrong |= (c.block_offset == NO_BLOCK) & ((c.block_nbytes != 0) | (c.crc32c != 0))
    wrong |= _any((c.start < 0) | (c.shape < 0) | (c.strides < 0) | (c.tile < 0), c.tensor, ndims)
    tiled = _any(c.tile > 0, c.tensor, ndims)
    if tiled.any():
        wrong |= tiled & (_any(c.tile == 0, c.tensor, ndims) | (c.block_offset != NO_BLOCK))
        wrong[tiled] |= c.strides[ends[tiled] - 1] == 0
        wrong |= tiled & ~wrong & (_tile_counts(c, ndims) > MAX_TILES)
    if wrong.any():
        raise IntegrityError(
            f"{where}: an extent of tensor {c.tensor[wrong.argmax()]} is impossible"
        )
