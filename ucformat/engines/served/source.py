"""Checkpoints that `ucp serve` answers over HTTP: `https://host/v1/run7@latest`.

The server describes the checkpoint in a JSON document, and names the bytes of each tensor by the
checkpoint's id, so what is read later is never of another checkpoint, also where `latest` has
moved.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ucformat.errors import IntegrityError, UpgradeNeeded
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent, Key, TensorInfo, TensorList
from ucformat.reading.readable import CheckpointMetadata, GroupPlace, Loss, path_from_json
from ucformat.schema import ITEMSIZE
from ucformat.sources.base import Source
from ucformat.sources.configuration import TrainingInfo
from ucformat.storage.base import check_key, read_ranges
from ucformat.storage.wrappers import WatchedStore, WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.reading.readable import FileRecord
    from ucformat.storage.base import Info, Ranges, Store

_MARKER, _VERSION = "ucformat_served", 1
_BEGINNING = f'{{"{_MARKER}": '.encode()
_MAX_DOCUMENT = 256 << 20
_MAX_DIMS = 64


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
        raise NotImplementedError(store.url)

    def open_file(self, store: Store, key: str) -> OpenServed:
        """See Source."""
        return OpenServed(store, key)


class OpenServed:
    """An opened checkpoint of a server."""

    kind = Served.kind
    part = ""

    def __init__(self, store: Store, key: str) -> None:
        from ucformat.schema.values import loads  # pydantic, which no other place needs

        info = store.info(key)
        url = f"{store.url}/{key}"
        if info.size > _MAX_DOCUMENT:
            raise IntegrityError(f"{url} has {info.size:,} bytes, too many for a document")
        content = store.read(key, 0, info.size)
        try:
            document = loads(content)
            if document.get(_MARKER) != _VERSION:
                raise UpgradeNeeded(
                    f"{url} is of a newer server (version {document.get(_MARKER)!r})",
                    hint="upgrade ucformat",
                )
            self.id, ref = _text(document["id"]), _text(document["ref"])
            self.metadata, files = _metadata(document, key)
            self.training_info = TrainingInfo(
                _object(document["config"]),
                {_text(k): float(v) for k, v in _finite(document["metrics"]).items()},
                document["run"] if isinstance(document["run"], str) else None,
            )
            below = check_key(f"{ref}/files/{self.id}")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise IntegrityError(
                f"{url} is not what a server of ours answers: {type(error).__name__}: "
                f"{str(error)[:200]}"
            ) from error
        #: What opens it again, also when `latest` is another one.
        self.place = f"{store.url}/{ref}"
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

    @property
    def _infos(self) -> Mapping[Key, TensorInfo]:
        if not hasattr(self, "_by_key"):
            self._by_key = {info.key: info for info in self.metadata.tensor_list.tensors}
        return self._by_key

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
        from dataclasses import replace

        return self._info if key == self._name else replace(super().info(key), key=key)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        if key != self._name:
            return super().read(key, offset, nbytes)
        return self._content[offset : None if nbytes is None else offset + nbytes]

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Ranges | None:
        """See RangeReader."""
        return read_ranges(self.inner, self._key(key), ranges)


def _metadata(
    document: Mapping[str, Any], key: str
) -> tuple[CheckpointMetadata, dict[Key | str, str]]:
    """The metadata that a document tells, and the names of the bytes of tensors and assets."""
    infos: list[TensorInfo] = []
    files: dict[Key | str, str] = {}
    paths, fingerprints, unreadable = {}, {}, {}
    for entry in document["tensors"]:
        tensor = Key(_text(entry["name"]), _text(entry["state"]))
        shape = tuple(map(_natural, entry["shape"]))
        if tensor in files or len(shape) > _MAX_DIMS:
            raise ValueError(f"{tensor} is there twice, or has too many dims")
        files[tensor] = check_key(_text(entry["file"]))
        if entry["dtype"] not in ITEMSIZE:
            unreadable[tensor] = (
                f"has the dtype {entry['dtype']!r}, which this ucformat does not know"
            )
            continue
        info = TensorInfo(*tensor, entry["dtype"], shape)
        if info.nbytes != entry["bytes"]:
            raise ValueError(f"{tensor} has {info.nbytes} bytes, not {entry['bytes']!r}")
        infos.append(info)
        if entry["paths"]:
            paths[tensor] = tuple(path_from_json(path) for path in entry["paths"])
        fingerprints[tensor] = entry["fingerprint"]
    for entry in document["unreadable"]:
        unreadable[_key(entry)] = _text(entry["reason"])
    for name, asset in _object(document["assets"]).items():
        files[check_key(name)] = check_key(_text(asset["file"]))
    groups = [_object(group) for group in document["groups"]]
    numbers = {_text(name): n for n, group in enumerate(groups) for name in group["params"]}
    step = document["step"]
    metadata = CheckpointMetadata(
        tensor_list=TensorList(tuple(infos), numbers),
        aliases={k: _text(v) for k, v in _object(document["aliases"]).items()},
        objects=_object(document["objects"]),
        assets=tuple(_object(document["assets"])),
        groups=groups,
        paths=paths,
        places=tuple(map(_place, document["places"])),
        step=None if step is None else _natural(step),
        layout=_object(document["layout"]),
        engine={k: _text(v) for k, v in _object(document["engine"]).items()},
        files=(key,),
        folder=key,
        unreadable=unreadable,
        fingerprints=fingerprints,
        lossy={
            _key(entry): Loss(
                _text(entry["encoding"]),
                *(float(_number(entry[name])) for name in ("absolute", "relative")),
            )
            for entry in document["lossy"]
        },
        missing=tuple(map(_text, document["missing"])),
    )
    return metadata, files


def _key(entry: Mapping[str, Any]) -> Key:
    return Key(_text(entry["name"]), _text(entry["state"]))


def _place(entry: Mapping[str, Any] | None) -> GroupPlace | None:
    if entry is None:
        return None
    names = tuple(map(_text, entry["names"]))
    return GroupPlace(path_from_json(entry["path"]), names, entry["flattened"] is True)


def _checked(kind: type | tuple[type, ...], what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{str(value)[:100]!r} is not {what}")
        return value

    return check


_text: Callable[[Any], str] = _checked(str, "a text")
_object: Callable[[Any], dict[str, Any]] = _checked(dict, "an object")
_number: Callable[[Any], float] = _checked((int, float), "a number")


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise TypeError(f"{str(value)[:100]!r} is not a size")
    return value


def _finite(metrics: Any) -> dict[str, float]:
    """Metrics, of which some may be spelled `{"$float": "nan"}`."""
    return {
        name: float(value["$float"]) if isinstance(value, dict) else _number(value)
        for name, value in _object(metrics).items()
    }
