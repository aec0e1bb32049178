"""What a job will cost, before it runs: its tasks, the bytes that it reads and writes, its requests, and its time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ucformat.checkpoint import Checkpoint
from ucformat.errors import UnsupportedError, UsageError
from ucformat.format.shard import BAND_BYTES
from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Piece
from ucformat.jobs.copy_files import CopyJob
from ucformat.jobs.profiles import profile_of
from ucformat.jobs.run import workers_for
from ucformat.jobs.shards import How, ShardJob
from ucformat.jobs.verify import VerifyJob
from ucformat.jobs.weights import plan_weights
from ucformat.reading.plan import ReadItem, make_plan
from ucformat.references import open_reference
from ucformat.storage.upload import part_size, unit_for
from ucformat.storage.url import as_strings, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from os import PathLike

    from ucformat.reading.plan import Verify
    from ucformat.storage.base import Store

__all__ = ["Cost", "estimate", "seconds_at"]

_READ = 4 << 20  # bytes that copy and verify read at once
_ATTEMPT = "0" * 20  # in the place of the name of one


@dataclass(frozen=True, slots=True)
class Cost:
    """What a job will do.

    Attributes:
        tasks: into which it is cut.
        files: that are written, or without a destination read.
        bytes_read: from the source.
        bytes_written: to the destination, without metadata.
        requests: reads and writes; of local files, system calls.
        seconds: about how long it takes with its workers in one process; None if `ucp doctor` has not measured the
            places in `unmeasured`.
        unmeasured: the places whose speed is unknown.
        sampled: how many tasks were run to estimate all of this (None: none; it was computed).
    """

    tasks: int
    files: int
    bytes_read: int
    bytes_written: int
    requests: int
    seconds: float | None
    unmeasured: tuple[str, ...]
    sampled: int | None = None


def estimate(
    job: Literal["convert", "copy", "materialize", "verify"],
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str] | None = None,
    states: str | Iterable[str] | None = None,
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    workers: int | None = None,
    *,
    weights: Literal["safetensors"] | None = None,
    verify: bool = True,
) -> Cost:
    """Estimate what a job costs; reads metadata alone, and writes nothing.

    Args:
        job: its name.
        src: a checkpoint, or its path, url or reference.
        dst: the destination, for `convert` and `copy`; for `materialize` the source's place by default.
        states: as for `convert`.
        chunk_bytes: as for `convert`.
        shard_bytes: as for `convert`.
        workers: as for `convert`.
        weights: as for `convert`.
        verify: as for `convert`.

    Raises:
        UsageError: there is no such job, or `convert` or `copy` has no destination.
        UnsupportedError: `copy` of a checkpoint that is not universal.
    """
    ck = src if isinstance(src, Checkpoint) else open_reference(src)
    if job not in ("convert", "copy", "materialize", "verify"):
        raise UsageError(f"there is no job {job!r}", hint="there are: convert, copy, materialize, verify")
    if dst is None and job in ("convert", "copy"):
        raise UsageError(f"{job} needs a destination")
    if job == "verify":
        checks = VerifyJob(ck)
        nbytes = sum(c.nbytes for c in checks.checks)
        calls = sum(math.ceil(c.nbytes / _READ) for c in checks.checks)
        return _cost(ck, None, workers, (checks.count, len(checks.checks), calls, nbytes), (0, 0))
    store = open_store(ck.home if dst is None else dst)
    if job == "copy":
        if ck.universal is None:
            raise UnsupportedError(f"{ck.url} is a checkpoint of {ck.kind}, which is not copied", hint="convert it")
        sizes = [item.nbytes for item in CopyJob(ck, store).files]
        read = (len(sizes), len(sizes), sum(math.ceil(n / _READ) for n in sizes), sum(sizes))
        return _cost(ck, store, workers, read, (sum(_puts(store, n) for n in sizes), sum(sizes)))
    chosen = None if states is None else as_strings(states)
    infos = [i for i in ck.tensors.values() if chosen is None or i.state in chosen]
    planned = None if weights is None else plan_weights(ck, infos, _ATTEMPT)
    if planned is not None:
        infos = [i for i in infos if i.key not in planned.tensors]
    with ShardJob(ck, store, _ATTEMPT, infos, How(chunk_bytes, shard_bytes, verify=verify)) as shards:
        reads = list(_reads(shards, "whole" if verify else "never"))
        sizes = [array.grid.file_nbytes(shard) for array, shard in map(shards.shard, range(shards.count))]
    for file in () if planned is None else planned.files:
        reads.append((math.ceil(file.nbytes / BAND_BYTES), file.nbytes))
        sizes.append(file.nbytes)
    read = (len(sizes), len(sizes), sum(n for n, _ in reads), sum(n for _, n in reads))
    return _cost(ck, store, workers, read, (sum(_puts(store, n) for n in sizes), sum(sizes)))


def _reads(job: ShardJob, verify: Verify) -> Iterator[tuple[int, int]]:
    """The requests and the bytes of each shard."""
    costs = job.source.store.costs
    costs = replace(costs, block=0, request=min(costs.request, BAND_BYTES))  # as it is read, band by band
    for array, shard in map(job.shard, range(job.count)):
        for found in job.boxes(array, array.grid.box(shard)):
            piece = Piece(found.box, 0, row_major(found.box.shape))
            plan = make_plan([ReadItem(found.info, found.planned, [(0, piece)])], verify, costs)
            yield plan.ranges, plan.bytes_read


def _puts(store: Store, nbytes: int) -> int:
    """The requests that write a file."""
    part = part_size(unit_for(nbytes)) if store.costs.parallel else BAND_BYTES
    return 1 if nbytes <= part else 2 + math.ceil(nbytes / part)


def seconds_at(store: Store, calls: int, nbytes: int, threads: int, *, writing: bool = False) -> float | None:
    """How long requests take, by what `ucp doctor` has measured of the place; None if it has not.

    Args:
        store: the place.
        calls: the requests.
        nbytes: their bytes.
        threads: that make them.
        writing: whether they write.
    """
    profile = profile_of(store.url)
    if profile is None:
        return None
    speed = (profile.write_mb_per_s if writing else None) or profile.read_mb_per_s
    lanes = threads if store.costs.parallel else 1  # one reader of a disk gets most of its speed
    return calls * profile.latency_ms / 1e3 / threads + nbytes / 1e6 / speed / lanes


def _cost(
    ck: Checkpoint, store: Store | None, workers: int | None, read: tuple[int, int, int, int], write: tuple[int, int]
) -> Cost:
    tasks, files, gets, bytes_read = read
    puts, bytes_written = write
    stores = [ck.store] if store is None else [ck.store, store]
    threads = min(workers or workers_for(*stores), max(1, tasks))
    seconds: list[float] = []
    unmeasured: list[str] = []
    for place, calls, nbytes, writing in ((ck.store, gets, bytes_read, False), (store, puts, bytes_written, True)):
        if place is None:
            continue
        took = seconds_at(place, calls, nbytes, threads, writing=writing)
        if took is None:
            unmeasured.append(place.url)
        else:
            seconds.append(took)
    return Cost(
        tasks,
        files,
        bytes_read,
        bytes_written,
        gets + puts,
        None if unmeasured else sum(seconds),
        tuple(dict.fromkeys(unmeasured)),
    )
