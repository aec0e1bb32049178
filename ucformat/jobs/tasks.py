"""Jobs that are lists of tasks.

A job numbers its tasks in an order that follows from its plan, so processes on several machines
agree on it without talking to each other. A task can be run again, by any of them. What tasks have
found is kept in records, which are text and mean the same everywhere: the process that finishes the
job needs them, and nothing else, of the others.
"""

from __future__ import annotations

import heapq
import json
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ucformat.errors import UcformatError
from ucformat.jobs.run import run

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
    from concurrent.futures import Future

_RECORD_BYTES, _RECORD_S = 64 << 20, 1.0  # of finished tasks, after which they are recorded
_BATCH_BYTES, _BATCH_TASKS = 256 << 20, 1000  # at most, unless one task has more
_LEAST_BYTES = 4 << 20


class Job(ABC):
    """A list of tasks. `run` may be called by several threads at once.

    Attributes:
        kind: its name, which a dashboard shows.
        finished: the numbers of tasks whose results are known; `take` adds to them.
        parts: into how many parts other processes have cut it (0: into none that is known).
    """

    kind: ClassVar[str]
    count: int
    finished: set[int]
    parts: int = 0

    @abstractmethod
    def nbytes(self, task: int) -> int:
        """The bytes that a task reads or writes."""

    def group(self, task: int) -> Hashable:
        """What tasks that one part must run have in common; by default each may be run by another part."""
        return task

    @abstractmethod
    def run(self, task: int) -> Any:
        """Run a task; returns what `record` takes."""

    @abstractmethod
    def record(self, results: Mapping[int, Any]) -> str:
        """Return a record of the results of tasks, as JSON."""

    @abstractmethod
    def keep(self, record: str) -> None:
        """Make the work of tasks durable, and keep their record for this job when it runs again, if it can."""

    @abstractmethod
    def take(self, record: str) -> None:
        """Take the results in a record."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """What another process needs to make an equal job, as JSON values: places and options, and never a secret."""

    @classmethod
    @abstractmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """Make a job in another process.

        Raises:
            Conflict: that process sees other files.
        """

    @property
    def total(self) -> int:
        """The bytes of all tasks."""
        return sum(map(self.nbytes, range(self.count)))

    @property
    def todo(self) -> Iterator[int]:
        """The tasks that are not finished."""
        return (task for task in range(self.count) if task not in self.finished)


def run_here(
    job: Job,
    tasks: Iterable[int],
    workers: int | None,
    advance: Callable[[int], None],
    *,
    keep_last: bool = True,
) -> Iterator[str]:
    """Run tasks in threads of this process.

    Args:
        advance: called with the bytes of each task that is done.
        keep_last: also keep the last record, of less than a second and 64 MiB, for other processes.

    Yields:
        Records of what was done, which are kept, too; also of what was done when this is
        interrupted.
    """
    pending: dict[int, Any] = {}
    nbytes, since = 0, time.monotonic()
    with ThreadPoolExecutor(1, "ucformat-record") as recorder:
        records: deque[Future[str]] = deque()
        try:
            for task, result in run(job.run, tasks, workers):
                pending[task] = result
                nbytes += job.nbytes(task)
                advance(job.nbytes(task))
                if nbytes >= _RECORD_BYTES or time.monotonic() - since >= _RECORD_S:
                    records.append(recorder.submit(_record_and_keep, job, pending))
                    pending, nbytes, since = {}, 0, time.monotonic()
                while records and records[0].done():
                    yield records.popleft().result()
        except BaseException:
            with suppress(UcformatError):  # the first error says more
                if pending:
                    _record_and_keep(job, pending)
            raise
        if pending:
            records.append(
                recorder.submit(_record_and_keep, job, pending)
                if keep_last
                else recorder.submit(job.record, pending)
            )
        for record in records:
            yield record.result()


def _record_and_keep(job: Job, results: Mapping[int, Any]) -> str:
    """The record of tasks, which is kept."""
    record = job.record(results)
    job.keep(record)
    return record


def deal(job: Job, count: int) -> list[int]:
    """The part of each task; all parts have about as many bytes."""
    loads = [(0, n) for n in range(count)]
    part_of_group: dict[Hashable, int] = {}
    sizes: dict[Hashable, int] = {}
    for task in range(job.count):
        group = job.group(task)
        sizes[group] = sizes.get(group, 0) + max(1, job.nbytes(task))
    # The largest first, each to the part with the fewest bytes so far; equal ones in order of tasks
    # and parts, so that all processes deal alike.
    for group, nbytes in sorted(sizes.items(), key=lambda g: -g[1]):
        load, part = loads[0]
        heapq.heapreplace(loads, (load + nbytes, part))
        part_of_group[group] = part
    return [part_of_group[job.group(task)] for task in range(job.count)]


def part_of(job: Job, index: int, count: int) -> list[int]:
    """The tasks of one part."""
    return [task for task, part in enumerate(deal(job, count)) if part == index]


def batches(job: Job, slots: int) -> Iterator[list[int]]:
    """Cut the tasks that are not finished into batches, by bytes; what one part must run is one batch."""
    most = min(_BATCH_BYTES, max(_LEAST_BYTES, job.total // (4 * slots)))
    batch: list[int] = []
    nbytes = 0
    for _, tasks in groupby(job.todo, job.group):  # whose tasks follow each other
        for task in tasks:
            batch.append(task)
            nbytes += job.nbytes(task)
        if nbytes >= most or len(batch) >= _BATCH_TASKS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


_making = threading.Lock()


def run_batch(spec: str, tasks: list[int]) -> str:
    """Run tasks in a process that knows nothing of the job; returns their record."""
    # `lru_cache` alone would let each thread make the job when they start together
    with _making:
        job = _job_of(spec)
    return _record_and_keep(job, {task: job.run(task) for task in tasks})


_JOBS = "ucformat.jobs."


def job_name(job: object) -> str:
    """The module and the class of a job, by which another process makes it again."""
    return f"{type(job).__module__.removeprefix(_JOBS)}:{type(job).__name__}"


@lru_cache(maxsize=2)
def _job_of(spec: str) -> Job:
    document = json.loads(spec)
    module, _, name = document["job"].partition(":")
    job: Job = getattr(import_module(f"{_JOBS}{module}"), name).of_spec(document)
    return job
