"""Runs the tasks of a job in the processes that torchrun has started: each runs one part, and rank 0 finishes the job.

What the others have done goes to rank 0 through the store at which the ranks of torchrun meet, as
text.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from ucformat.errors import UnsupportedError, UsageError
from ucformat.jobs.tasks import part_of, run_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucformat.jobs.tasks import Job


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
    bytes_key, ended_key = f"{call}/bytes", f"{call}/told"

    def tell(nbytes: int) -> None:
        if rank:
            store.add(bytes_key, nbytes)
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
        store.add(ended_key, 1)
        return
    seen = 0
    while True:
        # Adding 0 reads a counter, and makes it if there is none. If all have ended, the bytes that
        # are read after that are the final ones.
        ended = store.add(ended_key, 0) == size - 1
        bytes_now = store.add(bytes_key, 0)
        advance(bytes_now - seen)
        seen = bytes_now
        if ended:
            break
        time.sleep(_ASK_S)
    for other in range(1, size):
        for n in range(int(store.get(f"{call}/{other}"))):
            yield store.get(f"{call}/{other}/{n}").decode()
            store.delete_key(f"{call}/{other}/{n}")
