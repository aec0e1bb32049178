"""Enumerates the checks of a universal checkpoint: each file that its manifest names, and the expected digest.

`verify`, `copy`, `materialize` and loading all use it. Checking an item reads it once; `copy`
writes the same bytes to the destination. Packed files are checked block by block
(`block_problems`); replicas and the digests of tensors come last, when the other results are known.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from ucformat.errors import (
    ChecksumError,
    IntegrityError,
    MissingData,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
)
from ucformat.format.arrays import metadata_documents, shard_key
from ucformat.format.bases import place_of_base
from ucformat.format.digest import (
    file_digest,
    shard_digests_nbytes,
    tensor_digest,
    tensor_fingerprint,
)
from ucformat.format.encoded import has_image
from ucformat.format.extents import is_whole
from ucformat.format.shard import check_shard
from ucformat.format.structure import Problem
from ucformat.format.universal import grid_of, unknown_word
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Extent, Key, TensorInfo
from ucformat.reading.execute import read_fingerprint, read_flat
from ucformat.schema.tensors import BLOSC
from ucformat.storage.base import ENCODED, read_parts, stored_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from ucformat.format.chunking import Grid
    from ucformat.format.universal import Universal
    from ucformat.geometry.tensor import Block
    from ucformat.schema.manifest import FileDoc, SourceFileDoc
    from ucformat.schema.tensors import TensorDoc
    from ucformat.storage.base import FileWriter, Store

    ShardsByKey = Mapping[Key, Mapping[tuple[int, ...], bytes]]

#: A problem of a tensor.
WRONG_FINGERPRINT = "its elements do not have the fingerprint that the manifest says"

#: A problem of a tile of an encoded file.
WRONG_TILE = "its elements do not have the fingerprint that the index of the file says"

_MAX_LOST = 1000  # missing shards of one array that are reported one by one


class AuditItem(Protocol):
    """A file that a manifest names."""

    @property
    def file(self) -> str:
        """The key of the file in the checkpoint."""

    @property
    def nbytes(self) -> int:
        """The number of bytes that are compared."""

    @property
    def key(self) -> Key | None:
        """The tensor that the file belongs to; None if it belongs to several or to none."""

    def check(self, store: Store, out: FileWriter | None = None) -> tuple[bytes, list[Problem]]:
        """Read the file and compare it.

        Args:
            out: a writer that gets a copy of every byte that is read (default: none).

        Returns:
            The digests of a shard (empty for other files), and the problems of the file.
        """


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file with a digest in the manifest: objects, values of ranks, sidecar, assets."""

    doc: FileDoc
    key: Key | None = None

    @property
    def file(self) -> str:
        """See AuditItem."""
        return self.doc.path

    @property
    def nbytes(self) -> int:
        """See AuditItem."""
        return self.doc.nbytes

    def check(self, store: Store, out: FileWriter | None = None) -> tuple[bytes, list[Problem]]:
        """See AuditItem."""
        try:
            size = store.info(self.file).size
        except NotFound:
            return b"", [Problem(self.file, "the file is missing", kind="missing")]
        if size != self.nbytes:
            return b"", [Problem(self.file, f"the file has {size} bytes instead of {self.nbytes}")]
        state = hashlib.sha256()
        for _, part in read_parts(store, self.file, size):
            state.update(part)
            if out is not None:
                out.write(part)
        matches = f"sha256:{state.hexdigest()}" == self.doc.digest
        reason = "its digest differs from the committed one"
        return b"", [] if matches else [Problem(self.file, reason, kind="differs")]


@dataclass(frozen=True, slots=True)
class ZarrJson:
    """The `zarr.json` of an array or a group, through which other Zarr readers open the checkpoint."""

    file: str
    data: bytes
    key: Key | None

    @property
    def nbytes(self) -> int:
        """See AuditItem."""
        return len(self.data)

    def check(self, store: Store, out: FileWriter | None = None) -> tuple[bytes, list[Problem]]:
        """See AuditItem."""
        name, state = self.key or (None, None)
        try:
            data = store.read(self.file)
        except NotFound:
            return b"", [Problem(self.file, "the file is missing", name, state, kind="missing")]
        if data != self.data:
            return b"", [
                Problem(
                    self.file,
                    f"does not describe this {'tensor' if self.key else 'group'}",
                    name,
                    state,
                )
            ]
        if out is not None:
            out.write(data)
        return b"", []


@dataclass(frozen=True, slots=True)
class ShardFile:
    """The file of a shard of an array; its fingerprint is only computed if the array's is `recorded`."""

    key: Key
    grid: Grid
    shard: tuple[int, ...]
    file: str
    recorded: bool
    codec: str | None
    nbytes: int

    @property
    def digests_nbytes(self) -> int:
        """The bytes of its digests."""
        return shard_digests_nbytes(math.prod(self.grid.tiles(self.shard, "").grid))

    def check(self, store: Store, out: FileWriter | None = None) -> tuple[bytes, list[Problem]]:
        """See AuditItem."""
        try:
            digests, problems = check_shard(
                store,
                self.file,
                self.grid,
                self.shard,
                out,
                self.codec,
                fingerprint=self.recorded,
            )
        except (IntegrityError, PermissionDenied, UnsupportedError) as error:
            if out is not None:  # a copy reports why the source cannot be read
                raise
            return b"", [Problem(self.file, error.message, *self.key)]
        return digests, [replace(p, name=self.key.name, state=self.key.state) for p in problems]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of another checkpoint; its bytes are compared if it was registered with a digest."""

    doc: SourceFileDoc
    key: Key | None = None

    @property
    def file(self) -> str:
        """See AuditItem."""
        return self.doc.path

    @property
    def nbytes(self) -> int:
        """See AuditItem."""
        return 0 if self.doc.digest is None else self.doc.nbytes

    def check(self, store: Store, out: FileWriter | None = None) -> tuple[bytes, list[Problem]]:  # noqa: ARG002 - see AuditItem
        """See AuditItem."""
        store.info(self.file)  # compares size and time
        if self.doc.digest is None or file_digest(store, self.file) == self.doc.digest:
            return b"", []
        return b"", [
            Problem(self.file, "its digest differs from the registered one", kind="differs")
        ]


@dataclass(frozen=True, slots=True)
class _UnreadArray:
    """An array whose shards are not read: too many are missing, or nobody knows their codec."""

    key: Key
    file: str
    reason: str
    nbytes: int = 0

    def check(self, store: Store, out: FileWriter | None = None) -> tuple[bytes, list[Problem]]:  # noqa: ARG002 - see AuditItem
        """See AuditItem."""
        return b"", [Problem(self.file, self.reason, *self.key)]


def items(source: Universal) -> Iterator[AuditItem]:
    """Enumerate the files that a manifest names, except packed files."""
    m = source.manifest
    yield from map(ListedFile, m.files)
    yield from (ZarrJson(*document) for document in metadata_documents(m))
    yield from source_files(source)
    for key, doc in source.docs.items():
        if doc.path is None:
            continue
        grid = grid_of(doc)
        if (missing := source.missing_shards(doc)) > _MAX_LOST:
            reason = f"{missing:,} of its {grid.count:,} shards are missing"
            yield _UnreadArray(key, doc.path, reason)
            continue
        if doc.codec not in (None, BLOSC):
            yield _UnreadArray(key, doc.path, f"was not verified: it {unknown_word(doc)}")
            continue
        for shard in grid.shards():
            file = shard_key(doc.path, shard)
            nbytes = source.encoded_sizes.get(file, 0) if doc.codec else grid.file_nbytes(shard)
            recorded = doc.fingerprint is not None
            yield ShardFile(key, grid, shard, file, recorded, doc.codec, nbytes)


def source_files(source: Universal) -> list[SourceFile]:
    """The files of other checkpoints that a checkpoint needs: none if it is not virtual."""
    sidecar = source.manifest.sidecar
    return [] if sidecar is None else [SourceFile(doc) for doc in sidecar.sources]


def checked(
    item: AuditItem, store: Store, damages: tuple[type[UcformatError], ...] = (UcformatError,)
) -> tuple[bytes, list[Problem]]:
    """Run `item.check`, and report errors of some types as problems.

    Args:
        damages: the types of errors that are problems of the file; others are raised (default: all
            of ucformat).
    """
    try:
        return item.check(store)
    except damages as error:
        return b"", [Problem(item.file, error.message, *(item.key or ()))]


@dataclass(frozen=True, slots=True)
class Check:
    """A task of a verification; `run` returns the digests of a shard, and the problems.

    Attributes:
        nbytes: bytes that are compared with a checksum or digest.
        key: the tensor, if it is a shard of an array.
        shard: the shard's coordinates; None if it is none.
        unverified: bytes that have neither checksum nor digest.
    """

    nbytes: int
    run: Callable[[], tuple[bytes, list[Problem]]]
    key: Key | None = None
    shard: tuple[int, ...] | None = None
    unverified: int = 0

    @classmethod
    def of(
        cls,
        item: AuditItem,
        store: Store,
        damages: tuple[type[UcformatError], ...] = (UcformatError,),
    ) -> Check:
        """The check of a file that the manifest lists; `damages` as for `checked`."""
        shard = item.shard if isinstance(item, ShardFile) else None
        return cls(item.nbytes, partial(checked, item, store, damages), item.key, shard)


def block_problems(
    store: Store,
    key: Key,
    blocks: Iterable[tuple[str, Block]],
    damages: tuple[type[UcformatError], ...] = (UcformatError,),
    use: Callable[[str, Block, int, memoryview], None] = lambda *_: None,
) -> list[Problem]:
    """The blocks that differ from their checksums or cannot be read; `damages` as for `checked`.

    Args:
        use: called with each part of a block that is read, and the byte of the file at which it begins.
    """
    problems: list[Problem] = []
    unreadable: set[str] = set()
    for file, block in blocks:
        if file in unreadable:
            continue
        try:
            if not is_whole(store, file, block, partial(use, file, block)):
                problems.append(
                    Problem(
                        file, f"crc32c differs (block at byte {block.offset})", *key, kind="differs"
                    )
                )
        except damages as error:
            if error.in_base is not None:
                problems.append(_problem_of_base(error.in_base, error.message, key))
            else:
                kind: Literal["differs", "other"] = (
                    "differs" if isinstance(error, ChecksumError) else "other"
                )
                reason = error.message.removeprefix(f"{key}: ")  # which a problem begins with, too
                problems.append(Problem(file, reason, *key, kind=kind))
            # each tile would say the same, of the file or of a base that is not there
            if ENCODED in file and (isinstance(error, MissingData) or not has_image(store, file)):
                unreadable.add(file)
    return [replace(p, file=stored_key(p.file)) for p in problems]


def wrong_digests(
    source: Universal, shards: ShardsByKey, damaged: Collection[tuple[str | None, str | None]] = ()
) -> Iterator[Problem]:
    """Find arrays whose chunks match their checksums, but are not those that were committed."""
    for key, doc in source.docs.items():
        if doc.path is None or key in damaged:
            continue
        of_tensor = shards.get(key, {})
        if tensor_digest(doc.dtype, grid_of(doc), of_tensor) != doc.digest:
            reason = "its chunks are intact, but are not those of the manifest"
        elif doc.fingerprint is not None and doc.fingerprint != tensor_fingerprint(
            of_tensor.values()
        ):
            reason = WRONG_FINGERPRINT
        else:
            continue
        yield Problem(doc.path, reason, *key)


def referenced(source: Universal) -> Iterator[Check]:
    """The checks of the tensors of bases: each is read there, and has the fingerprint that the manifest says."""
    for doc in source.manifest.tensors:
        if doc.is_referenced:
            yield Check(doc.nbytes, partial(_check_referenced, source, doc))


def _check_referenced(source: Universal, doc: TensorDoc) -> tuple[bytes, list[Problem]]:
    base = place_of_base(source.store.url, source.manifest.bases[doc.base or 0].url)
    info = TensorInfo(doc.name, doc.state, doc.stored_dtype, doc.shape)
    try:
        if read_fingerprint(source, info) == doc.fingerprint:
            return b"", []
        reason = WRONG_FINGERPRINT
    except (IntegrityError, NotFound, PermissionDenied, UnsupportedError) as error:
        reason, base = error.message, error.in_base or base
    return b"", [_problem_of_base(base, reason, info.key)]


def _problem_of_base(place: str, reason: str, key: Key) -> Problem:
    return Problem(place, f"in its base: {reason.removeprefix(f'{key}: ')}", *key, kind="base")


_PART = 4 << 20  # bytes of each of two replicas in memory at once


def unequal_replicas(
    store: Store, info: TensorInfo, extents: Iterable[Extent]
) -> Iterator[Problem]:
    """Find replicas of parts of a tensor that differ from the first replica, comparing bytes rather than values.

    A replica that cannot be read does not count as different: the check of its file reports it.
    """
    first: dict[Box, Extent] = {}
    compared: set[tuple[Box, str, int, tuple[int, ...]]] = set()
    for e in extents:
        place = (e.box, e.file, e.offset, e.strides)
        if not e.box.size or place in compared:
            continue
        compared.add(place)
        first_replica = first.setdefault(e.box, e)
        if first_replica is not e and not _equal(store, info, first_replica, e):
            where = (
                f"bytes from {e.offset} on" if first_replica.file == e.file else stored_key(e.file)
            )
            yield Problem(
                stored_key(e.file),
                f"its replicas of {e.box} differ: {where}, and {stored_key(first_replica.file)}",
                info.name,
                info.state,
            )


def _equal(store: Store, info: TensorInfo, first: Extent, second: Extent) -> bool:
    part = TensorInfo(info.name, info.state, info.dtype, first.box.shape)
    whole, step = Box.whole(first.box.shape), max(1, _PART // info.itemsize)
    a, b = (Extent(whole, e.file, e.offset, e.strides) for e in (first, second))
    try:
        return all(
            read_flat(store, part, [a], at, min(at + step, part.size)).tobytes()
            == read_flat(store, part, [b], at, min(at + step, part.size)).tobytes()
            for at in range(0, part.size, step)
        )
    except (IntegrityError, NotFound):
        return True
