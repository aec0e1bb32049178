"""What ranks go through in `test_strangers.py`: somebody calls every port that they open."""

from __future__ import annotations

import pickle
import socket
import struct
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from tests.patience import PATIENCE, wait_until
from tests.torch.attack import Attack
from tests.torch.faults_program import SMALL, TIMEOUT, guard_writers, state_of
from tests.torch.threads_program import children
from ucformat.torch import async_save
from ucformat.torch.comm.group import group_of

_HELLO = struct.Struct("<8sIIB32s")
_LISTENS = "0A"
_TIMES = 12  # enough that strangers have all places
_LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def said_by_strangers(tmp_path: Path) -> list[bytes]:
    """A pickle, as it is and as gloo's frames and ours had it; garbage; a hello that nobody proves."""
    attack = pickle.dumps(Attack(tmp_path / "ran"))
    hello = _HELLO.pack(b"ucformat", 1, 0, 0, bytes(32))
    size = np.int64(len(attack)).tobytes()
    return [
        attack,
        size + attack,
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(10_000),
        hello,
        hello + bytes(32),
        hello + attack,
        _HELLO.pack(b"ucformat", 0xFFFFFFFF, 0xFFFFFFFF, 255, bytes(32)) + bytes(32),
    ]


def ports(pid: str) -> list[tuple[str, int]]:
    """Where a process listens, as the kernel writes addresses."""
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def attacked(folder: Path) -> Any:
    """Save in the background while strangers call; the id, ports of more than the loopback, and how many calls."""
    guard_writers(folder)
    rank = dist.get_rank()
    before = ports("self")  # of the training's own group
    group_of(timeout=TIMEOUT)
    (folder / f"hold-{rank}").touch()
    handle = async_save(state_of(1), folder / "saved", timeout=TIMEOUT, **SMALL)
    (writer,) = children()
    strangers = []
    wide: list[tuple[str, int]] = []
    called = 0
    times: Counter[int] = Counter()

    def call() -> bool:
        nonlocal called
        for address, port in {*ports("self"), *ports(writer)} - set(before):
            if address not in _LOOPBACK:
                wide.append((address, port))
            times[port] += 1
            if times[port] > _TIMES:
                continue
            for said in said_by_strangers(folder):
                with suppress(OSError):
                    stranger = socket.create_connection(("127.0.0.1", port), 5)
                    stranger.sendall(said)
                    strangers.append(stranger)
                    called += 1
        return (folder / f"writing-{rank}").exists()

    wait_until(call)
    (folder / f"hold-{rank}").unlink()
    found = handle.wait(PATIENCE).id, wide, called
    for stranger in strangers:
        stranger.close()
    return found
