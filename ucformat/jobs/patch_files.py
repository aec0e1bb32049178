"""Packed files of patches, and of states that are encoded with loss, as tasks: tile by tile, with an index at the end.

Where the tiles are in the plain files is a pure function of the tensors, so all writers agree on it. How each is
stored, whichever is smallest, follows from its bytes and those of the base.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from ucformat.format.chunking import Grid, Tiling
from ucformat.format.described import ALIGNMENT
from ucformat.format.encoding import encode_tile
from ucformat.format.extents import put_sidecar
from ucformat.format.lossy_states import (
    bound_of,
    larger,
    lossy_codec,
    packed_losses,
    unpacked_loss,
)
from ucformat.format.sidecar import encode_columns, tiled_columns
from ucformat.format.tile_index import TileIndexWriter, encode, encode_quantized
from ucformat.geometry.box import Box, bounding_box, row_major
from ucformat.geometry.fingerprint import (
    NO_ELEMENTS,
    fingerprint_of,
    packed_sums,
    text_of,
    total,
    unpacked_sums,
)
from ucformat.geometry.flat_buffer import align_up
from ucformat.geometry.tensor import Key, Piece
from ucformat.jobs.finished import TaskDoc
from ucformat.jobs.inputs import Input, InputsJob
from ucformat.jobs.reopen import reopen, spec_of
from ucformat.jobs.run import workers_for
from ucformat.jobs.shards import WriteOptions, plan_spec, planned_of
from ucformat.jobs.tasks import job_name
from ucformat.reading.dtypes import numpy_dtype
from ucformat.schema.manifest import CODECS, PATCHES, SidecarDoc, VerifiedDoc
from ucformat.schema.tensors import BLOSC, TILES, TensorDoc, TensorTable
from ucformat.storage.concurrency import grouped
from ucformat.storage.upload import unit_for
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.lossy_states import Loss
    from ucformat.format.tile_index import EncodedTile
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.finished import FinishedDoc, SumPart
    from ucformat.storage.base import Bytes, Store

FILE_BYTES = 64 << 20  # of the elements in a file, at most, unless one tile has more
_BATCH_BYTES = 4 << 20  # of tiles that are read at once, at most, unless one has more


class PlacedBox(NamedTuple):
    """A box of a tensor, which is one tile or stored tile by tile, from a byte of a plain file on."""

    info: TensorInfo
    box: Box
    offset: int

    @property
    def tiling(self) -> Tiling:
        """The tiles of the tensor."""
        return Tiling.of(self.info.shape, self.info.itemsize)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.box.size * self.info.itemsize

    def fingerprint(self, octets: NDArray[np.uint8]) -> Sums:
        """Its part in the fingerprint of its tensor, from its bytes."""
        elements = octets.view(f"V{self.info.itemsize}").reshape(self.box.shape)
        return fingerprint_of(elements, self.info.shape, self.box)


def place_boxes(infos: Sequence[TensorInfo]) -> list[list[PlacedBox]]:
    """Cut tensors into boxes of whole tiles, and fill files with them in order."""
    files: list[list[PlacedBox]] = []
    end = 0
    for info in infos:
        grid = Grid.of(info.shape, info.itemsize, shard_bytes=FILE_BYTES)
        for box in map(grid.box, grid.shards()):
            offset = align_up(end, ALIGNMENT)
            nbytes = Tiling.of(info.shape, info.itemsize).nbytes(box)
            if not files or offset + nbytes > FILE_BYTES:
                files.append([])
                offset = 0
            files[-1].append(PlacedBox(info, box, offset))
            end = offset + nbytes
    return files


def _tiles(boxes: Sequence[PlacedBox]) -> Iterator[tuple[int, PlacedBox]]:
    """The tiles of a file, in order, each with the number of its box."""
    for number, placed in enumerate(boxes):
        for offset, box in placed.tiling.placed(placed.box, placed.offset):
            yield number, PlacedBox(placed.info, box, offset)


@dataclass(frozen=True, slots=True)
class TilesPlan:
    """What is stored in tiles.

    Attributes:
        infos: all tensors of the new checkpoint, in order.
        referenced: those of them of which nothing is stored, as the manifest has them.
        bases: the tensors of which the others are patches, with the number of the base that stores each; a tensor
            that has none is compressed.
        arrays: those that another job stores.
    """

    infos: Sequence[TensorInfo]
    referenced: Mapping[Key, TensorDoc]
    bases: Mapping[Key, TensorDoc]
    arrays: Collection[Key] = ()

    @property
    def stored(self) -> list[TensorInfo]:
        """The tensors of which tiles are stored."""
        others = {*self.referenced, *self.arrays}
        return [info for info in self.infos if info.key not in others]


class TilesJob(InputsJob):
    """Writes packed files whose tiles are patches, encoded with loss as the options say, or compressed.

    The bytes of the base are compared with their checksums in any case: a patch of damaged bytes could not be
    applied to whole ones.

    Args:
        base: the checkpoint that has the tensors in `plan.bases`; None if there are none.
    """

    kind = "patch"
    folder: str | None = None  # it has no safetensors files

    def __init__(
        self,
        source: Checkpoint,
        base: Checkpoint | None,
        store: Store,
        attempt: str,
        plan: TilesPlan,
        options: WriteOptions,
    ) -> None:
        self.source, self.base, self.store, self.attempt = source, base, store, attempt
        self.plan, self.options = plan, options
        self.infos = plan.infos
        self.files = place_boxes(plan.stored)
        self.count = len(self.files)
        self.finished = set()
        self._sums: dict[Key, Sums] = {info.key: NO_ELEMENTS for info in plan.stored}
        self._losses: dict[Key, Loss] = {}
        self._bare: set[Key] = set()
        bases = () if base is None else (Input(base, verify=True),)
        self.inputs = [Input(source, verify=options.verify), *bases]

    def key(self, task: int) -> str:
        """The key of a file."""
        return f"data/{self.attempt}/tiles-{task:05}.bin"

    def nbytes(self, task: int) -> int:
        """See Job."""
        return sum(placed.nbytes for placed in self.files[task])

    def spec(self) -> dict[str, Any]:
        """See Job."""
        plan = plan_spec(self.source, self.store, self.attempt, self.infos, self.options)
        tensors = [
            [
                (*key, doc.dtype, doc.itemsize, doc.fingerprint, doc.base)
                for key, doc in docs.items()
            ]
            for docs in (self.plan.referenced, self.plan.bases)
        ]
        return {
            "job": job_name(self),
            "base": None if self.base is None else spec_of(self.base),
            "docs": tensors,
            "arrays": [tuple(key) for key in self.plan.arrays],
            **plan,
        }

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        source, infos, options = planned_of(spec)
        shapes = {info.key: info.shape for info in infos}
        referenced, bases = (
            {
                Key(name, state): TensorDoc(
                    *(name, state, dtype, shapes[Key(name, state)]),
                    itemsize=itemsize,
                    fingerprint=fingerprint,
                    base=number,
                )
                for name, state, dtype, itemsize, fingerprint, number in docs
            }
            for docs in spec["docs"]
        )
        plan = TilesPlan(infos, referenced, bases, tuple(Key(*key) for key in spec["arrays"]))
        store = open_store(spec["store"])
        base = None if spec["base"] is None else reopen(spec["base"])
        return cls(source, base, store, spec["attempt"], plan, options)

    def run(self, task: int) -> tuple[TaskDoc, Sequence[Sequence[SumPart]]]:
        """See Job."""
        key = self.key(task)
        with ExitStack() as noting:
            read = [noting.enter_context(input_.task()) for input_ in self.inputs]
            sums, bare = self._write(key, self.files[task])
        return TaskDoc.of(task, self.store.info(key), sums, bare=bare), read

    def _write(self, key: str, boxes: Sequence[PlacedBox]) -> tuple[bytes, bool]:
        """Write a file.

        Returns:
            The fingerprints of its boxes, then their losses, and whether bytes of the source have no checksum.
        """
        of_source, *of_base = self.inputs
        index, bare = TileIndexWriter(key), False
        sums: list[tuple[int, Sums]] = []
        losses: list[tuple[int, Loss]] = []
        plain = boxes[-1].offset + boxes[-1].tiling.nbytes(boxes[-1].box)
        with self.store.create(key, unit_for(plain)) as out:
            for batch in grouped(_tiles(boxes), lambda tile: tile[1].nbytes, _BATCH_BYTES):
                tiles = [tile for _, tile in batch]
                memories, covered = _read(of_source, tiles)
                bare |= not covered
                patched = [tile for tile in tiles if tile.info.key in self.plan.bases]
                base_memories = [m for base in of_base for m in _read(base, patched)[0]]
                base_of = dict(zip(patched, base_memories, strict=True))
                stored: list[Bytes] = []
                for (number, tile), memory in zip(batch, memories, strict=True):
                    encoded = self._encoded(key, tile, memory, base_of.get(tile))
                    sums.append((number, encoded.fingerprint))
                    if encoded.loss is not None:
                        losses.append((number, encoded.loss))
                    stored += (encoded.payload, index.add(tile.offset, encoded))
                out.write(b"".join(stored))
            out.write(index.encode(plain))
        return packed_sums(sums, len(boxes)) + packed_losses(losses, len(boxes)), bare

    def _encoded(
        self, key: str, tile: PlacedBox, memory: NDArray[np.uint8], base: NDArray[np.uint8] | None
    ) -> EncodedTile:
        info = tile.info
        if (lossy := lossy_codec(self.options.encode, info)) is not None:
            elements = memory.view(numpy_dtype(info.dtype)).reshape(tile.box.shape)
            if (quantized := lossy.quantize(elements)) is not None:
                fingerprint = tile.fingerprint(quantized.octets)
                return encode_quantized(key, tile.offset, quantized, fingerprint)
        return encode(
            *(key, tile.offset, memory.data, info.itemsize, tile.fingerprint(memory)),
            BLOSC if self.base is not None else self.options.codec or "raw",
            patched=None if base is None else encode_tile(memory.data, info.itemsize, base.data),
            number=0 if base is None else self.plan.bases[info.key].base or 0,
        )

    def take_finished(self, doc: FinishedDoc, *, resumed: bool = False) -> None:  # noqa: ARG002 - see RecordedJob
        """See RecordedJob."""
        self.parts = max(self.parts, doc.parts)
        for task in doc.tasks:
            if task.task in self.finished or task.task >= self.count:
                continue
            boxes, pairs = self.files[task.task], unpacked_sums(bytes.fromhex(task.digests))
            if task.file != self.key(task.task) or len(pairs) != 2 * len(boxes):
                continue  # a record of something else: the file is written again
            self.finished.add(task.task)
            sums, losses = pairs[: len(boxes)], map(unpacked_loss, pairs[len(boxes) :])
            for placed, part, loss in zip(boxes, sums, losses, strict=True):
                key = placed.info.key
                self._sums[key] = total((self._sums[key], part))
                if loss is not None:
                    self._losses[key] = larger(loss, self._losses.get(key, loss))
                if task.bare:
                    self._bare.add(key)
        self.take_sums(doc)

    def finish(self) -> tuple[Mapping[Key, TensorDoc], VerifiedDoc]:
        """Complete the checksums of which parts were read; call it when all tasks are finished.

        Returns:
            The tensors for the manifest, and which of them were verified.
        """
        for input_ in self.inputs:
            if input_.verifier is not None:
                workers = self.options.workers or workers_for(input_.checkpoint.store)
                input_.verifier.complete(workers)
        infos = [info for info in self.infos if info.key not in {*self.plan.arrays}]
        docs = {info.key: self._doc(info) for info in infos}
        verifier = self.inputs[0].verifier
        if verifier is None:
            return docs, VerifiedDoc(default=False)
        return docs, verifier.described(infos, self._bare.union(self.plan.referenced))

    def _doc(self, info: TensorInfo) -> TensorDoc:
        if (referenced := self.plan.referenced.get(info.key)) is not None:
            return referenced
        if info.key in self.plan.arrays:
            return TensorDoc(*info.key, info.dtype, info.shape)
        base, loss = self.plan.bases.get(info.key), self._losses.get(info.key)
        codec = None if loss is None else lossy_codec(self.options.encode, info)
        return TensorDoc(
            *(info.name, info.state, info.dtype if base is None else base.dtype, info.shape),
            itemsize=None if base is None else base.itemsize,
            fingerprint=text_of(self._sums[info.key]),
            codec=TILES,
            base=None if base is None else base.base,
            lossy=None if codec is None else codec.name,
            bound=None if loss is None else bound_of(loss),
        )

    def put_sidecar(self) -> tuple[SidecarDoc | None, tuple[str, ...]]:
        """Write the sidecar with the places of the tiles; there is none if no tensor is stored.

        Call it when all tasks are finished.
        """
        if not self.plan.stored:
            return None, ()
        row = {info.key: n for n, info in enumerate(self.infos)}
        columns = tiled_columns(
            (row[placed.info.key], file, placed.offset, placed.box, placed.tiling)
            for file, boxes in enumerate(self.files)
            for placed in boxes
        )
        data = encode_columns(columns, list(map(self.key, range(self.count))))
        table = TensorTable.of(map(self._doc, self.infos))
        sidecar, requires = put_sidecar(self.store, f"data/{self.attempt}", data, table)
        patches = (PATCHES,) if any(i.key in self.plan.bases for i in self.plan.stored) else ()
        return sidecar, (*requires, CODECS, *patches)


def _read(input_: Input, tiles: Sequence[PlacedBox]) -> tuple[list[NDArray[np.uint8]], bool]:
    """The bytes of tiles, and whether checksums cover all of them."""
    memories = [np.empty(tile.nbytes, np.uint8) for tile in tiles]
    pieces: dict[Key, tuple[TensorInfo, list[tuple[int, Piece]]]] = {}
    for number, tile in enumerate(tiles):
        piece = Piece(tile.box, 0, row_major(tile.box.shape))
        pieces.setdefault(tile.info.key, (tile.info, []))[1].append((number, piece))
    wanted = []
    for info, of_tensor in pieces.values():
        around = bounding_box(piece.box for _, piece in of_tensor)
        assert around is not None  # noqa: S101 - no tile is empty
        wanted.append((input_.within(info, around), of_tensor))
    return memories, input_.read(wanted, memories, threads=1)
