"""Tiles that are patches: what they are of, and reading that in the bases of the checkpoint.

A patch is of the same box of the tensor of the same name and state, however the base has stored it, and under whatever
layout. So bases are read as any checkpoint is: planned, verified, and through a store of their own.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import ChecksumError, IntegrityError, UcformatError
from ucformat.format.bases import place_of_base
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece, TensorInfo, Tiles
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.execute import ReadOptions, read_chunks, read_items
from ucformat.reading.plan import ReadItem, make_plan
from ucformat.schema.tensors import TILES
from ucformat.storage.concurrency import gc_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ucformat.format.bases import BaseCheckpoint, Bases
    from ucformat.format.sidecar import Sidecar
    from ucformat.geometry.tensor import Extent
    from ucformat.schema.tensors import TensorDoc, TensorTable
    from ucformat.storage.concurrency import Cache

_HERE = ReadOptions(threads=1)


class PatchedTiles:
    """The tiles of the encoded files of a checkpoint, and what its bases have in their places.

    Args:
        home: the url of the checkpoint.
        sidecar: reads the sidecar.
        shared: keeps what is read, for several checkpoints (None: nothing is kept).
    """

    def __init__(
        self,
        home: str,
        tensors: TensorTable,
        bases: Bases,
        sidecar: Callable[[], Sidecar],
        shared: Cache[memoryview] | None = None,
    ) -> None:
        self._home, self._tensors, self._bases, self._sidecar = home, tensors, bases, sidecar
        self._shared = shared
        self._by_file: dict[str, dict[int, tuple[Key, Box]]] = {}  # by offset

    def locate(self, file: str, start: int) -> tuple[Key, Box]:
        """The tensor and the box of the tile that begins at a byte of a plain file."""
        tiles = self._by_file.get(file)
        if tiles is None:
            tiles = self._by_file.setdefault(file, self._tiles_in(file))
        if start not in tiles:
            raise IntegrityError(
                f"{self._home}/{file}: its index has a tile at byte {start}, where no tensor has one",
                hint="restore it from another copy",
            )
        return tiles[start]

    @gc_paused()
    def _tiles_in(self, file: str) -> dict[int, tuple[Key, Box]]:
        tiles = self._sidecar().tiles_in(file)
        docs = {row: self._tensors[row] for row in {row for row, _ in tiles.values()}}
        keys = {row: Key(doc.name, doc.state) for row, doc in docs.items()}
        return {start: (keys[row], box) for start, (row, box) in tiles.items()}

    def read_base(
        self, number: int, key: Key, boxes: Sequence[Box], outs: Sequence[memoryview]
    ) -> None:
        """Read boxes of a tensor of a base, each row-major into memory of exactly its bytes."""
        doc = self._patch(number, key)
        try:
            self._read_base(doc, boxes, outs)
        except UcformatError as error:
            if error.in_base is None:
                error.in_base = place_of_base(self._home, self._bases.docs[number].url)
            raise

    def _read_base(self, doc: TensorDoc, boxes: Sequence[Box], outs: Sequence[memoryview]) -> None:
        base, info = self._bases.with_tensor(doc), _info(doc)
        # those tiles are shared already
        if self._shared is None or base.docs[info.key].codec == TILES:
            read_boxes(base, info, boxes, outs)
            return

        def read(box: Box, nbytes: int) -> memoryview:
            out = memoryview(bytearray(nbytes))
            read_boxes(base, info, [box], [out])
            return out

        for box, out in zip(boxes, outs, strict=True):
            name = f"{base.manifest.id} {info.key} {box}"
            out[:] = self._shared.get(name, lambda _, b=box, n=out.nbytes: read(b, n))  # type: ignore[misc]

    def read_of_base(self, number: int, key: Key, boxes: Sequence[Box]) -> int:
        """The bytes that `read_base` reads."""
        doc = self._patch(number, key)
        base, info = self._bases.with_tensor(doc), _info(doc)
        item = _item(info, base.extents(key, hull(boxes)), boxes)
        return make_plan([item], costs=base.store.costs).through(base.store).bytes_read

    def wrong_base(self, number: int) -> ChecksumError:
        """The error if the bytes of a base are not those of which a tile is a patch."""
        doc, place = self._bases.docs[number], self._bases.place(number)
        error = ChecksumError(
            "with the bytes of the base it has other bytes than were saved, so the base "
            f"{doc.id} of {self._home} at {place} is damaged, or another one is there",
            hint=f"`ucp verify {place}` names its damage; if there is none, bring the right base "
            "back, or restore this checkpoint from a copy that is whole",
        )
        error.in_base = place
        return error

    def lossy_dtype(self, key: Key) -> np.dtype[Any]:
        """The dtype of a tensor whose tiles may be encoded with loss."""
        doc = self._tensors[self._tensors.row(*key) or 0]
        if doc.lossy is None:
            raise IntegrityError(
                "it is encoded with loss, and the manifest does not say so of its tensor",
                hint="restore the file, or the manifest, from another copy",
            )
        return numpy_dtype(doc.stored_dtype)

    def _patch(self, number: int, key: Key) -> TensorDoc:
        """A tensor of which tiles are patches of that of a base."""
        doc = self._tensors[self._tensors.row(*key) or 0]
        if doc.base != number:
            raise IntegrityError(
                f"{self._home}: a tile of {key} is a patch of another base than the manifest says",
                hint="restore the file, or the manifest, from another copy",
            )
        return doc


def _info(doc: TensorDoc) -> TensorInfo:
    return TensorInfo(doc.name, doc.state, doc.stored_dtype, doc.shape)


def read_boxes(
    base: BaseCheckpoint, info: TensorInfo, boxes: Sequence[Box], outs: Sequence[memoryview]
) -> None:
    """Read boxes of a tensor of a base, in this thread, each row-major into memory of exactly its bytes."""
    label = f"{info.key} in the base {base.manifest.id} at {base.store.url}"
    extents = list(base.extents(info.key, hull(boxes)))
    runs = _chunk_runs(extents, boxes)
    if runs is None:
        memories = [np.frombuffer(out, np.uint8) for out in outs]
        item = _item(info, extents, boxes)
        read_items(base.store, [item], memories, [label] * len(outs), _HERE)
        return
    remaining = iter(outs)
    for tiles, offsets in runs:
        read_chunks(base.store, tiles, offsets, [*islice(remaining, len(offsets))], label)


def _chunk_runs(
    extents: Sequence[Extent | Tiles], boxes: Iterable[Box]
) -> list[tuple[Tiles, list[int]]] | None:
    """The chunks that boxes are, as runs of such as follow each other in a file, by offsets; None if one is no chunk.

    As a rule a base has the same tiles, which need no plan.
    """
    runs: list[tuple[Tiles, list[int]]] = []
    for box in boxes:
        for tiles in extents:
            if isinstance(tiles, Tiles) and (offset := tiles.offset_of(box)) is not None:
                break
        else:
            return None
        if runs and runs[-1][0] is tiles and runs[-1][1][-1] + tiles.pitch == offset:
            runs[-1][1].append(offset)
        else:
            runs.append((tiles, [offset]))
    return runs


def _item(info: TensorInfo, extents: Iterable[Extent | Tiles], boxes: Sequence[Box]) -> ReadItem:
    pieces = [(n, Piece(box, 0, row_major(box.shape))) for n, box in enumerate(boxes)]
    return ReadItem(info, extents, pieces)


def hull(boxes: Sequence[Box]) -> Box:
    """The smallest box around others."""
    start = tuple(map(min, zip(*(b.start for b in boxes), strict=True)))
    stop = tuple(map(max, zip(*(b.stop for b in boxes), strict=True)))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
