"""Runs the tasks of a job on the workers of an existing Dask cluster (extra `dask`).

What is sent to a worker is the job's specification and numbers of tasks; it opens all places
itself, with the settings and the credentials of its own environment. Dask gives the batches of a
worker that died to others.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ucformat.errors import MissingData, UcformatError, UnsupportedError, UsageError
from ucformat.jobs.tasks import batches, deal, part_of, run_batch, run_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucformat.jobs.tasks import Job


_AHEAD = 2  # batches for each thread of the cluster that the scheduler knows of at once
_CONNECT_S = 30.0


def run_on_dask(job: Job, address: str, advance: Callable[[int], None]) -> Iterator[str]:
    """Run the tasks of a job that are not finished.

    Args:
        advance: called with the bytes of each batch that is done.
    """
    try:
        from distributed import Client, as_completed
        from distributed.scheduler import KilledWorker
    except ImportError as error:
        raise UnsupportedError(
            f"Dask is not installed: {error}", hint="pip install 'ucformat[dask]'"
        ) from None

    token = secrets.token_hex(4)
    spec = json.dumps(
        {**job.spec(), "run": token}
    )  # workers keep the job of this run, and no earlier one's
    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (
        OSError,
        ValueError,
        TypeError,
    ) as error:  # the last two: an address or certificates that Dask refuses
        raise UcformatError(
            f"the Dask scheduler at {address} cannot be reached: {error}",
            hint="check the address; with TLS, the certificates in Dask's configuration",
        ) from error
    with client:
        slots = sum(client.nthreads().values())
        if not slots:
            raise UcformatError(
                f"the Dask cluster at {address} has no workers", hint="start some, and run it again"
            )
        todo = enumerate(batches(job, slots))
        name = f"ucformat-{job.kind}-{token}"

        waiting: dict[Any, list[int]] = {}

        def submit(number: int) -> list[Any]:
            made = {
                client.submit(run_batch, spec, batch, key=f"{name}-{n}", pure=False): batch
                for n, batch in islice(todo, number)
            }
            waiting.update(made)
            return list(made)

        running = as_completed(submit(_AHEAD * slots), loop=client.loop)
        try:
            for future in running:
                yield _result(future, KilledWorker)
                advance(sum(map(job.nbytes, waiting.pop(future))))
                running.update(submit(1))
        finally:
            client.cancel(list(waiting))


def _result(future: Any, killed: type[Exception]) -> str:
    try:
        return str(future.result())
    except killed as error:
        raise UcformatError(
            f"workers of the Dask cluster died with the same batch: {error}",
            hint="see their logs; they may need more memory, about 64 MiB for each thread",
        ) from error
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"a worker of the Dask cluster lacks a package: {error}",
            hint="install the same ucformat there, with the extras that the places need",
        ) from error


# Runs the tasks of a job in the processes that torchrun has started: each runs one part, and rank 0
# finishes the job.
#
# What the others have done goes to rank 0 through the store at which the ranks of torchrun meet, as
# text.

T = TypeVar("T")

_DAY = timedelta(days=1)  # how long a rank may take: torchrun stops all if one fails
_ASK_S = 0.2
_calls = count()  # of this process: each has keys of its own


def rank_and_size() -> tuple[int, int]:
    """The rank of this process, and the number of ranks."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise UsageError(
            "this process was not started by torchrun",
            hint="torchrun --nproc-per-node 4 -m ucformat …",
        ) from None


def is_first() -> bool:
    """Whether this process is rank 0."""
    return rank_and_size()[0] == 0


_stores: list[Any] = []


def _store() -> Any:
    """The store at which the ranks meet."""
    if not _stores:
        try:
            from torch.distributed import PrefixStore, rendezvous
        except ImportError as error:
            raise UnsupportedError(
                f"PyTorch is not installed: {error}", hint="pip install 'ucformat[torch]'"
            ) from None
        store, _, _ = next(rendezvous("env://", timeout=_DAY))
        _stores.append(
            PrefixStore(f"ucformat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        )
    return _stores[0]


def take_turns(begin: Callable[[], T]) -> T:
    """Call a function on rank 0 first, and when it has returned, on the others."""
    first, store, key = is_first(), _store(), f"{next(_calls)}/begun"
    if not first:
        store.wait([key], _DAY)
    result = begin()
    if first:
        store.set(key, "")
    return result


def run_in_torchrun(job: Job, workers: int | None, advance: Callable[[int], None]) -> Iterator[str]:
    """Run the part of this rank; on rank 0, wait for the others.

    Args:
        advance: called with the bytes of tasks that are done, on rank 0 those of all ranks.

    Yields:
        Records of what was done; on rank 0 those of all ranks.
    """
    rank, size = rank_and_size()
    store, call = _store(), next(_calls)
    mine = (task for task in part_of(job, rank, size) if task not in job.finished)
    done, told = f"{call}/bytes", f"{call}/told"

    def tell(nbytes: int) -> None:
        if rank:
            store.add(done, nbytes)
        else:
            advance(nbytes)

    number = 0
    for record in run_here(job, mine, workers, tell):
        yield record
        if rank:
            store.set(f"{call}/{rank}/{number}", record)
            number += 1
    if rank:
        store.set(f"{call}/{rank}", str(number))
        store.add(told, 1)
        return
    seen = 0
    while True:
        ended = store.add(told, 0) == size - 1
        now = store.add(done, 0)
        advance(now - seen)
        seen = now
        if ended:
            break
        time.sleep(_ASK_S)
    for other in range(1, size):
        for n in range(int(store.get(f"{call}/{other}"))):
            yield store.get(f"{call}/{other}/{n}").decode()
            store.delete_key(f"{call}/{other}/{n}")


# Where the tasks of a job run.
#
# What `on` may be:
#
#     threads             threads of this process
#     dask://HOST:PORT    the workers of a Dask cluster; tls://HOST:PORT, if it uses TLS
#     torchrun            the processes that torchrun has started
#     part:I/N            this process runs one part of N, and finishes nothing
#     commit              this process runs no task, and finishes what the parts have done

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
        scheme, found, place = on.partition("://")
        if found and place and scheme in ("dask", "tls"):
            return cls("dask", f"{'tcp' if scheme == 'dask' else 'tls'}://{place}")
        if (part := _PART.fullmatch(on)) is None:
            raise UsageError(
                f"{on!r} is no place where tasks run",
                hint="there are: threads, dask://HOST:PORT, tls://HOST:PORT, torchrun, part:I/N, commit",
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

_ALONE: dict[str, Where] = {
    w.kind: w for w in (HERE, Where("torchrun"), Where("commit"))
}  # those of one word


def run_job(
    job: Job,
    where: Where = HERE,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Run the tasks of a job that are not finished.

    Args:
        workers: tasks that a process runs at once (default: one for each core, at most 16).
        progress: called with the bytes done and the bytes in all.

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
            f"{missing:,} of the {job.count:,} tasks are not done{_late_parts(job)}; nothing was committed",
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
