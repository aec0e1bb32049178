"""Virtual checkpoints: a manifest of extents over the files of another checkpoint, which stay where they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError
from ucformat.format.arrays import put_file
from ucformat.format.digest import file_digest
from ucformat.format.mounted import MOUNT, MountedStore, mounted_key
from ucformat.format.sidecar import encode
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import single_extents
from ucformat.jobs.dependents import find_homes, need
from ucformat.schema.manifest import SidecarDoc, SourceFileDoc, TensorDoc
from ucformat.settings import allow_root
from ucformat.storage.base import HIDDEN
from ucformat.storage.watched import find_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.commit import Attempt
    from ucformat.geometry.tensor import Extent, TensorInfo
    from ucformat.jobs.dependents import Home
    from ucformat.storage.base import Store

__all__ = ["VirtualExtents", "place_all", "put_sidecar"]

_THREADS = 8


@dataclass(frozen=True)
class VirtualExtents:
    """Where the bytes of tensors lie: the extents of each, and the files that these are in."""

    infos: Sequence[TensorInfo]
    extents: list[list[Extent]]
    places: _SourceFiles

    @cached_property
    def homes(self) -> tuple[Home, ...]:
        """The places in which it has to be said that the files are needed."""
        return find_homes(self.places.origin)


def place_all(source: Checkpoint, infos: Sequence[TensorInfo]) -> VirtualExtents:
    """Find where the bytes of these tensors lie.

    Raises:
        UnsupportedError: a tensor has no bytes of its own in a file: it is compressed, or computed.
    """
    places = _SourceFiles(source.source.store)
    extents = []
    for info in infos:
        found = [places.place(info, extent) for extent in single_extents(source.source.extents(info.key))]
        prove(info, [(e.file, e.box) for e in found])
        extents.append(found)
    return VirtualExtents(infos, extents, places)


def put_sidecar(
    source: Checkpoint,
    store: Store,
    attempt: Attempt,
    placed: VirtualExtents,
    *,
    checksums: bool,
    unprotected: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[SidecarDoc, tuple[TensorDoc, ...]]:
    """Write the extents of tensors whose bytes stay where they are, and let this user read them there.

    First it is said beside their files that these are needed, unless that cannot be, and they may be `unprotected`.

    Raises:
        Conflict: what the files belong to is being removed or replaced.
        PermissionDenied: it cannot be said there.
    """
    infos, extents, places = placed.infos, placed.extents, placed.places
    for root in places.roots:
        allow_root(root)
    need(placed.homes, str(attempt.keeps), store.url, unprotected=unprotected)
    doc = put_file(store, f"{attempt.folder('data')}/extents.safetensors", encode(extents))
    sources = _sources(places, progress, checksums=checksums)  # of files that are there although they are needed
    if (watching := find_watched(source.store)) is not None:
        for file in places.files:  # of many, sizes alone were read
            watching.note(file)
    sidecar = SidecarDoc(**doc.model_dump(), roots=tuple(places.roots), sources=sources)
    docs = (TensorDoc(name=i.name, state=i.state, dtype=i.dtype, shape=i.shape, nbytes=i.nbytes) for i in infos)
    return sidecar, tuple(docs)


def _sources(
    places: _SourceFiles, progress: Callable[[int, int], None] | None, *, checksums: bool
) -> tuple[SourceFileDoc, ...]:
    """The files as they are now."""
    infos = [store.info(key) for store, key in places.origin]
    digests: Iterable[str | None] = repeat(None)
    if checksums:
        total, done = sum(i.size for i in infos), 0
        digests = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for info, digest in zip(infos, pool.map(lambda place: file_digest(*place), places.origin), strict=True):
                digests.append(digest)
                done += info.size
                if progress is not None:
                    progress(done, total)
    return tuple(
        SourceFileDoc(path=file, nbytes=info.size, modified=info.modified, etag=info.etag, digest=digest)
        for file, info, digest in zip(places.files.values(), infos, digests, strict=False)
    )


class _SourceFiles:
    """The files in which a checkpoint's bytes really lie, and what they are called in a virtual one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.roots: list[str] = []
        self.files: dict[str, str] = {}  # a key of the source -> what the file is called in the virtual checkpoint
        self.origin: list[tuple[Store, str]] = []  # where each of them lies

    def place(self, info: TensorInfo, extent: Extent) -> Extent:
        if extent.file not in self.files:
            self.files[extent.file] = self._find(info, extent.file)
        return replace(extent, file=self.files[extent.file])

    def _find(self, info: TensorInfo, file: str) -> str:
        if file.startswith(HIDDEN):
            raise UnsupportedError(
                f"{info.key} has no bytes of its own in a file: it is compressed, or computed by a view",
                hint="write it: `ucp convert SRC DST`; or leave it out with `states`, or a view's `drop`",
            )
        store, key = self._store, file
        if file.startswith(MOUNT):  # of a virtual checkpoint
            while not isinstance(store, MountedStore):
                store = store.inner  # type: ignore[attr-defined]
            store, key = store.place(file) or (store, key)
        if store.url not in self.roots:
            self.roots.append(store.url)
        self.origin.append((store, key))
        return mounted_key(self.roots.index(store.url), key)
