"""The files of an export, as tasks: each is written from beginning to end, while its elements are read and verified."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from zlib import crc32

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ucformat.errors import Conflict, NotFound, UnsafeError, UnsupportedError
from ucformat.exporters.base import Sealed, Span
from ucformat.exporters.registry import EXPORTERS
from ucformat.format.digest import document_digest
from ucformat.geometry.fingerprint import (
    NO_ELEMENTS,
    fingerprint_of,
    packed_sums,
    total,
    unpacked_sums,
)
from ucformat.geometry.tensor import Key, cut_piece
from ucformat.jobs import bands
from ucformat.jobs.finished import FinishedDoc, RecordedJob, TaskDoc, sums_of
from ucformat.jobs.inputs import Input
from ucformat.jobs.reopen import content_of, options_of, other_found, plain_options, reopen, spec_of
from ucformat.jobs.tasks import job_name
from ucformat.reading.readable import TRACKERS
from ucformat.schema import ITEMSIZE
from ucformat.storage.base import HIDDEN, check_key, exists
from ucformat.storage.concurrency import map_io, thread_memory
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.upload import unit_for
from ucformat.storage.url import open_store, split_url
from ucformat.storage.wrappers import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.exporters.base import Exporter, Link, TargetFile
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.bands import PartRange
    from ucformat.jobs.finished import SumPart
    from ucformat.storage.base import FileWriter, Info, Store


# The claim of an export on its destination: one file with a fixed key, so only one export at a time
# writes there.
#
# A folder is claimed by `ucformat-export/begun.json`, a file `model.pt` by
# `ucformat-export/model.pt.json` beside it. The claim is put only if there is none, and stays until
# the export is complete: the same export continues, and another one takes it over only if the
# caller asks to overwrite. An export looks at its claim before each of its files appears, so one
# whose claim was taken over ends, and its last files do not appear.

#: The folder of an unfinished export with its records; it is removed when the export is complete.
FOLDER = "ucformat-export"
#: The claim on a whole folder.
CLAIM = f"{FOLDER}/begun.json"


class Claim(BaseModel):
    """The export that a destination belongs to: the keys of its files, and of those that it is to remove first."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["ucformat-export-1"] = "ucformat-export-1"
    attempt: Annotated[str, Field(pattern="^[0-9a-f]{20}$")]
    files: tuple[str, ...]
    removes: tuple[str, ...] = ()


def read_claim(store: Store, key: str) -> tuple[Claim, str] | None:
    """The claim on a destination and its content version; None if there is none."""
    try:
        data, version = store.read_versioned(key)
        return Claim.model_validate_json(data), version
    except NotFound:
        return None
    except ValidationError:
        raise Conflict(
            f"{store.url}/{key} is not a record of an export", hint="choose another place"
        ) from None


class WriteBehind:
    """Writes a band in a thread of its own, while the caller fills the next one.

    Args:
        nbytes: bytes of the file. One of a single band is written by the caller's thread.
    """

    def __init__(self, out: FileWriter, nbytes: int) -> None:
        self._out, self._turn = out, 0
        self._pool = ThreadPoolExecutor(1, "ucformat-write") if nbytes > bands.BAND_BYTES else None
        self._writing: Future[None] | None = None

    def memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory to fill, of which nothing is being written."""
        return thread_memory(f"band {self._turn}", nbytes)

    def write(self, data: memoryview) -> None:
        """Write bytes, after all that were given before.

        Args:
            data: the bytes, which do not change before `wait`, or the next call of this method,
                returns.
        """
        self.wait()
        if self._pool is None:
            self._out.write(data)
            return
        self._writing = self._pool.submit(copy_context().run, self._out.write, data)
        self._turn ^= 1

    def wait(self) -> None:
        """Wait until everything is written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()


# Links to the files of a checkpoint instead of copies of them, on a local disk.

_FICLONE = 0x40049409  # of linux/fs.h: share the blocks of a file, which are copied when one of the two is written
_NO_REFLINKS = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS}


def link_file(src: Store, link: Link, dst: Store, key: str) -> None:
    """Make a file of a folder a link to one of another; it appears under its name as a whole."""
    source, target = _path(src) / check_key(link.key), _path(dst) / check_key(key)
    with mapping_os_errors("create", str(target)):
        target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.with_name(f"{HIDDEN}{secrets.token_hex(8)}.tmp")
    try:
        if link.hard:
            _link(source, hidden, read_only=link.read_only)
        else:
            _clone(source, hidden)
        with mapping_os_errors("create", str(target)):
            hidden.replace(target)
    finally:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)
    dst.adopt(key)


def _path(store: Store) -> Path:
    scheme, path = split_url(store.url)
    if scheme not in ("", "file"):
        raise UnsupportedError(
            f"{store.url} is not on a local disk, so files there cannot be linked", hint="copy them"
        )
    return Path(path)


def _link(source: Path, hidden: Path, *, read_only: bool) -> None:
    with mapping_os_errors("read", str(source)):
        mode = stat.S_IMODE(source.stat().st_mode)
        if mode & 0o222:
            if not read_only:
                raise UnsafeError(
                    f"{source} can be written, and a program that writes to a hard link of it "
                    "damages the checkpoint",
                    hint=(
                        "--read-only (read_only=True) removes the permission to write from the "
                        "checkpoint's own file"
                    ),
                )
            source.chmod(mode & ~0o222)
    try:
        with mapping_os_errors("link", str(source)):
            os.link(source.resolve(), hidden, follow_symlinks=False)
    except UnsupportedError as error:  # the file system has none, or they are on two
        raise UnsupportedError(error.message, hint="leave out --link for a copy") from error


def _clone(source: Path, hidden: Path) -> None:
    with mapping_os_errors("read", str(source)):
        source_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mapping_os_errors("create", str(hidden)):
            target_fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.ioctl(target_fd, _FICLONE, source_fd)
        except OSError as error:
            if error.errno not in _NO_REFLINKS:
                with mapping_os_errors("link", str(source)):
                    raise
            raise UnsupportedError(
                f"{source} cannot be shared with {hidden.parent}: the file system has no "
                "reflinks, or they are on two",
                hint=(
                    "leave out --link for a copy, or give --link=hard, which shares the "
                    "checkpoint's own file"
                ),
            ) from error
        finally:
            os.close(target_fd)
    finally:
        os.close(source_fd)


def plan_of(source: Checkpoint, infos: Sequence[TensorInfo], exporter: Exporter) -> dict[str, Any]:
    """What identifies an export: the content of the source, and the options."""
    return {
        "export": source.store.url,
        **content_of(source, infos),
        "kind": exporter.kind,
        "options": _plain_options(exporter),
    }


def _plain_options(exporter: Exporter) -> dict[str, Any]:
    """The options of an exporter as JSON values."""
    return plain_options(
        {f.name: getattr(exporter.options, f.name) for f in fields(exporter.options)}
    )


class FilesJob(RecordedJob):
    """Writes files that an exporter has planned, in the order in which they are given."""

    def __init__(
        self, source: Checkpoint, store: Store, files: Sequence[TargetFile], *, verify: bool = True
    ) -> None:
        self.source, self.store, self.files = source, store, files
        self.count = len(self.files)
        self.finished = set()
        self.outputs: dict[str, Info] = {}  # the files of finished tasks, as they were written
        self.bare = False  # whether elements were exported that no checksum of the source covers
        self.input = Input(source, verify=verify)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.input.close()
        super().__exit__(kind)

    def nbytes(self, task: int) -> int:
        """See Job."""
        return self.files[task].nbytes

    def run(self, task: int) -> tuple[TaskDoc, Sequence[SumPart]]:
        """See Job."""
        with self.input.task() as sums:
            bare, digests, crcs = self.write_task(task)
        info = self.store.info(self.files[task].key)
        return TaskDoc.of(task, info, digests, crcs=crcs, bare=bare), sums

    def write_task(self, task: int) -> tuple[bool, bytes, bytes]:
        """Write a file.

        Returns:
            Whether elements have no checksum in the source, and what is recorded as `digests` and
            as `crcs`.
        """
        return self.write(self.files[task]), b"", b""

    def write(
        self,
        file: TargetFile,
        advance: Callable[[memoryview], None] | None = None,
        sums: list[Sums] | None = None,
    ) -> bool:
        """Write a file; it appears only if the destination is still this job's, a last one if the source is intact.

        Args:
            advance: called with each part of it that is written, in order.
            sums: gets the parts of fingerprints of all pieces in the file, in order.

        Returns:
            Whether elements that were read have no checksum in the source.
        """
        if file.link is not None:
            self.check_claim()
            link_file(self.source.store, file.link, self.store, file.key)
            return True
        bare = False
        crcs: list[int] = []
        with (
            self.store.create(file.key, unit_for(file.nbytes)) as out,
            WriteBehind(out, file.nbytes) as behind,
        ):
            for band in bands.bands_of(file.parts()):
                if isinstance(band, Sealed):
                    behind.write(memoryview(band.make(crcs)))
                    continue
                memory = behind.memory(sum(part_range.nbytes for part_range in band))
                bare |= not bands.fill(self.input, band, memory)
                if file.checksums:
                    _continue_crcs(band, memory, crcs)
                if sums is not None:
                    _continue_fingerprints(band, memory, sums)
                behind.write(memory.data)
                if advance is not None:
                    advance(memory.data)
            behind.wait()
            if file.last:
                self.check_source()
            self.check_claim()
        return bare

    def check_claim(self) -> object:
        """Check that the destination still belongs to this job."""

    def record(self, results: Mapping[int, Any]) -> str:
        """See Job."""
        sums = sums_of(noted for _, noted in results.values())
        tasks = tuple(doc for doc, _ in results.values())
        return FinishedDoc(parts=self.parts, tasks=tasks, sums=sums).model_dump_json()

    def take_finished(self, doc: FinishedDoc, *, resumed: bool = False) -> None:  # noqa: ARG002 - see RecordedJob
        """See RecordedJob."""
        self.parts = max(self.parts, doc.parts)
        for task in doc.tasks:
            if task.task < self.count and task.file == self.files[task.task].key:
                self.finished.add(task.task)
                self.outputs[task.file] = task.info
                self.bare |= task.bare
                self.take_recorded(task)
        if self.input.verifier is not None:
            self.input.verifier.take(doc.sums)

    def take_recorded(self, task: TaskDoc) -> None:
        """Take what is recorded as `digests` and `crcs` of a task."""

    def check_source(self) -> None:
        """Complete the checksums of which parts were read, and compare the versions of the files that were read."""
        if self.input.verifier is not None:
            self.input.verifier.complete()
        if any(file.link for file in self.files):
            return  # nothing was read, and a hard link changes when its file was changed last
        check_unchanged(self.source.store, f"{self.store.url} is not complete", TRACKERS)


class ExportJob(FilesJob):
    """Writes the files of a target, the large ones first, without those that are `last`."""

    kind = "export"

    def __init__(
        self,
        source: Checkpoint,
        store: Store,
        infos: Sequence[TensorInfo],
        exporter: Exporter,
        *,
        verify: bool = True,
    ) -> None:
        self.infos, self.exporter = infos, exporter
        self.continued = False  # whether an earlier process began the export
        self.plan = document_digest(plan_of(source, infos, exporter))
        self.attempt = self.plan.rpartition(":")[2][:20]
        self.target = exporter.target(source, infos)
        files = sorted((f for f in self.target.files if not f.last), key=lambda f: -f.nbytes)
        #: Of the finished files, the parts of fingerprints of the pieces in each, in order: if the
        #: source records no fingerprints for all tensors, which are those of the export, too.
        self.sums: dict[str, list[Sums]] = {}
        recorded = source.metadata.fingerprints
        self._summed = any(recorded.get(info.key) is None for info in infos)
        super().__init__(source, store, files, verify=verify)

    @property
    def url(self) -> str:
        """The url of the target: of its folder or, if it is one, of its file."""
        return (
            f"{self.store.url}/{self.target.files[0].key}"
            if self.exporter.one_file
            else self.store.url
        )

    @property
    def claim(self) -> str:
        """The key of the claim on the destination."""
        return f"{FOLDER}/{self.target.files[0].key}.json" if self.exporter.one_file else CLAIM

    @property
    def records(self) -> str:
        """See RecordedJob."""
        return f"{FOLDER}/{self.attempt}/finished"

    @property
    def written(self) -> tuple[str, ...]:
        """See RecordedJob."""
        return ("",)

    def spec(self) -> dict[str, Any]:
        """See Job."""
        return {
            "job": job_name(self),
            "source": spec_of(self.source),
            "store": self.store.url,
            "tensors": [tuple(i.key) for i in self.infos],
            "kind": self.exporter.kind,
            "options": _plain_options(self.exporter),
            "verify": self.input.verify,
            "plan": self.plan,
        }

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        source = reopen(spec["source"])
        infos = [source.tensors[Key(*key)] for key in spec["tensors"]]
        exporter = EXPORTERS[spec["kind"]](**options_of(spec["options"]))
        job = cls(source, open_store(spec["store"]), infos, exporter, verify=spec["verify"])
        if job.plan != spec["plan"]:
            raise other_found(source)
        return job

    @property
    def last_nbytes(self) -> int:
        """The bytes of the files that are written last."""
        return sum(f.nbytes for f in self.target.files if f.last)

    def write_task(self, task: int) -> tuple[bool, bytes, bytes]:
        """See FilesJob."""
        sums: list[Sums] = []
        bare = self.write(self.files[task], sums=sums if self._summed else None)
        return bare, packed_sums(enumerate(sums), len(sums)), b""

    def take_recorded(self, task: TaskDoc) -> None:
        """See FilesJob."""
        self.sums[task.file] = unpacked_sums(bytes.fromhex(task.digests))

    def own_claim(self) -> Claim | None:
        """The claim on the destination, if it is this export's."""
        versioned = read_claim(self.store, self.claim)
        return (
            versioned[0] if versioned is not None and versioned[0].attempt == self.attempt else None
        )

    def check_claim(self) -> Claim:
        """The claim on the destination.

        Raises:
            Conflict: another export has taken the place, or another process of the same export has
                finished it.
        """
        claim = self.own_claim()
        if claim is None:
            raise Conflict(
                f"{self.url} no longer belongs to this export: another one has replaced or "
                "finished it meanwhile",
                hint="look at what is there; to write it again, pass overwrite=True (--overwrite)",
            )
        return claim

    def keep(self, record: str) -> None:
        """See Job."""
        self.check_claim()
        super().keep(record)

    def _check_outputs(self) -> None:
        """Check that files are as tasks wrote them, and remove what a replaced export wrote late."""
        claim = self.check_claim()
        keys = [file.key for file in self.files]
        # change when others are made
        links = {file.key for file in self.files if file.link is not None}
        for key, info in zip(keys, map_io(partial(_info_or_none, self.store), keys), strict=True):
            if info is None or not (key in links or info.is_same(self.outputs[key])):
                raise Conflict(
                    f"{self.store.url}/{key} is not the file that this export wrote: another "
                    "program wrote there",
                    hint=(
                        "when that program has ended, run the same export again: it writes this "
                        "file again"
                    ),
                )
        for key in set(claim.removes) - {file.key for file in self.target.files}:
            if not key.startswith(f"{FOLDER}/") and exists(self.store, key):
                self.check_claim()
                self.store.delete(key)

    def finish(self, progress: Callable[[int, int], None] | None) -> None:
        """Write the files that are last; call it when all tasks are finished.

        Args:
            progress: called with the bytes done and the bytes in all.

        Raises:
            Conflict: a file of the source has changed, or another program writes at the
                destination.
        """
        done, total = self.total, self.total + self.last_nbytes

        def advance(data: memoryview) -> None:
            nonlocal done
            done += data.nbytes
            if progress is not None:
                progress(min(done, total), total)

        self.check_source()
        self._check_outputs()
        for file in self.target.files:
            if file.last:
                self.store.flush()
                sums = self.sums.setdefault(file.key, [])
                self.bare |= self.write(file, advance, sums if self._summed else None)
        self.store.flush()


def _info_or_none(store: Store, key: str) -> Info | None:
    try:
        return store.info(key)
    except NotFound:
        return None


def _continue_crcs(band: Sequence[PartRange], memory: NDArray[np.uint8], crcs: list[int]) -> None:
    """Continue the CRC-32 of each span with its bytes in a band."""
    at = 0
    for part_range in band:
        if isinstance(part_range.part, Span):
            if part_range.start == 0:
                crcs.append(0)
            crcs[-1] = crc32(memory.data[at : at + part_range.nbytes], crcs[-1])
        at += part_range.nbytes


def _continue_fingerprints(
    band: Sequence[PartRange], memory: NDArray[np.uint8], sums: list[Sums]
) -> None:
    """Continue the parts of fingerprints of the pieces in each span with their elements in a band."""
    at = 0
    for part_range in band:
        if isinstance(part_range.part, Span):
            unit, pieces = ITEMSIZE[part_range.part.dtype], part_range.part.pieces
            if part_range.start == 0:
                sums += [NO_ELEMENTS] * len(pieces)
            for n, (info, piece) in enumerate(pieces, len(sums) - len(pieces)):
                for own in cut_piece(piece, part_range.start, part_range.stop):
                    begin = at + (own.offset - part_range.start) * unit
                    strides = [s * unit for s in own.strides]
                    elements = np.ndarray(own.box.shape, f"V{unit}", memory, begin, strides)
                    sums[n] = total((sums[n], fingerprint_of(elements, info.shape, own.box)))
        at += part_range.nbytes
