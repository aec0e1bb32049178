"""Runs idempotent tasks in this process, on threads: reading, writing, hashing and copying release the GIL."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from ucformat.storage.base import Store

__all__ = ["default_workers", "run", "workers_for"]

_WAITING = 8

T = TypeVar("T")
R = TypeVar("R")


def default_workers() -> int:
    """Tasks at once unless told otherwise: one for each core, at most 16."""
    return min(16, len(os.sched_getaffinity(0)))


def workers_for(*stores: Store) -> int:
    """Tasks at once where these stores are read from or written to; those of networks wait most of the time."""
    return max(default_workers(), _WAITING if any(s.costs.parallel for s in stores) else 0)


def run(function: Callable[[T], R], tasks: Iterable[T], workers: int | None = None) -> Iterator[tuple[T, R]]:
    """Yield each task with its result, in the order in which they end.

    At the first error, or when the caller stops listening, no further task is begun; those that run are let end.
    """
    count = workers or default_workers()
    todo = iter(tasks)
    running: dict[Future[R], T] = {}
    with ThreadPoolExecutor(count, thread_name_prefix="ucformat-job") as pool:
        more = True
        while more or running:
            while more and len(running) < count:
                try:
                    task = next(todo)
                except StopIteration:
                    more = False
                    break
                running[pool.submit(function, task)] = task
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()
