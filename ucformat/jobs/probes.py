"""The probes of `ucp doctor`: each returns a sentence about what works, or raises an error about what does not.

They write only below one folder, `root`.
"""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

from ucformat.errors import Conflict, MissingData, NotFound, UcformatError
from ucformat.format.arrays import put_file
from ucformat.storage.base import exists
from ucformat.storage.direct import is_cached
from ucformat.storage.local import LocalStore
from ucformat.storage.local_files import OpenFile
from ucformat.storage.objects import ObjectStore
from ucformat.storage.upload import part_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.storage.base import Store

SMALL = 1 << 10  # bytes
_UNIT = 1004  # bytes: parts are multiples of it, as of a chunk's size
_SIZE = part_size(_UNIT) + (1 << 20) + 17
_READ = 8 << 20  # bytes of the read whose throughput is measured
_WRITERS, _ROUNDS = 8, 3  # that race to put one file
_COLD = 64 << 20  # bytes of a file that is read from the disk
_COLD_ROUNDS = 2  # how often it is read in each way
_COLD_READERS = 4  # threads
_LATENCY_READS = 5
_MAX_LISTED = 1000
_NAMES = (
    "list/b",
    "list/a/x",
    "list/a.b",
    "list/a-b",
    "list/B",
    "list/é",
    "list/a/0",
    "list/10",
    "list/9",
)
_READ_HINT = "data read from here cannot be trusted"


class NotSupported(Exception):
    """The place does not support this."""


def _bytes(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)  # noqa: S311 - no secret


def _must(holds: bool, message: str) -> None:  # noqa: FBT001
    if not holds:
        raise UcformatError(message)


def write(store: Store, root: str) -> str:
    """Probe writing a small file."""
    put_file(store, f"{root}/small", _bytes(SMALL, 1))
    store.flush()
    return "files can be written"


def read_after_write(store: Store, root: str) -> str:
    """Probe that a file is seen at once, with its latest content."""
    key = f"{root}/again"
    _must(not exists(store, key), "a file exists that was never written")
    for seed in (2, 3):
        data = _bytes(SMALL + seed, seed)
        put_file(store, key, data)
        seen = store.info(key).size == len(data) and store.read(key) == data
        _must(seen, f"a file that was just written is read back differently: {_READ_HINT}")
    return "written and replaced files can be read immediately"


def list_order(store: Store, root: str) -> str:
    """Probe that a list has all files that were written, in order, and no others."""
    wanted = sorted(f"{root}/{name}" for name in _NAMES)
    for key in wanted:
        put_file(store, key, b"x")
    keys = [info.key for info in store.list(f"{root}/list")]
    _must(
        keys == wanted,
        f"listings lag behind writes, or are wrong: {len(keys)} of {len(wanted)} files were listed",
    )
    return "written files are listed immediately, in the order of their keys"


def parts(store: Store, root: str) -> str:
    """Probe a file that is uploaded in several parts, if the place supports parts; it must appear as a whole."""
    key, data = f"{root}/large", memoryview(_bytes(_SIZE, 4))
    with store.create(key, _UNIT) as out:
        for at in range(0, _SIZE, 1 << 20):
            out.write(data[at : at + (1 << 20)])
        _must(
            not exists(store, key),
            "a file is visible before it is complete: interrupted saves could look finished",
        )
    _must(store.info(key).size == _SIZE, "a large file does not have the size that was written")
    for at in range(0, _SIZE, _READ):
        content = store.read(key, at, min(_READ, _SIZE - at))
        _must(
            content == data[at : at + _READ],
            "a large file has wrong content: its parts are mixed up",
        )
    aborted = store.create(f"{root}/aborted", _UNIT)
    try:
        aborted.write(data)
    finally:
        aborted.abort()
    _must(not exists(store, f"{root}/aborted"), "an aborted upload left a file")
    how = "uploaded in parts" if isinstance(store, ObjectStore) else "written as a stream"
    return f"a file of {_SIZE >> 20} MiB, {how}, appears atomically"


def ranges(store: Store, key: str, whole: Callable[[], bytes]) -> str:
    """Probe that ranges of a file are exact, and that one past its end is an error."""
    data = whole()
    size = store.info(key).size
    _must(len(data) <= size, "a file has more bytes than its reported size")
    for begin, nbytes in (
        (0, 1),
        (1, 7),
        (len(data) // 3, len(data) // 2),
        (len(data) - 1, 1),
        (5, 0),
    ):
        wanted = data[begin : begin + nbytes]
        buffers = [
            memoryview(bytearray(len(wanted) // 2)),
            memoryview(bytearray(-(-len(wanted) // 2))),
        ]
        store.read_into(key, begin, buffers)
        _must(b"".join(buffers) == wanted, f"a range of bytes has wrong content: {_READ_HINT}")
    try:
        store.read_into(key, size - 1, [memoryview(bytearray(2))])
    except MissingData:
        return "byte ranges are exact, and one past the end is an error"
    raise UcformatError(f"a range past the end of a file is no error: {_READ_HINT}")


def _count_winners(work: Callable[[int], object]) -> int:
    """The number of concurrent writers whose write succeeded."""
    barrier = threading.Barrier(_WRITERS)

    def try_write(number: int) -> bool:
        barrier.wait()
        try:
            work(number)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(_WRITERS, "ucformat-doctor") as pool:
        try:
            return sum(pool.map(try_write, range(_WRITERS)))
        except BaseException:
            barrier.abort()  # else threads would wait forever for others that an interrupt kept from starting
            raise


def put_if_absent(store: Store, root: str) -> str:
    """Probe that a file is created only once, whatever the number of writers."""
    key = f"{root}/once"
    store.put_if_absent(key, b"first")
    try:
        store.put_if_absent(key, b"second")
    except Conflict:
        pass
    else:
        raise UcformatError(
            "put-if-absent overwrites an existing file: concurrent commits would not notice each "
            "other"
        )
    _must(store.read(key) == b"first", "a put that was refused changed the file")
    for number in range(_ROUNDS):
        race = f"{root}/race-{number}"
        won = _count_winners(lambda i, race=race: store.put_if_absent(race, b"%d" % i))  # type: ignore[misc]
        _must(
            won == 1,
            f"{won} of {_WRITERS} concurrent writers succeeded in creating one file: commits are "
            "not safe",
        )
    return f"an existing file is not overwritten, and of {_WRITERS} concurrent writers one succeeds"


def replace(store: Store, root: str) -> str:
    """Probe that only a writer with the current version replaces a file."""
    key = f"{root}/replaced"
    old = store.put_if_absent(key, b"old")
    version = store.replace(key, b"new", old)
    try:
        store.replace(key, b"lost", old)
    except Conflict:
        pass
    else:
        raise UcformatError(
            "a file is replaced by a writer with an old version: overwriting could lose a "
            "checkpoint"
        )
    _must(store.read(key) == b"new", "a replacement that was refused changed the file")
    won = _count_winners(lambda i: store.replace(key, b"%d" % i, version))
    _must(
        won == 1,
        f"{won} of {_WRITERS} concurrent writers succeeded in replacing one file: overwriting is "
        "not safe",
    )
    return f"a changed file is not replaced, and of {_WRITERS} concurrent writers one succeeds"


def delete(store: Store, root: str) -> str:
    """Probe that deleted files are gone."""
    key = f"{root}/small"
    put_file(store, f"{root}/folder/a", b"x")
    store.delete(key)
    store.delete(key)  # gone already
    store.delete_prefix(f"{root}/folder")
    gone = not exists(store, key) and next(iter(store.list(f"{root}/folder")), None) is None
    _must(gone, "deleted files are still there")
    return "deleted files are gone immediately"


def list_there(store: Store) -> str:
    """Probe listing the files of the place."""
    keys = [info.key for info in islice(store.list(), _MAX_LISTED)]
    count = f"the first {_MAX_LISTED:,}" if len(keys) == _MAX_LISTED else f"{len(keys):,}"
    return f"{count} files are listed" if keys else "the place is empty"


def find(store: Store, usual: str, *, listed: bool) -> tuple[str, int]:
    """Find a file for reading, and its size: the usual one, else the largest of the first that are listed."""
    try:
        return usual, store.info(usual).size
    except NotFound:
        there = store.list() if listed else ()
        largest = max(islice(there, _MAX_LISTED), key=lambda i: i.size, default=None)
    if largest is None or not largest.size:
        raise NotSupported("there is no file to read: give the place of a checkpoint")
    return largest.key, largest.size


def latency(store: Store, key: str, nbytes: int = SMALL) -> float:
    """Milliseconds to read a small range: the median of five."""
    taken = []
    for _ in range(_LATENCY_READS):
        begun = time.perf_counter()
        store.read(key, 0, nbytes)
        taken.append(time.perf_counter() - begun)
    return 1000 * sorted(taken)[_LATENCY_READS // 2]


def write_throughput(store: Store, root: str) -> float:
    """Measure the megabytes (10⁶ bytes) a second of writing one file, until it is durable."""
    data = _bytes(_READ, 3)
    begun = time.perf_counter()
    put_file(store, f"{root}/speed", data)
    store.flush()
    return len(data) / (time.perf_counter() - begun) / 1e6


def disk_throughput(store: LocalStore, root: str, usual: str) -> tuple[float, float] | None:
    """MB/s of reading a file from the disk through the page cache, and past it; None where one of them is impossible.

    Args:
        usual: another file there, with which to find that out.
    """
    if not _drop(f"{store.url}/{usual}"):
        return None
    data, key = _bytes(_READ, 5), f"{root}/cold"
    with store.create(key) as out:
        for _ in range(_COLD // _READ):
            out.write(data)
    store.flush()
    measured: list[tuple[float, float]] = []
    memories = []
    for _ in range(_COLD_ROUNDS):
        speeds = []
        for direct in (False, True):
            if not _drop(f"{store.url}/{key}"):
                return None
            # takes the memory that was dropped: what a page cache gets later may have to be fetched
            # by the hypervisor first, which takes longer than to read
            memories.append(bytearray(b"x") * _COLD)
            speeds.append(_cold_throughput(store, key, memories[-1], direct=direct))
        measured.append((speeds[0], speeds[1]))
    return max(through for through, _ in measured), max(past for _, past in measured)


def _cold_throughput(store: LocalStore, key: str, memory: bytearray, *, direct: bool) -> float:
    reader = LocalStore(store.url)
    reader.is_direct = direct
    step, view = reader.costs.request, memoryview(memory)

    def read(at: int) -> None:
        reader.read_into(key, at, [view[at : at + step]])

    begun = time.perf_counter()
    with ThreadPoolExecutor(_COLD_READERS, "ucformat-doctor") as pool:
        list(pool.map(read, range(0, _COLD, step)))
    return _COLD / (time.perf_counter() - begun) / 1e6


def _drop(path: str) -> bool:
    """Drop a file from the page cache; False if it is there nevertheless, or cannot be read past the cache."""
    file = OpenFile(path)
    if file.direct() is None:
        return False
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return not is_cached(file.fd, 0)


def throughput(store: Store, key: str, size: int) -> float:
    """MB/s of reading a range of at most 8 MiB."""
    nbytes = min(_READ, size)
    buffer = memoryview(bytearray(nbytes))
    begun = time.perf_counter()
    store.read_into(key, 0, [buffer])
    return nbytes / (time.perf_counter() - begun) / 1e6
