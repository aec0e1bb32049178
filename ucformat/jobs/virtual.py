"""Virtual checkpoints: extents over the files of another one, which stay where they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from itertools import repeat
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError
from ucformat.format.digest import file_digest
from ucformat.format.extents import put_sidecar
from ucformat.format.mounted import MountedStore, mounted_key
from ucformat.format.sidecar import encode
from ucformat.format.structure import MOUNT
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import single_extents
from ucformat.jobs.dependents import find_homes, need
from ucformat.jobs.run import run
from ucformat.reading.execute import read_fingerprint
from ucformat.schema.manifest import SourceFileDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.settings import allow_root
from ucformat.storage.base import HIDDEN
from ucformat.storage.wrappers import find_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.commit import Attempt
    from ucformat.geometry.tensor import Extent, TensorInfo
    from ucformat.jobs.dependents import Home
    from ucformat.schema.manifest import SidecarDoc
    from ucformat.storage.base import Store

_THREADS = 8


class VirtualExtents:
    """The extents of tensors in the files of another checkpoint, and the keys of these files in a virtual one.

    Attributes:
        roots: the urls of the places that hold the files.
        files: a key of the source -> the file's key in the virtual checkpoint.
        origin: the store and the key of each file.
    """

    def __init__(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> None:
        """Find the extents."""
        self._store = source.source.store
        self.infos = infos
        self.roots: list[str] = []
        self.files: dict[str, str] = {}
        self.origin: list[tuple[Store, str]] = []
        self.extents: list[list[Extent]] = []
        for info in infos:
            stored = [e for e in single_extents(source.source.extents(info.key)) if e.box.size]
            placed = [self._place(info, extent) for extent in stored]
            prove(info, [(e.file, e.box) for e in placed])
            self.extents.append(placed)

    @cached_property
    def homes(self) -> tuple[Home, ...]:
        """The places where the files must be recorded as needed."""
        return find_homes(self.origin)

    def _place(self, info: TensorInfo, extent: Extent) -> Extent:
        if extent.file not in self.files:
            self.files[extent.file] = self._find(info, extent.file)
        return replace(extent, file=self.files[extent.file])

    def _find(self, info: TensorInfo, file: str) -> str:
        if file.startswith(HIDDEN):
            raise UnsupportedError(
                f"{info.key} has no bytes of its own in a file: it is compressed, or computed by "
                "a view",
                hint=(
                    "write it: `ucp convert SRC DST`; or leave it out with `states`, or a "
                    "view's `drop`"
                ),
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


def put_virtual(
    source: Checkpoint,
    store: Store,
    attempt: Attempt,
    placed: VirtualExtents,
    *,
    checksums: bool,
    unprotected: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[SidecarDoc, tuple[str, ...], tuple[TensorDoc, ...]]:
    """Write the sidecar of a virtual checkpoint, and allow this user to read the files that it refers to.

    First it records beside the files that they are needed, unless that is impossible and
    `unprotected` is true.

    Raises:
        Conflict: the checkpoint of the files is being removed or replaced.
    """
    for root in placed.roots:
        allow_root(root)
    need(placed.homes, str(attempt.keeps), store.url, unprotected=unprotected)
    # after they are protected, so that they cannot disappear
    sources = _sources(placed, progress, checksums=checksums)
    if (watching := find_watched(source.store)) is not None:
        for file in placed.files:  # reading many files checks only their sizes
            watching.note(file)
    tensors = TensorTable.of(_docs(source, placed.infos, read=checksums))
    data = encode(placed.extents)
    put = put_sidecar(store, attempt.folder("data"), data, tensors, placed.roots, sources)
    return *put, tuple(tensors)


def _docs(source: Checkpoint, infos: Sequence[TensorInfo], *, read: bool) -> Iterator[TensorDoc]:
    """The rows of tensors, with the fingerprints that are recorded; others are computed if they may be read."""
    recorded = source.metadata.fingerprints
    lacking = [i for i in infos if read and recorded.get(i.key) is None]
    computed = {i.key: text for i, text in run(partial(read_fingerprint, source.source), lacking)}
    for info in infos:
        fingerprint = recorded.get(info.key) or computed.get(info.key)
        yield TensorDoc(info.name, info.state, info.dtype, info.shape, fingerprint=fingerprint)


def _sources(
    placed: VirtualExtents, progress: Callable[[int, int], None] | None, *, checksums: bool
) -> tuple[SourceFileDoc, ...]:
    """The current state of the files."""
    infos = [store.info(key) for store, key in placed.origin]
    digests: Iterable[str | None] = repeat(None)
    if checksums:
        total, done = sum(i.size for i in placed.infos), 0
        digests = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for info, digest in zip(
                infos, pool.map(lambda place: file_digest(*place), placed.origin), strict=True
            ):
                digests.append(digest)
                done += info.size
                if progress is not None:
                    progress(done, total)
    return tuple(
        SourceFileDoc(
            path=file, nbytes=info.size, modified=info.modified, etag=info.etag, digest=digest
        )
        for file, info, digest in zip(placed.files.values(), infos, digests, strict=False)
    )
