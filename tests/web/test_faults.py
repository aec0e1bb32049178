"""What fails while it is sent is an error for the client, and never looks whole."""

from __future__ import annotations

import http.client
import shutil
import socket
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import ucformat
from tests.exporters.sources import opened
from tests.s3 import set_environment
from tests.s3_files import serving_files
from tests.web.serving import bearer, serving, token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.s3_files import ServedByProcess
    from tests.web.serving import Client

MIB = 1 << 20
ARRAY = np.random.default_rng(1).integers(0, 1 << 31, 12 << 20, "i4")  # 48 MiB
PATHS = {
    "file": "/m/resolve/main/model.safetensors",
    "tensor": "/v1/m/tensor/w?format=raw",
    "chunk": "/v1/m/zarr/weight/w/c/0",
    "slice": "/v1/m/tensor/w?format=raw&slice=100:",
}


@pytest.fixture(autouse=True)
def _no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_DEADLINE", "1")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint with a tensor of three chunks."""
    place = tmp_path_factory.mktemp("written") / "m"
    ucformat.convert(
        opened({("w", "weight"): ARRAY}), place, chunk_bytes=16 * MIB, shard_bytes=64 * MIB
    )
    return place


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of it, that may be destroyed."""
    shutil.copytree(written, tmp_path / "files" / "m")
    return tmp_path / "files" / "m"


@pytest.fixture
def bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedByProcess]:
    """An endpoint of S3, a process, that has it."""
    set_environment(monkeypatch)
    with serving_files(folder.parent) as served:
        monkeypatch.setenv("UCP_ENDPOINT", served.endpoint)
        yield served


class Clock:
    """A clock that shows what it is told last."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def time(self) -> float:
        return self._times[-1]


@contextmanager
def slowly(ask: Client, path: str, **headers: Any) -> Iterator[http.client.HTTPResponse]:
    """An answer to a client that has taken little of it."""
    place = urlsplit(ask.url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    try:
        connection.request("GET", path, headers=headers)
        yield connection.getresponse()
    finally:
        connection.close()


def broken_off(ask: Client, path: str, break_it: Callable[[], object], **headers: Any) -> None:
    """Break something when a part was sent: the rest is an error, and what has come was right."""
    whole = ask(path, **headers)
    assert whole.status == 200
    with slowly(ask, path, **headers) as answer:
        assert answer.status == 200
        begun = answer.read(MIB)
        break_it()
        with pytest.raises((http.client.HTTPException, ConnectionError)) as caught:
            answer.read()
    assert isinstance(caught.value, http.client.IncompleteRead)
    came = begun + caught.value.partial
    assert MIB <= len(came) < len(whole.body)
    assert came == whole.body[: len(came)]
    assert ask("/v1/openapi.json", **headers).status in (200, 401)


@pytest.mark.front("file-killed", "chunk-deleted")
@pytest.mark.parametrize("fault", ["killed", "deleted", "replaced"])
@pytest.mark.parametrize("path", PATHS)
def test_storage_that_fails_in_mid_stream(
    bucket: ServedByProcess, folder: Path, path: str, fault: str
) -> None:
    def replace_files() -> None:
        for file in (folder / "data").rglob("*"):
            if file.is_file():
                file.write_bytes(bytes(file.stat().st_size))

    def kill() -> None:
        bucket.process.kill()
        bucket.process.wait()

    faults: dict[str, Callable[[], object]] = {
        "killed": kill,
        "deleted": lambda: shutil.rmtree(folder),
        "replaced": replace_files,
    }
    ck = ucformat.open(bucket.url("m"))
    with serving(places={"m": ck}) as ask:
        broken_off(ask, PATHS[path], faults[fault])
        with suppress(http.client.IncompleteRead):  # of a file that begins with a header
            assert ask(PATHS[path]).status >= 400


@pytest.mark.front("file")
@pytest.mark.parametrize("path", PATHS)
def test_files_that_are_deleted_in_mid_stream(folder: Path, path: str) -> None:
    with serving(places={"m": ucformat.open(folder)}) as ask:
        broken_off(ask, PATHS[path], lambda: shutil.rmtree(folder))


@pytest.mark.front("file")
@pytest.mark.parametrize("path", PATHS)
def test_a_token_that_expires_in_mid_stream(
    folder: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("ucformat.web.library.time", Clock(now))
    given = [token("t", expires=1.0)]
    with serving(places={"m": ucformat.open(folder)}, tokens=given) as ask:
        broken_off(ask, PATHS[path], lambda: now.append(1.0), **bearer("t"))
        assert ask(PATHS[path], **bearer("t")).status == 401
