"""Checkpoints that `ucp serve` answers over HTTP: `https://host/v1/run7@latest`.

The server describes the checkpoint in a JSON document, and names the bytes of each tensor by the
checkpoint's id, so what is read later is never of another checkpoint, also where `latest` has
moved.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

from ucformat.errors import IntegrityError, UnsupportedError, UpgradeNeeded
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent, Key, TensorInfo, TensorList
from ucformat.reading.readable import CheckpointMetadata, GroupPlace, Loss, path_from_json
from ucformat.schema import ITEMSIZE, SERVED
from ucformat.sources.base import Source
from ucformat.sources.configuration import TrainingInfo
from ucformat.storage.base import check_key, read_ranges
from ucformat.storage.wrappers import WatchedStore, WrappedStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.reading.readable import FileRecord
    from ucformat.schema.served import ServedDoc
    from ucformat.storage.base import Info, Ranges, Store

_BEGINNING = f'{{"{SERVED}": '.encode()
_MAX_DOCUMENT = 256 << 20


class Served(Source):
    """Recognises the document of a checkpoint that a server of ours answers."""

    kind: ClassVar[str] = "served"
    title: ClassVar[str] = "checkpoint of a server (ucp serve)"

    def is_marker(self, name: str) -> bool:  # noqa: ARG002 - no file is one
        """See Source."""
        return False

    def find(self, store: Store) -> bool:  # noqa: ARG002 - it is no folder
        """See Source."""
        return False

    def find_file(self, store: Store, key: str) -> bool:
        """See Source."""
        if not store.url.startswith(("http://", "https://")):
            return False
        size = store.info(key).size
        return size > len(_BEGINNING) and store.read(key, 0, len(_BEGINNING)) == _BEGINNING

    def open(self, store: Store) -> OpenServed:
        """See Source; no folder is one."""
        raise UnsupportedError(f"{store.url} is a folder, and not the document of a server")

    def open_file(self, store: Store, key: str) -> OpenServed:
        """See Source."""
        return OpenServed(store, key)


class OpenServed:
    """An opened checkpoint of a server."""

    kind = Served.kind
    part = ""

    def __init__(self, store: Store, key: str) -> None:
        # pydantic, which no other place needs
        from ucformat.schema.served import VERSION, ServedDoc
        from ucformat.schema.values import loads, parsed

        info = store.info(key)
        url = f"{store.url}/{key}"
        if info.size > _MAX_DOCUMENT:
            raise IntegrityError(f"{url} has {info.size:,} bytes, too many for a document")
        content = store.read(key, 0, info.size)
        try:
            version = loads(content).get(SERVED)
            if version != VERSION:
                raise UpgradeNeeded(
                    f"{url} is of a newer server (version {version!r})", hint="upgrade ucformat"
                )
            document = parsed(ServedDoc, content)
            self.id = document.id
            self.metadata, files = _metadata(document, key)
            self.training_info = TrainingInfo(document.config, dict(document.metrics), document.run)
            below = check_key(f"{document.ref}/files/{self.id}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(
                f"{url} is not what a server of ours answers: {type(error).__name__}: "
                f"{str(error)[:200]}"
            ) from error
        #: What opens it again, also when `latest` is another one.
        self.place = f"{store.url}/{document.ref}"
        self._files = {tensor: file for tensor, file in files.items() if isinstance(tensor, Key)}
        keys = {
            file if isinstance(name, Key) else name: f"{below}/{file}"
            for name, file in files.items()
        }
        make = partial(_NamedStore, document=(key, info, content), keys=keys)
        self.store: Store = store
        if isinstance(store, WatchedStore):
            store.inner = make(store.inner)
        else:
            self.store = make(store)

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:  # noqa: ARG002 - one covers all
        """See OpenSource."""
        info = self._infos[key]
        if info.nbytes:
            strides = row_major(info.shape, info.itemsize)
            yield Extent(Box.whole(info.shape), self._files[key], 0, strides)

    @cached_property
    def _infos(self) -> Mapping[Key, TensorInfo]:
        return {info.key: info for info in self.metadata.tensor_list.tensors}

    def records(self) -> Iterator[FileRecord]:
        """See OpenSource; the server has compared the checksums."""
        return iter(())


class _NamedStore(WrappedStore):
    """A store in which files have the names that the document gives them, and the document stays as it was read."""

    def __init__(
        self, inner: Store, document: tuple[str, Info, bytes], keys: Mapping[str, str]
    ) -> None:
        super().__init__(inner)
        self._name, self._info, self._content = document
        self._keys = keys

    def _key(self, key: str) -> str:
        return self._keys.get(key, key)

    def info(self, key: str) -> Info:
        """See Store."""
        return self._info if key == self._name else replace(super().info(key), key=key)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        if key != self._name:
            return super().read(key, offset, nbytes)
        return self._content[offset : None if nbytes is None else offset + nbytes]

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """See RangeReader."""
        return read_ranges(self.inner, self._key(key), ranges)


def _metadata(document: ServedDoc, key: str) -> tuple[CheckpointMetadata, dict[Key | str, str]]:
    """The metadata that a document tells, and the names of the bytes of tensors and assets."""
    infos: list[TensorInfo] = []
    files: dict[Key | str, str] = {}
    paths, fingerprints = {}, {}
    unreadable = {Key(doc.name, doc.state): doc.reason for doc in document.unreadable}
    for doc in document.tensors:
        tensor = Key(doc.name, doc.state)
        if tensor in files:
            raise ValueError(f"{tensor} is there twice")
        files[tensor] = check_key(doc.file)
        if doc.dtype not in ITEMSIZE:
            unreadable[tensor] = f"has the dtype {doc.dtype!r}, which this ucformat does not know"
            continue
        info = TensorInfo(*tensor, doc.dtype, doc.shape)
        if info.nbytes != doc.nbytes:
            raise ValueError(f"{tensor} has {info.nbytes} bytes, not {doc.nbytes}")
        infos.append(info)
        if doc.paths:
            paths[tensor] = tuple(map(path_from_json, doc.paths))
        fingerprints[tensor] = doc.fingerprint
    files |= {check_key(name): check_key(asset.file) for name, asset in document.assets.items()}
    numbers = {name: n for n, group in enumerate(document.groups) for name in group["params"]}
    metadata = CheckpointMetadata(
        tensor_list=TensorList(tuple(infos), numbers),
        aliases=document.aliases,
        objects=document.objects,
        assets=tuple(document.assets),
        groups=document.groups,
        paths=paths,
        places=tuple(
            None
            if place is None
            else GroupPlace(path_from_json(place.path), place.names, place.flattened)
            for place in document.places
        ),
        step=document.step,
        layout=document.layout,
        engine=document.engine,
        files=(key,),
        folder=key,
        unreadable=unreadable,
        fingerprints=fingerprints,
        lossy={
            Key(doc.name, doc.state): Loss(doc.encoding, doc.absolute, doc.relative)
            for doc in document.lossy
        },
        older={Key(doc.name, doc.state): doc.step for doc in document.older},
        missing=document.missing,
    )
    return metadata, files
