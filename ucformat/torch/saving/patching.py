"""What a rank has of the base of a save: the tiles of it that its own ones are compared with.

Each rank reads only the boxes that it writes, tile by tile, whatever ranks and layout have saved the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import Conflict, UsageError
from ucformat.format.encoding import Encoding, encode_rows, encode_tile
from ucformat.format.patched import hull, read_boxes
from ucformat.format.tile_index import tile_fingerprint
from ucformat.geometry.tensor import single_extents
from ucformat.references import open_reference
from ucformat.schema.tensors import TILES
from ucformat.storage.concurrency import thread_memory
from ucformat.torch.comm.merging import either, merged
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.base import open_base

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ucformat.format.bases import BaseCheckpoint
    from ucformat.geometry.box import Box
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.jobs.increments import Base
    from ucformat.storage.base import Bytes
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.options import SaveOptions


@message
class _Answer:
    """The base of a save, and the rows that changed on any rank; without an id there is no base."""

    id: str = ""
    place: str = ""
    changed: Mapping[str, bytes] = field(default_factory=dict)


class KeptTiles:
    """The tiles that a rank has written last, in its memory, so that the next patches of them read nothing."""

    def __init__(self) -> None:
        self._checkpoint = ""  # that has the tiles; none while another one is written
        self._tiles: dict[tuple[Key, Box], bytearray] = {}
        self._next: dict[tuple[Key, Box], bytearray] = {}

    def begin(self, base: str) -> None:
        """Begin a save on a base, of which tiles may be here."""
        if self._checkpoint != base:
            self._tiles = {}
        self._checkpoint, self._next = "", {}

    def find(self, key: Key, box: Box) -> memoryview | None:
        """The bytes of the base's tile; None if they are not here."""
        memory = self._tiles.get((key, box))
        return None if memory is None else memoryview(memory)

    def keep(self, key: Key, box: Box, data: Bytes) -> None:
        """Keep a tile that is written, in the memory of the base's."""
        memory = self._tiles.pop((key, box), None) or bytearray(memoryview(data).nbytes)
        memory[:] = data
        self._next[key, box] = memory

    def end(self, checkpoint: str) -> None:
        """Note that what was kept is committed."""
        self._checkpoint, self._tiles, self._next = checkpoint, self._next, {}


def agree_on_base(
    group: Group,
    options: SaveOptions,
    home: str,
    changed: Mapping[str, bytes],
    kept: KeptTiles | None = None,
) -> tuple[Base | None, SaveOptions, TilePatcher | None]:
    """Find the base of a save; all ranks call this together.

    Args:
        home: the url of the checkpoint that is saved.
        changed: that of `StateInfo`.
        kept: of this rank.

    Returns:
        The base, on rank 0; the options, which depend on whether there is one; and what encodes tiles.
    """
    base: Base | None = None
    if not options.compares_tiles:
        with group.sharing_errors():
            base = None if group.rank else open_base(options.base, home)
        return base, options, None

    def answer(changed: Mapping[str, bytes]) -> _Answer:
        nonlocal base
        base = open_base(options.base, home)
        if base is None:
            return _Answer()
        if options.patch:
            base.check_depth()
        return _Answer(base.manifest.id, base.url, changed)

    def both(a: Mapping[str, bytes], b: Mapping[str, bytes]) -> dict[str, bytes]:
        return merged(a, b, either)

    agreed: _Answer = group.combine(changed, both, Mapping[str, bytes], answer, _Answer)
    if not agreed.id:
        return None, replace(options, patch=False), None
    with group.sharing_errors():
        source = open_reference(agreed.place).universal
        if source is None or source.manifest.id != agreed.id:
            raise Conflict(
                f"{agreed.place} is no longer the checkpoint {agreed.id}, on which this one is based",
                hint="save again",
            )
        if kept is not None:
            kept.begin(agreed.id)
        patcher = TilePatcher(
            source, agreed.changed, kept, patch=options.patch, verify=options.verify_changed
        )
    return base, replace(options, form="packed"), patcher


class TilePatcher:
    """Encodes tiles against those of a base.

    Args:
        base: the opened base.
        changed: a bit for each row of some tensors, by name: whether it changed.
        kept: tiles of the base that need not be read.
        patch: whether tiles may be patches; otherwise only equal ones are left out.
        verify: whether rows that did not change are compared with the base.
    """

    def __init__(
        self,
        base: BaseCheckpoint,
        changed: Mapping[str, bytes],
        kept: KeptTiles | None = None,
        *,
        patch: bool,
        verify: bool,
    ) -> None:
        self._base, self._changed, self._patch, self._verify = base, changed, patch, verify
        self._kept = kept

    def fits(self, info: TensorInfo) -> bool:
        """Whether the base has the tensor, in the same dtype and shape."""
        doc = self._base.docs.get(info.key)
        return doc is not None and (doc.stored_dtype, doc.shape) == (info.dtype, info.shape)

    def encode(
        self, info: TensorInfo, tiles: Sequence[tuple[Box, Bytes, Sums]]
    ) -> list[tuple[Encoding, Bytes] | None]:
        """Encode tiles of a tensor; None for each that is not to be a patch.

        What is needed of the base is read at once.

        Args:
            tiles: the box, the bytes and the fingerprint of each.
        """
        encoded: list[tuple[Encoding, Bytes] | None] = [None] * len(tiles)
        if not self.fits(info):
            return encoded
        compared: list[int] = []  # the numbers of those that need the bytes of the base
        base_fingerprints = self._fingerprints(info.key, [box for box, _, _ in tiles])
        for number, (box, data, fingerprint) in enumerate(tiles):
            before = base_fingerprints[number]
            rows = self._changed_rows(info, box)
            if before == fingerprint:
                encoded[number] = Encoding.SAME, b""
            elif rows is None and self._patch:
                compared.append(number)
            elif rows is not None:
                if self._verify:
                    self._check(info, box, data, rows)
                elif not rows.any() and before is not None:
                    raise _unmarked(info.key, box.start[0], box.stop[0])
                if self._patch or not rows.any():
                    encoded[number] = encode_rows(data, info.itemsize, rows)
        bases = self._read(info, [tiles[number][0] for number in compared])
        for number, base in zip(compared, bases, strict=True):
            encoded[number] = encode_tile(tiles[number][1], info.itemsize, base)
        if self._kept is not None:
            for box, data, _ in tiles:
                self._kept.keep(info.key, box, data)
        return encoded

    def is_same(self, info: TensorInfo, box: Box, fingerprint: Sums) -> bool:
        """Whether a tile has the fingerprint of the base's tile of the same box."""
        return self.fits(info) and self._fingerprints(info.key, [box]) == [fingerprint]

    def _changed_rows(self, info: TensorInfo, box: Box) -> NDArray[np.bool_] | None:
        """Which rows of a box changed; None if that is not known, or may be all, or the base's are lossy."""
        bits = self._changed.get(info.name)
        if self._base.docs[info.key].lossy is not None:
            return None
        if bits is None or not info.shape or len(bits) != -(-info.shape[0] // 8):
            return None
        first, last = box.start[0], box.stop[0]
        some = np.frombuffer(bits, np.uint8)[first // 8 : -(-last // 8)]
        inside = np.unpackbits(some)[first % 8 : first % 8 + last - first]
        return None if inside.all() else inside.view(np.bool_)

    def _read(self, info: TensorInfo, boxes: Sequence[Box]) -> list[memoryview]:
        """The bytes of the base in some boxes; valid until the thread reads others."""
        kept = self._kept
        outs = [None if kept is None else kept.find(info.key, box) for box in boxes]
        lacking = [box for box, out in zip(boxes, outs, strict=True) if out is None]
        if lacking:
            ends = [*accumulate(box.size * info.itemsize for box in lacking)]
            memory = thread_memory("base", ends[-1]).data
            read = [memory[begin:end] for begin, end in pairwise([0, *ends])]
            read_boxes(self._base, info, lacking, read)
            rest = iter(read)
            outs = [next(rest) if out is None else out for out in outs]
        return [out for out in outs if out is not None]

    def _fingerprints(self, key: Key, boxes: Sequence[Box]) -> list[Sums | None]:
        """The fingerprint of the base's tile of each box; None if none of its tiles has just this box."""
        if self._base.docs[key].codec != TILES:
            return [None] * len(boxes)
        within = hull(boxes)
        extents = {e.box: e for e in single_extents(self._base.extents(key, within), within)}
        return [
            tile_fingerprint(self._base.store, extents[box]) if box in extents else None
            for box in boxes
        ]

    def _check(self, info: TensorInfo, box: Box, data: Bytes, changed: NDArray[np.bool_]) -> None:
        """Check that the rows that are not marked are equal to those of the base."""
        shape = (box.shape[0], -1)
        new = np.frombuffer(data, np.uint8).reshape(shape)
        (base,) = self._read(info, [box])
        differ = (new != np.frombuffer(base, np.uint8).reshape(shape)).any(1) & ~changed
        if differ.any():
            first = box.start[0] + int(differ.argmax())
            last = box.stop[0] - int(differ[::-1].argmax())
            raise _unmarked(info.key, first, last)


def _unmarked(key: Key, first: int, stop: int) -> UsageError:
    return UsageError(
        f"{key}: rows in {first}:{stop} changed since the base was saved, and `changed` does not "
        "mark them",
        hint="mark every row that an optimizer step may change: weight decay, momentum and dense "
        "optimizers change rows without gradients, too; or leave the tensor out of changed",
    )
