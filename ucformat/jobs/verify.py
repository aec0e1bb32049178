"""Verifies a checkpoint: compares every byte of it with its checksums and digests."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    CoverageError,
    Inconsistent,
    IntegrityError,
    MissingData,
    NotFinished,
    NotFound,
    UcformatError,
    UnsupportedError,
    UsageError,
    first_names,
)
from ucformat.format.audit import (
    WRONG_FINGERPRINT,
    WRONG_TILE,
    Check,
    ListedFile,
    ShardFile,
    block_problems,
    checked,
    items,
    referenced,
    source_files,
    unequal_replicas,
    wrong_digests,
)
from ucformat.format.described import ALIGNMENT
from ucformat.format.encoded import CHECKSUM_BYTES, find_image
from ucformat.format.extents import consistency_problems as structural
from ucformat.format.extents import coverage_problem, encoded_files
from ucformat.format.structure import MOUNT, Problem
from ucformat.format.tile_index import TileIndex, tile_fingerprint
from ucformat.format.universal import Universal
from ucformat.geometry.fingerprint import fingerprint_of, text_of, total
from ucformat.geometry.tensor import Key, TensorInfo, single_extents
from ucformat.jobs.dependents import unprotected
from ucformat.jobs.record import contradiction, record_verification
from ucformat.jobs.reopen import other_found, reopen, spec_of
from ucformat.jobs.run import Report, run, workers_for
from ucformat.jobs.tasks import Job, job_name
from ucformat.jobs.where import Where, run_job
from ucformat.reading.execute import read_fingerprint
from ucformat.references import open_reference
from ucformat.schema import MANIFEST
from ucformat.signatures import check_signed
from ucformat.storage.base import ENCODED, read_parts, stored_key
from ucformat.storage.cache.scope import uncached
from ucformat.storage.decoded import is_checked
from ucformat.storage.strided import crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
    from os import PathLike

    from ucformat.format.sidecar import Sidecar
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Block, Extent
    from ucformat.reading.readable import FileRecord
    from ucformat.sources.base import OpenSource
    from ucformat.storage.base import Store

    _Replicated = tuple[TensorInfo, tuple[Extent, ...]]  # several extents have the same box

__all__ = ["Problem", "verify"]

_BLOCK = 4 << 20  # bytes of a record that are read at once
_MAX_NAMED = 5  # tensors in a damaged record, named in the message


@uncached()
def verify(
    place: str | PathLike[str] | Store | Checkpoint,
    workers: int | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    signed_by: str | PathLike[str] | Iterable[str | PathLike[str]] | None = None,
    signature: str | PathLike[str] | None = None,
    on: str = "threads",
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read every byte of a checkpoint from its storage, past any cache, and compare it with its checksums and digests.

    It also checks that the manifest and the sidecar are consistent, that the extents cover their
    tensors, and that replicas are equal. For a foreign checkpoint it checks that every extent is
    inside its file, and the CRC-32 of every zip record that has one (torch writes them by default).
    The result is recorded in the catalog if that knows the checkpoint.

    Args:
        place: a checkpoint, or the place of one.
        workers: files read at once (default: one for each core; for object stores eight at least).
        options: facts that the files of a foreign checkpoint lack, as in `open`.
        signed_by: first check that the manifest is signed by one of these, as in `open`; files of
            which the signature states the SHA-256 are compared with that, too.
        signature: a local file with the signature (default: the one beside the manifest).
        on: where files are read, as for `convert`. Parts are cut by tensors; each has a report of
            its own, which is not recorded in the catalog.
        progress: called with the bytes done and the bytes in all.

    Raises:
        NotFinished: this process of torchrun has done its part, and rank 0 has the report.
        UnsafeError: it is not signed as `signed_by` demands, or its bases are where no files may be
            read.
        NotACheckpoint: there is no committed checkpoint.
        AmbiguousLayout: the files of a foreign checkpoint can be read in two ways.
    """
    where = Where.parse(on)
    try:
        ck = place if isinstance(place, Checkpoint) else open_reference(place, options=options)
    # its metadata contradict themselves, so there are no valid checksums
    except Inconsistent as error:
        named = tuple(p for p in error.problems if isinstance(p, Problem))
        return Report(str(getattr(place, "url", place)), Universal.kind, 0, 0, 0, named)
    if where.kind == "commit":
        raise UsageError(
            "a verification has nothing to commit", hint="each part reports what it has found"
        )
    if signature is not None and signed_by is None:
        raise UsageError("a signature is checked only against signers", hint="pass signed_by, too")
    signed = None if signed_by is None else check_signed(ck, signed_by, signature)
    if ck.universal:
        for number in range(len(ck.universal.bases.docs)):
            ck.universal.bases.place(number)  # what may not be read is not damaged
    job = VerifyJob(ck)
    workers = workers or workers_for(ck.store)
    done = run_job(job, where, workers, progress)
    part = f"{where.index}/{where.count}" if where.kind == "part" else ""
    if not done and not part:
        raise NotFinished("")
    problems = job.problems
    if ck.universal:
        if (reason := contradiction(ck.universal.manifest, ck.url)) is not None:
            problems.append(Problem(MANIFEST, reason))
        unknown = {job.group(task) for task in job.todo}
        damaged = {(p.name, p.state) for p in problems} | {
            key for key in ck.universal.docs if key in unknown
        }
        problems += wrong_digests(ck.universal, job.shards, damaged)
        if signed is not None:
            keys = sorted(signed.digests.keys() - {MANIFEST})[where.index :: where.count]
            problems += _signed_file_problems(
                ck.universal.store, {key: signed.digests[key] for key in keys}, workers
            )
    verified = [job.checks[task] for task in job.finished if task < len(job.checks)]
    report = Report(
        ck.url,
        ck.kind,
        len(ck.tensors),
        sum(c.nbytes for c in verified),
        sum(c.unverified for c in verified),
        tuple(sorted(dict.fromkeys(problems), key=lambda p: (p.file, p.chunk or (), p.reason))),
        unprotected(ck),
        part,
        ck.metadata.part_of,
        "" if signed is None else signed.by,
        0 if signed is None else len(signed.digests) - 1,
        {url: n for url, (n, _) in ck.universal.bases.amounts().items()} if ck.universal else {},
        len(ck.older),
    )
    if not part:
        record_verification(ck, report)
    return report


def _signed_file_problems(store: Store, digests: Mapping[str, str], workers: int) -> list[Problem]:
    """The files that are not those of which a signature states the SHA-256."""

    def check(key: str) -> list[Problem]:
        state = hashlib.sha256()
        try:
            for _, part in read_parts(store, key, store.info(key).size):
                state.update(part)
        except NotFound:
            return [Problem(key, "the signed file is missing", kind="missing")]
        except UcformatError as error:
            return [Problem(key, error.message)]
        differs = state.hexdigest() != digests[key]
        return [Problem(key, "its SHA-256 is not the signed one", kind="differs")] * differs

    return [problem for _, problems in run(check, digests, workers) for problem in problems]


class VerifyJob(Job):
    """Checks the files of a checkpoint, and then compares replicas."""

    kind = "verify"

    def __init__(self, ck: Checkpoint) -> None:
        self._ck = ck
        self._replicated: list[_Replicated] = []
        checks = (
            _universal(ck.universal, self._replicated)
            if ck.universal
            else _foreign(ck, self._replicated)
        )
        self.checks = list(checks)
        self.count = len(self.checks) + len(self._replicated)
        self.finished = set()
        self.shards: dict[Key, dict[tuple[int, ...], bytes]] = {}
        self._problems: list[Problem] = []
        self._unequal: list[Problem] = []

    @property
    def problems(self) -> list[Problem]:
        """Those that were found; replicas in damaged files are not compared."""
        damaged = {p.file for p in self._problems}
        return self._problems + [p for p in self._unequal if p.file not in damaged]

    def nbytes(self, task: int) -> int:
        """See Job."""
        return (
            self.checks[task].nbytes + self.checks[task].unverified
            if task < len(self.checks)
            else 0
        )

    def group(self, task: int) -> Hashable:
        """See Job: the digest of an array takes all its shards."""
        key = self.checks[task].key if task < len(self.checks) else None
        return task if key is None else key

    def run(self, task: int) -> tuple[bytes, list[Problem]]:
        """See Job."""
        if task < len(self.checks):
            return self.checks[task].run()
        info, extents = self._replicated[task - len(self.checks)]
        return b"", list(unequal_replicas(self._ck.origin.store, info, extents))

    def record(self, results: Mapping[int, tuple[bytes, list[Problem]]]) -> str:
        """See Job."""
        return json.dumps(
            [
                (task, digests.hex(), [asdict(p) for p in wrong])
                for task, (digests, wrong) in results.items()
            ]
        )

    def keep(self, record: str) -> None:
        """Keep nothing: the place may be read-only."""

    def take(self, record: str) -> None:
        """See Job."""
        for task, digests, problems in json.loads(record):
            problems_found = [
                Problem(**{**p, "chunk": None if p["chunk"] is None else tuple(p["chunk"])})
                for p in problems
            ]
            self.finished.add(task)
            if task >= len(self.checks):
                self._unequal += problems_found
                continue
            self._problems += problems_found
            check = self.checks[task]
            if check.key is not None and check.shard is not None:
                self.shards.setdefault(check.key, {})[check.shard] = bytes.fromhex(digests)

    def spec(self) -> dict[str, Any]:
        """See Job."""
        return {"job": job_name(self), "source": spec_of(self._ck), "id": self._ck.id}

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        checkpoint = reopen(spec["source"])
        if checkpoint.id != spec["id"]:
            raise other_found(checkpoint)
        return cls(checkpoint)


def _universal(source: Universal, replicated: list[_Replicated]) -> Iterator[Check]:
    store = source.store
    for item in items(source):
        # a shard has its own
        yield Check.of(item, store, () if isinstance(item, ShardFile) else (UcformatError,))
    wrong, sidecar = _structure(source)
    yield Check(0, lambda: (b"", wrong))
    unsound = {(p.name, p.state) for p in wrong}
    compared = {f.file for f in source_files(source) if f.doc.digest is not None}  # as a whole
    numbers = {key: n for n, key in enumerate(source.docs)}
    # of packed files: the bytes that extents and blocks have
    ranges: dict[str, list[tuple[int, int]]] = {}
    encoded = None if sidecar is None else sidecar.below(ENCODED)
    for key, tensor in source.docs.items():
        stored = sidecar if tensor.codec is None else encoded
        if tensor.in_sidecar and stored is not None and key not in unsound:
            extents = list(single_extents(stored.extents(numbers[key])))
            for e in extents:
                ranges.setdefault(e.file, []).append(_run(e, tensor.unit))
            info = TensorInfo(tensor.name, tensor.state, tensor.stored_dtype, tensor.shape)
            if extents and {e.file for e in extents} <= compared:
                yield _extents(source, info, 0, extents, replicated)
            else:
                yield _extents(source, info, tensor.nbytes, extents, replicated, tensor.fingerprint)
    yield from referenced(source)
    if not unsound:
        with_index = set() if sidecar is None else encoded_files(sidecar, source.manifest.tensors)
        for file in sorted(with_index):
            tiles = ranges.pop(ENCODED + file, [])
            yield Check(0, lambda f=file, t=tiles: (b"", _other_tiles(store, f, t)))  # type: ignore[misc]
        for file in (f for f in ranges if not f.startswith(MOUNT)):
            yield Check(0, lambda f=file: (b"", _between(store, f, ranges[f])))  # type: ignore[misc]


def _run(e: Extent, itemsize: int) -> tuple[int, int]:
    """The first byte of an extent and its block, and the byte after them."""
    if e.block is not None:
        return e.block.offset, e.block.offset + e.block.nbytes + (
            4 if e.block.crc32c is None else 0
        )
    return (e.offset, e.last + itemsize) if e.box.size else (e.offset, e.offset)


def _between(store: Store, file: str, ranges: list[tuple[int, int]]) -> list[Problem]:
    """The problems of the padding in a packed file, which must be zeros."""
    try:
        size, end = store.info(file).size, 0
        for start, stop in [*sorted(ranges), (size, size)]:
            if 0 < min(start, size) - end < ALIGNMENT and any(store.read(file, end, start - end)):
                return [Problem(file, f"padding bytes between {end} and {start} are not zero")]
            end = max(end, stop)
    except NotFound:
        return []  # reported for the tensors in it
    except UcformatError as error:
        return [Problem(file, error.message)]
    return []


def _other_tiles(store: Store, file: str, ranges: list[tuple[int, int]]) -> list[Problem]:
    """The problems of the index of an encoded file, which must have the tiles of the tensors and no other."""
    tiles = [(start, stop - start - CHECKSUM_BYTES) for start, stop in ranges if start < stop]
    try:
        image = find_image(store, file)
    except MissingData as error:
        return [Problem(file, error.message, kind="missing")] if tiles else []
    except UcformatError as error:
        return [Problem(file, error.message)]
    assert isinstance(image, TileIndex)  # noqa: S101 - it is a packed file
    reason = image.other_tile(tiles)
    return [] if reason is None else [Problem(file, reason)]


def _structure(source: Universal) -> tuple[list[Problem], Sidecar | None]:
    """The problems of the metadata, and the sidecar if it is valid."""
    doc = source.manifest.sidecar
    # its damage is reported with that of the other files
    if doc is None or checked(ListedFile(doc), source.store)[1]:
        return list(structural(source.manifest, None)), None
    try:
        sidecar = source.read_sidecar()
    except UcformatError as error:
        return [Problem(doc.path, error.message)], None
    return list(structural(source.manifest, sidecar)), sidecar


def _foreign(ck: Checkpoint, replicated: list[_Replicated]) -> Iterator[Check]:
    source = cast("OpenSource", ck.foreign)
    records = list(source.records())
    in_records = {r.file for r in records}  # their bytes are counted there
    named: set[str] = set()
    for key, why in source.metadata.unreadable.items():
        unread = [Problem(ck.home, f"was not verified: it {why}", *key)]
        yield Check(0, lambda w=unread: (b"", w))  # type: ignore[misc]
    for stored in source.metadata.tensor_list.tensors:
        for key in source.metadata.means.get(stored.key, (stored.key,)):
            info = TensorInfo(*key, stored.dtype, stored.shape)
            try:
                extents = list(source.extents(key))
                reason = coverage_problem(info, extents)
            except (IntegrityError, CoverageError, UnsupportedError) as error:
                extents, reason = [], error.message
            if reason is not None:
                # once per unreadable file
                wrong = [] if reason in named else [Problem(ck.home, reason, *key)]
                named.add(reason)
                yield Check(0, lambda w=wrong: (b"", w))  # type: ignore[misc]
                continue
            apart = sum(e.box.size for e in extents if e.file not in in_records) * info.itemsize
            yield _extents(source, info, min(apart, info.nbytes), extents, replicated)
    for r in records:
        verified, unverified = (0, r.nbytes) if r.crc32 is None else (r.nbytes, 0)
        yield Check(verified, lambda r=r: (b"", _record(source, r)), unverified=unverified)  # type: ignore[misc]


def _record(source: OpenSource, record: FileRecord) -> list[Problem]:
    """The problems of a record, whose CRC-32 is computed in blocks."""
    try:
        start, crc = record.locate(), 0
        if record.crc32 is None:
            return []
        buffer = memoryview(bytearray(min(_BLOCK, record.nbytes)))
        for done in range(0, record.nbytes, _BLOCK):
            part = buffer[: min(_BLOCK, record.nbytes - done)]
            source.store.read_into(record.file, start + done, [part])
            crc = crc32(part, crc)
    except UcformatError as error:
        return [Problem(record.file, error.message)]
    if crc == record.crc32:
        return []
    tensors = list(_tensors_in(source, record.file, start, start + record.nbytes))
    reason = f"the CRC-32 of its record {record.name} differs"
    if len(tensors) == 1:
        return [Problem(record.file, reason, tensors[0].name, tensors[0].state)]
    named = f"; it holds {first_names(tensors, _MAX_NAMED)}" if tensors else ""
    return [Problem(record.file, f"{reason}{named}")]


def _tensors_in(source: OpenSource, file: str, start: int, stop: int) -> Iterator[Key]:
    """The tensors that have bytes in a range of a file."""
    for info in source.metadata.tensor_list.tensors:
        # reported as a problem of its own
        with suppress(IntegrityError, CoverageError, UnsupportedError):
            for e in source.extents(info.key):
                if (
                    e.file == file
                    and e.box.size
                    and e.offset < stop
                    and e.last + info.itemsize > start
                ):
                    yield info.key
                    break


def _extents(
    source: Universal | OpenSource,
    info: TensorInfo,
    nbytes: int,
    extents: list[Extent],
    replicated: list[_Replicated],
    fingerprint: str | None = None,
) -> Check:
    """A check of a tensor that is no array: of its checksums and fingerprint, and that its other bytes exist."""
    key, store = info.key, source.store
    blocks = {(e.file, e.block) for e in extents if e.block is not None}
    bare = [e for e in extents if e.block is None]
    decoded = {e.file for e in bare if e.box.size and is_checked(store, e.file)}
    sizes = [b.nbytes for _, b in blocks]
    sizes += [e.box.size * info.itemsize for e in bare if e.file in decoded]
    verified = min(nbytes, sum(sizes)) if fingerprint is None else nbytes
    if len({e.box for e in extents}) < len(extents):
        replicated.append((info, tuple(extents)))

    def check() -> tuple[bytes, list[Problem]]:
        compared = [e for e in extents if fingerprint is not None or ENCODED in e.file]
        sums = _BlockFingerprints(info, compared)
        wrong = block_problems(store, key, blocks, use=sums.use)
        wrong += (
            Problem(stored_key(e.file), f"{WRONG_TILE} (block at byte {e.offset})", *key)
            for e, part in sums.parts
            if tile_fingerprint(store, e) not in (None, part)
        )
        ends: dict[str, int] = {}
        for e in bare:
            ends[e.file] = max(ends.get(e.file, -1), e.last if e.box.size else -1)
        for file, end in ends.items():
            try:
                size = store.info(file).size
                if file in decoded:
                    store.read(file, 0, 1)  # any byte needs all of them
            except NotFound:
                wrong.append(
                    Problem(file, "the file is missing", key.name, key.state, kind="missing")
                )
            except UcformatError as error:
                wrong.append(Problem(file, error.message, key.name, key.state))
            else:
                if end >= size:
                    wrong.append(
                        Problem(
                            file, f"the file ends at {size}, before byte {end}", key.name, key.state
                        )
                    )
        if wrong or fingerprint is None:
            return b"", wrong
        if fingerprint != (sums.fingerprint or read_fingerprint(source, info)):
            file = stored_key(extents[0].file) if extents else MANIFEST
            wrong.append(Problem(file, WRONG_FINGERPRINT, key.name, key.state))
        return b"", wrong

    return Check(verified, check, unverified=nbytes - verified)


class _BlockFingerprints:
    """The fingerprint of a tensor, from the blocks that are read to compare their checksums."""

    def __init__(self, info: TensorInfo, extents: Iterable[Extent]) -> None:
        self._info = info
        self._extents: dict[tuple[str, Block | None], list[Extent]] = {}
        for e in extents:
            self._extents.setdefault((e.file, e.block), []).append(e)
        self.parts: list[tuple[Extent, Sums]] = []  #: Of the extents that were read.

    def use(self, file: str, block: Block, begin: int, data: memoryview) -> None:
        """Take the elements of the extents that lie in a part of a block."""
        unit = self._info.itemsize
        for e in self._extents.get((file, block), ()):
            if e.box.size and begin <= e.offset and e.last + unit <= begin + data.nbytes:
                elements = np.ndarray(e.box.shape, f"V{unit}", data, e.offset - begin, e.strides)
                self.parts.append((e, fingerprint_of(elements, self._info.shape, e.box)))

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint; None if elements were not read, or perhaps some of them twice."""
        parts = {e.box: part for e, part in self.parts}  # of replicas one
        whole = sum(box.size for box in parts) == self._info.size
        return text_of(total(parts.values())) if whole else None
