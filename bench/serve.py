"""Serving: virtual safetensors of a DeepSpeed folder beside nginx with an exported file, and many slow clients.

`python -m bench.serve [--rounds N]` (nginx from the system: `apt-get install nginx-light`). Everything is in the page
cache. One client reads into memory that it uses again; rounds are interleaved. The first byte is that of a request
for 100 bytes of a file of an opened checkpoint, with a new connection. Memory is the resident memory of the server
with 200 clients that read 64 KiB each second, above that before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import ucformat
from bench.common import OUT, median, ours, real_checkpoint, table, targets

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS = 200
SECONDS = 10
FILE = "model.safetensors"
NGINX = """
user root; worker_processes 1; daemon off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
  access_log off; sendfile on; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if nginx is None:
        sys.exit("nginx is missing: apt-get install nginx-light")
    source = real_checkpoint()
    folder = Path(tempfile.mkdtemp(dir=OUT))
    try:
        measure(source, folder, nginx, rounds)
    finally:
        shutil.rmtree(folder)


def measure(source: Path, folder: Path, nginx: str, rounds: int) -> None:
    ucformat.export(source, folder / "exported", "safetensors")
    ucformat.convert(source, folder / "universal", states=["master"])
    (file,) = (folder / "exported").glob("*.safetensors")
    nbytes = file.stat().st_size
    refs = [
        f"deepspeed={source}",
        f"safetensors={folder / 'exported'}",
        f"universal={folder / 'universal'}",
    ]
    with running_nginx(nginx, folder) as plain, running_ucp(refs) as (url, pid):
        urls = {
            "nginx, exported file": f"{plain}/exported/{FILE}",
            "ucp serve, DeepSpeed": f"{url}/deepspeed/resolve/main/{FILE}",
            "ucp serve, safetensors": f"{url}/safetensors/resolve/main/{FILE}",
            "ucp serve, universal": f"{url}/universal/resolve/main/{FILE}",
        }
        seconds: dict[str, list[float]] = {name: [] for name in urls}
        first: dict[str, list[float]] = {name: [] for name in urls}
        for number in range(rounds + 1):
            for name, place in urls.items():
                taken = download(place, nbytes)
                if number:
                    seconds[name].append(taken)
                first[name].append(download(place, 100, "bytes=0-99"))
        rows = [
            [
                name,
                f"{nbytes / median(seconds[name]) / 1e9:.2f} GB/s",
                f"{median(seconds['nginx, exported file']) / median(seconds[name]):.2f}",
                f"{1000 * median(first[name]):.1f} ms",
            ]
            for name in urls
        ]
        before = resident(pid)
        above = slow_clients(urls["ucp serve, DeepSpeed"], pid) - before
    print(table(["", "speed", "of nginx", "first byte"], rows))
    ratio = median(seconds["nginx, exported file"]) / median(seconds["ucp serve, DeepSpeed"])
    print(f"\n{CLIENTS} slow clients: {above / 1e6:.0f} MB above the start.\n")
    print(
        targets(
            ("speed of virtual files of DeepSpeed, of nginx", ">= 0.7", ratio),
            ("first byte, ms", "<= 50", 1000 * median(first["ucp serve, DeepSpeed"])),
            ("memory for 200 clients, MB", "<= 100", above / 1e6),
        )
    )


@contextmanager
def running_nginx(nginx: str, folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    configuration = folder / "nginx.conf"
    configuration.write_text(
        NGINX.format(folder=folder.resolve(), port=port, root=folder.resolve())
    )
    with subprocess.Popen(
        [nginx, "-c", configuration.resolve()], stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_for(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@contextmanager
def running_ucp(refs: list[str]) -> Iterator[tuple[str, int]]:
    command = [ours(), "-m", "ucformat", "serve", *refs, "--port", "0", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    sys.exit("nginx does not answer")


def request(url: str, chosen: str | None = None) -> socket.socket:
    """Ask for a file, and return the connection."""
    place = urlsplit(url)
    connection = socket.create_connection((place.hostname, place.port))
    lines = [f"GET {place.path} HTTP/1.1", f"Host: {place.netloc}", "Connection: close"]
    lines += [f"Range: {chosen}"] if chosen else []
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    return connection


def download(url: str, nbytes: int, chosen: str | None = None) -> float:
    """Seconds for a file, or a range of it."""
    begun = time.perf_counter()
    memory = bytearray(4 << 20)
    received = 0
    with request(url, chosen) as connection:
        while count := connection.recv_into(memory):
            if not received:
                assert bytes(memory[9:12]) in (b"200", b"206"), memory[:200]
            received += count
    assert received > nbytes, received
    return time.perf_counter() - begun


def slow_clients(url: str, pid: int) -> int:
    """The most resident memory of a server with clients that read slowly."""
    connections = [request(url) for _ in range(CLIENTS)]
    most = 0
    for _ in range(SECONDS):
        begun = time.perf_counter()
        for connection in connections:
            connection.recv(64 << 10)
            most = max(most, resident(pid))
        time.sleep(max(0.0, begun + 1 - time.perf_counter()))
    for connection in connections:
        connection.close()
    return most


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
