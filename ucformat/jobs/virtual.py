"""Virtual checkpoints: extents over the files of another one, which stay where they are."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING

from ucformat.errors import UnsupportedError
from ucformat.format.digest import file_digest
from ucformat.format.extents import put_sidecar
from ucformat.format.mounted import mounted_key
from ucformat.format.sidecar import encode
from ucformat.format.universal import marked
from ucformat.geometry.box import row_major
from ucformat.geometry.coverage import prove
from ucformat.geometry.fingerprint import NO_ELEMENTS, text_of, total
from ucformat.geometry.tensor import single_extents
from ucformat.jobs.dependents import find_homes, need
from ucformat.jobs.file_fingerprints import FileFingerprints
from ucformat.jobs.run import run
from ucformat.reading.execute import read_fingerprint
from ucformat.schema.manifest import SourceFileDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.settings import allow_root
from ucformat.storage.base import is_computed
from ucformat.storage.wrappers import find_watched, routed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.commit import Attempt
    from ucformat.geometry.box import Box
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Extent, Key, TensorInfo
    from ucformat.jobs.dependents import Home
    from ucformat.schema.manifest import SidecarDoc
    from ucformat.storage.base import Info, Store

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
        if is_computed(file):
            raise UnsupportedError(
                f"{info.key} has no bytes of its own in a file: it is compressed, or computed by "
                "a view",
                hint=(
                    "write it: `ucp convert SRC DST`; or leave it out with `states`, or a "
                    "view's `drop`"
                ),
            )
        store, key = routed(
            self._store, file
        )  # of another checkpoint, if this is virtual or has a base
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
    files = [store_of.info(key) for store_of, key in placed.origin]
    fingerprints = dict(source.metadata.fingerprints)
    digests: list[str | None] = [None] * len(files)
    if checksums:
        lacking = [i for i in placed.infos if fingerprints.get(i.key) is None]
        digests, computed = _read_files(placed, files, lacking, progress)
        others = [i for i in lacking if i.key not in computed]
        fingerprints |= computed
        fingerprints |= {
            i.key: text for i, text in run(partial(read_fingerprint, source.source), others)
        }
    sources = tuple(
        SourceFileDoc(
            path=file, nbytes=info.size, modified=info.modified, etag=info.etag, digest=digest
        )
        for file, info, digest in zip(placed.files.values(), files, digests, strict=True)
    )
    if (watching := find_watched(source.store)) is not None:
        for file in placed.files:  # reading many files checks only their sizes
            watching.note(file)
    docs = (
        TensorDoc(i.name, i.state, i.dtype, i.shape, fingerprint=fingerprints.get(i.key))
        for i in placed.infos
    )
    tensors = TensorTable.of(marked(docs, source.metadata))
    data = encode(placed.extents)
    put = put_sidecar(store, attempt.folder("data"), data, tensors, placed.roots, sources)
    return *put, tuple(tensors)


def _read_files(
    placed: VirtualExtents,
    files: Sequence[Info],
    lacking: Collection[TensorInfo],
    progress: Callable[[int, int], None] | None,
) -> tuple[list[str | None], dict[Key, str]]:
    """Read the files once: their digests, and the fingerprints of tensors, except those that `_runs` leaves out."""
    runs, total_nbytes, done = _runs(placed, lacking), sum(file.size for file in files), 0
    digests: list[str | None] = []
    sums: dict[Key, Sums] = {info.key: NO_ELEMENTS for info in lacking if not info.size}

    def read(number: int) -> tuple[str, FileFingerprints]:
        fingerprints = FileFingerprints(runs[names[number]])
        return file_digest(*placed.origin[number], fingerprints.take), fingerprints

    names = list(placed.files.values())
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, file, (digest, fingerprints) in zip(
            names, files, pool.map(read, range(len(names))), strict=True
        ):
            digests.append(digest)
            for n, part in fingerprints.parts:
                key = runs[name][n][0].key
                sums[key] = total((sums.get(key, NO_ELEMENTS), part))
            done += file.size
            if progress is not None:
                progress(done, total_nbytes)
    return digests, {key: text_of(of_tensor) for key, of_tensor in sums.items()}


def _runs(
    placed: VirtualExtents, infos: Collection[TensorInfo]
) -> defaultdict[str, list[tuple[TensorInfo, Box, int]]]:
    """The boxes of tensors that lie row-major in files, in the order of each file; those of replicas once.

    All boxes of other tensors are left out, and those of which the blocks in which a file is read
    could cut an element.
    """
    keys, runs = {info.key for info in infos}, defaultdict(list)
    for info, extents in zip(placed.infos, placed.extents, strict=True):
        boxes = {e.box: e for e in reversed(extents)}
        whole = sum(box.size for box in boxes) == info.size
        if info.key in keys and whole and all(_is_run(e, info.itemsize) for e in boxes.values()):
            for e in boxes.values():
                runs[e.file].append((info, e.box, e.offset))
    for of_file in runs.values():
        of_file.sort(key=itemgetter(2))
    return runs


def _is_run(extent: Extent, unit: int) -> bool:
    steps = zip(extent.box.shape, extent.strides, row_major(extent.box.shape, unit), strict=True)
    return extent.offset % unit == 0 and all(n == 1 or a == b for n, a, b in steps)
