"""Clients that listen are told what moves, all of it, and nothing that they may not see."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa

from tests.catalog.acts import put
from tests.catalog.manifests import manifest
from tests.patience import PATIENCE, wait_until
from tests.web.serving import Client, bearer, serving, token
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.changes import SettledLog
from ucformat.catalog.models import Event
from ucformat.catalog.tracked import TrackedValues
from ucformat.errors import UsageError
from ucformat.web import events
from ucformat.web.events import Listeners, Positions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.web.library import Library

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_INTERVAL", 0.02)


@pytest.fixture(autouse=True)
def _without_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes documents: the places of these checkpoints are made up."""
    monkeypatch.setattr("ucformat.catalog.catalog.on_change", [])


class Listening:
    """A client that reads events from a connection of its own."""

    def __init__(self, url: str, last: str | None = None, **headers: str) -> None:
        place = urlsplit(url)
        self.connection = http.client.HTTPConnection(
            str(place.hostname), place.port, timeout=PATIENCE
        )
        if last is not None:
            headers["Last-Event-ID"] = last
        self.connection.request("GET", "/v1/events", headers=headers)
        self.answer = self.connection.getresponse()
        self.last = last or ""

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next event; EOFError at the end of the answer."""
        fields: dict[str, str] = {}
        while line := self.answer.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "data" in fields:
                self.last = fields.get("id", self.last)
                return fields["event"], json.loads(fields["data"])
        raise EOFError

    def told(self, *known: tuple[str, str, str]) -> tuple[str, str, str | None]:
        """The next event: its kind, the name, and the id of the checkpoint; what is `known` may be told again."""
        kind, data = self.next()
        place = data["checkpoint"]
        told = (kind, data["alias" if kind == "alias" else "run"], place and place["id"])
        return self.told(*known) if told in known else told


@contextmanager
def listening(ask: Client, last: str | None = None, **headers: str) -> Iterator[Listening]:
    """A client that is ready."""
    client = Listening(ask.url, last, **headers)
    try:
        assert client.answer.status == 200
        assert client.next() == ("ready", {})
        yield client
    finally:
        client.connection.close()


def test_what_moves_is_told(catalog: Catalog, database_url: str) -> None:
    """Whoever moves it: another process has a connection of its own."""
    one = put(catalog, 1).id
    with serving(catalog) as ask, Catalog(database_url) as other, listening(ask) as client:
        other.alias("best", "run7@1")
        assert client.told() == ("alias", "best", one)
        two = put(other, 2).id
        assert client.told() == ("latest", "run7", two)
        other.alias("best", "run7@2")
        assert client.told() == ("alias", "best", two)
        other.unalias("best")
        assert client.told() == ("alias", "best", None)
        other.delete(two)
        assert client.told() == ("latest", "run7", one)
        other.restore(two)
        assert client.told() == ("latest", "run7", two)
        put(other, 0)  # an older one
        other.note(one, "n")
        other.metric(two, {"loss": 1.0})
        other.delete(one)
        other.delete(two)
        zero = manifest(0).id
        assert client.told() == ("latest", "run7", zero)
        other.delete(zero)
        assert client.told() == ("latest", "run7", None)


def test_a_checkpoint_that_changes_its_run_moves_two(catalog: Catalog) -> None:
    one, two = put(catalog, 1).id, put(catalog, 2).id
    with serving(catalog) as ask, listening(ask) as client:
        catalog.record(manifest(2, step=2), "/data/run7/2", run="other")
        assert {client.told(), client.told()} == {("latest", "other", two), ("latest", "run7", one)}


def test_several_lines_are_ambiguous(catalog: Catalog) -> None:
    put(catalog, 1, url="/a/1", run="r")
    with serving(catalog) as ask, listening(ask) as client:
        put(catalog, 2, url="/b/2", run="r")
        assert client.next() == ("latest", {"run": "r", "checkpoint": None, "ambiguous": True})


def test_who_connects_again_misses_nothing(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a page that was cut off all is told again, also by another server."""
    monkeypatch.setattr(events, "_ENTRIES", 7)
    put(catalog, 0)
    with serving(catalog) as ask:
        with listening(ask) as client:
            before = client.last
        for n in range(1, 13):
            put(catalog, n, run=f"r{n}")
            catalog.alias(f"a{n}", f"r{n}@{n}")
    expected = {
        (kind, f"{kind[0].replace('l', 'r')}{n}", manifest(n).id)
        for n in range(1, 13)
        for kind in ("alias", "latest")
    }
    for cut in (1, 3, 10, 23):
        with serving(catalog) as ask:
            with listening(ask, before) as client:
                told = {client.told() for _ in range(cut)}
                last = client.last
            with listening(ask, last) as client:
                while not told >= expected:
                    told.add(client.told())
        assert told == expected


def test_positions_tell_nothing(catalog: Catalog) -> None:
    positions = Positions(catalog.database.identity)
    texts = {positions.seal(n): n for n in (0, 1, 2, 255, 1 << 40)}
    assert all(positions.open(text) == n for text, n in texts.items())
    assert positions.seal(1) != positions.seal(1)  # equal ones would tell that nothing happened
    assert len({text[:6] for text in texts}) == len(texts)
    assert len({text[-6:] for text in texts}) == len(texts)
    put(catalog, 1)
    other = Positions("another").seal(1)
    changed = positions.seal(1)[:-3] + "AAA"
    for text in (other, changed, "", "1", "é", "A" * 22, "A" * 32, "A" * 9000, "\0"):
        with pytest.raises(UsageError, match="Last-Event-ID"):
            positions.open(text)
    with serving(catalog) as ask:
        for text in (other, changed, "1", positions.seal(1 << 40)):
            refused = ask("/v1/events", Last_Event_ID=text)
            assert (refused.status, b"Last-Event-ID" in refused.body) == (400, True)


def test_a_scope_is_not_left(catalog: Catalog) -> None:
    shown, hidden = put(catalog, 1, run="shown").id, put(catalog, 2, run="hidden").id
    tokens = [token("some", "run = 'shown' or tag = 'out'"), token("all")]
    with (
        serving(catalog, tokens=tokens) as ask,
        listening(ask, **bearer("all")) as every,
        listening(ask, **bearer("some")) as some,
    ):
        begun, newest = some.last, ("latest", "shown", shown)
        catalog.alias("secret", hidden)
        put(catalog, 3, run="hidden")
        catalog.delete(put(catalog, 4, run="more").id)
        catalog.alias("best", shown)
        assert some.told(newest) == ("alias", "best", shown)
        catalog.alias("best", hidden)
        assert some.told(newest) == ("alias", "best", None)
        catalog.alias("best", manifest(3).id)  # from hidden to hidden
        catalog.tag(hidden, "out")
        assert {some.told(newest), some.told(newest)} == {
            ("alias", "secret", hidden),
            ("latest", "hidden", hidden),
        }
        catalog.untag(hidden, "out", reason="r")
        assert {some.told(newest), some.told(newest)} == {
            ("alias", "secret", None),
            ("latest", "hidden", None),
        }
        while every.told() != ("latest", "more", None):
            pass
        last = some.last
        for n in range(5, 9):
            put(catalog, n, run="hidden")
        catalog.alias("best", shown)
        assert some.told(newest) == ("alias", "best", shown)
        catalog.alias("end", shown)
        for since in (begun, last):  # who has seen none of it is told of no name that is hidden
            with listening(ask, since, **bearer("some")) as again:
                assert again.told(newest) == ("alias", "best", shown)
                assert again.told(newest, ("alias", "best", shown)) == ("alias", "end", shown)


def test_an_alias_that_leaves_a_scope_in_one_of_many_moves(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_ENTRIES", 1)
    shown, hidden = put(catalog, 1, run="shown").id, put(catalog, 2, run="hidden").id
    other = put(catalog, 3, run="hidden").id
    catalog.alias("best", shown)
    with serving(catalog, tokens=[token("some", "run = 'shown'")]) as ask:
        with listening(ask, **bearer("some")) as client:
            last = client.last
        for target in (hidden, other, hidden, other):
            catalog.alias("best", target)
        catalog.alias("end", shown)
        with listening(ask, last, **bearer("some")) as client:
            assert client.told(("latest", "shown", shown)) == ("alias", "best", None)


def test_what_a_tracker_says_moves_nothing(catalog: Catalog) -> None:
    ref = put(catalog, 1).id
    log = SettledLog()
    before = catalog.settled(log)
    catalog.add_tracked("mlflow", {ref: TrackedValues({}, {"run_id": "r"})})
    changes = catalog.changes(before, catalog.settled(log), most=10)
    assert changes.runs == {"run7": False}


def test_a_name_forges_no_event(catalog: Catalog) -> None:
    """Lines end with CR, too, and clients in Python split at more: sseclient#9, django-eventstream#185."""
    forged = 'r"\n\nevent: alias\ndata: {}\r\rid: 1\r\n\r\nx\x0b\x0c\x1c\x85\u2028\u2029\u202e'
    with serving(catalog) as ask, listening(ask) as client:
        put(catalog, 1, run=forged)
        lines = [client.answer.readline() for _ in range(4)]
        assert lines[0] == b"event: latest\n"
        assert (lines[1][:4], lines[3]) == (b"id: ", b"\n")
        text = lines[2].decode()
        assert len(text.splitlines()) == 1
        assert json.loads(text.removeprefix("data: "))["run"] == forged


def test_only_some_runs_are_told(catalog: Catalog) -> None:
    with serving(catalog, runs=["a"]) as ask, listening(ask) as client:
        put(catalog, 1, run="b")
        put(catalog, 2, run="a")
        assert client.told() == ("latest", "a", manifest(2).id)


@pytest.mark.parametrize("engine_name", ["postgresql"])
def test_a_transaction_that_is_late(catalog: Catalog) -> None:
    """Its entry has a smaller number than others that are visible before it."""
    put(catalog, 1)
    log, database = SettledLog(), catalog.database
    begun = catalog.settled(log)
    values = {"at": sa.func.now(), "who": "w", "action": "note", "detail": sa.literal({}, sa.JSON)}
    with database.engine.connect() as late, late.begin():
        late.execute(sa.update(Event).where(Event.id == 1).values(who="x"))
        number = late.execute(sa.insert(Event).values(**values).returning(Event.id)).scalar_one()
        put(catalog, 2)
        for _ in range(3):
            assert catalog.settled(log) < number
        assert catalog.settled(SettledLog()) < number  # of who begins now
    assert catalog.settled(log) > number
    with database.engine.connect() as failed:  # its number stays missing
        transaction = failed.begin()
        failed.execute(sa.insert(Event).values(**values))
        put(catalog, 3)
        before = catalog.settled(log)
        transaction.rollback()
    assert catalog.settled(log) > before > begun
    assert catalog.settled(log) == log.last


def test_events_of_concurrent_writers(catalog: Catalog, database_url: str) -> None:
    with serving(catalog) as ask, listening(ask) as client:

        def work(number: int) -> None:
            with Catalog(database_url) as own:
                for n in range(5):
                    put(own, 10 * number + n, run=f"r{number}-{n}")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        told = {client.told()[1] for _ in range(20)}
        for thread in threads:
            thread.join()
        assert told == {f"r{number}-{n}" for number in range(1, 5) for n in range(5)}


def test_signs_of_life(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_HEARTBEAT", 0.05)
    with serving(catalog) as ask, listening(ask) as client:
        assert [client.answer.readline() for _ in range(4)] == [b":\n", b"\n"] * 2
        assert client.answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        assert client.answer.getheader("cache-control") == "no-store"


def test_signs_of_life_while_what_is_hidden_moves(
    catalog: Catalog, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_HEARTBEAT", 0.5)
    put(catalog, 1, run="hidden")
    ended = threading.Event()

    def work() -> None:
        with Catalog(database_url) as own:
            while not ended.is_set():
                own.note("hidden@1", "n")

    thread = threading.Thread(target=work)
    with (
        serving(catalog, tokens=[token("some", "run = 'shown'")]) as ask,
        listening(ask, **bearer("some")) as client,
    ):
        client.connection.sock.settimeout(5)
        thread.start()
        try:
            assert client.answer.readline() == b":\n"
        finally:
            ended.set()
            thread.join()


def library_of(listeners: list[Listeners], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the listeners of servers."""
    made = Listeners.__init__

    def init(self: Listeners, library: Library) -> None:
        made(self, library)
        listeners.append(self)

    monkeypatch.setattr(Listeners, "__init__", init)


def test_a_bound_on_clients(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who are gone do not count, nor do they who ask for headers alone."""
    monkeypatch.setattr(events, "_LISTENERS", 3)
    made: list[Listeners] = []
    library_of(made, monkeypatch)
    with serving(catalog) as ask:
        clients = [Listening(ask.url) for _ in range(3)]
        assert [c.answer.status for c in clients] == [200] * 3
        refused = ask("/v1/events")
        assert (refused.status, refused.headers["retry-after"]) == (503, "30")
        assert json.loads(refused.body)["error"].startswith("3 clients")
        assert ask("/v1/checkpoints").status == 200
        for client in clients:
            client.answer.close()
            client.connection.close()
        wait_until(lambda: made[0].count == 0)
        for _ in range(5):
            head = ask("/v1/events", "HEAD")
            assert (head.status, head.body) == (200, b"")
        wait_until(lambda: made[0].count == 0)
        with listening(ask):
            pass
        assert ask("/v1/events", "POST").status == 405


def test_a_client_that_takes_nothing_is_given_up(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_PATIENCE", 0.2)
    made: list[Listeners] = []
    library_of(made, monkeypatch)
    put(catalog, 1)
    run = "r" * 30_000
    with serving(catalog) as ask:
        place = urlsplit(ask.url)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((place.hostname, place.port))
            slow.sendall(b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            wait_until(lambda: made[0].count == 1)
            numbers = iter(range(2, 500))

            def is_given_up() -> bool:
                put(catalog, next(numbers), run=f"{run}{next(numbers)}")
                return made[0].count == 0

            wait_until(is_given_up)
        assert ask("/v1/checkpoints").status == 200


def test_a_token_that_expires_ends_it(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_HEARTBEAT", 0.05)
    with serving(catalog, tokens=[token("t", expires=time.time() + 1)]) as ask:
        with listening(ask, **bearer("t")) as client, pytest.raises(http.client.IncompleteRead):
            client.answer.read()
        assert ask("/v1/events", **bearer("t")).status == 401


def test_a_catalog_that_fails_breaks_it_off(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(catalog) as ask, listening(ask) as client:
        monkeypatch.setattr(SettledLog, "read", _fail)
        with pytest.raises((EOFError, http.client.HTTPException)):
            client.next()


def _fail(*_: Any) -> int:
    raise UsageError("the database is gone")


def test_a_server_without_a_catalog() -> None:
    with serving() as ask:
        assert ask("/v1/events").status == 422


def test_a_server_that_ends_ends_it_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/c.db"
    with Catalog(url) as catalog:
        put(catalog, 1)
    words = [sys.executable, "-m", "ucformat.cli", "serve", "--port", "0"]
    with subprocess.Popen(
        words, env={"UCP_CATALOG": url, "PATH": ""}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        ask = Client(server.stdout.readline().decode().split()[0])
        with listening(ask) as client, listening(ask) as other:
            begun = time.monotonic()
            server.terminate()
            for one in (client, other):
                with pytest.raises(EOFError):
                    one.next()
            server.communicate(timeout=60)
            assert time.monotonic() - begun < 4  # it waits up to 5 s for answers


def test_curl(catalog: Catalog) -> None:
    """The guide's command."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not here: apt-get install curl")
    text = (ROOT / "docs/guides/serve.md").read_text()
    (command,) = re.findall(r"^\$ (curl --no-buffer .*)$", text, re.MULTILINE)
    with serving(catalog) as ask:
        words = command.replace("http://127.0.0.1:8400", ask.url).split()
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as curl:
            assert curl.stdout is not None
            begin = [curl.stdout.readline() for _ in range(5)]
            assert begin[:2] == [b"retry: 3000\n", b"event: ready\n"]
            put(catalog, 5)
            lines = [curl.stdout.readline() for _ in range(3)]
            assert lines[0] == b"event: latest\n"
            assert json.loads(lines[2].removeprefix(b"data: "))["checkpoint"]["step"] == 5
            curl.terminate()


@pytest.mark.matrix
def test_a_browser_connects_again_by_itself(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EventSource sends the last id when an answer was cut off."""
    how = "apt-get install chromium npm; bash tests/engines/install_browser.sh"
    program = shutil.which("chromium")
    if program is None:
        pytest.skip(f"Chromium is not here: {how}")
    playwright = pytest.importorskip("playwright.sync_api", reason=how)
    monkeypatch.setattr(events, "_RETRY", 3000)
    made: list[Listeners] = []
    library_of(made, monkeypatch)
    listen = """() => {
        window.told = [];
        const source = new EventSource("/v1/events");
        for (const kind of ["ready", "latest"])
            source.addEventListener(kind, e => told.push(kind + (JSON.parse(e.data).run || "")));
    }"""
    with serving(catalog) as ask, playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{ask.url}/v1/openapi.json")
        page.evaluate(listen)
        page.wait_for_function("told.length == 1")
        put(catalog, 1, run="a")
        page.wait_for_function("told.length == 2")
        looked = Listeners._look

        async def fail(listeners: Listeners) -> None:
            raise UsageError("the database is gone")

        monkeypatch.setattr(Listeners, "_look", fail)
        wait_until(lambda: made[0].count == 0)
        put(catalog, 2, run="b")
        monkeypatch.setattr(Listeners, "_look", looked)
        page.wait_for_function("told.includes('latestb')")
        assert page.evaluate("told") == ["ready", "latesta", "ready", "latestb"]
        browser.close()


def test_the_example_in_python(catalog: Catalog) -> None:
    text = (ROOT / "docs/http.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "events" in c]
    names: dict[str, Any] = {}
    with serving(catalog) as ask:
        program = compile(code.replace("http://127.0.0.1:8400", ask.url), "http.md", "exec")
        waiting = threading.Thread(target=exec, args=(program, names))
        waiting.start()
        wait_until(lambda: "events" in names)
        put(catalog, 5)
        waiting.join(PATIENCE)
        names["events"].close()
    assert names["newest"]["id"] == manifest(5).id
