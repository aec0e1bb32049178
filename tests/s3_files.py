"""A folder, served as a bucket of S3 that can only be read: by a process of its own that sends files as the kernel can.

`python -m tests.s3_files FOLDER [LATENCY]` prints its port. moto's server keeps all in memory and
takes longer over a request than any client; this one counts what it is asked for and is never what
is waited for.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit
from urllib.request import urlopen
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BUCKET", "Counts", "Served", "ServedByProcess", "serving_files"]

BUCKET = "files"


@dataclass(frozen=True)
class Counts:
    """What was asked for: requests of all kinds, those of them that are GETs of objects, and bytes of bodies.

    `most` of them waited for their answers to begin at once.
    """

    requests: int
    reads: int
    nbytes: int
    most: int


@dataclass(frozen=True)
class Served:
    """A folder at an endpoint."""

    endpoint: str

    def url(self, path: str) -> str:
        """The url of a file or folder in it."""
        return f"s3://{BUCKET}/{path}"

    def counts(self) -> Counts:
        """What was asked for since this was asked the last time."""
        with urlopen(f"{self.endpoint}/-counts") as answer:  # noqa: S310 - our own server
            return Counts(**json.load(answer))


@dataclass(frozen=True)
class ServedByProcess(Served):
    """A folder at the endpoint of a process that a test may kill."""

    process: subprocess.Popen[str]


@contextmanager
def serving_files(folder: Path, latency: float = 0) -> Iterator[ServedByProcess]:
    """Serve a folder; each answer begins `latency` seconds after its request."""
    command = [sys.executable, "-m", "tests.s3_files", str(folder), str(latency)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield ServedByProcess(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
        finally:
            process.terminate()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, latency: float) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.folder, self.latency = folder.absolute(), latency
        self.lock = threading.Lock()
        self.counted = [0, 0, 0]
        self.answering = self.most = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        with self.lock:
            self.answering += 1
            self.most = max(self.most, self.answering)
        try:
            yield
        finally:
            with self.lock:
                self.answering -= 1

    def count(self, reads: int, nbytes: int) -> None:
        with self.lock:
            self.counted = [a + b for a, b in zip(self.counted, (1, reads, nbytes), strict=True)]

    def take_counts(self) -> bytes:
        with self.lock:
            counted, self.counted = [*self.counted, self.most], [0, 0, 0]
            self.most = 0
        return json.dumps(
            dict(zip(("requests", "reads", "nbytes", "most"), counted, strict=True))
        ).encode()


class _Connection(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        sock: socket.socket = self.request
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pending = b""
        try:
            while True:
                while b"\r\n\r\n" not in pending:
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    pending += data
                head, _, pending = pending.partition(b"\r\n\r\n")
                self.answer(sock, head.decode("latin-1"))
        except ConnectionError:
            return

    def answer(self, sock: socket.socket, head: str) -> None:
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ")
        headers = {
            k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)
        }
        parts = urlsplit(target)
        if parts.path == "/-counts":
            _send(sock, "200 OK", self.server.take_counts(), "application/json")
            return
        with (
            self.server.one()
        ):  # not while it is sent: the client asks again before this thread knows that all is sent
            time.sleep(self.server.latency)
        self.serve(sock, method, headers, parts)

    def serve(
        self, sock: socket.socket, method: str, headers: dict[str, str], parts: SplitResult
    ) -> None:
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        if method not in ("GET", "HEAD") or bucket != BUCKET:
            self.server.count(0, 0)
            _send(sock, "501 Not Implemented", b"")
        elif key:
            self.send_object(sock, key, headers.get("range", ""), head=method == "HEAD")
        else:
            body = _listing(self.server.folder, {k: v[0] for k, v in parse_qs(parts.query).items()})
            self.server.count(0, len(body))
            _send(sock, "200 OK", body, "application/xml")

    def send_object(self, sock: socket.socket, key: str, wanted: str, *, head: bool) -> None:
        path = self.server.folder / key
        if not path.is_file():
            body = b"" if head else b"<Error><Code>NoSuchKey</Code></Error>"
            self.server.count(0, len(body))
            _send(sock, "404 Not Found", body, "application/xml")
            return
        with path.open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            begin, end = _range(wanted, stat.st_size)
            status = "206 Partial Content" if wanted else "200 OK"
            if wanted and begin >= stat.st_size:
                self.server.count(0, 0)
                _send(sock, "416 Range Not Satisfiable", b"")
                return
            lines = [
                f"HTTP/1.1 {status}",
                f"Content-Length: {end - begin}",
                f"ETag: {_etag(stat)}",
                f"Last-Modified: {formatdate(stat.st_mtime, usegmt=True)}",
                "Accept-Ranges: bytes",
                "Content-Type: application/octet-stream",
                *([f"Content-Range: bytes {begin}-{end - 1}/{stat.st_size}"] if wanted else []),
            ]
            self.server.count(not head, 0 if head else end - begin)
            more = 0 if head or begin == end else socket.MSG_MORE
            sock.sendall("\r\n".join([*lines, "", ""]).encode(), more)
            while not head and begin < end:
                begin += os.sendfile(sock.fileno(), file.fileno(), begin, end - begin)


def _range(wanted: str, size: int) -> tuple[int, int]:
    """From where to where; of a suffix, too."""
    if not wanted:
        return 0, size
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


def _etag(stat: os.stat_result) -> str:
    return f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'


def _send(sock: socket.socket, status: str, body: bytes, kind: str = "text/plain") -> None:
    sock.sendall(
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def _listing(folder: Path, query: dict[str, str]) -> bytes:
    """All keys below a prefix, on one page."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    found, common = [], set()
    for path in sorted((folder / prefix.rpartition("/")[0]).rglob("*")):
        key = path.relative_to(folder).as_posix()
        if not path.is_file() or not key.startswith(prefix):
            continue
        below, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        if cut:
            common.add(f"{prefix}{below}{delimiter}")
            continue
        stat = path.stat()
        modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stat.st_mtime))
        name = quote(key) if "encoding-type" in query else escape(key)
        found.append(
            f"<Contents><Key>{name}</Key><LastModified>{modified}</LastModified><ETag>{_etag(stat)}</ETag>"
            f"<Size>{stat.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )
    folders = "".join(
        f"<CommonPrefixes><Prefix>{escape(c)}</Prefix></CommonPrefixes>" for c in sorted(common)
    )
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>{BUCKET}</Name>'
        f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found) + len(common)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{''.join(found)}{folders}</ListBucketResult>"
    ).encode()


if __name__ == "__main__":
    with _Server(Path(sys.argv[1]), float(sys.argv[2])) as server:
        print(server.server_address[1], flush=True)  # noqa: T201
        server.serve_forever()
