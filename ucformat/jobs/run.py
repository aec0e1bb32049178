"""Running idempotent tasks in threads (reading, writing, hashing and copying release the GIL), and reporting faults."""

from __future__ import annotations

import os
from collections.abc import Mapping  # noqa: TC003 - of a public dataclass, which ranks send to each other
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ucformat.errors import ChecksumError, UcformatError
from ucformat.format.structure import Problem  # noqa: TC001 - of a public dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from ucformat.storage.base import Store

__all__ = ["Report", "default_workers", "naming_place", "run", "workers_for"]

_MIN_REMOTE_WORKERS = 8

T = TypeVar("T")
R = TypeVar("R")


def default_workers() -> int:
    """The default number of concurrent tasks: one for each core, at most 16."""
    return min(16, len(os.sched_getaffinity(0)))


def workers_for(*stores: Store) -> int:
    """The number of concurrent tasks for stores: one for each core, and at least eight for object stores."""
    return max(
        default_workers(), _MIN_REMOTE_WORKERS if any(s.costs.parallel for s in stores) else 0
    )


def run(
    function: Callable[[T], R], tasks: Iterable[T], workers: int | None = None
) -> Iterator[tuple[T, R]]:
    """Run tasks in threads, and yield each with its result as it ends.

    After the first error, or when the caller stops iterating, no further task is started; running
    ones are completed.

    Args:
        workers: concurrent tasks (default: one for each core, at most 16).
    """
    count = workers or default_workers()
    todo = iter(tasks)
    running: dict[Future[R], T] = {}
    with ThreadPoolExecutor(count, thread_name_prefix="ucformat-job") as pool:
        has_more = True
        while has_more or running:
            while has_more and len(running) < count:
                try:
                    task = next(todo)
                except StopIteration:
                    has_more = False
                    break
                # threads do not inherit context variables, such as the settings of `using`
                running[pool.submit(copy_context().run, function, task)] = task
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a verification; true if there are no problems.

    `bytes_verified` were compared with a checksum; `bytes_unverified` were only found to exist.
    `unprotected` are places with files of a virtual checkpoint that have no record that it needs
    them. `part` is the part that was verified, as `2/8`; empty for all. `part_of` is what the
    checkpoint is only a part of; empty if it is whole. `signed_by` is whose valid signature the
    manifest has, empty if none was asked for, and `signed_files` the number of other files whose
    SHA-256 that states. `bases` are the places of other checkpoints of which tensors are, with
    their numbers. `older` is the number of tensors that are older than the checkpoint's step.
    """

    url: str
    kind: str
    tensors: int
    bytes_verified: int
    bytes_unverified: int
    problems: tuple[Problem, ...]
    unprotected: tuple[str, ...] = ()
    part: str = ""
    part_of: str = ""
    signed_by: str = ""
    signed_files: int = 0
    bases: Mapping[str, int] = field(default_factory=dict)
    older: int = 0

    def __bool__(self) -> bool:
        return not self.problems

    def raise_if_damaged(self) -> None:
        """Raise ChecksumError with all problems, if there are any."""
        if self.problems:
            raise ChecksumError(
                f"{self.url} is damaged:\n  " + "\n  ".join(map(str, self.problems)),
                hint="restore these files from another copy of the checkpoint",
            )


@contextmanager
def naming_place(place: str) -> Iterator[None]:
    """Turn unexpected exceptions into errors that name a place."""
    try:
        yield
    except UcformatError:
        raise
    except MemoryError as error:
        raise UcformatError(
            f"{place}: out of memory", hint="run it on a machine with more memory"
        ) from error
    except Exception as error:
        raise UcformatError(
            f"{place} makes ucformat fail: {type(error).__name__}: {error}",
            hint="this is a bug in ucformat: please report it, with the small files of that place",
        ) from error
