"""What `.metadata` says: every entry of a PyTorch DCP checkpoint, and where in which file its bytes lie.

It is a pickle of `torch.distributed.checkpoint.metadata.Metadata`:

- `state_dict_metadata`: by the dotted name of each entry a tensor's dtype, size and chunks, or that it is bytes;
- `planner_data`: by the same names the path in the state dict (PyTorch 2.0 and later; not all planners give it);
- `storage_data`: for each chunk (by name and offsets) and each bytes entry the file, offset and length.

ByteCheckpoint's `.metadata` has the same parts under its own classes.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, Refused
from ucformat.geometry.box import Box
from ucformat.sources.dcp.folder import FILE
from ucformat.sources.pickle.stand_ins import Dtype, Inert
from ucformat.sources.pickle.unpickler import unpickle
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from ucformat.sources.dcp.names import Path
    from ucformat.storage.base import Store

__all__ = ["MAX_METADATA", "Metadata", "Stretch", "TensorEntry", "read_metadata"]

_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MAX_METADATA = 2 << 30  # bytes; 10^6 chunks take about 300 MB
_DIMS = 64  # torch's own limit
_LARGEST = 1 << 62  # of a size or an offset
_DEEP, _LONG = 64, 16 << 10  # parts of a path, and characters of it; characters of a file's name


@dataclass(frozen=True, slots=True)
class Stretch:
    """The bytes of one item."""

    file: str
    offset: int
    nbytes: int


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
    stored: dict[tuple[str, tuple[int, ...] | None], Stretch] = field(default_factory=dict)
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
        raise Refused(f"{key} has {size:,} bytes, more than {MAX_METADATA:,}")
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
            raise Refused(f"{meta.file}: {fqn} is a {entry.name}, which ucformat does not know")


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
            raise Refused(
                f"{meta.file}: {fqn} went through {_shown(transforms)} when it was written, so it cannot be read in "
                "place",
                hint="load it with torch.distributed.checkpoint, and save it again without stream extensions",
            )
        if file not in known:
            check_key(below + file)
            known.add(file)
        meta.stored[fqn, start] = Stretch(below + file, offset, nbytes)


def _damaged(meta: Metadata, what: str) -> IntegrityError:
    return IntegrityError(f"{meta.file} {what}", hint="the file is damaged; copy it again from where it was saved")


def _shown(value: Any) -> str:
    try:
        return value.name[:200] if isinstance(value, Inert) else reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a huge {type(value).__name__}"
