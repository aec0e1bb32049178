"""Checks the extents of a sidecar, as columns, so that millions are fast; writes it, and enumerates its blocks.

Separate from `structure`, because reading a manifest does not need NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import CoverageError, IntegrityError, UnsafeError, UpgradeNeeded
from ucformat.format.arrays import put_file
from ucformat.format.chunking import CHECKSUM_BYTES
from ucformat.format.described import packed_file
from ucformat.format.digest import unwritable
from ucformat.format.sidecar import FOLLOWS, NO_BLOCK, PLACED, block_of, decode
from ucformat.format.structure import (
    BASES_FOLDER,
    MOUNT,
    Problem,
    manifest_problems,
    place_of,
)
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import Block, TensorInfo
from ucformat.reading.execute import place_checksum
from ucformat.reading.repeats import are_repeated
from ucformat.schema.limits import FREE_READS, MAX_EDGE, MAX_SPAN, MOST_READS
from ucformat.schema.manifest import EXTENTS, VIRTUAL, SidecarDoc
from ucformat.storage.concurrency import gc_paused
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.format.sidecar import Sidecar
    from ucformat.geometry.tensor import Extent, Tiles
    from ucformat.schema.manifest import Manifest, SourceFileDoc
    from ucformat.schema.tensors import TensorTable
    from ucformat.storage.base import Store

_BATCH = 1 << 20  # extents that are checked at once


def consistency_problems(manifest: Manifest, sidecar: Sidecar | None) -> Iterator[Problem]:
    """Find every inconsistency of a manifest and its sidecar that readers must refuse."""
    problems = list(manifest_problems(manifest))
    yield from problems
    if problems or sidecar is None or manifest.sidecar is None:
        return
    yield from feature_problems(manifest, sidecar)
    wrong_tensors = set()
    for problem in extent_problems(manifest.sidecar, manifest.tensors, sidecar):
        wrong_tensors.add((problem.name, problem.state))
        yield problem
    for number, doc in enumerate(manifest.tensors):
        if sidecar.described is not None and number in sidecar.described:
            continue  # a distribution covers its tensor
        if doc.in_sidecar and (doc.name, doc.state) not in wrong_tensors:
            info = TensorInfo(doc.name, doc.state, doc.stored_dtype, doc.shape)
            if (reason := coverage_problem(info, sidecar.extents(number))) is not None:
                yield Problem(manifest.sidecar.path, reason, doc.name, doc.state)


def feature_problems(manifest: Manifest, sidecar: Sidecar) -> Iterator[Problem]:
    """Find the features of a sidecar that the manifest does not require."""
    if manifest.sidecar is not None and (unrequired := {*sidecar.features} - {*manifest.requires}):
        yield Problem(manifest.sidecar.path, f"the manifest does not require {min(unrequired)}")


def coverage_problem(info: TensorInfo, extents: Iterable[Extent | Tiles]) -> str | None:
    """Describe why extents do not cover a tensor exactly, replicas counting once."""
    try:
        prove(info, [(e.file, e.box) for e in extents])
    except CoverageError as error:
        return error.message
    return None


def extent_problems(doc: SidecarDoc, tensors: TensorTable, sidecar: Sidecar) -> Iterator[Problem]:
    """Find the first impossible extent of each tensor, in the order of the manifest; coverage is not checked.

    An extent is impossible if it exceeds its tensor, its bytes exceed its block or its file, that
    file is not listed, or is the checkpoint's own and its checksum does not belong to its place.
    """
    check = _Check.of(doc, tensors, sidecar)
    c = sidecar.columns
    wrong: dict[int, str] = {}
    for begin in range(0, len(c), _BATCH):
        batch = slice(begin, min(begin + _BATCH, len(c)))
        for reason, bad in check.impossible(batch):
            for row in (np.flatnonzero(bad) + begin).tolist():
                file = sidecar.files[c.file[row]][:200]
                wrong.setdefault(
                    int(c.tensor[row]), f"{reason.format(file=file)}: {check.box(row)}"
                )
    if not wrong:
        for row, reason in _repeated(check, doc.roots):
            file = sidecar.files[c.file[row]][:200]
            wrong.setdefault(int(c.tensor[row]), reason.format(file=file))
    for number, reason in sorted(wrong.items()):
        tensor = tensors[number]
        yield Problem(doc.path, reason, tensor.name, tensor.state)


@dataclass(frozen=True, slots=True, eq=False)
class _Check:
    """The columns of a sidecar, and what they are compared with.

    Attributes:
        ndims: of each tensor.
        edges: of all tensors, one after another.
        items: bytes of an element of each tensor.
        sizes: bytes of each file; -1 of one that should be listed, and is not.
        own: for each file, whether it is the checkpoint's own.
        encoded: for each tensor, whether its tiles are in encoded files.
        ends: for each row, the number of dims of it and all before.
        stops: for each row, where its block, its tiles, or its bytes end; filled in by `impossible`.
        read: for each row that has neither block nor tiles, the bytes of its elements; likewise.
    """

    sidecar: Sidecar
    ndims: NDArray[np.int64]
    edges: NDArray[np.int64]
    items: NDArray[np.int64]
    sizes: NDArray[np.int64]
    own: NDArray[np.bool_]
    encoded: NDArray[np.bool_]
    ends: NDArray[np.int64]
    stops: NDArray[np.int64]
    read: NDArray[np.float64]

    @classmethod
    def of(cls, doc: SidecarDoc, tensors: TensorTable, sidecar: Sidecar) -> _Check:
        shapes = list(tensors.by_kind(lambda kind: kind.shape))
        ndims = np.fromiter(map(len, shapes), np.int64, len(shapes))
        sources = {s.path: min(s.nbytes, MAX_EDGE) for s in doc.sources}
        own = [not file.startswith((MOUNT, BASES_FOLDER)) for file in sidecar.files]
        sizes = [
            MAX_EDGE if is_own else sources.get(file, -1)
            for file, is_own in zip(sidecar.files, own, strict=True)
        ]
        rows = len(sidecar.columns)
        return cls(
            sidecar,
            ndims,
            edges=np.fromiter(chain.from_iterable(shapes), np.int64),
            items=np.fromiter(tensors.by_kind(lambda kind: kind.unit), np.int64, len(shapes)),
            sizes=np.array(sizes, np.int64),
            own=np.array(own, np.bool_),
            encoded=np.array(list(tensors.by_kind(lambda kind: kind.codec is not None)), np.bool_),
            ends=np.cumsum(ndims[sidecar.columns.tensor]),
            stops=np.zeros(rows, np.int64),
            read=np.zeros(rows, np.float64),
        )

    def box(self, row: int) -> str:
        """The box of an extent, as an index of its tensor."""
        c, end = self.sidecar.columns, int(self.ends[row])
        dims = range(end - int(self.ndims[c.tensor[row]]), end)
        return (
            "[" + ", ".join(f"{c.start[d]}:{int(c.start[d]) + int(c.shape[d])}" for d in dims) + "]"
        )

    def impossible(self, rows: slice) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """For each kind of fault, the extents of these rows that have it; no number here exceeds 64 bits."""
        c = self.sidecar.columns
        tensor = c.tensor[rows]
        ndims = self.ndims[tensor]
        owner = np.repeat(np.arange(len(ndims)), ndims)
        dims = slice(int(self.ends[rows.start] - ndims[0]), int(self.ends[rows.stop - 1]))
        first = np.cumsum(self.ndims) - self.ndims  # of each tensor's edges
        edges = self.edges[
            np.arange(dims.start, dims.stop)
            - np.repeat(self.ends[rows] - ndims - first[tensor], ndims)
        ]
        start, shape, strides = c.start[dims], c.shape[dims], c.strides[dims]

        def any_dim(by_dim: NDArray[np.bool_]) -> NDArray[np.bool_]:
            out = np.zeros(len(ndims), np.bool_)
            out[owner[by_dim]] = True
            return out

        beyond = any_dim((start > edges) | (shape > edges - start))
        yield "an extent exceeds the tensor", beyond
        empty = any_dim(shape == 0)
        steps = np.where(shape > 1, strides, 0)
        span = np.bincount(owner, np.maximum(shape - 1, 0).astype(np.float64) * steps, len(ndims))
        offset, block, nbytes = c.offset[rows], c.block_offset[rows], c.block_nbytes[rows]
        items = self.items[tensor]
        has_block = block != NO_BLOCK
        tiled = any_dim(c.tile[dims] > 0)
        # by logarithms: a product of claimed edges may exceed 64 bits
        size_about = np.exp2(np.bincount(owner, np.log2(np.maximum(shape, 1)), len(ndims)))
        huge = (span > MAX_SPAN) | (offset > MAX_SPAN)
        huge |= has_block & ((block > MAX_SPAN) | (nbytes > MAX_SPAN))
        huge |= tiled & (size_about * items > MAX_SPAN)
        yield "an extent has an impossible offset", huge & ~empty & ~beyond
        good = ~(huge | empty | beyond)
        exact = np.zeros(len(ndims), np.int64)
        kept = (good & ~tiled)[owner]
        np.add.at(exact, owner[kept], (shape[kept] - 1) * steps[kept])
        end = np.where(good, offset + exact + items, 0)
        if (good & tiled).any():
            element = np.zeros_like(strides)
            element[(np.cumsum(ndims) - 1)[ndims > 0]] = items[ndims > 0]
            reason = "the strides of an extent of tiles are not 0 and the size of an element"
            yield reason, any_dim(strides != element) & tiled
            size, tiles, kept = np.ones_like(exact), np.ones_like(exact), (good & tiled)[owner]
            begin, edge, n = start[kept], c.tile[dims][kept], shape[kept]
            np.multiply.at(size, owner[kept], n)
            # at most 2^20 tiles: see the sidecar
            np.multiply.at(tiles, owner[kept], (begin + n - 1) // edge - begin // edge + 1)
            end = np.where(good & tiled, offset + size * items + CHECKSUM_BYTES * tiles, end)
        outside = good & has_block & ((offset < block) | (end > block + nbytes))
        yield "the bytes of an extent exceed the block of their checksum", outside
        weak = ~tiled & (~has_block | (c.crc32c[rows] == FOLLOWS)) & self.own[c.file[rows]]
        yield "an extent in {file} has no checksum that belongs to its place", weak & ~empty
        apart = ~tiled & (c.crc32c[rows] != PLACED) & self.encoded[tensor]
        yield "an extent in {file} is encoded, and is no tile", apart & ~empty
        until = np.where(
            has_block, block + nbytes + np.where(c.crc32c[rows] < 0, CHECKSUM_BYTES, 0), end
        )
        self.stops[rows] = np.maximum(until, 0)
        self.read[rows] = np.where(good & ~has_block & ~tiled, size_about * items, 0)
        size = self.sizes[c.file[rows]]
        yield "an extent is in {file}, which the manifest does not list", ~empty & (size < 0)
        yield "an extent exceeds {file}", good & (size >= 0) & (np.maximum(until, end) > size)


def _repeated(check: _Check, roots: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Rows of files whose bytes are named so often that reading all tensors would read far more than they have."""
    sidecar, sizes, read, stops = check.sidecar, check.sizes, check.read, check.stops
    c = sidecar.columns
    numbers: dict[str, int] = {}  # of each file: that of the first at the same place
    places = (place_of(f, roots) if f.startswith(MOUNT) else f for f in sidecar.files)
    files = np.array([numbers.setdefault(place, n) for n, place in enumerate(places)], np.int64)[
        c.file
    ]
    total = np.zeros(len(sidecar.files))
    np.add.at(total, files, read)
    for n in np.flatnonzero(total > MOST_READS * sizes.astype(np.float64) + FREE_READS).tolist():
        yield int(np.argmax((files == n) & (read > 0))), _REPEATED
    own = check.own[c.file]
    checked = (c.block_offset != NO_BLOCK) | sidecar.tiled
    rows = np.flatnonzero((checked | own) & (stops > 0))
    if not len(rows):
        return
    begins = np.where(checked[rows] & ~sidecar.tiled[rows], c.block_offset[rows], c.offset[rows])
    ranges = np.stack([files[rows], begins, stops[rows], c.tensor[rows]], axis=1)
    ranges, first = np.unique(ranges, axis=0, return_index=True)  # sorted by file and offset
    rows = rows[first]
    file, begin, stop, _ = ranges.T
    other = (begin[1:] != begin[:-1]) | (stop[1:] != stop[:-1])
    overlaps = (
        own[rows[1:]]
        & checked[rows[1:]]
        & checked[rows[:-1]]
        & (file[1:] == file[:-1])
        & (begin[1:] < stop[:-1])
        & other
    )
    for k in np.flatnonzero(overlaps).tolist():
        yield int(rows[k + 1]), "two blocks in {file} overlap"
    bounds = [0, *(np.flatnonzero(file[1:] != file[:-1]) + 1).tolist(), len(file)]
    for low, high in pairwise(bounds):
        if are_repeated(begin[low:high], stop[low:high]):
            yield int(rows[low]), _REPEATED


_REPEATED = "the tensors in {file} name its bytes so often that they are far more than it has"


@gc_paused()
def put_sidecar(
    store: Store,
    folder: str,
    data: bytes,
    tensors: TensorTable,
    roots: Sequence[str] = (),
    sources: Sequence[SourceFileDoc] = (),
) -> tuple[SidecarDoc, tuple[str, ...]]:
    """Write a sidecar, and parse it as readers do, since a manifest must not name one that they refuse.

    Returns:
        Its entry in the manifest, and what a reader of it must implement.
    """
    file = put_file(store, f"{folder}/extents.safetensors", data)
    doc = SidecarDoc(**file.model_dump(), roots=tuple(roots), sources=tuple(sources))
    try:
        sidecar = decode(data, tensors, doc.path)
        problem = next(extent_problems(doc, tensors, sidecar), None)
    except (IntegrityError, UnsafeError, UpgradeNeeded) as error:
        raise unwritable("the sidecar", error.message) from None
    if problem is not None:
        raise unwritable("the sidecar", problem)
    # tensors without elements have no extents, and are no arrays either
    return doc, (*(sidecar.features or (EXTENTS,)), *((VIRTUAL,) if roots else ()))


def encoded_files(sidecar: Sidecar, tensors: TensorTable) -> set[str]:
    """The files of which the tiles are encoded."""
    encoded = np.array(list(tensors.by_kind(lambda kind: kind.codec is not None)), np.bool_)
    if not encoded.any():
        return set()
    c, described = sidecar.columns, sidecar.described
    files = {sidecar.files[n] for n in np.unique(c.file[encoded[c.tensor]]).tolist()}
    if described is not None and any(encoded[row.tensor] for row in described.rows):
        files.update(described.files)
    return files


_READ_BYTES = 4 << 20  # bytes


def is_whole(
    store: Store, file: str, block: Block, use: Callable[[int, memoryview], None] = lambda *_: None
) -> bool:
    """Whether a block matches its checksum; reads at most 4 MiB at once.

    Args:
        use: called with each part of the block, and the byte of the file at which it begins.
    """
    buffer = memoryview(bytearray(min(_READ_BYTES, block.nbytes)))
    stored = bytearray(4 if block.crc32c is None else 0)
    crc = place_checksum(file, block.offset) if block.placed else 0
    for at in range(0, block.nbytes, _READ_BYTES) or (0,):
        part = buffer[: min(_READ_BYTES, block.nbytes - at)]
        behind = [memoryview(stored)] if at + len(part) == block.nbytes else []
        store.read_into(file, block.offset + at, [part, *behind])
        crc = checksum(part, crc)
        use(block.offset + at, part)
    return crc == (int.from_bytes(stored, "little") if block.crc32c is None else block.crc32c)


def blocks_of(sidecar: Sidecar) -> Iterator[tuple[str, int, Block]]:
    """Enumerate blocks, each once, in the order of files and offsets."""
    if (described := sidecar.described) is not None:  # in each file before all others
        stored = [
            (rank, begin, n, box)
            for n, *_ in described.rows
            for rank, box, begin in described.stored(n)
        ]
        for rank, begin, n, box in sorted(stored):
            tiling, file = described.tiling(n), packed_file(described.folder, rank)
            for offset, tile in tiling.placed(box, begin):
                yield file, n, Block(offset, tile.size * tiling.itemsize, placed=True)
    c = sidecar.columns
    rows = np.flatnonzero(c.block_offset != NO_BLOCK)
    tiled = np.flatnonzero(sidecar.tiled)
    at = np.concatenate([c.block_offset[rows], c.offset[tiled]])
    nbytes = np.concatenate([c.block_nbytes[rows], np.full(len(tiled), -1)])
    rows = np.concatenate([rows, tiled])
    blocks = np.stack([c.file[rows], at, nbytes, c.crc32c[rows]], axis=1)
    _, first = np.unique(blocks, axis=0, return_index=True)  # sorted by file and offset
    for k in first.tolist():
        row = int(rows[k])
        file, tensor, crc = sidecar.files[int(c.file[row])], int(c.tensor[row]), int(c.crc32c[row])
        if sidecar.tiled[row]:
            end = int(c.offset[row])
            for size in sidecar.tile_sizes(row):
                yield file, tensor, Block(end, size, placed=True)
                end += size + CHECKSUM_BYTES
        else:
            yield file, tensor, block_of(int(at[k]), int(nbytes[k]), crc)
