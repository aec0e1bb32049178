"""The files of torch.distributed.checkpoint (DCP): items in `.distcp` files, and `.metadata`, which locates them.

An item is an archive of `torch.save`: a chunk of a tensor, or any other value. Readers read whole
items, so large tensors are cut into several. `FileSystemReader` takes a folder for a checkpoint if
it has `.metadata`, which is therefore written last.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError
from ucformat.exporters.base import Span, TargetFile
from ucformat.exporters.pickle import ALLOWED, Call, Global, Instance, SavedTensor, dump
from ucformat.exporters.zip_file import torch_archive
from ucformat.geometry.box import Box
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.exporters.base import DistcpOptions, Part
    from ucformat.exporters.pickle import Storage
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import StatePath

METADATA = ".metadata"
_VERSION = "1.0.0"  # of DCP's format; readers before PyTorch 2.9 ignore it

_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA, _INDEX, _CHUNK, _TENSOR, _BYTES, _PROPERTIES, _ENCODING, _META = (
    Global(_MODULE, name)
    for name in (
        *(
            "Metadata",
            "MetadataIndex",
            "ChunkStorageMetadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
        ),
        *("TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
    )
)
_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_LAYOUT = Global("torch.serialization", "_get_layout")
_SIZE = Global("torch", "Size")
ALLOWED |= {
    _METADATA,
    _INDEX,
    _CHUNK,
    _TENSOR,
    _BYTES,
    _PROPERTIES,
    _ENCODING,
    _META,
    _INFO,
    _LAYOUT,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the target.

    Attributes:
        name: its name in the target (FQN).
        storage: returns the elements of a box of it, row-major.
        label: what it is in the source, for messages.
        leading: dims in which each chunk has one index.
        whole: whether its elements are known, and are one item of any size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: Callable[[Box], Storage]
    label: str
    leading: int = 0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """Another value of the target, by its name."""

    name: str
    value: Any


Entry = TensorEntry | ValueEntry


@dataclass(frozen=True, slots=True)
class _Item:
    """An entry, or a chunk of it, in the file of a number."""

    entry: Entry
    box: Box | None
    file: int
    offset: int
    nbytes: int


class ItemFiles:
    """Places the items of all entries in files."""

    def __init__(
        self,
        entries: Iterable[Entry],
        options: DistcpOptions,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, list[str]] = {}
        for alias, name in (aliases or {}).items():
            self._names.setdefault(name, []).append(alias)
        self._sizes: dict[tuple[str, tuple[int, ...], bool], int] = {}
        self._files: list[list[_Item]] = []
        self._items: dict[str, list[_Item]] = {}
        nbytes = 0
        for entry in entries:
            if entry.name in self._entries or entry.name in (aliases or {}):
                raise UnsupportedError(
                    f"two entries of the target would be {entry.name}", hint="rename one by a view"
                )
            self._entries[entry.name] = entry
            self._items[entry.name] = items = []
            for box in self._boxes(entry, options.max_item_bytes):
                size = self._nbytes(entry, box)
                if not self._files or nbytes + size > options.max_file_bytes:
                    self._files.append([])
                    nbytes = 0
                item = _Item(entry, box, len(self._files) - 1, nbytes, size)
                self._files[-1].append(item)
                items.append(item)
                nbytes += size

    def _boxes(self, entry: Entry, most: int) -> Iterator[Box | None]:
        if isinstance(entry, ValueEntry):
            return iter((None,))
        if Global("torch", entry.dtype) not in ALLOWED:
            raise UnsupportedError(
                f"{entry.label} has the dtype {entry.dtype}, which is not written to a file of "
                "PyTorch",
                hint="cast it with --cast, or export other tensors",
            )
        chunk = list(entry.shape)
        chunk[: entry.leading] = [1] * entry.leading
        for d in range(entry.leading, len(chunk)):
            row = max(1, math.prod(chunk[d + 1 :]) * ITEMSIZE[entry.dtype])
            if row * chunk[d] > most and not entry.whole:
                chunk[d] = max(1, most // row)
        starts = [range(0, max(n, 1), max(c, 1)) for n, c in zip(entry.shape, chunk, strict=True)]
        return (
            Box(
                start,
                tuple(min(c, n - a) for c, n, a in zip(chunk, entry.shape, start, strict=True)),
            )
            for start in product(*starts)
        )

    def _nbytes(self, entry: Entry, box: Box | None) -> int:
        """The size of an item: the same for all chunks of a dtype and shape, if their elements are read."""
        if box is None or isinstance(entry, ValueEntry):
            return _size(_parts(entry, box))
        key = (entry.dtype, box.shape, entry.whole)
        if key not in self._sizes:
            self._sizes[key] = _size(_parts(entry, box))
        return self._sizes[key]

    def files(self) -> Iterator[TargetFile]:
        """The files of the items."""
        for number, items in enumerate(self._files):
            nbytes = items[-1].offset + items[-1].nbytes
            yield TargetFile(_name(number), nbytes, partial(_file_parts, items), checksums=True)

    def metadata(self, paths: Mapping[str, StatePath] | None, save_id: str) -> TargetFile:
        """`.metadata`, which is last.

        Args:
            paths: the path of each entry in the program's state, by name; None: the format has
                none.
        """
        described: dict[str, Any] = {}
        stored: dict[Any, Any] = {}
        for name, entry in self._entries.items():
            for fqn in (name, *self._names.get(name, ())):
                described[fqn] = self._described(entry)
                for index, item in enumerate(self._items[name]):
                    stored[_index(fqn, item.box, index)] = _info(item)
        planner = (
            None if paths is None else {name: tuple(paths.get(name, (name,))) for name in described}
        )
        meta: dict[str, Any] = {
            "checkpoint_id": None,
            "save_id": save_id,
            "load_id": None,
            "modules": [],
        }
        state = {
            "state_dict_metadata": described,
            "planner_data": planner,
            "storage_data": stored,
            "storage_meta": Instance(_META, meta),
            "version": _VERSION,
        }
        return TargetFile.of(METADATA, dump(Instance(_METADATA, state), _no_storage), last=True)

    def _described(self, entry: Entry) -> Instance:
        if isinstance(entry, ValueEntry):
            return Instance(_BYTES, {})
        layout, contiguous = Call(_LAYOUT, ("torch.strided",)), Call(_ENCODING, (0,))
        properties = Instance(
            _PROPERTIES, (Global("torch", entry.dtype), layout, False, contiguous, False)
        )
        chunks = [
            Instance(
                _CHUNK,
                {"offsets": _torch_size(item.box.start), "sizes": _torch_size(item.box.shape)},
            )
            for item in self._items[entry.name]
            if item.box is not None
        ]
        return Instance(
            _TENSOR, {"properties": properties, "size": _torch_size(entry.shape), "chunks": chunks}
        )


def save_id_of(source: Checkpoint, infos: Sequence[TensorInfo], options: object) -> str:
    """A UUID that identifies what is exported."""
    facts = [source.id, repr(options), [(*i.key, i.dtype, i.shape) for i in infos]]
    return str(uuid.UUID(bytes=hashlib.sha256(json.dumps(facts).encode()).digest()[:16], version=4))


def _name(number: int) -> str:
    return f"__{number}_0.distcp"


def _parts(entry: Entry, box: Box | None, spans: int = 0) -> tuple[Part, ...]:
    if isinstance(entry, ValueEntry):
        return torch_archive(entry.value, spans=spans)
    assert box is not None  # noqa: S101 - it is a tensor's
    return torch_archive(SavedTensor(entry.storage(box), box.shape), spans=spans)


def _file_parts(items: Sequence[_Item]) -> Iterator[Part]:
    spans = 0
    for item in items:
        parts = _parts(item.entry, item.box, spans)
        assert _size(parts) == item.nbytes, item.entry.name  # noqa: S101 - otherwise all items after it are misplaced
        spans += sum(isinstance(part, Span) for part in parts)
        yield from parts


def _size(parts: Iterable[Part]) -> int:
    return sum(len(p) if isinstance(p, bytes) else p.nbytes for p in parts)


def _torch_size(sizes: tuple[int, ...]) -> Call:
    return Call(_SIZE, (sizes,))


def _index(name: str, box: Box | None, index: int) -> Instance:
    offset = None if box is None else _torch_size(box.start)
    return Instance(
        _INDEX, {"fqn": name, "index": None if box is None else index, "offset": offset}
    )


def _info(item: _Item) -> Instance:
    return Instance(
        _INFO, {"relative_path": _name(item.file), "offset": item.offset, "length": item.nbytes}
    )


def _no_storage(_: Storage) -> str:
    raise UnsupportedError("the metadata of a checkpoint holds no tensors")
