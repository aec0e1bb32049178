"""Responses whose bytes are read from the extents of tensors, and verified, while they are sent.

A response reads a piece while the one before it is sent. Pieces grow while a client takes them at
once. When it does not, the piece that was read is given up, and read again when the client has
taken the one before it: so clients that read slowly hold almost no memory. A fault in mid-stream
closes the connection before the last byte that was promised.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from starlette.datastructures import Headers, MutableHeaders

from ucformat.errors import UcformatError
from ucformat.jobs.bands import BAND_BYTES
from ucformat.jobs.inputs import Input
from ucformat.reading.readable import TRACKERS
from ucformat.storage.wrappers import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from starlette.types import Receive, Scope, Send

    from ucformat.checkpoint import Checkpoint
    from ucformat.jobs.finished import SumPart

_log = logging.getLogger("ucformat.web")
_SMALLEST = 64 << 10  # bytes of a piece: of the first, and for a client that reads slowly
_LARGEST = BAND_BYTES
_REMAINING = 1 << 20  # bytes that are read besides to complete a checksum
_SLOW = 0.05  # seconds for which a piece waits until it is given up
_RANGE = re.compile(r"bytes\s*+=\s*+(\d*+)\s*+-\s*+(\d*+)", re.ASCII)


class Memory:
    """The bytes that all responses together may hold in pieces larger than the smallest."""

    def __init__(self, nbytes: int) -> None:
        self._left, self._lock = nbytes, threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Reserve bytes; returns whether there were as many."""
        with self._lock:
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Give back what was reserved."""
        with self._lock:
            self._left += nbytes


_NOTHING = {"type": "http.response.body", "body": b"", "more_body": True}
_threads = ThreadPoolExecutor(2 * (os.cpu_count() or 1) + 4, "ucformat-web")
_memory = Memory(48 << 20)


@dataclass(frozen=True)
class Content:
    """Bytes that can be read by ranges.

    Attributes:
        nbytes: how many.
        read: reads the bytes `[start, stop)`.
        etag: what changes when they do.
        source: the checkpoint they are read from.
        end_of_read: where a read of at most so many bytes should end (None: anywhere).
        media_type: of them.
    """

    nbytes: int
    read: Callable[[Input, int, int], NDArray[np.uint8]]
    etag: str
    source: Checkpoint
    end_of_read: Callable[[int, int], int] | None = None
    media_type: str = "application/octet-stream"


def chosen_range(headers: Headers, nbytes: int, etag: str) -> tuple[int, int] | None:
    """The range `[start, stop)` that a request asks for; None for all bytes.

    Several ranges at once are answered by all bytes, as HTTP allows.

    Raises:
        ValueError: the range cannot be satisfied.
    """
    text = headers.get("range")
    condition = headers.get("if-range")
    if text is None or (condition is not None and condition.strip('"') != etag):
        return None
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return None
    first, last = match[1], match[2]
    if len(first) > 18 or len(last) > 18 or not (first or last):
        raise ValueError(text)
    if not first:
        start, stop = max(0, nbytes - int(last)), nbytes
    else:
        start, stop = int(first), min(nbytes, int(last) + 1) if last else nbytes
    if start >= stop:
        raise ValueError(text)
    return start, stop


class RangeResponse:
    """Sends a range of content, or all of it; conditional and HEAD requests get headers alone."""

    def __init__(
        self,
        content: Content,
        headers: Mapping[str, str] | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.content, self._headers, self._failed = content, dict(headers or {}), failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; see ASGI."""
        content, asked = self.content, Headers(scope=scope)
        headers = MutableHeaders(self._headers)
        headers.update(
            {
                "etag": f'"{content.etag}"',
                "accept-ranges": "bytes",
                "content-type": content.media_type,
                "x-content-type-options": "nosniff",
            }
        )
        start, stop, status = 0, content.nbytes, 200
        matching = [
            tag.strip().removeprefix("W/").strip('"')
            for tag in asked.get("if-none-match", "").split(",")
        ]
        if content.etag in matching or "*" in matching:
            status, stop = 304, 0
        else:
            try:
                byte_range = chosen_range(asked, content.nbytes, content.etag)
            except ValueError:
                status, stop = 416, 0
                headers["content-range"] = f"bytes */{content.nbytes}"
            else:
                if byte_range is not None:
                    (start, stop), status = byte_range, 206
                    headers["content-range"] = f"bytes {start}-{stop - 1}/{content.nbytes}"
        if status != 304:
            headers["content-length"] = str(stop - start)
        has_body = scope["method"] != "HEAD" and stop > start
        sending = _Sending(content, start, stop) if has_body else None
        has_begun = False
        try:
            if sending is not None:
                await (
                    sending.begin()
                )  # before the status, so that it is true if nothing can be read
            has_begun = True
            await send({"type": "http.response.start", "status": status, "headers": headers.raw})
            if sending is None:
                await send({"type": "http.response.body", "body": b""})
            else:
                await sending.run(receive, send)
        except UcformatError as error:
            self._failed()
            if not has_begun:
                raise
            # a response that is not completed closes the connection
            _log.error("%s: the response was broken off: %s", scope["path"], error)
        finally:
            if sending is not None:
                sending.close()


class _Piece(NamedTuple):
    """Bytes that were read, and what was read of checksums for them."""

    data: NDArray[np.uint8]
    sums: Sequence[SumPart]


class _Sending:
    """Sends the bytes `[start, stop)` of content."""

    def __init__(self, content: Content, start: int, stop: int) -> None:
        self.content, self.position, self.stop = content, start, stop
        self._input = Input(content.source, verify=True, shared=True)
        self._size, self._reserved = _SMALLEST, 0
        self._piece: asyncio.Future[_Piece] | None = None

    def _start(self) -> None:
        """Start to read the next piece."""
        start, end = self.position, self.position + self._size
        if self.content.end_of_read is not None:
            end = self.content.end_of_read(start, self._size)
        self._piece = asyncio.get_running_loop().run_in_executor(
            _threads, copy_context().run, self._read, start, min(end, self.stop)
        )

    def _read(self, start: int, stop: int) -> _Piece:
        verifier = self._input.verifier
        with self._input.task() as sums:
            data = self.content.read(self._input, start, stop)
            if stop == self.stop and verifier is not None:
                verifier.complete_nearly(_REMAINING)
        if stop == self.stop and verifier is not None:
            check_unchanged(
                self.content.source.store, "the response is not complete", TRACKERS, verifier.files
            )
        return _Piece(data, sums)

    async def begin(self) -> None:
        """Read the first piece."""
        self._start()
        assert self._piece is not None  # noqa: S101 - started above
        await asyncio.wait([self._piece])
        self._piece.result()

    async def run(self, receive: Receive, send: Send) -> None:
        """Send all pieces, until the client is gone."""
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            while self.position < self.stop and not gone.done():
                if self._piece is None:
                    self._start()
                assert self._piece is not None  # noqa: S101 - started above
                piece = await self._piece
                # returns when the connection has taken the piece before it
                taken = asyncio.ensure_future(send(_NOTHING))
                if not (await asyncio.wait([taken], timeout=_SLOW))[0]:
                    if self._input.verifier is not None:
                        self._input.verifier.forget(piece.sums)
                    del piece
                    self._piece = None
                    await (
                        taken
                    )  # until then the connection holds the piece before, perhaps a large one
                    self._shrink()
                    continue
                await taken
                self.position += piece.data.nbytes
                self._grow()
                await send(
                    {"type": "http.response.body", "body": piece.data.data, "more_body": True}
                )
                del piece
                self._piece = None
                if self.position < self.stop:
                    self._start()
            if self.position == self.stop and not gone.done():
                # returns when the connection has taken the last piece
                await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            if self._piece is not None:
                await asyncio.wait([self._piece])

    def _grow(self) -> None:
        """Make the next piece larger; two of its size are in memory."""
        if self._size < _LARGEST and _memory.take(2 * self._size):
            self._reserved += 2 * self._size
            self._size *= 2

    def _shrink(self) -> None:
        self._size = _SMALLEST
        _memory.give(self._reserved)
        self._reserved = 0

    def close(self) -> None:
        """Give back the memory, and stop verifying."""
        self._shrink()
        self._input.close()


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
