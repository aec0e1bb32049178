"""The items of `.distcp` files: small archives of torch.save, one after another, found and opened when they are needed.

An item of tensor data is what torch.save wrote of one chunk, so that its bytes lie raw inside; one of bytes is what
torch.save wrote of any value. An archive is read by its ends, two to four kilobytes, and what was found is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ucformat.errors import IntegrityError, MissingData
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import Extent, TensorInfo
from ucformat.sources.pickle.file import ShutFile, TorchFile, TorchZip, Window, open_file
from ucformat.sources.pickle.stand_ins import StoredTensor
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.geometry.box import Box
    from ucformat.reading.readable import Record
    from ucformat.sources.dcp.metadata import Metadata, Stretch
    from ucformat.storage.base import Store

__all__ = ["Files", "Items"]

_HEAD = 4 << 10  # bytes of an archive before its data; torch writes some 700
_GAP, _RANGE = 4 << 10, 4 << 20  # values that lie so close together are read together, up to so many bytes
_RESTORE = "restore it from another copy of the checkpoint: each rank wrote files of its own, and all are needed"


class Files:
    """Which files there are and how long, listed once when somebody asks."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._sizes: dict[str, int] | None = None

    def check(self, stretch: Stretch, what: str) -> None:
        """MissingData where the file, or its end, is not there; `what` lies in it."""
        if self._sizes is None:
            self._sizes = {info.key: info.size for info in self.store.list()}
        size = self._sizes.get(stretch.file)
        if size is None:
            raise MissingData(f"{stretch.file} is missing; it holds {what}", hint=_RESTORE)
        if stretch.offset + stretch.nbytes > size:
            raise MissingData(
                f"{stretch.file} ends at byte {size:,}, but {what} lies at {stretch.offset:,} to "
                f"{stretch.offset + stretch.nbytes:,}",
                hint=_RESTORE,
            )


@dataclass(frozen=True, slots=True)
class _Alike:
    """What archives of one dtype, shape and size begin with, up to the data, and how these lie."""

    head: bytes
    strides: tuple[int, ...]


class Items:
    """The items of one checkpoint."""

    def __init__(self, store: Store, meta: Metadata, allow: tuple[str, ...]) -> None:
        self.store, self.meta, self._allow = store, meta, allow
        self._files = Files(store)
        self._extents: dict[tuple[str, Box], list[Extent]] = {}
        self._distinct: dict[str, list[Box]] = {}
        self._alike: dict[tuple[str, tuple[int, ...], int], _Alike] = {}

    def extents(self, fqn: str, info: TensorInfo, within: Box | None = None) -> Iterator[Extent]:
        """The extents of a tensor entry that meet a box, one for each chunk; of all (None), proved to cover it."""
        boxes = [box for box in self._boxes(fqn) if within is None or box.intersect(within)]
        at = {box: self.stretch(fqn, box, info) for box in boxes}
        if within is None:
            prove(info, [(stretch.file, box) for box, stretch in at.items()])
        missing = [box for box in boxes if (fqn, box) not in self._extents]

        found = map_io(lambda box: self.chunk(fqn, box, at[box], info), missing)
        self._extents |= {(fqn, box): extents for box, extents in zip(missing, found, strict=True)}
        return (e for box in boxes for e in self._extents[fqn, box])

    def _boxes(self, fqn: str) -> list[Box]:
        """The boxes of an entry's chunks, each once."""
        found = self._distinct.get(fqn)
        if found is None:
            self._distinct[fqn] = found = list(dict.fromkeys(b for b in self.meta.tensors[fqn].boxes if b.size))
        return found

    def stretch(self, fqn: str, box: Box | None, info: TensorInfo | None = None) -> Stretch:
        """Where an item lies; MissingData where the metadata or the files lack it."""
        what = f"{info.key}{box}" if info else fqn
        stretch = self.meta.stored.get((fqn, box.start if box else None))
        if stretch is None:
            raise MissingData(
                f"{self.meta.file} does not say in which file {what} lies", hint="the save did not finish, or the file "
                "is damaged; take another checkpoint"
            )  # fmt: skip
        self._files.check(stretch, what)
        return stretch

    def chunk(self, fqn: str, box: Box, stretch: Stretch, info: TensorInfo) -> list[Extent]:  # noqa: ARG002
        """The extents of one chunk, from the archive that holds it.

        An archive that has the size of an earlier one and begins with the same bytes, up to where that one's data
        begin, has the same pickle and its data at the same place: nothing else of it need be read.
        """
        kind = (info.dtype, box.shape, stretch.nbytes)
        like = self._alike.get(kind)
        if like is not None and self.store.read(stretch.file, stretch.offset, len(like.head)) == like.head:
            return [Extent(box, stretch.file, stretch.offset + len(like.head), like.strides)]
        found = self._parse(box, stretch, info)
        start = found[0].offset - stretch.offset if len(found) == 1 else _HEAD
        if like is None and start < _HEAD:
            self._alike[kind] = _Alike(self.store.read(stretch.file, stretch.offset, start), found[0].strides)
        return found

    def _parse(self, box: Box, stretch: Stretch, info: TensorInfo) -> list[Extent]:
        window = Window(stretch.offset, stretch.nbytes, f"{info.key}{box}")
        file = TorchFile(self.store, stretch.file, allow=self._allow, window=window)
        found = file.value
        if not isinstance(found, StoredTensor) or (found.dtype, found.shape) != (info.dtype, box.shape):
            what = f"{found.dtype} of shape {found.shape}" if isinstance(found, StoredTensor) else "no tensor"
            raise IntegrityError(
                f"{stretch.file}: {info.key}{box} should be {info.dtype} of shape {box.shape}, but there is {what}",
                hint="the files are of another save than .metadata, or damaged",
            )
        return [Extent(e.box.shift(box.start), e.file, e.offset, e.strides) for e in file.whole(found)]

    def values(self, fqns: Iterable[str]) -> dict[str, TorchFile | ShutFile]:
        """The values of bytes entries, and tensors of one chunk; what lies close together is read together.

        An entry whose pickle names what is not plain keeps no other from being read.
        """
        where: dict[str, Stretch] = {}
        for fqn in fqns:
            entry = self.meta.tensors.get(fqn)
            where[fqn] = self.stretch(fqn, entry.boxes[0] if entry and len(entry.boxes) == 1 else None)
        ahead = cast("Store", _Ahead(self.store, where.values()))
        return {
            fqn: open_file(ahead, s.file, allow=self._allow, window=Window(s.offset, s.nbytes, fqn))
            for fqn, s in where.items()
        }

    def records(self) -> Iterator[Record]:
        """Every record of every item's archive."""

        def of(item: tuple[tuple[str, tuple[int, ...] | None], Stretch]) -> list[Record]:
            (fqn, start), stretch = item
            name = fqn if start is None else f"{fqn}{list(start)}"
            self._files.check(stretch, name)
            return list(TorchZip(self.store, stretch.file, Window(stretch.offset, stretch.nbytes, name)).records())

        for some in map_io(of, self.meta.stored.items()):
            yield from some


class _Ahead:
    """Reads of a store, of which those of small neighbouring stretches were made together."""

    def __init__(self, store: Store, stretches: Iterable[Stretch]) -> None:
        self._store = store
        self._ranges: dict[str, list[tuple[int, bytes]]] = {}
        for file, start, stop in _ranges(stretches):
            self._ranges.setdefault(file, []).append((start, store.read(file, start, stop - start)))

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        ranges = self._ranges.get(key, [])
        at = bisect_right(ranges, offset, key=lambda r: r[0]) - 1
        if nbytes is not None and at >= 0:
            start, data = ranges[at]
            if offset + nbytes <= start + len(data):
                return data[offset - start : offset - start + nbytes]
        return self._store.read(key, offset, nbytes)


def _ranges(stretches: Iterable[Stretch]) -> Iterator[tuple[str, int, int]]:
    """Files and the bytes to be read of them at once, in order; larger stretches are left out."""
    file, start, stop = "", 0, 0
    for s in sorted((s for s in stretches if s.nbytes <= _RANGE), key=lambda s: (s.file, s.offset)):
        end = s.offset + s.nbytes
        if s.file == file and s.offset <= stop + _GAP and end - start <= _RANGE:
            stop = max(stop, end)
            continue
        if stop > start:
            yield file, start, stop
        file, start, stop = s.file, s.offset, end
    if stop > start:
        yield file, start, stop
