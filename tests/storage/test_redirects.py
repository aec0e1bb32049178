"""No token and no signature follows a redirect to another host."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import fsspec
import obstore
import pytest

from tests.s3 import CANARY
from tests.storage.seen import TOKEN
from ucformat.errors import Refused, UcformatError
from ucformat.storage.clouds import Options, _only_to, connect, parse
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass
class Host:
    """A server, and what it was sent; it answers with a redirect to `leads_to`, if it has one."""

    port: int = 0
    leads_to: str = ""
    status: int = 307
    requests: list[str] = field(default_factory=list)


@contextmanager
def serving(host: Host) -> Iterator[Host]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            host.requests.append(f"{self.command} {self.path}\n{self.headers}")
            body = b"" if host.leads_to else b"abc"
            self.send_response(host.status if host.leads_to else 200)
            if host.leads_to:
                self.send_header("Location", f"{host.leads_to}/f")
            self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            self.send_header("ETag", '"x"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - as the library calls them

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        host.port = server.server_port
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield host
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Host]]:
    """`localhost`, which leads to `127.0.0.1`: names of two hosts as far as clients know."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ucformat.storage.clouds.Options.__init__.__defaults__", ("", "", 5.0, 1))
    with ExitStack() as stack:
        other = stack.enter_context(serving(Host()))
        first = stack.enter_context(serving(Host(leads_to=f"http://127.0.0.1:{other.port}")))
        yield first, other


ACTS: list[Callable[[Any], object]] = [
    lambda store: store.read("f"),
    lambda store: store.info("f"),
    lambda store: store.read_into("f", 0, [memoryview(bytearray(3))]),
    lambda store: list(store.list()),
    lambda store: store.put_if_absent("f", b"x"),
    lambda store: store.delete("f"),
]


def _s3(first: Host, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("UCP_ENDPOINT", f"http://localhost:{first.port}")
    patch.setenv("AWS_ACCESS_KEY_ID", "AKIAUCFORMATTESTS")
    patch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    patch.setenv("AWS_SESSION_TOKEN", TOKEN)
    patch.setenv("AWS_REGION", "us-east-1")
    return "s3://bucket/run"


def _azure(first: Host, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("AZURE_STORAGE_ENDPOINT", f"http://localhost:{first.port}")
    patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    patch.setenv("AZURE_STORAGE_SAS_KEY", f"sv=1&sig={CANARY}")
    made: Any = obstore.store.AzureStore
    patch.setattr(
        "obstore.store.AzureStore",
        lambda *args, client_options, **options: made(
            *args, client_options={**client_options, "allow_http": True}, **options
        ),
    )
    return "az://container/run"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("cloud", [_s3, _azure])
def test_no_redirect_to_another_host_is_followed(
    cloud: Callable[[Host, pytest.MonkeyPatch], str],
    status: int,
    hosts: tuple[Host, Host],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, other = hosts
    first.status = status
    store = open_store(cloud(first, monkeypatch))
    for act in ACTS:
        asked = len(first.requests)
        with pytest.raises(UcformatError):
            act(store)
        assert len(first.requests) > asked
    with pytest.raises(Refused, match="redirect to another host"):
        store.read("f")
    assert not other.requests
    assert any(TOKEN in r or "sig=" in r for r in first.requests)


def test_amazon_itself_is_reached_without_the_proxy_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://169.254.170.23/v1/credentials")
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("obstore.store.S3Store", lambda *_, **options: made.append(options))
    monkeypatch.setattr("ucformat.storage.clouds.boto_session", lambda: None)
    monkeypatch.setattr("ucformat.storage.clouds.keys_in_environment", lambda: False)
    connect(parse("s3://bucket/run"), Options())
    hosts = made[0]["client_options"]["proxy_excludes"].split(",")
    assert {"amazonaws.com", "169.254.0.0/16", "169.254.170.23"} <= set(hosts)


def test_a_proxy_of_the_user_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    options = [_only_to("http://inside.example:9000"), _only_to("http://outside.example")]
    assert [sorted(o) for o in options] == [["proxy_excludes", "proxy_url"], []]


@pytest.mark.parametrize("kind", ["http", "hf"])
def test_what_fsspec_reaches_sends_no_token_after_a_redirect(kind: str, hosts: tuple[Host, Host]) -> None:
    first, other = hosts
    endpoint = f"http://localhost:{first.port}"
    if kind == "hf":
        hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is missing: pip install huggingface_hub")
        store = FsspecStore(
            "hf://datasets/a/b", hub.HfFileSystem(endpoint=endpoint, token=TOKEN, skip_instance_cache=True)
        )
    else:
        given = {"headers": {"Authorization": f"Bearer {TOKEN}"}}
        store = FsspecStore(f"{endpoint}/run", fsspec.filesystem("http", client_kwargs=given, skip_instance_cache=True))
    for act in ACTS[:3]:
        with suppress(UcformatError):
            act(store)
    assert any(TOKEN in r for r in first.requests)
    assert other.requests
    assert not any(TOKEN in r for r in other.requests)
