"""The `.metadata` of a PyTorch DCP checkpoint, and the items in its `.distcp` files.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`:

- `state_dict_metadata`: by the dotted name of each entry a tensor's dtype, size and chunks, or that it is bytes;
- `planner_data`: by the same names the path in the state dict (PyTorch 2.0 and later; not all planners give it);
- `storage_data`: for each chunk (by name and offsets) and each bytes entry the file, offset and length.

ByteCheckpoint's `.metadata` has the same parts under its own classes.

A `.distcp` file holds small archives of torch.save, one after another. An item of tensor data is what torch.save wrote
of one chunk, so that its bytes are stored raw; an item of bytes is what torch.save wrote of any value. An archive is
read by its ends, two to four kilobytes, and what was found is kept.
"""

from __future__ import annotations

import re
import reprlib
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.geometry.box import Box
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import Extent, TensorInfo
from ucformat.sources.dcp.folder import FILE
from ucformat.sources.pickle.file import ShutFile, TorchFile, TorchZip, open_file
from ucformat.sources.pickle.stand_ins import Dtype, Inert, StoredTensor
from ucformat.sources.pickle.unpickler import unpickle
from ucformat.storage.base import ByteRange, check_key
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.reading.readable import FileRecord
    from ucformat.sources.dcp.names import Path
    from ucformat.storage.base import Store

__all__ = ["MAX_METADATA", "Files", "Items", "Metadata", "TensorEntry", "read_metadata"]

_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MAX_METADATA = 2 << 30  # bytes; 10^6 chunks take about 300 MB
_DIMS = 64  # torch's own limit
_LARGEST = 1 << 62  # of a size or an offset
_DEEP, _LONG = 64, 16 << 10  # parts of a path, and characters of it; characters of a file's name


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and the boxes that were saved of it."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(slots=True)
class Metadata:
    """All entries by their dotted names, in the order of the program's state dict where it is told."""

    file: str
    root: Inert
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)  # of each entry of which the file tells it
    stored: dict[tuple[str, tuple[int, ...] | None], ByteRange] = field(default_factory=dict)
    chunks: int = 0  # so many may still be listed, while it is read: one list may be shared by all tensors

    @property
    def files(self) -> tuple[str, ...]:
        """The files with items, as keys below the folder of `.metadata`."""
        return tuple(sorted({s.file for s in self.stored.values()}))

    @property
    def save_id(self) -> str:
        """The UUID that torch's writer gives each save; of others, and before PyTorch 2.3, nothing."""
        told = self.root.get("storage_meta")
        found = told.get("save_id") if isinstance(told, Inert) else None
        return found if isinstance(found, str) and _UUID.fullmatch(found) else ""


def read_metadata(store: Store, key: str = FILE, *, allow: tuple[str, ...] = ()) -> Metadata:
    """Read and check it; files are keys of the store, below the folder that `key` lies in."""
    size = store.info(key).size
    if size > MAX_METADATA:
        raise UnsupportedError(f"{key} has {size:,} bytes, more than {MAX_METADATA:,}")
    root = unpickle(store.read(key, 0, size), file=key, storage_nbytes=lambda _: 0, allow=allow)
    return _parse(key, root, size)


def _parse(key: str, root: Any, size: int) -> Metadata:
    if not isinstance(root, Inert) or root.name.rpartition(".")[2] != "Metadata" or not isinstance(root.state, dict):
        raise IntegrityError(f"{key} is not the metadata of a checkpoint, but {_shown(root)}")
    meta = Metadata(key, root, chunks=size)
    _entries(meta, root.get("state_dict_metadata"))
    _paths(meta, root.get("planner_data"))
    _storage(meta, root.get("storage_data"), key.removesuffix(FILE))
    return meta


def _entries(meta: Metadata, found: Any) -> None:
    if not isinstance(found, dict):
        raise _damaged(meta, "has no `state_dict_metadata`")
    for fqn, entry in found.items():
        if not isinstance(fqn, str) or not isinstance(entry, Inert):
            raise _damaged(meta, f"has the entry {_shown(fqn)}, which is {_shown(entry)}")
        kind = entry.name.rpartition(".")[2]
        if kind == "BytesStorageMetadata":
            meta.values.append(fqn)
        elif kind == "TensorStorageMetadata":
            meta.tensors[fqn] = _tensor(meta, fqn, entry)
        else:
            raise UnsupportedError(f"{meta.file}: {fqn} is a {entry.name}, which ucformat does not know")


def _tensor(meta: Metadata, fqn: str, entry: Inert) -> TensorEntry:
    properties, shape, chunks = entry.get("properties"), entry.get("size"), entry.get("chunks")
    told = properties.state if isinstance(properties, Inert) else None
    dtype = told.get("dtype") if isinstance(told, dict) else told[0] if isinstance(told, tuple) and told else None
    if not isinstance(dtype, Dtype) or not _sizes(shape) or not isinstance(chunks, list):
        raise _damaged(meta, f"says of {fqn} neither dtype nor shape ({_shown(dtype)}, {_shown(shape)})")
    meta.chunks -= len(chunks)
    if meta.chunks < 0:
        raise _damaged(meta, f"lists more chunks, with those of {fqn}, than fit into it")
    return TensorEntry(dtype.name, shape, tuple(_box(meta, fqn, chunk, shape) for chunk in chunks))


def _box(meta: Metadata, fqn: str, chunk: Any, shape: tuple[int, ...]) -> Box:
    start: Any = chunk.get("offsets") if isinstance(chunk, Inert) else None
    sizes: Any = chunk.get("sizes") if isinstance(chunk, Inert) else None
    if not _sizes(start) or not _sizes(sizes) or not len(start) == len(sizes) == len(shape):
        raise _damaged(
            meta, f"has a chunk of {fqn} that is no box of {_shown(shape)}: {_shown(start)}, {_shown(sizes)}"
        )
    return Box(start, sizes)


def _sizes(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= _DIMS and all(type(n) is int and 0 <= n < _LARGEST for n in value)


def _paths(meta: Metadata, found: Any) -> None:
    """The paths of `planner_data`, where it is what torch's own planners write; and the entries in their order."""
    if not isinstance(found, dict):
        return
    for fqn, path in found.items():
        if (
            isinstance(fqn, str)
            and isinstance(path, tuple | list)
            and 0 < len(path) <= _DEEP
            and all(type(p) in (str, int) for p in path)
        ):
            if sum(len(p) if isinstance(p, str) else _DEEP if p.bit_length() > _DEEP else 1 for p in path) > _LONG:
                raise _damaged(meta, f"gives the entry {_shown(fqn)} an impossible path")
            meta.paths[fqn] = tuple(path)
    order = {fqn: i for i, fqn in enumerate(meta.paths)}
    last = len(order)
    meta.tensors = dict(sorted(meta.tensors.items(), key=lambda item: order.get(item[0], last)))
    meta.values.sort(key=lambda fqn: order.get(fqn, last))


def _storage(meta: Metadata, found: Any, below: str) -> None:
    if not isinstance(found, dict):
        raise _damaged(meta, "has no `storage_data`")
    known: set[str] = set()
    for index, info in found.items():
        fqn, start = (index.get("fqn"), index.get("offset")) if isinstance(index, Inert) else (None, None)
        if not isinstance(fqn, str) or (start is not None and not _sizes(start)) or not isinstance(info, Inert):
            raise _damaged(meta, f"says where {_shown(index)} is stored, which is no entry")
        file, offset, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str) or len(file) > _LONG or not _sizes((offset, nbytes)):
            raise _damaged(meta, f"does not say where {fqn} is stored: {_shown(info.state)}")
        if transforms := info.get("transform_descriptors"):
            raise UnsupportedError(
                f"{meta.file}: {fqn} went through {_shown(transforms)} when it was written, so it cannot be read in "
                "place",
                hint="load it with torch.distributed.checkpoint, and save it again without stream extensions",
            )
        if file not in known:
            check_key(below + file)
            known.add(file)
        meta.stored[fqn, start] = ByteRange(below + file, offset, nbytes)


def _damaged(meta: Metadata, what: str) -> IntegrityError:
    return IntegrityError(f"{meta.file} {what}", hint="the file is damaged; copy it again from where it was saved")


def _shown(value: Any) -> str:
    try:
        return value.name[:200] if isinstance(value, Inert) else reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a huge {type(value).__name__}"


_HEAD = 4 << 10  # bytes of an archive before its data; torch writes some 700
_GAP, _RANGE = 4 << 10, 4 << 20  # values that lie so close together are read together, up to so many bytes
_RESTORE = "restore it from another copy of the checkpoint: each rank wrote files of its own, and all are needed"


class Files:
    """Which files there are and how long, listed once when somebody asks."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._sizes: dict[str, int] | None = None

    def check(self, stretch: ByteRange, what: str) -> None:
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

    def stretch(self, fqn: str, box: Box | None, info: TensorInfo | None = None) -> ByteRange:
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

    def chunk(self, fqn: str, box: Box, stretch: ByteRange, info: TensorInfo) -> list[Extent]:  # noqa: ARG002
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

    def _parse(self, box: Box, stretch: ByteRange, info: TensorInfo) -> list[Extent]:
        file = TorchFile(self.store, stretch, f"{info.key}{box}", allow=self._allow)
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
        where: dict[str, ByteRange] = {}
        for fqn in fqns:
            entry = self.meta.tensors.get(fqn)
            where[fqn] = self.stretch(fqn, entry.boxes[0] if entry and len(entry.boxes) == 1 else None)
        ahead = cast("Store", _Ahead(self.store, where.values()))
        return {fqn: open_file(ahead, stretch, fqn, allow=self._allow) for fqn, stretch in where.items()}

    def records(self) -> Iterator[FileRecord]:
        """Every record of every item's archive."""

        def of(item: tuple[tuple[str, tuple[int, ...] | None], ByteRange]) -> list[FileRecord]:
            (fqn, start), stretch = item
            name = fqn if start is None else f"{fqn}{list(start)}"
            self._files.check(stretch, name)
            return list(TorchZip(self.store, stretch, name).records())

        for some in map_io(of, self.meta.stored.items()):
            yield from some


class _Ahead:
    """Reads of a store, of which those of small neighbouring stretches were made together."""

    def __init__(self, store: Store, stretches: Iterable[ByteRange]) -> None:
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


def _ranges(stretches: Iterable[ByteRange]) -> Iterator[tuple[str, int, int]]:
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
