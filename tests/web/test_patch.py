"""A patch of a server has the files that `ucp patch` writes, and what was cut off never looks whole."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import uuid
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import quote, urlsplit

import numpy as np
import pytest

import ucformat
from tests.exporters.sources import opened
from tests.fakes import FakeSource
from tests.jobs.test_bases import is_read
from tests.jobs.test_patch import trained
from tests.patience import wait_until
from tests.web.serving import bearer, serving, token
from ucformat.catalog.catalog import Catalog
from ucformat.checkpoint import Checkpoint
from ucformat.errors import PermissionDenied, UsageError
from ucformat.jobs import patch_files
from ucformat.settings import using
from ucformat.storage.memory import MemoryStore
from ucformat.web import patching

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.web.serving import Client
    from ucformat.jobs.patch import Patch

ROOT = Path(__file__).parents[2]
ASSETS = {"tokenizer.json": b"{}" * 1000, "vocab of a model/é.txt": b"words"}


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Catalog]:
    """Three steps of a run, the second of which is a patch of the first, and one of another run."""
    with (
        using(catalog=f"sqlite:///{tmp_path}/c.db"),
        closing(Catalog(f"{tmp_path}/c.db")) as catalog,
    ):
        for step in (1, 3):
            store = MemoryStore(f"patched-{uuid.uuid4().hex}")
            for name, data in ASSETS.items():
                with store.create(name) as out:
                    out.write(data)
            ck = Checkpoint(FakeSource.write(store, trained(step), assets=tuple(ASSETS)))
            ucformat.convert(ck, tmp_path / "run" / str(step), run="run7", step=step)
        ucformat.patch("run7@1", opened(trained(2)), tmp_path / "run" / "2")
        ucformat.convert(opened(trained(0)), tmp_path / "other", run="other", step=0)
        yield catalog


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json" and "attempts" not in path.parts
    }


def unpacked(data: bytes, folder: Path) -> Path:
    """What `tar` makes of an answer."""
    folder.mkdir()
    subprocess.run(["tar", "x", "-C", str(folder)], input=data, check=True)
    return folder


def manifest_of(folder: Path) -> Any:
    own = ("id", "created", "digest")
    document = json.loads((folder / "manifest.json").read_bytes())
    return {name: value for name, value in document.items() if name not in own}


@pytest.mark.parametrize("base", ["1", "2"])
def test_its_files_are_those_of_ucp_patch(
    run: Catalog, tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_files, "FILE_BYTES", 1 << 20)
    events, before = len(run.events()), files_of(tmp_path / "run" / base)
    base_id = run.get(str(tmp_path / "run" / base)).id
    with serving(run) as ask:
        answer = ask(f"/v1/run7@3/patch?base={base_id}&base_name={base}")
        assert (answer.status, answer.headers["content-type"]) == (200, "application/x-tar")
        head = ask(f"/v1/run7@3/patch?base={base_id}", "HEAD")
        assert (head.status, head.body) == (200, b"")
    assert len(run.events()) == events
    assert files_of(tmp_path / "run" / base) == before
    assert not list((tmp_path / "run" / base).glob("needed-by/*")) or base != "2"
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
        assert tar.getnames()[-1] == "manifest.json"
        assert len([name for name in tar.getnames() if "tiles-" in name]) > 1
    sent = unpacked(answer.body, tmp_path / "run" / "sent")
    written = tmp_path / "run" / "written"
    ucformat.patch(tmp_path / "run" / base, "run7@3", written)
    assert files_of(sent) == files_of(written)
    assert manifest_of(sent) == manifest_of(written)
    ck = ucformat.open(sent)
    assert ck.id == answer.headers["x-ucformat-id"]
    assert is_read(ck, trained(3))
    assert ucformat.verify(ck)


def test_the_documented_commands_are_a_client(run: Catalog, tmp_path: Path) -> None:
    text = (ROOT / "docs/http.md").read_text()
    assert "base_name=1000" in (ROOT / "docs/guides/serve.md").read_text()
    (block,) = (b for b in re.findall(r"```console\n(.*?)```", text, re.DOTALL) if "ucp copy" in b)
    shutil.copytree(tmp_path / "run" / "1", tmp_path / "here" / "run7" / "1000")
    with serving(run) as ask:
        lines = [line.removeprefix("$ ") for line in block.splitlines()]
        program = "\n".join(["set -e", *lines])
        for name, own in (("http://127.0.0.1:8400", ask.url), ("@1001", "@3"), ("@1000", "@1")):
            program = program.replace(name, own)
        environment = os.environ | {"UCP_CATALOG": f"sqlite:///{tmp_path}/here.db"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        subprocess.run(["bash", "-c", program], check=True, cwd=tmp_path / "here", env=environment)
    place = tmp_path / "here" / "run7" / "1001"
    assert is_read(ucformat.open(place), trained(3))
    base = ucformat.open(place.parent / "1000")
    with Catalog(f"{tmp_path}/here.db") as here:
        (entry,) = here.find()
        assert entry.url == str(place)
        here.record(base.manifest, base.url)
        with pytest.raises(PermissionDenied, match=f"needed by {entry.id}"):
            here.delete(base.id)


def test_there_is_one_file_at_a_time(
    run: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_files, "FILE_BYTES", 1 << 18)
    numbers = []
    deliver = patching._Response._deliver

    def counted(self: Any, path: Path, key: str) -> None:
        numbers.append(len(list(path.parent.iterdir())))
        deliver(self, path, key)

    monkeypatch.setattr(patching._Response, "_deliver", counted)
    with serving(run) as ask:
        assert ask("/v1/run7@3/patch?base=run7@1").status == 200
    assert len(numbers) > 5
    assert max(numbers) <= 2  # one is written by the thread of documents
    assert not list((tmp_path / "temporary").iterdir())


def _large(tmp_path: Path) -> None:
    """Two steps of a run of 20 MiB that nothing compresses."""
    for step in (10, 11):
        noise = np.random.default_rng(step).integers(0, 1 << 31, 5 << 20, "i4")
        ucformat.convert(
            opened({("w", "weight"): noise}), tmp_path / "large" / str(step), run="large", step=step
        )


def test_what_is_damaged_is_cut_off_without_a_manifest(
    run: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_files, "FILE_BYTES", 4 << 20)
    _large(tmp_path)
    file = max((tmp_path / "large" / "11").rglob("c/*"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened_file:
        opened_file.seek(16 << 20)
        opened_file.write(b"damaged")
    with serving(run) as ask:
        connection = http.client.HTTPConnection(urlsplit(ask.url).netloc, timeout=60)
        connection.request("GET", "/v1/large@11/patch?base=large@10")
        response = connection.getresponse()
        assert response.status == 200
        with pytest.raises(http.client.IncompleteRead) as error:
            response.read()
        connection.close()
        assert b"manifest.json" not in error.value.partial
        assert len(error.value.partial) > 4 << 20
        assert ask("/v1/run7@3/patch?base=run7@1").status == 200
    assert not list((tmp_path / "temporary").iterdir())


def test_who_leaves_leaves_nothing(
    run: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_files, "FILE_BYTES", 4 << 20)
    _large(tmp_path)
    path, folder = "/v1/large@11/patch?base=large@10", tmp_path / "temporary"
    with serving(run) as ask:
        clients = [_begun(ask, path) for _ in range(2)]
        wait_until(lambda: len(list(folder.iterdir())) == 2)
        busy = ask(path)
        assert (busy.status, busy.headers["retry-after"]) == (503, "30")
        assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 12 << 20
        for client in clients:
            client.close()
        wait_until(lambda: not list(folder.iterdir()))
        wait_until(lambda: ask(path, "HEAD").status == 200)


def test_who_takes_nothing_is_left(
    run: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patching, "_PATIENCE", 0.5)
    _large(tmp_path)
    with serving(run) as ask, _begun(ask, "/v1/large@11/patch?base=large@10"):
        wait_until(lambda: bool(list((tmp_path / "temporary").iterdir())))
        wait_until(lambda: not list((tmp_path / "temporary").iterdir()))


@pytest.mark.matrix  # a server waits for five seconds
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # of uvloop, which would wait for ever if it raised
def test_a_server_that_ends_leaves_nothing(run: Catalog, tmp_path: Path) -> None:
    _large(tmp_path)
    with serving(run) as ask:
        client = _begun(ask, "/v1/large@11/patch?base=large@10")
        wait_until(lambda: bool(list((tmp_path / "temporary").iterdir())))
    wait_until(lambda: not list((tmp_path / "temporary").iterdir()))
    client.close()


def _begun(ask: Client, path: str) -> socket.socket:
    """A client that asks, and takes no more than its connection does."""
    place = urlsplit(ask.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((str(place.hostname), int(place.port or 0)))
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
    return client


def test_what_is_refused(run: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(run, {"foreign": opened(trained(1))}) as ask:

        def refused(path: str, status: int, text: str) -> None:
            answer = ask(f"/v1/{path}")
            assert answer.status == status, answer.body
            assert text in json.loads(answer.body)["error"]

        refused("run7@3/patch", 400, "lacks 'base'")
        refused("run7@3/patch?base=", 400, "lacks 'base'")
        refused("run7@3/patch?base=run7@9", 404, "no checkpoint")
        refused(
            f"run7@3/patch?base={quote(str(tmp_path / 'other'), safe='')}", 404, "no checkpoint"
        )
        refused("run7@3/patch?base=foreign", 422, "on which none can be based")
        for name in ("..", ".", "a%2Fb", "%00", ".ucf-x"):
            refused(f"run7@3/patch?base=run7@1&base_name={name}", 400, "no name of a folder")
        second = run.get(str(tmp_path / "run" / "2")).id
        refused(f"run7@3/patch?base={second}&base_name=1", 400, "name of another base")
        monkeypatch.setattr(patching, "_UNREAD", 1000)
        refused("foreign/patch?base=run7@1", 422, "has no fingerprints")
        monkeypatch.setattr(patching, "_LARGEST", 5000)
        refused("run7@3/patch?base=run7@1", 422, "a file of tensors has")
        monkeypatch.setattr(patching, "_LARGEST", 1000)
        refused("run7@3/patch?base=run7@1", 422, "the file tokenizer.json has")


def test_a_token_is_told_of_nothing_else(run: Catalog, tmp_path: Path) -> None:
    second = run.get(str(tmp_path / "run" / "2")).id
    scopes = {
        "some": "step in (1, 3)",
        "late": f"step = 3 or id = '{second}'",
        "run": f"step > 0 or id = '{second}'",
    }
    tokens = [token(name, scope) for name, scope in scopes.items()]
    with serving(run, tokens=tokens) as ask:
        some, late = bearer("some"), bearer("late")
        answer = ask("/v1/run7@3/patch?base=run7@1", **some)
        assert answer.status == 200
        assert str(tmp_path).encode() not in answer.body
        assert ask("/v1/run7@3/patch?base=other@0", **some).status == 404
        assert ask("/v1/other@0/patch?base=run7@1", **some).status == 404
        hidden = ask(f"/v1/run7@3/patch?base={second}", **late)
        assert hidden.status == 404, "it has another base"
        assert run.get("run7@1").id.encode() not in hidden.body
        below = ask(f"/v1/run7@3/patch?base={second}", **bearer("run"))
        with tarfile.open(fileobj=io.BytesIO(below.body)) as tar:
            data = tar.extractfile("manifest.json")
            assert data is not None
            bases = json.load(data)["bases"]
        assert {doc["url"] for doc in bases} == {f"../{second}", f"../{run.get('run7@1').id}"}
    sent = unpacked(answer.body, tmp_path / "sent")
    shutil.copytree(tmp_path / "run" / "1", tmp_path / run.get("run7@1").id)
    assert is_read(ucformat.open(sent), trained(3))


def test_a_request_that_is_cancelled_counts_until_its_thread_ends() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def plan(*_: Any) -> Patch:
        begun.set()
        assert goes_on.wait(30)
        raise UsageError("of a request that nobody waits for")

    async def cancel() -> None:
        patches = patching.Patches(mock.Mock())
        with mock.patch.object(patches, "plan", plan):
            request = asyncio.ensure_future(patches.response("a", "b", None, mock.Mock()))
            await asyncio.to_thread(begun.wait, 30)
            request.cancel()
            await asyncio.wait([request])
            assert (request.cancelled(), patches.count) == (True, 1)
            goes_on.set()
            while patches.count:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(cancel(), 30))
