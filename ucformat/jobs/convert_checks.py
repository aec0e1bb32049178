"""Compares the bytes of a source with the checksums that its files carry, while they are read; and replicas of means.

A record is read piece by piece, in any order, by several threads. The CRC of each piece is made when it passes, counted
once, and put together with the others'; a record is equal only when every byte of it has passed. What is left in the
end of a record that was begun is read for that alone, and counted. Chunks that are read whole are compared as they are
read, or decoded; those that are read in parts, and blocks of which an extent has a part, here.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right, insort
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import ChecksumError
from ucformat.format.digest import CRC32_SHIFT, CRC32C_SHIFT
from ucformat.geometry.tensor import Extent, Tiles, single_extents
from ucformat.jobs.run import run, workers_for
from ucformat.reading.execute import checksum, place_checksum
from ucformat.reading.read import read_flat
from ucformat.schema.manifest import VerifiedDoc
from ucformat.sources.values import to_json
from ucformat.sources.zarr.values import is_checked
from ucformat.storage.watched import find_watched
from ucformat.views.viewed import Viewed, inputs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Block, Key, TensorInfo
    from ucformat.reading.readable import FileRecord
    from ucformat.storage.base import Store
    from ucformat.views.viewed import ComputedFile

__all__ = ["StreamVerifier", "spread_of", "verifying"]

_READ = 4 << 20  # bytes that are read at once of what is left
_NAMED = 5  # of the tensors in a damaged record, so many are named
_RESIDUE = checksum(bytes(4))  # the CRC-32C of any bytes followed by their own


class _StreamSum:
    """What has passed of the bytes under one checksum."""

    __slots__ = ("crc", "expected", "file", "left", "shift", "start", "stop", "value", "waits", "what")

    def __init__(self, file: str, what: str, start: int, nbytes: int, expected: int, *, castagnoli: bool) -> None:
        self.file, self.what, self.start, self.stop, self.expected = file, what, start, start + nbytes, expected
        self.crc: Callable[[memoryview], int] = checksum if castagnoli else zlib.crc32
        self.shift = CRC32C_SHIFT if castagnoli else CRC32_SHIFT
        self.left = [(self.start, self.stop)]  # what has not passed yet, in order
        self.value, self.waits = 0, nbytes

    @property
    def begun(self) -> bool:
        return self.waits < self.stop - self.start

    def claim(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of these bytes has not passed before; from now on it has."""
        first = max(0, bisect_right(self.left, (start, start)) - 1)
        last, mine, rest = first, [], []
        for a, b in self.left[first:]:
            if a >= stop:
                break
            last += 1
            x, y = max(a, start), min(b, stop)
            if x >= y:
                rest.append((a, b))
                continue
            mine.append((x, y))
            rest += [part for part in ((a, x), (y, b)) if part[0] < part[1]]
        self.left[first:last] = rest
        return mine


class StreamVerifier:
    """The checksums of one source's files; `see` is told of all bytes that are read of them.

    The files in `compared` were compared as wholes before.
    """

    def __init__(self, source: Checkpoint, compared: Collection[str] = ()) -> None:
        self._source, self._origin, self._compared = source.source, source.origin, compared
        self._lock = threading.Lock()
        self._records: dict[str, tuple[list[int], list[FileRecord]]] = {}
        self._of_records: dict[tuple[str, int], _StreamSum] = {}
        self._blocks: dict[str, list[tuple[int, int, _StreamSum]]] = {}
        self._longest: dict[str, int] = {}
        self._computed: dict[str, bool] = {}  # file -> whether all it is made of carries checksums
        self._bare: set[Key] = set()  # tensors of which some bytes are under no checksum
        self._besides = 0
        if source.foreign:
            by_file: dict[str, list[FileRecord]] = {}
            for record in source.foreign.records():
                if record.crc32 is not None and record.nbytes:
                    by_file.setdefault(record.file, []).append(record)
            for file, records in by_file.items():
                records.sort(key=lambda r: r.near)
                self._records[file] = ([r.near for r in records], records)

    # --- what is to be compared

    def expect(self, info: TensorInfo, extents: Iterable[Extent | Tiles], box: Box | None) -> bool:
        """Compare what carries checksums of these extents, of which a box is read (None: parts that are not known).

        Returns whether all of them do; a tensor of which some do not is remembered.
        """
        whole = True
        for extent in extents:
            whole &= self._expect(info, extent, box)
        if not whole:
            self._bare.add(info.key)
        return whole

    def _expect(self, info: TensorInfo, extent: Extent | Tiles, box: Box | None) -> bool:
        if box is not None and not extent.box.intersect(box):
            return True
        if isinstance(extent, Tiles):
            if box is None or not _is_aligned(extent, box):
                for single in extent.extents():
                    self._expect(info, single, box)
            return True
        if extent.block is not None:
            if box is None or not box.contains(extent.box) or not _fills(extent, info.itemsize):
                self._add(extent.file, extent.block)
            return True
        if extent.file in self._compared or is_checked(self._source.store, extent.file):
            return True
        inputs = inputs_of(self._source.store, extent.file)
        if inputs is None:
            return self._is_in_record(extent, info.itemsize)
        if extent.file not in self._computed:
            whole = True
            for of, found in inputs:
                for single in single_extents(found):
                    whole &= self._expect(of, single, None)
            self._computed[extent.file] = whole
        return self._computed[extent.file]

    def planned(self, info: TensorInfo, extent: Extent | Tiles) -> Extent | Tiles:
        """An extent as it is to be read: one that has a part of a block, without the rest of the block.

        Extents that share a block would each have all of it read.
        """
        if isinstance(extent, Tiles) or extent.block is None or _fills(extent, info.itemsize):
            return extent
        return replace(extent, block=None)

    def carries(self, info: TensorInfo, extents: Iterable[Extent | Tiles]) -> bool:
        """Whether any of these extents has bytes under a checksum."""
        for e in extents:
            if isinstance(e, Tiles) or e.block is not None or is_checked(self._source.store, e.file):
                return True
            inputs = inputs_of(self._source.store, e.file)
            if inputs is not None:
                if any(self.carries(of, found) for of, found in inputs):
                    return True
            elif e.box.size and self._in_records(e.file, e.offset, e.last + info.itemsize):
                return True
        return False

    def _add(self, file: str, block: Block) -> None:
        nbytes = block.nbytes + (4 if block.crc32c is None else 0)
        expected = _RESIDUE if block.crc32c is None else block.crc32c
        if block.placed:
            expected ^= CRC32C_SHIFT(place_checksum(file, block.offset), nbytes)
        if not block.nbytes:
            return
        with self._lock:
            known = self._blocks.setdefault(file, [])
            at = bisect_right(known, (block.offset, nbytes), key=lambda k: k[:2])
            if at and known[at - 1][:2] == (block.offset, nbytes):
                return
            what = f"crc32c differs (block at byte {block.offset})"
            one = _StreamSum(file, what, block.offset, nbytes, expected, castagnoli=True)
            insort(known, (block.offset, nbytes, one), key=lambda k: k[:2])
            self._longest[file] = max(self._longest.get(file, 0), nbytes)

    def _is_in_record(self, extent: Extent, itemsize: int) -> bool:
        if not extent.box.size:
            return True
        stop = extent.last + itemsize
        sums = self._in_records(extent.file, extent.offset, stop)
        return any(s.start <= extent.offset and stop <= s.stop for s in sums)

    # --- what passes

    def see(self, file: str, at: int, data: memoryview) -> None:
        """These bytes of a file were read.

        Raises:
            ChecksumError: they are the last of a record that is not what its checksum says.
        """
        stop = at + data.nbytes
        for one in (*self._in_records(file, at, stop), *self._in_blocks(file, at, stop)):
            with self._lock:
                parts = one.claim(max(at, one.start), min(stop, one.stop))
            if not parts:
                continue
            value = 0
            for a, b in parts:
                value ^= one.shift(one.crc(data[a - at : b - at]), one.stop - b)
            with self._lock:
                one.value ^= value
                one.waits -= sum(b - a for a, b in parts)
                done = not one.waits
            if done and one.value != one.expected:
                raise self._damaged(one)

    def _in_records(self, file: str, at: int, stop: int) -> list[_StreamSum]:
        if file not in self._records:
            return []
        near, records = self._records[file]
        found = []
        for n in range(max(0, bisect_right(near, at) - 1), len(records)):
            if near[n] >= stop:
                break
            one = self._of_records.get((file, n))
            if one is None:
                r = records[n]
                assert r.crc32 is not None  # noqa: S101 - others are left out
                what = f"the CRC-32 of its record {r.name} differs"
                one = self._of_records.setdefault(
                    (file, n), _StreamSum(file, what, r.locate(), r.nbytes, r.crc32, castagnoli=False)
                )
            if one.start < stop and at < one.stop:
                found.append(one)
        return found

    def _in_blocks(self, file: str, at: int, stop: int) -> list[_StreamSum]:
        if file not in self._blocks:
            return []
        with self._lock:
            known = self._blocks[file]
            first = bisect_right(known, at - self._longest[file], key=lambda k: k[0])
            last = bisect_right(known, stop - 1, key=lambda k: k[0])
            return [one for start, nbytes, one in known[first:last] if at < start + nbytes]

    # --- the end

    def unfinished(self) -> list[_StreamSum]:
        """What was begun, and of which bytes have not passed."""
        sums = [*self._of_records.values(), *(one for known in self._blocks.values() for *_, one in known)]
        return [one for one in sums if one.begun and one.waits]

    def finish(self, one: _StreamSum) -> None:
        """Read what is left of it."""
        buffer = memoryview(bytearray(min(_READ, one.waits)))
        for a, b in list(one.left):
            for at in range(a, b, _READ):
                part = buffer[: min(_READ, b - at)]
                self._source.store.read_into(one.file, at, [part])
                with self._lock:
                    self._besides += part.nbytes

    def described(self, infos: Sequence[TensorInfo]) -> VerifiedDoc:
        """Which of these tensors came in verified; what was not begun, no tensor has bytes in."""
        bare = [i.key for i in infos if i.key in self._bare]
        default = 2 * len(bare) <= len(infos)
        but = bare if default else [i.key for i in infos if i.key not in self._bare]
        return VerifiedDoc(default=default, but=tuple((k.name, k.state) for k in but), besides=self._besides)

    def _damaged(self, one: _StreamSum) -> ChecksumError:
        held = list(self._tensors_in(one))
        more = f" and {len(held) - _NAMED} more" if len(held) > _NAMED else ""
        named = f"; it holds {', '.join(map(str, held[:_NAMED]))}{more}" if held else ""
        return ChecksumError(
            f"{self._source.store.url}/{one.file}: {one.what}{named}",
            hint="restore the file from another copy, and run it again; nothing was committed (--no-verify, or "
            "verify=False, takes what is there)",
        )

    def _tensors_in(self, one: _StreamSum) -> Iterator[Key]:
        metadata = self._origin.metadata
        for info in metadata.tensor_list.tensors:
            for key in metadata.means.get(info.key, (info.key,)):
                for e in single_extents(self._origin.extents(key)):
                    if e.file == one.file and e.box.size and e.offset < one.stop and e.last + info.itemsize > one.start:
                        yield info.key
                        break


@contextmanager
def verifying(
    source: Checkpoint, compared: Collection[str] = (), *, on: bool, workers: int | None
) -> Iterator[StreamVerifier | None]:
    """Compare what is read of a checkpoint inside the block with the checksums that its files carry.

    Args:
        source: the checkpoint.
        compared: files that were compared as wholes before.
        on: whether to compare; without, and where nothing watches the files, there is no verifier.
        workers: checksums completed at once in the end (default: as `workers_for`).

    Raises:
        ChecksumError: a file is damaged.
    """
    watching = find_watched(source.store)
    if not on or watching is None:
        yield None
        return
    verifier = StreamVerifier(source, compared)
    with watching.observed(verifier.see):
        yield verifier
        for _ in run(verifier.finish, verifier.unfinished(), workers or workers_for(source.store)):
            pass


def _fills(extent: Extent, itemsize: int) -> bool:
    """Whether an extent has all of its block."""
    return extent.block is not None and extent.box.size * itemsize == extent.block.nbytes


def _is_aligned(tiles: Tiles, box: Box) -> bool:
    """Whether all chunks that a box meets lie in it as far as they are the tensor's."""
    common = tiles.box.intersect(box)
    if common is None:
        return True
    for start, n, first, chunk, size in zip(
        common.start, common.shape, tiles.box.start, tiles.chunk, tiles.box.shape, strict=True
    ):
        end = start + n - first
        if (start - first) % chunk or (end % chunk and end != size):
            return False
    return True


_ELEMENTS = 1 << 18  # of each contribution, held at once


def spread_of(view: Viewed | None, keys: Iterable[Key]) -> dict[str, dict[str, Any]]:
    """For each of these tensors that is a mean, by name and state: of how many values, and how far they lie apart.

    `max_abs_difference` is the largest that any element has between two of the values. Of a tensor made of several
    means, or of parts of them, it is the largest of these as wholes. Reads each contribution once, in bounded memory.
    """
    out: dict[str, dict[str, Any]] = {}
    if view is None:
        return out
    known: dict[int, float] = {}  # several tensors may be made of one mean
    for key in keys:
        files = {id(file): file for file in view.means(key)}
        for number, file in files.items():
            if number not in known:
                known[number] = _difference(view.store, file)
        if files:
            largest = float(np.max([known[number] for number in files]))  # NaN where one is
            values = max(len(file.inputs) for file in files.values())
            found = {"values": values, "max_abs_difference": to_json(largest)}
            out.setdefault(key.name, {})[key.state] = found
    return out


def _difference(store: Store, file: ComputedFile) -> float:
    info, largest = file.formula.info, 0.0
    for first in range(0, info.size, _ELEMENTS):
        last = min(first + _ELEMENTS, info.size)
        least = most = None
        for view, extents in zip(file.formula.inputs, file.inputs, strict=True):
            values = read_flat(store, view.info, extents(), first, last).astype(np.float64)
            least = values if least is None else np.minimum(least, values)
            most = values if most is None else np.maximum(most, values)
        if least is not None and most is not None:
            with np.errstate(invalid="ignore"):  # infinities
                apart = np.where(least == most, 0.0, most - least)
            largest = float(np.maximum(largest, apart.max()))
    return largest
