"""Reads chunks of arrays from the extents of their tensors; those that are asked for at the same time, together."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from zarr.core.sync import loop as zarr_loop

from ucformat.reading.execute import memory_of
from ucformat.reading.plan import check_verify, make_plan
from ucformat.reading.rank import item_for
from ucformat.reading.read import read_planned
from ucformat.reading.readable import TRACKERS
from ucformat.storage.watched import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.reading.plan import Verify
    from ucformat.reading.readable import Readable
    from ucformat.zarr_store.array import TensorArray


@dataclass(frozen=True, slots=True)
class _Request:
    """The bytes `[start, stop)` of a chunk, and the future that waits for them."""

    array: TensorArray
    at: tuple[int, ...]
    start: int
    stop: int
    result: asyncio.Future[NDArray[np.uint8]]

    @property
    def is_whole(self) -> bool:
        """Whether these are all bytes of the chunk."""
        return (self.start, self.stop) == (0, self.array.nbytes)

    def precedes(self, other: _Request) -> bool:
        """Whether the other one is the next chunk, and follows this one in memory if both are of one buffer."""
        array, at = self.array, self.at
        adjacent = other.array is array and set(array.grid[1:]) <= {1} and other.at[:1] == (at[0] + 1,) if at else False
        return adjacent and self.is_whole and other.is_whole


class ChunkReader:
    """Reads chunks for any number of event loops."""

    def __init__(self, source: Readable, verify: Verify) -> None:
        self._source, self._verify = source, check_verify(verify)
        self._waiting: dict[asyncio.AbstractEventLoop, list[_Request]] = {}  # what each loop starts to read next

    async def read(self, array: TensorArray, at: tuple[int, ...], start: int, stop: int) -> NDArray[np.uint8]:
        """Read bytes of a chunk, together with what is asked for at the same time.

        Raises:
            Conflict: the file changed since the checkpoint was opened.
        """
        loop = asyncio.get_running_loop()
        request = _Request(array, at, start, stop, loop.create_future())
        waiting = self._waiting.setdefault(loop, [])
        waiting.append(request)
        if len(waiting) == 1:
            loop.call_soon(self._start, loop)
        return await request.result

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read what is waited for.

        In the loop of zarr-python, which nothing else runs in, a disk is read right here: a thread would take longer,
        because zarr copies each chunk in this one. What others ask for meanwhile is read together next.
        """
        wanted = self._waiting.pop(loop)
        if loop is zarr_loop[0] and self._source.store.costs.parallel is None:
            _give(wanted, self._results(wanted))
            return
        try:
            running = loop.run_in_executor(None, copy_context().run, self._results, wanted)
        except RuntimeError as error:  # the loop is being closed
            _give(wanted, [error] * len(wanted))
            return
        running.add_done_callback(lambda done: _give(wanted, done.result()))

    def _results(self, wanted: Sequence[_Request]) -> list[NDArray[np.uint8] | BaseException]:
        """The bytes of each request, or why they cannot be read."""
        try:
            return list(self._read_together(wanted))
        except BaseException as error:  # noqa: BLE001 - raised where the bytes are waited for
            if len(wanted) == 1:
                return [error]
            return [found for one in wanted for found in self._results([one])]  # the others are intact

    def _read_together(self, wanted: Sequence[_Request]) -> Iterator[NDArray[np.uint8]]:
        source = self._source
        runs: list[list[_Request]] = []
        for r in wanted:
            if runs and runs[-1][-1].precedes(r):
                runs[-1].append(r)
            else:
                runs.append([r])
        items, outs = [], []
        for number, run in enumerate(runs):
            r, nbytes = run[0], sum(r.stop - r.start for r in run)
            pieces, out = r.array.pieces(r.at, len(run), r.start, r.start + nbytes)
            items.append(item_for(source, r.array.info, [(number, p) for p in pieces]))
            outs.append(out)
        plan = make_plan(items, self._verify, source.store.costs)
        labels = [str(run[0].array.info.key) for run in runs]
        read_planned(plan, source.store, lambda: [memory_of(out) for out in outs], labels)
        check_unchanged(source.store, "the chunk is not used", TRACKERS, plan.files)
        for run, out in zip(runs, outs, strict=True):
            data, at = out.view(np.uint8), run[0].start % out.itemsize
            for r in run:
                yield data[at : at + r.stop - r.start]
                at += r.stop - r.start


def _give(wanted: Sequence[_Request], found: Sequence[NDArray[np.uint8] | BaseException]) -> None:
    """Let those go on that wait for bytes, unless they were cancelled."""
    for request, result in zip(wanted, found, strict=True):
        if request.result.done():
            continue
        if isinstance(result, BaseException):
            request.result.set_exception(result)
        else:
            request.result.set_result(result)
