"""A proxy between ucformat and an HTTP endpoint that answers as networks and overloaded services do.

Whatever `choose` says of a request is done to it: `Weather` chooses at random, or a test by itself.
The Host header is handed on as it came, for requests are signed with it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    #: Bytes are an answer in place of the endpoint's, headers included.
    Choice = Callable[["Request"], "Fault | bytes | None"]

__all__ = ["FAULTS", "Fault", "Proxy", "Request", "answer", "fine"]

Fault = Literal["busy", "error", "reset", "refused", "slow", "cut", "short", "lost", "lied"]

#: What is done to a request. The endpoint does not see it: `busy`, `error`, `reset`, `refused` (nor
#: the next ones). It answers, but late (`slow`), or the connection is reset within the body
#: (`cut`), or ends within it (`short`). It does what was asked, and the answer is `lost`, or says
#: that it failed (`lied`).
FAULTS: tuple[Fault, ...] = (
    "busy",
    "error",
    "reset",
    "refused",
    "slow",
    "cut",
    "short",
    "lost",
    "lied",
)


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    method: str
    target: str
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def key(self) -> str:
        """The path in the bucket."""
        return urlsplit(self.target).path.strip("/").partition("/")[2]

    @property
    def conditional(self) -> bool:
        """Whether it writes on a condition."""
        return self.method == "PUT" and bool({b"if-none-match", b"if-match"} & self.headers.keys())

    @property
    def completes(self) -> bool:
        """Whether it ends an upload in parts."""
        return self.method == "POST" and "uploadId=" in self.target

    @property
    def writes(self) -> bool:
        """Whether it makes an object, as a whole."""
        return self.completes or (self.method == "PUT" and "uploadId=" not in self.target)


def fine(_: Request) -> None:
    """Do nothing to any request."""


def answer(status: str, body: str = "") -> bytes:
    """An answer in place of the endpoint's."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body.encode())}\r\n\r\n"
    return (head + body).encode()


_BUSY = answer(
    "503 Slow Down",
    "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
)
_ERROR = answer(
    "500 Internal Server Error",
    "<Error><Code>InternalError</Code><Message>We encountered an internal error. Please try again.</Message></Error>",
)


class Proxy:
    """Serves in a thread of its own, as a context manager; `done` counts what was done, and requests in all."""

    def __init__(self, endpoint: str) -> None:
        there = urlsplit(endpoint)
        self._there = (there.hostname or "", there.port or 80)
        self.choose: Choice = fine
        self.done: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._listener: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._meeting: tuple[Callable[[Request], bool], asyncio.Barrier] | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        """What takes the place of the endpoint."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def let_meet(self, count: int, which: Callable[[Request], bool]) -> None:
        """Let the next `count` such requests wait for each other: none is answered before all have come."""
        self._meeting = which, asyncio.Barrier(count)

    async def _meet(self, request: Request) -> None:
        if self._meeting is not None and self._meeting[0](request):
            barrier = self._meeting[1]
            await barrier.wait()
            self._meeting = None

    async def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=128)
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        self._loop.add_reader(
            self._listener, self._accept
        )  # asyncio's own server loses what comes while it closes

    def _accept(self) -> None:
        if self._listener is not None:
            with suppress(BlockingIOError):
                task = self._loop.create_task(self._serve(self._listener.accept()[0]))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    def _close(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _end(self) -> None:
        self._close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._close()
        await asyncio.sleep(0.01)  # until the connections are closed

    async def _refuse(self) -> None:
        """Take no connections for a moment."""
        if self._listener is None:
            return
        self._close()
        try:
            await asyncio.sleep(0.05)
        finally:
            await self._listen()

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            while (request := await _request(reader)) is not None and await self._answer(
                request, writer
            ):
                pass
        except OSError:
            pass
        finally:
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection can be used again."""
        self.done["requests"] += 1
        await self._meet(request)
        fault = self.choose(request)
        if fault is not None:
            self.done[fault if isinstance(fault, str) else "answer"] += 1
        if isinstance(fault, bytes) or fault in ("busy", "error"):
            writer.write(
                fault if isinstance(fault, bytes) else _BUSY if fault == "busy" else _ERROR
            )
            await writer.drain()
            return True
        if fault in ("reset", "refused"):
            _reset(writer)
            if fault == "refused":
                await self._refuse()
            return False
        head, body = await self._ask(request)
        if fault == "slow":
            await asyncio.sleep(0.1)
        if fault == "lost":
            _reset(writer)
            return False
        if fault == "lied":
            head, body = _ERROR, b""
        if fault in ("cut", "short"):
            return await _broken(writer, head, body, reset=fault == "cut")
        writer.write(head + body)
        await writer.drain()
        return (
            b"content-length:" in head.lower() or request.method == "HEAD" or b" 204 " in head[:20]
        )

    async def _ask(self, request: Request) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(*self._there)
        try:
            lines = [f"{request.method} {request.target} HTTP/1.1".encode()]
            lines += [
                k + b": " + v
                for k, v in request.headers.items()
                if k not in (b"connection", b"expect")
            ]
            writer.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + request.body)
            await writer.drain()
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            kept = [
                line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")
            ]
            return b"\r\n".join([*kept, b"", b""]).replace(b"HTTP/1.0", b"HTTP/1.1", 1), body
        finally:
            writer.close()


async def _request(reader: asyncio.StreamReader) -> Request | None:
    """The next request of a connection; None where it ended."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head[:-4].split(b"\r\n")
    method, target, _ = first.decode("latin-1").split(" ")
    headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines)}
    body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
    return Request(method, target, headers, body)


async def _broken(writer: asyncio.StreamWriter, head: bytes, body: bytes, *, reset: bool) -> bool:
    """Half of a body; of an answer without one, half of its head."""
    writer.write(head + body[: len(body) // 2] if body else head[: len(head) // 2])
    await writer.drain()
    if reset:
        await asyncio.sleep(0.005)  # a reset overtakes what lies in the other side's buffer
        _reset(writer)
    return False


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection off, rather than end it."""
    found = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
