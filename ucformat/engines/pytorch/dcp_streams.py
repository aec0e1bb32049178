"""DCP's stream extensions: checkpoints that it writes through them, and reading those.

A transformed item is a stream that can only be decoded from its beginning, so none is part of a
universal checkpoint: `Writer` lets PyTorch's own class write such a checkpoint, and `Reader`
decodes each item when it is read. Values are never unpickled by PyTorch.
"""

from __future__ import annotations

import io
import logging
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ucformat.checkpoint import Checkpoint
from ucformat.errors import Conflict, IntegrityError, MissingData, UnsupportedError, UsageError
from ucformat.schema import ITEMSIZE, MANIFEST
from ucformat.sources.distcp.metadata import Items, Metadata, read_metadata
from ucformat.sources.distcp.opened import OpenDcp
from ucformat.storage.base import HIDDEN, ByteRange, Info, exists
from ucformat.storage.url import as_store
from ucformat.storage.wrappers import SyntheticStore, WatchedStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from ucformat.geometry.box import Box
    from ucformat.storage.base import Store

__all__ = ["check_place", "open_transformed", "stream_writer"]

_log = logging.getLogger("ucformat")

_FOLDER = f"{HIDDEN}decoded/"
_MAX_KEPT = 256 << 20  # bytes of decoded items that are kept
_MAX_VALUE = 256 << 20  # bytes of an item that is no tensor
_MAX_ARCHIVE = 64 << 10  # bytes of an item besides those of its tensor


def open_transformed(place: str | PathLike[str], registry: ExtensionRegistry | None) -> Checkpoint:
    """Open a checkpoint of DCP whose items were transformed; its own pickles are not run.

    Args:
        registry: the extensions by name (None: PyTorch's own).

    Raises:
        UnsupportedError: an extension is not among them.
    """
    store = WatchedStore(as_store(place))
    meta = read_metadata(store, transformed=True)
    decoded = _DecodedStore(store, registry or ExtensionRegistry())
    for descriptors in dict.fromkeys(meta.transforms.values()):
        decoded.extensions(descriptors)
    return Checkpoint(OpenDcp(_DecodedItems(decoded, meta, ()), None, None))


def stream_writer(
    path: str | PathLike[str] | None,
    extensions: Sequence[Any],
    refused: Sequence[str],
    stock: Mapping[str, Any],
) -> FileSystemWriter:
    """Make PyTorch's writer for a checkpoint with stream extensions.

    Args:
        refused: options of universal checkpoints that were given.
        stock: the options of PyTorch's writer.

    Raises:
        UsageError: an extension is none of streams, or an option is only for universal checkpoints.
    """
    names = []
    for extension in extensions:
        if not isinstance(extension, StreamTransformExtension):
            raise UsageError(f"{type(extension).__name__} is no StreamTransformExtension")
        names.append(extension.registry_name())
    if refused:
        raise UsageError(
            f"what is written through {', '.join(names)} is no universal checkpoint, and has no "
            f"{', '.join(refused)}",
            hint="leave `_extensions` out, or these options",
        )
    _log.warning(
        "the Writer writes a checkpoint of torch.distributed.checkpoint, not a universal one, "
        "because of the stream extensions %s",
        ", ".join(names),
    )
    return FileSystemWriter("" if path is None else path, _extensions=extensions, **stock)


def check_place(url: str) -> None:
    """Check that PyTorch can write a checkpoint at a place, and that no universal one is there.

    Raises:
        UsageError: it is not a local path.
        Conflict: a universal checkpoint is there.
    """
    if "://" in url:
        raise UsageError(
            f"torch.distributed.checkpoint writes stream extensions to local paths, not to {url}",
            hint="leave `_extensions` out",
        )
    if exists(as_store(url), MANIFEST):
        raise Conflict(
            f"{url} has a universal checkpoint, beside which that of stream extensions would be",
            hint="choose another location, or remove it: ucp delete",
        )


class _DecodedStore(SyntheticStore):
    """A store in which each transformed item is a file of its own."""

    def __init__(self, inner: Store, registry: ExtensionRegistry) -> None:
        super().__init__(inner)
        self._registry = registry
        self._items: dict[str, tuple[ByteRange, tuple[str, ...], int]] = {}
        self._sizes: dict[str, int] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def extensions(self, descriptors: Sequence[str]) -> list[StreamTransformExtension]:
        """The extensions that decode an item, in order: DCP writes through them as they are listed.

        PyTorch 2.13 itself decodes in the order of the list, and so none of several extensions.
        """
        try:
            extensions = self._registry.from_descriptor_list(descriptors[::-1])
        except ValueError as error:
            raise UnsupportedError(
                f"{self.url} was written through the stream extensions {', '.join(descriptors)}: {error}",
                hint="Reader(path, _extension_registry), a registry that has them",
            ) from error
        of_streams = []
        for extension in extensions:
            if not isinstance(extension, StreamTransformExtension):
                raise UnsupportedError(f"{extension!r} is an extension of another kind")
            of_streams.append(extension)
        return of_streams

    def add(self, stored: ByteRange, descriptors: tuple[str, ...], most: int) -> ByteRange:
        """The range of a transformed item in a file of its own.

        Args:
            most: bytes that it may have when it is decoded.
        """
        key = f"{_FOLDER}{stored.file}/{stored.offset}-{stored.nbytes}"
        self._items[key] = (stored, descriptors, most)
        return ByteRange(key, 0, self._info(key).size)

    def _holds(self, key: str) -> bool:
        return key.startswith(_FOLDER)

    def _info(self, key: str) -> Info:
        if key not in self._sizes:
            self._sizes[key] = len(self._decoded(key))
        return Info(key, self._sizes[key], "")

    def _content(self, key: str, offset: int, nbytes: int) -> memoryview:
        data = self._decoded(key)
        if offset + nbytes > len(data):
            raise MissingData(f"{key} has {len(data):,} bytes")
        return memoryview(data)[offset : offset + nbytes]

    def _decoded(self, key: str) -> bytes:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        stored, descriptors, most = self._items[key]
        stream: Any = io.BytesIO(self.inner.read(stored.file, stored.offset, stored.nbytes))
        where = f"{stored.nbytes:,} bytes at {stored.offset:,} of {stored.file}"
        try:
            for extension in self.extensions(descriptors):
                stream = extension.transform_from(stream)
            data = _read(stream, most + 1)
        except UnsupportedError:
            raise
        except Exception as error:
            raise IntegrityError(
                f"{where} cannot be decoded by {', '.join(descriptors)}: {error}",
                hint="the file is damaged, or the extension is another one than when it was saved",
            ) from error
        if len(data) > most:
            raise IntegrityError(f"{where} decode to more than {most:,} bytes")
        with self._lock:
            self._kept[key] = data
            while sum(map(len, self._kept.values())) > max(_MAX_KEPT, len(data)):
                self._kept.popitem(last=False)
        return data


def _read(stream: Any, nbytes: int) -> bytes:
    """So many bytes of a stream, or all if it has fewer; some streams return fewer than they have."""
    parts = []
    while nbytes > 0 and (part := stream.read(nbytes)):
        parts.append(bytes(part))
        nbytes -= len(part)
    return b"".join(parts)


class _DecodedItems(Items):
    """Items of which some are decoded."""

    store: _DecodedStore

    def __init__(self, store: _DecodedStore, meta: Metadata, allow: tuple[str, ...]) -> None:
        super().__init__(store, meta, allow)

    def _place(self, fqn: str, start: tuple[int, ...] | None, label: str) -> ByteRange:
        stored = super()._place(fqn, start, label)
        descriptors = self.meta.transforms.get((fqn, start))
        if not descriptors:
            return stored
        return self.store.add(stored, descriptors, self._most(fqn, start))

    def _most(self, fqn: str, start: tuple[int, ...] | None) -> int:
        """The bytes that an item may have."""
        entry = self.meta.tensors.get(fqn)
        boxes: Sequence[Box] = () if entry is None or start is None else entry.boxes
        size = next((box.size for box in boxes if box.start == start), None)
        if entry is None or size is None:
            return _MAX_VALUE
        return size * ITEMSIZE.get(entry.dtype, 16) + _MAX_ARCHIVE
