"""A server in a thread of this process, and what is asked of it."""

from __future__ import annotations

import http.client
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn

from ucformat.web.app import make_app
from ucformat.web.library import Library, Presentation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.checkpoint import Checkpoint
    from ucformat.web.access import Token


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Client:
    """Asks a server, with a new connection for each request."""

    url: str

    def __call__(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> Answer:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
        try:
            connection.request(
                method, path, body, {name.replace("_", "-"): v for name, v in headers.items()}
            )
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()


@contextmanager
def serving(
    catalog: Catalog | None = None,
    places: Mapping[str, Checkpoint] | None = None,
    presentation: Presentation | None = None,
    tokens: Sequence[Token] = (),
    opening: Mapping[str, Callable[[], Checkpoint]] | None = None,
    **options: Any,
) -> Iterator[Client]:
    """Serve checkpoints at a free port of this machine.

    Args:
        opening: what opens further places.
        options: those of `Library`.
    """
    opened = {name: lambda ck=ck: ck for name, ck in (places or {}).items()} | dict(opening or {})
    library = Library(catalog, opened, presentation or Presentation(), **options)
    config = uvicorn.Config(
        make_app(library, tokens), "127.0.0.1", 0, log_config=None, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Client(f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join()
