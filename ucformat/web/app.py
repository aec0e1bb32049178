"""The application of `ucp serve`, and the server that runs it."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse

from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
    UpgradeNeeded,
    UsageError,
)
from ucformat.web.access import Gate, access_of
from ucformat.web.events import Listeners
from ucformat.web.hub import hub_routes
from ucformat.web.library import NoFile, NoRepository, NoRevision
from ucformat.web.pages import error_page, page_routes
from ucformat.web.plane import plane_routes
from ucformat.web.registry import registry_routes

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from ucformat.web.access import Token
    from ucformat.web.library import Library

_log = logging.getLogger("ucformat.web")
_STATUSES: tuple[tuple[type[UcformatError], int], ...] = (
    (UsageError, 400),
    (PermissionDenied, 403),
    (NotFound, 404),
    (Conflict, 409),
    (UnsupportedError, 422),
    (UpgradeNeeded, 422),
    (IntegrityError, 500),
)
_MAX_MESSAGE = 2000  # characters of a header
#: Which errors the clients of the hub know by a name.
_CODES: dict[type[UcformatError], str] = {
    NoRepository: "RepoNotFound",
    NoRevision: "RevisionNotFound",
    NoFile: "EntryNotFound",
}


def make_app(
    library: Library, tokens: Sequence[Token] = (), *, open_to_all: bool = False
) -> Starlette:
    """Make the application.

    Args:
        library: what it serves.
        tokens: one of which a request must have; empty: requests need none.
        open_to_all: answer requests to any host name although there are no tokens.
    """
    listeners = Listeners(library)
    app = Starlette(
        routes=[
            *page_routes(library),
            *plane_routes(library, listeners),
            *registry_routes(library),
            *hub_routes(library),
        ],
        middleware=[Middleware(Gate, tokens=tokens, open_to_all=open_to_all)],
        exception_handlers={UcformatError: partial(_failed, library)},
    )
    app.state.listeners = listeners
    return app


async def _failed(library: Library, request: Request, error: Exception) -> Response:
    """Tell a client what happened, as far as it may know."""
    assert isinstance(error, UcformatError)  # noqa: S101 - it handles no others
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    shown = library.shown_error(error, access_of(request))
    if status >= 500 or shown["message"] != error.message:
        _log.error("%s %r: %s", request.method, request.url.path, error)
    page = error_page(request, shown, status)
    if page is not None:
        return page
    text = str(shown["message"])
    message = "".join(c if " " <= c <= "~" else "?" if c > "~" else " " for c in text)
    headers = {"x-error-message": message[:_MAX_MESSAGE]}
    if type(error) in _CODES:
        headers["x-error-code"] = _CODES[type(error)]
    return JSONResponse({"error": text, "hint": shown["hint"]}, status, headers)


class Server(uvicorn.Server):
    """Serves an application of `make_app`.

    Args:
        started: called with the url when requests are answered.
    """

    def __init__(
        self, app: Starlette, host: str, port: int, started: Callable[[str], None]
    ) -> None:
        config = uvicorn.Config(
            app,
            host,
            port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
            ws="none",
            lifespan="off",
        )
        super().__init__(config)
        self._on_start, self._listeners = started, app.state.listeners

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn, which waits for answers, and some of ours have no end."""
        self._listeners.close()
        await super().shutdown(sockets)


def run(app: Starlette, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serve until the process is told to end.

    Args:
        started: called with the url when requests are answered.
    """
    Server(app, host, port, started).run()
