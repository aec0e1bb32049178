"""A server in a thread of this process, what is asked of it, and what it serves."""

from __future__ import annotations

import hashlib
import http.client
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

import ucformat
from tests.exporters.sources import opened
from ucformat.web.access import Token
from ucformat.web.app import Server, make_app
from ucformat.web.library import Library, Presentation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog
    from ucformat.checkpoint import Checkpoint


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
    by_name = {name: lambda ck=ck: ck for name, ck in (places or {}).items()} | dict(opening or {})
    library = Library(catalog, by_name, presentation or Presentation(), **options)
    urls: list[str] = []
    server = Server(make_app(library, tokens), "127.0.0.1", 0, urls.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not urls:
            assert thread.is_alive()
            thread.join(0.01)
        yield Client(urls[0])
    finally:
        server.should_exit = True
        thread.join()


def token(name: str, scope: str = "", **facts: float) -> Token:
    """A token whose text is its name."""
    return Token(name, hashlib.sha256(name.encode()).hexdigest(), scope, **facts)


def bearer(text: str) -> dict[str, Any]:
    """The header with which a client sends a token."""
    return {"Authorization": f"Bearer {text}"}


def damaged(place: Path) -> Checkpoint:
    """A tensor of 4 MiB, of which a byte in the last quarter is wrong."""
    array = np.arange(1 << 20, dtype="f4").reshape(1024, 1024)
    ck = ucformat.convert(
        opened({("w", "weight"): array}), place, chunk_bytes=1 << 20, shard_bytes=1 << 20
    )
    (file,) = (place / "data").rglob("c/3/0")
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    return ck


def run_client(
    program: str, *arguments: str, server: Client, home: Path, timeout: int = 120
) -> str:
    """Run a program of the hub's clients, for which a server is the hub; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={"HF_ENDPOINT": server.url, "HF_HOME": str(home), "PATH": ""},
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
