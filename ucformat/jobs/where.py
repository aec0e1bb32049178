"""Where the tasks of a job run.

What `on` may be:

    threads             threads of this process
    dask://HOST:PORT    the workers of a Dask cluster; tls://HOST:PORT, if it uses TLS
    torchrun            the processes that torchrun has started
    part:I/N            this process runs one part of N, and finishes nothing
    commit              this process runs no task, and finishes what the parts have done
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

from ucformat.errors import MissingData, UsageError
from ucformat.jobs.on_dask import run_on_dask
from ucformat.jobs.on_torchrun import T, is_first, rank_and_size, run_in_torchrun, take_turns
from ucformat.jobs.tasks import deal, part_of, run_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.jobs.tasks import Job


class TaskArguments(TypedDict, total=False):
    """The arguments that all jobs share.

    Attributes:
        on: where tasks run (docs/guides/cluster.md): `threads` of this process (the default), the
            workers of a Dask cluster (`dask://HOST:PORT`, `tls://HOST:PORT`), the processes of
            `torchrun`, or a part of them that other processes do not run (`part:I/N`), and then
            `commit`.
        progress: called with what is done and with all that there is: of most jobs bytes.
    """

    on: str
    progress: Callable[[int, int], None] | None


class CheckedArguments(TaskArguments, total=False):
    """The arguments that jobs share which read tensors.

    Attributes:
        verify: compare the bytes that are read with the checksums in the source's files (default:
            yes).
    """

    verify: bool


class JobArguments(CheckedArguments, total=False):
    """The arguments that jobs share which write a checkpoint.

    Attributes:
        overwrite: replace what is at the destination (default: no). A checkpoint of ours stays whole
            until the new one is committed; of an export, the foreign checkpoint or unfinished export
            is removed first.
        workers: files written at once (default: one for each core, at most 16; for object stores
            eight at least).
    """

    overwrite: bool
    workers: int | None


_PART = re.compile(r"part:(\d{1,7})/(\d{1,7})")


@dataclass(frozen=True, slots=True)
class Where:
    """Where tasks run, as `on` says."""

    kind: Literal["threads", "dask", "torchrun", "part", "commit"] = "threads"
    address: str = ""
    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, on: str) -> Where:
        """Parse the value of `on`."""
        if (alone := _ALONE.get(on)) is not None:
            return alone
        scheme, separator, place = on.partition("://")
        if separator and place and scheme in ("dask", "tls"):
            return cls("dask", f"{'tcp' if scheme == 'dask' else 'tls'}://{place}")
        if (part := _PART.fullmatch(on)) is None:
            raise UsageError(
                f"{on!r} is no place where tasks run",
                hint=(
                    "there are: threads, dask://HOST:PORT, tls://HOST:PORT, torchrun, part:I/N, "
                    "commit"
                ),
            )
        index, count = int(part[1]), int(part[2])
        if index >= count:
            raise UsageError(
                f"there is no part {index} of {count}",
                hint="parts are numbered from 0 on: 0/4 … 3/4",
            )
        return cls("part", "", index, count)

    @property
    def finishes(self) -> bool:
        """Whether this process finishes the job; of those of torchrun, only rank 0 does."""
        return is_first() if self.kind == "torchrun" else self.kind != "part"

    @property
    def part(self) -> tuple[int, int]:
        """The number of the part that this process runs, and of all parts; 0 of 1 if it is not one of several."""
        return rank_and_size() if self.kind == "torchrun" else (self.index, self.count)

    def begin(self, begin: Callable[[], T]) -> T:
        """Call a function that begins an attempt: in the processes of torchrun, on rank 0 first."""
        return take_turns(begin) if self.kind == "torchrun" else begin()


#: Threads of this process.
HERE = Where()

# those of one word
_ALONE: dict[str, Where] = {w.kind: w for w in (HERE, Where("torchrun"), Where("commit"))}


def run_job(
    job: Job,
    where: Where = HERE,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Run the tasks of a job that are not finished.

    Returns:
        Whether this process has the results of all tasks, and is to finish the job.
    """
    total = job.total
    done = sum(map(job.nbytes, job.finished))

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    if job.finished:
        advance(0)
    if where.kind == "dask":
        records = run_on_dask(job, where.address, advance)
    elif where.kind == "torchrun":
        records = run_in_torchrun(job, workers, advance)
    elif where.kind == "part":
        job.parts = where.count
        mine = (task for task in part_of(job, where.index, where.count) if task not in job.finished)
        records = run_here(job, mine, workers, advance)
    else:
        records = run_here(
            job, job.todo if where.kind == "threads" else (), workers, advance, keep_last=False
        )
    for record in records:
        job.take(record)
    if where.finishes and (missing := sum(1 for _ in job.todo)):
        raise MissingData(
            f"{missing:,} of the {job.count:,} tasks are not done{_late_parts(job)}; nothing was "
            "committed",
            hint="run these parts again, with the same arguments; they do only what is missing",
        )
    return where.finishes


def _late_parts(job: Job) -> str:
    """The parts whose tasks are not finished, as far as any part has told how many there are."""
    if not job.parts:
        return ""
    part = deal(job, job.parts)
    late = sorted({part[task] for task in job.todo})
    return f": those of part{'s' * (len(late) != 1)} {', '.join(map(str, late))} of {job.parts}"
