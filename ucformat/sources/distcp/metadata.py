"""The `.metadata` of a PyTorch DCP checkpoint, and the items in its `.distcp` files.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`:

- `state_dict_metadata`: for each entry, by its dotted name (FQN), a tensor's dtype, size and
  chunks, or a mark for bytes;
- `planner_data`: by the same names, the path in the state dict (since PyTorch 2.0, and not with
  every planner);
- `storage_data`: for each chunk (by name and offsets) and each bytes entry, its file, offset and
  length.

ByteCheckpoint's `.metadata` has the same parts in classes of its own.

A `.distcp` file consists of small archives of torch.save, one for each item. An item is a chunk of
a tensor, whose bytes are stored raw, or any other value. Opening an archive takes two reads of two
to four kilobytes; the result is kept.
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
from ucformat.reading.repeats import first_repeated
from ucformat.reading.stand_ins import Dtype, Inert, OpaqueFile, StoredTensor, why_refused
from ucformat.sources.distcp import METADATA
from ucformat.sources.pickle.file import TorchFile, TorchZip, open_file
from ucformat.sources.pickle.unpickler import unpickle
from ucformat.storage.base import ByteRange, check_key, exists
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.reading.readable import FileRecord
    from ucformat.reading.readable import StatePath as Path
    from ucformat.storage.base import Store

_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MAX_METADATA = 2 << 30  # bytes; 10^6 chunks take about 300 MB
_MAX_DIMS = 64  # torch's own limit
_MAX_SIZE = 1 << 62  # of a dim, an offset or a file
_MAX_PARTS, _MAX_CHARS = 64, 16 << 10  # parts and characters of a path; characters of a file's name


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor, and the boxes of its chunks."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(slots=True)
class Metadata:
    """All entries by their dotted names, in the order of the state dict if `.metadata` has it."""

    file: str
    root: Inert
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    # in the state dict; of the entries in `planner_data`
    paths: dict[str, Path] = field(default_factory=dict)
    stored: dict[tuple[str, tuple[int, ...] | None], ByteRange] = field(default_factory=dict)
    #: The stream extensions of items that were written through such.
    transforms: dict[tuple[str, tuple[int, ...] | None], tuple[str, ...]] = field(
        default_factory=dict
    )
    chunks: int = 0  # while parsing: how many more the file can list, as one pickled list may be shared by all tensors

    @property
    def files(self) -> tuple[str, ...]:
        """The files with items, as keys of the store."""
        return tuple(sorted({s.file for s in self.stored.values()}))

    @property
    def save_id(self) -> str:
        """The UUID of the save, which PyTorch writes since 2.3; otherwise empty."""
        storage = self.root.get("storage_meta")
        save_id = storage.get("save_id") if isinstance(storage, Inert) else None
        return save_id if isinstance(save_id, str) and _UUID.fullmatch(save_id) else ""


def read_metadata(
    store: Store, key: str = METADATA, *, allow: tuple[str, ...] = (), transformed: bool = False
) -> Metadata:
    """Read and check a `.metadata` file.

    Args:
        transformed: whether items may have been written through stream extensions.
    """
    if not exists(store, key):
        raise MissingData(
            f"{store.url}/{key} is missing, which describes the files of all ranks",
            hint="the save did not finish, or the file was not copied: its name begins with a dot",
        )
    size = store.info(key).size
    if size > _MAX_METADATA:
        raise UnsupportedError(f"{key} has {size:,} bytes, more than {_MAX_METADATA:,}")
    root = unpickle(store.read(key, 0, size), file=key, storage_nbytes=lambda _: 0, allow=allow)
    meta = _parse(key, root, size)
    if meta.transforms and not transformed:
        (fqn, _), descriptors = next(iter(meta.transforms.items()))
        raise TransformedItems(
            f"{key}: {fqn} was transformed by {_brief(descriptors)} when it was saved, so it cannot "
            "be read in place",
            hint="ucformat.torch.Reader(path) loads it, and takes extensions that are not PyTorch's "
            "own as _extension_registry; or save it again without",
        )
    return meta


def _parse(key: str, root: Any, size: int) -> Metadata:
    if (
        not isinstance(root, Inert)
        or root.name.rpartition(".")[2] != "Metadata"
        or not isinstance(root.state, dict)
    ):
        raise IntegrityError(f"{key} is not the metadata of a checkpoint, but {_brief(root)}")
    meta = Metadata(key, root, chunks=size)
    # which are large: only what is made of them is kept
    _entries(meta, root.state.pop("state_dict_metadata", None))
    _paths(meta, root.state.pop("planner_data", None))
    _storage(meta, root.state.pop("storage_data", None), key.removesuffix(METADATA))
    return meta


def _entries(meta: Metadata, entries: Any) -> None:
    if not isinstance(entries, dict):
        raise _damaged(meta, "has no `state_dict_metadata`")
    for fqn, entry in entries.items():
        if not isinstance(fqn, str) or not isinstance(entry, Inert):
            raise _damaged(meta, f"has the entry {_brief(fqn)}, which is {_brief(entry)}")
        kind = entry.name.rpartition(".")[2]
        if kind == "BytesStorageMetadata":
            meta.values.append(fqn)
        elif kind == "TensorStorageMetadata":
            meta.tensors[fqn] = _tensor(meta, fqn, entry)
        else:
            raise UnsupportedError(
                f"{meta.file}: {fqn} is a {entry.name}, which ucformat does not know"
            )


def _tensor(meta: Metadata, fqn: str, entry: Inert) -> TensorEntry:
    properties, shape, chunks = entry.get("properties"), entry.get("size"), entry.get("chunks")
    state = properties.state if isinstance(properties, Inert) else None
    dtype = (
        state.get("dtype")
        if isinstance(state, dict)
        else state[0]
        if isinstance(state, tuple) and state
        else None
    )
    if not isinstance(dtype, Dtype) or not _sizes(shape) or not isinstance(chunks, list):
        raise _damaged(
            meta,
            f"has no valid dtype, shape and chunks of {fqn} ({_brief(dtype)}, {_brief(shape)})",
        )
    meta.chunks -= len(chunks)
    if meta.chunks < 0:
        raise _damaged(meta, f"lists more chunks, up to those of {fqn}, than fit into it")
    return TensorEntry(
        dtype.name, shape, tuple([_box(meta, fqn, chunk, shape) for chunk in chunks])
    )


def _box(meta: Metadata, fqn: str, chunk: Any, shape: tuple[int, ...]) -> Box:
    attributes = _attributes(chunk)
    start: Any = attributes.get("offsets")
    sizes: Any = attributes.get("sizes")
    if not _sizes(start) or not _sizes(sizes) or not len(start) == len(sizes) == len(shape):
        raise _damaged(
            meta,
            f"has a chunk of {fqn} that is no box of {_brief(shape)}: {_brief(start)}, "
            f"{_brief(sizes)}",
        )
    return Box(start, sizes)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object; none of anything else."""
    return value.attributes if isinstance(value, Inert) else {}


def _sizes(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) > _MAX_DIMS:
        return False
    for n in value:  # noqa: SIM110 - a hot loop; all() of a generator takes twice as long
        if type(n) is not int or not 0 <= n < _MAX_SIZE:
            return False
    return True


def _paths(meta: Metadata, planner_data: Any) -> None:
    """Read the paths in `planner_data`, if one of torch's planners wrote it, and sort the entries in its order."""
    if not isinstance(planner_data, dict):
        return
    for fqn, path in planner_data.items():
        if (
            isinstance(fqn, str)
            and isinstance(path, tuple | list)
            and 0 < len(path) <= _MAX_PARTS
            and all(type(p) in (str, int) for p in path)
        ):
            if (
                sum(
                    len(p)
                    if isinstance(p, str)
                    else _MAX_PARTS
                    if p.bit_length() > _MAX_PARTS
                    else 1
                    for p in path
                )
                > _MAX_CHARS
            ):
                raise _damaged(meta, f"gives the entry {_brief(fqn)} an impossible path")
            meta.paths[fqn] = tuple(path)
    order = {fqn: i for i, fqn in enumerate(meta.paths)}
    last = len(order)
    meta.tensors = dict(sorted(meta.tensors.items(), key=lambda item: order.get(item[0], last)))
    meta.values.sort(key=lambda fqn: order.get(fqn, last))


class TransformedItems(UnsupportedError):
    """The items were written through stream extensions of DCP."""


def _storage(meta: Metadata, storage_data: Any, prefix: str) -> None:
    if not isinstance(storage_data, dict):
        raise _damaged(meta, "has no `storage_data`")
    keys: dict[str, str] = {}
    for index, info in storage_data.items():
        entry, location = _attributes(index), _attributes(info)
        fqn, start = entry.get("fqn"), entry.get("offset")
        if (
            not isinstance(fqn, str)
            or (start is not None and not _sizes(start))
            or not isinstance(info, Inert)
        ):
            raise _damaged(meta, f"has a location of {_brief(index)}, which is not an entry")
        file: Any = location.get("relative_path")
        offset: Any = location.get("offset")
        nbytes: Any = location.get("length")
        if not isinstance(file, str) or len(file) > _MAX_CHARS or not _sizes((offset, nbytes)):
            raise _damaged(meta, f"has an invalid location of {fqn}: {_brief(info.state)}")
        if transforms := location.get("transform_descriptors"):
            if not isinstance(transforms, list | tuple) or not all(
                isinstance(t, str) and len(t) <= _MAX_CHARS for t in transforms
            ):
                raise _damaged(meta, f"has invalid extensions of {fqn}: {_brief(transforms)}")
            meta.transforms[fqn, start] = tuple(transforms)
        if file not in keys:
            keys[file] = check_key(prefix + file)
        meta.stored[fqn, start] = ByteRange(keys[file], offset, nbytes)
    if (repeated := first_repeated(meta.stored.values())) is not None:
        raise _damaged(
            meta,
            f"puts so many items at the same bytes of {repeated} that they are far more than it "
            "has",
        )


def _damaged(meta: Metadata, problem: str) -> IntegrityError:
    return IntegrityError(
        f"{meta.file} {problem}", hint="the file is damaged; copy it again from where it was saved"
    )


def _brief(value: Any) -> str:
    try:
        return value.name[:200] if isinstance(value, Inert) else reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a huge {type(value).__name__}"


_HEAD = 4 << 10  # bytes of an archive before its data, at most; torch writes about 700
# bytes between values that are read together, and of such a read
_MAX_GAP, _MAX_RANGE = (4 << 10, 4 << 20)


@dataclass(frozen=True, slots=True)
class _Template:
    """The bytes before the data in archives of one dtype, shape and size, and the strides of the data."""

    head: bytes
    strides: tuple[int, ...]


class Items:
    """The items of one checkpoint."""

    def __init__(self, store: Store, meta: Metadata, allow: tuple[str, ...]) -> None:
        self.store, self.meta, self._allow = store, meta, allow
        self._files = Files(store)
        self._extents: dict[tuple[str, Box], list[Extent]] = {}
        self._distinct: dict[str, list[Box]] = {}
        self._templates: dict[tuple[str, tuple[int, ...], int], _Template] = {}

    def extents(self, fqn: str, info: TensorInfo, within: Box | None = None) -> Iterator[Extent]:
        """Find the extents of a tensor entry, one for each chunk.

        Args:
            within: a box of the tensor: only chunks that overlap it. None: all chunks, which are
                checked to cover the tensor.
        """
        boxes = [box for box in self._boxes(fqn) if within is None or box.intersect(within)]
        ranges = {box: self.locate(fqn, box, info) for box in boxes}
        if within is None:
            prove(info, [(stored.file, box) for box, stored in ranges.items()])
        missing = [box for box in boxes if (fqn, box) not in self._extents]

        parsed = map_io(lambda box: self.chunk_extents(fqn, box, ranges[box], info), missing)
        self._extents |= {(fqn, box): extents for box, extents in zip(missing, parsed, strict=True)}
        return (e for box in boxes for e in self._extents[fqn, box])

    def _boxes(self, fqn: str) -> list[Box]:
        """The boxes of an entry's chunks, each once."""
        boxes = self._distinct.get(fqn)
        if boxes is None:
            self._distinct[fqn] = boxes = list(
                dict.fromkeys(b for b in self.meta.tensors[fqn].boxes if b.size)
            )
        return boxes

    def locate(self, fqn: str, box: Box | None, info: TensorInfo | None = None) -> ByteRange:
        """Find the byte range of an item, and check that its file has it.

        Args:
            box: the box of a chunk; None: the entry is bytes.
        """
        label = f"{info.key}{box}" if info else fqn
        start = box.start if box else None
        if (fqn, start) not in self.meta.stored:
            raise MissingData(
                f"{self.meta.file} has no location of {label}", hint="the save did not finish, or the file "
                "is damaged; use another checkpoint"
            )  # fmt: skip
        return self._place(fqn, start, label)

    def _place(self, fqn: str, start: tuple[int, ...] | None, label: str) -> ByteRange:
        """The byte range of an item that has one."""
        stored = self.meta.stored[fqn, start]
        self._files.check(stored, label)
        return stored

    def chunk_extents(
        self,
        fqn: str,  # noqa: ARG002
        box: Box,
        stored: ByteRange,
        info: TensorInfo,
    ) -> list[Extent]:
        """Find the extents of one chunk, from the archive that contains it.

        If an archive has the same size as an earlier one, and begins with the same bytes up to the
        data, then its pickle and the location of its data are the same, and nothing else of it is
        read.
        """
        kind = (info.dtype, box.shape, stored.nbytes)
        template = self._templates.get(kind)
        if (
            template is not None
            and self.store.read(stored.file, stored.offset, len(template.head)) == template.head
        ):
            return [Extent(box, stored.file, stored.offset + len(template.head), template.strides)]
        extents = self._parse(box, stored, info)
        start = extents[0].offset - stored.offset if len(extents) == 1 else _HEAD
        if template is None and start < _HEAD:
            self._templates[kind] = _Template(
                self.store.read(stored.file, stored.offset, start), extents[0].strides
            )
        return extents

    def _parse(self, box: Box, stored: ByteRange, info: TensorInfo) -> list[Extent]:
        file = TorchFile(self.store, stored, f"{info.key}{box}", allow=self._allow)
        tensor = file.value
        if isinstance(tensor, StoredTensor) and not tensor.readable:
            raise UnsupportedError(f"{stored.file}: {info.key}{box} {why_refused(tensor.dtype)}")
        if not isinstance(tensor, StoredTensor) or (tensor.dtype, tensor.shape) != (
            info.dtype,
            box.shape,
        ):
            actual = (
                f"{tensor.dtype} of shape {tensor.shape}"
                if isinstance(tensor, StoredTensor)
                else "no tensor"
            )
            raise IntegrityError(
                f"{stored.file}: {info.key}{box} should be {info.dtype} of shape {box.shape}, "
                f"but there is {actual}",
                hint="the files and .metadata are of different saves, or the file is damaged",
            )
        check_dense(tensor, stored, f"{info.key}{box}")
        return [
            Extent(e.box.shift(box.start), e.file, e.offset, e.strides) for e in file.whole(tensor)
        ]

    def values(self, fqns: Iterable[str]) -> dict[str, TorchFile | OpaqueFile]:
        """Open bytes entries, and tensors of one chunk; entries stored close together are read together.

        Returns:
            the archive of each; a `OpaqueFile` if its pickle contains classes that are not allowed.
        """
        where: dict[str, ByteRange] = {}
        for fqn in fqns:
            entry = self.meta.tensors.get(fqn)
            where[fqn] = self.locate(
                fqn, entry.boxes[0] if entry and len(entry.boxes) == 1 else None
            )
        ahead = cast("Store", _ReadAhead(self.store, where.values()))
        return {
            fqn: open_file(ahead, stored, fqn, allow=self._allow, exact=True)
            for fqn, stored in where.items()
        }

    def records(self) -> Iterator[FileRecord]:
        """List every record of every item's archive."""

        def records_of(
            item: tuple[tuple[str, tuple[int, ...] | None], ByteRange],
        ) -> list[FileRecord]:
            (fqn, start), _ = item
            name = fqn if start is None else f"{fqn}{list(start)}"
            return list(TorchZip(self.store, self._place(fqn, start, name), name).records())

        # tied tensors have one item
        named = {stored: index for index, stored in self.meta.stored.items()}
        for records in map_io(records_of, ((index, stored) for stored, index in named.items())):
            yield from records


def check_dense(tensor: StoredTensor, stored: ByteRange, label: str) -> None:
    """Check that an item holds each element of its tensor, as DCP writes them."""
    if tensor.nbytes > stored.nbytes:
        raise IntegrityError(
            f"{stored.file}: {label} has {tensor.nbytes:,} bytes, but its item has "
            f"{stored.nbytes:,}",
            hint="no save repeats elements; restore the file from another copy",
        )


class _ReadAhead:
    """A store whose small neighbouring ranges were read together in advance."""

    def __init__(self, store: Store, ranges: Iterable[ByteRange]) -> None:
        self._store = store
        self._ranges: dict[str, list[tuple[int, bytes]]] = {}
        for file, start, stop in _ranges(ranges):
            self._ranges.setdefault(file, []).append((start, store.read(file, start, stop - start)))

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        ranges = self._ranges.get(key, [])
        index = bisect_right(ranges, offset, key=lambda r: r[0]) - 1
        if nbytes is not None and index >= 0:
            start, data = ranges[index]
            if offset + nbytes <= start + len(data):
                return data[offset - start : offset - start + nbytes]
        return self._store.read(key, offset, nbytes)


def _ranges(ranges: Iterable[ByteRange]) -> Iterator[tuple[str, int, int]]:
    """The file, start and end of the reads that cover all small ranges, in order; larger ranges are left out."""
    file, start, stop = "", 0, 0
    for s in sorted(
        (s for s in ranges if s.nbytes <= _MAX_RANGE), key=lambda s: (s.file, s.offset)
    ):
        end = s.offset + s.nbytes
        if s.file == file and s.offset <= stop + _MAX_GAP and end - start <= _MAX_RANGE:
            stop = max(stop, end)
            continue
        if stop > start:
            yield file, start, stop
        file, start, stop = s.file, s.offset, end
    if stop > start:
        yield file, start, stop


_RESTORE_HINT = "restore it from another copy of the checkpoint: each rank wrote its own files, and all are needed"


class Files:
    """The files of a store and their sizes, listed once when first needed."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._sizes: dict[str, int] | None = None

    def check(self, stored: ByteRange, label: str) -> None:
        """Check that a file has all bytes of an item."""
        if self._sizes is None:
            self._sizes = {info.key: info.size for info in self.store.list()}
        size = self._sizes.get(stored.file)
        if size is None:
            raise MissingData(f"{stored.file} is missing; it holds {label}", hint=_RESTORE_HINT)
        if stored.offset + stored.nbytes > size:
            raise MissingData(
                f"{stored.file} ends at byte {size:,}, but {label} is stored at "
                f"{stored.offset:,} to "
                f"{stored.offset + stored.nbytes:,}",
                hint=_RESTORE_HINT,
            )
