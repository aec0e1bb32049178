"""Server-sent events: what an alias, or the newest checkpoint of a run, is by now.

The audit log of the catalog says what may have moved, and the catalog what is there then, so other
processes may change it. One query a second sees whether the log has grown. All that is known of a
client is its position in the log, so one that reads slowly, or is gone, holds no memory; nobody
holds a thread.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import secrets
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.responses import JSONResponse

from ucformat.catalog.changes import SettledLog
from ucformat.catalog.filter.syntax import quoted
from ucformat.errors import UcformatError, UnsupportedError, UsageError
from ucformat.web.blocking import in_thread
from ucformat.web.streaming import disconnected

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.web.library import Access, Library

_log = logging.getLogger("ucformat.web")
_INTERVAL = 1.0  # seconds between two looks at the log
_HEARTBEAT = 15.0  # seconds after which something is sent, so that proxies keep the connection
_PATIENCE = 60.0  # seconds after which a client that takes nothing is given up
_RETRY = 3000  # milliseconds after which clients connect again
_LISTENERS = 256
_ENTRIES = 256  # of the log, that are read together
_PAGES = 16  # that several clients may want
_REMEMBERED = 1000  # names of which a connection is not told the same again
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx
    "x-content-type-options": "nosniff",
}


class Message(NamedTuple):
    """What a client is told.

    Attributes:
        kind: `alias` or `latest`.
        name: of the alias or the run.
        data: where it is now.
        is_known: whether the client may know that there was something of this name.
    """

    kind: str
    name: str
    data: dict[str, Any]
    is_known: bool = True


class Page(NamedTuple):
    """What entries of the log up to a position have moved."""

    position: int
    messages: list[Message]


class Positions:
    """Positions in the log as clients get them: they tell nothing, such as whether others do anything.

    Every server of a catalog understands them, also after it has started anew.
    """

    def __init__(self, identity: str) -> None:
        self._key = hashlib.sha256(f"ucformat events of {identity}".encode()).digest()

    def _mac(self, kind: bytes, data: bytes) -> bytes:
        return hmac.digest(self._key, kind + data, "sha256")[:8]

    def seal(self, position: int) -> str:
        """Write a position."""
        data, nonce = position.to_bytes(8, "big"), secrets.token_bytes(8)
        tag = self._mac(b"tag", nonce + data)
        hidden = bytes(a ^ b for a, b in zip(data, self._mac(b"pad", nonce + tag), strict=True))
        return base64.urlsafe_b64encode(nonce + tag + hidden).decode()

    def open(self, text: str) -> int:
        """Read a position.

        Raises:
            UsageError: it is none of this catalog.
        """
        with suppress(ValueError):
            sealed = base64.urlsafe_b64decode(text.encode("ascii"))
            nonce, tag, hidden = sealed[:8], sealed[8:16], sealed[16:]
            if len(hidden) == 8:
                pad = self._mac(b"pad", nonce + tag)
                data = bytes(a ^ b for a, b in zip(hidden, pad, strict=True))
                if hmac.compare_digest(tag, self._mac(b"tag", nonce + data)):
                    return int.from_bytes(data, "big")
        raise _unknown_position()


def _unknown_position() -> UsageError:
    return UsageError(
        "the Last-Event-ID is none of this catalog",
        hint="connect without it, and then look up what you follow",
    )


class Listeners:
    """The clients that follow the catalog of a library."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.count = 0
        self.position = 0
        self.is_closed = False
        self.failure: UcformatError | None = None
        self._settled = SettledLog()
        self._looking = asyncio.Lock()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pages: OrderedDict[tuple[str, int, int], asyncio.Future[Page]] = OrderedDict()

    @property
    def end(self) -> int:
        """The position of the last entry of the log, settled or not."""
        return self._settled.last

    @property
    def catalog(self) -> Catalog:
        """The catalog.

        Raises:
            UnsupportedError: the server has none.
        """
        if self.library.catalog is None:
            raise UnsupportedError(
                "this server has no catalog, so nothing moves here",
                hint="`ucp serve` without references, or of runs, serves a catalog",
            )
        return self.library.catalog

    async def enter(self) -> int:
        """Add a client, and return the position of what it can see now."""
        self.count += 1
        try:
            await self._look()
        except BaseException:
            self.leave()
            raise
        if self._task is None or self._task.done():
            self.failure = None
            self._task = asyncio.ensure_future(self._follow())
        return self.position

    def leave(self) -> None:
        """Remove a client."""
        self.count -= 1

    def close(self) -> None:
        """End all answers at once."""
        self.is_closed = True
        if self._task is not None:
            self._task.cancel()
        self._wake()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _look(self) -> None:
        """See how far the log is."""
        async with self._looking:
            position = await in_thread(self.catalog.settled, self._settled)
            if position != self.position:
                self.position = position
                self._wake()

    async def _follow(self) -> None:
        """Look at the log again and again, while there are clients."""
        try:
            while self.count:
                await asyncio.sleep(_INTERVAL)
                await self._look()
        except UcformatError as error:
            self.failure = error
            self._wake()

    async def wait(self, gone: asyncio.Future[None], timeout: float) -> None:
        """Wait until something may have moved, so many seconds at most."""
        moved = asyncio.ensure_future(self._moved.wait())
        try:
            await asyncio.wait(
                (moved, gone), timeout=max(0.0, timeout), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            moved.cancel()

    async def page(self, access: Access, after: int) -> Page:
        """What has moved after a position, computed once for all clients that see the same."""
        key = (access.scope, after, self.position)
        page = self._pages.get(key)
        if page is None:
            page = asyncio.ensure_future(
                in_thread(page_of, self.library, self.catalog, access, after, self.position)
            )
            self._pages[key] = page
            while len(self._pages) > _PAGES:
                self._pages.popitem(last=False)
        try:
            return await asyncio.shield(page)
        except UcformatError:
            self._pages.pop(key, None)
            raise


def page_of(library: Library, catalog: Catalog, access: Access, after: int, until: int) -> Page:
    """What entries of the log have moved, as far as a client sees it.

    It is told what is there now, so that it need not have been told of anything before.
    """
    changes = catalog.changes(after, until, most=_ENTRIES)
    messages = []
    for name, left in changes.aliases.items():
        entries = library.entries(access, f"alias = {quoted(name)}", limit=1)
        ids = f"id in ({', '.join(map(quoted, left))})"
        is_known = bool(entries or (left and library.entries(access, ids, limit=1, deleted=True)))
        data: dict[str, Any] = {
            "alias": name,
            "checkpoint": _named(entries[0]) if entries else None,
        }
        messages.append(Message("alias", name, data, is_known))
    for run, is_moved in changes.runs.items():
        if not is_moved and not library.is_limited(access):
            continue  # an annotation brings nothing into sight
        in_run = f"run = {quoted(run)}"
        lines = catalog.lines(library.within(access, f"{in_run} and step is not null"))
        heads = [line.head for line in lines]
        data = {
            "run": run,
            "checkpoint": _named(heads[0]) if len(heads) == 1 else None,
            "ambiguous": len(heads) > 1,
        }
        is_known = bool(heads or library.entries(access, in_run, limit=1, deleted=True))
        messages.append(Message("latest", run, data, is_known))
    return Page(changes.position, messages)


def _named(entry: Entry) -> dict[str, Any]:
    return {"id": entry.id, "run": entry.run, "step": entry.step, "kind": entry.kind}


class EventStream:
    """Tells a client what moves, until it goes, or the server ends.

    Args:
        last: the `Last-Event-ID` that the client sends; empty: from now on.
    """

    def __init__(self, listeners: Listeners, access: Access, last: str) -> None:
        self._listeners, self._access = listeners, access
        self._positions = Positions(listeners.catalog.database.identity)
        self._last = self._positions.open(last) if last else None
        self._last_data: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; see ASGI."""
        listeners = self._listeners
        if listeners.count >= _LISTENERS:
            await _full(scope, receive, send)
            return
        position = await listeners.enter()
        gone = asyncio.ensure_future(disconnected(receive))
        has_begun = False
        try:
            if self._last is not None:
                if self._last > listeners.end:  # the catalog is an older copy by now
                    raise _unknown_position()
                position = self._last
            has_begun = True
            headers = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if scope["method"] != "HEAD":
                text = f"retry: {_RETRY}\n" + _written("ready", {}, self._positions.seal(position))
                await _sent(send, text)
                await self._tell(send, position, gone)
            # also if it is gone, as a server that ends may say of all
            await send({"type": "http.response.body", "body": b""})
        except UcformatError as error:
            if not has_begun:
                raise
            # an answer that is not completed closes the connection
            _log.error("%s: the events were broken off: %s", scope["path"], error)
        finally:
            gone.cancel()
            listeners.leave()

    async def _tell(self, send: Send, position: int, gone: asyncio.Future[None]) -> None:
        listeners = self._listeners
        now = asyncio.get_running_loop().time
        # since the last that was sent: what is hidden may move all the time
        due = now() + _HEARTBEAT
        while not gone.done() and not listeners.is_closed:
            if listeners.failure is not None:
                raise listeners.failure
            if listeners.position > position:
                page = await listeners.page(self._access, position)
                position = page.position
                news = [message for message in page.messages if self._is_news(message)]
                for message in news:
                    # the position is told when all before it is: who is cut off misses nothing
                    last = self._positions.seal(position) if message is news[-1] else None
                    await _sent(send, _written(message.kind, message.data, last))
                    due = now() + _HEARTBEAT
            else:
                await listeners.wait(gone, due - now())
            if now() >= due and not gone.done() and not listeners.is_closed:
                await _sent(send, ":\n\n")
                due = now() + _HEARTBEAT

    def _is_news(self, message: Message) -> bool:
        """Whether this client does not know it yet, and may."""
        key = (message.kind, message.name)
        last = self._last_data.pop(key, None)
        if last is None and not message.is_known:
            return False
        self._last_data[key] = message.data
        while len(self._last_data) > _REMEMBERED:
            self._last_data.popitem(last=False)
        return last != message.data


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    error = {"error": f"{_LISTENERS} clients listen already", "hint": "try again later"}
    await JSONResponse(error, 503, {"retry-after": "30"})(scope, receive, send)


def _written(kind: str, data: dict[str, Any], last: str | None) -> str:
    """An event; JSON escapes the ends of lines in names."""
    number = "" if last is None else f"id: {last}\n"
    return f"event: {kind}\n{number}data: {json.dumps(data)}\n\n"


async def _sent(send: Send, text: str) -> None:
    """Send a part of the answer, to a client that takes it."""
    message = {"type": "http.response.body", "body": text.encode(), "more_body": True}
    try:
        async with asyncio.timeout(_PATIENCE):
            await send(message)
    except TimeoutError:
        raise UcformatError("the client takes nothing") from None
