"""Records of the finished tasks of an attempt, kept beside its files until it is committed.

A record is put after the files of its tasks are durable. So whoever continues the attempt, or
commits what others have done, reads none of them again: a file is the one in the record if its size
and version are. The checksums of a source of which tasks in several processes have read parts are
combined from the records, too.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from bisect import bisect_right
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ucformat.errors import Conflict, IntegrityError, MissingData, NotFound, UcformatError
from ucformat.format.attempts import folders_of
from ucformat.format.digest import bytes_digest
from ucformat.jobs.tasks import Job
from ucformat.storage.base import Info
from ucformat.storage.concurrency import map_io
from ucformat.storage.strided import CRC32_SHIFT, CRC32C_SHIFT, checksum, crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucformat.storage.base import Store


# Checksums of a source of which tasks, perhaps in several processes, read the bytes piece by piece
# in any order.


class StreamSum:
    """The progress of one checksum: which of its bytes have been read, and their combined CRC."""

    __slots__ = (
        "castagnoli",
        "crc",
        "expected",
        "file",
        "left",
        "shift",
        "start",
        "stop",
        "value",
        "waits",
        "what",
    )

    def __init__(
        self, file: str, what: str, start: int, nbytes: int, expected: int, *, castagnoli: bool
    ) -> None:
        self.file = file
        self.what = what
        self.start = start
        self.stop = start + nbytes
        self.expected = expected
        self.castagnoli = castagnoli
        self.crc: Callable[[memoryview], int] = checksum if castagnoli else crc32
        self.shift = CRC32C_SHIFT if castagnoli else CRC32_SHIFT
        self.left = [(self.start, self.stop)]  # ranges that have not been read yet, in order
        self.value, self.waits = 0, nbytes

    @property
    def begun(self) -> bool:
        """Whether some of its bytes have been read."""
        return self.waits < self.stop - self.start

    def claim(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Mark bytes as read; returns the ranges of them that had not been read before."""
        # the range that begins before `start` may reach beyond it
        first = max(0, bisect_right(self.left, (start, start)) - 1)
        last, mine, rest = first, [], []
        for a, b in self.left[first:]:
            if a >= stop:
                break
            last += 1
            x, y = max(a, start), min(b, stop)
            if x >= y:
                rest.append((a, b))
                continue
            mine.append((x, y))
            rest += [part for part in ((a, x), (y, b)) if part[0] < part[1]]
        self.left[first:last] = rest
        return mine

    def take(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Mark ranges as read, unless bytes of them have been read before, or they are not in order.

        Args:
            ranges: the first byte of each, and the byte after its last one.
        """
        rest: list[tuple[int, int]] = []
        todo = iter(self.left)
        free = next(todo, None)
        for start, stop in ranges:
            while free is not None and free[1] <= start:
                rest.append(free)
                free = next(todo, None)
            if free is None or not free[0] <= start < stop <= free[1]:
                return False
            if free[0] < start:
                rest.append((free[0], start))
            free = (stop, free[1]) if stop < free[1] else next(todo, None)
        self.left = [*rest, *(() if free is None else (free,)), *todo]
        self.waits -= sum(stop - start for start, stop in ranges)
        return True


class SumPart(NamedTuple):
    """What was read of a checksum: the ranges, and their CRC, shifted to the end of the checksum's bytes."""

    of: StreamSum
    ranges: list[tuple[int, int]]
    value: int


def sums_of(tasks: Iterable[Sequence[SumPart]]) -> tuple[SumDoc, ...]:
    """What tasks have read of checksums, for a record; checksums of which they have read all are left out."""
    ranges: dict[StreamSum, list[tuple[int, int]]] = {}
    values: dict[StreamSum, int] = {}
    for part in (p for parts in tasks for p in parts):
        ranges.setdefault(part.of, []).extend(part.ranges)
        values[part.of] = values.get(part.of, 0) ^ part.value
    return tuple(
        SumDoc(
            file=stream.file,
            start=stream.start,
            nbytes=stream.stop - stream.start,
            kind="crc32c" if stream.castagnoli else "crc32",
            expected=stream.expected,
            ranges=joined,
            value=values[stream],
        )
        for stream, parts_read in ranges.items()
        if (joined := _joined(parts_read)) != ((stream.start, stream.stop),)
    )


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges that do not overlap, in order, adjacent ones as one."""
    out: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)


_log = logging.getLogger("ucformat")

_Count = Annotated[int, Field(ge=0)]


class _TaskDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TaskDoc(_TaskDocument):
    """A finished task: the file that it has written, as it was then, and what else is known of it.

    `digests` are those of a shard, or fingerprints of the tensors in a file; `crcs` are checksums of
    blocks. `bare`: some bytes that it has read have no checksum in the source. `kept`: the file was
    there before.
    """

    task: _Count
    file: str
    size: _Count
    version: str
    etag: str | None = None
    changed: int | None = None
    digests: Annotated[str, Field(pattern=r"^([0-9a-f]{32})*$")] = ""
    crcs: Annotated[str, Field(pattern=r"^([0-9a-f]{8})*$")] = ""
    bare: bool = False
    kept: bool = False

    @classmethod
    def of(
        cls,
        task: int,
        info: Info,
        digests: bytes,
        *,
        crcs: bytes = b"",
        bare: bool = False,
        kept: bool = False,
    ) -> TaskDoc:
        """The record of a task.

        Args:
            crcs: the CRC-32C of its blocks, each in four bytes.
        """
        return cls(
            task=task,
            file=info.key,
            size=info.size,
            version=info.version,
            etag=info.etag,
            changed=info.changed,
            digests=digests.hex(),
            crcs=crcs.hex(),
            bare=bare,
            kept=kept,
        )

    @property
    def info(self) -> Info:
        """The file as it was."""
        return Info(self.file, self.size, self.version, None, self.etag, self.changed)


class SumDoc(_TaskDocument):
    """Parts of the bytes of a checksum in the source, which tasks have read: their ranges, and their CRC combined.

    `value` is that of the bytes as if all others were zeros, without the CRC of zeros. `input` is
    the number of the source, of a job that reads several.
    """

    input: _Count = 0
    file: str
    start: _Count
    nbytes: _Count
    kind: Literal["crc32", "crc32c"]
    expected: _Count
    ranges: tuple[tuple[_Count, _Count], ...]
    value: _Count


class FinishedDoc(_TaskDocument):
    """Finished tasks of an attempt; `parts` is into how many parts it was cut, if the process ran one of these."""

    format: Literal["ucformat-finished-1"] = "ucformat-finished-1"
    parts: _Count = 0
    tasks: tuple[TaskDoc, ...]
    sums: tuple[SumDoc, ...] = ()


def _folder(attempt: str) -> str:
    return f"objects/{attempt}/finished"  # which is removed with the attempt


def put_finished(store: Store, folder: str, record: str) -> None:
    """Make the files that a store object has written durable, and put the record of their tasks."""
    store.flush()
    data = record.encode()
    name = bytes_digest(data).rpartition(":")[2][:32]
    try:
        store.put_if_absent(f"{folder}/{name}.json", data)
    except Conflict:  # an equal one is there
        return


def read_finished(store: Store, folder: str, written: Iterable[str]) -> Iterator[FinishedDoc]:
    """Read the records of a job, without tasks whose files are gone or have changed, and without damaged records."""

    def read(info: Info) -> bytes:
        try:
            return store.read(info.key)
        except NotFound:  # removed at this instant
            return b""

    contents = map_io(read, list(store.list(folder)))
    there = {i.key: i for prefix in written for i in store.list(prefix)} if contents else {}
    for data in contents:
        try:
            record = FinishedDoc.model_validate_json(data)
        except ValidationError:
            continue
        kept = tuple(t for t in record.tasks if t.file in there and there[t.file].is_same(t.info))
        # What tasks have read that will run again is compared again.
        yield (
            record
            if len(kept) == len(record.tasks)
            else record.model_copy(update={"tasks": kept, "sums": ()})
        )


def discard_finished(store: Store, attempt: str) -> None:
    """Remove the records of an attempt; what cannot be removed stays until the attempt is."""
    _remove(store, _folder(attempt))


def _remove(store: Store, folder: str) -> None:
    try:
        store.delete_prefix(folder)
    except UcformatError as error:
        _log.debug("the records in %s stay: %s", folder, error.message)


class RecordedJob(Job):
    """A job that keeps records of its tasks in an attempt."""

    store: Store
    attempt: str
    recorded: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the records if the source is damaged: what was written may be of damaged bytes."""
        if (
            kind is not None
            and issubclass(kind, IntegrityError)
            and not issubclass(kind, MissingData)
        ):
            self.discard()

    @property
    def records(self) -> str:
        """The folder of the records."""
        return _folder(self.attempt)

    @property
    def written(self) -> tuple[str, ...]:
        """The folders of the files that tasks write."""
        return folders_of(self.attempt)

    def discard(self) -> None:
        """Remove the records; those that cannot be removed stay until the attempt is."""
        _remove(self.store, self.records)

    @abstractmethod
    def take_finished(self, doc: FinishedDoc, *, resumed: bool = False) -> None:
        """Take the results of tasks."""

    def keep(self, record: str) -> None:
        """See Job."""
        self.recorded = True
        put_finished(self.store, self.records, record)

    def take(self, record: str) -> None:
        """See Job."""
        self.take_finished(FinishedDoc.model_validate_json(record))

    def resume(self) -> None:
        """Take the records of earlier runs, and of other processes."""
        for doc in read_finished(self.store, self.records, self.written):
            self.recorded = True
            self.take_finished(doc, resumed=True)
