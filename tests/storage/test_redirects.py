"""No token and no signature follows a redirect to another host."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import fsspec
import obstore
import pytest

from tests.s3 import CANARY
from tests.storage.seen import TOKEN
from ucformat.errors import UcformatError, UnsafeError
from ucformat.storage.clouds import Options, _restrict_hosts, connect, parse
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
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[int]:
    """The port at which every request is answered so until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - as the library calls them

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serving(host: Host) -> Iterator[Host]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("content-length") or 0))
        host.requests.append(f"{request.command} {request.path}\n{request.headers}")
        body = b"" if host.leads_to else b"abc"
        request.send_response(host.status if host.leads_to else 200)
        if host.leads_to:
            request.send_header("Location", f"{host.leads_to}/f")
        request.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        request.send_header("ETag", '"x"')
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    with answering(answer) as host.port:
        yield host


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


@pytest.mark.front("_s3-302", "_s3-307", "_azure-301")
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
    with pytest.raises(UnsafeError, match="redirect to another host"):
        store.read("f")
    assert not other.requests
    assert any(TOKEN in r or "sig=" in r for r in first.requests)


def test_amazon_itself_is_reached_without_the_proxy_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    urls = ["http://inside.example:9000", "https://outside.example", "http://outside.example"]
    assert [sorted(_restrict_hosts([url])) for url in urls] == [
        ["proxy_excludes", "proxy_url"]
    ] * 2 + [[]]


@pytest.mark.parametrize(
    ("no_proxy", "guarded"),
    [(".amazonaws.com", True), ("s3.eu-west-1.amazonaws.com", True), ("", False)],
)
def test_what_of_amazon_the_user_reaches_without_a_proxy(
    no_proxy: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*PROXIES, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUCFORMATTESTS")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("obstore.store.S3Store", lambda *_, **options: made.append(options))
    connect(parse("s3://bucket/run"), Options())
    assert ("proxy_url" in made[0]["client_options"]) is guarded


@dataclass
class Proxy:
    """A proxy of the user's, which alone knows where the hosts of some names are; and what it was asked for."""

    knows: dict[str, Host]
    url: str = ""
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def proxy(hosts: tuple[Host, Host]) -> Iterator[Proxy]:
    first, other = hosts
    first.leads_to = "http://other.test"
    found = Proxy({"endpoint.test": first, "other.test": other, "localhost": first})

    def answer(request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        found.asked.append(url.hostname or "")
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        there = HTTPConnection("127.0.0.1", found.knows[found.asked[-1]].port)
        there.request(
            request.command,
            url._replace(scheme="", netloc="").geturl(),
            body,
            dict(request.headers),
        )
        answer = there.getresponse()
        data = answer.read()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name not in ("Server", "Date"):
                request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)
        there.close()

    with answering(answer) as port:
        found.url = f"http://127.0.0.1:{port}"
        yield found


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_what_is_behind_a_proxy_is_read(
    variable: str, proxy: Proxy, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts[0].leads_to = ""
    place = _s3(hosts[0], monkeypatch)
    monkeypatch.setenv("UCP_ENDPOINT", "http://endpoint.test")
    monkeypatch.setenv(variable, proxy.url)
    assert open_store(place).read("f") == b"abc"
    assert {*proxy.asked} == {"endpoint.test"}


@pytest.mark.front("settings0")
@pytest.mark.parametrize(
    "settings",
    [
        {"http_proxy": "", "no_proxy": "localhost"},
        {"ALL_PROXY": "", "no_proxy": "localhost"},
        {"https_proxy": ""},
    ],
)
def test_a_proxy_that_does_not_stand_before_the_endpoint_takes_nothing_on(
    settings: dict[str, str],
    proxy: Proxy,
    hosts: tuple[Host, Host],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, other = hosts
    first.leads_to = f"http://127.0.0.1:{other.port}"
    for name, value in settings.items():
        monkeypatch.setenv(name, value or proxy.url)
    store = open_store(_s3(first, monkeypatch))
    for act in ACTS:
        with pytest.raises(UcformatError):
            act(store)
    with pytest.raises(UnsafeError, match="redirect to another host"):
        store.read("f")
    assert not other.requests
    assert not proxy.asked


@pytest.mark.parametrize(
    "secret",
    [
        pytest.param(
            TOKEN,
            marks=pytest.mark.xfail(
                strict=True, reason="obstore cannot: docs/security.md, rule 10"
            ),
        ),
        "AKIAUCFORMATTESTS",
    ],
)
def test_what_follows_a_redirect_behind_a_proxy(
    secret: str, proxy: Proxy, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = hosts
    place = _s3(first, monkeypatch)
    monkeypatch.setenv("UCP_ENDPOINT", "http://endpoint.test")
    monkeypatch.setenv("http_proxy", proxy.url)
    with suppress(UcformatError):
        open_store(place).read("f")
    assert any(secret in r for r in first.requests)
    assert other.requests
    assert not any(secret in r for r in other.requests)


@pytest.mark.parametrize("kind", ["http", "hf"])
def test_what_fsspec_reaches_sends_no_token_after_a_redirect(
    kind: str, hosts: tuple[Host, Host]
) -> None:
    first, other = hosts
    endpoint = f"http://localhost:{first.port}"
    if kind == "hf":
        hub = pytest.importorskip(
            "huggingface_hub", reason="huggingface_hub is missing: pip install huggingface_hub"
        )
        store = FsspecStore(
            "hf://datasets/a/b",
            hub.HfFileSystem(endpoint=endpoint, token=TOKEN, skip_instance_cache=True),
        )
    else:
        given = {"headers": {"Authorization": f"Bearer {TOKEN}"}}
        store = FsspecStore(
            f"{endpoint}/run",
            fsspec.filesystem("http", client_kwargs=given, skip_instance_cache=True),
        )
    for act in ACTS[:3]:
        with suppress(UcformatError):
            act(store)
    assert any(TOKEN in r for r in first.requests)
    assert other.requests
    assert not any(TOKEN in r for r in other.requests)


@pytest.mark.front("*configured1")
@pytest.mark.parametrize(
    "configured",
    [
        {"client_kwargs": {"headers": {"X-Api-Key": TOKEN, "User-Agent": "me"}}},
        {"headers": {"PRIVATE-TOKEN": TOKEN, "User-Agent": "me"}},
        {"cookies": {"session": TOKEN}, "headers": {"User-Agent": "me"}},
    ],
)
@pytest.mark.parametrize("url", ["simplecache::http://localhost:{}/run", "http://localhost:{}/run"])
def test_what_configures_fsspec_sends_no_header_after_a_redirect(
    configured: dict[str, Any], url: str, hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = hosts
    monkeypatch.setitem(fsspec.config.conf, "http", configured)
    store = FsspecStore(url.format(first.port))
    for act in ACTS[:3]:
        with suppress(UcformatError):
            act(store)
    assert any(TOKEN in r for r in first.requests)
    assert any("User-Agent: me" in r for r in other.requests)
    assert not any(TOKEN in r for r in other.requests)


def test_what_configures_fsspec_is_sent_to_another_path_of_the_host(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = hosts
    first.leads_to = f"http://localhost:{other.port}"
    monkeypatch.setitem(fsspec.config.conf, "http", {"headers": {"PRIVATE-TOKEN": TOKEN}})
    assert FsspecStore(f"http://localhost:{first.port}/run").read("f") == b"abc"
    assert any(TOKEN in r for r in other.requests)
