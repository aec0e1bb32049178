"""A weight version: the tensors of the newest full one, with the changes of all deltas since."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ucformat.engines.slime.folder import ENDING, INDEX, SUFFIX, folder_of, is_weights, read_delta
from ucformat.engines.slime.patches import apply
from ucformat.errors import (
    IntegrityError,
    MissingData,
    NotFound,
    UsageError,
    first_names,
    option_text,
)
from ucformat.sources.index import IndexedSource, TensorIndex
from ucformat.sources.model_files import (
    ModelFiles,
    complete_shards,
    file_sets,
    find_assets,
    parse_shard_name,
    root_files,
)
from ucformat.sources.safetensors import OpenSafetensors
from ucformat.storage.base import HIDDEN, Info, content_version
from ucformat.storage.decoded import DECODED, DecodedStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import PrefixStore, RoutedStore, WatchedStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucformat.engines.slime.folder import Delta, Patch
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.sources.model_files import FileSet
    from ucformat.storage.base import Store

#: The prefix of the keys of files in the folder of version 0, if that is elsewhere.
_BASE = f"{HIDDEN}base/"
_MAX_NAMED = 5


class OpenVersion(IndexedSource):
    """An opened weight version.

    The root of its store is the folder of all versions. The files that a receiver keeps beside the
    tensors, such as `config.json`, are at the root, as they are of the receiver's copy.
    """

    kind = "slime"

    def __init__(self, versions: Store, version: int, base: str | None) -> None:
        files = _Files(versions)
        store = WatchedStore(files)
        deltas = _read_deltas(store, version)
        number = version - len(deltas)  # of the full one
        full = _open_full(store, files, number, base)
        _check_names(full, deltas, versions.url)
        prefix = f"{folder_of(number)}/" if files.base is None else _BASE
        assets = full.metadata.assets
        files.assets = {key: prefix + key for key in assets}
        self.part = full.part or ""
        self.contents = TensorIndex(unreadable=full.contents.unreadable)
        changed: dict[str, _Changed] = {}
        for key, info in full.contents.infos.items():
            extents = [replace(e, file=prefix + e.file) for e in full.extents(key)]
            patches = tuple((d, d.patches[key.name]) for d in deltas if key.name in d.patches)
            if patches:
                changed[key.name] = _Changed(extents[0], info.nbytes, patches)
                extents = [replace(extents[0], file=DECODED + key.name, offset=0)]
            self.contents.put(info, partial(_each, extents))
        self.store: Store = DecodedStore(store, _Patches(store, changed))
        own = (file for delta in reversed(deltas) for file in delta.files)
        kept = (prefix + file for file in (*full.metadata.files, *assets))
        self.metadata = full.metadata.replace(
            objects={
                **full.metadata.objects,
                "weight_version": {"version": version, "full_version": number},
            },
            engine={"name": "slime"},
            files=(*own, *kept),
            folder=folder_of(version),
        )


def _each(extents: Sequence[Extent], _within: Box | None) -> Iterator[Extent]:
    return iter(extents)


def _read_deltas(store: Store, version: int) -> list[Delta]:
    """The deltas after the newest full version up to this one; that is version 0 if none is in the folder."""
    deltas: list[Delta] = []
    while version or next(store.list(folder_of(0)), None) is not None:
        if (delta := read_delta(store, version)) is None:
            break
        deltas.append(delta)
        version -= 1
    return deltas[::-1]


def _open_full(store: Store, files: _Files, version: int, base: str | None) -> OpenSafetensors:
    """Open the full version from which the deltas lead; its keys are those of its own folder."""
    inside: Store = PrefixStore(store, folder_of(version))
    infos = root_files(inside)
    if infos and base is not None:
        raise UsageError(
            f"{inside.url} is a full version, so no other checkpoint is needed",
            hint="leave out the option `base`",
        )
    if not infos and base is None:
        raise MissingData(
            f"{store.url} has no full version: its deltas begin with the checkpoint that the receivers had",
            hint="name it, the folder that was slime's --hf-checkpoint: "
            f"{option_text('base', repr('/models/Qwen3-4B'), '/models/Qwen3-4B')}",
        )
    if base is not None:
        inside = files.base = open_store(base)
        infos = root_files(inside)
        for key in infos:
            store.info(_BASE + key)  # to notice when it changes
    named, index = _model_files(infos, inside.url)
    return OpenSafetensors(ModelFiles(inside, named, index, find_assets(infos.values())))


def _model_files(keys: Iterable[str], url: str) -> FileSet:
    """The files of a full version, and their index or None."""
    sets = file_sets(filter(is_weights, keys), ENDING)
    whole = {
        name: (files, index)
        for name, (files, index) in sets.items()
        if name in (INDEX, f"model{SUFFIX}") or parse_shard_name(files[0])
    }
    if len(whole) != 1:
        problem = "holds several models" if whole else "has no whole model in safetensors files"
        raise MissingData(
            f"{url} {problem}: {first_names(sets, _MAX_NAMED) or 'it has no such files'}",
            hint=f"a full version has {INDEX}, which is written last, or model{SUFFIX}: while it is written, wait, or "
            "open the version before it with the option `version`",
        )
    ((named, index),) = whole.values()
    return complete_shards(named), index


def _check_names(full: OpenSafetensors, deltas: Iterable[Delta], url: str) -> None:
    """Check that the deltas change nothing but tensors of the full version."""
    names = {key.name for key, info in full.contents.infos.items() if info.nbytes}
    names |= {key.name for key in full.contents.unreadable}
    for delta in deltas:
        if unknown := sorted(delta.patches.keys() - names):
            raise IntegrityError(
                f"{url}/{delta.folder} changes {first_names(map(repr, unknown), _MAX_NAMED)}, and the full version "
                f"{full.store.url} has no bytes of that name",
                hint="the delta, or the full version, is another run's",
            )


class _Files(RoutedStore):
    """The folder of all versions, and in it the files of version 0 if that is elsewhere.

    Attributes:
        base: the folder of version 0; its files are those below `_BASE`.
        assets: the keys of files that are at the root, too.
    """

    def __init__(self, versions: Store) -> None:
        super().__init__(versions)
        self.base: Store | None = None
        self.assets: dict[str, str] = {}

    def place(self, key: str) -> tuple[Store, str] | None:
        """See RoutedStore."""
        stored = self.assets.get(key, key)
        if self.base is not None and stored.startswith(_BASE):
            return self.base, stored.removeprefix(_BASE)
        return None if stored == key else (self.inner, stored)

    def info(self, key: str) -> Info:
        """See Store."""
        return replace(super().info(key), key=key)


@dataclass(frozen=True, slots=True)
class _Changed:
    """A tensor that deltas change: where it is in the full version, and its patches in order."""

    stored: Extent
    nbytes: int
    patches: tuple[tuple[Delta, Patch], ...]


class _Patches:
    """The decoder of changed tensors: each is a virtual file, named like it. See `Decoder`."""

    def __init__(self, store: Store, tensors: dict[str, _Changed]) -> None:
        self._store, self._tensors = store, tensors

    def _changed(self, name: str) -> _Changed:
        if name not in self._tensors:
            raise NotFound(f"{self._store.url} has no changed tensor {name!r}")
        return self._tensors[name]

    def info(self, name: str) -> Info:
        """See `Decoder.info`."""
        tensor = self._changed(name)
        files = [tensor.stored.file, *(patch.file for _, patch in tensor.patches)]
        versions = [self._store.info(file).version for file in files]
        return Info(DECODED + name, tensor.nbytes, content_version(repr(versions).encode()))

    def decode(self, name: str) -> memoryview:
        """See `Decoder.decode`."""
        tensor = self._changed(name)
        data = np.empty(tensor.nbytes, np.uint8)
        self._store.read_into(tensor.stored.file, tensor.stored.offset, [data.data])
        for delta, patch in tensor.patches:
            stored = self._store.read(patch.file, patch.offset, patch.nbytes)
            where = f"{self._store.url}/{delta.folder}: {name!r}"
            apply(delta.encoding, data, stored, delta.checksum, patch.digest, where)
        return data.data

    def is_checked(self, name: str) -> bool:
        """See `Decoder.is_checked`: the digest of the last patch is that of all bytes."""
        return name in self._tensors
