"""Runs the tasks of a job on the workers of an existing Dask cluster (extra `dask`).

What is sent to a worker is the job's specification and numbers of tasks; it opens all places
itself, with the settings and the credentials of its own environment. Dask gives the batches of a
worker that died to others.
"""

from __future__ import annotations

import json
import secrets
from itertools import islice
from typing import TYPE_CHECKING, Any

from ucformat.errors import UcformatError, UnsupportedError
from ucformat.jobs.tasks import batches, run_batch

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
    # workers keep the job of this run, and no earlier one's
    spec = json.dumps({**job.spec(), "run": token})
    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    # the last two: an address or certificates that Dask refuses
    except (OSError, ValueError, TypeError) as error:
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
            futures = {
                client.submit(run_batch, spec, batch, key=f"{name}-{n}", pure=False): batch
                for n, batch in islice(todo, number)
            }
            waiting.update(futures)
            return list(futures)

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
