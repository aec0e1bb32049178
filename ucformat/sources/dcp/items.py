"""The items of `.distcp` files: small archives of torch.save, one after another, found and opened when they are needed.

An item of tensor data is what torch.save wrote of one chunk, so that its bytes lie raw inside; one of bytes is what
torch.save wrote of any value. An archive is read by its ends, two to four kilobytes, and what was found is kept.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from ucformat.errors import IntegrityError, MissingData
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import Extent, TensorInfo
from ucformat.sources.stand_ins import StoredTensor
from ucformat.sources.torch_file import TorchFile
from ucformat.sources.torch_zip import TorchZip, Window

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.geometry.box import Box
    from ucformat.sources.base import Record
    from ucformat.sources.dcp.metadata import Metadata, Stretch, TensorEntry
    from ucformat.storage.base import Store

__all__ = ["Files", "Items"]

_THREADS = 8
_FEW = 3  # so many chunks are opened one after another
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


class Items:
    """The items of one checkpoint."""

    def __init__(self, store: Store, meta: Metadata, allow: tuple[str, ...]) -> None:
        self.store, self.meta, self._allow = store, meta, allow
        self._files = Files(store)
        self._extents: dict[str, list[Extent]] = {}
        self._lock = threading.Lock()

    def extents(self, fqn: str, info: TensorInfo) -> Iterator[Extent]:
        """The extents of a tensor entry, one for each chunk, proved to cover it."""
        found = self._extents.get(fqn)
        if found is None:
            found = self._find(fqn, self.meta.tensors[fqn], info)
            with self._lock:
                self._extents[fqn] = found
        return iter(found)

    def _find(self, fqn: str, entry: TensorEntry, info: TensorInfo) -> list[Extent]:
        boxes = list(dict.fromkeys(box for box in entry.boxes if box.size))
        at = {box: self.stretch(fqn, box, info) for box in boxes}
        prove(info, [(stretch.file, box) for box, stretch in at.items()])
        if len(boxes) <= _FEW:
            return [e for box in boxes for e in self.chunk(fqn, box, at[box], info)]
        with ThreadPoolExecutor(_THREADS) as pool:
            return [e for some in pool.map(lambda box: self.chunk(fqn, box, at[box], info), boxes) for e in some]

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
        """The extents of one chunk, from the archive that holds it."""
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

    def values(self, fqns: Iterable[str]) -> dict[str, TorchFile]:
        """The values of bytes entries, and tensors of one chunk; what lies close together is read together."""
        where: dict[str, Stretch] = {}
        for fqn in fqns:
            entry = self.meta.tensors.get(fqn)
            where[fqn] = self.stretch(fqn, entry.boxes[0] if entry and len(entry.boxes) == 1 else None)
        ahead = cast("Store", _Ahead(self.store, where.values()))
        return {
            fqn: TorchFile(ahead, s.file, allow=self._allow, window=Window(s.offset, s.nbytes, fqn))
            for fqn, s in where.items()
        }

    def records(self) -> Iterator[Record]:
        """Every record of every item's archive."""

        def of(item: tuple[tuple[str, tuple[int, ...] | None], Stretch]) -> list[Record]:
            (fqn, start), stretch = item
            name = fqn if start is None else f"{fqn}{list(start)}"
            self._files.check(stretch, name)
            return list(TorchZip(self.store, stretch.file, Window(stretch.offset, stretch.nbytes, name)).records())

        with ThreadPoolExecutor(_THREADS) as pool:
            for some in pool.map(of, self.meta.stored.items()):
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
