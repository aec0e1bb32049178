"""Verifies a checkpoint: every byte that it speaks of is read, and compared with what is known of it."""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    CoverageError,
    Inconsistent,
    IntegrityError,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
)
from ucformat.format.arrays import metadata_documents, shard_key
from ucformat.format.audit import unequal_replicas
from ucformat.format.commit import MANIFEST
from ucformat.format.digest import file_digest, tensor_digest
from ucformat.format.extents import ALIGNMENT, coverage_problem, is_whole
from ucformat.format.extents import consistency_problems as structural
from ucformat.format.shard import check_shard
from ucformat.format.structure import MOUNT, Problem
from ucformat.format.universal import Universal, grid_of
from ucformat.geometry.tensor import Key, TensorInfo, single_extents
from ucformat.jobs.dependents import unprotected
from ucformat.jobs.record import contradiction, record_verification
from ucformat.jobs.run import Report, run, workers_for
from ucformat.references import open_reference
from ucformat.schema.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from os import PathLike

    from ucformat.format.chunking import Grid
    from ucformat.format.sidecar import Sidecar
    from ucformat.geometry.tensor import Block, Extent
    from ucformat.reading.readable import Record
    from ucformat.schema.manifest import FileDoc, SourceFileDoc
    from ucformat.sources.base import OpenSource
    from ucformat.storage.base import Store

__all__ = ["Problem", "damaged_block", "document_problems", "verify", "verify_shard", "wrong_digests"]

_BLOCK = 4 << 20  # bytes of a record that are held at once
_FEW = 1000  # of the missing shards of one array, so many are named
_NAMED = 5  # of the tensors in a damaged record, so many are named


@dataclass(frozen=True, slots=True)
class _Check:
    """One thing to read: `run` gives the digests that were made on the way and what is wrong."""

    key: Key | None
    shard: tuple[int, ...]
    verified: int
    unverified: int
    run: Callable[[], tuple[bytes, list[Problem]]]
    replicas: tuple[TensorInfo, tuple[Extent, ...]] | None = None  # the extents, where some are of one box


def verify(
    place: str | PathLike[str] | Store | Checkpoint,
    workers: int | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read every byte of a checkpoint and compare it with its checksums and digests.

    Whether the manifest and the sidecar are consistent, the extents cover their tensors, and replicas are equal is
    asked too. Of a foreign checkpoint: that every extent lies inside its file, and the CRC-32 of every record of its
    zip files that has one (torch computes them unless it is told not to). The catalog, if it knows the checkpoint,
    is told what was found.

    Args:
        place: a checkpoint, or where one lies.
        workers: files read at once (default: one for each core; for object stores eight at least).
        options: what the files of a foreign checkpoint do not say, as `open` takes it.
        progress: called with the bytes done and the bytes in all.

    Raises:
        NotACheckpoint: nothing is committed there.
        AmbiguousLayout: the files of a foreign checkpoint can be read in two ways.
    """
    try:
        ck = place if isinstance(place, Checkpoint) else open_reference(place, options=options)
    except Inconsistent as error:  # what it says cannot be, so that there is nothing to compare its bytes with
        named = tuple(p for p in error.problems if isinstance(p, Problem))
        return Report(str(getattr(place, "url", place)), Universal.kind, 0, 0, 0, named)
    source = ck.origin
    checks = list(_universal(source) if isinstance(source, Universal) else _foreign(ck))
    total, done = sum(c.verified + c.unverified for c in checks), 0
    problems: list[Problem] = []
    leaves: dict[Key, dict[tuple[int, ...], bytes]] = {}
    for check, (found, wrong) in run(lambda c: c.run(), checks, workers or workers_for(ck.store)):
        problems += wrong
        if check.key is not None:
            leaves.setdefault(check.key, {})[check.shard] = found
        done += check.verified + check.unverified
        if progress is not None:
            progress(done, total)
    if isinstance(source, Universal):
        if (reason := contradiction(source.manifest, ck.url)) is not None:
            problems.append(Problem(MANIFEST, reason))
        problems += wrong_digests(source, leaves, {(p.name, p.state) for p in problems})
    replicas = (c.replicas for c in checks if c.replicas is not None)
    for _, wrong in run(partial(_unequal, source.store, {p.file for p in problems}), replicas, workers):
        problems += wrong
    report = Report(
        ck.url,
        ck.kind,
        len(ck.tensors),
        sum(c.verified for c in checks),
        sum(c.unverified for c in checks),
        tuple(sorted(problems, key=lambda p: (p.file, p.chunk or (), p.reason))),
        unprotected(ck),
    )
    record_verification(ck, report)
    return report


def _universal(source: Universal) -> Iterator[_Check]:
    manifest, store = source.manifest, source.store
    files = [*manifest.assets.values(), *(f for f in (manifest.objects, manifest.sidecar) if f is not None)]
    for doc in files:
        yield _Check(None, (), doc.nbytes, 0, lambda d=doc: (b"", _file(source, d)))  # type: ignore[misc]
    for file, data, key in metadata_documents(manifest):
        yield _Check(None, (), len(data), 0, lambda f=file, d=data, k=key: (b"", document_problems(store, f, d, k)))  # type: ignore[misc]
    wrong, sidecar = _structure(source)
    yield _Check(None, (), 0, 0, lambda: (b"", wrong))
    unsound = {(p.name, p.state) for p in wrong}
    sources = () if manifest.sidecar is None else manifest.sidecar.sources
    compared = {f.path for f in sources if f.digest is not None}  # as a whole
    for f in sources:
        yield _Check(None, (), f.nbytes if f.path in compared else 0, 0, lambda f=f: (b"", source_file(source, f)))  # type: ignore[misc]
    numbers = {key: n for n, key in enumerate(source.docs)}
    held: dict[str, list[tuple[int, int]]] = {}  # of packed files: the bytes that extents and blocks have
    for key, tensor in source.docs.items():
        if tensor.path is None:
            if sidecar is not None and key not in unsound:
                extents = list(single_extents(sidecar.extents(numbers[key])))
                for e in extents:
                    held.setdefault(e.file, []).append(_run(e, ITEMSIZE[tensor.dtype]))
                info = TensorInfo(tensor.name, tensor.state, tensor.dtype, tensor.shape)
                yield _extents(store, info, 0 if {e.file for e in extents} <= compared else tensor.nbytes, extents)
            continue
        grid = grid_of(tensor)
        if (missing := source.missing_shards(tensor)) > _FEW:
            lost = Problem(tensor.path, f"{missing:,} of its {grid.count:,} shards are missing", *key)
            yield _Check(None, (), 0, 0, lambda p=lost: (b"", [p]))  # type: ignore[misc]
            continue
        for shard in grid.shards():
            yield _Check(
                key,
                shard,
                grid.file_nbytes(shard),
                0,
                lambda k=key, g=grid, s=shard: verify_shard(source, k, g, s),  # type: ignore[misc]
            )
    if not unsound:
        for file in (f for f in held if not f.startswith(MOUNT)):
            yield _Check(None, (), 0, 0, lambda f=file: (b"", _between(store, f, held[f])))  # type: ignore[misc]


def _run(e: Extent, itemsize: int) -> tuple[int, int]:
    """The first byte of an extent and its block, and the byte after them."""
    if e.block is not None:
        return e.block.offset, e.block.offset + e.block.nbytes + (4 if e.block.crc32c is None else 0)
    return (e.offset, e.last + itemsize) if e.box.size else (e.offset, e.offset)


def _between(store: Store, file: str, held: list[tuple[int, int]]) -> list[Problem]:
    """Whether the bytes that align what lies in a packed file are the zeros that the format says."""
    try:
        size, end = store.info(file).size, 0
        for start, stop in [*sorted(held), (size, size)]:
            if 0 < min(start, size) - end < ALIGNMENT and any(store.read(file, end, start - end)):
                return [Problem(file, f"bytes between {end} and {start}, which only align, are not zero")]
            end = max(end, stop)
    except NotFound:
        return []  # said of the tensors that lie in it
    except UcformatError as error:
        return [Problem(file, error.message)]
    return []


def _structure(source: Universal) -> tuple[list[Problem], Sidecar | None]:
    """What is wrong with what the checkpoint says of itself, and the sidecar if it can be believed."""
    doc = source.manifest.sidecar
    if doc is None or _file(source, doc):  # its damage is reported with that of the other files
        return list(structural(source.manifest, None)), None
    try:
        sidecar = source.read_sidecar()
    except UcformatError as error:
        return [Problem(doc.path, error.message)], None
    return list(structural(source.manifest, sidecar)), sidecar


def verify_shard(source: Universal, key: Key, grid: Grid, shard: tuple[int, ...]) -> tuple[bytes, list[Problem]]:
    """The digests of the chunks of a shard's file, and what is wrong with it."""
    path = source.docs[key].path or ""
    file = shard_key(path, shard)
    try:
        leaves, damages = check_shard(source.store, file, grid, shard)
    except (IntegrityError, PermissionDenied, UnsupportedError) as error:
        return b"", [Problem(file, error.message, key.name, key.state)]
    return leaves, [Problem(d.file, d.reason, key.name, key.state, d.chunk) for d in damages]


def document_problems(store: Store, file: str, data: bytes, key: Key | None) -> list[Problem]:
    """Whether a `zarr.json` is what the format says, so that foreign readers find what the manifest has."""
    try:
        found = store.read(file)
    except UcformatError as error:
        return [Problem(file, f"cannot be read: {error.message}", *(key or ()))]
    what = "group" if key is None else "tensor"
    return [] if found == data else [Problem(file, f"does not describe this {what}", *(key or ()))]


def _file(source: Universal, doc: FileDoc) -> list[Problem]:
    try:
        source.read_file(doc)
    except UcformatError as error:
        return [Problem(doc.path, error.message)]
    return []


def source_file(source: Universal, doc: SourceFileDoc) -> list[Problem]:
    """Whether a file of another checkpoint is still what was registered."""
    try:
        source.store.info(doc.path)
        if doc.digest is None or file_digest(source.store, doc.path) == doc.digest:
            return []
    except UcformatError as error:
        return [Problem(doc.path, error.message)]
    return [Problem(doc.path, "is not what was registered (its digest differs)")]


def wrong_digests(
    source: Universal,
    leaves: dict[Key, dict[tuple[int, ...], bytes]],
    damaged: Collection[tuple[str | None, str | None]] = (),
) -> Iterator[Problem]:
    """Tensors whose chunks are whole, but are not those that were committed."""
    for key, doc in source.docs.items():
        if doc.path is None or key in damaged:
            continue
        if tensor_digest(doc.dtype, grid_of(doc), leaves.get(key, {})) != doc.digest:
            yield Problem(doc.path, "its chunks are whole, but not those of the manifest", key.name, key.state)


def _foreign(ck: Checkpoint) -> Iterator[_Check]:
    source = ck.origin
    assert not isinstance(source, Universal)  # noqa: S101
    records = list(source.records())
    in_records = {r.file for r in records}  # their bytes are counted there
    named: set[str] = set()
    for stored in source.facts.roster.tensors:
        for key in source.facts.means.get(stored.key, (stored.key,)):
            info = TensorInfo(*key, stored.dtype, stored.shape)
            try:
                extents = list(source.extents(key))
                reason = coverage_problem(info, extents)
            except (IntegrityError, CoverageError) as error:
                extents, reason = [], error.message
            if reason is not None:
                wrong = [] if reason in named else [Problem(ck.home, reason, *key)]  # a file that cannot be read: once
                named.add(reason)
                yield _Check(None, (), 0, 0, lambda w=wrong: (b"", w))  # type: ignore[misc]
                continue
            apart = sum(e.box.size for e in extents if e.file not in in_records) * info.itemsize
            yield _extents(source.store, info, min(apart, info.nbytes), extents)
    for r in records:
        counted = (0, r.nbytes) if r.crc32 is None else (r.nbytes, 0)
        yield _Check(None, (), *counted, lambda r=r: (b"", _record(source, r)))  # type: ignore[misc]


def _record(source: OpenSource, record: Record) -> list[Problem]:
    """Whether a record is what its CRC-32 says; read in blocks."""
    try:
        start, crc = record.offset(), 0
        if record.crc32 is None:
            return []
        buffer = memoryview(bytearray(min(_BLOCK, record.nbytes)))
        for done in range(0, record.nbytes, _BLOCK):
            part = buffer[: min(_BLOCK, record.nbytes - done)]
            source.store.read_into(record.file, start + done, [part])
            crc = zlib.crc32(part, crc)
    except UcformatError as error:
        return [Problem(record.file, error.message)]
    if crc == record.crc32:
        return []
    held = list(_tensors_in(source, record.file, start, start + record.nbytes))
    reason = f"the CRC-32 of its record {record.name} differs"
    if len(held) == 1:
        return [Problem(record.file, reason, held[0].name, held[0].state)]
    named = ", ".join(map(str, held[:_NAMED])) + (f" and {len(held) - _NAMED} more" if len(held) > _NAMED else "")
    return [Problem(record.file, f"{reason}; it holds {named}" if held else reason)]


def _tensors_in(source: OpenSource, file: str, start: int, stop: int) -> Iterator[Key]:
    """The tensors that have bytes between these of a file."""
    for info in source.facts.roster.tensors:
        with suppress(IntegrityError, CoverageError):  # that is a problem of its own
            for e in source.extents(info.key):
                if e.file == file and e.box.size and e.offset < stop and e.last + info.itemsize > start:
                    yield info.key
                    break


def _extents(store: Store, info: TensorInfo, nbytes: int, extents: list[Extent]) -> _Check:
    """A check of a tensor that is not an array: of its blocks where it has some, else that its bytes are there."""
    key = info.key
    blocks = {(e.file, e.block) for e in extents if e.block is not None}
    verified = min(nbytes, sum(b.nbytes for _, b in blocks))
    bare = [e for e in extents if e.block is None]

    def check() -> tuple[bytes, list[Problem]]:
        wrong = []
        for file, b in blocks:
            try:
                if not is_whole(store, file, b):
                    wrong.append(damaged_block(file, b, key))
            except UcformatError as error:
                wrong.append(Problem(file, error.message, key.name, key.state))
        ends: dict[str, int] = {}
        for e in bare:
            ends[e.file] = max(ends.get(e.file, -1), e.last if e.box.size else -1)
        for file, end in ends.items():
            try:
                size = store.info(file).size
            except NotFound:
                wrong.append(Problem(file, "the file is missing", key.name, key.state))
            except UcformatError as error:
                wrong.append(Problem(file, error.message, key.name, key.state))
            else:
                if end >= size:
                    wrong.append(Problem(file, f"the file ends at {size}, before byte {end}", key.name, key.state))
        return b"", wrong

    replicas = (info, tuple(extents)) if len({e.box for e in extents}) < len(extents) else None
    return _Check(None, (), verified, nbytes - verified, check, replicas)


def _unequal(store: Store, damaged: Collection[str], of: tuple[TensorInfo, tuple[Extent, ...]]) -> list[Problem]:
    """Which replicas of a tensor differ; those in files that are damaged do, and were named."""
    info, extents = of
    return list(unequal_replicas(store, info, (e for e in extents if e.file not in damaged)))


def damaged_block(file: str, block: Block, key: Key) -> Problem:
    """The problem of a block that is not what its checksum says."""
    return Problem(file, f"crc32c differs (block at byte {block.offset})", key.name, key.state)
